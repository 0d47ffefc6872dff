"""The master's decisions one by one: start, policy, reports, failures, the end."""

import msgspec
import pytest

from realrl.errors import InvalidTransitionError
from realrl.graph.mfc import MFCDef
from realrl.mesh.device_mesh import Allocation, Cluster, DeviceMesh, ParallelStrategy
from realrl.plan.samples.cursor import DatasetCursor
from realrl.sched.events import (
    Abort,
    AnnounceStop,
    CheckpointCommitted,
    CommitCheckpoint,
    FailureKind,
    Finish,
    Instruction,
    Interrupted,
    OpenCheckpoint,
    RankSpan,
    ReportStart,
    ReportStep,
    Send,
    Start,
    WorkerLost,
    WorkerSilent,
    decode_event,
    encode,
)
from realrl.sched.master.master_state import MasterState, RunPhase
from realrl.sched.messages import (
    CallDone,
    Goodbye,
    Heartbeat,
    Hello,
    Initialize,
    LoadSamples,
    Ready,
    RunCall,
    SamplesFreed,
    SaveCheckpoint,
    Shutdown,
    Span,
    WorkerFailed,
)
from realrl.sched.track.dispatch import PartKind
from realrl.sched.track.track_plan import ResumePoint
from tests.sched.plans import INFERENCE, TRAIN, make_plan, on_all, ppo
from tests.sched.simulator import Simulation, meta

ONE, TWO = Cluster(1, 1), Cluster(1, 2)


def ppo_plan(cluster=TWO, *, dp=None, n_seqs=4, n_minibatches=2, **settings):
    mfcs = ppo(n_seqs=n_seqs, n_minibatches=n_minibatches)
    return make_plan(mfcs, on_all(mfcs, cluster, dp), cluster, **settings)


def until(simulation, is_there):
    """Let the simulated run go on until something is there."""
    while not is_there():
        simulation.run(stop_after=1)
        assert simulation.end is None
    return simulation


def both_in_call(plan, seed=0):
    """A run whose two ranks have just entered the first call."""
    simulation = Simulation(plan, seed=seed, n_rows=20)
    return until(simulation, lambda: len(simulation.entered[0, PartKind.CALL]) == plan.main.n_ranks)


def abort_of(instructions):
    (abort,) = instructions
    assert isinstance(abort, Abort)
    return abort.failure


def sent(instructions, kind):
    return [(i.rank, i.request) for i in instructions if isinstance(i, Send) and isinstance(i.request, kind)]


# ---------------------------------------------------------------- start


def connected(plan):
    """A master that all workers said Hello to, and what it answered last."""
    master = MasterState(plan)
    assert master.handle(Start(b"run", "checkpoints/step_3")) == []
    for rank in range(plan.main.n_ranks - 1):
        assert master.handle(Hello(rank, 7, f"address {rank}")) == []
    return master, master.handle(Hello(plan.main.n_ranks - 1, 7, "last"))


def test_initialize_goes_to_all_when_the_last_worker_says_hello():
    _, instructions = connected(ppo_plan())
    expected = Initialize(0, b"run", ("address 0", "last"), "checkpoints/step_3")
    assert instructions == [Send(0, expected), Send(1, expected)]


def test_first_samples_are_loaded_when_the_last_worker_is_ready():
    plan = ppo_plan(dataset_rank=1, shuffle=False)
    master, _ = connected(plan)
    assert master.handle(Ready(1, 0, tuple("abcdefghijk"), 2, ("a note", "same"))) == []
    start, *loads = master.handle(Ready(0, 0, (), 1, ("same",)))
    assert start == ReportStart(1, 3, 11, 3, ("same", "a note"))
    assert sent(loads, LoadSamples) == [
        (1, LoadSamples(1, ("1/a", "1/b", "1/c", "1/d"), (0, 1, 2, 3))),
        (1, LoadSamples(2, ("1/e", "1/f", "1/g", "1/h"), (4, 5, 6, 7))),
    ]
    assert master.explain("actor_gen") == "waits for samples of step 1"
    assert (master.step, master.n_living_samples, master.phase) == (1, 8, RunPhase.RUNNING)


