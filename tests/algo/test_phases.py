"""The recorder of what calls spend their time on."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest

from realrl.algo.phases import Phases


def test_phases_follow_each_other_and_their_seconds_are_summed_up() -> None:
    phases = Phases(10)
    for n in (3, 5):
        with phases.phase("forward", n):
            time.sleep(0.002)
        with phases.phase("backward"):
            pass
    taken = phases.take(step=1)
    assert [(phase.name, phase.n_tokens) for phase in taken.phases] == [
        ("forward", 3), ("backward", 0), ("forward", 5), ("backward", 0)
    ]  # fmt: skip
    assert all(one.begin_s <= one.end_s <= other.begin_s for one, other in pairwise(taken.phases))
    assert taken.seconds["forward"] == pytest.approx(
        sum(phase.end_s - phase.begin_s for phase in taken.phases if phase.name == "forward")
    )
    assert taken.seconds["forward"] > 0.004
    assert phases.take(step=1).seconds == {}, "the next call begins anew"


def test_a_phase_that_goes_on_is_one() -> None:
    phases, now_s = Phases(10), time.time()
    for name in ("prefill", "decode", "decode", "decode", "prefill", "decode"):
        now_s = phases.add(name, now_s, 2, goes_on=True)
    found = phases.take(step=0).phases
    assert [(phase.name, phase.n_tokens) for phase in found] == [
        ("prefill", 2), ("decode", 6), ("prefill", 2), ("decode", 2)
    ]  # fmt: skip
    assert found[1].end_s == found[2].begin_s


def test_a_phase_that_raises_is_left_out() -> None:
    phases = Phases(10)
    with pytest.raises(ZeroDivisionError), phases.phase("forward"):
        _ = 1 / 0
    assert phases.take(step=0).phases == []


def test_a_long_call_has_no_more_phases_but_all_seconds() -> None:
    phases = Phases(3)
    for number in range(10):
        phases.add("forward" if number % 2 else "backward", time.time() - 1)
        phases.beside("score", number, number + 0.5, process=0)
    taken = phases.take(step=0)
    assert [len(taken.phases), len(taken.work)] == [3, 3]
    assert taken.seconds == {"forward": pytest.approx(5, abs=0.1), "backward": pytest.approx(5, abs=0.1)}


def test_without_room_nothing_is_recorded() -> None:
    phases = Phases()
    with phases.phase("forward"):
        phases.beside("score", 0.0, 1.0, process=0)
    assert phases.take(step=0) == type(phases.take(0))([], [], {})


def test_a_long_run_keeps_fewer_and_fewer_steps() -> None:
    phases = Phases(10, most_of_a_stride=40)
    kept = []
    for step in range(1, 1001):
        for _ in range(10):
            phases.add("forward", time.time())
        taken = phases.take(step)
        assert taken.seconds
        kept += [step] if taken.phases else []
    assert kept[:6] == [1, 2, 3, 4, 6, 8]
    assert len(kept) < 40


def test_work_of_helpers_is_joined_where_it_is_short_and_nothing_lies_between() -> None:
    phases = Phases(10)
    for process, begin_s, length_s in (
        (0, 10.0, 0.01), (1, 10.0, 0.06), (0, 10.0105, 0.01),  # at once
        (0, 10.2, 0.01),  # after a pause
        (1, 10.0605, 0.01),  # after a long one
    ):  # fmt: skip
        phases.beside("score", begin_s, begin_s + length_s, process=process)
    phases.beside("other", 10.21, 10.22, process=0)
    found = [(w.process, w.name, w.count, round(w.end_s - w.begin_s, 4)) for w in phases.take(0).work]
    assert found == [
        (0, "score", 2, 0.0205), (1, "score", 1, 0.06), (0, "score", 1, 0.01), (1, "score", 1, 0.01),
        (0, "other", 1, 0.01),
    ]  # fmt: skip
