"""Bytes that the parts of one cut of a model have in common with those of another, without a look at parameters.

A part is a pipeline stage's slice for one tensor rank. Parameters with equally many units are cut alike, so a part of
one cut and a part of another share, for every number of units,

    bytes of one unit, in the layers of both stages  *  units that both tensor ranks hold.

Invariants of `overlap_of`:
- a part contains at most all of another, and all of itself;
- the bytes of tensors that a part contains whole are at most those that it contains;
- nothing depends on the number of replicas, or on ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from realrl.plan.parameters.layout import ParameterLayout
from realrl.plan.parameters.realloc_portions import Matrix
from realrl.plan.parameters.specs import Layer, ParameterSpec
from realrl.plan.parameters.stages import Stages

_ENDS: tuple[tuple[Layer, ...], ...] = (("embedding",), ("head",), ("embedding", "head"))


@dataclass(frozen=True)
class UnitSizes:
    """Bytes of one unit, of all parameters with equally many units together.

    Attributes:
        n_units: int64 [numbers of units]; 1 for replicated parameters, which tensor ranks share as they share a unit.
        blocks: int64 [numbers of units, blocks + 1], bytes of the blocks before each.
        ends: int64 [numbers of units, 3], bytes in the embedding alone, in the head alone, and in both.
    """

    n_units: Matrix
    blocks: Matrix
    ends: Matrix


@dataclass(frozen=True)
class Overlap:
    """Bytes that parts have in common; the part of pp_rank and tp_rank has the number ``pp_rank * tp + tp_rank``.

    Attributes:
        held: int64 [source parts, target parts], bytes of a target part that a source part contains.
        whole: those of tensors that the source part contains whole, for which a rank with both allocates nothing.
        needed: int64 [target parts], all bytes of a target part.
    """

    held: Matrix
    whole: Matrix
    needed: Matrix


def unit_sizes(specs: Sequence[ParameterSpec], n_blocks: int) -> UnitSizes:
    """Add up the units of a model's parameters."""
    numbers = sorted({spec.n_units for spec in specs})
    place = {number: row for row, number in enumerate(numbers)}
    blocks = np.zeros((len(numbers), n_blocks + 1), dtype=np.int64)
    ends = np.zeros((len(numbers), len(_ENDS)), dtype=np.int64)
    for spec in specs:
        if isinstance(spec.layer, int):
            blocks[place[spec.n_units], spec.layer + 1] += spec.unit_bytes
        else:
            ends[place[spec.n_units], _ENDS.index(spec.layers)] += spec.unit_bytes
    return UnitSizes(np.array(numbers), blocks.cumsum(axis=1), ends)


def overlap_of(sizes: UnitSizes, source: tuple[Stages, int], target: tuple[Stages, int]) -> Overlap:
    """Return the bytes that the parts of two cuts have in common.

    Args:
        sizes: from `unit_sizes`.
        source, target: chunks of each stage, and the number of tensor ranks.
    """
    (source_stages, source_tp), (target_stages, target_tp) = source, target
    everything = ((range(sizes.blocks.shape[1] - 1),),)
    first, stop = _spans(sizes, source_tp)
    other_first, other_stop = _spans(sizes, target_tp)
    n_needed = (other_stop - other_first)[:, None]
    common = np.minimum(stop[:, :, None], other_stop[:, None]) - np.maximum(first[:, :, None], other_first[:, None])
    common = np.maximum(common, 0)
    whole = np.where(common == n_needed, common, 0)
    in_stages = _bytes_in_stages(sizes, source_stages, target_stages)
    needed = _joined(_bytes_in_stages(sizes, everything, target_stages), n_needed)
    return Overlap(_joined(in_stages, common), _joined(in_stages, whole), needed[0])


def overlap_of_layouts(source: ParameterLayout, target: ParameterLayout) -> Overlap:
    """Return the bytes that the parts of two layouts of one model have in common."""
    sizes = unit_sizes(source.specs, source.stages[-1][-1].stop)
    return overlap_of(sizes, (source.stages, source.strategy.tp), (target.stages, target.strategy.tp))


def part_of(layout: ParameterLayout, global_rank: int) -> int:
    """Return the number ``pp_rank * tp + tp_rank`` of a rank's part; ranks of one number hold the same slices."""
    pp_rank, _, tp_rank = layout.coordinates_of(global_rank)
    return pp_rank * layout.strategy.tp + tp_rank


def _spans(sizes: UnitSizes, tp: int) -> tuple[Matrix, Matrix]:
    """Return [numbers of units, tensor ranks], the first units and their ends; as `units_of`, for all at once."""
    ranks, n_units = np.arange(tp), sizes.n_units[:, None]
    start = ranks * n_units // tp
    return start, np.maximum((ranks + 1) * n_units // tp, start + 1)


def _bytes_in_stages(sizes: UnitSizes, source: Stages, target: Stages) -> Matrix:
    """Return [numbers of units, source stages, target stages]: bytes of units in the layers of both stages."""
    (first, stop), (other_first, other_stop) = (
        np.array([(chunk.start, chunk.stop) for chunks in stages for chunk in chunks]).T for stages in (source, target)
    )
    start = np.maximum(first[:, None], other_first)
    end = np.maximum(np.minimum(stop[:, None], other_stop), start)
    in_both = _in_ends(len(source))[:, :, None] * _in_ends(len(target))[:, None]
    ends = (sizes.ends @ in_both.reshape(len(_ENDS), -1)).reshape(-1, len(source), len(target))
    of_chunks = sizes.blocks[:, end] - sizes.blocks[:, start]
    of_stages = of_chunks.reshape(len(of_chunks), len(source), len(source[0]), len(target), len(target[0]))
    found: Matrix = of_stages.sum(axis=(2, 4)) + ends
    return found


@lru_cache(maxsize=1024)
def _in_ends(n_stages: int) -> Matrix:
    """Return int64 [3, stages], 1 for the stages that hold each of `_ENDS`; do not write to it."""
    held = np.zeros((len(_ENDS), n_stages), dtype=np.int64)
    for row, layers in enumerate(_ENDS):
        held[row, [0 if layer == "embedding" else n_stages - 1 for layer in layers]] = 1
    return held


def _joined(in_stages: Matrix, units: Matrix) -> Matrix:
    """Return [source parts, target parts]: bytes of units in common stages times common units, added up."""
    n_source, n_target, source_tp, target_tp = *in_stages.shape[1:], *units.shape[1:]
    found = in_stages.reshape(len(in_stages), -1).T @ units.reshape(len(units), -1)
    found = found.reshape(n_source, n_target, source_tp, target_tp).transpose(0, 2, 1, 3)
    joined: Matrix = found.reshape(n_source * source_tp, n_target * target_tp)
    return joined
