"""Transfers: exactly the invariants that the module states."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realrl.plan.samples.placements import Placement
from realrl.plan.samples.transfer import Arrival, RowTransfer, Share, plan_transfers


def node_of(rank):
    return rank // 4


def place(held, incoming=()):
    return Placement(frozenset(held), frozenset(incoming))


@st.composite
def situations(draw):
    """Up to eight ranks on two nodes that need samples, and where each key of each sample is."""
    n_shares, width = draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 2), (4, 2)]))
    ranks = draw(st.permutations(range(8)))[: n_shares * width]
    ids = [f"1/{i}" for i in range(draw(st.integers(1, 6)))]
    owner = [draw(st.integers(0, n_shares - 1)) for _ in ids]
    shares = [
        Share(tuple(ranks[n * width : (n + 1) * width]), tuple(i for i, o in zip(ids, owner, strict=True) if o == n))
        for n in range(n_shares)
    ]
    placements = {}
    for key in draw(st.sampled_from([["a"], ["a", "b"], ["a", "b", "c"]])):
        placements[key] = {}
        for sample_id in ids:
            held = draw(st.frozensets(st.integers(0, 7), min_size=1, max_size=4))
            placements[key][sample_id] = place(held, draw(st.frozensets(st.integers(0, 7), max_size=3)) - held)
    return shares, placements


@given(situations())
def test_invariants(situation):
    shares, placements = situation
    routes, arrivals = plan_transfers(shares, placements, node_of=node_of)
    came = [(sample_id, r.key, r.target) for r in routes for sample_id in r.ids]
    assert len(set(came)) == len(came), "a (sample, key, rank) occurs twice"
    assert len({(r.source, r.target, r.key, r.is_passed_on) for r in routes}) == len(routes), "routes are not merged"
    wanted = {
        (sample_id, key, rank)
        for share in shares
        for rank in share.ranks
        for sample_id in share.ids
        for key in placements
        if rank not in placements[key][sample_id].present
    }
    assert set(came) == wanted
    crossed = {}
    for route in routes:
        is_far = node_of(route.source) != node_of(route.target)
        for sample_id in route.ids:
            held = placements[route.key][sample_id].held
            near = any(node_of(rank) == node_of(route.target) for rank in held)
            if route.is_passed_on:
                assert not near, "a relay where none is needed"
                assert not is_far, "a relay of another node"
                continue
            assert route.source in held, "the source does not hold the rows for certain"
            assert near != is_far, "a nearer source was there"
            if is_far:
                where = (route.key, sample_id, node_of(route.target))
                assert where not in crossed, "rows cross to a node twice"
                crossed[where] = route.target
    for route in routes:
        if route.is_passed_on:
            for sample_id in route.ids:
                assert crossed[route.key, sample_id, node_of(route.target)] == route.source, (
                    "the relay has no such rows"
                )
    arriving = [(i, key, t) for a in arrivals for key in a.keys for i in a.ids for t in a.targets]
    assert sorted(arriving) == sorted(came)
    assert (routes, arrivals) == plan_transfers(shares, placements, node_of=node_of)


def test_nothing_moves_when_everything_is_there():
    placements = {"a": {"1/0": place([0, 1]), "1/1": place([5], [1])}}
    routes, arrivals = plan_transfers([Share((1,), ("1/0", "1/1"))], placements, node_of=node_of)
    assert routes == arrivals == ()


def test_same_node_then_least_loaded():
    placements = {"a": {f"1/{i}": place([1, 2, 4]) for i in range(4)}}
    shares = [Share((0,), ("1/0", "1/1")), Share((3,), ("1/2",)), Share((6,), ("1/3",))]
    assert plan_transfers(shares, placements, node_of=node_of)[0] == (
        RowTransfer(1, 0, "a", ("1/0", "1/1")),
        RowTransfer(2, 3, "a", ("1/2",)),
        RowTransfer(4, 6, "a", ("1/3",)),
    )


def test_rows_cross_to_a_node_once_and_are_passed_on():
    """Four ranks of one share: two on the holder's node, two on the other, which get half of the rows each."""
    ids = tuple(f"1/{i}" for i in range(4))
    placements = {"a": {sample_id: place([0]) for sample_id in ids}}
    routes, arrivals = plan_transfers([Share((0, 1, 4, 5), ids)], placements, node_of=node_of)
    assert routes == (
        RowTransfer(0, 1, "a", ids),
        RowTransfer(0, 4, "a", ("1/0", "1/2")),
        RowTransfer(0, 5, "a", ("1/1", "1/3")),
        RowTransfer(5, 4, "a", ("1/1", "1/3"), is_passed_on=True),
        RowTransfer(4, 5, "a", ("1/0", "1/2"), is_passed_on=True),
    )
    assert arrivals == (Arrival(("a",), ids, (1, 4, 5)),)


def test_relays_of_several_keys_take_turns():
    placements = {key: {"1/0": place([0])} for key in ("a", "b")}
    routes, _ = plan_transfers([Share((4, 5), ("1/0",))], placements, node_of=node_of)
    assert [(r.source, r.target, r.key) for r in routes] == [(0, 4, "a"), (4, 5, "a"), (0, 5, "b"), (5, 4, "b")]


def test_shares_with_a_sample_in_common_fetch_it_once():
    placements = {"a": {"1/0": place([0])}}
    routes, _ = plan_transfers([Share((4,), ("1/0",)), Share((6,), ("1/0",))], placements, node_of=node_of)
    assert routes == (RowTransfer(0, 4, "a", ("1/0",)), RowTransfer(4, 6, "a", ("1/0",), is_passed_on=True))


def test_routes_of_differently_placed_samples_are_merged():
    placements = {"a": {"1/0": place([1]), "1/1": place([1], [5]), "1/2": place([2])}}
    routes, arrivals = plan_transfers([Share((0,), ("1/0", "1/1", "1/2"))], placements, node_of=node_of)
    assert routes == (RowTransfer(1, 0, "a", ("1/0", "1/1")), RowTransfer(2, 0, "a", ("1/2",)))
    assert arrivals[0] == Arrival(("a",), ("1/0",), (0,))


def test_sample_without_a_place():
    with pytest.raises(KeyError, match="1/9"):
        plan_transfers([Share((0,), ("1/9",))], {"a": {}}, node_of=node_of)
