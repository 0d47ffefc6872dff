"""Rows of samples in a checkpoint: outputs of calls for steps after the checkpoint's own.

state/samples-<rank>.safetensors     rows of one rank: key -> ids, schema, lengths, packed tensor
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from realrl.data.rows import SampleStore
from realrl.data.sample import SequenceSample
from realrl.errors import AssetError
from realrl.runtime.checkpoints.state_file import load_state
from realrl.runtime.checkpoints.store import is_sample_file
from realrl.sched.messages import KeySchema


def rows_state(store: SampleStore, rows: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Convert rows (key -> sample ids) to a state for `save_state`.

    Raises:
        SampleError: a row is not in the store.
    """
    state: dict[str, Any] = {}
    for key, ids in rows.items():
        batch = store.get(ids, (key,))
        schema = msgspec.to_builtins(batch.schemas[key])
        state[key] = {"ids": ids, "schema": schema, "seqlens": batch.seqlens[key], "data": batch[key]}
    return state


class RestoredSamples:
    """Rows that a checkpoint holds, until their samples are loaded.

    Args:
        folder: the checkpoint.
        files: paths inside it.

    Raises:
        AssetError: a file is damaged.
    """

    def __init__(self, folder: Path, files: Iterable[str]) -> None:
        self._store = SampleStore()
        self._keys_of: dict[str, list[str]] = {}
        for name in sorted(filter(is_sample_file, files)):
            for key, stored in load_state(folder / name).items():
                try:
                    batch = SequenceSample(
                        tuple(stored["ids"]),
                        {key: msgspec.convert(stored["schema"], KeySchema)},
                        {key: tuple(tuple(lens) for lens in stored["seqlens"])},
                        {key: stored["data"]},
                    )
                except (KeyError, TypeError, ValueError, msgspec.ValidationError) as err:
                    raise AssetError(f"{folder / name} holds no rows of key '{key}': {err}") from err
                self._store.put(batch)
                for sample_id in batch.ids:
                    self._keys_of.setdefault(sample_id, []).append(key)

    def take(self, ids: Iterable[str]) -> list[SequenceSample]:
        """Remove and return the rows of these samples, one batch for each set of keys."""
        groups: dict[tuple[str, ...], list[str]] = {}
        for sample_id in ids:
            keys = self._keys_of.pop(sample_id, None)
            if keys is not None:
                groups.setdefault(tuple(sorted(keys)), []).append(sample_id)
        batches = [self._store.get(members, keys) for keys, members in groups.items()]
        self._store.free(sample_id for members in groups.values() for sample_id in members)
        return batches
