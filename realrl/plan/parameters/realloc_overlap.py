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

import numpy as np

from realrl.plan.parameters.layout import ParameterLayout
from realrl.plan.parameters.realloc_portions import Matrix
from realrl.plan.parameters.specs import Layer, ParameterSpec, units_of

_ENDS: tuple[tuple[Layer, ...], ...] = (("embedding",), ("head",), ("embedding", "head"))


@dataclass(frozen=True)
class UnitSizes:
    """Bytes of one unit, of all parameters with equally many units together.

    Attributes:
        n_units: numbers of units; 0 for replicated parameters, whose unit is the whole parameter.
        blocks: int64 [numbers of units, blocks + 1], bytes of the blocks before each.
        ends: int64 [numbers of units, 3], bytes in the embedding alone, in the head alone, and in both.
    """

    n_units: tuple[int, ...]
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
    numbers = tuple(sorted({0 if spec.sharded_dim is None else spec.n_units for spec in specs}))
    place = {number: row for row, number in enumerate(numbers)}
    blocks = np.zeros((len(numbers), n_blocks + 1), dtype=np.int64)
    ends = np.zeros((len(numbers), len(_ENDS)), dtype=np.int64)
    for spec in specs:
        row = place[0 if spec.sharded_dim is None else spec.n_units]
        if isinstance(spec.layer, int):
            blocks[row, spec.layer + 1] += spec.unit_bytes
        else:
            ends[row, _ENDS.index(spec.layers)] += spec.unit_bytes
    return UnitSizes(numbers, blocks.cumsum(axis=1), ends)


def overlap_of(sizes: UnitSizes, source: tuple[Sequence[range], int], target: tuple[Sequence[range], int]) -> Overlap:
    """Return the bytes that the parts of two cuts have in common.

    Args:
        sizes: from `unit_sizes`.
        source, target: blocks of each stage, and the number of tensor ranks.
    """
    held, whole = (_joined(sizes, source, target, units) for units in _common_units(sizes, source[1], target[1]))
    everything = [range(sizes.blocks.shape[1] - 1)], 1
    needed, _ = _common_units(sizes, 1, target[1])
    return Overlap(held, whole, _joined(sizes, everything, target, needed)[0])


def overlap_of_layouts(source: ParameterLayout, target: ParameterLayout) -> Overlap:
    """Return the bytes that the parts of two layouts of one model have in common."""
    sizes = unit_sizes(source.specs, source.stages[-1].stop)
    return overlap_of(sizes, (source.stages, source.strategy.tp), (target.stages, target.strategy.tp))


def part_of(layout: ParameterLayout, global_rank: int) -> int:
    """Return the number ``pp_rank * tp + tp_rank`` of a rank's part; ranks of one number hold the same slices."""
    pp_rank, _, tp_rank = layout.coordinates_of(global_rank)
    return pp_rank * layout.strategy.tp + tp_rank


def _joined(
    sizes: UnitSizes, source: tuple[Sequence[range], int], target: tuple[Sequence[range], int], units: Matrix
) -> Matrix:
    """Return [source parts, target parts]: bytes of units in common stages times common units."""
    (source_stages, source_tp), (target_stages, target_tp) = source, target
    n_source, n_target = len(source_stages), len(target_stages)
    in_stages = _bytes_in_stages(sizes, source_stages, target_stages).reshape(len(sizes.n_units), -1)
    found = in_stages.T @ units.reshape(len(sizes.n_units), -1)
    found = found.reshape(n_source, n_target, source_tp, target_tp).transpose(0, 2, 1, 3)
    return found.reshape(n_source * source_tp, n_target * target_tp)


def _bytes_in_stages(sizes: UnitSizes, source: Sequence[range], target: Sequence[range]) -> Matrix:
    """Return [numbers of units, source stages, target stages]: bytes of units in the layers of both stages."""
    (first, stop), (other_first, other_stop) = (
        np.array([(stage.start, stage.stop) for stage in stages]).T for stages in (source, target)
    )
    start = np.maximum(first[:, None], other_first)
    end = np.maximum(np.minimum(stop[:, None], other_stop), start)
    found = sizes.blocks[:, end] - sizes.blocks[:, start]
    for column, layers in enumerate(_ENDS):
        here, there = ({_stage_of(layer, stages) for layer in layers} for stages in (source, target))
        found[:, [[stage] for stage in here], list(there)] += sizes.ends[:, column, None, None]
    return found


def _stage_of(layer: Layer, stages: Sequence[range]) -> int:
    return 0 if layer == "embedding" else len(stages) - 1


def _common_units(sizes: UnitSizes, source_tp: int, target_tp: int) -> tuple[Matrix, Matrix]:
    """Return [numbers of units, source tensor ranks, target ones], twice: common units, and those of whole targets."""
    common = np.ones((len(sizes.n_units), source_tp, target_tp), dtype=np.int64)
    whole = np.ones_like(common)
    for row, n_units in enumerate(sizes.n_units):
        if n_units:
            (first, stop), (other_first, other_stop) = (
                np.array([units_of(n_units, rank, tp) for rank in range(tp)]).T for tp in (source_tp, target_tp)
            )
            start, end = np.maximum(first[:, None], other_first), np.minimum(stop[:, None], other_stop)
            common[row] = np.maximum(end - start, 0)
            whole[row] = np.where(common[row] == other_stop - other_first, common[row], 0)
    return common, whole
