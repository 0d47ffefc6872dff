"""Location of a rank's slices in a state that was saved in another layout.

Each (pp, tp) coordinate of the saving layout wrote one file, with its slice of every parameter of its stage; other
data-parallel ranks hold the same slices, and wrote nothing. A piece is a box of one such slice, which goes to a box of
the reader's slice.

Invariants of `plan_restore`:
- the pieces of a parameter fill the reader's slice, every element once;
- a piece lies within the slice that its file holds, and names the same elements in the file and in the reader;
- a parameter that several files hold (replicated, tied, shared KV heads) is read from the first of them that has it, in
  the order of pp, then tp; where the reader's own coordinate wrote the same slice, from that one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from realrl.mesh.device_mesh import ParallelStrategy
from realrl.plan.parameters.layout import ParameterLayout, parameter_layout
from realrl.plan.parameters.specs import ParameterSpec, Slice

Coordinate = tuple[int, int]
"""``(pp_rank, tp_rank)``."""


@dataclass(frozen=True)
class SavedSlice:
    """A part of a parameter.

    Attributes:
        source: coordinate whose file has it.
        read: (start, stop) for each dim of the slice in the file.
        write: (start, stop) for each dim of the reader's slice.
    """

    source: Coordinate
    read: Slice
    write: Slice


@dataclass(frozen=True)
class RestorePlan:
    """Pieces that one coordinate reads.

    Attributes:
        shapes: parameter -> shape of the reader's slice, in the order of the model.
        pieces: parameter -> parts of saved slices that fill it.
    """

    shapes: dict[str, tuple[int, ...]]
    pieces: dict[str, tuple[SavedSlice, ...]]

    @property
    def sources(self) -> tuple[Coordinate, ...]:
        """Coordinates whose files are read, in order."""
        return tuple(sorted({piece.source for pieces in self.pieces.values() for piece in pieces}))


def coordinates(strategy: ParallelStrategy) -> tuple[Coordinate, ...]:
    """Return the coordinates that write a file each."""
    return tuple((pp, tp) for pp in range(strategy.pp) for tp in range(strategy.tp))


def plan_restore(
    specs: Sequence[ParameterSpec], saved: ParallelStrategy, target: ParallelStrategy, coordinate: Coordinate
) -> RestorePlan:
    """Plan the reads of the ranks at one coordinate of the layout `target` from a state saved in the layout `saved`.

    Args:
        specs: parameters of the model, from `parameter_specs`.

    Raises:
        AllocationError: a strategy does not fit the model.
    """
    source, reader = _layout(specs, saved), _layout(specs, target)
    held = {at: source.slices_of(_rank(source, at)) for at in coordinates(saved)}
    own = reader.slices_of(_rank(reader, coordinate))
    pieces = {}
    for name, wanted in own.items():
        candidates = [(at, slices[name]) for at, slices in held.items() if name in slices]
        same = [candidate for candidate in candidates if candidate == (coordinate, wanted)]
        pieces[name] = _cover(wanted, same or candidates)
    shapes = {name: tuple(stop - start for start, stop in part) for name, part in own.items()}
    return RestorePlan(shapes, pieces)


def model_digest(specs: Sequence[ParameterSpec]) -> str:
    """Return a short digest of the names and shapes of a model's parameters."""
    text = "\n".join(f"{spec.name} {','.join(map(str, spec.shape))}" for spec in specs)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _cover(wanted: Slice, candidates: Sequence[tuple[Coordinate, Slice]]) -> tuple[SavedSlice, ...]:
    """Fill `wanted` from slices that differ from it along one dim at most."""
    dim = next((d for d, edge in enumerate(wanted) if any(found[d] != edge for _, found in candidates)), None)
    if dim is None:
        at, found = candidates[0]
        return (SavedSlice(at, _shifted(wanted, found), _shifted(wanted, wanted)),)
    pieces = []
    position, stop = wanted[dim]
    for at, found in sorted(candidates, key=lambda candidate: (candidate[1][dim], candidate[0])):
        start, end = max(position, found[dim][0]), min(stop, found[dim][1])
        if start >= end:
            continue
        assert start == position, f"nobody saved {position} to {start} of dim {dim}"
        box = (*wanted[:dim], (start, end), *wanted[dim + 1 :])
        pieces.append(SavedSlice(at, _shifted(box, found), _shifted(box, wanted)))
        position = end
    assert position == stop, f"nobody saved {position} to {stop} of dim {dim}"
    return tuple(pieces)


def _shifted(box: Slice, origin: Slice) -> Slice:
    """Return a box in the coordinates of a slice that holds it."""
    return tuple((start - first, stop - first) for (start, stop), (first, _) in zip(box, origin, strict=True))


def _layout(specs: Sequence[ParameterSpec], strategy: ParallelStrategy) -> ParameterLayout:
    return parameter_layout(specs, strategy, range(strategy.n_devices))


def _rank(layout: ParameterLayout, coordinate: Coordinate) -> int:
    return layout.rank_at(pp_rank=coordinate[0], dp_rank=0, tp_rank=coordinate[1])
