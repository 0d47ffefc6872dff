from dataclasses import replace

import pytest

from realrl.mesh.device_mesh import Cluster
from realrl.search.methods import METHODS
from realrl.search.methods.mcmc import walked
from tests.search.methods.cases import GRAPHS, posed
from tests.search.methods.test_placements import check


def periods(problem, seeds, **options):
    return [problem.model.period(walked(problem, seed, **options)) for seed in seeds]


@pytest.mark.parametrize("name", ["ppo", "self_play", "grpo_with_function"])
def test_the_best_plan_of_a_walk(name):
    problem = posed(GRAPHS[name](), Cluster(2, 4))
    first = problem.model.period(METHODS["real_heuristic"].place(problem, 1))
    found = periods(problem, range(3), n_evaluations=200)
    assert max(found) <= first
    assert min(found) < first
    assert found == periods(posed(GRAPHS[name](), Cluster(2, 4)), range(3), n_evaluations=200)


def test_longer_walks_are_no_worse_on_average():
    problem = posed(GRAPHS["ppo"](), Cluster(2, 4))
    short, long = (sum(periods(problem, range(4), n_evaluations=n)) for n in (10, 200))
    assert long < short


def test_a_walk_of_no_step_gives_the_first_plan():
    problem = posed()
    assert walked(problem, 1, n_evaluations=0) == METHODS["real_heuristic"].place(problem, 1)


def test_plans_fit_and_honour_pins():
    problem = posed(cluster=Cluster(2, 6), pins={"ref_inf": "d2t2@1:0-3", "critic_inf": "d1t2"}, capacity=4000)
    for seed in range(5):
        check(problem, walked(problem, seed, n_evaluations=150))


def test_plans_that_are_not_accepted_are_not_returned():
    problem = posed()
    only = METHODS["real_heuristic"].place(problem, 1)
    strict = replace(problem, model=replace(problem.model, accepts=lambda plan: plan == only))
    assert walked(strict, 3, n_evaluations=200) == only
