"""Readable contents of samples in a worker's store: decoded text, single numbers, and fields of the dataset's row."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from realrl.data.conversations import split_turns
from realrl.data.rows import SampleStore
from realrl.sched.messages import ReadSamples
from realrl.sched.track.readout import MASK, ROW, TOKENS

Columns = dict[str, dict[str, tuple[float | bool | str, ...]]]


def read_samples(
    store: SampleStore, request: ReadSamples, tokenizer: Callable[[str], Any]
) -> tuple[Columns, dict[str, str]]:
    """Read the columns and rows of `SamplesRead`.

    Args:
        tokenizer: function from a role to its tokenizer.
    """
    columns: Columns = {}
    for prefix, ids in request.texts.items():
        columns.update(_text(store, prefix, ids, tokenizer(request.roles[prefix])))
    for key, ids in request.keys.items():
        columns[key] = _numbers(store, key, ids)
    if not request.rows:
        return columns, {}
    packed = store.get(request.rows, (ROW,)).samples(ROW)
    return columns, {i: bytes(row.tolist()).decode() for i, row in zip(request.rows, packed, strict=True)}


def _text(store: SampleStore, prefix: str, ids: Sequence[str], tokenizer: Any) -> Columns:
    batch = store.get(ids, (prefix + TOKENS, prefix + MASK))
    columns: dict[str, dict[str, list[Any]]] = {}

    def decoded(tokens: list[int]) -> str:
        text: str = tokenizer.decode(tokens, skip_special_tokens=True)
        return text.encode(errors="backslashreplace").decode()

    rows = zip(ids, batch.sequences(prefix + TOKENS), batch.sequences(prefix + MASK), strict=True)
    for sample_id, sequences, masks in rows:
        split = [split_turns(t.tolist(), m.tolist()) for t, m in zip(sequences, masks, strict=True)]
        found: dict[str, list[Any]] = {
            "prompt": [decoded(prompt) for prompt, _ in split],
            "response": [decoded([token for run, _ in turns for token in run]) for _, turns in split],
            "prompt_tokens": [float(mask.sum()) for mask in masks],
            "response_tokens": [float((~mask).sum()) for mask in masks],
        }
        if any(len(turns) > 1 for _, turns in split):
            found["turns"] = [json.dumps([(decoded(run), is_given) for run, is_given in turns]) for _, turns in split]
        for name, values in found.items():
            columns.setdefault(name, {})[sample_id] = values
    return {prefix + name: _frozen(values) for name, values in columns.items()}


def _numbers(store: SampleStore, key: str, ids: Sequence[str]) -> dict[str, tuple[float | bool | str, ...]]:
    batch = store.get(ids, (key,))
    is_flag = batch.schemas[key].dtype == "bool"
    convert: Callable[[Any], float | bool] = bool if is_flag else float
    return _frozen({i: [convert(v) for v in rows.tolist()] for i, rows in zip(ids, batch.samples(key), strict=True)})


def _frozen(lists: Mapping[str, list[Any]]) -> dict[str, tuple[float | bool | str, ...]]:
    return {name: tuple(values) for name, values in lists.items()}
