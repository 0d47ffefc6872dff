"""From a resolved configuration to a running experiment: the run folder, the checks, the launcher."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path

from realrl.config.schema import RunConfig
from realrl.config.serialize import dump_config
from realrl.errors import ConfigError
from realrl.experiment import Experiment
from realrl.runtime.preflight import check_inputs
from realrl.runtime.run_plan import plan_run
from realrl.runtime.session import SessionStart
from realrl.runtime.supervise import run_inline, run_supervised

CONFIG_FILE = "config.json"


def start_run(experiment: Experiment, config: RunConfig) -> int:
    """Check what can be checked, make the run folder, run to the end; returns the exit code.

    Raises:
        UsageError: the configuration, the graph, the allocation, a model or the dataset is unusable; nothing started.
    """
    plan = plan_run(config, experiment)
    check_inputs(plan)
    run_dir = _make_run_dir(config, experiment.name)
    resolved = config.model_copy(update={"run_dir": str(run_dir)})
    run = dump_config(resolved)
    _write_config(run_dir, run)
    start = SessionStart(run=run, run_dir=str(run_dir), track=config.track, port=config.cluster.master_port)
    return run_inline(start) if config.launcher == "inline" else run_supervised(start)


def _make_run_dir(config: RunConfig, experiment: str) -> Path:
    """The folder given by the user, or a new one named after the time."""
    if config.run_dir:
        folder = Path(config.run_dir).absolute()
    else:
        base = Path("runs").absolute() / Path(experiment).stem
        name = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
        folder = next(f for i in range(1000) if not (f := base / (name if i == 0 else f"{name}_{i}")).exists())
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as err:
        raise ConfigError(
            f"run_dir={folder} cannot be made: {err.strerror}", remedy="Choose another folder with run_dir=PATH."
        ) from err
    _refuse_mixing(folder, config)
    return folder


def _refuse_mixing(folder: Path, config: RunConfig) -> None:
    """A folder with the results of a run takes another one only when that one resumes it."""
    if config.resume == "never" and (folder / "metrics.jsonl").exists():
        raise ConfigError(
            f"run_dir={folder} holds the results of an earlier run",
            remedy="Continue it with resume=auto, or choose another folder.",
        )


def _write_config(folder: Path, run: bytes) -> None:
    temporary = folder / f".{CONFIG_FILE}.new"
    try:
        temporary.write_bytes(run)
        os.replace(temporary, folder / CONFIG_FILE)
    except OSError as err:
        raise ConfigError(
            f"{folder / CONFIG_FILE} cannot be written: {err.strerror}",
            remedy="Choose another folder with run_dir=PATH.",
        ) from err
