"""Which ends of a run are followed by another attempt."""

import pytest

from realrl.sched.events import Failure, FailureKind
from realrl.sched.recovery import AttemptEnded, GiveUp, Recovery, Restart


def lost(step, call="gen", kind=FailureKind.WORKER_LOST):
    return AttemptEnded(1, Failure(kind=kind, message=f"worker 1 ended in {call}", call=call, step=step), step - 1)


def test_a_lost_worker_is_followed_by_a_restart_while_retries_are_left():
    recovery = Recovery(2)
    assert recovery.handle(lost(3)) == Restart(1, "worker 1 ended in gen")
    assert recovery.handle(lost(5, kind=FailureKind.WORKER_SILENT)) == Restart(2, "worker 1 ended in gen")
    assert recovery.handle(lost(7)) == GiveUp("The run was started again 2 times already (recover.retries).")


def test_what_happens_twice_at_one_place_happens_again():
    recovery = Recovery(9)
    assert isinstance(recovery.handle(lost(3)), Restart)
    assert isinstance(recovery.handle(lost(3, "train")), Restart)
    assert isinstance(recovery.handle(lost(4)), Restart)
    decision = recovery.handle(lost(3))
    assert decision == GiveUp("It happened at the same place before, so the run is not started again.")


def test_a_master_that_dies_without_a_word():
    recovery = Recovery(9)
    assert recovery.handle(AttemptEnded(-9, None, 4)) == Restart(1, "the master process died")
    assert isinstance(recovery.handle(AttemptEnded(-9, None, 5)), Restart)
    assert isinstance(recovery.handle(AttemptEnded(-9, None, 5)), GiveUp)


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


def test_a_message_that_did_not_arrive_is_a_loss():
    failure = Failure(kind=FailureKind.WORKER_FAILED, message="cannot pull", call="gen", step=2, error="TransportError")
    assert Recovery(1).handle(AttemptEnded(1, failure, 1)) == Restart(1, "cannot pull")
