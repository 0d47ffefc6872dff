"""SequenceSample: a packed batch of variable-length samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from realrl.sched.messages import KeySchema, SampleMeta


@dataclass(frozen=True)
class SequenceSample:
    """A batch of samples; a sample is a prompt and everything produced from it, and holds one or more sequences.

    Attributes:
        ids: sample ids.
        schemas: key -> dtype and granularity.
        seqlens: key -> per sample -> per sequence -> number of rows of that key.
        data: key -> packed tensor ``[sum of seqlens[key], *trailing]``, or None (metadata only).
    """

    ids: tuple[str, ...]
    schemas: Mapping[str, KeySchema]
    seqlens: Mapping[str, tuple[tuple[int, ...], ...]]
    data: Mapping[str, torch.Tensor | None]

    @property
    def keys(self) -> tuple[str, ...]: ...
    def __len__(self) -> int: ...  # samples
    def __getitem__(self, key: str) -> torch.Tensor: ...  # packed tensor; an error that names the key when it is absent or metadata only
    @classmethod
    def gather(cls, samples: Sequence[SequenceSample], keys: Sequence[str] | None = None) -> SequenceSample: ...  # concatenate along samples
    def split(self, partition: Sequence[Sequence[int]]) -> list[SequenceSample]: ...  # by sample indices; gather(split(x)) == x for contiguous partitions
    def select(self, ids: Sequence[str], keys: Sequence[str] | None = None) -> SequenceSample: ...  # by ids, in that order
    def remap(self, names: Mapping[str, str]) -> SequenceSample: ...  # rename keys
    def update(self, other: SequenceSample) -> SequenceSample: ...  # same ids in the same order, more keys
    def meta(self) -> SequenceSample: ...  # the same without tensors
    def describe(self) -> SampleMeta: ...  # wire form of meta
    def to(self, device: torch.device) -> SequenceSample: ...
    def cu_seqlens(self, key: str) -> torch.Tensor: ...  # int32 [n_sequences + 1], over all sequences of all samples
