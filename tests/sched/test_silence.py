"""Who is judged silent, and that no pause of the judge makes it so."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from realrl.sched.silence import LONGEST_TURN_S, AwakeClock, Silences

LIMIT_S = 10.0
TURN_S = 0.25


def looks(silences: Silences[str], start_s: float, seconds: float, *speakers: str) -> list[tuple[str, float]]:
    """Look every `TURN_S` for so long, while `speakers` are heard at each turn; what was told."""
    told: list[tuple[str, float]] = []
    for turn in range(1, round(seconds / TURN_S) + 1):
        for who in speakers:
            silences.hear(who)
        told += silences.look(start_s + turn * TURN_S)
    return told


def test_who_stops_speaking_is_told_once_with_the_time() -> None:
    silences = Silences(LIMIT_S, ("a", "b"), now_s=100.0)
    assert looks(silences, 100.0, LIMIT_S, "b") == []
    assert looks(silences, 110.0, TURN_S, "b") == [("a", LIMIT_S + TURN_S)]
    assert looks(silences, 110.25, 50.0, "b") == []


def test_a_sign_of_life_begins_a_new_limit() -> None:
    silences = Silences(LIMIT_S, ("a",), now_s=0.0)
    looks(silences, 0.0, LIMIT_S)
    silences.hear("a")
    assert looks(silences, LIMIT_S, LIMIT_S) == []
    assert looks(silences, 2 * LIMIT_S, TURN_S) == [("a", LIMIT_S + TURN_S)]


def test_who_is_not_expected_is_never_silent() -> None:
    silences = Silences(LIMIT_S, ("a",), now_s=0.0)
    silences.forget("a")
    silences.hear("a")
    silences.hear("stranger")
    assert looks(silences, 0.0, 3 * LIMIT_S) == []


@given(st.floats(0.0, 1e6), st.floats(0.0, LIMIT_S - 2 * TURN_S))
def test_a_pause_of_the_judge_counts_as_one_turn(pause_s: float, before_s: float) -> None:
    silences = Silences(LIMIT_S, ("a",), now_s=0.0)
    looks(silences, 0.0, before_s)
    start_s = before_s + pause_s
    assert silences.look(start_s) == [] or before_s + LONGEST_TURN_S > LIMIT_S
    silences.hear("a")
    assert looks(silences, start_s, LIMIT_S - TURN_S) == []


def test_one_pause_after_another_is_no_silence_but_time_between_them_is() -> None:
    silences = Silences(LIMIT_S, ("a",), now_s=0.0)
    now_s, told = 0.0, []
    while not told:
        told = looks(silences, now_s, 1.0)
        now_s += 1.0 + 1000.0
    assert now_s > 5 * 1000.0  # ten seconds, of which each pause counted as one
    assert LIMIT_S < told[0][1] <= LIMIT_S + LONGEST_TURN_S


@given(st.floats(0.01, 1e4))
def test_a_pause_leaves_most_of_any_limit(limit_s: float) -> None:
    silences = Silences(limit_s, ("a",), now_s=0.0)
    assert [silences.look(pause * 1e6) for pause in (1, 2, 3)] == [[], [], []]


def test_without_a_limit_nobody_is_silent() -> None:
    assert Silences(float("inf"), ("a",), now_s=0.0).look(1e9) == []


def test_the_clock_runs_with_the_time_while_looks_are_frequent() -> None:
    clock = AwakeClock(5.0, 0.5)
    assert [clock.look(now_s) for now_s in (5.25, 5.75, 105.75, 106.0)] == [0.25, 0.75, 1.25, 1.5]
