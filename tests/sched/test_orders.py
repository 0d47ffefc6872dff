"""The master under thousands of completion orders: exactly once, oldest first, bounded staleness, no deadlock.

What must hold at every moment is checked by the simulator; the tests say what must come out.
"""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from realrl.errors import InvalidTransitionError
from realrl.graph.mfc import MFCDef
from realrl.mesh.device_mesh import Allocation, Cluster, DeviceMesh, ParallelStrategy
from realrl.plan.minibatches import draw_minibatches
from realrl.plan.samples.cursor import DatasetCursor
from realrl.sched.events import (
    Abort,
    CheckpointFailed,
    FailureKind,
    Finish,
    Interrupted,
    Send,
    WorkerLost,
    WorkerSilent,
    decode_event,
    encode,
)
from realrl.sched.master.master_state import MasterState, RunPhase
from realrl.sched.messages import RunCall, WorkerFailed
from realrl.sched.track.track_plan import ResumePoint
from tests.sched.plans import INFERENCE, TRAIN, make_plan, on_all, plans, ppo, with_resume
from tests.sched.simulator import Simulation, Stuck, meta

SEEDS = st.integers(0, 2**32)
ROWS = st.integers(3, 30)


def orders(max_examples):
    """So many examples with ``--hypothesis-profile=thorough``; a third of them by default."""
    is_thorough = settings.get_current_profile_name() == "thorough"
    n = max_examples if is_thorough else max(10, max_examples // 3)
    return settings(max_examples=n, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def requests(simulation):
    """Every request in the order of the log, with its rank."""
    return [(i.rank, i.request) for batch in simulation.instructions for i in batch if isinstance(i, Send)]


def membership(simulation):
    """(call, step, rank) -> minibatches of every dispatch, for the calls that do not stream."""
    found = {}
    for rank, request in requests(simulation):
        if isinstance(request, RunCall) and simulation.calls[request.call].mfc.min_n_seqs is None:
            found.setdefault((request.call, request.step, rank), []).append(request.minibatches)
    return found


def split_ppo(**settings):
    """PPO with generation and training of the actor on devices 0-1, the critic on 2-3, ref on 0, reward on 3."""
    cluster = Cluster(1, 4)
    places = {
        "actor_gen": ((0, 1), 2), "actor_train": ((0, 1), 1), "critic_inf": ((2, 3), 1), "critic_train": ((2, 3), 2),
        "ref_inf": ((0,), 1), "rew_inf": ((3,), 1),
    }  # fmt: skip
    allocations = {
        name: Allocation(DeviceMesh(cluster, ranks), ParallelStrategy(dp, len(ranks) // dp, 1))
        for name, (ranks, dp) in places.items()
    }
    run = {key: settings.pop(key) for key in ("n_steps", "save_every_steps", "resume", "epochs") if key in settings}
    return make_plan(ppo(**settings), allocations, cluster, **run)


# ---------------------------------------------------------------- runs that end well


@orders(250)
@given(plan=plans(), seed=SEEDS, n_rows=ROWS)
def test_any_plan_ends_with_everything_done_once(plan, seed, n_rows):
    simulation = Simulation(plan, seed=seed, n_rows=n_rows).run()
    simulation.check_complete()
    assert simulation.start.last_step == plan.main.steps
    expected = DatasetCursor([f"row{i}" for i in range(n_rows)], seed=7, shuffle=plan.main.config.dataset.shuffle)
    assert simulation.order == [ref.id for ref in expected.take(0, plan.main.steps * plan.main.step_size)]
    every = plan.save.every_steps
    saved = {s for s in range(1, plan.main.steps + 1) if every and s % every == 0}
    assert set(simulation.checkpoints) == saved | ({plan.main.steps} if plan.save.at_end else set())


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
@pytest.mark.parametrize("min_n_seqs", [None, 2])
def test_many_orders_of_ppo_on_split_devices(max_staleness, min_n_seqs):
    plan = split_ppo(n_seqs=4, gen_n_seqs=2, max_staleness=max_staleness, min_n_seqs=min_n_seqs, save_every_steps=1)
    for seed in range(25):
        simulation = Simulation(plan, seed=seed, n_rows=5, validate=seed < 10).run()
        simulation.check_complete()
        for (name, step), versions in simulation.versions_read.items():
            oldest = max(0, step - 1 - max_staleness) if name in ("actor_gen", "critic_inf") else step - 1
            assert versions <= set(range(oldest, step)), (name, step)


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_many_orders_of_ppo_on_shared_devices(dp):
    cluster = Cluster(1, 4)
    mfcs = ppo(n_seqs=8, gen_n_seqs=4)
    plan = make_plan(mfcs, on_all(mfcs, cluster, dp), cluster)
    memberships = []
    for seed in range(50):
        simulation = Simulation(plan, seed=seed, n_rows=11, validate=seed < 10).run()
        simulation.check_complete()
        for (_, step), versions in simulation.versions_read.items():
            assert versions == {step - 1}
        memberships.append(membership(simulation))
    assert all(found == memberships[0] for found in memberships)


@orders(60)
@given(plan=plans(), seeds=st.tuples(SEEDS, SEEDS, SEEDS), n_rows=ROWS)
def test_membership_does_not_depend_on_the_order(plan, seeds, n_rows):
    runs = [Simulation(plan, seed=seed, n_rows=n_rows, validate=False).run() for seed in seeds]
    assert membership(runs[0]) == membership(runs[1]) == membership(runs[2])
    assert len({tuple(run.order) for run in runs}) == 1


@orders(40)
@given(plan=plans(), seed=SEEDS, n_rows=ROWS)
def test_replay_of_the_event_log(plan, seed, n_rows):
    simulation = Simulation(plan, seed=seed, n_rows=n_rows, validate=False).run()
    again = MasterState(plan)
    assert [again.handle(decode_event(encode(event))) for event in simulation.events] == simulation.instructions


def test_minibatches_are_drawn_by_the_number_of_the_batch_in_its_step():
    mfcs = [
        MFCDef("score", "b", INFERENCE, "x", ("prompt_ids",), ("k",), n_seqs=24),
        MFCDef("train", "a", TRAIN, "x", ("prompt_ids",), n_seqs=8, n_minibatches=2, n_passes=2),
    ]
    plan = make_plan(mfcs, on_all(mfcs, Cluster(1, 1)), Cluster(1, 1), n_steps=3)
    whole = Simulation(plan, seed=1, n_rows=50).run()
    resumed = with_resume(plan, ResumePoint(1, whole.master.cursor_state(1)))
    for run in (whole, Simulation(resumed, seed=2, n_rows=50).run()):
        for step in range(run.plan.first_step, 4):
            batches = membership(run)["train", step, 0]
            for number, minibatches in enumerate(batches):
                start = 24 * (step - run.plan.first_step) + 8 * number
                ids = run.order[start : start + 8]
                lengths = [length for (length,) in meta(ids, ["prompt_ids"]).seqlens["prompt_ids"]]
                drawn = draw_minibatches(lengths, 2, n_passes=2, seed=7, step=step, batch=number)
                assert minibatches == tuple(tuple(ids[i] for i in members) for members in drawn)
            assert len(batches) == 3


def test_staleness_lets_generation_run_ahead_of_training():
    def is_ahead(plan, seed):
        run = Simulation(plan, seed=seed, n_rows=50).run()
        return any(min(versions) < step - 1 for (_, step), versions in run.versions_read.items())

    assert any(is_ahead(split_ppo(max_staleness=1), seed) for seed in range(10))
    assert not any(is_ahead(split_ppo(max_staleness=0), seed) for seed in range(10))


def test_a_step_may_straddle_epochs():
    mfcs = ppo(n_seqs=4, n_minibatches=1)
    plan = make_plan(mfcs, on_all(mfcs, Cluster(1, 1)), Cluster(1, 1), epochs=2, n_steps=100)
    simulation = Simulation(plan, seed=1, n_rows=7).run()
    simulation.check_complete()
    assert [report.epoch for report in simulation.reports] == [1, 2, 2]  # two of 14 samples are dropped
    epochs = [[sample_id.split("/")[0] for sample_id in simulation.order[i : i + 4]] for i in (0, 4, 8)]
    assert epochs == [["1"] * 4, ["1", "1", "1", "2"], ["2"] * 4]
    assert len({sample_id.split("/")[1] for sample_id in simulation.order[:7]}) == 7


@orders(40)
@given(plan=plans(), seed=SEEDS, n_rows=ROWS, data=st.data())
def test_resumed_run_continues_with_the_same_samples(plan, seed, n_rows, data):
    whole = Simulation(plan, seed=seed, n_rows=n_rows).run()
    step = data.draw(st.integers(0, plan.main.steps - 1))
    point = ResumePoint(step, whole.master.cursor_state(step))
    resumed = Simulation(with_resume(plan, point), seed=seed + 1, n_rows=n_rows).run()
    resumed.check_complete()
    assert resumed.start.first_step == step + 1
    assert resumed.order == whole.order[step * plan.main.step_size :]
    after = {key: batches for key, batches in membership(whole).items() if key[1] > step}
    assert membership(resumed) == after


# ---------------------------------------------------------------- runs that do not


@orders(100)
@given(plan=plans(), seed=SEEDS, n_actions=st.integers(0, 120), late=st.integers(0, 30))
def test_failure_at_any_point_aborts_at_once_with_the_first_cause(plan, seed, n_actions, late):
    simulation = Simulation(plan, seed=seed, n_rows=10).run(stop_after=n_actions)
    if simulation.end is not None:
        return
    draw_from = random.Random(seed)
    rank = draw_from.randrange(plan.main.n_ranks)
    request = simulation.ranks[rank].inbox[0] if simulation.ranks[rank].inbox else None
    if request is not None and draw_from.random() < 0.5:
        call, step = getattr(request, "call", None), getattr(request, "step", None)
        event = WorkerFailed(rank, request.seq, call, step, "ValueError", "bad", "Traceback", 1)
        kind = FailureKind.WORKER_FAILED
    elif draw_from.random() < 0.5:
        event, kind = WorkerLost(rank, -9, "killed"), FailureKind.WORKER_LOST
    else:
        event, kind = WorkerSilent(rank, "computing", 60.0), FailureKind.WORKER_SILENT
    was_closing = simulation.master.phase is RunPhase.CLOSING
    if was_closing and (request is None or kind is not FailureKind.WORKER_FAILED):
        return
    (abort,) = simulation.master.handle(event)
    assert isinstance(abort, Abort)
    assert (abort.failure.kind, abort.failure.rank) == (kind, rank)
    assert f"worker {rank}" in abort.failure.message
    assert rank not in abort.failure.waiting_ranks
    for r in simulation.ranks:  # whatever is still on its way, and more
        for reply in [*r.replies, *r.replies][:late]:
            assert simulation.master.handle(reply) == []
    assert simulation.master.handle(WorkerLost((rank + 1) % plan.main.n_ranks, 1, "")) == []
    assert simulation.master.handle(Interrupted("SIGINT")) == []
    assert simulation.master.phase is RunPhase.ABORTED


@orders(100)
@given(plan=plans(), seed=SEEDS, n_actions=st.integers(0, 120), n_lost=st.integers(0, 2))
def test_interruption_at_any_point_ends_in_order(plan, seed, n_actions, n_lost):
    simulation = Simulation(plan, seed=seed, n_rows=10).run(stop_after=n_actions)
    is_saved = plan.save.writes and simulation.master.phase is RunPhase.RUNNING  # see test_interruptions
    if simulation.end is not None or simulation.master.phase is RunPhase.CLOSING or is_saved:
        return
    simulation.feed(Interrupted("SIGINT"))
    assert simulation.master.is_over or simulation.master.phase is RunPhase.CLOSING
    for rank in range(n_lost):
        if rank < plan.main.n_ranks:
            lose(simulation, rank)
    while simulation.end is None:
        try:
            simulation.act()
        except Stuck:  # the ranks that wait for a lost one never say Goodbye: the shell kills them
            lose(simulation, next(rank for rank, r in enumerate(simulation.ranks) if r.inbox and not r.is_dead))
    assert simulation.end == Finish("SIGINT", simulation.end.spans)
    assert simulation.master.is_over


def lose(simulation, rank):
    if simulation.end is None:
        simulation.ranks[rank].is_dead = True
        simulation.feed(WorkerLost(rank, -9, ""))


@orders(60)
@given(plan=plans(), seed=SEEDS, n_actions=st.integers(1, 120))
def test_duplicate_reply_is_refused_with_a_story(plan, seed, n_actions):
    simulation = Simulation(plan, seed=seed, n_rows=10).run(stop_after=n_actions)
    replies = [event for event in simulation.events if hasattr(event, "seq")]
    if simulation.master.phase in (RunPhase.CLOSING, RunPhase.FINISHED) or not replies:
        return
    reply = random.Random(seed).choice(replies)
    with pytest.raises(InvalidTransitionError, match=f"worker {reply.rank} sent .*is answered already\nstory:"):
        simulation.master.handle(reply)


@orders(30)
@given(plan=plans(), seed=SEEDS)
def test_late_duplicates_are_tolerated_after_an_interruption(plan, seed):
    simulation = Simulation(plan, seed=seed, n_rows=10).run(stop_after=30)
    if simulation.end is not None or simulation.master.phase is RunPhase.CLOSING or plan.save.writes:
        return
    simulation.feed(Interrupted("SIGTERM"))
    for event in [event for event in simulation.events if hasattr(event, "seq")]:
        assert simulation.master.handle(event) == []
    simulation.run()
    assert simulation.end == Finish("SIGTERM", simulation.end.spans)


def test_checkpoint_that_cannot_be_written_aborts():
    simulation = Simulation(split_ppo(save_every_steps=1), seed=3, n_rows=10)
    while not simulation.commits:
        simulation.run(stop_after=1)
    (abort,) = simulation.feed(CheckpointFailed(1, "step 1: no space left on device"))
    assert abort.failure.kind is FailureKind.CHECKPOINT
    assert abort.failure.message == "step 1: no space left on device"
