"""Calls on meshes of their own: what goes first, who waits for whom, and which version everybody sees."""

import dataclasses

import pytest

from realrl.graph.mfc import InterfaceType, MFCDef, ModelName, OffloadHook, ParamReallocHook
from realrl.mesh.device_mesh import Cluster
from realrl.mesh.notation import parse_allocation
from realrl.sched.events import Send, WorkerLost, WorkerSilent
from realrl.sched.messages import (
    CallDone,
    HooksDone,
    MoveRows,
    RowsMoved,
    RunCall,
    RunHooks,
    SaveCheckpoint,
    WorkerFailed,
)
from tests.sched.plans import make_plan, ppo
from tests.sched.simulator import Simulation

NODE = Cluster(1, 8)
TABLE = {
    "actor_gen": "d4t1p2@0:0-7", "critic_inf": "d2@0:0-1", "rew_inf": "p2@0:2-3", "ref_inf": "p4@0:4-7",
    "critic_train": "d2p2@0:4-7", "actor_train": "d2p2@0:0-3",
}  # fmt: skip


def table_plan(changes=(), mfcs=None, max_staleness=0, **settings):
    """PPO on eight devices; `changes` are fields of single calls."""
    mfcs = ppo(n_seqs=8, n_minibatches=1, max_staleness=max_staleness) if mfcs is None else mfcs
    mfcs = [dataclasses.replace(mfc, **dict(changes).get(mfc.name, {})) for mfc in mfcs]
    places = {**TABLE, "teach": "d2@0:2-3"}
    return make_plan(mfcs, {mfc.name: parse_allocation(places[mfc.name], NODE) for mfc in mfcs}, NODE, **settings)


def requests_to(simulation, rank):
    """Parts that a rank was sent, as words."""
    sent = [i.request for batch in simulation.instructions for i in batch if isinstance(i, Send) and i.rank == rank]
    return [words(request) for request in sent if isinstance(request, RunCall | RunHooks | MoveRows)]


def words(request):
    kind = {RunCall: "run", MoveRows: "rows"}.get(type(request)) or request.when
    return f"{kind} {request.call}"


def batch_with(simulation, request_type, call):
    """The instructions of the event that brought about the first such request."""
    for batch in simulation.instructions:
        sent = [i.request for i in batch if isinstance(i, Send)]
        if any(isinstance(request, request_type) and request.call == call for request in sent):
            return [(i.rank, words(i.request)) for i in batch if isinstance(i, Send) and hasattr(i.request, "call")]
    raise AssertionError(call)


AVERAGE = {"actor_train": {"post_hooks": (ParamReallocHook(target=ModelName("ref"), eta=0.1),)}}


# ---------------------------------------------------------------- what goes first


@pytest.mark.parametrize("seed", range(5))
def test_hooks_do_not_wait_behind_calls_that_start_at_the_same_moment(seed):
    simulation = Simulation(table_plan(n_steps=1), seed=seed, n_rows=8).run()
    simulation.check_complete()
    together = batch_with(simulation, RunCall, "ref_inf")
    for rank in range(4, 8):
        mine = [word for other, word in together if other == rank]
        assert mine == ["before critic_inf", "run ref_inf"]
    assert [word for rank, word in together if rank == 0] == ["before critic_inf", "run critic_inf"]
    order = [word for _, word in together]
    assert max(i for i, word in enumerate(order) if word.startswith("before")) < order.index("run critic_inf")


def test_calls_with_hooks_of_others_are_served_first():
    simulation = Simulation(table_plan(n_steps=1), seed=2, n_rows=8).run()
    position = {dispatch: i for i, (dispatch, _) in reversed(list(enumerate(simulation.position)))}
    started = {call: dispatch for (call, _), dispatch in simulation.dispatch_of.items()}
    assert [mfc.name for mfc in ppo()][1:4] == ["rew_inf", "ref_inf", "critic_inf"]
    assert position[started["critic_inf"]] < position[started["rew_inf"]] < position[started["ref_inf"]]
    assert started["critic_inf"] < started["rew_inf"]


@pytest.mark.parametrize("seed", range(5))
def test_rows_do_not_wait_behind_calls_that_start_at_the_same_moment(seed):
    """Both trainings start together, and each needs rows that ranks of the other hold."""
    simulation = Simulation(table_plan(n_steps=1, moves_rows=True), seed=seed, n_rows=8).run()
    simulation.check_complete()
    order = [word for _, word in batch_with(simulation, RunCall, "actor_train")]
    assert "run critic_train" in order
    first_call = min(i for i, word in enumerate(order) if word.startswith("run"))
    assert {"rows actor_train", "rows critic_train"} <= set(order[:first_call])
    assert not any(word.startswith("rows") for word in order[first_call:])
    assert any(isinstance(event, RowsMoved) for event in simulation.events)