def test_worker_of_another_version():
    master = MasterState(ppo_plan())
    failure = abort_of(master.handle(Hello(1, 7, "", protocol_version=99)))
    assert failure.message == "worker 1 speaks protocol version 99, the master 11"
    assert failure.kind is FailureKind.PROTOCOL


def ready_with(plan, n_rows):
    master, _ = connected(plan)
    for rank in range(plan.main.n_ranks):
        rows = tuple(f"row{i}" for i in range(n_rows)) if rank == 0 else ()
        instructions = master.handle(Ready(rank, 0, rows, 0, ()))
    return instructions


@pytest.mark.parametrize(
    ("plan", "n_rows", "message"),
    [
        (
            ppo_plan(epochs=1),
            3,
            "the dataset has 3 usable rows, and epochs=1 of them do not fill one step of n_seqs=4\n"
            "  lower n_seqs to 3 or less, raise epochs to 2 or more, or give more data",
        ),
        (
            ppo_plan(epochs=2, n_steps=9, resume=ResumePoint(2, DatasetCursor(("row0", "row1", "row2", "row3", "row4"),
                                                                              seed=7, shuffle=True).state(8))),
            5,
            "the checkpoint of step 2 has consumed 8 samples, and epochs=2 of 5 rows leave no whole step of n_seqs=4\n"
            "  raise epochs to 3 or more",
        ),
        (
            ppo_plan(resume=ResumePoint(1, DatasetCursor(("x",), seed=7, shuffle=True).state(4))),
            5,
            "the checkpoint was made with another dataset: the rows differ, their tokens, or the weights of files\n"
            "  resume with the dataset of the first run, or start a new run with resume=never",
        ),
        (ppo_plan(), 0, "the dataset has no usable row\n  check dataset.path and dataset.max_prompt_tokens"),
    ],
)  # fmt: skip
def test_dataset_that_does_not_fit_is_the_users_to_change(plan, n_rows, message):
    failure = abort_of(ready_with(plan, n_rows))
    assert (f"{failure.message}\n  {failure.remedy}", failure.exit_code, failure.error) == (message, 2, "DataError")


def test_epochs_end_the_run_before_steps():
    assert ready_with(ppo_plan(epochs=3, n_steps=100), 6)[0] == ReportStart(1, 4, 6, 0, ())


# ---------------------------------------------------------------- policy


def running_calls(simulation):
    return {name for name in simulation.calls if simulation.master.explain(name).startswith("running")}


def test_calls_on_disjoint_devices_run_at_the_same_time():
    cluster = Cluster(1, 4)
    mfcs = ppo(n_seqs=4)
    places = {"actor": (0,), "ref": (1,), "reward": (2,), "critic": (3,)}
    allocations = {m.name: Allocation(DeviceMesh(cluster, places[m.role]), ParallelStrategy()) for m in mfcs}
    simulation = Simulation(make_plan(mfcs, allocations, cluster), seed=1, n_rows=9)
    until(simulation, lambda: running_calls(simulation) == {"rew_inf", "ref_inf", "critic_inf"})


def test_one_call_runs_and_one_waits_behind_it():
    simulation = Simulation(ppo_plan(ONE, n_minibatches=1), seed=1, n_rows=9)
    until(simulation, lambda: running_calls(simulation) == {"rew_inf", "ref_inf"})
    assert simulation.master.explain("rew_inf") == "running step 1 on ranks 0"
    assert simulation.master.explain("critic_inf") == "waits for devices"
    assert simulation.master.explain("actor_train") == "waits for samples of step 1"
    assert simulation.master.explain("actor_gen") == "waits for 'actor_train' to finish step 1"


def test_later_steps_do_not_queue_behind_others():
    mfcs = [
        MFCDef("first", "a", INFERENCE, "x", ("prompt_ids",), ("k",), n_seqs=1),
        MFCDef("second", "b", INFERENCE, "x", ("k",), ("l",), n_seqs=1),
    ]
    simulation = Simulation(make_plan(mfcs, on_all(mfcs, ONE), ONE), seed=0, n_rows=3)
    until(simulation, lambda: running_calls(simulation) == {"second"} and len(simulation.visible) == 2)
    assert simulation.master.explain("first") == "waits for devices"  # it is at step 2, and would delay step 1


