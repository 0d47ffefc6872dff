"""Transfer protocols: distribute, then collect is the identity; each rank receives its slice and no more."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realrl.errors import AllocationError, GraphError, RunError
from realrl.graph.build import build_graph
from realrl.graph.mfc import InterfaceType, MFCDef, protocol_names
from realrl.mesh.device_mesh import Allocation, Cluster, DeviceMesh, ParallelStrategy, legal_meshes
from realrl.mesh.notation import parse_allocation
from realrl.plan.protocols import CallLayout, check_protocol, divide, register_protocol, slices_of, transfer_protocol
from realrl.plan.samples.transfer import Share

CLUSTER = Cluster(2, 8)
BUILT_IN = ["3D_PROTO", "DP_PROTO", "ONE_TO_ALL", "ALL_TO_ALL", "3D_ALL_MICRO_DP", "3D_PP_ONLY"]
BATCHES = st.lists(st.integers(1, 900), min_size=1, max_size=40)


def spread(text):
    return parse_allocation(text, CLUSTER)


@st.composite
def nested_layouts(draw):
    """A layout, and a home on the same mesh whose slices hold whole replicas of it."""
    mesh = draw(st.sampled_from(list(legal_meshes(CLUSTER))))
    n, sizes = mesh.n_devices, st.sampled_from([1, 2, 4, 8])
    tp, pp = draw(sizes), draw(sizes)
    if n % (tp * pp):
        tp, pp = 1, 1
    home = Allocation(mesh, ParallelStrategy(n // (tp * pp), tp, pp))
    tp_g = draw(st.sampled_from([d for d in range(1, tp + 1) if tp % d == 0]))
    pp_g = draw(st.sampled_from([1, pp]))
    allocation = Allocation(mesh, ParallelStrategy(n // (tp_g * pp_g), tp_g, pp_g))
    return CallLayout(allocation, home, draw(st.booleans()))


def outcome(name, token_counts, layout):
    ids = tuple(f"1/{i}" for i in range(len(token_counts)))
    protocol = transfer_protocol(name)
    shares = protocol.distribute(ids, token_counts, layout)
    return ids, shares, protocol.collect(shares, layout)


@given(st.sampled_from(BUILT_IN), BATCHES, nested_layouts())
def test_distribute_then_collect_is_the_identity(name, token_counts, layout):
    ids, shares, kept = outcome(name, token_counts, layout)
    check_protocol(shares, kept, ids, layout.allocation.ranks)
    assert outcome(name, token_counts, layout)[1:] == (shares, kept)
    returned = sorted(sample_id for kept_ids in kept.values() for sample_id in kept_ids)
    assert returned == sorted(ids)
    assert all(share.ids == tuple(sorted(share.ids, key=ids.index)) for share in shares)
    slices = slices_of(name, layout)
    assert len(ids) < len(slices) or all(share.ids for share in shares)
    total = sum(len(share.ids) for share in shares)
    assert total == len(ids), "a rank receives more than its slice"


@given(BATCHES, nested_layouts())
def test_who_gets_and_keeps_what(token_counts, layout):
    allocation = layout.allocation
    s = allocation.strategy
    ids, shares, kept = outcome("3D_PROTO", token_counts, layout)
    assert [share.ranks for share in shares] == [allocation.dp_group_members(dp) for dp in range(s.dp)]
    assert kept == {allocation.output_rank(dp): share.ids for dp, share in enumerate(shares)}
    loads = [sum(token_counts[ids.index(i)] for i in share.ids) for share in shares]
    assert layout.equal_count or max(loads) <= sum(token_counts) / s.dp + max(token_counts)
    for name in ("DP_PROTO", "ALL_TO_ALL"):
        _, shares, kept = outcome(name, token_counts, layout)
        assert [share.ranks for share in shares] == [(rank,) for rank in allocation.ranks]
        assert kept == {share.ranks[0]: share.ids for share in shares}
    assert sum((share.ids for share in shares), ()) == ids, "as given"
    for name in ("ONE_TO_ALL", "3D_PP_ONLY"):
        _, (share,), kept = outcome(name, token_counts, layout)
        assert share == Share(allocation.ranks, ids)
        keepers = [allocation.ranks[stage * s.dp * s.tp] for stage in range(s.pp)]
        assert list(kept) == (list(allocation.ranks) if name == "ONE_TO_ALL" else keepers)
        assert max(map(len, kept.values())) - min(map(len, kept.values())) <= 1


@given(BATCHES, st.sampled_from([("d2t4", "d8"), ("d2t4", "d4t2"), ("d2t2p2", "d4t2"), ("d2t2p2", "d4p2")]))
def test_micro_dp_stays_inside_the_slices_of_the_home(token_counts, strategies):
    home, allocation = (spread(f"{strategy}@0:0-7") for strategy in strategies)
    _, shares, kept = outcome("3D_ALL_MICRO_DP", token_counts, CallLayout(allocation, home))
    of_slice = [set(home.dp_group_members(dp)) for dp in range(home.strategy.dp)]
    counts = [sum(len(s.ids) for s in shares if set(s.ranks) <= members) for members in of_slice]
    assert sum(counts) == len(token_counts)
    assert max(counts) - min(counts) <= 1
    assert sorted(kept) == sorted(allocation.output_rank(dp) for dp in range(allocation.strategy.dp))


def test_micro_dp_groups_of_the_hybrid_engine():
    """Training 1-4-2 (p-t-d) to generation 1-2-4: two replicas in each training slice."""
    home = Allocation(DeviceMesh(CLUSTER, tuple(range(8))), ParallelStrategy(dp=2, tp=4))
    layout = CallLayout(Allocation(home.mesh, ParallelStrategy(dp=4, tp=2)), home)
    shares = transfer_protocol("3D_ALL_MICRO_DP").distribute(tuple("abcdefgh"), [1] * 8, layout)
    assert [share.ranks for share in shares] == [(0, 1), (2, 3), (4, 5), (6, 7)]


def test_micro_dp_follows_the_rank_order():
    """The same layouts with the tensor groups [0,2][1,3][4,6][5,7] of the 3D-HybridEngine."""
    home = Allocation(DeviceMesh(CLUSTER, tuple(range(8))), ParallelStrategy(dp=2, tp=4))
    allocation = Allocation(home.mesh, ParallelStrategy(dp=4, tp=2), (0, 2, 1, 3, 4, 6, 5, 7))
    _, shares, kept = outcome("3D_ALL_MICRO_DP", [1] * 8, CallLayout(allocation, home))
    assert [share.ranks for share in shares] == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert sorted(kept) == [0, 1, 4, 5]
    across = dataclasses.replace(allocation, order=(0, 4, 1, 5, 2, 6, 3, 7))
    with pytest.raises(AllocationError, match="3D_ALL_MICRO_DP needs replicas"):
        slices_of("3D_ALL_MICRO_DP", CallLayout(across, home))


@given(st.sampled_from(BUILT_IN[:4] + BUILT_IN[5:]), BATCHES, nested_layouts(), st.randoms(use_true_random=False))
def test_in_any_rank_order_coordinates_get_what_they_get_in_the_plain_one(name, token_counts, layout, random):
    plain = layout.allocation
    order = tuple(random.sample(plain.ranks, len(plain.ranks)))
    ordered = dataclasses.replace(layout, allocation=dataclasses.replace(plain, order=order))
    rank_for = dict(zip(plain.ranks, order, strict=True))
    ids, shares, kept = outcome(name, token_counts, layout)
    _, shares_ordered, kept_ordered = outcome(name, token_counts, ordered)
    check_protocol(shares_ordered, kept_ordered, ids, order)
    assert shares_ordered == [Share(tuple(rank_for[rank] for rank in s.ranks), s.ids) for s in shares]
    assert kept_ordered == {rank_for[rank]: kept_ids for rank, kept_ids in kept.items()}


@pytest.mark.parametrize(("home", "strategy"), [("d4t2@0:0-7", "d2t4"), ("d1t4p2@0:0-7", "d2t2p2"), ("d2@1:0-1", "d8")])
def test_micro_dp_needs_nested_layouts(home, strategy):
    layout = CallLayout(spread(f"{strategy}@0:0-7"), spread(home))
    if home.startswith("d1"):  # one slice holds everything
        assert len(slices_of("3D_ALL_MICRO_DP", layout)) == 2
        return
    with pytest.raises(AllocationError, match=r"3D_ALL_MICRO_DP needs replicas of .* that lie inside"):
        slices_of("3D_ALL_MICRO_DP", layout)


# ---------------------------------------------------------------- registration


def to_last(ids, token_counts, layout):
    *others, last = layout.allocation.ranks
    return [Share((last,), tuple(ids)), *(Share((rank,), ()) for rank in others)]


def keep_all(shares, layout):
    return {share.ranks[0]: share.ids for share in shares}


def keep_nothing(shares, layout):
    return {}


def forget_ranks(ids, token_counts, layout):
    return [Share(layout.allocation.ranks[:1], tuple(ids))]


def test_a_protocol_of_the_user():
    call = MFCDef("c", "a", InterfaceType.INFERENCE, "x", ("p",), ("k",), protocol="TO_LAST", n_seqs=1)
    with pytest.raises(GraphError, match=r"call 'c' has protocol='TO_LAST', which is not registered"):
        build_graph([call], ["p"])
    register_protocol("TO_LAST", to_last, keep_all)
    register_protocol("TO_LAST", to_last, keep_all)  # a module that is imported twice
    build_graph([call], ["p"])
    assert protocol_names()[-1] == "TO_LAST"
    assert slices_of("TO_LAST", CallLayout(spread("d2@0:0-1"))) == ((1,), (0,))
    with pytest.raises(GraphError, match="there is a transfer protocol '3D_PROTO' already"):
        register_protocol("3D_PROTO", to_last, keep_all)


@pytest.mark.parametrize(
    ("distribute", "collect", "problem"),
    [
        (to_last, keep_nothing, "does not keep every sample once"),
        (forget_ranks, keep_all, "do not name every rank of the mesh once"),
        (lambda *_: [Share((0, 1), ("x",))], keep_all, "not hold exactly the samples"),
        (to_last, lambda shares, _: {0: shares[0].ids}, "rank 0 keeps a sample that it does not get"),
    ],
)
def test_broken_promises(distribute, collect, problem):
    name = f"BROKEN: {problem}"
    register_protocol(name, distribute, collect)
    with pytest.raises(AllocationError, match=problem):
        slices_of(name, CallLayout(spread("d2@0:0-1")))


def stumble(ids, token_counts, layout):
    raise KeyError("no share")


@pytest.mark.parametrize(
    ("distribute", "collect", "problem"),
    [
        (lambda ids, *_: to_last(ids[: len(ids) // 2 * 2], *_), keep_all, "not hold exactly the samples"),
        (stumble, keep_all, r"KeyError\('no share'\), raised at .*test_protocols.py:\d+"),
        (to_last, stumble, "TypeError"),
    ],
)
def test_a_batch_that_a_registered_protocol_fails_on_is_named(distribute, collect, problem):
    name, layout = f"FRAGILE: {problem}", CallLayout(spread("d2@0:0-1"))
    register_protocol(name, distribute, collect)
    with pytest.raises(RunError, match=rf"FRAGILE.* failed on 3 samples for d2t1p1@0:0-1: .*{problem}") as caught:
        divide(name, ("a", "b", "c"), (1, 1, 1), layout, call="ref_inf")
    assert caught.value.call == "ref_inf"


def test_a_batch_divided():
    shares, kept = divide("3D_PROTO", ("a", "b"), (1, 1), CallLayout(spread("d2@0:0-1")), call="ref_inf")
    assert [share.ids for share in shares] == [("a",), ("b",)]
    assert kept == {0: ("a",), 1: ("b",)}


def test_unknown_names_get_the_closest():
    with pytest.raises(GraphError, match=r"no transfer protocol 'DP_PROTOS'[\s\S]*Did you mean 'DP_PROTO'"):
        transfer_protocol("DP_PROTOS")
    call = MFCDef("c", "a", InterfaceType.INFERENCE, "x", ("p",), ("k",), protocol="3D_PROT", n_seqs=1)
    with pytest.raises(GraphError, match=r"protocol='3D_PROT'[\s\S]*Did you mean '3D_PROTO'"):
        build_graph([call], ["p"])
