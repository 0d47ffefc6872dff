"""Calls that are faster while the other devices of their nodes wait, in the fast model and under the scheduler."""

import random

import pytest

from realrl.mesh.device_mesh import Cluster
from realrl.planner.evaluate import evaluate
from realrl.search.fast import bars_of
from realrl.search.sharing import waiting_shares
from realrl.sim import contention
from realrl.sim.cluster import SimulatedRun
from realrl.sim.workers import NO_CAUSE, Activity
from tests.planner.cases import everywhere, request_for, with_critic_apart
from tests.search.problems import all_plans, problem


def run_of(bars, spans, cluster):
    """A run of the real scheduler with bars of calls, named by their numbers."""
    activities = []
    for call, start, end in bars:
        ranks = range(*spans[call])
        activities.append(Activity(str(call), "call", dict.fromkeys(ranks, start), start, start,
                                   dict.fromkeys(ranks, end), NO_CAUSE))  # fmt: skip
    return SimulatedRun(cluster.n_devices, 0.0, 10.0, (), tuple(activities), (), None, ())


def test_shares_of_two_devices():
    bars = [(0, 0.0, 4.0), (1, 1.0, 3.0), (2, 4.0, 6.0), (3, 6.0, 9.0)]
    spans = [(0, 1), (1, 2), (0, 2), (1, 2)]
    assert waiting_shares(bars, spans, Cluster(1, 2)) == pytest.approx([0.5, 0.0, 0.0, 1.0])
    assert waiting_shares(bars, spans, Cluster(2, 1)) == [0.0] * 4  # there is nobody to wait


@pytest.mark.parametrize("seed", range(20))
def test_shares_are_those_of_the_scheduler(seed):
    found = problem(20_000 + seed)
    model = found.model
    for plan in random.Random(seed).sample(every := list(all_plans(found)), min(len(every), 20)):
        bars, spans = bars_of(model.flow, model.parts(plan)), [placed.span for placed in plan]
        expected = contention.waiting_shares(run_of(bars, spans, model.cluster), model.cluster.node_of)
        shares = waiting_shares(bars, spans, model.cluster)
        assert shares == pytest.approx([expected[str(call)] for call in range(len(plan))], abs=1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_no_call_is_faster_than_its_least_time(seed):
    found = problem(30_000 + seed, alone=random.Random(seed).uniform(1.0, 4.0))
    model, size = found.model, found.model.cluster.n_devices_per_node
    for plan in random.Random(seed).sample(every := list(all_plans(found)), min(len(every), 20)):
        bars, spans = bars_of(model.flow, model.parts(plan)), [placed.span for placed in plan]
        for call, share in enumerate(waiting_shares(bars, spans, model.cluster)):
            seconds = model.price(call, plan[call].choice).seconds
            least = model.least(call, plan[call].choice)
            assert least <= seconds * (1 - share + share / model.alone) * (1 + 1e-9)
            assert least == seconds or plan[call].choice.n_devices < size


@pytest.mark.parametrize("place", [lambda request: everywhere(request, "d2@0:0-1"), with_critic_apart])
def test_two_cores_take_as_long_as_under_the_scheduler(place):
    request = request_for("dataset.max_prompt_tokens=128", devices=2, hardware="two_cores", lengths=None)
    found = evaluate(request, place(request))
    assert found.fast_s == pytest.approx(found.period_s, rel=0.1)
