"""Order of samples from dataset rows, epoch after epoch: a pure function of the seed and one position.

Samples are numbered from 0 in load order, over all epochs. Sample k of a dataset of R rows belongs to epoch
``k // R + 1`` and is made from entry ``k % R`` of that epoch's order; its id is ``"epoch/row_id"``.

Invariants:
    - the order of an epoch is a permutation of all rows, and depends on (number of rows, seed, epoch) alone: not on the
      platform, the Python version, the step size, or where the run was resumed;
    - without shuffling, every epoch takes the rows as they stand;
    - a cursor resumed at position p continues with exactly the samples that the uninterrupted one takes from p on;
    - ids never repeat, since a row occurs once in an epoch.

Where files are mixed by weights, `realrl.plan.samples.mixture` decides the order instead, and ids begin with the number
of the pass over the sample's file.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache

import msgspec

from realrl.errors import ConfigError, DataError
from realrl.plan.samples.mixture import Part, mixed_epoch
from realrl.plan.samples.shuffle import keyed_draw, permutation


class CursorState(msgspec.Struct, frozen=True):
    """Part of a checkpoint from which a cursor continues.

    Attributes:
        rows_consumed: samples taken since the very first step, over all epochs.
        seed: seed of the shuffle.
        shuffle: 1 when epochs are shuffled, else 0.
        fingerprint: digest of the dataset's row ids and of the rows' data.
    """

    rows_consumed: int
    seed: int
    shuffle: int
    fingerprint: int


class SampleRef(msgspec.Struct, frozen=True):
    """One sample to load: its id, and the number of its row."""

    id: str
    row: int


@lru_cache(maxsize=4)
def epoch_order(n_rows: int, seed: int, epoch: int) -> tuple[int, ...]:
    """Return the rows 0..n_rows-1 in the shuffled order of `epoch` (from 1)."""
    return tuple(permutation(n_rows, keyed_draw(seed, epoch)))


@lru_cache(maxsize=4)
def _plain_epoch(n_rows: int, seed: int | None, epoch: int) -> tuple[tuple[int, int], ...]:
    """Return (epoch, row) of every sample of an epoch; in the order of the rows where `seed` is None."""
    rows = range(n_rows) if seed is None else epoch_order(n_rows, seed, epoch)
    return tuple([(epoch, row) for row in rows])


def fingerprint(row_ids: Iterable[str]) -> int:
    """Return a 48-bit digest of the row ids and their order."""
    digest = hashlib.blake2b(digest_size=6)
    for row_id in row_ids:
        encoded = row_id.encode()
        digest.update(len(encoded).to_bytes(4, "big") + encoded)
    return int.from_bytes(digest.digest(), "big")


class DatasetCursor:
    """Names the samples at any position of an endless sequence of epochs over the same rows.

    Args:
        row_ids: id of every usable row, unique.
        seed: seed of the shuffle.
        shuffle: True if each epoch is shuffled.
        start: a checkpoint's state, with the rows consumed before this run.
        name: prefix of sample ids instead of the epoch; for a single pass.
        content: digest of the rows' data; empty if that is not known.
        parts: files that are mixed by weights; empty: all rows once an epoch.

    Raises:
        DataError: there is no row, an id occurs twice, or `start` was made with another dataset.
        ConfigError: `start` was made with another seed or shuffle switch.
    """

    def __init__(
        self,
        row_ids: Sequence[str],
        *,
        seed: int,
        shuffle: bool,
        start: CursorState | None = None,
        name: str | None = None,
        content: str = "",
        parts: tuple[Part, ...] = (),
    ) -> None:
        self.row_ids = tuple(row_ids)
        self.seed = seed
        self.shuffle = shuffle
        self.name = name
        self._parts = parts
        self.fingerprint = fingerprint((*self.row_ids, content, *(f"{p.name}: {p.n_samples}" for p in parts)))
        self.start = 0 if start is None else start.rows_consumed
        self._check_rows()
        if start is not None:
            self._check_start(start)

    @property
    def n_rows(self) -> int:
        """Rows of one epoch."""
        return len(self.row_ids)

    def epoch_of(self, position: int) -> int:
        """Return the epoch (from 1) of the sample at `position`, counted from the very first sample."""
        return position // self.n_rows + 1

    def ends_epochs(self, first: int, stop: int, every: int) -> bool:
        """Return True if an epoch whose number is a multiple of `every` ends between two positions; 0 means none."""
        size = every * self.n_rows
        return size > 0 and first // size < stop // size

    def take(self, position: int, count: int) -> list[SampleRef]:
        """Return the `count` samples from `position` on."""
        refs = []
        while count > 0:
            epoch, offset = position // self.n_rows + 1, position % self.n_rows
            chunk = self._epoch(epoch)[offset : offset + count]
            refs += [SampleRef(f"{self.name or number}/{self.row_ids[row]}", row) for number, row in chunk]
            position += len(chunk)
            count -= len(chunk)
        return refs

    def _epoch(self, epoch: int) -> Sequence[tuple[int, int]]:
        """Return the pass and the row of every sample of an epoch (from 1)."""
        if self._parts:
            return mixed_epoch(self._parts, self.seed, epoch, self.shuffle)
        return _plain_epoch(self.n_rows, self.seed if self.shuffle else None, epoch)

    def state(self, position: int) -> CursorState:
        """Return the state from which a checkpoint continues at `position`."""
        return CursorState(position, self.seed, int(self.shuffle), self.fingerprint)

    def _check_rows(self) -> None:
        if not self.row_ids:
            raise DataError("the dataset has no usable row", remedy="check dataset.path and dataset.max_prompt_tokens")
        if len(set(self.row_ids)) != len(self.row_ids):
            twice = Counter(self.row_ids).most_common(1)[0][0]
            raise DataError(f"the dataset names two rows {twice!r}", remedy="give every row an id of its own")

    def _check_start(self, start: CursorState) -> None:
        if start.fingerprint != self.fingerprint:
            raise DataError(
                "the checkpoint was made with another dataset: the rows differ, their tokens, or the weights of files",
                remedy="resume with the dataset of the first run, or start a new run with resume=never",
            )
        shuffles = ("dataset.shuffle", str(bool(start.shuffle)).lower(), str(self.shuffle).lower())
        for name, then, now in (("seed", str(start.seed), str(self.seed)), shuffles):
            if then != now:
                raise ConfigError(
                    f"the checkpoint was made with {name}={then}, this run has {name}={now}",
                    remedy=f"resume with {name}={then}, so that no row is repeated or skipped",
                )
