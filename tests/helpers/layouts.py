"""Random small models and layouts, and their parameters as numbered elements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from realrl.errors import AllocationError
from realrl.mesh.device_mesh import ParallelStrategy
from realrl.plan.parameters.adapters import LoRA
from realrl.plan.parameters.layout import ParameterLayout, ParameterSpec, Slice, check_tp, parameter_specs
from realrl.plan.parameters.realloc import ReallocPlan

Array = npt.NDArray[np.int64]
MAX_RANKS = 64


@dataclass(frozen=True)
class Experts:
    """What decides the parameters of a mixture of experts; see `realrl.plan.parameters.layout.ExpertsShape`."""

    n_experts: int = 3
    top_k: int = 2
    intermediate_size: int = 13
    dense_layers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Shape:
    """What decides a model's parameters; see `realrl.plan.parameters.layout.ModelShape`."""

    n_layers: int = 4
    n_heads: int = 4
    n_kv_heads: int = 4
    vocab_size: int = 16
    intermediate_size: int = 16
    hidden_size: int = 4
    head_dim: int = 2
    tied_embeddings: bool = False
    attention_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    gated_mlp: bool = True
    norm_bias: bool = False
    qk_norm: bool = False
    learned_positions: bool = False
    max_positions: int = 16
    moe: Experts | None = None
    head: str = "lm"
    dtype: str = "float64"
    lora: LoRA | None = None


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Models with up to 6 layers and 12 heads."""
    n_kv_heads = draw(st.sampled_from([1, 2, 3, 4, 6]))
    n_heads = n_kv_heads * draw(st.integers(1, 12 // n_kv_heads))
    return Shape(
        n_layers=draw(st.integers(1, 6)),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        vocab_size=draw(st.integers(12, 19)),
        intermediate_size=draw(st.integers(12, 17)),
        hidden_size=draw(st.sampled_from([2, 3])),
        tied_embeddings=draw(st.booleans()),
        attention_bias=draw(st.booleans()),
        o_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
        gated_mlp=draw(st.booleans()),
        norm_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        learned_positions=draw(st.booleans()),
        moe=draw(st.sampled_from([None, None, Experts(), Experts(dense_layers=(0,))])),
        head=draw(st.sampled_from(["lm", "lm", "value", "reward"])),
    )


def legal_tps(specs: tuple[ParameterSpec, ...], at_most: int) -> list[int]:
    """Tensor-parallel sizes that the model allows."""
    legal = []
    for tp in range(1, at_most + 1):
        try:
            check_tp(specs, tp)
        except AllocationError:
            continue
        legal.append(tp)
    return legal


@st.composite
def strategies(draw: st.DrawFn, shape: Shape, max_ranks: int = MAX_RANKS) -> ParallelStrategy:
    """Any legal strategy of a model for up to `max_ranks` ranks."""
    tp = draw(st.sampled_from(legal_tps(parameter_specs(shape), min(12, max_ranks))))
    pp = draw(st.integers(1, min(shape.n_layers, max_ranks // tp)))
    return ParallelStrategy(dp=draw(st.integers(1, max_ranks // (tp * pp))), tp=tp, pp=pp)


def whole_parameters(specs: tuple[ParameterSpec, ...]) -> dict[str, Array]:
    """Every parameter, each element another number from 1."""
    parameters, first = {}, 1
    for spec in specs:
        parameters[spec.name] = np.arange(first, first + spec.n_elements).reshape(spec.shape)
        first += spec.n_elements
    return parameters


def shards_of(layout: ParameterLayout) -> dict[int, dict[str, Array]]:
    """rank -> parameter -> the numbers that it holds."""
    whole = whole_parameters(layout.specs)
    return {
        rank: {name: whole[name][index(place)].copy() for name, place in layout.slices_of(rank).items()}
        for rank in layout.ranks
    }


def index(place: Slice) -> tuple[slice, ...]:
    """A slice of the planner as a numpy index."""
    return tuple(slice(start, stop) for start, stop in place)


def empty_shards(layout: ParameterLayout) -> dict[int, dict[str, Array]]:
    """rank -> parameter -> zeros in the shape of its slice."""
    return {
        rank: {name: np.zeros([b - a for a, b in place], dtype=np.int64) for name, place in slices.items()}
        for rank, slices in ((rank, layout.slices_of(rank)) for rank in layout.ranks)
    }


def perform(
    plan: ReallocPlan, source: Mapping[int, Mapping[str, Array]]
) -> tuple[dict[int, dict[str, Array]], dict[int, dict[str, Array]]]:
    """Do what a plan says, from the source tensors alone.

    Returns:
        The target tensors, and how often each of their elements was written.
    """
    target, counts = empty_shards(plan.target_layout), empty_shards(plan.target_layout)
    for rank in plan.target_layout.ranks:
        for keep in plan.keeps(rank):
            target[rank][keep.parameter][index(keep.target_slice)] = source[rank][keep.parameter][
                index(keep.source_slice)
            ]
            counts[rank][keep.parameter][index(keep.target_slice)] += 1
    for transfer in plan.transfers:
        sent = source[transfer.source][transfer.parameter][index(transfer.source_slice)]
        target[transfer.target][transfer.parameter][index(transfer.target_slice)] = sent
        counts[transfer.target][transfer.parameter][index(transfer.target_slice)] += 1
    return target, counts
