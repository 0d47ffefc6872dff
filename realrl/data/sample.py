"""SequenceSample: a packed batch of variable-length samples.

Invariants, asserted by the tests:
- ``gather(split(x)) == x`` for a contiguous partition; a permuted one gives the same samples in another order;
- a split never cuts a sample, and the parts hold every row of every key exactly once;
- ``select(ids)`` has exactly these ids, in this order;
- ``remap`` by a renaming and then by its inverse changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain

import torch

from realrl.data.checks import (
    DTYPES,
    SampleError,
    SeqLens,
    check_ids,
    check_pairs,
    check_row,
    check_seqlens,
    check_tensor,
    short,
)
from realrl.errors import did_you_mean
from realrl.sched.messages import KeySchema, Per, SampleMeta

__all__ = ["SampleError", "SequenceSample"]


@dataclass(frozen=True, eq=False)
class SequenceSample:
    """A batch of samples; a sample is a prompt and everything produced from it, and holds one or more sequences.

    Attributes:
        ids: sample ids.
        schemas: key -> dtype and granularity.
        seqlens: key -> per sample -> per sequence -> number of rows of that key.
        data: key -> packed tensor ``[sum of seqlens[key], *trailing]``, or None (metadata only).

    Raises:
        SampleError: duplicate ids, keys that differ between the mappings, lengths that do not add up, a dtype or
            row shape other than the schema's. It names the key and, where one can be blamed, the sample id.
    """

    ids: tuple[str, ...]
    schemas: Mapping[str, KeySchema]
    seqlens: Mapping[str, SeqLens]
    data: Mapping[str, torch.Tensor | None]

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", tuple(self.ids))
        object.__setattr__(self, "schemas", dict(self.schemas))
        object.__setattr__(self, "seqlens", {key: _as_tuples(lens) for key, lens in self.seqlens.items()})
        object.__setattr__(self, "data", dict(self.data))
        check_ids(self.ids)
        for name, mapping in (("seqlens", self.seqlens), ("data", self.data)):
            if mapping.keys() != self.schemas.keys():
                key = sorted(mapping.keys() ^ self.schemas.keys())[0]
                where = f"{name} but not in schemas" if key in mapping else f"schemas but not in {name}"
                raise SampleError(f"key {key!r} of a SequenceSample is in {where}", sample_ids=self.ids)
        for key, schema in self.schemas.items():
            check_seqlens(key, schema, self.ids, self.seqlens[key])
            tensor = self.data[key]
            if tensor is not None:
                check_tensor(key, schema, tensor, self._offsets[key][-1], self.ids)

    # ------------------------------------------------------------ constructors

    @classmethod
    def _checked(
        cls,
        ids: tuple[str, ...],
        schemas: Mapping[str, KeySchema],
        seqlens: Mapping[str, SeqLens],
        data: Mapping[str, torch.Tensor | None],
    ) -> SequenceSample:
        """A batch of what other batches have checked. The checks look at every length, and a call has many batches."""
        made = object.__new__(cls)
        for name, value in (("ids", ids), ("schemas", schemas), ("seqlens", seqlens), ("data", data)):
            object.__setattr__(made, name, value)
        return made

    @classmethod
    def from_lists(
        cls,
        ids: Sequence[str],
        values: Mapping[str, tuple[KeySchema, Sequence[Sequence[torch.Tensor]]]],
    ) -> SequenceSample:
        """Pack per-sample lists of per-sequence tensors.

        Args:
            ids: sample ids.
            values: key -> (schema, per sample -> per sequence -> tensor ``[rows, *trailing]``). Under a schema per
                sequence or per sample a 0-dim tensor counts as one row.

        Raises:
            SampleError: see the class.
        """
        check_pairs(values, "lists")
        schemas = {key: schema for key, (schema, _) in values.items()}
        seqlens: dict[str, SeqLens] = {}
        data: dict[str, torch.Tensor | None] = {}
        for key, (schema, samples) in values.items():
            rank = 1 + len(schema.trailing)
            if len(samples) != len(ids):
                raise SampleError(
                    f"key {key!r} has values for {len(samples)} samples, but there are {len(ids)} ids", sample_ids=ids
                )
            for sample_id, sample in zip(ids, samples, strict=True):
                for tensor in sample:
                    check_row(key, schema, tensor, sample_id)
            packed = [[t.unsqueeze(0) if t.dim() == rank - 1 else t for t in sample] for sample in samples]
            seqlens[key] = tuple(tuple(t.shape[0] for t in sample) for sample in packed)
            flat = list(chain.from_iterable(packed))
            data[key] = torch.cat(flat) if flat else _empty(schema)
        return cls(tuple(ids), schemas, seqlens, data)

    @classmethod
    def gather(cls, samples: Sequence[SequenceSample], keys: Sequence[str] | None = None) -> SequenceSample:
        """Concatenate along samples.

        Args:
            samples: at least one batch; ids must be distinct over all of them.
            keys: keep these keys; None keeps all, and then all batches must have the same keys.

        Raises:
            SampleError: no batch, differing keys or schemas, a shared id, or a key with tensors in only some batches.
        """
        if not samples:
            raise SampleError("cannot gather an empty list of batches")
        first = samples[0]
        names = first.keys if keys is None else tuple(keys)
        for sample in samples:
            for key in names:
                sample._require(key)
                if sample.schemas[key] != first.schemas[key]:
                    raise SampleError(
                        f"key {key!r} is {sample.schemas[key]} in one batch and {first.schemas[key]} in another",
                        sample_ids=sample.ids,
                    )
            extra = sorted(set(sample.keys) - set(names)) if keys is None else []
            if extra:
                raise SampleError(
                    f"key {extra[0]!r} is in one batch but not in another; name the keys to gather",
                    sample_ids=sample.ids,
                )
        return cls(
            tuple(chain.from_iterable(s.ids for s in samples)),
            {key: first.schemas[key] for key in names},
            {key: tuple(chain.from_iterable(s.seqlens[key] for s in samples)) for key in names},
            {key: _concatenate(key, samples) for key in names},
        )

    def derive(self, like: str, values: Mapping[str, tuple[KeySchema, torch.Tensor]]) -> SequenceSample:
        """A batch with the same ids and new keys, whose lengths follow from the per-token key `like`.

        Args:
            like: a key of this batch that has L rows per sequence.
            values: key -> (schema, packed tensor). Rows per sequence: L, L - 1 (transition) or 1 (sequence); one row
                per sample under a schema per sample.

        Raises:
            SampleError: `like` is absent or not per token, or a tensor has the wrong number of rows.
        """
        self._require(like)
        check_pairs(values, "tensor")
        if self.schemas[like].per is not Per.TOKEN:
            raise SampleError(f"key {like!r} is not per token, so no lengths follow from it")
        lengths = {per: _derived_lengths(self.seqlens[like], per) for per in {s.per for s, _ in values.values()}}
        return SequenceSample(
            self.ids,
            {key: schema for key, (schema, _) in values.items()},
            {key: lengths[schema.per] for key, (schema, _) in values.items()},
            {key: tensor for key, (_, tensor) in values.items()},
        )

    # ------------------------------------------------------------ reading

    @property
    def keys(self) -> tuple[str, ...]:
        """All keys, with or without tensors."""
        return tuple(self.schemas)

    def __len__(self) -> int:
        return len(self.ids)

    def __contains__(self, key: str) -> bool:
        return key in self.schemas

    def __getitem__(self, key: str) -> torch.Tensor:
        """The packed tensor of `key`, ``[rows, *trailing]``.

        Raises:
            SampleError: the key is absent, or only its metadata is here.
        """
        self._require(key)
        tensor = self.data[key]
        if tensor is None:
            raise SampleError(f"key {key!r} holds metadata only, its tensor is elsewhere", sample_ids=self.ids)
        return tensor

    def __eq__(self, other: object) -> bool:
        """Same ids, schemas, lengths and exactly equal tensors (a NaN equals nothing); key order is no difference."""
        if not isinstance(other, SequenceSample):
            return NotImplemented
        if (self.ids, self.schemas, self.seqlens) != (other.ids, other.schemas, other.seqlens):
            return False
        pairs = [(self.data[key], other.data[key]) for key in self.schemas]
        return all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)

    __hash__ = None  # type: ignore[assignment]

    def cu_seqlens(self, key: str) -> torch.Tensor:
        """int32 ``[n_sequences + 1]``: offsets of all sequences of all samples, on the device of the key's tensor."""
        self._require(key)
        tensor = self.data[key]
        offsets = [0, *accumulate(chain.from_iterable(self.seqlens[key]))]
        return torch.tensor(offsets, dtype=torch.int32, device=None if tensor is None else tensor.device)

    def n_rows(self, key: str) -> int:
        """Rows of `key` over all samples: tokens, for a per-token key."""
        self._require(key)
        return self._offsets[key][-1]

    def flat_seqlens(self, key: str) -> tuple[int, ...]:
        """Rows per sequence, over all sequences of all samples."""
        self._require(key)
        return tuple(chain.from_iterable(self.seqlens[key]))

    def sequences(self, key: str) -> list[list[torch.Tensor]]:
        """Per sample, per sequence: a view ``[rows, *trailing]`` into the packed tensor."""
        parts = iter(torch.split(self[key], list(self.flat_seqlens(key))))
        return [[next(parts) for _ in lens] for lens in self.seqlens[key]]

    def samples(self, key: str) -> list[torch.Tensor]:
        """Per sample: a view of all its rows."""
        return list(torch.split(self[key], [sum(lens) for lens in self.seqlens[key]]))

    # ------------------------------------------------------------ rearranging

    def split(self, partition: Sequence[Sequence[int]]) -> list[SequenceSample]:
        """One batch per part; parts of neighbouring samples are views, others are copies.

        Args:
            partition: sample indices; together they name every sample exactly once. Empty parts are allowed.

        Raises:
            SampleError: an index is out of range, missing or named twice.
        """
        named = sorted(chain.from_iterable(partition))
        if named != list(range(len(self))):
            raise SampleError(
                f"a partition of {len(self)} samples must name each index below {len(self)} exactly once, "
                f"not {short(named)}",
                sample_ids=self.ids,
            )
        return [self._take(part, self.keys) for part in partition]

    def select(self, ids: Sequence[str], keys: Sequence[str] | None = None) -> SequenceSample:
        """These samples in this order, with these keys (None: all).

        Raises:
            SampleError: an id or key is not here, or an id is named twice.
        """
        check_ids(tuple(ids))
        names = self.keys if keys is None else tuple(keys)
        for key in names:
            self._require(key)
        try:
            indices = [self._index[sample_id] for sample_id in ids]
        except KeyError as error:
            missing = str(error.args[0])
            raise SampleError(
                f"sample {missing!r} is not in this batch of {len(self)} samples", sample_ids=(missing,)
            ) from None
        return self._take(indices, names)

    def remap(self, names: Mapping[str, str]) -> SequenceSample:
        """Rename keys (old name -> new name); keys that are not named stay as they are.

        Raises:
            SampleError: an old name is absent, or two keys would get one name.
        """
        for key in names:
            self._require(key)
        renamed = [names.get(key, key) for key in self.keys]
        for key in renamed:
            if renamed.count(key) > 1:
                raise SampleError(f"two keys would both be called {key!r}")
        pairs = list(zip(self.keys, renamed, strict=True))
        return self._checked(
            self.ids,
            {new: self.schemas[old] for old, new in pairs},
            {new: self.seqlens[old] for old, new in pairs},
            {new: self.data[old] for old, new in pairs},
        )

    def update(self, other: SequenceSample) -> SequenceSample:
        """Add the keys of `other`, which has the same ids in the same order; a key of both is taken from `other`.

        Raises:
            SampleError: the ids differ.
        """
        if self.ids != other.ids:
            pairs = zip(self.ids, other.ids, strict=False)
            at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(self), len(other)))
            mine = repr(self.ids[at]) if at < len(self) else "nothing"
            theirs = repr(other.ids[at]) if at < len(other) else "nothing"
            raise SampleError(
                f"batches differ at sample {at}: {mine} in one, {theirs} in the other",
                sample_ids=(*self.ids[at : at + 1], *other.ids[at : at + 1]),
            )
        return self._checked(
            self.ids,
            {**self.schemas, **other.schemas},
            {**self.seqlens, **other.seqlens},
            {**self.data, **other.data},
        )

    def meta(self) -> SequenceSample:
        """This batch without tensors."""
        return self._checked(self.ids, self.schemas, self.seqlens, dict.fromkeys(self.schemas))

    def describe(self) -> SampleMeta:
        """Wire form of `meta`."""
        return SampleMeta(self.ids, self.schemas, self.seqlens)

    def to(self, device: torch.device) -> SequenceSample:
        """This batch with every tensor on `device`."""
        data = {key: None if tensor is None else tensor.to(device) for key, tensor in self.data.items()}
        return self._checked(self.ids, self.schemas, self.seqlens, data)

    # ------------------------------------------------------------ internals

    @cached_property
    def _index(self) -> dict[str, int]:
        return {sample_id: i for i, sample_id in enumerate(self.ids)}

    @cached_property
    def _offsets(self) -> dict[str, list[int]]:
        """Key -> first row of each sample, and the number of rows at the end."""
        return {key: [0, *accumulate(map(sum, lens))] for key, lens in self.seqlens.items()}

    def _require(self, key: str) -> None:
        if key not in self.schemas:
            known = ", ".join(map(repr, self.keys)) or "no keys"
            hint = did_you_mean(key, self.keys)
            raise SampleError(
                f"no key {key!r} in this batch; it has {known}.{hint}",
                remedy="A call gets the keys that its MFCDef has in input_keys, under the names of input_key_remap.",
                sample_ids=self.ids,
            )

    def _take(self, indices: Sequence[int], keys: Sequence[str]) -> SequenceSample:
        runs = _runs(indices)
        data: dict[str, torch.Tensor | None] = {}
        for key in keys:
            tensor, offsets = self.data[key], self._offsets[key]
            if tensor is None:
                data[key] = None
                continue
            slices = [tensor[offsets[start] : offsets[stop]] for start, stop in runs]
            data[key] = slices[0] if len(slices) == 1 else torch.cat(slices) if slices else tensor[:0]
        return self._checked(
            tuple(self.ids[i] for i in indices),
            {key: self.schemas[key] for key in keys},
            {key: tuple(self.seqlens[key][i] for i in indices) for key in keys},
            data,
        )


