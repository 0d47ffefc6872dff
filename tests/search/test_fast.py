import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realrl.errors import GraphError
from realrl.graph.build import build_graph
from realrl.graph.mfc import InterfaceType, MFCDef, ModelName, OffloadHook, ParamReallocHook
from realrl.mesh.device_mesh import Cluster, ParallelStrategy
from realrl.search.fast import Model, Moved, Parts, Price, bars_of, busiest, finish_times, slowest_cycle
from realrl.search.flow import Cycle, Flow, Move, cycles_of, flow_of
from realrl.search.space import Choice, Placed, relation
from tests.search.problems import AlikeDevices, all_plans, problem

GENERATE, INFERENCE, TRAIN = InterfaceType.GENERATE, InterfaceType.INFERENCE, InterfaceType.TRAIN_STEP
WHOLE, LEFT, RIGHT = (0, 4), (0, 2), (2, 4)


def graph_of(*, staleness=0, post_hooks=()):
    """Generation and training of one role, and a reference that reads what was generated."""
    mfcs = [
        MFCDef("gen", "actor", GENERATE, "x", ("prompt_ids",), ("ids",), n_seqs=8, max_staleness=staleness),
        MFCDef("ref", "ref", INFERENCE, "x", ("ids",), ("logprobs",), n_seqs=8, post_hooks=(OffloadHook(),)),
        MFCDef("train", "actor", TRAIN, "x", ("ids", "logprobs"), n_seqs=8, post_hooks=post_hooks),
    ]
    return build_graph(mfcs, ["prompt_ids"])


class Table(AlikeDevices):
    """Prices by call; moves by relation."""

    def __init__(self, seconds, moves=None, n_bytes=0, **bytes_of):
        self.seconds, self.moves, self.n_bytes, self.bytes = seconds, moves or {}, n_bytes, bytes_of

    def call(self, call, choice):
        return Price(self.seconds[call], *(self.bytes.get(call, {}).get(what, 0) for what in ("kept", "used")))

    def on_devices(self, call, choice):
        begun = self.bytes.get(call, {}).get("begun")
        there = None if begun is None else np.full(choice.n_devices, begun)
        return replace(super().on_devices(call, choice), begun=there)

    def move(self, calls, source, target, relation):
        return Moved(self.moves.get((*calls, relation), 0.0), self.n_bytes)


def placed(span):
    return Placed(span, Choice(ParallelStrategy(span[1] - span[0])))


def model(prices, capacity=float("inf"), weightless=(), **changes):
    return Model(flow_of(graph_of(**changes), weightless=weightless), prices, Cluster(1, 4), capacity)


def period(spans, prices, **changes):
    return model(prices, **changes).period([placed(span) for span in spans])


def test_calls_of_a_step_follow_one_another():
    prices = Table({"gen": 5.0, "ref": 2.0, "train": 3.0})
    assert period([WHOLE] * 3, prices) == 10.0
    assert period([LEFT, RIGHT, LEFT], prices) == 10.0  # data and versions order all of them


def test_generation_that_may_be_stale_runs_beside_training():
    prices = Table({"gen": 5.0, "ref": 2.0, "train": 3.0})
    assert period([LEFT, RIGHT, RIGHT], prices) == 10.0
    assert period([LEFT, RIGHT, RIGHT], prices, staleness=1, weightless=["actor"]) == 5.0
    assert period([WHOLE] * 3, prices, staleness=1) == 10.0  # they still share the devices


def test_devices_of_a_home_and_of_a_call_elsewhere_meet_even_if_nothing_moves():
    prices = Table({"gen": 5.0, "ref": 2.0, "train": 3.0})
    assert period([LEFT, RIGHT, RIGHT], prices, staleness=1) == 5.0 + 2.0  # the home is idle after the reference


def test_hooks_of_calls_that_start_together_go_ahead_of_them():
    homes = [Parts(0.0, 0.0, 0.0, WHOLE)] * 2
    calls = [Parts(1.0, 5.0, 0.0, LEFT, (WHOLE, LEFT)), Parts(1.0, 7.0, 0.0, RIGHT, (WHOLE, RIGHT))]
    flow = Flow(("a", "b", "c", "d"), ((), (), ((0, 0),), ((0, 0),)), ((),) * 4, (2, 3, 2, 3), (), ())
    assert finish_times(flow, [*calls, *homes])[1] == 2.0 + 7.0
    beneath = [calls[0], Parts(1.0, 7.0, 0.0, LEFT, (WHOLE, LEFT))]  # a device holds parameters of one call at a time
    assert finish_times(flow, [*beneath, *homes])[1] == 6.0 + 8.0


