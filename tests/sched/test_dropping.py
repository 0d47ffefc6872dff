"""Calls that drop samples: every step is filled up, with the same samples in whatever order things happen."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realrl.errors import GraphError
from realrl.graph.build import build_graph, data_graph, drop_feeders, drop_gates
from realrl.graph.mfc import MFCDef, ModelName, OffloadHook, ParamReallocHook
from realrl.mesh.device_mesh import Allocation, Cluster, DeviceMesh, ParallelStrategy
from realrl.sched.events import Abort, FailureKind
from realrl.sched.samples.rounds import Rounds
from realrl.sched.track.track_plan import ResumePoint
from tests.sched.plans import GENERATE, INFERENCE, TRAIN, make_plan, on_all, plans, with_resume
from tests.sched.simulator import Simulation
from tests.sched.test_orders import ROWS, SEEDS, membership, orders


def grpo(n_seqs=4, *, gen_n_seqs=None, min_n_seqs=None, train_n_seqs=None, n_minibatches=1, **changes):
    """Generation, rewards, a filter, reference, training; `changes` are fields of single calls."""
    stream = {"n_seqs": n_seqs, "min_n_seqs": min_n_seqs}
    mfcs = [
        MFCDef("gen", "actor", GENERATE, "x", ("prompt_ids",), ("input_ids",), n_seqs=gen_n_seqs or n_seqs),
        MFCDef("rew", "reward", INFERENCE, "x", ("input_ids",), ("rewards",), **stream),
        MFCDef("filter", "rule", INFERENCE, "x", ("rewards",), ("kept_rewards",), may_drop=True, **stream),
        MFCDef("ref", "ref", INFERENCE, "x", ("input_ids",), ("ref_logprobs",), **stream),
        MFCDef("train", "actor", TRAIN, "x", ("input_ids", "kept_rewards", "ref_logprobs"),
               n_seqs=train_n_seqs or n_seqs, n_minibatches=n_minibatches),
    ]  # fmt: skip
    return [dataclasses.replace(mfc, **changes.get(mfc.name, {})) for mfc in mfcs]


def split(mfcs):
    """Generation and training on two devices each, the others on the third and fourth."""
    cluster = Cluster(1, 4)
    places = {"gen": (2, 3), "train": (0, 1), "rew": (0, 1), "filter": (2,), "ref": (3,)}
    return cluster, {
        mfc.name: Allocation(DeviceMesh(cluster, places[mfc.name]), ParallelStrategy(len(places[mfc.name])))
        for mfc in mfcs
    }


def split_plan(mfcs, **settings):
    cluster, allocations = split(mfcs)
    return make_plan(mfcs, allocations, cluster, **{"max_refill_rounds": 100, **settings})


# ---------------------------------------------------------------- whole runs


@orders(40)
@given(plan=plans(drops=True), seed=SEEDS, n_rows=ROWS, share=st.sampled_from([0.0, 0.2, 0.5]))
def test_any_plan_fills_its_steps_with_the_samples_that_the_rules_say(plan, seed, n_rows, share):
    simulation = Simulation(plan, seed=seed, n_rows=n_rows, drop_share=share).run()
    simulation.check_complete()
    assert simulation.start.last_step == plan.main.steps
    position = 0
    for report, (loaded, places) in zip(simulation.reports, simulation.expected_steps(plan.main.steps), strict=True):
        position += len(loaded)
        assert simulation.master.cursor_state(report.step).rows_consumed == position
        n_dropped = sum(n for name, n in report.metrics.items() if name.startswith("dropped/"))
        assert n_dropped == len(loaded) - len(places)


@pytest.mark.parametrize("seed", range(20))
def test_samples_without_a_place_do_not_count(seed):
    """A call drops that none comes after: survivors are done with before it is known whether they have a place."""
    mfcs = [
        MFCDef("filter", "a", INFERENCE, "x", ("prompt_ids",), ("k0",), n_seqs=6, may_drop=True),
        MFCDef("judge", "b", INFERENCE, "x", ("k0",), ("k1",), n_seqs=1, may_drop=True),
    ]
    cluster = Cluster(1, 2)
    plan = make_plan(mfcs, on_all(mfcs, cluster), cluster, n_steps=3, max_refill_rounds=100)
    simulation = Simulation(plan, seed=seed, n_rows=50, drop_share=0.5).run()
    assert [report.metrics["n_samples"] for report in simulation.reports] == [6.0] * 3
    assert sum(report.metrics["dropped/surplus"] for report in simulation.reports) > 0


@orders(12)
@given(plan=plans(drops=True), seeds=st.tuples(SEEDS, SEEDS, SEEDS), n_rows=ROWS)
def test_membership_does_not_depend_on_the_order(plan, seeds, n_rows):
    runs = [Simulation(plan, seed=seed, n_rows=n_rows, validate=False).run() for seed in seeds]
    assert membership(runs[0]) == membership(runs[1]) == membership(runs[2])
    assert len({tuple(run.order) for run in runs}) == 1
    assert len({str([dropped(r) for r in run.reports]) for run in runs}) == 1


def dropped(report):
    return {name: n for name, n in report.metrics.items() if name.startswith("dropped/")}


@orders(15)
@given(plan=plans(drops=True), seed=SEEDS, n_rows=ROWS, data=st.data())
def test_resumed_run_continues_with_the_same_samples(plan, seed, n_rows, data):
    whole = Simulation(plan, seed=seed, n_rows=n_rows).run()
    step = data.draw(st.integers(0, plan.main.steps - 1))
    point = ResumePoint(step, whole.master.cursor_state(step))
    resumed = Simulation(with_resume(plan, point), seed=seed + 1, n_rows=n_rows).run()
    resumed.check_complete()
    assert resumed.start.last_step == whole.start.last_step
    assert resumed.order == whole.order[point.cursor.rows_consumed :]
    assert membership(resumed) == {key: batches for key, batches in membership(whole).items() if key[1] > step}


@pytest.mark.parametrize("min_n_seqs", [None, 1, 3])
@pytest.mark.parametrize("sizes", [{}, {"gen_n_seqs": 2}, {"train_n_seqs": 2}, {"n_minibatches": 2}], ids=str)
def test_refills_are_generated_by_the_parameters_of_their_step(min_n_seqs, sizes):
    plan = split_plan(grpo(min_n_seqs=min_n_seqs, **sizes), save_every_steps=1)
    per_step = plan.main.step_size // plan.main.calls[-1].mfc.n_seqs
    for seed in range(6):
        simulation = Simulation(plan, seed=seed, n_rows=7, validate=seed < 2, drop_share=0.5).run()
        simulation.check_complete()
        assert any(dropped(report)["dropped/filter"] for report in simulation.reports)
        for step in range(1, 4):
            assert simulation.versions_read["gen", step] == {(step - 1) * per_step}


def test_two_dropping_calls_and_two_trainings():
    mfcs = grpo(8, min_n_seqs=2, rew={"may_drop": True})
    mfcs += [
        MFCDef("values", "critic", INFERENCE, "x", ("input_ids",), ("values",), n_seqs=8),
        MFCDef("train_critic", "critic", TRAIN, "x", ("values", "kept_rewards"), n_seqs=4),
    ]
    cluster, allocations = split(mfcs[:5])
    allocations |= {"values": allocations["train"], "train_critic": allocations["gen"]}
    plan = make_plan(mfcs, allocations, cluster, max_refill_rounds=100)
    for seed in range(6):
        simulation = Simulation(plan, seed=seed, n_rows=11, validate=seed < 2).run()
        simulation.check_complete()
        assert all(set(dropped(r)) == {"dropped/rew", "dropped/filter", "dropped/surplus"} for r in simulation.reports)


def test_steps_are_counted_without_replacements():
    plan = split_plan(grpo(), epochs=2, n_steps=100)
    simulation = Simulation(plan, seed=1, n_rows=7, drop_share=0.5).run()
    simulation.check_complete()
    assert simulation.start.last_step == 3  # 14 samples, four a step
    assert len(simulation.order) > 14


def test_hooks_that_end_after_a_later_dropping_call():
    """The later call has the rows before the first one's hooks are done, and may be the one that settles the step."""
    mfcs = [
        MFCDef(
            "first", "a", INFERENCE, "x", ("prompt_ids",), ("k0",), n_seqs=1, may_drop=True, post_hooks=(OffloadHook(),)
        ),
        MFCDef("second", "copy", INFERENCE, "x", ("k0",), ("k1",), n_seqs=1, may_drop=True),
        MFCDef("train", "a", TRAIN, "x", ("k1",), n_seqs=1),
    ]
    cluster = Cluster(1, 2)
    allocations = {
        mfc.name: Allocation(DeviceMesh(cluster, (int(mfc.name == "second"),)), ParallelStrategy(1)) for mfc in mfcs
    }
    plan = make_plan(mfcs, allocations, cluster, max_refill_rounds=100)
    for seed in range(30):
        Simulation(plan, seed=seed, n_rows=9, drop_share=0.05).run().check_complete()


