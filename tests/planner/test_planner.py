"""The best plan: which plans the real scheduler gets to see."""

from dataclasses import replace

import pytest

from realrl.errors import AllocationError
from realrl.graph.build import topological_calls
from realrl.planner import planner, study
from realrl.planner.evaluate import PlanChecks, evaluate, judge
from realrl.planner.planner import LEAST, SEARCH, Effort, Planning
from realrl.planner.settings import PlanSettings
from realrl.planner.study import Study
from realrl.search.local.neighbours import neighbours
from realrl.sim.report import SCATTER
from tests.planner.cases import everywhere, request_for, with_critic_apart

QUICK = Effort(n_expanded=200, n_confirmed=3)


def planned(request, **settings):
    planning = Planning(request, effort=QUICK, **settings)
    list(planning.run())
    return planning.result()


@pytest.mark.slow
def test_runners_up_are_plans_that_a_run_takes(monkeypatch):
    """A plan that is not possible makes room for the next one."""
    request = request_for(devices=4)

    accepts = PlanChecks.accepts

    def only_with_two_for_generation(checks, placed):
        return placed[0].choice.n_devices == 2 and accepts(checks, placed)

    monkeypatch.setattr(PlanChecks, "accepts", only_with_two_for_generation)
    found = planned(request)
    searched = [one for one in found.candidates if one.name.startswith(SEARCH)]
    assert len(searched) == QUICK.n_confirmed
    assert all(one.plan.allocations["actor_gen"].mesh.n_devices == 2 for one in searched)


def test_the_plan_that_takes_the_least_memory_is_taken_where_the_search_finds_none(monkeypatch):
    monkeypatch.setattr(PlanChecks, "accepts", lambda checks, placed: False)
    found = planned(request_for(devices=2))
    assert [one.name for one in found.candidates] == [LEAST]
    assert found.best.fits


def test_micro_batches_of_single_samples_where_nothing_else_fits():
    """Choices have some numbers of micro-batches; more of them take less memory."""
    settings = (
        "dataset.max_prompt_tokens=512",
        "generation.max_new_tokens=512",
        "n_seqs=512",
        "algorithm.n_minibatches=1",
    )
    request = request_for(*settings, "cluster.device_rows_gb=0", devices=1, lengths=None, memory_bytes=950_000_000)
    with pytest.raises(AllocationError, match="call 'actor_train' fits no mesh"):
        Study(request).draft.problem()
    found = planned(request)
    assert (found.best.name, found.best.fits) == (LEAST, True)
    assert found.best.settings.n_mbs["actor_train"] == 512


@pytest.mark.parametrize(("hardware", "scatter"), [("two_cores", 0.0), ("two_cores", 0.1), ("h100", 0.0)])
def test_a_plan_is_judged_by_the_same_figures_as_it_is_shown_with(hardware, scatter):
    """On two cores a call is faster while the other one waits, however the run ends."""
    request = request_for(devices=2, hardware=hardware)
    machine = request.hardware
    request = replace(request, hardware=replace(machine, device=replace(machine.device, scatter=scatter)))
    settings = with_critic_apart(request)
    figures = judge(request, settings)
    assert figures == evaluate(request, settings).figures
    assert (SCATTER in figures.bounds) == (scatter > 0)


def test_calls_are_priced_for_the_samples_of_the_simulated_steps():
    """Replicas share them as in the run: generation by prompts, as nobody knows the responses yet."""
    request = request_for("n_seqs=24", devices=4, lengths="prompt=uniform:4,16 response=lognormal:6,0.9")
    settings = everywhere(request, "d4@0:0-3")
    activities = evaluate(request, settings).run.activities
    for place, mfc in zip(request.placed(settings), topological_calls(request.base.graph), strict=True):
        if mfc.is_train or mfc.role == "reward":
            continue
        own = [max(a.ends.values()) - a.start_s for a in activities if (a.name, a.kind) == (mfc.name, "call")]
        steps = [max(own[i : i + 4]) for i in range(4, 16, 4)]  # of four replicas each
        call = request.model.flow.names.index(mfc.name)
        assert request.model.price(call, place.choice).seconds == pytest.approx(sum(steps) / 3, rel=1e-6)
    assert len(request.workload.steps) == 3


