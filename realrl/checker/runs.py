"""The start of a check's runs, each as `realrl run` starts one, and what they left behind."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from realrl.checker.recording import Recording, read_recording
from realrl.checker.variants import Variant, checked_config, configs_of
from realrl.config.schema import RunConfig
from realrl.errors import AllocationError
from realrl.experiment.declaration import Experiment
from realrl.experiment.discovery import forget_files
from realrl.experiment.models import role_configs
from realrl.experiment.planning import check_models_fit, plan_run
from realrl.experiment.run_plan import RunPlan
from realrl.runtime.checkpoints.store import Resume
from realrl.runtime.output.metrics import FILE_NAME as METRICS
from realrl.runtime.processes.start import start_run

OUTPUT = "output.txt"
_INTERRUPTED = 128  # exit codes from here on are those of signals


@dataclass(frozen=True)
class Done:
    """One run that ended.

    Attributes:
        exit_code: 0, or that of its failure.
        output: what it printed.
    """

    recording: Recording
    exit_code: int
    output: str


class Runs:
    """Runs of one experiment below a folder.

    Args:
        config: what the user composed.
        named: see `checked_config`.
        check: refusal of a plan that cannot run, with a `UsageError`.

    Attributes:
        plan: plan of the baseline.
    """

    def __init__(
        self,
        experiment: Experiment,
        config: RunConfig,
        named: frozenset[str],
        folder: Path,
        *,
        check: Callable[[RunPlan], Resume],
    ) -> None:
        first = plan_run(checked_config(config, named), experiment)
        generating = first.generating_roles
        sizes = [model.vocab_size for role, model in role_configs(first).items() if role in generating]
        self._experiment = experiment
        self._base = checked_config(config, named, sizes)
        self.plan = plan_run(self._base, experiment)
        self._cut = [mfc.name for mfc in self.plan.mfcs if self.plan.roles[mfc.role].head != "none"]
        self._folder = folder
        self._check = check

    def reason_against(self, variant: Variant) -> str:
        """Return why the models or calls cannot run so; empty where they can."""
        if variant.is_resumed and not self.plan.changed_roles:
            return "it trains nothing, so nothing is saved"
        try:
            check_models_fit(plan_run(self._configs(variant)[0], self._experiment))
        except AllocationError as error:
            return error.message
        return ""

    def run(self, variant: Variant) -> Done:
        """Run one variant to its end; what it prints goes to a file.

        Raises:
            UsageError: the run was refused.
            KeyboardInterrupt: a signal ended it.
        """
        folder = self._folder / variant.name
        folder.mkdir(mode=0o700)
        code = 0
        with _printing_to(folder / OUTPUT):
            for config in self._configs(variant):
                forget_files(config.experiment)  # what its modules keep is not passed on from run to run
                code = code or start_run(self._experiment, config, check=self._check, host=variant.host)
        if code >= _INTERRUPTED:
            raise KeyboardInterrupt
        output = (folder / OUTPUT).read_text(encoding="utf-8", errors="replace")
        return Done(read_recording(folder, METRICS), code, output)

    def _configs(self, variant: Variant) -> tuple[RunConfig, ...]:
        return configs_of(variant, self._base, self._cut, str(self._folder / variant.name))


@contextlib.contextmanager
def _printing_to(path: Path) -> Iterator[None]:
    """Send what this process and those that it starts print to a file, and an error of the user's input to nobody."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(1), os.dup(2)]
    try:
        with path.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, copy in zip((1, 2), kept, strict=True):
            os.dup2(copy, number)
            os.close(copy)
