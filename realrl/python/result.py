"""`RunResult`: a run folder, read for scripts and notebooks."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from os import PathLike, fspath
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from realrl.cli.report import PAGE, write_page
from realrl.errors import AssetError, UsageError
from realrl.python.notebook import as_html, as_text
from realrl.report.run_files import Row, RunFolder, find_runs, json_lines, read_run, samples_file
from realrl.runtime.checkpoints.store import CHECKPOINTS

if TYPE_CHECKING:
    import pandas

_NO_LIMIT = 2**62


@dataclass(frozen=True, repr=False)
class RunResult:
    """Files of a run. They are read when they are first asked for, and not again: `realrl.load` reads anew.

    Attributes:
        run_dir: the run folder.
        exit_code: as that of ``realrl run``; None for a run that was loaded.
    """

    run_dir: Path
    exit_code: int | None = None

    @property
    def experiment(self) -> str:
        """The experiment's name; that of its file for one of the user's own."""
        return self._folder.experiment

    @property
    def state(self) -> str:
        """The run's state in a few words: "complete, 40 steps"."""
        return self._folder.state

    @property
    def config(self) -> Mapping[str, Any]:
        """The whole configuration, nested, without secrets."""
        return MappingProxyType(self._folder.settings)

    @property
    def metrics(self) -> list[Row]:
        """A dict a step: ``step``, ``epoch`` and the metrics. Values that are no finite numbers are left out."""
        return [dict(row) for row in self._folder.rows]

    @cached_property
    def generations(self) -> list[Row]:
        """Responses that the run kept, a dict each: see docs/run-folder.md."""
        return list(json_lines(samples_file(self.run_dir, self._folder.settings), [], most_bytes=_NO_LIMIT))

    @property
    def notes(self) -> list[str]:
        """Sentences about files that are missing or damaged."""
        return list(self._folder.notes)

    @property
    def checkpoints(self) -> dict[int, Path]:
        """Step -> folder of each checkpoint, the newest last."""
        found = {int(path.name.removeprefix("step_")): path for path in (self.run_dir / CHECKPOINTS).glob("step_*")}
        return dict(sorted(found.items()))

    def model_path(self, role: str = "actor", step: int | None = None) -> Path:
        """Return the folder of a trained role, which `transformers` loads, of the newest checkpoint or of a step's.

        Raises:
            AssetError: there is none.
        """
        steps = self.checkpoints
        chosen = max(steps, default=None) if step is None else step
        if chosen is None or chosen not in steps:
            have = f"it has those of steps {', '.join(map(str, steps))}" if steps else "it has none"
            wanted = "a checkpoint" if step is None else f"a checkpoint of step {step}"
            raise AssetError(f"the run in {self.run_dir} lacks {wanted}: {have}")
        path = steps[chosen] / role
        if not (path / "config.json").is_file():
            roles = sorted(one.parent.name for one in steps[chosen].glob("*/config.json"))
            raise AssetError(f"{steps[chosen]} holds no role '{role}'", remedy=f"It has: {', '.join(roles) or 'none'}.")
        return path

    def metrics_frame(self) -> pandas.DataFrame:
        """Return `metrics` as a table of pandas, a row a step, with the steps as index.

        Raises:
            UsageError: pandas is not installed.
        """
        frame = _pandas("metrics").DataFrame(self.metrics)
        return frame.set_index("step") if "step" in frame else frame

    def generations_frame(self) -> pandas.DataFrame:
        """Return `generations` as a table of pandas, a row a response.

        Raises:
            UsageError: pandas is not installed.
        """
        return _pandas("generations").DataFrame(self.generations)

    def report(self, out: str | PathLike[str] | None = None) -> Path:
        """Write the page of ``realrl report`` about the run, and return its path; by default into the run folder.

        Raises:
            ConfigError: it cannot be written.
        """
        path = self.run_dir / PAGE if out is None else Path(out)
        write_page([read_run(self.run_dir)], path)
        return path

    def __repr__(self) -> str:
        return as_text(self._folder)

    def _repr_html_(self) -> str:
        return as_html(self._folder)

    @cached_property
    def _folder(self) -> RunFolder:
        return read_run(self.run_dir)


def load(run_dir: str | PathLike[str]) -> RunResult:
    """Return the result of a run that was done, or goes on.

    Raises:
        ConfigError: the path is no run folder, or holds several.
    """
    folders = find_runs([fspath(run_dir)])
    if len(folders) > 1:
        some = ", ".join(str(folder) for folder in folders[:3])
        raise UsageError(f"{run_dir} holds {len(folders)} runs", remedy=f"Load one of them: {some}, ...")
    return RunResult(folders[0].absolute())


def _pandas(what: str) -> Any:
    if importlib.util.find_spec("pandas") is None:
        raise UsageError("a table needs pandas, which is not installed", remedy=f"pip install pandas, or take .{what}.")
    return importlib.import_module("pandas")