def test_evaluations_are_no_calls_of_a_plan():
    """Their parameters move as well, to where the calls run that they are made of."""
    plain, evaluating = (request_for(*words, devices=4) for words in ((), ("eval.every_steps=2",)))
    places = everywhere(plain, "d2@0:0-1").allocations | {"actor_gen": "d4@0:0-3"}
    least, most = (PlanChecks(one).shows(one.placed(PlanSettings(places))) for one in (plain, evaluating))
    names = [mfc.name for mfc in topological_calls(plain.base.graph)]
    assert {names[call] for call in least.ordered} == {"actor_gen"}
    assert (most.ordered, most.n_bytes >= least.n_bytes) == (least.ordered, True)


def test_the_period_of_many_steps_begins_as_that_of_a_few():
    request = request_for("n_seqs=24", devices=2, lengths="prompt=uniform:4,16 response=lognormal:6,0.9")
    few, many = (evaluate(request, with_critic_apart(request), n_steps=n) for n in (4, 12))
    ends_of_few, ends = ([step.at_s for step in found.run.steps] for found in (few, many))
    assert ends_of_few[:4] == pytest.approx(ends[:4], rel=1e-6)
    assert few.period_s == pytest.approx((ends_of_few[3] - ends_of_few[0]) / 3)
    assert many.period_s == pytest.approx((ends[11] - ends[0]) / 11)


def test_one_step_stands_for_all_where_lengths_are_equal_or_samples_many():
    assert [*request_for(lengths=None).workload.steps] == [2]
    assert [*request_for("n_seqs=512").workload.steps] == [2]
    assert [*request_for("n_seqs=256").workload.steps] == [2, 3, 4]


@pytest.mark.slow
def test_a_neighbour_of_the_best_plan_wins_if_the_real_scheduler_prefers_it(monkeypatch):
    """The fast model does not see what makes it better, and it is none of the search's best plans."""
    request, heard = request_for(devices=2), []

    def listening(problem, plan, *, limit):
        heard.append(neighbours(problem, plan, limit=limit))
        return heard[-1]

    monkeypatch.setattr(planner, "neighbours", listening)
    before = planned(request)
    known = [one.settings for one in before.candidates]
    near = [request.settings_of(plan) for _, plan in heard[0] if PlanChecks(request).accepts(plan)]
    preferred = next(settings for settings in near if settings not in known)

    def with_a_preference(request, settings):
        figures = judge(request, settings)
        return replace(figures, period_s=figures.period_s / 2) if settings == preferred else figures

    monkeypatch.setattr(study, "judge", with_a_preference)
    best = planned(request).best
    assert (best.name, best.settings) == (SEARCH, preferred)


@pytest.mark.slow
def test_so_does_a_neighbour_of_the_best_plan_by_the_fast_model(monkeypatch):
    """The scheduler prefers another plan to that one."""
    request, shares, judged, asked = request_for(devices=2), {}, [], []
    before = planned(request).candidates
    quickest = min(before, key=lambda one: (one.fast_s, one.period_s)).settings
    shares[str(max(before, key=lambda one: one.fast_s).settings)] = 0.3

    def with_preferences(request, settings):
        judged.append(settings)
        figures = judge(request, settings)
        return replace(figures, period_s=figures.period_s * shares.get(str(settings), 1.0))

    def listening(problem, plan, *, limit):
        near = neighbours(problem, plan, limit=limit)
        asked.append((request.settings_of(plan), [request.settings_of(other) for _, other in near], len(judged)))
        return near

    monkeypatch.setattr(study, "judge", with_preferences)
    monkeypatch.setattr(planner, "neighbours", listening)
    planned(request)
    near, n_judged = next((near, n_judged) for plan, near, n_judged in asked if plan == quickest)
    preferred = next(settings for settings in judged[n_judged:] if settings in near)
    shares[str(preferred)] = 0.1
    assert planned(request).best.settings == preferred


@pytest.mark.parametrize(("hardware", "offloads"), [("two_cores", (False,)), ("h100", (False, True))])
def test_nothing_goes_to_the_host_where_the_device_is_the_host_unless_asked_for(hardware, offloads):
    assert {request_for(hardware=hardware).spaces[role].offloads for role in ("actor", "ref")} == {offloads}
    asked = request_for("models.actor.optimizer.offload=true", "allocation.offload=[ref]", hardware=hardware)
    assert {asked.spaces[role].offloads for role in ("actor", "ref")} == {(True,)}
