"""Reports and records of a step's calls become one row of metrics."""

import msgspec
import pytest

from realrl.algo.api import MetricSums
from realrl.graph.build import build_graph
from realrl.graph.mfc import MFCDef
from realrl.mesh.device_mesh import Cluster
from realrl.plan.hooks import plan_hooks
from realrl.plan.samples.transfer import Placement
from realrl.sched.calls import schedule_calls
from realrl.sched.messages import CallDone, Span
from realrl.sched.samples.in_flight import CallRecord
from realrl.sched.track.dispatch import Dispatch, plan_work
from realrl.sched.track.step_log import StepLog
from tests.sched.plans import INFERENCE, TRAIN, on_all

CLUSTER = Cluster(1, 4)
IDS = tuple(f"1/{i}" for i in range(6))


def calls_on(dp, *, weightless=(), protocol="3D_PROTO"):
    """A call that scores samples and one that trains, on four devices with `dp` slices."""
    mfcs = [
        MFCDef("score", "judge", INFERENCE, "x", ("prompt_ids",), ("k",), n_seqs=6, protocol=protocol),
        MFCDef("train", "a", TRAIN, "x", ("k",), n_seqs=6),
    ]
    graph, allocations = build_graph(mfcs, ["prompt_ids"]), on_all(mfcs, CLUSTER, dp)
    hooks = plan_hooks(graph, allocations, weightless=weightless)
    return schedule_calls(graph, allocations, hooks=hooks)


def dispatch(call, number=0, ids=IDS):
    placements = {key: dict.fromkeys(ids, Placement(frozenset((0,)))) for key in call.mfc.input_keys}
    work, arrivals = plan_work(call, ids, [1] * len(ids), placements, lambda rank: 0, key=(1, 1, 0))
    return Dispatch(number, call, 1, ids, work, arrivals)


def replies(given, ids_of, value_of=lambda i: float(i) ** 3 / 7, maximum=None):
    """Return what every rank says that worked on the samples ``ids_of(work)``."""
    for rank, work in given.work.items():
        values = [value_of(int(sample_id.split("/")[1])) for sample_id in ids_of(work)]
        yield CallDone(
            rank, 0, given.id, given.call.name, 1, None, {}, (Span(given.call.name, "call", 0.0, 1.0),),
            sums={"value/mean": (sum(values), len(values))} if values else {},
            maxima={"value/max": max(values)} if values else {},
        )  # fmt: skip


def metrics_of(calls, *batches):
    log = StepLog(calls)
    others = [(given, replies(given, lambda work: ())) for given in (dispatch(call, 99) for call in calls[1:])]
    for given, said in (*batches, *others):
        given.replies.update({reply.rank: reply for reply in said})
        record = given.record()
        log.add_call(msgspec.json.decode(msgspec.json.encode(record), type=CallRecord))  # as a checkpoint keeps it
    log.add_samples(1, dict.fromkeys(range(6), 1))
    return log.finish_step(1, {})


MEAN = sum(i**3 / 7 for i in range(6)) / 6


def ids_of_minibatches(work):
    return [sample_id for minibatch in work.minibatches for sample_id in minibatch]


@pytest.mark.parametrize("dp", [1, 2, 4])
@pytest.mark.parametrize("protocol", ["3D_PROTO", "ONE_TO_ALL", "DP_PROTO"])
def test_a_recorded_mean_counts_every_sample_once(dp, protocol):
    calls = calls_on(dp, protocol=protocol)
    given = dispatch(calls[0])
    metrics = metrics_of(calls, (given, replies(given, ids_of_minibatches)))
    assert metrics["value/mean"] == pytest.approx(MEAN, rel=1e-15)
    assert metrics["value/max"] == 125 / 7


@pytest.mark.parametrize("dp", [1, 2, 4])
@pytest.mark.parametrize("protocol", ["3D_PROTO", "ONE_TO_ALL"])
def test_ranks_without_parameters_work_on_what_they_keep(dp, protocol):
    calls = calls_on(dp, weightless=("judge",), protocol=protocol)
    given = dispatch(calls[0])
    metrics = metrics_of(calls, (given, replies(given, lambda work: work.keeps)))
    assert metrics["value/mean"] == pytest.approx(MEAN, rel=1e-15)


def test_slices_of_different_size_count_by_their_samples():
    calls = calls_on(2)
    given = dispatch(calls[0], ids=IDS[:3])
    metrics = metrics_of(calls, (given, replies(given, ids_of_minibatches)))
    assert metrics["value/mean"] == pytest.approx(sum(i**3 / 7 for i in range(3)) / 3, rel=1e-15)


def test_batches_of_a_step_add_up_in_any_order():
    calls = calls_on(4)
    parts = [dispatch(calls[0], n, IDS[a:b]) for n, (a, b) in enumerate([(0, 1), (1, 5), (5, 6)])]
    found = [
        metrics_of(calls, *[(part, list(replies(part, ids_of_minibatches))) for part in order])
        for order in (parts, parts[::-1])
    ]
    assert found[0]["value/mean"] == found[1]["value/mean"] == pytest.approx(MEAN, rel=1e-15)


def test_what_was_recorded_over_nothing_has_no_mean():
    calls = calls_on(4)
    given = dispatch(calls[0])
    said = [
        CallDone(rank, 0, 0, "score", 1, None, {}, (Span("score", "call", 0.0, 1.0),), sums={"empty/mean": (0.0, 0.0)})
        for rank in range(4)
    ]
    assert "empty/mean" not in metrics_of(calls, (given, said))


def test_values_have_a_mean_and_a_standard_deviation():
    recorded = MetricSums()
    recorded.add_values("score", [1.0, 2.0, 6.0])
    recorded.add("other/mean_square", 8.0, 2)
    calls = calls_on(1)
    given = dispatch(calls[0])
    spans = (Span("score", "call", 0.0, 1.0),)
    said = [CallDone(rank, 0, 0, "score", 1, None, {}, spans, sums=recorded.sums) for rank in given.work]
    metrics = metrics_of(calls, (given, said))
    assert metrics["score/mean"] == pytest.approx(3.0)
    assert metrics["score/std"] == pytest.approx((14 / 3) ** 0.5)
    assert "score/mean_square" not in metrics
    assert metrics["other/mean_square"] == 4.0
