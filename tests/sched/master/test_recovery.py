"""Ends of a run that are followed by another attempt."""

import pytest

from realrl.sched.events import Failure, FailureKind
from realrl.sched.master.recovery import AttemptEnded, GiveUp, Recovery, Restart


def lost(step, call="gen", kind=FailureKind.WORKER_LOST):
    failure = Failure(kind=kind, message=f"worker 1 ended in {call}", call=call, step=step)
    return AttemptEnded(1, failure, 0 if step is None else step - 1)


def test_a_lost_worker_is_followed_by_a_restart_while_retries_are_left():
    recovery = Recovery(2)
    assert recovery.handle(lost(3)) == Restart(1, "worker 1 ended in gen")
    assert recovery.handle(lost(5, kind=FailureKind.WORKER_SILENT)) == Restart(2, "worker 1 ended in gen")
    assert recovery.handle(lost(7)) == GiveUp("The run was started again 2 times already (recover.retries).")


SAME_PLACE = GiveUp(
    "It happened at the same place 3 times without a step done in between, so the run is not started again."
)


def test_the_third_loss_at_one_place_is_no_accident():
    recovery = Recovery(9)
    assert isinstance(recovery.handle(lost(3)), Restart)
    assert isinstance(recovery.handle(lost(3, "train")), Restart)
    assert isinstance(recovery.handle(lost(3)), Restart)
    assert recovery.handle(lost(3)) == SAME_PLACE


def test_another_attempt_that_came_less_far_changes_nothing():
    recovery = Recovery(9)
    for event in (lost(5), lost(2), lost(5), lost(1)):  # a checkpoint of step 0: 5 is reached now and then
        assert isinstance(recovery.handle(event), Restart)
    assert recovery.handle(lost(5)) == SAME_PLACE


def test_a_step_done_in_between_forgets_the_place():
    recovery = Recovery(9)
    for event in (lost(5), lost(5), lost(6), lost(5), lost(5)):
        assert isinstance(recovery.handle(event), Restart)
    assert recovery.handle(lost(5)) == SAME_PLACE


def test_the_place_of_a_loss_outside_of_calls_is_the_step_under_way():
    recovery = Recovery(9)
    for step in (4, 4, 5, 5):
        assert isinstance(recovery.handle(AttemptEnded(1, lost(None, None).failure, step)), Restart)
    assert recovery.handle(AttemptEnded(1, lost(None, None).failure, 5)) == SAME_PLACE


def test_a_master_that_dies_without_a_word():
    recovery = Recovery(9)
    assert recovery.handle(AttemptEnded(-9, None, 4)) == Restart(1, "the master process died")
    assert isinstance(recovery.handle(AttemptEnded(-9, None, 5)), Restart)
    assert isinstance(recovery.handle(AttemptEnded(-9, None, 5)), Restart)
    assert recovery.handle(AttemptEnded(-9, None, 5)) == SAME_PLACE


def test_a_master_that_was_silent():
    event = AttemptEnded(-9, None, 4, silent_s=125.4)
    assert Recovery(1).handle(event) == Restart(1, "the master process gave no sign of life for 125 s")


@pytest.mark.parametrize("retries", [1, 2, 5])
def test_retries_count_all_restarts_of_a_run_however_far_it_comes(retries):
    recovery = Recovery(retries)
    events = [lost(10 * n) for n in range(1, retries + 2)]
    assert [recovery.handle(event).number for event in events[:-1]] == list(range(1, retries + 1))
    times = "once" if retries == 1 else f"{retries} times"
    assert recovery.handle(events[-1]) == GiveUp(f"The run was started again {times} already (recover.retries).")


@pytest.mark.parametrize(
    "event",
    [
        AttemptEnded(0, None, 9),
        AttemptEnded(1, None, 9),  # a bug of the master: it was told
        AttemptEnded(2, None, 0),
        AttemptEnded(-9, None, 3, is_interrupted=True),
        AttemptEnded(130, None, 3, is_interrupted=True),
        *(
            AttemptEnded(1, Failure(kind=kind, message="", step=1, error="ValueError"), 1)
            for kind in FailureKind
            if kind not in (FailureKind.WORKER_LOST, FailureKind.WORKER_SILENT)
        ),
    ],
    ids=str,
)
def test_what_is_not_tried_again(event):
    assert Recovery(9).handle(event) == GiveUp()


def test_without_retries_nothing_is_tried_again():
    assert Recovery(0).handle(lost(3)) == GiveUp()


@pytest.mark.parametrize("is_lost", [True, False])
def test_a_broken_connection_is_a_loss_even_if_nobody_died(is_lost):
    failure = Failure(kind=FailureKind.WORKER_FAILED, message="it failed", call="gen", step=2, lost_peer=is_lost)
    assert Recovery(1).handle(AttemptEnded(1, failure, 1)) == (Restart(1, "it failed") if is_lost else GiveUp())
