"""``generations.jsonl``: responses of the policy, one JSON object each.

    {"step": 3, "epoch": 1, "sample": "1/17", "file": "train.jsonl", "row_id": "17", "response_index": 0,
     "role": "actor", "version": 2, "prompt": "...", "response": "...", "prompt_tokens": 7, "response_tokens": 9,
     "truncated": false, "rewards": 0.5, "reward_parts": {"math": 1.0, "length": -0.5}, "advantage": -0.25,
     "row": {"answer": "42"}}

`response` is all that follows the prompt, in its order. Where a prompt was made of messages, or something was put in
between generated tokens, `messages` has the whole conversation. Besides `truncated` and `rewards`, every number of the
graph that belongs to a response or its sample has a field of its own (`costs`, `kept_rewards`, ...). Numbers have six
significant digits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from realrl.config.schema import BUILT_IN, RunConfig
from realrl.data.conversations import Message, conversation
from realrl.errors import RunError
from realrl.files import write_output
from realrl.runtime.output.json_lines import cut_after
from realrl.sched.events import ReportSamples, SampleContents
from realrl.sched.track.readout import Readout

FILE_NAME = "generations.jsonl"
_COUNTS = ("prompt_tokens", "response_tokens")
_TEXTS = ("prompt", "response", "turns")
_MAX_FIELD_CHARS = 4000  # of a field of a row, as JSON; longer ones are named only
_NO_FIELDS = ("prompt", "messages")  # of rows whose conversation is in the line


class GenerationsFile:
    """Appends the responses of one step after another.

    Args:
        path: created with the first line.
        readout: roles and calls of the samples' columns.
        files: name -> path of the files that rows come from, as in `DatasetConfig.sources`.
        last_step: the run continues after this step. Lines of later steps, which an earlier attempt wrote, are removed.

    Raises:
        RunError: the file cannot be written.
    """

    def __init__(self, path: Path, readout: Readout, *, last_step: int, files: Mapping[str, str]) -> None:
        self.path = path
        self._files = files
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
        row = json.loads(sample.row)
        for prefix, role in self._readout.roles.items():
            known = {name: values for name, values in sample.columns.items() if name not in self._readout.apart}
            columns = columns_of(known, prefix, self._readout.roles)
            notes = columns_of(sample.notes, prefix, self._readout.roles)
            numbers = {name: values for name, values in columns.items() if name not in (*_TEXTS, *_COUNTS)}
            for index, prompt in enumerate(columns.get("prompt", ())):
                messages = _messages(row, columns, index)
                yield {
                    "step": report.step,
                    "epoch": report.epoch,
                    "sample": sample.id,
                    **self._origin(sample.id),
                    "response_index": index,
                    **({"call": self._readout.calls[prefix]} if len(self._readout.roles) > 1 else {}),
                    "role": role,
                    "version": sample.versions.get(self._readout.calls[prefix], 0),
                    **({"messages": messages} if messages else {}),
                    "prompt": prompt,
                    "response": columns["response"][index],
                    **{name: int(columns[name][index]) for name in _COUNTS},
                    **_nested({**numbers, **notes}, index, len(columns["prompt"])),
                    **_row_fields(row, _NO_FIELDS if messages else ()),
                }

    def _origin(self, sample_id: str) -> dict[str, str]:
        """The file that a sample's row comes from, and the row's id there, or its number from 0."""
        row_id = sample_id.partition("/")[2]
        if "" in self._files:
            return {"file": self._files[""], "row_id": row_id}
        name, _, row_id = row_id.partition("/")
        return {"file": self._files.get(name, name), "row_id": row_id}

    def _failed(self, error: OSError) -> RunError:
        return RunError(
            f"cannot write {self.path}: {error.strerror}",
            remedy="Free some space there and continue with resume=auto, or set save.n_generations=0.",
        )


def files_of(config: RunConfig) -> dict[str, str]:
    """Name -> path of the files that a run's samples come from; a single one is called ""."""
    if config.eval.only:
        return {"": config.eval.path or BUILT_IN}
    return {name: source.path for name, source in config.dataset.sources.items()}


def _messages(row: Mapping[str, Any], columns: Mapping[str, tuple[Any, ...]], index: int) -> list[Message]:
    """The conversation of one response; none where a text is all."""
    before, response = row.get("prompt"), columns["response"][index]
    turns = json.loads(columns["turns"][index]) if "turns" in columns else [(response, False)]
    if not isinstance(before, list) and len(turns) < 2:
        return []
    return conversation(before, columns["prompt"][index], turns)


def _row_fields(row: Mapping[str, Any], left_out: Collection[str]) -> dict[str, Any]:
    fields = {name: value for name, value in row.items() if name not in left_out}
    long = [name for name, value in fields.items() if len(json.dumps(value)) > _MAX_FIELD_CHARS]
    kept = {name: value for name, value in fields.items() if name not in long}
    return {**({"row": kept} if kept else {}), **({"long_fields": long} if long else {})}


def _nested(columns: Mapping[str, tuple[Any, ...]], index: int, n_responses: int) -> dict[str, Any]:
    """The values of one response, or of its sample; a name "a/b" is field b of the object a."""
    found: dict[str, Any] = {}
    for name, values in columns.items():
        if len(values) not in (1, n_responses):
            continue  # of other sequences
        value, place = values[index if len(values) > 1 else 0], found
        *above, last = name.split("/")
        for key in above:
            place = place.setdefault(key, {})
        if value is not None:
            place[last] = _json_value(value)
    return found


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


def _json_value(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None
