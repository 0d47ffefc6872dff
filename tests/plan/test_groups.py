"""The list of process groups."""

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realrl.mesh.device_mesh import Allocation, Cluster, DeviceMesh, ParallelStrategy
from realrl.mesh.notation import parse_allocation
from realrl.plan.groups import GroupKind, axes, group_of, process_groups

CLUSTER = Cluster(2, 8)
TEXTS = [
    "d2t2p2@1:0-7",
    "d2p4@0:0-7",
    "t2p4@0:0-7",
    "d8@1:0-7",
    "d4t2@0:0-7",
    "d2t2@0:4-7",
    "d1@0:0",
    "d8t2@0-1",
    "d2t2s@0:4-7",
]


def of_kind(groups, kind):
    return [list(group.ranks) for group in groups if group.kind is kind]


def test_the_example_of_the_second_node():
    """Devices 8..15 with pp2 dp2 tp2."""
    allocation = Allocation(DeviceMesh(CLUSTER, tuple(range(8, 16))), ParallelStrategy(dp=2, tp=2, pp=2))
    groups = process_groups([allocation], CLUSTER)
    assert of_kind(groups, GroupKind.GLOBAL) == [list(range(16))]
    assert of_kind(groups, GroupKind.MESH) == [list(range(8, 16))]
    assert of_kind(groups, GroupKind.PP) == [[8, 12], [9, 13], [10, 14], [11, 15]]
    assert of_kind(groups, GroupKind.TP) == [[8, 9], [10, 11], [12, 13], [14, 15]]
    assert of_kind(groups, GroupKind.DP) == [[8, 10], [9, 11], [12, 14], [13, 15]]
    assert of_kind(groups, GroupKind.TIED) == [[8, 12], [9, 13], [10, 14], [11, 15]]
    assert dict(enumerate(allocation.ranks)) == {0: 8, 1: 9, 2: 10, 3: 11, 4: 12, 5: 13, 6: 14, 7: 15}


def test_a_thousand_ranks_need_six_axes():
    cluster = Cluster(128, 8)
    allocation = Allocation(DeviceMesh.whole(cluster), ParallelStrategy(dp=32, tp=8, pp=4))
    groups = process_groups([allocation], cluster)
    assert (len(groups), len(axes(groups))) == (2 + 256 + 128 + 32 + 256, 6)


@given(st.lists(st.sampled_from(TEXTS), min_size=1, max_size=7), st.randoms(use_true_random=False))
def test_invariants(texts, random):
    plain = [parse_allocation(text, CLUSTER) for text in texts]
    orders = [tuple(random.sample(a.ranks, len(a.ranks))) for a in plain]
    allocations = [*plain, *(dataclasses.replace(a, order=order) for a, order in zip(plain, orders, strict=True))]
    groups = process_groups(allocations, CLUSTER)
    random.shuffle(allocations)
    assert process_groups([*allocations, allocations[0]], CLUSTER) == groups
    assert groups[0].kind is GroupKind.GLOBAL
    assert len({(g.kind, g.mesh.ranks, g.ranks) for g in groups}) == len(groups)
    for group in groups:
        assert set(group.ranks) <= set(group.mesh.ranks)
        assert group.n_ranks == len(group.ranks)
        assert group.kind not in (GroupKind.GLOBAL, GroupKind.MESH) or group.ranks == group.mesh.ranks
    cut = axes(groups)
    assert [group for axis in cut for group in axis] == list(groups)
    for axis in cut:
        ranks = [rank for group in axis for rank in group.ranks]
        assert len(set(ranks)) == len(ranks)
        assert len({(group.kind, group.mesh) for group in axis}) == 1
    layouts = {(a.mesh, a.strategy.pp, a.strategy.dp, a.strategy.tp, a.ranks) for a in allocations}
    assert len(cut) <= 1 + len({a.mesh for a in allocations}) + 4 * len(layouts)
    for allocation, kind in itertools.product(allocations, (GroupKind.PP, GroupKind.TP, GroupKind.DP)):
        s = allocation.strategy
        size = {GroupKind.PP: s.pp, GroupKind.TP: s.tp, GroupKind.DP: s.dp}[kind]
        found = {group_of(groups, kind, allocation, rank) for rank in allocation.ranks}
        assert sorted(rank for group in found for rank in group.ranks) == list(allocation.mesh.ranks)
        assert {group.n_ranks for group in found} == {size}
        axis = (GroupKind.PP, GroupKind.DP, GroupKind.TP).index(kind)
        for mesh_rank, rank in enumerate(allocation.ranks):
            place = group_of(groups, kind, allocation, rank).ranks.index(rank)
            assert place == s.coordinates(mesh_rank)[axis]
    for allocation in allocations:
        s = allocation.strategy
        ends = [r for i, r in enumerate(allocation.ranks) if s.pp > 1 and s.coordinates(i)[0] in (0, s.pp - 1)]
        tied = {group_of(groups, GroupKind.TIED, allocation, rank) for rank in ends}
        assert sorted(rank for group in tied for rank in group.ranks) == sorted(ends)
        for group in tied:
            pipeline = group_of(groups, GroupKind.PP, allocation, group.ranks[0])
            assert group.ranks == (pipeline.ranks[0], pipeline.ranks[-1])
        for rank in set(allocation.ranks) - set(ends):
            with pytest.raises(LookupError, match="no tied group"):
                group_of(groups, GroupKind.TIED, allocation, rank)


def test_finding_groups():
    allocation = parse_allocation("d2t2@0:4-7", CLUSTER)
    groups = process_groups([allocation], CLUSTER)
    assert group_of(groups, GroupKind.GLOBAL, allocation, 0).n_ranks == 16
    assert group_of(groups, GroupKind.MESH, allocation, 5).ranks == (4, 5, 6, 7)
    assert group_of(groups, GroupKind.TP, allocation, 7).ranks == (6, 7)
    for kind in (GroupKind.MESH, GroupKind.DP):
        with pytest.raises(LookupError, match=r"with rank 0"):
            group_of(groups, kind, allocation, 0)
    with pytest.raises(LookupError, match="no tp group"):
        group_of(groups, GroupKind.TP, parse_allocation("t8@0", CLUSTER), 0)


def test_meshes_that_differ_keep_groups_of_their_own():
    groups = process_groups([parse_allocation(t, CLUSTER) for t in ("d2t2@0:4-7", "d4t2@0:0-7")], CLUSTER)
    assert of_kind(groups, GroupKind.MESH) == [list(range(8)), [4, 5, 6, 7]]
    assert of_kind(groups, GroupKind.TP) == [[0, 1], [2, 3], [4, 5], [6, 7], [4, 5], [6, 7]]


def test_rank_orders_of_one_strategy_have_groups_of_their_own():
    plain = parse_allocation("d2t2@0:4-7", CLUSTER)
    ordered = dataclasses.replace(plain, order=(4, 6, 5, 7))
    groups = process_groups([ordered, plain], CLUSTER)
    assert of_kind(groups, GroupKind.MESH) == [[4, 5, 6, 7]]
    assert of_kind(groups, GroupKind.TP) == [[4, 5], [6, 7], [4, 6], [5, 7]]
    assert group_of(groups, GroupKind.TP, ordered, 6).ranks == (4, 6)
    with pytest.raises(LookupError, match="no dp group"):
        group_of(process_groups([plain], CLUSTER), GroupKind.DP, ordered, 4)