def split(n_split, calls, n_steps=1):
    """Ends of steps of a generation on all devices, whose readers are the calls; the last two are their homes."""
    n = len(calls)
    homes = [*range(1 + n, 1 + 2 * n)]
    flow = Flow(
        tuple(map(str, range(1 + 2 * n))), ((), *[((0, 0),)] * n, *[((call, 0),) for call in range(1, 1 + n)]),
        ((),) * (1 + 2 * n), (0, *homes, *homes), (), (), readers=(frozenset(range(1, 1 + n)), *[frozenset()] * 2 * n),
    )  # fmt: skip
    gen = Parts(0.0, 5.0, 0.0, WHOLE, n_split=n_split)
    return finish_times(flow, [gen, *calls, *[Parts(0.0, 0.0, 0.0, WHOLE)] * n], n_steps)[1]


def test_readers_of_a_split_call_start_before_all_its_ranks_have_answered():
    """The second of them finds devices whose queues are full, so that its hooks come after the first one's work."""
    calls = [Parts(1.0, 5.0, 0.0, RIGHT, (LEFT, RIGHT)), Parts(1.0, 7.0, 0.0, LEFT, (RIGHT, LEFT))]
    assert split(0, calls) == 5.0 + 2.0 + 7.0
    assert split(1, calls) == 5.0 + 6.0 + 8.0
    alone = [Parts(0.0, 5.0, 0.0, RIGHT), Parts(0.0, 7.0, 0.0, LEFT)]
    assert split(0, alone) == split(1, alone) == split(2, alone) == 5.0 + 7.0


def test_of_several_split_replicas_all_but_the_last_are_free():
    """A call that needs all of their devices finds the last ones busy; one that needs a part of them, none."""
    calls = [Parts(1.0, 5.0, 0.0, WHOLE, (WHOLE,)), Parts(0.0, 7.0, 0.0, LEFT), Parts(0.0, 7.0, 0.0, RIGHT)]
    found = {n: [*ready(calls, n)] for n in (0, 1, 2)}
    assert found[0] == found[1] == [1]  # it goes ahead of those that need no others
    assert found[2] == [2, 3]


def ready(calls, n_split):
    """Calls that start first after a generation of the second step, while another call is in the first one."""
    parts = [Parts(0.0, 5.0, 0.0, WHOLE, n_split=n_split), *calls, Parts(0.0, 50.0, 0.0, (4, 8))]
    readers = (frozenset({1, 2, 3}), *[frozenset()] * 4)
    flow = Flow(tuple("01234"), ((), ((0, 0),), ((0, 0),), ((0, 0),), ()), ((),) * 5, (-1,) * 5, (), (), 1, readers)
    bars = sorted(bars_of(flow, parts, since=0, until=3), key=lambda bar: bar[1])
    second = [bar for bar in bars if bar[0] == 0][1]
    later = [bar for bar in bars if bar[1] >= second[2] and bar[0] not in (0, 4)]
    return [call for call, start, _ in later if start <= later[0][1]]


def test_readers_wait_for_data_alone():
    """A train_step that changes what a call reads waits until the call is complete."""
    flow = flow_of(graph_of())
    assert [sorted(some) for some in flow.readers] == [[1, 2], [2], []]


def test_parameters_come_before_a_call_and_keep_the_home_from_working():
    prices = Table({"gen": 5.0, "ref": 2.0, "train": 3.0}, {("train", "gen", "beside"): 0.5})
    assert period([LEFT, RIGHT, RIGHT], prices) == 10.5
    # a generation ahead of its time waits until its home is idle: after the reference, ahead of training
    assert period([LEFT, RIGHT, RIGHT], prices, staleness=1) == 5.0 + 2.0 + 0.5
    assert model(prices).period([placed(s) for s in (LEFT, RIGHT, RIGHT)], moves=False) == 10.0


