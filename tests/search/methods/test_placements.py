import itertools
from dataclasses import replace
from functools import cache

import pytest

from realrl.errors import AllocationError
from realrl.mesh.device_mesh import Cluster
from realrl.search.methods import METHODS
from realrl.search.methods.layout import spans_of
from realrl.search.space import mesh_at
from tests.search.methods.cases import GRAPHS, placed, posed, ppo

CLUSTERS = [Cluster(1, 1), Cluster(1, 4), Cluster(2, 4), Cluster(3, 2), Cluster(2, 6)]


@cache
def posed_once(graph, cluster):
    return posed(GRAPHS[graph](), cluster)


def check(problem, plan):
    """The plan fits, its meshes are legal and nest, and its choices are those of the problem."""
    model = problem.model
    assert not model.overflow(plan)
    for number, one in enumerate(plan):
        mesh_at(model.cluster, one.span[0], one.span[1] - one.span[0])  # raises if it is none
        assert one.choice in problem.choices[number]
        pin = problem.pins.get(number)
        assert pin is None or pin.mesh is None or pin.mesh.ranks == tuple(range(*one.span))
    for a, b in itertools.combinations([one.span for one in plan], 2):
        is_inside = (a[0] <= b[0] and b[1] <= a[1]) or (b[0] <= a[0] and a[1] <= b[1])
        assert is_inside or a[1] <= b[0] or b[1] <= a[0]


def check_refusal(name, error):
    assert f"method '{name}'" in error.message
    assert error.remedy


@pytest.mark.parametrize("name", METHODS)
def test_plans_of_any_graph_on_any_cluster(name):
    refusals = []
    for graph, cluster in itertools.product(GRAPHS, CLUSTERS):
        problem = posed_once(graph, cluster)
        try:
            plan = METHODS[name].place(problem, 1)
        except AllocationError as error:
            check_refusal(name, error)
            refusals.append((graph, cluster))
            continue
        check(problem, plan)
        assert cluster != Cluster(2, 4) or plan == METHODS[name].place(problem, 1)
    has_own_rules = name in ("data", "deepspeed_chat", "openrlhf")
    assert has_own_rules or all(len({mfc.role for mfc in GRAPHS[g]()}) > c.n_devices for g, c in refusals)
    assert len(refusals) <= 10


@pytest.mark.parametrize("name", METHODS)
def test_plans_where_memory_is_scarce(name):
    """Eight devices of which each holds a fraction of the roles."""
    n_found = 0
    for capacity in (2500, 3000, 4000, 6000, 9000):
        problem = posed(ppo(), Cluster(2, 4), capacity=capacity)
        try:
            check(problem, METHODS[name].place(problem, 1))
            n_found += 1
        except AllocationError as error:
            check_refusal(name, error)
    assert n_found >= 1


def of(name, **options):
    problem = posed(**options)
    return placed(problem, METHODS[name].place(problem, 1))


def test_data():
    assert {str(one.choice.strategy) for one in of("data").values()} == {"d8t1p1"}


def test_data_of_too_few_samples():
    with pytest.raises(AllocationError, match="'data' has no strategy for call 'actor_gen' on 8 devices"):
        of("data", mfcs=ppo(n=4))


def test_colocate():
    assert {one.span for one in of("colocate").values()} == {(0, 8)}


def test_colocate_with_pins():
    found = of("colocate", pins={"reward_inf": "d2@1:0-1", "ref_inf": "d2t2"})
    assert found["reward_inf"].span == (4, 6)
    assert found["ref_inf"].span == (0, 4)
    assert found["actor_train"].span == (0, 8)


def test_split():
    found = of("split")
    assert {found[name].span for name in ("actor_gen", "actor_train", "ref_inf")} == {(0, 4)}
    assert {found[name].span for name in ("reward_inf", "critic_inf", "critic_train")} == {(4, 8)}


def test_a_pin_across_the_halves():
    with pytest.raises(AllocationError, match=r"'split' puts call .* which overlap in part") as caught:
        of("split", cluster=Cluster(4, 2), pins={"critic_inf": "d4@1-2"})
    assert caught.value.remedy


