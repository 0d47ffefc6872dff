"""One parameter of a model: its shape, and the units in which tensor ranks hold it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias

Layer: TypeAlias = int | Literal["embedding", "head"]
"""Index of a block; "embedding"; "head" is the final norm and the head."""

Slice: TypeAlias = tuple[tuple[int, int], ...]
"""(start, stop) for each dim."""

Unit: TypeAlias = Literal["head", "kv_head", "row"]
"""Unit that is never split: heads (divided evenly), KV heads (evenly, or shared), single rows or columns (any cut)."""

DTYPE_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter of the whole model.

    Attributes:
        name: name in `Decoder.named_parameters()`.
        shape: shape of the whole parameter.
        dtype: a name like "float32".
        layer: the block, or the end of the model, that it is a part of.
        sharded_dim: the dim that tensor parallelism splits; None for a replicated parameter.
        n_units: units along `sharded_dim` that are never split; 1 for a replicated parameter.
        also_layer: "head" for a tied embedding, which the last stage needs as well.
        unit: kind of the units; None for a replicated parameter.
        n_experts: experts whose weights the parameter holds, along dim 0; 1 outside of a mixture.
        top_k: number of these experts that compute a token.
        is_tp_partial: the parameter is replicated, but each tensor rank uses it for its own slice of the activations,
            and so computes a part of its gradient.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    layer: Layer
    sharded_dim: int | None = None
    n_units: int = 1
    also_layer: Layer | None = None
    unit: Unit | None = None
    n_experts: int = 1
    top_k: int = 1
    is_tp_partial: bool = False

    @cached_property
    def n_elements(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)

    @property
    def n_elements_per_token(self) -> int:
        """Elements that a token meets: all of them, or those of its experts."""
        return self.n_elements // self.n_experts * self.top_k

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole parameter."""
        return self.n_elements * DTYPE_BYTES[self.dtype]

    @property
    def unit_bytes(self) -> int:
        """Bytes of one unit; of the whole parameter if it is replicated."""
        return self.num_bytes // self.n_units

    @property
    def unit_length(self) -> int:
        """Extent of one unit along `sharded_dim`; 0 if the parameter is replicated."""
        return 0 if self.sharded_dim is None else self.shape[self.sharded_dim] // self.n_units

    @property
    def layers(self) -> tuple[Layer, ...]:
        """Every layer that needs the parameter."""
        return (self.layer,) if self.also_layer is None else (self.layer, self.also_layer)


def units_of(n_units: int, tp_rank: int, tp_size: int) -> tuple[int, int]:
    """Return (start, stop) of the units that a tensor rank holds; with fewer units than ranks, ranks share units."""
    start = tp_rank * n_units // tp_size
    return start, max((tp_rank + 1) * n_units // tp_size, start + 1)


def slice_of(spec: ParameterSpec, tp_rank: int, tp_size: int) -> Slice:
    """Return the slice that a tensor rank holds, (start, stop) for each dim of the whole parameter."""
    whole = tuple((0, size) for size in spec.shape)
    if spec.sharded_dim is None:
        return whole
    start, stop = (edge * spec.unit_length for edge in units_of(spec.n_units, tp_rank, tp_size))
    return (*whole[: spec.sharded_dim], (start, stop), *whole[spec.sharded_dim + 1 :])