def test_rows_are_pulled_unless_they_move_by_collectives():
    simulation = Simulation(table_plan(n_steps=1), seed=1, n_rows=8).run()
    sent = [i.request for batch in simulation.instructions for i in batch if isinstance(i, Send)]
    assert not any(isinstance(request, MoveRows) for request in sent)
    assert any(request.transfers for request in sent if isinstance(request, RunCall))


def test_hooks_after_a_call_on_its_own_devices_go_out_with_it():
    plan = table_plan({"ref_inf": {"post_hooks": (OffloadHook(),)}, **AVERAGE}, n_steps=1)
    simulation = Simulation(plan, seed=4, n_rows=8).run()
    simulation.check_complete()
    together = [word for rank, word in batch_with(simulation, RunCall, "ref_inf") if rank == 5]
    assert together[-2:] == ["run ref_inf", "after ref_inf"]
    later = batch_with(simulation, RunHooks, "actor_train")
    assert later == [(rank, "after actor_train") for rank in range(8)]
    assert all("after" not in word for _, word in batch_with(simulation, RunCall, "actor_train"))


def test_two_calls_on_one_device_never_hold_their_parameters_at_once():
    """Hooks go ahead of calls that start at the same moment, but not of one on the same devices."""
    places = {"gen": "d2@0:0-1", "one": "t2@0:0-1", "two": "p2@0:0-1"}
    mfcs = [MFCDef("gen", "a", InterfaceType.GENERATE, "x", ("prompt_ids",), ("ids",), n_seqs=4)]
    mfcs += [MFCDef(n, "a", InterfaceType.INFERENCE, "x", ("ids",), (f"k{n}",), n_seqs=4) for n in ("one", "two")]
    allocations = {name: parse_allocation(text, Cluster(1, 2)) for name, text in places.items()}
    for seed in range(10):
        simulation = Simulation(make_plan(mfcs, allocations, Cluster(1, 2)), seed=seed, n_rows=4).run(stop_after=0)
        while simulation.end is None:
            simulation.act()
            assert all(len(r.visiting) <= 1 for r in simulation.ranks)
        simulation.check_complete()
        assert requests_to(simulation, 0)[1:5] == ["before one", "run one", "before two", "run two"]


# ---------------------------------------------------------------- versions


@pytest.mark.parametrize("seed", range(20))
def test_an_average_is_seen_by_the_next_step_and_not_before(seed):
    simulation = Simulation(table_plan(AVERAGE, n_steps=4, save_every_steps=1), seed=seed, n_rows=8).run()
    simulation.check_complete()
    for step in range(1, 5):
        assert simulation.versions_moved["actor_train", step, "ref"] == {step}
        assert simulation.versions_read["ref_inf", step] == {step - 1}
        assert simulation.versions_read["actor_gen", step] == {step - 1}
        assert simulation.versions_read["critic_inf", step] == {step - 1}


@pytest.mark.parametrize("seed", range(20))
def test_an_average_that_no_data_orders_against_its_reader(seed):
    mfcs = ppo(n_seqs=8, n_minibatches=1)
    mfcs.append(MFCDef("teach", "teacher", InterfaceType.INFERENCE, "x", ("input_ids",), ("hints",), n_seqs=2))
    average = ParamReallocHook(target=ModelName("teacher"), eta=0.1)
    plan = table_plan({"actor_train": {"post_hooks": (average,)}}, mfcs, n_steps=4, save_every_steps=1)
    simulation = Simulation(plan, seed=seed, n_rows=8).run()
    simulation.check_complete()
    assert all(simulation.versions_read["teach", step] == {step - 1} for step in range(1, 5))


@pytest.mark.parametrize("seed", range(20))
def test_a_pulled_copy_is_of_the_version_of_its_step(seed):
    pull = {"ref_inf": {"pre_hooks": (ParamReallocHook(source=ModelName("actor")),)}}
    simulation = Simulation(table_plan(pull, n_steps=4, save_every_steps=1), seed=seed, n_rows=8).run()
    simulation.check_complete()
    for step in range(1, 5):
        assert simulation.versions_moved["ref_inf", step, "ref"] == {step - 1}
        assert simulation.versions_read["ref_inf", step] == {step}


@pytest.mark.parametrize("max_staleness", [1, 2])
def test_stale_parameters_are_at_most_so_old_on_every_rank(max_staleness):
    plan = table_plan(AVERAGE, n_steps=5, max_staleness=max_staleness)
    for seed in range(10):
        simulation = Simulation(plan, seed=seed, n_rows=8, validate=seed < 2).run()
        simulation.check_complete()
        for name in ("actor_gen", "critic_inf"):
            for step in range(1, 6):
                (version,) = simulation.versions_read[name, step]
                assert max(0, step - 1 - max_staleness) <= version <= step - 1


