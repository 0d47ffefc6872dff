import itertools
import math

import pytest

from realrl.mesh.device_mesh import Cluster
from realrl.search.methods import METHODS
from realrl.search.methods.fill import Filler, Rule
from realrl.search.methods.hybridflow import partitions
from realrl.search.methods.layout import Maker, set_sizes, spans_of
from tests.search.methods.cases import GENERATE, GRAPHS, posed


@pytest.mark.parametrize(("n", "bell"), [(0, 1), (1, 1), (2, 2), (3, 5), (4, 15), (5, 52), (6, 203)])
def test_partitions(n, bell):
    found = list(partitions([f"r{i}" for i in range(n)]))
    assert len({frozenset(map(frozenset, one)) for one in found}) == len(found) == bell
    assert all(sorted(itertools.chain(*one)) == [f"r{i}" for i in range(n)] for one in found)


def cost(problem, plan):
    """Sum over stages of the slowest mesh's seconds, by the meshes of homes."""
    names, total = Maker("x", problem).mfcs, {}
    for mfc, one, number in zip(names, plan, range(len(plan)), strict=True):
        stage = total.setdefault(mfc.interface_type, {})
        stage[one.span] = stage.get(one.span, 0.0) + problem.model.price(number, one.choice).seconds
    return sum(max(by_span.values()) for by_span in total.values())


@pytest.mark.parametrize("capacity", [1e9, 4000, 2700])
@pytest.mark.parametrize("name", ["ppo", "self_play", "sft"])
def test_the_mapping_of_the_least_cost(name, capacity):
    """Against every partition and every division, each by itself."""
    problem = posed(GRAPHS[name](), Cluster(3, 2), capacity=capacity)
    rule = Rule(is_alike=lambda mfc: mfc.interface_type is not GENERATE)
    maker = Maker("x", problem, rule)
    filler = Filler(problem, maker.mfcs, rule, capacity)
    best = math.inf
    for partition in partitions(sorted({mfc.role for mfc in maker.mfcs})):
        sets = [maker.of_roles(part) for part in partition]
        for sizes in itertools.product(set_sizes(problem.model.cluster, len(sets)), repeat=len(sets)):
            if sum(sizes) > 6 or spans_of(sizes, problem.model.cluster) is None:
                continue
            found = [filler.best(calls, size) for calls, size in zip(sets, sizes, strict=True)]
            if all(found):
                stages = zip(*[one.seconds for one in found], strict=True)
                best = min(best, sum(max(stage) for stage in stages))
    assert cost(problem, METHODS["hybridflow"].place(problem, 1)) == pytest.approx(best)


def test_sizes_of_many_nodes():
    assert set_sizes(Cluster(2, 8), 4) == (1, 2, 4, 8, 16)
    assert set_sizes(Cluster(4, 2), 2) == (2, 4, 6, 8)
    assert [size // 8 for size in set_sizes(Cluster(20, 8), 3)] == [1, 2, 3, 4, 6, 8, 12, 16, 20]
