"""Leases: what keeps a process alive, and what ends it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from realrl.runtime.processes import lifeline


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    os.set_blocking(ends[1], False)
    yield ends
    for end in ends:
        os.close(end)


def test_a_lease_that_nobody_renews_is_over(pipe: tuple[int, int]) -> None:
    assert lifeline._read_until(pipe[0], lifeline.lease_clock() + 0.05) is None


def test_what_was_told_in_time_counts_for_a_thread_that_had_no_turn(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine that is too busy a thread may look at its lease long after its end, which was told before."""
    times_s = iter((9.999, 15.0))

    def clock() -> float:
        now_s = next(times_s)
        if now_s > 10.0:
            lifeline.write_lease(pipe[1], 20.0)  # while this thread waited for its turn
        return now_s

    monkeypatch.setattr(lifeline, "lease_clock", clock)
    assert lifeline._read_until(pipe[0], 10.0) is not None