def test_a_first_round_that_is_dropped_as_a_whole():
    simulation = Simulation(split_plan(grpo(2), n_steps=6), seed=1, n_rows=9, drop_share=0.8).run()
    simulation.check_complete()
    assert any(all(simulation.is_dropped(i) for i in loaded[:2]) for loaded, _ in simulation.expected_steps(6)), (
        "choose another share"
    )


@pytest.mark.parametrize("max_refill_rounds", [0, 1, 3])
def test_a_step_that_cannot_be_filled(max_refill_rounds):
    plan = split_plan(grpo(), max_refill_rounds=max_refill_rounds)
    simulation = Simulation(plan, seed=1, n_rows=9, drop_share=1.0).run()
    assert isinstance(simulation.end, Abort)
    failure, n_loaded = simulation.end.failure, 4 * (1 + max_refill_rounds)
    assert failure.kind is FailureKind.DROPPED
    assert (failure.call, failure.step) == ("filter", 1)
    rounds = {0: "", 1: "after 1 round of replacements ", 3: "after 3 rounds of replacements "}[max_refill_rounds]
    assert failure.message == (
        f"step 1 still lacks 4 samples {rounds}(call 'filter' dropped {n_loaded} of {n_loaded} samples)"
    )
    assert "max_refill_rounds" in failure.remedy


