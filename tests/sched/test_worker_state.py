"""The worker's logic: order, refusal after a failure, and what the heartbeat tells."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realrl.errors import InvalidTransitionError
from realrl.sched.messages import (
    FreeSamples,
    Heartbeat,
    Initialize,
    LoadSamples,
    MoveRows,
    RunCall,
    RunHooks,
    SaveCheckpoint,
    Shutdown,
)
from realrl.sched.worker_state import WorkerPhase, WorkerState


def init(seq):
    return Initialize(seq, b"", ())


def call(seq):
    return RunCall(seq, 1, "actor_gen", 3, (("1/a",),), ())


def ready_worker(n_done=1):
    state = WorkerState(3)
    for seq in range(n_done):
        assert state.begin(init(seq) if seq == 0 else call(seq), now_s=0.0)
        state.finish(now_s=0.0)
    return state


def test_a_life():
    state = WorkerState(3)
    requests = [
        init(0), LoadSamples(1, ("1/a",), (0,)), call(2), FreeSamples(3, ("1/a",)), SaveCheckpoint(4, 3, "x"),
        MoveRows(5, 2, "actor_train", 3, (), ()), RunHooks(6, 2, "actor_train", 3, "after"), Shutdown(7),
    ]  # fmt: skip
    activities = []
    for request in requests:
        assert state.begin(request, now_s=10.0)
        state.validate()
        assert (state.phase, state.request) == (WorkerPhase.BUSY, request)
        activities.append(state.heartbeat(12.5))
        state.finish(now_s=13.0)
        state.validate()
    assert [beat.activity for beat in activities] == [
        "starting", "loading samples", "actor_gen", "freeing samples", "saving step 3",
        "moving rows for actor_train", "hooks after actor_train", "shutting down",
    ]  # fmt: skip
    assert [beat.seq for beat in activities] == list(range(8))
    assert {beat.busy_s for beat in activities} == {2.5}
    assert state.phase is WorkerPhase.CLOSED


def test_heartbeat():
    state = ready_worker()
    assert state.heartbeat(100.0) == Heartbeat(3, -1, "idle", 0.0)
    state.begin(call(1), now_s=100.0)
    assert state.heartbeat(104.0) == Heartbeat(3, 1, "actor_gen", 4.0)
    state.finish(now_s=105.0)
    assert state.heartbeat(106.0) == Heartbeat(3, -1, "idle", 0.0)


def test_after_a_failure_only_shutdown_is_executed():
    state = ready_worker()
    state.begin(call(1), now_s=0.0)
    state.fail(now_s=1.0)
    assert state.phase is WorkerPhase.FAILED
    assert not state.begin(call(2), now_s=1.0)
    assert not state.begin(SaveCheckpoint(3, 1, "x"), now_s=1.0)
    assert state.begin(Shutdown(4), now_s=1.0)
    state.finish(now_s=1.0)
    assert state.phase is WorkerPhase.CLOSED


def test_shutdown_may_come_first():
    assert WorkerState(0).begin(Shutdown(0), now_s=0.0)


@pytest.mark.parametrize(
    ("n_done", "wrong", "message"),
    [
        (0, call(0), "request 0, actor_gen, before it was initialised"),
        (1, init(1), "request 1, starting, but it was initialised before"),
        (2, call(1), "worker 3 got request 1, actor_gen, twice: it expects request 2"),
        (2, call(3), "worker 3 got request 3, actor_gen, too early: it expects request 2"),
    ],
)
def test_illegal_events_tell_the_story(n_done, wrong, message):
    state = ready_worker(n_done)
    with pytest.raises(InvalidTransitionError, match=message) as caught:
        state.begin(wrong, now_s=0.0)
    assert len(caught.value.story) == 2 * n_done
    assert n_done == 0 or "new -> busy: request 0, starting" in str(caught.value)


def test_nothing_can_end_before_it_begins():
    state = ready_worker()
    with pytest.raises(InvalidTransitionError, match="executes nothing that could end"):
        state.finish(now_s=0.0)


def test_one_request_at_a_time():
    state = ready_worker()
    state.begin(call(1), now_s=0.0)
    with pytest.raises(InvalidTransitionError, match="got request 2, actor_gen, while it executes request 1"):
        state.begin(call(2), now_s=0.0)


def test_nothing_comes_after_the_end():
    state = ready_worker()
    state.begin(Shutdown(1), now_s=0.0)
    state.finish(now_s=0.0)
    with pytest.raises(InvalidTransitionError, match="cannot go from closed to busy"):
        state.begin(call(2), now_s=0.0)


@given(st.lists(st.sampled_from(["next", "repeat", "gap", "finish", "fail"]), max_size=30))
def test_any_sequence_of_events_keeps_the_order(actions):
    state, executed = ready_worker(), []
    n_accepted, has_failed = 1, False
    for action in actions:
        is_busy = state.request is not None
        try:
            if action in ("finish", "fail"):
                (state.finish if action == "finish" else state.fail)(now_s=0.0)
                assert is_busy
                has_failed |= action == "fail"
            else:
                seq = n_accepted + {"next": 0, "repeat": -1, "gap": 1}[action]
                if state.begin(call(seq), now_s=0.0):
                    assert not has_failed
                    executed.append(seq)
                assert action == "next"
                assert not is_busy
                n_accepted += 1
        except InvalidTransitionError:
            assert is_busy == (action == "next") or action in ("repeat", "gap")
        state.validate()
    assert executed == list(range(1, len(executed) + 1))
