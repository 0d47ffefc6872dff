import pytest

from realrl.errors import AllocationError
from realrl.graph.build import build_graph
from realrl.graph.mfc import InterfaceType, MFCDef
from realrl.mesh.device_mesh import Allocation, Cluster
from realrl.mesh.notation import parse_strategy
from realrl.plan.allocation import check_shapes, check_supported
from realrl.search.space import Pin, RoleSpace, choices_of, mesh_at, mesh_sizes, pin_from, strategies_of
from realrl.shape import LoRA
from tests.sim.costs.models import small

CLUSTER = Cluster(2, 4)
ROLES = {"actor": RoleSpace(small()), "reward": RoleSpace(None)}
MFCS = [
    MFCDef("gen", "actor", InterfaceType.GENERATE, "x", ("prompt_ids",), ("ids",), n_seqs=8),
    MFCDef("rew", "reward", InterfaceType.INFERENCE, "x", ("ids",), ("rewards",), n_seqs=8),
    MFCDef("train", "actor", InterfaceType.TRAIN_STEP, "x", ("ids", "rewards"), n_seqs=8, n_minibatches=2),
]
GRAPH = build_graph(MFCS, ["prompt_ids"])


def choices(name, **changes):
    return choices_of(GRAPH, name, ROLES, CLUSTER, **changes)


def test_sizes_of_meshes():
    assert mesh_sizes(CLUSTER) == (1, 2, 4, 8)
    assert mesh_sizes(Cluster(3, 6)) == (1, 2, 4, 6, 12, 18)
    assert mesh_sizes(Cluster(1, 1)) == (1,)
    assert [size // 8 for size in mesh_sizes(Cluster(21, 8))[3:]] == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 21]
    assert len(mesh_sizes(Cluster(16, 8))) == 3 + 16
    assert len(mesh_sizes(Cluster(128, 8))) == 3 + 8 + 4 * 4


@pytest.mark.parametrize("name", ["gen", "rew", "train"])
def test_every_choice_is_one_that_a_run_accepts(name):
    found = choices(name)
    assert len(set(found)) == len(found)
    assert {choice.n_devices for choice in found} == set(mesh_sizes(CLUSTER))
    whole = Allocation(mesh_at(CLUSTER, 0, 1), parse_strategy("d1"))
    for choice in found:
        place = Allocation(mesh_at(CLUSTER, 0, choice.n_devices), choice.strategy)
        plan = {mfc.name: whole for mfc in MFCS} | {name: place}
        check_supported(GRAPH, plan, weightless=["reward"])
        check_shapes(GRAPH, plan, {"actor": small()})
        assert choice.strategy.tp in (1, 2, 4, 8)  # inside a node, or two whole ones


@pytest.mark.parametrize(
    ("cluster", "widths"),
    [
        (Cluster(4, 1), {1, 2, 3, 4}),
        (Cluster(2, 3), {1, 3, 6}),
        (Cluster(6, 2), {1, 2, 4, 6, 8}),
        (Cluster(2, 8), {1, 2, 4, 8}),
        (Cluster(12, 1), {1, 2, 3, 4, 5, 6, 7, 8}),
    ],
)
def test_a_tensor_parallel_group_is_inside_a_node_or_is_a_few_whole_ones(cluster, widths):
    role = RoleSpace(small())
    found = [one for size in mesh_sizes(cluster) for one in strategies_of(size, cluster, role)]
    assert {one.tp for one in found} == widths
    assert {(one.dp, one.pp) for one in found} >= {(1, 1), (2, 1), (1, 2)}


def test_settings_belong_to_the_home_of_a_role():
    assert {(c.zero_stage, c.checkpoints, c.offloads) for c in choices("gen")} == {(0, False, False)}
    trained = choices("train")
    assert {c.zero_stage for c in trained} == {0, 1}
    assert {c.zero_stage for c in trained if c.strategy.dp == 1} == {0}
    assert {(c.checkpoints, c.offloads) for c in trained} == {(a, b) for a in (False, True) for b in (False, True)}
    kept = RoleSpace(small(), zero_stages=(1,), checkpoints=(False,), offloads=(False,))
    fixed = choices_of(GRAPH, "train", ROLES | {"actor": kept}, CLUSTER)
    assert {(c.zero_stage, c.checkpoints, c.offloads) for c in fixed} == {(1, False, False)}


def test_ranks_have_samples_and_roles_without_parameters_only_data_parallelism():
    assert max(c.strategy.dp for c in choices("train")) == 4  # minibatches of four samples
    assert max(c.strategy.dp for c in choices("gen")) == 8
    assert {(c.strategy.tp, c.strategy.pp, c.n_mbs) for c in choices("rew")} == {(1, 1, None)}


def test_micro_batches():
    assert {c.n_mbs for c in choices("train") if str(c.strategy) == "d1t1p1"} == {None, 4}
    assert {c.n_mbs for c in choices("gen")} == {None}


def test_a_pin_leaves_its_strategy():
    pinned = choices("train", pin=pin_from("d2t2@0:0-3", CLUSTER))
    assert {str(c.strategy) for c in pinned} == {"d2t2p1"}
    assert len(pinned) > 1
    assert pin_from("d2t2", CLUSTER) == Pin(parse_strategy("d2t2"))


@pytest.mark.parametrize(
    ("pin", "message"),
    [("d8", "fewer than its 8 data-parallel ranks"), ("t3p1", "must divide the 8 attention heads"), ("p9", "pp=9")],
)
def test_a_pin_that_breaks_a_rule_says_which(pin, message):
    with pytest.raises(AllocationError, match=message):
        choices_of(GRAPH, "train", ROLES, Cluster(12, 1), pin=pin_from(pin, Cluster(12, 1)))


def test_a_pin_of_another_size_than_its_mesh():
    with pytest.raises(AllocationError, match="needs 4 devices"):
        pin_from("d4@0:0-1", CLUSTER)


def of_deepspeed(cluster=CLUSTER, *, pin=None, zero_stages=(), **shape):
    role = RoleSpace(small(**shape), backend="deepspeed", zero_stages=zero_stages)
    return choices_of(GRAPH, "train", ROLES | {"actor": role}, cluster, pin=pin)


def test_choices_are_those_that_a_backend_trains():
    found = of_deepspeed()
    assert {c.zero_stage for c in found if c.strategy.pp == 1 and c.strategy.dp > 1} == {1, 2, 3}
    assert {c.zero_stage for c in found if c.strategy.pp > 1 and c.strategy.dp > 1} == {1, 2}
    assert {c.zero_stage for c in found if c.strategy.dp == 1} == {1}
    whole = of_deepspeed(dtype="float32")
    assert {c.zero_stage for c in whole if c.strategy.dp == 1 and not c.offloads} == {0}
    assert {c.zero_stage for c in whole if c.strategy.dp == 1 and c.offloads} == {1}
    assert max(c.strategy.pp for c in of_deepspeed(dtype="float16")) == 1
    adapters = LoRA(4, 8.0, ("q_proj",), base="tiny")
    assert {c.zero_stage for c in of_deepspeed(dtype="float32", lora=adapters)} == {0, 1, 2}
    assert of_deepspeed(lora=adapters) == ()


def test_a_pin_that_the_backend_of_its_role_cannot_train():
    with pytest.raises(
        AllocationError, match=r"call 'train' is pinned to d1t1p2, but models\.actor\.optimizer\.zero_s"
    ):
        of_deepspeed(pin=pin_from("p2", CLUSTER), zero_stages=(3,))