def independent(places):
    """A run of calls that all read the prompts, on the given ranks of a node of two."""
    mfcs = [MFCDef(name, name, INFERENCE, "x", ("prompt_ids",), (f"k_{name}",), n_seqs=4) for name in places]
    allocations = {n: Allocation(DeviceMesh(TWO, ranks), ParallelStrategy(len(ranks))) for n, ranks in places.items()}
    return Simulation(make_plan(mfcs, allocations, TWO), seed=0, n_rows=9)


def test_urgent_call_reserves_devices_that_it_waits_for():
    simulation = independent({"a": (0,), "b": (0,), "wide": (0, 1), "narrow": (1,)})
    until(simulation, lambda: running_calls(simulation) == {"a", "b"})
    assert simulation.master.explain("wide") == simulation.master.explain("narrow") == "waits for devices"
    until(simulation, lambda: running_calls(simulation) == {"b", "wide", "narrow"})


def test_device_that_is_done_first_goes_on_without_the_others():
    simulation = independent({"a": (0, 1), "b": (0, 1), "narrow": (1,)})
    first = simulation.entered[0, PartKind.CALL]
    until(simulation, lambda: running_calls(simulation) == {"a", "b"} and len(first) == 2)
    simulation.work(1)
    while simulation.ranks[1].replies:
        simulation.feed(simulation.ranks[1].replies.popleft())
    assert running_calls(simulation) == {"a", "b", "narrow"}


def test_stale_weights_are_waited_for_and_checkpoints_too():
    mfcs = [
        MFCDef("inf", "b", INFERENCE, "x", ("prompt_ids",), ("k",), n_seqs=2),
        MFCDef("slow", "c", INFERENCE, "x", ("k",), ("l",), n_seqs=2),
        MFCDef("train", "a", TRAIN, "x", ("k",), n_seqs=2),
    ]
    cluster = Cluster(1, 4)
    places = {"inf": (0,), "slow": (1,), "train": (2,)}
    allocations = {name: Allocation(DeviceMesh(cluster, ranks), ParallelStrategy()) for name, ranks in places.items()}
    plan = make_plan(mfcs, allocations, cluster, save_every_steps=1, n_steps=2)
    simulation = Simulation(plan, seed=0, n_rows=9)
    waiting = "waits for the checkpoint of a step before 2, which needs the old weights"
    until(simulation, lambda: simulation.master.explain("train") == waiting)
    assert simulation.master.explain("slow") == "running step 1 on ranks 1"


# ---------------------------------------------------------------- reports


def test_report_of_a_step():
    mfcs = [
        MFCDef("score", "b", INFERENCE, "x", ("prompt_ids",), ("k",), n_seqs=4, min_n_seqs=1, log_return_value=True),
        MFCDef("quiet", "c", INFERENCE, "x", ("prompt_ids",), ("l",), n_seqs=4),
        MFCDef("train", "a", TRAIN, "x", ("k",), n_seqs=2),
    ]
    plan = make_plan(mfcs, on_all(mfcs, ONE), ONE, n_steps=2, shuffle=False)
    simulation = Simulation(plan, seed=2, n_rows=6).run()
    report = simulation.reports[1]
    assert (report.step, report.epoch) == (2, 2)
    metrics = dict(report.metrics)
    dispatches = [
        (request.dispatch_id, len(request.minibatches[0]))
        for i in simulation.instructions for _, request in sent(i, RunCall)
        if (request.call, request.step) == ("train", 2)
    ]  # fmt: skip
    assert metrics.pop("train/n") == sum(d * n for d, n in dispatches) / 4, "weighted by samples"
    score_n = metrics.pop("score/n")
    assert score_n > 0
    n_dispatches = sum(isinstance(e, CallDone) and e.step == 2 for e in simulation.events)
    lengths = [1 + sum(sample_id.encode()) % 7 for sample_id in simulation.order[4:]]
    assert metrics == {
        "score/loss": 2.0, "train/loss": 2.0, "version/a": 4.0, "memory_gb/0": 0.5, "n_samples": 4.0,
        "n_tokens": float(sum(lengths)), "bytes/data": 10.0 * n_dispatches, "bytes/params": 0.0,
        "time_s/realloc_wait": 0.0, "time_s/score": 0.5 * (n_dispatches - 3), "time_s/quiet": 0.5, "time_s/train": 1.0,
    }  # fmt: skip


