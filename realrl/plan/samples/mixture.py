"""Files of a dataset that are mixed by weights: from which file, and which row of it, each sample of an epoch comes.

An epoch has as many samples as the files have rows together, and each file the share that its weight says. A file whose
share is larger than its rows begins anew within the epoch; of the others, the next epoch takes the rows that are left.

Invariants:
    - every epoch has the same number of samples of each file, which is its share of the epoch up to rounding, and at
      least one;
    - a file's rows come in passes: each holds every row once, in an order that depends on the seed, the file's name and
      the pass alone;
    - all is a function of the seed and the epoch: a resumed run goes on with what the uninterrupted one takes;
    - pass and row together never repeat.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from realrl.errors import DataError
from realrl.plan.samples.shuffle import keyed_draw, permutation


@dataclass(frozen=True)
class Part:
    """One file: its name, rows, the number of its first row, and its samples in an epoch."""

    name: str
    n_rows: int
    first: int
    n_samples: int


def plan_mixture(row_ids: Sequence[str], weights: Mapping[str, float]) -> tuple[Part, ...]:
    """Return the parts of an epoch.

    Args:
        row_ids: ids of all rows, ``name/...``, file after file in the order of `weights`.
        weights: name of a file -> its weight.

    Raises:
        DataError: a file has no row.
    """
    n_rows = Counter(row_id.partition("/")[0] for row_id in row_ids)
    for name in weights:
        if not n_rows[name]:
            raise DataError(
                f"no row of dataset.files.{name} is left to mix",
                remedy="Raise the limits of dataset.*, or leave it out.",
            )
    total = sum(map(Fraction, weights.values()))
    shares = {name: Fraction(weight) / total * len(row_ids) for name, weight in weights.items()}
    counts = {name: max(1, int(share)) for name, share in shares.items()}
    left = len(row_ids) - sum(counts.values())
    by_rest = sorted(weights, key=lambda name: (counts[name] - shares[name], name))
    for name in by_rest[: max(0, left)]:
        counts[name] += 1
    while sum(counts.values()) > len(row_ids):  # tiny shares were raised to one sample
        counts[max(counts, key=lambda name: (counts[name], name))] -= 1
    firsts = [0]
    for name in weights:
        firsts.append(firsts[-1] + n_rows[name])
    return tuple(Part(name, n_rows[name], first, counts[name]) for name, first in zip(weights, firsts, strict=False))


@lru_cache(maxsize=4)
def mixed_epoch(parts: tuple[Part, ...], seed: int, epoch: int, shuffle: bool) -> tuple[tuple[int, int], ...]:
    """Return pass and row of the samples of an epoch (from 1); files are spread evenly, or at random if shuffled."""
    if shuffle:
        turns = [number for number, part in enumerate(parts) for _ in range(part.n_samples)]
        order = [turns[i] for i in permutation(len(turns), keyed_draw(seed, "mixture", epoch))]
    else:
        places = [
            (Fraction(2 * i + 1, 2 * part.n_samples), number)
            for number, part in enumerate(parts)
            for i in range(part.n_samples)
        ]
        order = [number for _, number in sorted(places)]
    picks = [iter(_picks(part, seed, epoch, shuffle)) for part in parts]
    return tuple([next(picks[number]) for number in order])


def _picks(part: Part, seed: int, epoch: int, shuffle: bool) -> list[tuple[int, int]]:
    """Pass and row of the samples of one file in an epoch."""
    picks: list[tuple[int, int]] = []
    place = (epoch - 1) * part.n_samples
    while len(picks) < part.n_samples:
        number, offset = place // part.n_rows + 1, place % part.n_rows
        rows: Sequence[int] = range(part.n_rows)
        if shuffle:
            rows = permutation(part.n_rows, keyed_draw(seed, part.name, number))
        taken = rows[offset : offset + part.n_samples - len(picks)]
        picks += [(number, part.first + row) for row in taken]
        place += len(taken)
    return picks