def _as_tuples(seqlens: Sequence[Sequence[int]]) -> SeqLens:
    if type(seqlens) is tuple and all(type(lens) is tuple for lens in seqlens):
        return seqlens
    return tuple(tuple(int(n) for n in lens) for lens in seqlens)


def _runs(indices: Sequence[int]) -> list[tuple[int, int]]:
    """Maximal stretches ``(start, stop)`` of consecutive indices, in order."""
    runs: list[tuple[int, int]] = []
    for i in indices:
        if runs and runs[-1][1] == i:
            runs[-1] = (runs[-1][0], i + 1)
        else:
            runs.append((i, i + 1))
    return runs


def _derived_lengths(token_lens: SeqLens, per: Per) -> SeqLens:
    match per:
        case Per.TOKEN:
            return token_lens
        case Per.TRANSITION:
            return tuple(tuple(max(n - 1, 0) for n in lens) for lens in token_lens)
        case Per.SEQUENCE:
            return tuple((1,) * len(lens) for lens in token_lens)
        case Per.SAMPLE:
            return ((1,),) * len(token_lens)


def _empty(schema: KeySchema) -> torch.Tensor:
    return torch.empty((0, *schema.trailing), dtype=DTYPES.get(schema.dtype))


def _concatenate(key: str, samples: Sequence[SequenceSample]) -> torch.Tensor | None:
    tensors = [sample.data[key] for sample in samples]
    present = [tensor for tensor in tensors if tensor is not None]
    if not present:
        return None
    if len(present) < len(tensors):
        lacking = next(sample for sample, tensor in zip(samples, tensors, strict=True) if tensor is None)
        raise SampleError(
            f"key {key!r} has its tensor in some batches, but only metadata in the one with samples "
            f"{short(lacking.ids)}",
            sample_ids=lacking.ids,
        )
    return torch.cat(present) if len(present) > 1 else present[0]