def test_slowest_rank_counts_and_every_span_is_reported_once():
    simulation = Simulation(ppo_plan(n_steps=2), seed=2, n_rows=9).run()
    assert simulation.reports[0].metrics["time_s/actor_gen"] == 1.5  # rank 1; rank 0 took 0.5 s
    spans = [s for r in [*simulation.reports, simulation.end] for s in r.spans]
    expected = [RankSpan(e.rank, e.spans[0]) for e in simulation.events if isinstance(e, CallDone)]
    assert sorted(spans, key=repr) == sorted(expected, key=repr)


def test_checkpoint_is_opened_saved_and_committed():
    plan = ppo_plan(save_every_steps=2, save_at_end=True, checkpoint_directory="run/.step_{step}.partial")
    simulation = Simulation(plan, seed=4, n_rows=9).run()
    simulation.check_complete()
    assert list(simulation.checkpoints) == [2, 3]
    commit = simulation.checkpoints[2]
    assert commit == CommitCheckpoint(
        2, "run/.step_2.partial", simulation.master.cursor_state(2), {"actor": 2, "critic": 2}, files={0: {}, 1: {}}
    )
    assert commit.cursor.rows_consumed == 8
    (batch,) = [b for b in simulation.instructions if OpenCheckpoint(2, "run/.step_2.partial") in b]
    kinds = [type(getattr(i, "request", i)) for i in batch]
    at = kinds.index(OpenCheckpoint)
    assert kinds[at - 1 : at + 3] == [ReportStep, OpenCheckpoint, SaveCheckpoint, SaveCheckpoint]


def test_versions_continue_from_a_checkpoint():
    rows = [f"row{i}" for i in range(9)]
    cursor = DatasetCursor(rows, seed=7, shuffle=True).state(8)
    plan = ppo_plan(resume=ResumePoint(2, cursor, {"actor": 5}))
    simulation = Simulation(plan, seed=4, n_rows=9).run()
    assert simulation.reports[0].step == 3
    assert simulation.reports[0].metrics["version/actor"] == 6.0
    assert simulation.reports[0].metrics["version/critic"] == 3.0


# ---------------------------------------------------------------- failures


def test_lost_worker_is_named_with_its_call_and_those_who_wait():
    plan = ppo_plan(Cluster(1, 4), dp=2)
    failure = abort_of(both_in_call(plan).master.handle(WorkerLost(2, -9, "killed")))
    assert failure.message == "worker 2 ended (killed) in call 'actor_gen' of step 1"
    assert "out of memory" in failure.remedy
    assert (failure.rank, failure.call, failure.step) == (2, "actor_gen", 1)
    assert (failure.waiting_ranks, failure.waiting_calls) == ((0, 1, 3), ("actor_gen",))
    assert (failure.kind, failure.exit_code) == (FailureKind.WORKER_LOST, 1)


def test_silent_worker_is_named_with_its_activity():
    master = both_in_call(ppo_plan()).master
    assert master.handle(Heartbeat(1, 3, "transfer for actor_gen", 5.0)) == []
    failure = abort_of(master.handle(WorkerSilent(1, "transfer for actor_gen", 61.3)))
    assert failure.kind is FailureKind.WORKER_SILENT
    assert failure.message == (
        "worker 1 gave no sign of life for 61 s in call 'actor_gen' of step 1; it last said: transfer for actor_gen"
    )
    assert failure.waiting_ranks == (0,)


def test_ranks_that_wait_for_those_who_wait_are_named():
    cluster = Cluster(1, 4)
    mfcs = [
        MFCDef("narrow", "a", INFERENCE, "x", ("prompt_ids",), ("k",), n_seqs=4),
        MFCDef("wide", "b", INFERENCE, "x", ("prompt_ids",), ("l",), n_seqs=4),
    ]
    allocations = {
        "narrow": Allocation(DeviceMesh(cluster, (0, 1)), ParallelStrategy(2)),
        "wide": Allocation(DeviceMesh(cluster, (0, 1, 2, 3)), ParallelStrategy(4)),
    }
    simulation = Simulation(make_plan(mfcs, allocations, cluster), seed=0, n_rows=9)
    until(simulation, lambda: running_calls(simulation) == {"narrow", "wide"})
    failure = abort_of(simulation.master.handle(WorkerLost(0, None, "")))
    assert failure.waiting_ranks == (1, 2, 3)
    assert failure.waiting_calls == ("narrow", "wide")


