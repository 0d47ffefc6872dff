"""Choice of the responses that are generated at a time: a pure state machine over slots, and what stands around it.

A row is one response in the making; it occupies the slot that equals its position in `SlotTable.rows`.

Invariants:
- the rows occupy slots 0 .. n - 1 without a hole, and n never exceeds `max_rows`;
- every (sample, response) enters exactly once and is retired exactly once;
- every prompt is prefilled exactly once, by its first response;
- at most one sample is held (prefilled, with responses that have not entered yet).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from realrl.plan.memory.buffers import PREFILL_TOKENS

# Prefilling one prompt reads every weight, like a whole decode step: wait until one slot in this many is free.
_REFILL_SHARE = 8


@dataclass(frozen=True)
class Row:
    """Response number `response` of sample number `sample`."""

    sample: int
    response: int


@dataclass(frozen=True)
class Entry:
    """A row that enters at a slot."""

    row: Row
    slot: int


@dataclass(frozen=True)
class Admission:
    """Rows that enter, and the work that this needs.

    Attributes:
        prefills: entries whose prompt is computed into their slot; consecutive slots.
        copies: entries whose prompt was computed before, in this admission or for a held sample.
        hold: the sample whose prefill is needed again later, if any.
        drop: the held sample that this admission was the last to need, if any.
    """

    prefills: tuple[Entry, ...]
    copies: tuple[Entry, ...]
    hold: int | None
    drop: int | None

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All entries in slot order."""
        return self.prefills + self.copies


class SlotTable:
    """Admits and retires rows.

    Long prompts enter first: rows of similar length sit together, which keeps attention's padding small.

    Args:
        prompt_lengths: tokens of each sample's prompt.
        n_responses: number of responses per sample.
        max_rows: largest number of rows at a time.
    """

    def __init__(self, prompt_lengths: Sequence[int], *, n_responses: int, max_rows: int) -> None:
        self.rows: list[Row] = []
        self._n_responses = n_responses
        self._max_rows = max_rows
        self._waiting = sorted(range(len(prompt_lengths)), key=lambda i: prompt_lengths[i])  # the next is at the end
        self._held: int | None = None
        self._next_response = 0

    @property
    def is_done(self) -> bool:
        return not self.rows and not self._waiting

    @property
    def can_admit(self) -> bool:
        """True if rows wait and enough slots are free to make a prefill worth its time."""
        n_free = self._max_rows - len(self.rows)
        return bool(self._waiting) and (not self.rows or n_free * _REFILL_SHARE >= self._max_rows)

    def admit(self) -> Admission:
        """Fill the free slots."""
        held_before = self._held
        first: list[Row] = []
        others: list[Row] = []
        n_free = self._max_rows - len(self.rows)
        while n_free and self._waiting:
            sample = self._waiting[-1]
            n_taken = min(n_free, self._n_responses - self._next_response)
            for response in range(self._next_response, self._next_response + n_taken):
                (others if response else first).append(Row(sample, response))
            n_free -= n_taken
            self._next_response += n_taken
            self._held = sample
            if self._next_response == self._n_responses:
                self._waiting.pop()
                self._next_response = 0
                self._held = None
        entries = [Entry(row, len(self.rows) + i) for i, row in enumerate(first + others)]
        self.rows += [entry.row for entry in entries]
        return Admission(
            prefills=tuple(entries[: len(first)]),
            copies=tuple(entries[len(first) :]),
            hold=self._held if self._held != held_before else None,
            drop=held_before if self._held != held_before else None,
        )

    def retire(self, slots: Collection[int]) -> list[tuple[int, int]]:
        """Take finished rows out; moves (source, target), in any order, close the holes. No row moves twice."""
        leaving = set(slots)
        n_left = len(self.rows) - len(leaving)
        holes = sorted(slot for slot in leaving if slot < n_left)
        survivors = [slot for slot in range(n_left, len(self.rows)) if slot not in leaving]
        moves = list(zip(survivors, holes, strict=True))
        for source, target in moves:
            self.rows[target] = self.rows[source]
        del self.rows[n_left:]
        return moves


def divide_prompts(prompt_lengths: Sequence[int], n_shares: int) -> list[list[int]]:
    """Divide prompts, by index, into at most `n_shares` shares of nearly equal number and length; none is empty."""
    n_shares = min(n_shares, len(prompt_lengths))
    by_length = sorted(range(len(prompt_lengths)), key=lambda i: prompt_lengths[i])
    return [sorted(by_length[share::n_shares]) for share in range(n_shares)]


def rows_at_a_time(n_prompts: int, *, n_shares: int, n_responses: int, max_batch_size: int) -> int:
    """Return the most rows of one share that are decoded together.

    Args:
        n_prompts: prompts of the largest share.
        n_shares: shares that are generated at the same time, one for each pipeline stage.
    """
    return min(n_prompts * n_responses, max_batch_size // n_shares)


def prefill_chunks(prompt_lengths: Sequence[int]) -> Iterator[range]:
    """Yield the prompts that are computed in one pass: neighbours of at most `PREFILL_TOKENS` tokens, or a long one."""
    start, n_tokens = 0, 0
    for i, length in enumerate(prompt_lengths):
        if i > start and n_tokens + length > PREFILL_TOKENS:
            yield range(start, i)
            start, n_tokens = i, 0
        n_tokens += length
    if len(prompt_lengths) > start:
        yield range(start, len(prompt_lengths))
