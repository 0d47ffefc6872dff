"""Processes that share the work of planning: the same plan whatever their number, and none that stays."""

import json
import multiprocessing
import os
import signal
import threading
from dataclasses import replace

import pytest

from realrl.planner.crew import Crew
from realrl.planner.evaluate import N_STEPS, Evaluated
from realrl.planner.planner import ON_ALL_DEVICES, Effort, Planning
from realrl.planner.study import Study
from tests.planner.cases import everywhere, request_for


@pytest.fixture(scope="module")
def request4():
    return request_for(devices=4, hardware="h100")


def planned(request, n_processes):
    planning = Planning(request, effort=Effort(n_expanded=64, n_processes=n_processes))
    for _ in planning.run():
        pass
    return planning.result()


def told(found):
    """All that is printed and written of plans."""
    return (
        [(one.name, json.dumps(one.settings.overrides()), one.period_s, one.fast_s) for one in found.candidates],
        found.refused,
        found.bound_s,
        found.best.figures,
    )


@pytest.mark.slow
def test_the_plan_does_not_depend_on_the_number_of_processes(request4):
    alone, shared = planned(request4, 1), planned(replace(request4, _memory={}), 3)
    assert told(alone) == told(shared)
    assert not multiprocessing.active_children()


def test_helpers_give_the_same_answers(request4):
    study, other = Study(request4), Study(request4)
    crew = Crew(other, 2)
    try:
        questions = study.prices_to_ask
        asked = [crew.ask("price", question) for question in questions]
        assert list(crew.answers(asked)) == [study.price(question) for question in questions]
        settings = everywhere(request4, "d4@0:0-3")
        first, second, _, fourth = (crew.ask("judge", settings) for _ in range(4))
        assert list(crew.answers([first, second])) == [study.judge(settings)] * 2
        assert list(crew.answers([fourth, first])) == [study.judge(settings)] * 2  # a question that was given up
    finally:
        crew.close()
    assert not multiprocessing.active_children()


def test_a_helper_that_dies_is_not_missed(request4):
    study = Study(request4)
    crew = Crew(study, 2)
    try:
        asked = [crew.ask("price", question) for question in study.prices_to_ask]
        (helper,) = multiprocessing.active_children()
        os.kill(helper.pid, signal.SIGKILL)
        assert list(crew.answers(asked)) == [Study(request4).price(one.about) for one in asked]
    finally:
        crew.close()
    assert not multiprocessing.active_children()


def test_a_search_that_is_given_up_ends_its_processes(request4):
    states = Planning(request4, effort=Effort(n_processes=2)).run()
    while next(states).phase == "prices":
        pass
    assert len(multiprocessing.active_children()) == 1
    states.close()
    assert not multiprocessing.active_children()


def _plan_in_a_daemon(connection):
    crew = Crew(Study(request_for(devices=2)), 4)
    connection.send(len(multiprocessing.active_children()))
    crew.close()


def test_a_daemon_plans_alone():
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_plan_in_a_daemon, args=(theirs,), daemon=True)
    process.start()
    assert ours.poll(60)
    assert ours.recv() == 0
    process.join()


def until(request, phase):
    """The plan of a search that is given up in a phase."""
    planning = Planning(request)
    states = planning.run()
    while next(states).phase != phase:
        pass
    states.close()
    return planning.result(quickly=True)


def test_a_search_that_is_given_up_has_a_plan(request4):
    found = until(request4, "prices")
    assert found.best.name == ON_ALL_DEVICES
    assert {place.partition("@")[2] for place in found.best.settings.allocations.values()} == {"0:0-3"}
    assert found.bound_s == 0.0
    found = until(request4, "methods")
    assert 0.0 < found.bound_s <= found.best.fast_s
    assert len(found.candidates) == 1


@pytest.mark.slow
def test_a_plan_is_simulated_again_when_its_run_is_asked_for(request4):
    best = planned(request4, 1).best
    assert "run" not in vars(best)
    again = best.run
    assert isinstance(best, Evaluated)
    assert best.run is again
    assert (again.steps[N_STEPS - 1].at_s - again.steps[0].at_s) / (N_STEPS - 1) == pytest.approx(best.period_s)


def test_ctrl_c_waits_until_a_helper_is_started(request4, monkeypatch):
    """Also where another thread takes the signal; a helper that is half started would say so."""
    process, is_started = multiprocessing.get_context("spawn").Process, []
    popen = process._Popen

    def interrupted(started):
        os.kill(os.getpid(), signal.SIGINT)
        found = popen(started)
        is_started.append(True)
        return found

    monkeypatch.setattr(process, "_Popen", staticmethod(interrupted))
    waits = threading.Event()
    other = threading.Thread(target=waits.wait)
    other.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            Crew(Study(request4), 2)
        assert is_started
    finally:
        waits.set()
        other.join()
        for child in multiprocessing.active_children():
            child.kill()
            child.join()
