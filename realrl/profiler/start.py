"""Start of a profile from a plan: processes as those of a run, and the file when they are done."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from realrl.config.serialize import dump_config
from realrl.errors import ConfigError
from realrl.experiment.run_plan import RunPlan
from realrl.files import why_no_output, write_output
from realrl.profiler.hardware_files import named_hardware
from realrl.profiler.measurements import fitted_hardware, fitted_text, read_measurements
from realrl.profiler.program import MEASURED, RESULT, SETTINGS, Settings, summary
from realrl.profiler.sizes import subjects_of
from realrl.runtime.processes.machine import Accelerators, check_devices, worker_environments
from realrl.runtime.processes.session import SessionStart
from realrl.runtime.processes.supervise import run_inline, run_supervised

_PROGRAM, _HOST = "realrl.profiler.program:run_profile", "realrl.profiler.worker:ProfileWorker"


def profile_machine(
    plan: RunPlan, out: str, settings: Settings, found: Accelerators, *, measurements: str | None = None
) -> int:
    """Measure this machine for a plan's models, and write a hardware file; returns the exit code.

    The file appears when everything is done, or not at all.

    Args:
        plan: plan of a run whose device is settled.
        out: path of the file.
        found: accelerators of this machine.
        measurements: path of a file for the raw measurements; None for none.

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
    _check_output("--out", path)
    if measurements is not None:
        _check_output("--measurements", Path(measurements))
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
            _publish("--out", (folder / RESULT).read_bytes(), path)
            if measurements is not None:
                _publish("--measurements", (folder / MEASURED).read_bytes(), Path(measurements))
    finally:
        if code != 1:  # after a failure, the logs stay
            shutil.rmtree(folder, ignore_errors=True)
    return code


def fit_again(measurements: Sequence[str], out: str, base: str) -> None:
    """Write the hardware file of measurements that were made before.

    Args:
        measurements: paths of files, of one machine.
        base: see `Settings`.

    Raises:
        UsageError: a file cannot be used or written.
    """
    raw = read_measurements(measurements)
    _check_output("--out", Path(out))
    found = fitted_hardware(raw, base)
    for kind, errors in summary(found).items():
        print(f"{kind}: {errors}")
    _publish("--out", fitted_text(raw, found, base).encode(), Path(out))


def _check_output(option: str, path: Path) -> None:
    reason = why_no_output(path)
    if not reason and not path.absolute().parent.is_dir():
        reason = "its folder does not exist"
    if not reason and not os.access(path.absolute().parent, os.W_OK | os.X_OK):
        reason = "there is no permission to write to its folder"
    if reason:
        raise ConfigError(f"{option} {path}: {reason}", remedy="Choose another file.")


def _publish(option: str, content: bytes, path: Path) -> None:
    """Write the content beside the target, and put it in its place at once."""
    new = path.with_name(f".{path.name}.new")
    try:
        write_output(new, content)
        os.replace(new, path)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise ConfigError(f"{option} {path}: {error.strerror or error}", remedy="Choose another file.") from error
    print(f"wrote {path}")
