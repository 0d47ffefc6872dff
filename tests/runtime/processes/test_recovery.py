"""Files that a failed attempt leaves behind, and words that tell the user of a restart."""

from __future__ import annotations

from pathlib import Path

import pytest

from realrl.runtime.checkpoints.resume import newest
from realrl.runtime.checkpoints.store import CheckpointStore, Resume
from realrl.runtime.processes.recovery import (
    FAILURE_FILE,
    describe_end,
    describe_restart,
    forget_failure,
    write_failure,
)
from realrl.sched.events import Failure, FailureKind
from realrl.sched.master.recovery import AttemptEnded, Restart
from tests.runtime.checkpoints.test_store import write

FAILURE = Failure(kind=FailureKind.WORKER_LOST, message="worker 1 ended (killed by SIGKILL)", call="gen", step=7)


def test_the_supervisor_reads_what_the_master_wrote(tmp_path: Path) -> None:
    assert describe_end(tmp_path, -9, is_interrupted=False) == AttemptEnded(-9, None, 0)
    write_failure(tmp_path, FAILURE)
    (tmp_path / "metrics.jsonl").write_text('{"step": 5}\n{"step": 6}\n{"st')
    assert describe_end(tmp_path, 1, is_interrupted=True) == AttemptEnded(1, FAILURE, 6, is_interrupted=True)
    forget_failure(tmp_path)
    forget_failure(tmp_path)
    assert describe_end(tmp_path, 1, is_interrupted=False).failure is None
    (tmp_path / FAILURE_FILE).write_text("{")
    assert describe_end(tmp_path, 1, is_interrupted=False).failure is None


@pytest.mark.parametrize(
    ("step", "done", "told"),
    [
        (None, 0, "going on from the beginning"),
        (None, 2, "going on from the beginning; steps 1 to 2 are done again"),
        (5, 5, "going on from the checkpoint of step 5"),
        (5, 6, "going on from the checkpoint of step 5; step 6 is done again"),
    ],
)
def test_the_user_is_told_what_is_lost(tmp_path: Path, step: int | None, done: int, told: str) -> None:
    store = CheckpointStore(tmp_path, keep=2, experiment="ppo")
    resume = Resume(None if step is None else write(store, step))
    text = describe_restart(Restart(1, FAILURE.message), 3, resume, done)
    assert text == f"restart 1 of 3: worker 1 ended (killed by SIGKILL); {told}"


@pytest.mark.parametrize(
    ("elsewhere", "own", "expected"),
    [
        (None, (), None),
        (None, (2, 4), "own 4"),
        (5, (), "elsewhere 5"),
        (5, (3,), "elsewhere 5"),  # an earlier run left it
        (5, (3, 6), "own 6"),
    ],
)
def test_a_restart_begins_at_what_this_run_reached(
    tmp_path: Path, elsewhere: int | None, own: tuple[int, ...], expected: str | None
) -> None:
    store, other = (CheckpointStore(tmp_path / name, keep=9, experiment="ppo") for name in ("own", "elsewhere"))
    first = Resume(None if elsewhere is None else write(other, elsewhere))
    for step in own:
        write(store, step)
    folder = newest(store, first).folder
    told = None if folder is None else f"{folder.parent.name} {folder.name.removeprefix('step_')}"
    assert told == expected
