"""``generations.jsonl``: responses of the policy, one JSON object each.

    {"step": 3, "epoch": 1, "sample": "1/17", "response_index": 0, "role": "actor", "version": 2,
     "prompt": "...", "response": "...", "response_tokens": 9, "truncated": false, "rewards": 0.5}

Besides `truncated` and `rewards`, every number of the graph that belongs to a response or its sample has a field of its
own (`costs`, `kept_rewards`, ...).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from realrl.errors import RunError
from realrl.files import write_output
from realrl.runtime.output.json_lines import cut_after
from realrl.sched.events import ReportSamples, SampleContents
from realrl.sched.track.readout import Readout

FILE_NAME = "generations.jsonl"


class GenerationsFile:
    """Appends the responses of one step after another.

    Args:
        path: created with the first line.
        readout: roles and calls of the samples' columns.
        last_step: the run continues after this step. Lines of later steps, which an earlier attempt wrote, are removed.

    Raises:
        RunError: the file cannot be written.
    """

    def __init__(self, path: Path, readout: Readout, *, last_step: int) -> None:
        self.path = path
        self._readout = readout
        try:
            cut_after(path, last_step)
        except OSError as error:
            raise self._failed(error) from error

    def write(self, report: ReportSamples) -> None:
        """Append the responses of one step. Raises `RunError` if they cannot be written."""
        lines = [line for sample in report.samples for line in self._lines(report, sample)]
        text = "".join(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n" for line in lines)
        if not text:
            return
        try:
            write_output(self.path, text.encode(errors="backslashreplace"), append=True)
        except OSError as error:
            raise self._failed(error) from error

    def _lines(self, report: ReportSamples, sample: SampleContents) -> Iterable[dict[str, Any]]:
        for prefix, role in self._readout.roles.items():
            columns = columns_of(sample.columns, prefix, self._readout.roles)
            for index, prompt in enumerate(columns.get("prompt", ())):
                yield {
                    "step": report.step,
                    "epoch": report.epoch,
                    "sample": sample.id,
                    "response_index": index,
                    **({"call": self._readout.calls[prefix]} if len(self._readout.roles) > 1 else {}),
                    "role": role,
                    "version": sample.versions.get(self._readout.calls[prefix], 0),
                    "prompt": prompt,
                    "response": columns["response"][index],
                    "response_tokens": int(columns["response_tokens"][index]),
                    **{
                        name: _json_value(_at(values, index))
                        for name, values in columns.items()
                        if name not in ("prompt", "response", "response_tokens") and _at(values, index) is not None
                    },
                }

    def _failed(self, error: OSError) -> RunError:
        return RunError(
            f"cannot write {self.path}: {error.strerror}",
            remedy="Free some space there and continue with resume=auto, or set save.n_generations=0.",
        )


def columns_of(
    columns: Mapping[str, tuple[Any, ...]], prefix: str, prefixes: Iterable[str]
) -> dict[str, tuple[Any, ...]]:
    """The columns whose longest prefix, of all `prefixes`, is `prefix`; named without it."""
    others = [other for other in prefixes if len(other) > len(prefix)]
    return {
        name.removeprefix(prefix): values
        for name, values in columns.items()
        if name.startswith(prefix) and not any(name.startswith(other) for other in others)
    }


def _at(values: tuple[Any, ...], index: int) -> Any:
    """The value of one response; a sample's own value counts for all of its responses."""
    if len(values) == 1:
        return values[0]
    return values[index] if index < len(values) else None


def _json_value(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