def test_moves_between_equal_layouts_are_not_asked_for():
    prices = Table({"gen": 5.0, "ref": 2.0, "train": 3.0}, {("train", "gen", "same"): 9.0})
    assert period([WHOLE] * 3, prices) == 10.0


def test_hooks_after_a_call_delay_the_next_ones():
    hooks = (ParamReallocHook(target=ModelName("ref"), eta=0.1),)
    prices = Table({"gen": 5.0, "ref": 2.0, "train": 3.0}, {("train", "ref", "same"): 1.0})
    found = model(prices, post_hooks=hooks)
    assert Move(2, 2, 1, is_after=True) in found.flow.moves
    assert found.period([placed(WHOLE)] * 3) == 11.0


def test_a_call_that_was_queued_runs_before_one_that_is_more_urgent_but_later():
    calls = ("first", "urgent", "long", "queued", "last")
    waits = ((), ((0, 0),), (), (), ((1, 0),))
    flow = Flow(calls, waits, ((),) * 5, tuple(range(5)), (), ())
    parts = [Parts(0.0, s, 0.0, mesh) for s, mesh in ((5, RIGHT), (2, LEFT), (10, LEFT), (3, LEFT), (4, RIGHT))]
    # on the left: long until 10, queued until 13, urgent until 15; then last on the right
    assert finish_times(flow, parts)[1] == 19.0


def test_of_calls_that_end_together_the_one_that_was_sent_first_is_heard_of_first():
    calls = ("first", "second", "of second", "of first", "last")
    waits = ((), (), ((1, 0),), ((0, 0),), ((2, 0),))
    flow = Flow(calls, waits, ((),) * 5, tuple(range(5)), (), ())
    parts = [Parts(0.0, s, 0.0, mesh) for s, mesh in ((5, LEFT), (5, RIGHT), (4, RIGHT), (3, RIGHT), (10, LEFT))]
    # on the right until 5, 8 and 12, although "of second" is the more urgent one; then last on the left
    assert finish_times(flow, parts)[1] == 22.0


def test_flow_names_homes_and_waits():
    flow = flow_of(graph_of())
    assert flow.names == ("gen", "ref", "train")
    assert flow.homes == (2, 1, 2)
    assert flow.moves == (Move(0, 2, 0),)
    assert flow.waits == (((2, 1),), ((0, 0),), ((0, 0), (1, 0)))
    weightless = flow_of(graph_of(), weightless=["ref"])
    assert weightless.homes == (2, -1, 2)


def test_memory_of_all_roles_that_live_on_a_device():
    prices = Table(
        dict.fromkeys(("gen", "ref", "train"), 1.0),
        n_bytes=20,  # of a move
        gen={"kept": 999, "used": 3},  # its role lives where it is trained
        ref={"kept": 10, "used": 1},
        train={"kept": 50, "used": 30},
    )
    found = model(prices, capacity=90)
    assert found.overflow([placed(WHOLE)] * 3) == 0.0
    assert found.overflow([placed(LEFT), placed(WHOLE), placed(WHOLE)]) == 0.0
    assert model(prices, capacity=89).overflow([placed(WHOLE)] * 3) == 1.0
    assert model(prices, capacity=82).overflow([placed(RIGHT), placed(WHOLE), placed(LEFT)]) == 8.0
    assert model(prices, capacity=30).overflow([placed(RIGHT), placed(RIGHT), placed(RIGHT)]) == 60.0


@pytest.mark.parametrize(
    ("seen_from", "other", "expected"),
    [
        ((0, 8), (0, 8), "same"),
        ((0, 8), (4, 6), "inside"),
        ((4, 6), (0, 8), "around"),
        ((0, 2), (2, 4), "beside"),
        ((0, 2), (8, 10), "apart"),
        ((8, 16), (0, 8), "apart"),
    ],
)
def test_relations(seen_from, other, expected):
    assert relation(seen_from, other, 8) == expected


def test_calls_that_wait_within_a_step_are_refused():
    with pytest.raises(GraphError, match="wait for each other within a step"):
        cycles_of([[(1, 0)], [(0, 0)]])


