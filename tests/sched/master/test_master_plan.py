"""Plans that the master gets: calls in the order of data, waits, limits, and what is refused before anything starts."""

import dataclasses
import subprocess
import sys

import pytest

from realrl.config.schema import RunConfig
from realrl.errors import ConfigError, GraphError
from realrl.graph.build import StepWait, build_graph
from realrl.graph.mfc import MFCDef
from realrl.mesh.device_mesh import Cluster
from realrl.plan.samples.cursor import CursorState, DatasetCursor
from realrl.sched.calls import schedule_calls
from realrl.sched.master.master_plan import MasterPlan, plan_master
from realrl.sched.master.saving import CheckpointTracker
from realrl.sched.messages import CheckpointSaved, SavedFile
from realrl.sched.outbox import Owner
from realrl.sched.samples.in_flight import InFlight
from realrl.sched.story import ranks_text
from realrl.sched.track.track_plan import ResumePoint, TrackPlan, plan_track
from tests.sched.plans import INFERENCE, TRAIN, make_config, on_all, ppo

CLUSTER = Cluster(1, 2)
CURSOR = CursorState(80, 1, 1, 0)


def scheduled(mfcs):
    return schedule_calls(build_graph(mfcs, ["prompt_ids"]), on_all(mfcs, CLUSTER))


def plan(calls, **settings):
    return TrackPlan(calls, ("prompt_ids",), make_config(CLUSTER, n_steps=5, epochs=1, seed=1), 0, **settings)


def test_calls_are_ordered_by_data_and_know_what_they_wait_for():
    calls = scheduled(list(reversed(ppo(max_staleness=1))))
    names = [call.name for call in calls]
    assert names[0] == "actor_gen"
    assert set(names[-2:]) == {"actor_train", "critic_train"}
    waits = {call.name: call.waits_for for call in calls}
    assert waits["actor_gen"] == (StepWait("actor_train", "actor_gen", 2),)
    assert waits["critic_inf"] == (StepWait("critic_train", "critic_inf", 2),)
    assert waits["ref_inf"] == ()


def test_a_configuration_becomes_a_plan():
    mfcs = ppo()
    config = RunConfig(
        experiment="ppo", steps=12, epochs=3, seed=9, cluster={"n_nodes": 1, "n_devices_per_node": 2},
        dataset={"shuffle": False}, save={"every_steps": 4, "at_end": False},
    )  # fmt: skip
    resume = ResumePoint(10, CURSOR)
    main = plan_track(build_graph(mfcs, ["prompt_ids"]), on_all(mfcs, CLUSTER), config, dataset_rank=1, resume=resume)
    assert main == TrackPlan(scheduled(mfcs), ("prompt_ids",), config, dataset_rank=1, resume=resume)
    assert (main.cluster, main.steps, main.epochs, main.keeps_rest) == (CLUSTER, 12, 3, False)
    assert (main.first_step, main.step_size, main.n_ranks) == (11, 8, 2)
    found = plan_master(main, None, "x/{step}")
    assert found == MasterPlan(main, None, config.save, "x/{step}")


def test_what_trains_nothing_is_not_saved():
    inference = MFCDef("i", "a", INFERENCE, "x", ("prompt_ids",), ("k",), n_seqs=4)
    main = plan(scheduled([inference]))
    assert main.config.save.at_end
    assert not plan_master(main, None, "").save.at_end


def test_an_evaluation_goes_over_its_rows_once_as_they_stand():
    config = make_config(CLUSTER, eval_section={"n_seqs": 3}, epochs=2)
    mfcs = [MFCDef("i", "a", INFERENCE, "x", ("prompt_ids",), ("k",), n_seqs=2)]
    graph, allocations = build_graph(mfcs, ["prompt_ids"]), on_all(mfcs, CLUSTER)
    track = plan_track(graph, allocations, config, dataset_rank=0, owner=Owner.EVALUATION)
    cursor = track.cursor(["a", "b", "c", "d"])
    assert track.last_step(cursor) == 2
    assert [ref.id for ref in cursor.take(0, 3)] == ["eval/a", "eval/b", "eval/c"]
    assert track.n_samples(cursor, 2) == 3


@pytest.mark.parametrize(("max_staleness", "capacity"), [(0, 2), (1, 3), (2, 4)])
def test_capacity(max_staleness, capacity):
    calls = scheduled(ppo(max_staleness=max_staleness))
    assert plan(calls).capacity == capacity
    least = 1 + max_staleness
    assert plan(calls, capacity_steps=least).capacity == least


