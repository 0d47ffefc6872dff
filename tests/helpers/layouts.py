"""Random small models and layouts, and their parameters as numbered elements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from realrl.errors import AllocationError
from realrl.mesh.device_mesh import ParallelStrategy
from realrl.plan.parameters.decoder_specs import parameter_specs
from realrl.plan.parameters.layout import ParameterLayout
from realrl.plan.parameters.realloc import ReallocPlan
from realrl.plan.parameters.shards import check_tp
from realrl.plan.parameters.specs import ParameterSpec, Slice
from realrl.shape import DecoderConfig, MoEConfig

Array = npt.NDArray[np.int64]
MAX_RANKS = 64
EXPERTS = MoEConfig(n_experts=3, top_k=2, intermediate_size=13)
SHAPE = DecoderConfig(
    vocab_size=16,
    hidden_size=4,
    n_layers=4,
    n_heads=4,
    n_kv_heads=4,
    head_dim=2,
    intermediate_size=16,
    max_positions=16,
    dtype="float64",
)


def make_shape(**changes: Any) -> DecoderConfig:
    """`SHAPE` with changes."""
    return replace(SHAPE, **changes)


LLAMA_70B = make_shape(
    n_layers=80,
    n_heads=64,
    n_kv_heads=8,
    vocab_size=32000,
    intermediate_size=28672,
    hidden_size=8192,
    head_dim=128,
    dtype="bfloat16",
)


@st.composite
def shapes(draw: st.DrawFn) -> DecoderConfig:
    """Draw models with up to 6 layers and 12 heads."""
    n_kv_heads = draw(st.sampled_from([1, 2, 3, 4, 6]))
    n_heads = n_kv_heads * draw(st.integers(1, 12 // n_kv_heads))
    n_layers, is_gated = draw(st.integers(1, 6)), draw(st.booleans())
    norm, qk_norm = draw(st.sampled_from([("rms", None), ("rms", "head"), ("rms", "all"), ("layer", None)]))
    mixtures = [EXPERTS, replace(EXPERTS, dense_layers=(0,))] if n_layers > 1 else [EXPERTS]
    return make_shape(
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        vocab_size=draw(st.integers(12, 19)),
        intermediate_size=draw(st.integers(12, 17)),
        hidden_size=draw(st.sampled_from([2, 3])),
        tied_embeddings=draw(st.booleans()),
        attention_bias=draw(st.booleans()),
        o_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
        gated_mlp=is_gated,
        norm=norm,
        qk_norm=qk_norm,
        learned_positions=draw(st.booleans()),
        moe=draw(st.sampled_from([None, None, *mixtures])) if is_gated else None,
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
def strategies(draw: st.DrawFn, shape: DecoderConfig, max_ranks: int = MAX_RANKS) -> ParallelStrategy:
    """Draw any legal strategy of a model for up to `max_ranks` ranks."""
    tp = draw(st.sampled_from(legal_tps(parameter_specs(shape), min(12, max_ranks))))
    pp = draw(st.integers(1, min(shape.n_layers, max_ranks // tp)))
    vpp = draw(st.integers(1, shape.n_layers // pp)) if pp > 1 else 1
    return ParallelStrategy(dp=draw(st.integers(1, max_ranks // (tp * pp))), tp=tp, pp=pp, vpp=vpp)


def whole_parameters(specs: tuple[ParameterSpec, ...]) -> dict[str, Array]:
    """All parameters, their elements numbered from 1."""
    parameters, first = {}, 1
    for spec in specs:
        parameters[spec.name] = np.arange(first, first + spec.n_elements).reshape(spec.shape)
        first += spec.n_elements
    return parameters


def shards_of(layout: ParameterLayout) -> dict[int, dict[str, Array]]:
    """Rank -> parameter -> the numbers in the rank's slice."""
    whole = whole_parameters(layout.specs)
    return {
        rank: {name: whole[name][index(place)].copy() for name, place in layout.slices_of(rank).items()}
        for rank in layout.ranks
    }


def index(place: Slice) -> tuple[slice, ...]:
    """Turn a slice of the planner into a numpy index."""
    return tuple(slice(start, stop) for start, stop in place)


def empty_shards(layout: ParameterLayout) -> dict[int, dict[str, Array]]:
    """Rank -> parameter -> zeros in the shape of the rank's slice."""
    return {
        rank: {name: np.zeros([b - a for a, b in place], dtype=np.int64) for name, place in slices.items()}
        for rank, slices in ((rank, layout.slices_of(rank)) for rank in layout.ranks)
    }


def perform(
    plan: ReallocPlan, source: Mapping[int, Mapping[str, Array]]
) -> tuple[dict[int, dict[str, Array]], dict[int, dict[str, Array]]]:
    """Carry out a plan, from the source tensors alone; relays pass on what has come to them.

    Returns:
        The target tensors, and the number of times that each of their elements was written.
    """
    target, counts = empty_shards(plan.target_layout), empty_shards(plan.target_layout)
    for rank in plan.target_layout.ranks:
        for keep in plan.keeps(rank):
            target[rank][keep.parameter][index(keep.target_slice)] = source[rank][keep.parameter][
                index(keep.source_slice)
            ]
            counts[rank][keep.parameter][index(keep.target_slice)] += 1
    for transfer in sorted(plan.transfers, key=lambda transfer: transfer.origin is not None):
        shards = source if transfer.origin is None else target
        sent = shards[transfer.source][transfer.parameter][index(transfer.source_slice)]
        target[transfer.target][transfer.parameter][index(transfer.target_slice)] = sent
        counts[transfer.target][transfer.parameter][index(transfer.target_slice)] += 1
    return target, counts