@pytest.mark.parametrize(
    ("n_actions", "where"), [(0, "while it was starting up"), (None, "while it was idle")], ids=["starting", "idle"]
)
def test_worker_lost_outside_of_a_call(n_actions, where):
    simulation = Simulation(ppo_plan(), seed=0, n_rows=9).run(stop_after=0)
    if n_actions is None:
        until(simulation, lambda: not any(r.inbox or r.replies for r in simulation.ranks[1:]))
    failure = abort_of(simulation.master.handle(WorkerLost(1, 3, "")))
    assert failure.message == f"worker 1 ended with exit code 3 {where}"
    assert failure.kind is FailureKind.WORKER_EXITED
    assert "os._exit" in failure.remedy
    assert failure.waiting_ranks == ()


def test_worker_that_never_appears():
    failure = abort_of(MasterState(ppo_plan()).handle(WorkerLost(1, 1, "")))
    assert failure.message == "worker 1 ended with exit code 1 while it was starting up"
    assert failure.kind is FailureKind.WORKER_EXITED
    failure = abort_of(MasterState(ppo_plan()).handle(WorkerSilent(1, "", 60.0)))
    assert failure.message == "worker 1 did not start within 60 s"


def test_exception_in_a_call():
    simulation = both_in_call(ppo_plan())
    seq = simulation.ranks[1].inbox[0].seq
    reply = WorkerFailed(1, seq, "actor_gen", 1, "ValueError", "bad value", "Traceback ...", 1, ("1/row3",))
    failure = abort_of(simulation.master.handle(reply))
    assert failure.message == "worker 1 failed in call 'actor_gen' of step 1: ValueError: bad value"
    assert (failure.traceback, failure.error, failure.waiting_ranks) == ("Traceback ...", "ValueError", (0,))
    assert failure.sample_ids == ("1/row3",)
    assert failure.kind is FailureKind.WORKER_FAILED


def test_exception_that_the_user_can_fix_keeps_its_words_and_exit_code():
    simulation = Simulation(ppo_plan(), seed=0, n_rows=9).run(stop_after=0)
    reply = WorkerFailed(1, 0, None, None, "AssetError", "no model in 'x'", "Traceback ...", 2)
    failure = abort_of(simulation.master.handle(reply))
    assert (failure.message, failure.exit_code) == ("no model in 'x'", 2)


def replace_output(reply, **changes):
    return msgspec.structs.replace(reply, output=msgspec.structs.replace(reply.output, **changes))


BAD_OUTPUTS = {
    "did not produce 'input_ids' on worker 0": lambda r: replace_output(r, schemas={}, seqlens={}),
    "returned 'scores', which it does not declare on worker 0": lambda r: msgspec.structs.replace(
        r, output=meta(r.output.ids, ["input_ids", "scores"])
    ),
    "returned sample '9/x', which worker 0 was not to keep": lambda r: msgspec.structs.replace(
        r, output=meta([*r.output.ids, "9/x"], ["input_ids"])
    ),
    "returned 'input_ids' with 1 lengths for 4 samples on worker 0": lambda r: replace_output(
        r, seqlens={"input_ids": ((1,),)}
    ),
    "did not produce 'input_ids' of sample '1/row0'": lambda r: msgspec.structs.replace(
        r, output=meta(r.output.ids[1:], ["input_ids"])
    ),
    "did not produce 'input_ids' of sample '1/row0' ": lambda r: msgspec.structs.replace(r, output=None),
}


