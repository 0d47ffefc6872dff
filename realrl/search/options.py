"""Options of a call in a partial plan: the size of its mesh, its strategy, or all but the place.

    size ──► strategies of that size ──► choices with that strategy

An option has the least seconds and the least bytes of all choices that it leaves open, so that what it proves of a plan
holds for each of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from realrl.mesh.device_mesh import ParallelStrategy
from realrl.search.fast import Model
from realrl.search.space import Choice

Array = npt.NDArray[np.float64]

_WEIGHTS = np.array([0.0, 0.125, 0.25, 0.5, 1.0, 2.0, 4.0])


def byte_weights(model: Model, choices: Sequence[Sequence[Choice]]) -> Array:
    """Return weights of a byte, at which a device's memory counts about as much as a step; the first is 0."""
    if math.isinf(model.capacity):
        return _WEIGHTS[:1]
    areas = [min(model.price(c, one).seconds * one.n_devices for one in some) for c, some in enumerate(choices)]
    weights: Array = _WEIGHTS * (sum(areas) / model.cluster.n_devices / max(model.capacity, 1.0))
    return weights


@dataclass(frozen=True, eq=False)
class Option:
    """Choices of one call on a mesh of one size.

    Attributes:
        seconds: the least, see `Model.least`.
        kept, least, first: the least of `Spread.mean`, `least` and `first`; nothing is kept by a call that is no home.
        weighed: least of seconds and bytes together that are kept on average, for each weight of a byte; then the same
            with the bytes that any device keeps at least.
        strategy: None if it is open.
        choice: None if it is open.
        parts: options that leave less open, the fastest first; none if there is one choice alone.
    """

    n_devices: int
    seconds: float
    kept: float
    least: tuple[int, int]
    first: tuple[int, int]
    weighed: Array
    strategy: ParallelStrategy | None
    choice: Choice | None = None
    parts: tuple[Option, ...] = ()


def options_of(model: Model, call: int, choices: Iterable[Choice], weights: Array) -> tuple[Option, ...]:
    """Return an option for each size of mesh that some choice of a call has, ascending.

    Args:
        weights: seconds for which a byte counts that is kept on a device.
    """
    is_home = model.flow.homes[call] == call
    single = []
    for choice in choices:
        (mean, least, first), seconds = model.price(call, choice).spread, model.least(call, choice)
        if not is_home:
            mean, least, first = 0.0, (0, least[1]), (0, first[1])
        weighed = seconds + weights * np.array([[mean], [least[0]]])
        single.append(Option(choice.n_devices, seconds, mean, least, first, weighed, choice.strategy, choice))
    by_strategy = _joined(single, lambda option: option.strategy)
    return tuple(sorted(_joined(by_strategy, lambda option: option.n_devices), key=lambda option: option.n_devices))


def _joined(options: Sequence[Option], key: Callable[[Option], Hashable]) -> list[Option]:
    """Join options with equal keys."""
    groups: dict[Hashable, list[Option]] = {}
    for option in options:
        groups.setdefault(key(option), []).append(option)
    return [_join(parts) if len(parts) > 1 else parts[0] for parts in groups.values()]


def _join(parts: Sequence[Option]) -> Option:
    strategies = {part.strategy for part in parts}
    return Option(
        parts[0].n_devices,
        min(part.seconds for part in parts),
        min(part.kept for part in parts),
        _least([part.least for part in parts]),
        _least([part.first for part in parts]),
        np.min([part.weighed for part in parts], axis=0),
        parts[0].strategy if len(strategies) == 1 else None,
        parts=tuple(sorted(parts, key=lambda part: part.seconds)),
    )


def _least(pairs: Sequence[tuple[int, int]]) -> tuple[int, int]:
    first, second = zip(*pairs, strict=True)
    return min(first), min(second)
