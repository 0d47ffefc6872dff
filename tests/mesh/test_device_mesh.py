"""Clusters, meshes, strategies and allocations as values."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realrl.errors import AllocationError
from realrl.mesh.device_mesh import (
    Allocation,
    Cluster,
    DeviceMesh,
    ParallelStrategy,
    legal_meshes,
    nearest_mesh,
    nearest_strategy,
)

clusters = st.builds(Cluster, st.integers(1, 4), st.integers(1, 9))


def test_cluster():
    cluster = Cluster(2, 8)
    assert (cluster.n_devices, cluster.node_of(7), cluster.node_of(8)) == (16, 0, 1)
    assert str(cluster) == "2 nodes of 8 devices"
    assert str(Cluster(1, 1)) == "1 node of 1 device"


@pytest.mark.parametrize(("sizes", "field"), [((0, 8), "n_nodes=0"), ((1, -1), "n_devices_per_node=-1")])
def test_cluster_refuses_sizes(sizes, field):
    with pytest.raises(AllocationError, match=field):
        Cluster(*sizes)


def is_legal(cluster, ranks):
    """The rule of the module docstring, written a second time."""
    n, size = len(ranks), cluster.n_devices_per_node
    inside = ranks[0] >= 0 and ranks[-1] < cluster.n_devices
    whole_nodes = ranks[0] % size == 0 and n % size == 0
    in_one_node = ranks[0] // size == ranks[-1] // size and n in (1, 2, 4, 8) and ranks[0] % size % n == 0
    return inside and (whole_nodes or in_one_node)


@given(clusters, st.data())
def test_exactly_the_legal_meshes_exist(cluster, data):
    first = data.draw(st.integers(-1, cluster.n_devices))
    ranks = tuple(range(first, first + data.draw(st.integers(1, cluster.n_devices))))
    if is_legal(cluster, ranks):
        assert DeviceMesh(cluster, ranks).ranks == ranks
    else:
        with pytest.raises(AllocationError, match=f"nearest mesh is '{nearest_mesh(cluster, ranks)}'"):
            DeviceMesh(cluster, ranks)


@given(clusters)
def test_legal_meshes_are_distinct_and_complete(cluster):
    meshes = [mesh.ranks for mesh in legal_meshes(cluster)]
    n = cluster.n_devices
    spans = [tuple(range(a, b + 1)) for a in range(n) for b in range(a, n)]
    assert sorted(meshes) == sorted(span for span in spans if is_legal(cluster, span))


@pytest.mark.parametrize(
    ("ranks", "problem", "nearest"),
    [
        ((), "it has no device", "0:0"),
        ((0, 2), "not consecutive", "0:0-1"),
        ((1, 0), "not consecutive", "0:0-1"),
        ((16,), "the cluster has devices 0-15", "0:0"),
        ((1, 2), "2 devices of a node start at a multiple of 2", "0:0-1"),
        ((7, 8), "a mesh across nodes is made of whole nodes", "0:6-7"),
        ((0, 1, 2), "inside a node a mesh has 1, 2, 4, 8", "0:0-3"),
        (tuple(range(4, 12)), "a mesh across nodes is made of whole nodes", "0:0-7"),
    ],
)
def test_mesh_refusals(ranks, problem, nearest):
    with pytest.raises(AllocationError, match=problem) as caught:
        DeviceMesh(Cluster(2, 8), ranks)
    assert caught.value.remedy is not None
    assert f"nearest mesh is '{nearest}'" in caught.value.remedy


def test_mesh_of_a_one_device_cluster():
    with pytest.raises(AllocationError, match="it has device 0 only"):
        DeviceMesh(Cluster(1, 1), (1,))


def test_meshes_overlap_and_contain_each_other_as_their_ranks_do():
    for one, other in itertools.product([*legal_meshes(Cluster(2, 4)), *legal_meshes(Cluster(3, 4))], repeat=2):
        assert one.overlaps(other) == bool(set(one.ranks) & set(other.ranks))
        assert one.contains(other) == (set(one.ranks) >= set(other.ranks))


def test_mesh_questions():
    cluster = Cluster(2, 8)
    mesh = DeviceMesh(cluster, tuple(range(8, 16)))
    assert mesh.ranks == tuple(range(8, 16))
    assert mesh == DeviceMesh.of_nodes(cluster, 1, 1) == DeviceMesh.of_devices(cluster, 1, 0, 7)
    half = DeviceMesh.of_devices(cluster, 1, 4, 7)
    assert mesh.contains(half)
    assert mesh.overlaps(half)
    assert not half.contains(mesh)
    assert not half.overlaps(DeviceMesh.of_nodes(cluster, 0, 0))
    assert DeviceMesh.whole(cluster).nodes == range(2)
    assert [str(m) for m in (mesh, half, DeviceMesh.whole(cluster), DeviceMesh(cluster, (3,)))] == [
        "1:0-7",
        "1:4-7",
        "0-1",
        "0:3",
    ]


@pytest.mark.parametrize("field", ["dp", "tp", "pp"])
def test_strategy_refuses_sizes(field):
    with pytest.raises(AllocationError, match=f"{field}=0"):
        ParallelStrategy(**{field: 0})


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_coordinates_are_unique_with_tp_fastest(dp, tp, pp):
    s = ParallelStrategy(dp, tp, pp)
    coordinates = [s.coordinates(rank) for rank in range(s.n_devices)]
    assert coordinates == [(p, d, t) for p in range(pp) for d in range(dp) for t in range(tp)]
    for rank, (p, d, t) in enumerate(coordinates):
        assert s.mesh_rank(pp_rank=p, dp_rank=d, tp_rank=t) == rank


def test_allocation_members():
    allocation = Allocation(DeviceMesh.of_nodes(Cluster(2, 8), 1, 1), ParallelStrategy(dp=2, tp=2, pp=2))
    assert [allocation.dp_group_members(i) for i in range(2)] == [(8, 9, 12, 13), (10, 11, 14, 15)]
    assert [allocation.output_rank(i) for i in range(2)] == [12, 14]


def test_an_allocation_in_another_rank_order():
    mesh = DeviceMesh.of_nodes(Cluster(2, 8), 1, 1)
    plain, order = Allocation(mesh, ParallelStrategy(dp=4, tp=2)), (8, 10, 9, 11, 12, 14, 13, 15)
    ordered = Allocation(mesh, plain.strategy, order)
    assert ordered.ranks == order
    assert ordered != plain == Allocation(mesh, plain.strategy, mesh.ranks)
    assert str(ordered) == str(plain) == "d4t2p1@1:0-7"
    assert [ordered.dp_group_members(i) for i in range(4)] == [(8, 10), (9, 11), (12, 14), (13, 15)]
    assert [ordered.output_rank(i) for i in range(4)] == [8, 9, 12, 13]
    for wrong in (order[1:], (0, *order[1:]), (*order[1:], 10)):
        with pytest.raises(ValueError, match="is no order of the ranks of mesh '1:0-7'"):
            Allocation(mesh, plain.strategy, wrong)


def test_allocation_refuses_another_number_of_devices():
    with pytest.raises(AllocationError, match=r"d8t1p1 needs 8 devices, its mesh '0:0-3' has 4[\s\S]*d4t1p1"):
        Allocation(DeviceMesh(Cluster(1, 4), (0, 1, 2, 3)), ParallelStrategy(dp=8))


def test_nearest_strategy_keeps_tensor_and_pipeline_sizes_where_it_can():
    assert nearest_strategy(ParallelStrategy(8, 2, 2), 8) == ParallelStrategy(2, 2, 2)
    assert nearest_strategy(ParallelStrategy(1, 3, 1), 8) == ParallelStrategy(4, 2, 1)
