"""The time of steps, with evaluations before, between and beside them."""

import pytest

from realrl.sched.step_clock import StepClock


def seconds(metrics):
    return metrics["time_s/step"], metrics["perf/tokens_per_s"]


def test_steps_follow_each_other():
    clock = StepClock(0.0)
    clock.start(10.0)
    assert seconds(clock.end_step(14.0, {"n_tokens": 8})) == (4.0, 2.0)
    assert seconds(clock.end_step(15.0, {"n_tokens": 8})) == (1.0, 8.0)


def test_the_next_step_began_while_the_evaluation_ran():
    clock = StepClock(0.0)
    clock.begin_evaluation(4.0)
    metrics = clock.end_step(9.0, {"n_tokens": 8, "time_s/eval": 2.0})
    assert seconds(metrics) == (4.0, 2.0)
    assert clock.evaluation_s == 4.0
    assert seconds(clock.end_step(10.0, {"n_tokens": 8})) == (4.0, 2.0)  # the workers were its own from 6 on


def test_an_evaluation_before_all_steps_is_no_part_of_the_first():
    clock = StepClock(0.0)
    clock.begin_evaluation(1.0)
    clock.end_evaluation({"time_s/eval": 3.0})
    assert clock.end_step(6.0, {})["time_s/step"] == pytest.approx(2.0)


def test_a_step_that_takes_no_time_has_no_rate():
    assert seconds(StepClock(5.0).end_step(5.0, {"n_tokens": 8})) == (0.0, 0.0)
