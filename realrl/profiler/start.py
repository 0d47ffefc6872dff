"""Start of a profile from a plan: processes as those of a run, and the file when they are done."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

import msgspec

from realrl.config.serialize import dump_config
from realrl.errors import ConfigError
from realrl.experiment.run_plan import RunPlan
from realrl.files import why_no_output, write_output
from realrl.profiler.hardware_files import named_hardware
from realrl.profiler.program import RESULT, SETTINGS, Settings
from realrl.profiler.sizes import subjects_of
from realrl.runtime.processes.machine import Accelerators, check_devices, worker_environments
from realrl.runtime.processes.session import SessionStart
from realrl.runtime.processes.supervise import run_inline, run_supervised

_PROGRAM, _HOST = "realrl.profiler.program:run_profile", "realrl.profiler.worker:ProfileWorker"


def profile_machine(plan: RunPlan, out: str, settings: Settings, found: Accelerators) -> int:
    """Measure this machine for a plan's models, and write a hardware file; returns the exit code.

    The file appears when everything is done, or not at all.

    Args:
        plan: plan of a run whose device is settled.
        out: path of the file.
        found: accelerators of this machine.

    Raises:
        UsageError: the plan needs other machines, a model cannot be read, or the file cannot be written; nothing was
            started.
    """
    config, path = plan.config, Path(out)
    if config.cluster.n_nodes > 1:
        raise ConfigError(
            f"cluster.n_nodes={config.cluster.n_nodes}, but a profile measures the machine on which it is typed",
            remedy="Use cluster.n_nodes=1, and set links.node of the file.",
        )
    check_devices(config, found)
    subjects_of(plan, memory_bytes=sys.maxsize)  # that there are models, and can be read
    if settings.base:
        named_hardware(settings.base)
    _check_output(path)
    folder = Path(tempfile.mkdtemp(prefix="realrl-profile-"))
    code = 1
    try:
        write_output(folder / SETTINGS, msgspec.json.encode(settings))
        start = SessionStart(
            run=dump_config(config.model_copy(update={"run_dir": str(folder)})),
            run_dir=str(folder),
            port=config.cluster.master_port,
            program=_PROGRAM,
            host=_HOST,
            environments=worker_environments(plan, found, os.environ),
        )
        code = run_inline(start) if config.launcher == "inline" else run_supervised(start)
        if code == 0:
            _publish(folder / RESULT, path)
            print(f"wrote {path}")
    finally:
        if code != 1:  # after a failure, the logs stay
            shutil.rmtree(folder, ignore_errors=True)
    return code


def _check_output(path: Path) -> None:
    reason = why_no_output(path)
    if not reason and not path.absolute().parent.is_dir():
        reason = "its folder does not exist"
    if not reason and not os.access(path.absolute().parent, os.W_OK | os.X_OK):
        reason = "there is no permission to write to its folder"
    if reason:
        raise ConfigError(f"--out {path}: {reason}", remedy="Choose another file.")


def _publish(result: Path, path: Path) -> None:
    """Copy the result beside the target, and put it in its place at once."""
    new = path.with_name(f".{path.name}.new")
    try:
        write_output(new, result.read_bytes())
        os.replace(new, path)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise ConfigError(f"--out {path}: {error.strerror or error}", remedy="Choose another file.") from error