def call_with(**changes):
    (call,) = scheduled([MFCDef("c", "a", INFERENCE, "x", ("prompt_ids",), ("k",), n_seqs=4)])
    return dataclasses.replace(call, mfc=dataclasses.replace(call.mfc, **changes))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: plan(scheduled(ppo()), resume=ResumePoint(5, CURSOR)),
            ConfigError,
            r"the checkpoint is at step 5 and steps=5: no step is left to do\n.*steps=6 does one more",
        ),
        (lambda: plan((call_with(), call_with(name="d", n_seqs=3))), GraphError, "'d' has n_seqs=3, which does not"),
        (lambda: plan((call_with(min_n_seqs=5),)), GraphError, "min_n_seqs=5 and n_seqs=4"),
        (lambda: plan((call_with(min_n_seqs=2, interface_type=TRAIN),)), GraphError, "'c' trains and has min_n_seqs=2"),
        (lambda: plan((call_with(),), capacity_steps=0), ConfigError, "capacity_steps=0"),
    ],
)
def test_refusals(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_versions_count_the_calls_of_train_steps():
    mfcs = [MFCDef("i", "b", INFERENCE, "x", ("prompt_ids",), ("k",), n_seqs=8),
            MFCDef("t", "a", TRAIN, "x", ("k",), n_seqs=2)]  # fmt: skip
    assert plan(scheduled(mfcs)).versions_after(3) == {"a": 12}
    assert plan(scheduled(mfcs), resume=ResumePoint(2, CURSOR)).versions_after(3) == {"a": 12}
    assert plan(scheduled(mfcs), resume=ResumePoint(2, CURSOR, {"a": 100})).versions_after(3) == {"a": 104}


@pytest.mark.parametrize(
    ("every_steps", "at_end", "expected"),
    [(0, False, []), (0, True, [7]), (2, False, [4, 6]), (2, True, [4, 6, 7]), (7, True, [7]), (9, True, [7])],
)
def test_steps_that_are_saved(every_steps, at_end, expected):
    tracker = CheckpointTracker(3, 7, every_steps=every_steps, at_end=at_end)
    assert saved_steps(tracker) == expected
    assert not tracker.is_due(8)


def saved_steps(tracker, first=3, last=7):
    """Steps that are saved in a run in which every step waits for a dispatch of its own number."""
    found = []
    for step in range(first, last + 1):
        assert tracker.blocks_training(step + 1) == tracker.is_due(step)
        if not tracker.is_due(step):
            tracker.pass_by(step)
            continue
        found.append(step)
        tracker.hold(step, [step])
        assert not tracker.is_idle
        assert tracker.ready({step: "under way"}) is None
        assert tracker.ready({step + 1: "of no importance"}) == step
        tracker.begin(step, (0, 1), InFlight())
        assert tracker.ready({}) is None
        files = [{f"{rank}": SavedFile(rank, "")} for rank in (0, 1)]
        assert tracker.add_saved(step, CheckpointSaved(0, 9, step, files=files[0])) is None
        assert not tracker.is_any_committing
        save = tracker.add_saved(step, CheckpointSaved(1, 9, step, files=files[1]))
        assert save.files == {0: files[0], 1: files[1]}
        assert tracker.is_committing(step)
        tracker.add_committed(step)
    assert tracker.is_idle
    return found


def test_steps_that_end_epochs_and_those_that_the_clock_wants():
    tracker = CheckpointTracker(3, 7, every_steps=0, at_end=False, ends_epoch=lambda step: step in (4, 9))
    tracker.want(6)
    assert saved_steps(tracker) == [4, 6]


def test_epochs_that_end_between_two_positions():
    cursor = DatasetCursor([f"row{i}" for i in range(5)], seed=1, shuffle=True)
    ends = [[stop for stop in range(3, 31, 3) if cursor.ends_epochs(stop - 3, stop, every)] for every in (0, 1, 2)]
    assert ends == [[], [6, 12, 15, 21, 27, 30], [12, 21, 30]]


def test_ranks_text():
    assert ranks_text([5, 0, 1, 2, 7, 6]) == "0-2,5-7"
    assert ranks_text({3}) == "3"
    assert ranks_text(range(0, 64, 8)) == "0,8,...,56"
    assert ranks_text([r for r in range(64) if r % 8 and r != 63]) == "1-7,9-15,...,49-55,57-62"
    assert ranks_text([*range(0, 10, 2), 20, 21]) == "0,2,...,8,20-21"
    assert ranks_text([0, 2, 4, 6]) == "0,2,4,6"


def test_the_package_is_pure():
    code = (
        "import sys, realrl.sched.master.master_state, realrl.sched.worker_state, realrl.plan.samples.transfer; "
        "print(sorted({'torch', 'zmq', 'asyncio'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_training_waits_for_a_reader_of_the_role_that_no_data_orders():
    mfcs = [
        *ppo(),
        MFCDef("actor_probe", "actor", INFERENCE, "x", ("input_ids",), ("probe_logprobs",), n_seqs=8),
    ]
    calls = {call.name: call for call in scheduled(mfcs)}
    assert calls["actor_train"].waits_for == (StepWait("actor_probe", "actor_train", 0),)
    assert StepWait("actor_train", "actor_gen", 1) in calls["actor_gen"].waits_for
    assert calls["critic_train"].waits_for == ()