def test_calls_that_wait_for_ever_are_refused():
    flow = Flow(("a",), (((0, 0),),), ((),), (0,), (), ())
    with pytest.raises(GraphError, match="for ever"):
        finish_times(flow, [Parts(0.0, 1.0, 0.0, WHOLE)])


def test_cycles_count_each_call_and_no_looser_cycle():
    cycles = flow_of(graph_of(staleness=2)).cycles
    assert [(c.calls, c.lag) for c in cycles] == [((0,), 1), ((1,), 1), ((2,), 1), ((0, 1, 2), 3)]
    assert slowest_cycle(cycles, [Parts(1.0, s - 1.0, 0.0, LEFT) for s in (3.0, 3.0, 6.0)]) == 6.0


def test_all_calls_between_two_of_a_cycle_have_to_run_there():
    mfcs = [
        MFCDef("gen", "actor", GENERATE, "x", ("prompt_ids",), ("ids",), n_seqs=8),
        MFCDef("ref", "ref", INFERENCE, "x", ("ids",), ("logprobs",), n_seqs=8),
        MFCDef("rew", "reward", INFERENCE, "x", ("ids",), ("rewards",), n_seqs=8),
        MFCDef("other", "reward", INFERENCE, "x", ("prompt_ids",), ("more",), n_seqs=8),
        MFCDef("train", "actor", TRAIN, "x", ("ids", "logprobs", "rewards", "more"), n_seqs=8),
    ]
    flow = flow_of(build_graph(mfcs, ["prompt_ids"]))
    place = {name: i for i, name in enumerate(flow.names)}
    chain, between = (tuple(sorted(place[name] for name in names)) for names in (("gen", "train"), ("ref", "rew")))
    assert Cycle(chain, 1, between) in flow.cycles
    parts = [Parts(0.0, 4.0, 0.0, LEFT) for _ in flow.names]
    assert slowest_cycle([Cycle(chain, 1, between)], parts) == 4.0 + 4.0 + 4.0 + 4.0


def test_calls_before_the_last_one_of_a_role():
    """State that leaves the devices after its last call is there before it when a run begins."""
    flow = flow_of(graph_of())
    assert flow.names == ("gen", "ref", "train")
    assert flow.homes == (2, 1, 2)
    assert flow.before == (frozenset(), {0}, {1})
    prices = Table(dict.fromkeys(flow.names, 1.0), ref={"used": 5, "begun": 10}, gen={"used": 20}, train={"used": 25})
    model = Model(flow, prices, Cluster(1, 4))
    assert model.need([placed(WHOLE), placed(LEFT), placed(WHOLE)]) == 20 + 10
    assert model.need([placed(RIGHT), placed(LEFT), placed(WHOLE)]) == 25


def test_state_that_an_average_changes_is_there_meanwhile():
    hooks = (ParamReallocHook(target=ModelName("ref"), eta=0.1),)
    flow = flow_of(graph_of(post_hooks=hooks))
    assert flow.before == (frozenset(), {0, 2}, {1})
    prices = Table(dict.fromkeys(flow.names, 1.0), ref={"used": 5, "begun": 10}, gen={"used": 20}, train={"used": 25})
    model = Model(flow, prices, Cluster(1, 4))
    assert model.need([placed(WHOLE), placed(LEFT), placed(WHOLE)]) == 25 + 10


@settings(max_examples=60)
@given(st.integers(0, 10**6))
def test_devices_and_cycles_hold_in_runs_of_any_length(seed):
    found, n_steps = problem(seed), 12
    plans = list(all_plans(found))
    for plan in random.Random(seed).sample(plans, min(len(plans), 3)):
        parts = found.model.parts(plan)
        ends = finish_times(found.model.flow, parts, n_steps)
        assert ends == sorted(ends)
        assert len(ends) == n_steps + 1
        least = busiest(parts)
        assert all(least * step <= end * (1 + 1e-9) for step, end in enumerate(ends))
        for cycle in found.model.flow.cycles:
            least = max(least, slowest_cycle([cycle], parts))
            rounds = (n_steps - cycle.lag) // cycle.lag
            once = cycle.lag * slowest_cycle([cycle], parts)
            assert rounds * once <= ends[-1] * (1 + 1e-9)
        assert found.model.period(plan) >= least
