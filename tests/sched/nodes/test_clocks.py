"""The clock of another machine: how well it is known, and when an estimate gives way."""

from __future__ import annotations

import math
import random

from realrl.sched.nodes.clocks import ClockOffset

AHEAD_S = 5.0


def ask(clock: ClockOffset, at_s: float, there_s: float, back_s: float, *, ahead_s: float = AHEAD_S) -> None:
    """A message that takes `there_s`, and its answer `back_s`."""
    answered_s = at_s + there_s + ahead_s
    clock.note(sent_s=at_s, heard_s=at_s + there_s + back_s, answered_s=answered_s, delay_s=there_s + back_s)


def test_nothing_is_known_at_first() -> None:
    assert (ClockOffset().offset_s, ClockOffset().error_s) == (0.0, math.inf)


def test_the_error_is_within_its_bound_however_unlike_both_ways_are() -> None:
    rng = random.Random(0)
    for _ in range(200):
        clock = ClockOffset()
        for beat in range(30):
            ask(clock, float(beat), rng.expovariate(100.0), rng.expovariate(1000.0))
            assert abs(clock.offset_s - AHEAD_S) <= clock.error_s + 1e-9


def test_the_quickest_answer_counts() -> None:
    clock = ClockOffset()
    for beat in range(10):
        ask(clock, float(beat), 0.001 if beat == 3 else 2.0, 0.001)
    assert abs(clock.offset_s - AHEAD_S) <= 0.001 + 1e-9


def test_clocks_that_may_be_the_same_are_left_alone() -> None:
    clock = ClockOffset()
    for beat in range(30):
        ask(clock, float(beat), 0.002, 0.001, ahead_s=0.0)
    assert clock.offset_s == 0.0
    assert 0.0 < clock.error_s <= 0.003


def test_a_clock_that_is_set_is_followed_at_once() -> None:
    clock = ClockOffset()
    for beat in range(5):
        ask(clock, float(beat), 0.001, 0.001)
    ask(clock, 5.0, 0.01, 0.01, ahead_s=-100.0)
    assert abs(clock.offset_s + 100.0) <= 0.01
    clock.note(sent_s=6.0, heard_s=50.0, answered_s=6.0, delay_s=0.002)  # our own, while the answer was under way
    assert abs(clock.offset_s + 100.0) <= 0.01
    ask(clock, 51.0, 0.001, 0.001, ahead_s=-144.0)
    assert abs(clock.offset_s + 144.0) <= 0.001


def test_a_drifting_clock_is_followed() -> None:
    clock, drift = ClockOffset(), 1e-4
    for beat in range(200):
        ask(clock, float(beat), 0.001, 0.001, ahead_s=drift * beat)
        assert abs(clock.offset_s - drift * beat) < 0.005
