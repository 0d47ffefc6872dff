"""Evaluations between steps: what the master sends, in any order of the workers' answers."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter, deque

import pytest

from realrl.graph.mfc import InterfaceType, MFCDef
from realrl.mesh.device_mesh import Cluster
from realrl.sched.events import (
    AnnounceStop,
    BeginEvaluation,
    CheckpointCommitted,
    CommitCheckpoint,
    Finish,
    Interrupted,
    ReportEvaluation,
    ReportSamples,
    ReportStep,
    Send,
    Start,
    WorkerLost,
)
from realrl.sched.master.master_state import MasterState, RunPhase
from realrl.sched.master.saving import EvaluationTimes
from realrl.sched.messages import (
    CallDone,
    CheckpointSaved,
    FreeSamples,
    Goodbye,
    Hello,
    HooksDone,
    Initialize,
    KeySchema,
    LoadSamples,
    MoveRows,
    Per,
    ReadSamples,
    Ready,
    RowsMoved,
    RunCall,
    RunHooks,
    SampleMeta,
    SamplesFreed,
    SamplesLoaded,
    SamplesRead,
    SaveCheckpoint,
    Shutdown,
)
from realrl.sched.outbox import Owner
from realrl.sched.track.readout import Readout
from tests.sched.plans import make_plan, make_track, on_all, ppo

GENERATE, INFERENCE = InterfaceType.GENERATE, InterfaceType.INFERENCE
NUMBER, TOKEN = KeySchema("float32", Per.SEQUENCE), KeySchema("int64", Per.TOKEN)
CLUSTER = Cluster(1, 2)
ROWS = tuple(f"r{i}" for i in range(20))
HELD_OUT = tuple(f"h{i}" for i in range(11))


def eval_track(allocations, config):
    calls = [
        MFCDef("eval_gen", "actor", GENERATE, "x", ("prompt_ids",), ("input_ids", "prompt_mask"), n_seqs=4),
        MFCDef("eval_rew", "reward", INFERENCE, "x", ("input_ids",), ("rewards",), n_seqs=4),
    ]
    allocations = {"eval_gen": allocations["actor_gen"], "eval_rew": allocations["rew_inf"]}
    return make_track(
        calls, allocations, config, owner=Owner.EVALUATION, readout=Readout({"": "actor"}, {"": "eval_gen"})
    )


class Workers:
    """Ranks that answer in a random order; a reward depends on the sample alone."""

    def __init__(self, plan, seed, rows=ROWS, interrupt_at=0):
        self.plan, self.random, self.rows = plan.main, random.Random(seed), rows
        self.master = MasterState(plan)
        self.calls = {call.name: call for track in (plan.main, plan.evaluation) if track for call in track.calls}
        self.inbox = [deque() for _ in range(self.plan.n_ranks)]
        self.store = [set() for _ in range(self.plan.n_ranks)]
        self.parts = [[] for _ in range(self.plan.n_ranks)]
        self.reports, self.loads, self.taken, self.evaluating = [], [], Counter(), None
        self.n_trained = 0
        self.commits = deque()
        self.interrupt_at, self.stop = interrupt_at, None  # number of an event; what is announced then

    def run(self):
        for event in (Start(b"run"), *(Hello(rank, rank, "") for rank in range(self.plan.n_ranks))):
            self.feed(event)
        n_events = 0
        while not self.master.is_over:
            n_events += 1
            if n_events >= self.interrupt_at > 0 and self.master.phase is RunPhase.RUNNING and self.stop is None:
                self.was_evaluating = self.evaluating
                self.feed(Interrupted("SIGINT"))
            ranks = [rank for rank, inbox in enumerate(self.inbox) if inbox]
            choice = self.random.choice([*ranks, *([-1] if self.commits else [])])
            if choice < 0:
                self.feed(CheckpointCommitted(self.commits.popleft()))
            else:
                self.feed(self.answer(choice, self.inbox[choice].popleft()))
        assert self.reports[-1] == Finish("" if self.stop is None else "SIGINT")
        assert self.stop is not None or not any(self.store), "samples were never freed"
        self.check_order()
        return self

    def feed(self, event):
        instructions = self.master.handle(event)
        self.master.validate()
        for instruction in instructions:
            if isinstance(instruction, Send):
                self.send(instruction.rank, instruction.request)
                continue
            if isinstance(instruction, AnnounceStop):
                self.stop = instruction.step
            if isinstance(instruction, CommitCheckpoint):
                self.commits.append(instruction.step)
            if isinstance(instruction, BeginEvaluation):
                assert self.evaluating is None
                self.evaluating = instruction.step
                self.taken.clear()
            if isinstance(instruction, ReportEvaluation | ReportStep) and self.evaluating is not None:
                assert instruction.step == self.evaluating
                self.evaluating = None
                expected = {(name, f"eval/{row}") for name in ("eval_gen", "eval_rew") for row in HELD_OUT}
                assert set(self.taken) == expected
                assert max(self.taken.values()) == 1
            self.reports.append(instruction)

    def send(self, rank, request):
        self.inbox[rank].append(request)
        if isinstance(request, LoadSamples) and not request.is_held_out:
            self.loads.append(request.ids)
        if isinstance(request, RunCall | RunHooks | MoveRows):
            kind = request.when if isinstance(request, RunHooks) else type(request).__name__
            self.parts[rank].append((request.dispatch_id, kind))
        if isinstance(request, RunCall) and self.calls[request.call].mfc.is_train:
            assert self.evaluating is None or request.step <= self.evaluating, "the weights change too early"
        if isinstance(request, RunCall) and request.call.startswith("eval_"):
            self.taken.update((request.call, sample_id) for sample_id in request.keeps)

    def check_order(self):
        """All ranks see the parts that they share in one order, or collectives would wait for each other."""
        for one in self.parts:
            for other in self.parts:
                shared = set(one) & set(other)
                assert [p for p in one if p in shared] == [p for p in other if p in shared]

    def answer(self, rank, request):
        match request:
            case Initialize():
                here = rank == self.plan.dataset_rank
                return Ready(rank, request.seq, self.rows if here else (), 0, (), (), HELD_OUT if here else ())
            case LoadSamples():
                return SamplesLoaded(rank, request.seq, self.put(rank, request.ids, self.plan.dataset_keys))
            case RunCall():
                call = self.calls[request.call]
                for transfer in (*request.transfers, *request.spreads):
                    self.store[transfer.target] |= set(transfer.ids)
                output = self.put(rank, request.keeps, call.mfc.output_keys) if request.keeps else None
                return CallDone(rank, request.seq, request.dispatch_id, call.name, request.step, output, {}, ())
            case RunHooks():
                return HooksDone(rank, request.seq, request.dispatch_id, request.call, request.step, request.when)
            case MoveRows():
                return RowsMoved(rank, request.seq, request.dispatch_id, request.call, request.step)
            case ReadSamples():
                ids = {i for group in (*request.keys.values(), *request.texts.values()) for i in group}
                assert ids <= self.store[rank], "what is read was freed"
                return SamplesRead(
                    rank, request.seq, request.step,
                    {key: {i: (reward(i),) for i in members} for key, members in request.keys.items()},
                )  # fmt: skip
            case FreeSamples():
                self.store[rank] -= set(request.ids)
                return SamplesFreed(rank, request.seq)
            case SaveCheckpoint(step=step):
                return CheckpointSaved(rank, request.seq, step)
            case Shutdown():
                return Goodbye(rank, request.seq)

    def put(self, rank, ids, keys):
        self.store[rank] |= set(ids)
        schemas = {key: NUMBER if key == "rewards" else TOKEN for key in keys}
        return SampleMeta(tuple(ids), schemas, dict.fromkeys(keys, tuple((1,) for _ in ids)))


def reward(sample_id):
    return (sum(sample_id.encode()) % 10) / 10


def run(seed, *, evaluated=True, interrupt_at=0, **settings):
    mfcs = ppo(4, max_staleness=settings.pop("max_staleness", 0))
    allocations = on_all(mfcs, CLUSTER)
    plan = make_plan(
        mfcs, allocations, CLUSTER, n_steps=5, readout=Readout({"": "actor"}, {"": "actor_gen"}, n_samples=3),
        checkpoint_directory="x", eval_section={"every_steps": 2, "at_start": True}, **settings,
    )  # fmt: skip
    if evaluated:
        plan = dataclasses.replace(plan, evaluation=eval_track(allocations, plan.main.config))
    return Workers(plan, seed, interrupt_at=interrupt_at).run()


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_an_interrupted_run_ends_with_the_step_that_is_being_evaluated(max_staleness: int) -> None:
    found = set()
    for interrupt_at in range(1, 200, 9):
        done = run(interrupt_at, max_staleness=max_staleness, save_at_end=True, interrupt_at=interrupt_at)
        if done.stop is None:
            continue
        steps = [report for report in done.reports if isinstance(report, ReportStep)]
        saved = [report.step for report in done.reports if isinstance(report, CommitCheckpoint)]
        assert (steps[-1].step, saved) == (done.stop, [done.stop])
        assert ("eval/reward/mean" in steps[-1].metrics) == (done.stop in (2, 4))
        if done.was_evaluating:
            assert done.stop == done.was_evaluating
        found.add((done.stop, done.was_evaluating))
    assert {(1, 0), (2, 2), (4, 4)} <= found
    assert len(found) > 4


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("max_staleness", [0, 2])
def test_an_evaluation_sees_its_version_and_every_row_once(seed: int, max_staleness: int) -> None:
    done = run(seed, max_staleness=max_staleness, save_every_steps=2, save_at_end=True)
    steps = [report for report in done.reports if isinstance(report, ReportStep)]
    assert [report.step for report in steps] == [1, 2, 3, 4, 5]
    expected = sum(reward(f"eval/{row}") for row in HELD_OUT) / len(HELD_OUT)
    for report in steps:
        assert ("eval/reward/mean" in report.metrics) == (report.step in (2, 4))
        if report.step in (2, 4):
            assert report.metrics["eval/reward/mean"] == pytest.approx(expected)
            assert report.metrics["eval/n_samples"] == 11
    [first] = [report for report in done.reports if isinstance(report, ReportEvaluation)]
    assert (first.step, first.metrics["eval/reward/mean"]) == (0, pytest.approx(expected))
    assert done.loads == run(seed, evaluated=False, max_staleness=max_staleness).loads


def test_contents_of_the_first_samples_are_reported_in_order() -> None:
    done = run(3)
    reports = [report for report in done.reports if isinstance(report, ReportSamples)]
    assert [report.step for report in reports] == [1, 2, 3, 4, 5]
    for report, ids in zip(reports, done.loads, strict=False):
        assert tuple(contents.id for contents in report.samples) == ids[:3]
        assert all(contents.versions["actor_gen"] == report.step - 1 for contents in report.samples)
        assert all(contents.columns["rewards"] == (reward(contents.id),) for contents in report.samples)


@pytest.mark.parametrize(("n_rows", "sizes"), [(11, [4, 4, 3]), (8, [4, 4]), (1, [1])])
@pytest.mark.parametrize("min_n_seqs", [None, 2])
def test_a_run_without_training_goes_over_every_row(n_rows: int, sizes: list[int], min_n_seqs: int | None) -> None:
    mfcs = [
        MFCDef("gen", "actor", GENERATE, "x", ("prompt_ids",), ("input_ids", "prompt_mask"), n_seqs=4),
        MFCDef("rew", "reward", INFERENCE, "x", ("input_ids",), ("rewards",), n_seqs=2, min_n_seqs=min_n_seqs),
    ]
    readout = Readout({"": "actor"}, {"": "gen"})
    plan = make_plan(mfcs, on_all(mfcs, CLUSTER), CLUSTER, n_steps=10**6, epochs=1, shuffle=False,
                     readout=readout)  # fmt: skip
    rows = tuple(f"r{i}" for i in range(n_rows))
    for seed in range(4):
        done = Workers(plan, seed, rows).run()
        reports = [report for report in done.reports if isinstance(report, ReportSamples)]
        assert [len(report.samples) for report in reports] == sizes
        assert [contents.id for report in reports for contents in report.samples] == [f"1/{row}" for row in rows]
        assert [r.metrics["n_samples"] for r in done.reports if isinstance(r, ReportStep)] == sizes


def test_a_run_that_only_evaluates_measures_what_it_went_over() -> None:
    mfcs = [
        MFCDef("gen", "actor", GENERATE, "x", ("prompt_ids",), ("input_ids", "prompt_mask"), n_seqs=4),
        MFCDef("rew", "reward", INFERENCE, "x", ("input_ids",), ("rewards",), n_seqs=4),
    ]
    plan = make_plan(
        mfcs, on_all(mfcs, CLUSTER), CLUSTER, readout=Readout({"": "actor"}, {"": "gen"}),
        eval_section={"only": True, "n_seqs": 7},
    )  # fmt: skip
    done = Workers(plan, seed=1).run()
    [report] = [report for report in done.reports if isinstance(report, ReportEvaluation)]
    assert (report.step, report.metrics["eval/n_samples"]) == (0, 7)
    assert report.metrics["eval/reward/mean"] == pytest.approx(sum(reward(f"eval/{row}") for row in ROWS[:7]) / 7)
    assert done.reports.index(report) == len(done.reports) - 2, "only Finish comes after it"


def test_a_worker_that_is_lost_in_an_evaluation_is_named_with_its_call() -> None:
    mfcs = ppo(4)
    allocations = on_all(mfcs, CLUSTER)
    plan = make_plan(mfcs, allocations, CLUSTER, eval_section={"at_start": True})
    workers = Workers(dataclasses.replace(plan, evaluation=eval_track(allocations, plan.main.config)), seed=2)
    for event in (Start(b"run"), *(Hello(rank, rank, "") for rank in range(2))):
        workers.feed(event)
    while not workers.taken:
        rank = workers.random.choice([rank for rank, inbox in enumerate(workers.inbox) if inbox])
        workers.feed(workers.answer(rank, workers.inbox[rank].popleft()))
    (abort,) = workers.master.handle(WorkerLost(1, -9, "killed"))
    assert abort.failure.message == "worker 1 ended (killed) in call 'eval_gen' of step 1"
    assert (abort.failure.waiting_ranks, abort.failure.waiting_calls) == ((0,), ("eval_gen",))


def test_evaluations_are_due_at_multiples_and_hold_training_back() -> None:
    times = EvaluationTimes(4, 9, every_steps=3, at_start=False)
    assert [step for step in range(4, 10) if times.is_due(step)] == [6]
    assert not times.blocks_training(6)
    assert times.blocks_training(7)
    times.add_done(6)
    assert times.is_due(9)
    times.add_done(9)
    assert not times.blocks_training(10)
    assert not EvaluationTimes(1, 2, every_steps=3, at_start=False).blocks_training(2)
    first = EvaluationTimes(1, 2, every_steps=0, at_start=True)
    assert first.blocks_training(1)
    first.add_done(0)
    assert not first.blocks_training(1)
