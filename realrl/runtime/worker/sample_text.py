"""Readable contents of samples in a worker's store: decoded text and single numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from realrl.data.rows import SampleStore
from realrl.sched.messages import ReadSamples
from realrl.sched.track.readout import MASK, TOKENS

Columns = dict[str, dict[str, tuple[float | bool | str, ...]]]


def read_samples(store: SampleStore, request: ReadSamples, tokenizer: Callable[[str], Any]) -> Columns:
    """Read the columns of `SamplesRead`.

    Args:
        tokenizer: function from a role to its tokenizer.
    """
    columns: Columns = {}
    for prefix, ids in request.texts.items():
        columns.update(_text(store, prefix, ids, tokenizer(request.roles[prefix])))
    for key, ids in request.keys.items():
        columns[key] = _numbers(store, key, ids)
    return columns


def _text(store: SampleStore, prefix: str, ids: Sequence[str], tokenizer: Any) -> Columns:
    batch = store.get(ids, (prefix + TOKENS, prefix + MASK))
    columns: dict[str, dict[str, list[Any]]] = {name: {} for name in ("prompt", "response", "response_tokens")}
    rows = zip(ids, batch.sequences(prefix + TOKENS), batch.sequences(prefix + MASK), strict=True)
    for sample_id, sequences, masks in rows:
        for tokens, mask in zip(sequences, masks, strict=True):
            parts = {"prompt": tokens[mask].tolist(), "response": tokens[~mask].tolist()}
            for name, part in parts.items():
                text = tokenizer.decode(part, skip_special_tokens=True)
                columns[name].setdefault(sample_id, []).append(text.encode(errors="backslashreplace").decode())
            columns["response_tokens"].setdefault(sample_id, []).append(float(len(parts["response"])))
    return {prefix + name: _frozen(values) for name, values in columns.items()}


def _numbers(store: SampleStore, key: str, ids: Sequence[str]) -> dict[str, tuple[float | bool | str, ...]]:
    batch = store.get(ids, (key,))
    is_flag = batch.schemas[key].dtype == "bool"
    convert: Callable[[Any], float | bool] = bool if is_flag else float
    return _frozen({i: [convert(v) for v in rows.tolist()] for i, rows in zip(ids, batch.samples(key), strict=True)})


def _frozen(lists: Mapping[str, list[Any]]) -> dict[str, tuple[float | bool | str, ...]]:
    return {name: tuple(values) for name, values in lists.items()}
