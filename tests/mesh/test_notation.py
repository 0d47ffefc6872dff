"""Strategies, meshes and allocations as text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realrl.errors import AllocationError
from realrl.mesh.device_mesh import Allocation, Cluster, DeviceMesh, ParallelStrategy, legal_meshes
from realrl.mesh.notation import parse_allocation, parse_mesh, parse_strategy

CLUSTER = Cluster(2, 8)


@pytest.mark.parametrize(
    ("text", "strategy"),
    [
        ("d4t1p2", ParallelStrategy(4, 1, 2)),
        ("p2d4", ParallelStrategy(4, 1, 2)),
        ("t8s", ParallelStrategy(1, 8, 1, sp=True)),
        ("d16", ParallelStrategy(16)),
        ("p2v3", ParallelStrategy(pp=2, vpp=3)),
        ("d2t2p4v2s", ParallelStrategy(2, 2, 4, sp=True, vpp=2)),
    ],
)
def test_strategies(text, strategy):
    assert parse_strategy(text) == strategy


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("d4t1p2@0:0-7", range(8)),
        ("d4p2@0", range(8)),
        ("t2@1:2-3", range(10, 12)),
        ("d1@0:3", (3,)),
        ("d16@0-1", range(16)),
    ],
)
def test_allocations(text, ranks):
    assert parse_allocation(text, CLUSTER).ranks == tuple(ranks)


@st.composite
def allocations(draw):
    cluster = Cluster(draw(st.integers(1, 3)), draw(st.integers(1, 9)))
    mesh = draw(st.sampled_from(list(legal_meshes(cluster))))
    tp = draw(st.sampled_from([d for d in range(1, mesh.n_devices + 1) if mesh.n_devices % d == 0]))
    rest = mesh.n_devices // tp
    pp = draw(st.sampled_from([d for d in range(1, rest + 1) if rest % d == 0]))
    vpp = draw(st.integers(1, 3)) if pp > 1 else 1
    return Allocation(mesh, ParallelStrategy(rest // pp, tp, pp, sp=draw(st.booleans()), vpp=vpp))


@given(allocations())
def test_round_trip(allocation):
    text = str(allocation)
    assert parse_allocation(text, allocation.mesh.cluster) == allocation
    assert str(parse_allocation(text, allocation.mesh.cluster)) == text


@given(st.permutations(["d2", "t3", "p4", "v5"]), st.booleans())
def test_any_order_of_letters(parts, sp):
    assert parse_strategy("".join(parts) + "s" * sp) == ParallelStrategy(2, 3, 4, sp=sp, vpp=5)


@given(st.text("dtpvs@:-0123456789 x", max_size=12))
def test_any_text_is_read_or_refused(text):
    try:
        allocation = parse_allocation(text, CLUSTER)
    except AllocationError:
        return
    assert allocation.strategy.n_devices == allocation.mesh.n_devices


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"'' is not a parallel strategy"),
        ("4", r"'4' is not a parallel strategy"),
        ("s", r"'s' is not a parallel strategy"),
        ("d2d4", r"gives 'd' twice"),
        ("d0", r"gives 'd' the size 0[\s\S]*least is 1"),
        ("d4x", r"'d4x' is not a parallel strategy at 'x'"),
        ("d4t2p1ss", r"at 'ss'"),
        ("d4 t2", r"at ' t2'"),
        ("D4", r"'D4' is not a parallel strategy"),
        ("d-1", r"not a parallel strategy"),
        ("p2v0", r"gives 'v' the size 0"),
        ("d2v2", r"strategy d2t1p1v2 has 2 virtual stages, but no pipeline: pp is 1"),
    ],
)
def test_strategy_refusals(text, message):
    with pytest.raises(AllocationError, match=message):
        parse_strategy(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("d2", r"'d2' has no '@' and mesh[\s\S]*d2@0:0-1"),
        ("d2@", r"'' is not a device mesh"),
        ("d2@0:0-1 ", r"'0:0-1 ' is not a device mesh at ' '"),
        ("d2@0:0-1junk", r"at 'junk'"),
        ("d2@0:0:1", r"at ':1'"),
        ("d2@0:1-0", r"mesh '0:1-0' ends before it starts"),
        ("d8@2", r"mesh '2' lies outside the cluster, which has 2 nodes of 8 devices[\s\S]*nearest mesh is '1:0-7'"),
        ("d1@0:8", r"mesh '0:8' lies outside the cluster[\s\S]*nearest mesh is '0:7'"),
        ("d1@5:0", r"nearest mesh is '1:0'"),
        ("d2@0:1-2", r"start at a multiple of 2[\s\S]*nearest mesh is '0:0-1'"),
        ("d2@0:7-8", r"mesh '0:7-8' lies outside the cluster[\s\S]*nearest mesh is '0:6-7'"),
        ("d16@1:0-15", r"lies outside the cluster[\s\S]*nearest mesh is '1:0-7'"),
        ("d3@0:0-2", r"1, 2, 4, 8[\s\S]*nearest mesh is '0:0-3'"),
        ("d4@0:0-7", r"d4t1p1 needs 4 devices, its mesh '0:0-7' has 8[\s\S]*d8t1p1"),
        ("x@0:0", r"'x' is not a parallel strategy"),
    ],
)
def test_allocation_refusals(text, message):
    with pytest.raises(AllocationError, match=message):
        parse_allocation(text, CLUSTER)


def test_meshes_are_read_in_their_cluster():
    assert parse_mesh("1", Cluster(2, 1)) == DeviceMesh(Cluster(2, 1), (1,))
    assert parse_mesh("0:4-5", Cluster(1, 6)).ranks == (4, 5)