# ---------------------------------------------------------------- the graph


def test_a_call_sees_what_is_dropped_or_not_but_timing_has_no_say():
    graph = build_graph(grpo(), ["prompt_ids"])
    assert drop_gates(graph) == {"gen": (), "rew": (), "filter": (), "ref": ("filter",), "train": ()}
    assert drop_feeders(graph) == {"gen", "rew", "filter"}
    assert graph.edges["filter", "ref"] == {"kind": "drop", "keys": ()}
    assert data_graph(graph).has_edge("filter", "ref")


def test_dropping_calls_are_ordered_among_each_other():
    graph = build_graph(grpo(rew={"may_drop": True}, ref={"may_drop": True}), ["prompt_ids"])
    assert drop_gates(graph) == {"gen": (), "rew": (), "filter": (), "ref": ("filter",), "train": ()}
    assert drop_feeders(graph) == {"gen", "rew", "filter", "ref"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gen": {"may_drop": True}}, "call 'gen' is a generate and has may_drop=True"),
        ({"train": {"may_drop": True}}, "call 'train' is a train_step and has may_drop=True"),
        ({"ref": {"may_drop": True, "output_keys": ()}}, "call 'ref' has may_drop=True, but no output_keys"),
        (
            {"rew": {"post_hooks": (ParamReallocHook(target=ModelName("ref")),)}},
            "call 'rew' changes parameters and feeds call 'filter', which may drop samples",
        ),
    ],
)
def test_calls_that_may_not_drop(changes, message):
    mfcs = grpo(**changes)
    mfcs = [m if m.name != "train" else dataclasses.replace(m, input_keys=("input_ids", "kept_rewards")) for m in mfcs]
    with pytest.raises(GraphError, match=message):
        build_graph(mfcs, ["prompt_ids"])


# ---------------------------------------------------------------- rounds


def test_places_of_replacements():
    rounds = Rounds(4)
    assert rounds.open_round() == range(4)
    assert rounds.decide("filter", kept=[3], dropped=[1])[0] == {3: 3}
    assert rounds.decide("filter", dropped=[0])[0] == {}
    assert (rounds.n_wanted, rounds.is_open) == (0, True)
    assert rounds.decide("filter", kept=[2])[0] == {2: 2}
    assert rounds.n_wanted == 4  # two places, and half of the samples stay
    assert rounds.open_round() == range(4, 8)
    rounds.decide("filter", kept=[7, 5])
    assert rounds.decide("filter", kept=[6], dropped=[4]) == ({5: 0, 6: 1}, (7,))
    assert (rounds.n_dropped, rounds.n_surplus, rounds.n_settled, rounds.is_open) == ({"filter": 3}, 1, 1, False)
    assert rounds.open_round() == range(8, 12)
    assert rounds.decide("filter", kept=range(8, 12))[0] == {8: 4, 9: 5, 10: 6, 11: 7}
    assert [rounds.loaded_at_end(step) for step in range(3)] == [0, 8, 12]


def test_plan_without_a_call_behind_the_dropping_one():
    mfcs = grpo()[:3]
    plan = make_plan(mfcs, on_all(mfcs, Cluster(1, 2)), Cluster(1, 2), max_refill_rounds=100)
    for seed in range(10):
        Simulation(plan, seed=seed, n_rows=9, drop_share=0.5).run().check_complete()