@pytest.mark.parametrize("problem", BAD_OUTPUTS)
def test_output_that_a_call_does_not_declare(problem):
    simulation = Simulation(ppo_plan(ONE, shuffle=False), seed=0, n_rows=9)
    until(simulation, lambda: any(isinstance(r, CallDone) for r in simulation.ranks[0].replies))
    while not isinstance(simulation.ranks[0].replies[0], CallDone):
        simulation.feed(simulation.ranks[0].replies.popleft())
    failure = abort_of(simulation.master.handle(BAD_OUTPUTS[problem](simulation.ranks[0].replies[0])))
    assert failure.message == f"call 'actor_gen' of step 1 {problem.strip()}"
    assert failure.kind is FailureKind.BAD_OUTPUT


@pytest.mark.parametrize(
    ("keys", "drop", "message"), [((), 0, "without key 'prompt_ids'"), (("prompt_ids",), 1, "asked")]
)
def test_samples_that_are_not_what_was_asked_for(keys, drop, message):
    simulation = Simulation(ppo_plan(), seed=0, n_rows=9)
    until(simulation, lambda: hasattr(next(iter(simulation.ranks[0].replies), None), "meta"))
    reply = simulation.ranks[0].replies[0]
    wrong = msgspec.structs.replace(reply, meta=meta(reply.meta.ids[drop:], keys))
    assert message in abort_of(simulation.master.handle(wrong)).message


def illegal_events(simulation):
    """Events that no transport could deliver to a master whose ranks are in the first call."""
    request = simulation.ranks[1].inbox[0]
    done = simulation.end_request(1, request)
    return {
        "worker 1 sent CallDone for request 999, which was never sent": msgspec.structs.replace(done, seq=999),
        "worker 1 sent CallDone for request 0, which is answered already": msgspec.structs.replace(done, seq=0),
        "worker 1 answered request 1, a RunCall, with SamplesFreed": SamplesFreed(1, request.seq),
        "worker 1 answered dispatch 0 of 'actor_gen', step 1, with dispatch 0 of 'actor_gen', step 2":
            msgspec.structs.replace(done, step=2),
        "CallDone came from rank 7, which does not exist": msgspec.structs.replace(done, rank=7),
        "worker 1 sent Goodbye for request 55, which was never sent": Goodbye(1, 55),
        "worker 0 said Hello twice": Hello(0, 1, ""),
        "a worker calls itself rank 2; there are 2": Hello(2, 1, ""),
        "the run was started twice": Start(),
        "the checkpoint of step 1 is in place, but nobody asked for it": CheckpointCommitted(1),
    }  # fmt: skip


@pytest.mark.parametrize("number", range(10))
def test_illegal_events_tell_the_story(number):
    simulation = both_in_call(ppo_plan())
    message, event = list(illegal_events(simulation).items())[number]
    with pytest.raises(InvalidTransitionError) as caught:
        simulation.master.handle(event)
    assert caught.value.message.startswith(f"{message}\nstory:\n")
    story = "\n".join(caught.value.story)
    assert "initializing -> running" in story or "step 1, dispatch 0: 4 samples from" in story


def test_stories_are_bounded():
    simulation = Simulation(ppo_plan(n_steps=40), seed=0, n_rows=9, validate=False).run()
    lines = simulation.master.story("actor_gen")
    assert len(lines) == 25
    assert lines[0] == "(56 earlier lines left out)"
    assert lines[-1].endswith("step 40, dispatch 234: all ranks are done")


# ---------------------------------------------------------------- the end


def test_interrupted_before_anybody_is_there():
    master = MasterState(ppo_plan())
    assert master.handle(Interrupted("SIGINT")) == [Finish("SIGINT")]
    assert master.handle(Hello(0, 1, "")) == []


def test_worker_that_comes_after_the_interruption_is_sent_away():
    master = MasterState(ppo_plan())
    master.handle(Hello(1, 1, ""))
    assert master.handle(Interrupted("SIGINT")) == [Send(1, Shutdown(0))]
    assert master.handle(Start()) == []
    assert master.handle(Hello(0, 1, "")) == [Send(0, Shutdown(0))]
    assert master.handle(Goodbye(1, 0)) == []
    assert master.handle(Goodbye(0, 0)) == [Finish("SIGINT")]


def test_second_interruption_does_not_wait():
    master = both_in_call(ppo_plan(save_at_end=True)).master
    assert AnnounceStop(1) in master.handle(Interrupted("SIGINT"))
    failure = abort_of(master.handle(Interrupted("SIGINT")))
    assert (failure.kind, failure.exit_code) == (FailureKind.INTERRUPTED, 130)