def test_a_checkpoint_holds_averages_of_exactly_its_steps():
    """The simulator compares the homes of trained and of averaged roles with the step at each SaveCheckpoint."""
    pull = {"pre_hooks": (ParamReallocHook(source=ModelName("actor"), eta=0.5),), "max_staleness": 2}
    mfcs = ppo(n_seqs=4, n_minibatches=1, max_staleness=2)
    mfcs = [dataclasses.replace(mfc, **pull) if mfc.name == "ref_inf" else mfc for mfc in mfcs]
    devices = {"actor_gen": 0, "rew_inf": 1, "ref_inf": 1, "actor_train": 2, "critic_inf": 3, "critic_train": 3}
    allocations = {name: parse_allocation(f"d1@0:{device}", NODE) for name, device in devices.items()}
    plan = make_plan(mfcs, allocations, NODE, n_steps=4, save_every_steps=1)
    for seed in range(40):
        simulation = Simulation(plan, seed=seed, n_rows=8, validate=False).run()
        simulation.check_complete()
        sent = [i.request for batch in simulation.instructions for i in batch if isinstance(i, Send)]
        assert sum(isinstance(request, SaveCheckpoint) for request in sent) == 4 * 8


# ---------------------------------------------------------------- the log


def test_moved_bytes_are_counted_by_step():
    simulation = Simulation(table_plan(AVERAGE, n_steps=2, moves_rows=True), seed=3, n_rows=8).run()
    for report in simulation.reports:
        of_step = [event for event in simulation.events if getattr(event, "step", None) == report.step]
        params = sum(event.bytes_received for event in of_step if isinstance(event, HooksDone))
        data = sum(event.bytes_received for event in of_step if isinstance(event, CallDone | RowsMoved))
        assert report.metrics["bytes/params"] == params > 0
        assert report.metrics["bytes/data"] == data > 0


# ---------------------------------------------------------------- failures


def stopped_in(plan, request_type, call, rank, *, seed=0):
    """A simulation in which `rank` has begun a request of this type for this call."""
    simulation = Simulation(plan, seed=seed, n_rows=8)
    simulation.run(stop_after=0)
    while simulation.end is None:
        r = simulation.ranks[rank]
        head = r.inbox[0] if r.inbox else None
        if r.has_entered and isinstance(head, request_type) and head.call == call:
            while r.replies:  # what it did before, the master knows
                simulation.feed(r.replies.popleft())
            return simulation, head
        simulation.act()
    raise AssertionError(f"rank {rank} never ran {call}")


@pytest.mark.parametrize(
    ("request_type", "call", "rank", "where"),
    [
        (RunHooks, "critic_inf", 6, "in the hooks before call 'critic_inf' of step 1"),
        (RunHooks, "actor_train", 6, "in the hooks after call 'actor_train' of step 1"),
        (MoveRows, "actor_train", 0, "while moving rows for call 'actor_train' of step 1"),
        (RunCall, "ref_inf", 6, "in call 'ref_inf' of step 1"),
    ],
)
@pytest.mark.parametrize("is_silent", [False, True])
def test_a_rank_that_is_lost_is_reported_with_what_it_was_doing(request_type, call, rank, where, is_silent):
    event = WorkerSilent(rank, "busy", 60.0) if is_silent else WorkerLost(rank, -9, "")
    simulation, request = stopped_in(table_plan(AVERAGE, moves_rows=True), request_type, call, rank)
    (abort,) = simulation.master.handle(event)
    assert where in abort.failure.message
    assert (abort.failure.call, abort.failure.step, abort.failure.rank) == (call, 1, rank)
    part = [other for other, r in enumerate(simulation.ranks) if request.dispatch_id in dispatches_of(r, type(request))]
    assert set(part) - {rank} <= set(abort.failure.waiting_ranks)
    assert call in abort.failure.waiting_calls


def dispatches_of(rank, request_type):
    return {request.dispatch_id for request in rank.inbox if isinstance(request, request_type)}


def test_ranks_that_wait_in_hooks_are_named_together_with_those_that_wait_for_them():
    simulation, _ = stopped_in(table_plan(), RunHooks, "critic_inf", 6)
    (abort,) = simulation.master.handle(WorkerLost(6, -9, "killed"))
    assert {0, 1, 4, 5, 7} <= set(abort.failure.waiting_ranks)
    assert set(abort.failure.waiting_calls) >= {"critic_inf", "ref_inf"}
    assert simulation.master.explain("critic_inf").startswith("in the hooks before step 1 on ranks")


def test_a_failure_inside_hooks_names_the_call():
    simulation, request = stopped_in(table_plan(), RunHooks, "critic_inf", 1)
    reply = WorkerFailed(1, request.seq, "critic_inf", 1, "RuntimeError", "out of memory", "Traceback", 1)
    (abort,) = simulation.master.handle(reply)
    assert abort.failure.message == "worker 1 failed in call 'critic_inf' of step 1: RuntimeError: out of memory"
