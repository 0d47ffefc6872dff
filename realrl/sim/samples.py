"""Samples of a simulated run: lengths and schemas of their keys, as workers would report them.

A sample has one pair of prompt and response lengths for each prefix of generated keys: a call whose key is
``greedy_input_ids`` generates other responses than one whose key is ``input_ids``. A call that gives other sequences
than it got under a name of its own counts as if it kept all of them.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from math import prod
from typing import Any

from realrl.graph.mfc import MFCDef
from realrl.graph.origins import TOKENS, origins
from realrl.plan.samples.transfer import RowTransfer
from realrl.sched.calls import ScheduledCall
from realrl.sched.master.master_plan import MasterPlan
from realrl.sched.messages import KeySchema, Per, SampleMeta
from realrl.sched.track.track_plan import TrackPlan
from realrl.sim.durations import SampleSizes

_ITEM_BYTES = {"bool": 1, "uint8": 1, "float32": 4, "int64": 8}

_INT, _FLAG = KeySchema("int64", Per.TOKEN), KeySchema("bool", Per.TOKEN)
_PER_SEQUENCE, _PER_SAMPLE = KeySchema("float32", Per.SEQUENCE), KeySchema("float32", Per.SAMPLE)
_SCHEMAS = {
    "prompt_ids": _INT,
    TOKENS: _INT,
    "prompt_mask": _FLAG,
    "truncated": KeySchema("bool", Per.SEQUENCE),
    "rewards": _PER_SEQUENCE,
    "costs": _PER_SEQUENCE,
    "label": KeySchema("bool", Per.SAMPLE),
    "metadata": KeySchema("uint8", Per.SAMPLE, (64,)),
    "weight": _PER_SAMPLE,
    "loss": _PER_SAMPLE,
    "values": KeySchema("float32", Per.TOKEN),
    "logprobs": KeySchema("float32", Per.TRANSITION),
}
_UNKNOWN = KeySchema("float32", Per.TOKEN)


@cache
def schema_of(key: str) -> KeySchema:
    """Return the schema of a key, by the longest known name that it ends with; else one float per token.

    Interfaces decide schemas, and importing them takes seconds, so their names are known here.
    """
    known = [name for name in _SCHEMAS if key == name or key.endswith(f"_{name}")]
    return _SCHEMAS[max(known, key=len)] if known else _UNKNOWN


def tracks_of(plan: MasterPlan) -> list[TrackPlan]:
    """Return the run's own track, and the one that evaluates it if there is one."""
    return [plan.main] if plan.evaluation is None else [plan.main, plan.evaluation]


def _prefix_of(mfc: MFCDef, calls: Sequence[MFCDef]) -> str:
    """Return the prefix of the tokens that a call works on: "greedy_" if ``greedy_input_ids`` were generated."""
    keys = [*(origin.key for origin in origins(mfc, calls)), *mfc.input_keys]
    return next((key.removesuffix(TOKENS) for key in keys if key.endswith(TOKENS)), "")