def test_a_pin_larger_than_the_mesh():
    with pytest.raises(AllocationError, match="'split' has no strategy for call 'critic_inf' on 4 devices"):
        of("split", pins={"critic_inf": "d8"})


def test_standalone():
    found = of("standalone", cluster=Cluster(4, 4))
    by_role = {}
    for name, one in found.items():
        by_role.setdefault(name.rpartition("_")[0], set()).add(one.span)
    spans = [span for (span,) in by_role.values()]
    assert len(set(spans)) == 4
    assert max(spans, key=lambda span: span[1] - span[0]) in by_role["actor"]


def test_a_reward_function_takes_no_devices_of_its_own():
    found = of("standalone", mfcs=GRAPHS["grpo_with_function"](), cluster=Cluster(2, 4))
    assert {one.span for one in found.values()} == {(0, 4), (4, 8)} or len({one.span for one in found.values()}) == 3
    assert found["scorer_inf"].span[0] == found["actor_train"].span[0]


def test_deepspeed_chat():
    found = of("deepspeed_chat", backend="deepspeed", capacity=2300)
    for name, one in found.items():
        assert one.choice.strategy.pp == 1
        if name.endswith("train"):
            assert (one.choice.strategy.dp, one.choice.zero_stage) == (8, 3)
    assert of("deepspeed_chat")["actor_train"].choice.zero_stage == 1


def test_openrlhf():
    found = of("openrlhf", cluster=Cluster(5, 2))
    spans = {name: one.span for name, one in found.items()}
    assert spans["actor_gen"] not in {span for name, span in spans.items() if name != "actor_gen"}
    assert len(set(spans.values())) == 5


def test_nemo_aligner():
    found = of("nemo_aligner", capacity=4000)
    for role in ("actor", "critic"):
        assert len({one.choice.strategy for name, one in found.items() if name.startswith(role)}) == 1
    assert {one.span for one in found.values()} == {(0, 4), (4, 8)}


@pytest.mark.parametrize(("capacity", "pp"), [(1e9, 1), (1600, 2)])
def test_real_heuristic(capacity, pp):
    found = of("real_heuristic", cluster=Cluster(4, 2), capacity=capacity)
    strategies = {one.choice.strategy for one in found.values()}
    assert [(s.tp, s.pp) for s in strategies] == [(2, pp)]
    assert {one.span for one in found.values()} == {(0, 8)}


def test_nothing_fits():
    problem = posed(capacity=2500)
    problem = replace(problem, model=replace(problem.model, capacity=200))
    for name in METHODS:
        with pytest.raises(AllocationError) as caught:
            METHODS[name].place(problem, 1)
        check_refusal(name, caught.value)


def test_the_exact_memory_has_the_last_word():
    problem = posed(capacity=4000)
    roomy = replace(problem.model, capacity=0.95 * 4000)
    strict = replace(problem, model=replace(problem.model, accepts=lambda plan: not roomy.overflow(plan)))
    found = METHODS["colocate"].place(strict, 1)
    assert not roomy.overflow(found)
    assert roomy.overflow(METHODS["colocate"].place(problem, 1))
    none = replace(problem, model=replace(problem.model, accepts=lambda plan: False))
    for name in ("colocate", "standalone"):
        with pytest.raises(AllocationError, match=f"'{name}' has no plan that fits, once the memory"):
            METHODS[name].place(none, 1)


@pytest.mark.parametrize(
    ("sizes", "cluster", "expected"),
    [
        ((8, 4, 4), Cluster(2, 8), ((0, 8), (8, 12), (12, 16))),
        ((2, 4, 2), Cluster(1, 8), ((4, 6), (0, 4), (6, 8))),
        ((4, 4, 4), Cluster(2, 6), None),
        ((4, 4, 2), Cluster(2, 6), ((0, 4), (6, 10), (4, 6))),
        ((16, 8), Cluster(2, 8), None),
    ],
)
def test_meshes_of_given_sizes(sizes, cluster, expected):
    assert spans_of(sizes, cluster) == expected
