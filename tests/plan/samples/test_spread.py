"""Spreads: exactly the invariants that the module states."""

from collections import Counter

from hypothesis import given

from realrl.plan.samples.spread import plan_spreads
from realrl.plan.samples.transfer import RowTransfer, Share, plan_transfers
from tests.plan.samples.test_transfer import node_of, place, situations


def rows_of(routes):
    return [(sample_id, route.key, route.target) for route in routes for sample_id in route.ids]


@given(situations())
def test_invariants(situation):
    shares, placements = situation
    routes, _ = plan_transfers(shares, placements, node_of=node_of)
    pulls, spreads = plan_spreads(shares, routes, placements, node_of=node_of)
    assert sorted(rows_of(routes)) == sorted((*rows_of(pulls), *rows_of(spreads)))
    share_of = {rank: share for share in shares for rank in share.ranks}
    per_node = Counter((share_of[rank].ranks, node_of(rank), key, i) for i, key, rank in rows_of(pulls))
    assert set(per_node.values()) <= {1}, "a replica pulls a row twice to one node"
    for sample_id, key, rank in rows_of(pulls):
        near = {other for other in share_of[rank].ranks if node_of(other) == node_of(rank)}
        assert len(near) == 1 or not near & placements[key][sample_id].held, "a member of the replica holds it"
    for spread in spreads:
        assert spread.source != spread.target
        assert spread.source in share_of[spread.target].ranks
        assert node_of(spread.source) == node_of(spread.target)
        for sample_id in spread.ids:
            held = placements[spread.key][sample_id].held
            assert spread.source in held or (sample_id, spread.key, spread.source) in rows_of(pulls)
    assert len({(r.source, r.target, r.key) for r in spreads}) == len(spreads), "spreads are not merged"
    assert (pulls, spreads) == plan_spreads(shares, routes, placements, node_of=node_of)


def test_one_rank_of_a_replica_pulls_and_the_others_get_it_from_there():
    placements = {"a": {"1/0": place([3]), "1/1": place([3])}}
    shares = [Share((0, 1, 2), ("1/0", "1/1"))]
    routes, _ = plan_transfers(shares, placements, node_of=node_of)
    assert plan_spreads(shares, routes, placements, node_of=node_of) == (
        (RowTransfer(3, 0, "a", ("1/0", "1/1")),),
        (RowTransfer(0, 1, "a", ("1/0", "1/1")), RowTransfer(0, 2, "a", ("1/0", "1/1"))),
    )


def test_a_replica_that_holds_rows_pulls_none():
    placements = {"a": {"1/0": place([1, 3]), "1/1": place([3])}}
    shares = [Share((0, 1), ("1/0", "1/1"))]
    routes, _ = plan_transfers(shares, placements, node_of=node_of)
    assert plan_spreads(shares, routes, placements, node_of=node_of) == (
        (RowTransfer(3, 0, "a", ("1/1",)),),
        (RowTransfer(1, 0, "a", ("1/0",)), RowTransfer(0, 1, "a", ("1/1",))),
    )


def test_single_ranks_share_nothing():
    placements = {"a": {"1/0": place([3])}}
    shares = [Share((0,), ("1/0",)), Share((1,), ())]
    routes, _ = plan_transfers(shares, placements, node_of=node_of)
    assert plan_spreads(shares, routes, placements, node_of=node_of) == (routes, ())
