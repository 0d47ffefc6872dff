"""Common refinement of two layouts of one model into portions.

The elements of a portion are alike to every rank: the same pipeline stages and tensor ranks hold all of it in the
source layout, and the same need all of it in the target layout. Portions are few, for any number of parameters and
ranks, so planning works on portions and spells out parameters last.

Invariants of `portions_of`:
- every element of every parameter is in exactly one portion;
- a rank of either layout holds all elements of a portion, or none;
- an item exceeds `item_bytes`, where there is such a limit, only if it is a single unit or a replicated parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from realrl.errors import AllocationError
from realrl.plan.parameters.layout import ParameterLayout
from realrl.plan.parameters.specs import Layer, ParameterSpec, units_of

Matrix = npt.NDArray[np.int64]


@dataclass(frozen=True)
class UnitRange:
    """The units ``[start, stop)`` of parameter ``specs[spec_index]``; all of it for a replicated parameter."""

    spec_index: int
    start: int
    stop: int
    num_bytes: int


@dataclass(frozen=True)
class Portion:
    """A part of the model that each rank has, or needs, as a whole.

    Attributes:
        source_stages, source_tps: pp_ranks and tp_ranks that hold it in the source layout.
        target_stages, target_tps: pp_ranks and tp_ranks that need it in the target layout.
        items: its pieces, layer by layer or in smaller groups; the unit in which senders share the work.
    """

    source_stages: tuple[int, ...]
    source_tps: range
    target_stages: tuple[int, ...]
    target_tps: range
    items: tuple[tuple[UnitRange, ...], ...]

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """``ends[i]``: bytes of the first i items."""
        return tuple(accumulate((sum(piece.num_bytes for piece in item) for item in self.items), initial=0))

    @property
    def num_bytes(self) -> int:
        """Bytes of all items."""
        return self.ends[-1]


def check_same_model(source: ParameterLayout, target: ParameterLayout) -> None:
    """Refuse two layouts of different models.

    Raises:
        AllocationError: names the first parameter that differs.
    """
    if source.specs is target.specs or source.specs == target.specs:
        return
    ours, theirs = ({spec.name: spec for spec in layout.specs} for layout in (source, target))
    for name in [*ours, *theirs]:
        if ours.get(name) != theirs.get(name):
            raise AllocationError(
                f"the layouts are of different models: parameter {name} is {_spec_text(ours.get(name))} in the source "
                f"and {_spec_text(theirs.get(name))} in the target",
                remedy="Parameters move between layouts of one model only: make both from the same configuration.",
            )
    raise AllocationError(
        "the layouts list the same parameters in a different order",
        remedy="Make both layouts from the same configuration.",
    )


def _spec_text(spec: ParameterSpec | None) -> str:
    if spec is None:
        return "missing"
    split = "replicated" if spec.sharded_dim is None else f"{spec.n_units} units along dim {spec.sharded_dim}"
    tied = ", tied" if spec.also_layer is not None else ""
    return f"{spec.dtype}{list(spec.shape)} ({split}{tied})"


def portions_of(
    source: ParameterLayout, target: ParameterLayout, *, item_bytes: int | None = None
) -> tuple[Portion, ...]:
    """Return all portions of two layouts of one model, in the order of their first parameters.

    Args:
        item_bytes: cut layers into items of at most that many bytes; None keeps every layer in one item.
    """
    cells_of: dict[int, list[tuple[int, int, range, range]]] = {}
    whole = [(0, 1, range(source.strategy.tp), range(target.strategy.tp))]
    items: dict[tuple[object, ...], dict[Layer, list[UnitRange]]] = {}
    for index, spec in enumerate(source.specs):
        cells = whole
        if spec.sharded_dim is not None:
            if spec.n_units not in cells_of:
                cells_of[spec.n_units] = list(_cells(spec.n_units, source.strategy.tp, target.strategy.tp))
            cells = cells_of[spec.n_units]
        stages = tuple(
            tuple(sorted({of_layer[layer] for layer in spec.layers})) for of_layer in (source.stage_of, target.stage_of)
        )
        kind = "block" if isinstance(spec.layer, int) else spec.layer
        for start, stop, source_tps, target_tps in cells:
            of_layer = items.setdefault((*stages, source_tps, target_tps, kind), {})
            piece = UnitRange(index, start, stop, (stop - start) * spec.unit_bytes)
            of_layer.setdefault(spec.layer, []).append(piece)
    return tuple(
        Portion(from_stages, from_tps, to_stages, to_tps, tuple(_items(source.specs, of_layer.values(), item_bytes)))  # type: ignore[arg-type]
        for (from_stages, to_stages, from_tps, to_tps, _), of_layer in items.items()
    )


def _items(
    specs: Sequence[ParameterSpec], layers: Iterable[list[UnitRange]], item_bytes: int | None
) -> Iterator[tuple[UnitRange, ...]]:
    """Yield the pieces of each layer, together or in groups of at most `item_bytes`."""
    for pieces in layers:
        if item_bytes is None or sum(piece.num_bytes for piece in pieces) <= item_bytes:
            yield tuple(pieces)
            continue
        group: list[UnitRange] = []
        for piece in (part for whole in pieces for part in _parts(specs[whole.spec_index], whole, item_bytes)):
            if group and sum(member.num_bytes for member in group) + piece.num_bytes > item_bytes:
                yield tuple(group)
                group = []
            group.append(piece)
        yield tuple(group)


def _parts(spec: ParameterSpec, piece: UnitRange, item_bytes: int) -> Iterator[UnitRange]:
    """Cut a piece of a sharded parameter evenly into ranges of units of at most `item_bytes`."""
    n_units = piece.stop - piece.start
    if spec.sharded_dim is None or piece.num_bytes <= item_bytes:
        yield piece
        return
    n_parts = -(-n_units // max(item_bytes // spec.unit_bytes, 1))
    edges = [piece.start + n_units * i // n_parts for i in range(n_parts + 1)]
    for start, stop in pairwise(edges):
        yield UnitRange(piece.spec_index, start, stop, (stop - start) * spec.unit_bytes)


def _cells(n_units: int, source_tp: int, target_tp: int) -> Iterator[tuple[int, int, range, range]]:
    """Cut units where either side cuts them; yield (start, stop, source tp_ranks that hold them, target ones)."""
    sides = [[units_of(n_units, rank, tp) for rank in range(tp)] for tp in (source_tp, target_tp)]
    for start, stop in pairwise(sorted({edge for side in sides for span in side for edge in span})):
        source_tps, target_tps = (_holders(side, start) for side in sides)
        yield start, stop, source_tps, target_tps


def _holders(spans: Sequence[tuple[int, int]], unit: int) -> range:
    """Return the ranks, which are consecutive, whose units include `unit`."""
    holders = [rank for rank, (start, stop) in enumerate(spans) if start <= unit < stop]
    return range(holders[0], holders[-1] + 1)
