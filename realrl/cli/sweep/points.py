"""The points of a sweep: overrides with several values, in Hydra's grammar, multiplied out.

lr=1e-5,3e-5  seed=1,2,3  steps=40   ──►   6 points, the last key changing fastest, as Hydra's own sweeper orders them
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from realrl.config.overrides import several_values
from realrl.config.secrets import masked_argument
from realrl.errors import UsageError

MAX_POINTS = 500
_MAX_NAME_CHARS = 100


@dataclass(frozen=True)
class Point:
    """One run of a sweep.

    Attributes:
        name: of its folder below that of the sweep; no other point has it.
        values: swept key, as short as it is unambiguous -> value as typed.
        overrides: of the run, without its folder.
    """

    name: str
    values: dict[str, str]
    overrides: tuple[str, ...]


def multiply(overrides: Sequence[str]) -> list[Point]:
    """Return the points of a sweep, in their order.

    Raises:
        UsageError: no key has several values, a key or one of its values is there twice, or there are too many points.
    """
    swept = {place: values for place, word in enumerate(overrides) if (values := several_values(word, MAX_POINTS + 1))}
    if not swept:
        raise UsageError("nothing to sweep: no key has several values", remedy="Give one several: seed=1,2,3")
    keys = [overrides[place].partition("=")[0].lstrip("+") for place in swept]
    for key, values in zip(keys, swept.values()):
        twice = sorted({value for value in values if values.count(value) > 1})
        if twice or keys.count(key) > 1:
            what = f"{key}={twice[0]}" if twice else key
            raise UsageError(f"{what} is there twice", remedy="Give each key once, and each of its values once.")
    n_points = math.prod(len(values) for values in swept.values())
    if n_points > MAX_POINTS:
        many = (
            f"{n_points:,}" if all(len(values) <= MAX_POINTS for values in swept.values()) else f"over {MAX_POINTS:,}"
        )
        raise UsageError(
            f"a sweep of {many} points; the most are {MAX_POINTS}", remedy="Sweep fewer keys or values at a time."
        )
    names, points = list(_short(keys)), list[Point]()
    for combination in itertools.product(*swept.values()):
        words = list(overrides)
        for place, value in zip(swept, combination):
            words[place] = f"{overrides[place].partition('=')[0]}={value}"
        own = dict(zip(names, combination))
        points.append(Point(_folder(own), own, tuple(words)))
    if len({point.name for point in points}) < len(points):
        points = [Point(f"{n:03}_{p.name}", p.values, p.overrides) for n, p in enumerate(points, 1)]
    return points


def _short(keys: Sequence[str]) -> Iterator[str]:
    """Yield the shortest end of each dotted key that none of the others has."""
    for key in keys:
        parts = key.split(".")
        ends = [".".join(parts[-n:]) for n in range(1, len(parts) + 1)]
        others = [other for other in keys if other != key]
        yield next((end for end in ends if not any(f".{other}".endswith(f".{end}") for other in others)), key)


def _folder(values: dict[str, str]) -> str:
    """Return a name for a folder that says what the values are, as far as there is room, and needs no quotes."""
    shown = [masked_argument(f"{key}={value}").partition("=")[2] for key, value in values.items()]
    words = [re.sub(r"[^\w.+-]+", "-", value).strip("-") for value in shown]
    return "_".join(f"{key}-{word}" for key, word in zip(values, words))[:_MAX_NAME_CHARS].lstrip(".")
