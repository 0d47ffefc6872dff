"""Seconds of calls, and the room that each has, in runs whose times are known."""

from dataclasses import replace

import pytest

from realrl.planner.evaluate import evaluate
from realrl.planner.times import CallTimes, call_times, rhythm_of, slack_of
from tests.planner.cases import everywhere, request_for, with_critic_apart
from tests.sim.durations import CallDurations

SECONDS = {"actor_gen": 3.0, "rew_inf": 1.0, "ref_inf": 1.0, "critic_inf": 1.0, "actor_train": 2.0, "critic_train": 2.0}


def rhythm_under(settings_of, devices=2):
    request = request_for(devices=devices, hardware="two_cores")
    request = replace(request, hardware=replace(request.hardware, device=replace(request.hardware.device, alone=1.0)))
    found = evaluate(request, settings_of(request), listen=lambda model: CallDurations(SECONDS))
    times = call_times(found.run)
    return found, times, rhythm_of(found.plan, times)


def test_one_place():
    """One call after another: each bounds the period, and none has room."""
    found, times, rhythm = rhythm_under(lambda request: everywhere(request, "d2@0:0-1"))
    assert times == {name: pytest.approx(CallTimes(run=seconds)) for name, seconds in SECONDS.items()}
    assert rhythm.period() == pytest.approx(found.period_s) == pytest.approx(sum(SECONDS.values()))
    assert {slack_of(rhythm, name) for name in SECONDS} == {0.0}
    assert rhythm.period(rhythm.with_run("actor_gen", 0.0)) == pytest.approx(7.0)


def test_two_places():
    """The critic's calls may take longer: its values are wanted when the actor trains, 4 s after it could be done."""
    found, _, rhythm = rhythm_under(with_critic_apart)
    assert rhythm.period() == pytest.approx(found.period_s) == pytest.approx(7.0)
    assert slack_of(rhythm, "actor_gen") == slack_of(rhythm, "ref_inf") == 0.0
    assert slack_of(rhythm, "critic_inf") == pytest.approx(1.0, rel=1e-3)
    assert slack_of(rhythm, "critic_train") == pytest.approx(4.0, rel=1e-3)
    for name in SECONDS:
        room = slack_of(rhythm, name)
        longer = rhythm.period(rhythm.with_run(name, SECONDS[name] + room + 0.1))
        assert longer > rhythm.period() + 0.05