class Samples:
    """Lengths of all living samples.

    Args:
        draw: sample id -> prompt and responses, those included that are still to be generated; the same whenever asked.
        dropped_share: call that may drop samples -> share of them that it drops.

    Attributes:
        prefixes: call -> prefix of the tokens that it works on.
    """

    def __init__(
        self, plan: MasterPlan, draw: Callable[[str], SampleSizes], dropped_share: Mapping[str, float]
    ) -> None:
        self._draw = draw
        self._dropped_share = dropped_share
        self.prefixes: dict[str, str] = {}
        self._giver_prefixes: dict[str, str] = {}  # key -> prefix of the call that gives it
        self._own_names: dict[str, str] = {}
        for track in tracks_of(plan):
            mfcs = [call.mfc for call in track.calls]
            self.prefixes |= {mfc.name: _prefix_of(mfc, mfcs) for mfc in mfcs}
            self._giver_prefixes |= {key: self.prefixes[mfc.name] for mfc in mfcs for key in mfc.output_keys}
            self._own_names |= {key: mfc.own_name(key) for mfc in mfcs for key in mfc.output_keys}
        self._sorted_prefixes = sorted({"", *self.prefixes.values()}, key=len, reverse=True)
        self._sizes: dict[str, dict[str, SampleSizes]] = {prefix: {} for prefix in self._sorted_prefixes}  # by sample
        self._lengths: dict[str, dict[str, tuple[int, ...]]] = {}  # key -> sample -> its rows, by sequence
        self._bytes: dict[str, dict[str, int]] = {}  # key -> sample -> bytes of its rows

    def forget(self, ids: Iterable[str]) -> None:
        """Forget samples that are freed."""
        tables: list[dict[str, Any]] = [*self._sizes.values(), *self._lengths.values(), *self._bytes.values()]
        for table in tables:
            for sample_id in ids:
                table.pop(sample_id, None)

    def sizes_of(self, prefix: str, ids: Iterable[str]) -> dict[str, SampleSizes]:
        """Return the sizes of samples, as far as keys with this prefix are concerned."""
        ids, known = tuple(ids), self._sizes[prefix]
        for sample_id in ids:
            if sample_id not in known:
                known[sample_id] = self._drawn(prefix, sample_id)
        return dict(zip(ids, map(known.__getitem__, ids)))

    def describe(self, ids: Iterable[str], keys: Iterable[str]) -> SampleMeta:
        """Return what a worker tells of samples with these keys."""
        ids, keys = tuple(ids), tuple(keys)
        lengths = {key: self._lengths_of(key, ids) for key in keys}
        return SampleMeta(ids, {key: self._schema_of(key) for key in keys}, lengths)

    def kept(self, call: ScheduledCall, ids: Iterable[str]) -> list[str]:
        """Return the samples that a call does not drop."""
        share = self._dropped_share.get(call.name, 0.0) if call.mfc.may_drop else 0.0
        return [i for i in ids if not share or zlib.crc32(f"{call.name} {i}".encode()) >= share * 2**32]

    def bytes_of(self, transfers: Iterable[RowTransfer]) -> int:
        """Return the bytes of rows."""
        total = 0
        for transfer in transfers:
            table = self._bytes.setdefault(transfer.key, {})
            try:
                total += sum(map(table.__getitem__, transfer.ids))
            except KeyError:
                self._count(table, transfer.key, [i for i in transfer.ids if i not in table])
                total += sum(map(table.__getitem__, transfer.ids))
        return total

    def _schema_of(self, key: str) -> KeySchema:
        schema = schema_of(key)
        return schema_of(self._own_names.get(key, key)) if schema is _UNKNOWN else schema

    def _count(self, table: dict[str, int], key: str, ids: Sequence[str]) -> None:
        """Note the bytes of the rows of samples."""
        schema = self._schema_of(key)
        row_bytes = _ITEM_BYTES[schema.dtype] * prod(schema.trailing)
        table |= {i: sum(rows) * row_bytes for i, rows in zip(ids, self._lengths_of(key, ids))}

    def _drawn(self, prefix: str, sample_id: str) -> SampleSizes:
        sizes = self._draw(sample_id)
        return SampleSizes(sizes.prompt_tokens, self._draw(prefix + sample_id).response_tokens) if prefix else sizes

    def _lengths_of(self, key: str, ids: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the rows of a key, per sample and sequence."""
        table = self._lengths.setdefault(key, {})
        missing = [sample_id for sample_id in ids if sample_id not in table]
        if missing:
            prefix = next(prefix for prefix in self._sorted_prefixes if key.startswith(prefix))
            rows_of = _rows_of(key, self._schema_of(key).per)
            sizes = self.sizes_of(prefix or self._giver_prefixes.get(key, ""), missing)
            table |= {sample_id: rows_of(own) for sample_id, own in sizes.items()}
        return tuple(map(table.__getitem__, ids))


def _rows_of(key: str, per: Per) -> Callable[[SampleSizes], tuple[int, ...]]:
    """Return what gives the rows of a key for each sequence of a sample."""
    if per is Per.SAMPLE:
        return lambda sizes: (1,)
    if key == "prompt_ids":
        return lambda sizes: sizes.prompt_tokens[:1]
    if per is Per.SEQUENCE:
        return lambda sizes: (1,) * len(sizes.prompt_tokens)
    if per is Per.TOKEN:
        return lambda sizes: sizes.tokens
    return lambda sizes: tuple([n - 1 for n in sizes.tokens])
