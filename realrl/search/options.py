"""What a partial plan may have decided of a call: the size of its mesh, its strategy, or all but the place.

    size ──► strategies of that size ──► choices with that strategy

An option has the least seconds and the least bytes of all choices that it leaves open, so that what it proves of a plan
holds for each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from realrl.mesh.device_mesh import ParallelStrategy
from realrl.search.fast import Model
from realrl.search.space import Choice


@dataclass(frozen=True, eq=False)
class Option:
    """Choices of one call on a mesh of one size.

    Attributes:
        seconds, kept, used: least values of `Price`; nothing is kept by a call that is no home.
        strategy: None if it is open.
        choice: None if it is open.
        parts: options that leave less open, the fastest first; none if there is one choice alone.
    """

    n_devices: int
    seconds: float
    kept: int
    used: int
    strategy: ParallelStrategy | None
    choice: Choice | None = None
    parts: tuple[Option, ...] = ()


def options_of(model: Model, call: int, choices: Iterable[Choice]) -> tuple[Option, ...]:
    """Return an option for each size of mesh that some choice of a call has, ascending."""
    is_home = model.flow.homes[call] == call
    single = []
    for choice in choices:
        price = model.price(call, choice)
        kept = price.kept if is_home else 0
        single.append(Option(choice.n_devices, price.seconds, kept, price.used, choice.strategy, choice))
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
        min(part.used for part in parts),
        parts[0].strategy if len(strategies) == 1 else None,
        parts=tuple(sorted(parts, key=lambda part: part.seconds)),
    )
