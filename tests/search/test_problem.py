from dataclasses import replace

import pytest

from realrl.config.schema import GenerationConfig
from realrl.errors import AllocationError, GraphError
from realrl.graph.build import build_graph
from realrl.graph.mfc import InterfaceType, MFCDef
from realrl.mesh.device_mesh import Allocation, Cluster, ParallelStrategy
from realrl.plan.memory.load import RowLengths
from realrl.plan.memory.plan import RoleState
from realrl.search.branch import search
from realrl.search.prices import Workload
from realrl.search.problem import fitting, pose
from realrl.search.space import RoleSpace, mesh_at, pin_from
from realrl.sim.durations import SampleSizes
from tests.sim.costs.models import hardware, small

CLUSTER = Cluster(4, 2)
MFCS = [
    MFCDef("gen", "actor", InterfaceType.GENERATE, "x", ("prompt_ids",), ("ids",), n_seqs=8),
    MFCDef("rew", "reward", InterfaceType.INFERENCE, "x", ("ids",), ("rewards",), n_seqs=8),
    MFCDef("train", "actor", InterfaceType.TRAIN_STEP, "x", ("ids", "rewards"), n_seqs=8),
]
ROLES = {"actor": RoleSpace(small()), "reward": RoleSpace(None)}
WORKLOAD = Workload(
    build_graph(MFCS, ["prompt_ids"]),
    {"actor": RoleState(small(), Allocation(mesh_at(CLUSTER, 0, 1), ParallelStrategy()), True)},
    CLUSTER,
    GenerationConfig(max_new_tokens=32),
    {1: {f"0/{i}": SampleSizes((20,), (32,)) for i in range(8)}},
    RowLengths([20], [104], [52]),
    {"gen": 1, "rew": 1, "train": 1},
)


def posed(pins=None, capacity=1e9, **changes):
    pinned = {name: pin_from(text, CLUSTER) for name, text in (pins or {}).items()}
    return pose(WORKLOAD, hardware(), roles=ROLES, pins=pinned, capacity=capacity, **changes)


def test_every_choice_fits_a_device():
    found = posed()
    assert found.model.flow.homes == (2, -1, 2)
    needs = [found.model.price(2, choice) for choice in found.choices[2]]
    capacity = sorted(price.kept + price.used for price in needs)[len(needs) // 2]
    fewer = posed(capacity=capacity)
    assert 0 < len(fewer.choices[2]) < len(found.choices[2])
    assert all(price.kept + price.used <= capacity for price in (fewer.model.price(2, c) for c in fewer.choices[2]))


def test_a_call_that_fits_nowhere_is_told_the_least_that_it_takes():
    found = posed()
    needs = [min(p.kept + p.used for p in (found.model.price(i, c) for c in found.choices[i])) for i in (0, 2)]
    assert needs[0] < needs[1]
    message = r"call 'train' fits no mesh of a cluster with 4 nodes.* it takes [\d.]+ kB of a device at least, with d"
    with pytest.raises(AllocationError, match=message) as err:
        posed(capacity=needs[1] - 1)
    assert err.value.call == "train"
    with pytest.raises(AllocationError, match="call 'gen' fits no mesh"):
        posed(capacity=1)


def test_a_plan_honours_pins():
    *_, last = search(posed({"gen": "d2@1:0-1", "train": "d4"}))
    assert last.is_done
    gen, _, train = last.plan
    assert (gen.span, str(gen.choice.strategy), str(train.choice.strategy)) == ((2, 4), "d2t1p1", "d4t1p1")


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({"gen": "d4@0-1", "train": "d4@1-2"}, "calls 'gen' and 'train' have meshes '0-1' and '1-2', which overlap"),
        (
            {"train": "d3"},
            "call 'train' is pinned to d3t1p1: devices 0-2 are no device mesh of a cluster with 4 nodes of 2",
        ),
        ({"gen": "d16"}, "call 'gen' is pinned to d16t1p1, which takes 16 devices; the cluster has 4 nodes of 2"),
    ],
)
def test_pins_that_cannot_be(pins, message):
    with pytest.raises(AllocationError, match=message):
        posed(pins)


def test_a_pin_of_a_call_that_is_not_there():
    with pytest.raises(GraphError, match="there is no call 'trian'"):
        posed({"trian": "d4"})


def test_the_last_word_on_a_plan():
    asked = []

    def accepts(plan):
        asked.append(plan)
        return plan[0].choice.n_devices == 2

    found = posed()
    *_, last = search(replace(found, model=replace(found.model, accepts=accepts)))
    assert last.plan[0].choice.n_devices == 2
    assert asked


def test_a_call_without_any_strategy():
    found = posed()
    with pytest.raises(AllocationError, match="call 'train' has no strategy on a cluster with 4 nodes of 2 devices"):
        fitting(found.model, 2, ())