def test_a_run_that_is_not_saved_does_not_finish_its_step():
    master = both_in_call(ppo_plan()).master
    assert master.handle(Interrupted("SIGINT")) == [Finish("SIGINT")]


def test_checkpoint_that_all_ranks_saved_is_committed_even_when_interrupted():
    simulation = Simulation(ppo_plan(n_steps=1, save_at_end=True), seed=3, n_rows=9)
    until(simulation, lambda: simulation.commits)
    simulation.feed(Interrupted("SIGINT"))
    [step] = simulation.commits
    simulation.commits.clear()
    for _ in range(500):
        if any(r.inbox or r.replies for r in simulation.ranks):
            simulation.act()
    assert simulation.end is None, "the checkpoint is not in place yet"
    simulation.feed(CheckpointCommitted(step))
    simulation.run()
    assert simulation.end.interrupted == "SIGINT"


def closing_run():
    """A complete run whose two workers were told to shut down."""
    simulation = Simulation(ppo_plan(n_steps=1), seed=3, n_rows=9)
    return until(simulation, lambda: simulation.master.phase is RunPhase.CLOSING)


def test_worker_that_ends_well_counts_as_gone():
    master = closing_run().master
    assert master.handle(WorkerLost(0, 0, "")) == []
    assert master.handle(WorkerLost(0, 0, "")) == []
    (finish,) = master.handle(WorkerLost(1, 0, ""))
    assert isinstance(finish, Finish)
    assert finish.interrupted == ""


@pytest.mark.parametrize("event", [WorkerLost(1, -11, ""), WorkerSilent(1, "shut down", 9.0)])
def test_worker_that_crashes_on_the_way_out_is_a_failure(event):
    simulation = closing_run()
    failure = abort_of(simulation.master.handle(event))
    assert "while" in failure.message
    assert failure.rank == 1


def test_worker_that_said_goodbye_may_vanish():
    simulation = closing_run()
    seq = simulation.ranks[0].inbox[-1].seq
    assert simulation.master.handle(Goodbye(0, seq)) == []
    assert simulation.master.handle(WorkerLost(0, 1, "")) == []
    assert simulation.master.handle(WorkerSilent(0, "", 9.0)) == []


def test_worker_that_fails_while_shutting_down():
    simulation = closing_run()
    seq = simulation.ranks[0].inbox[-1].seq
    failed = WorkerFailed(0, seq, None, None, "RuntimeError", "x", "", 1)
    assert "failed while shutting down" in abort_of(simulation.master.handle(failed)).message
    patient = closing_run().master
    assert patient.handle(Interrupted("SIGINT")) == []
    assert patient.handle(failed) == []
    assert patient.handle(WorkerSilent(1, "", 9.0))[0].interrupted == "SIGINT"


def test_cursor_is_not_known_before_the_rows():
    with pytest.raises(InvalidTransitionError, match="rows are not known"):
        MasterState(ppo_plan()).cursor_state(1)


# ---------------------------------------------------------------- the log


def test_everything_survives_as_one_line_of_json():
    simulation = Simulation(ppo_plan(save_every_steps=1, n_steps=2), seed=3, n_rows=9).run()
    more = [
        WorkerLost(1, None, "x"), WorkerSilent(1, "y", 1.5), Interrupted("SIGINT"), Heartbeat(0, 1, "idle", 0.0),
        WorkerFailed(1, 2, "c", 3, "E", "m", "t", 1, ("1/a",)),
    ]  # fmt: skip
    for event in [*simulation.events, *more]:
        assert b"\n" not in encode(event)
        assert decode_event(encode(event)) == event
    failure = abort_of(both_in_call(ppo_plan()).master.handle(WorkerLost(1, 1, "")))
    abort = Abort(failure, (RankSpan(0, Span("x", "call", 0.0, 1.0, {"step": 1})),))
    decoder = msgspec.json.Decoder(Instruction)
    for instruction in [*(i for batch in simulation.instructions for i in batch), abort]:
        assert decoder.decode(encode(instruction)) == instruction
