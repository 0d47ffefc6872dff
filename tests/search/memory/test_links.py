import random
from dataclasses import replace

import numpy as np
import pytest

from realrl.graph.mfc import InterfaceType
from realrl.mesh.device_mesh import Allocation, Cluster, ParallelStrategy, legal_meshes
from realrl.plan.groups import process_groups
from realrl.plan.hooks import CallHooks
from realrl.plan.memory.connections import connection_bytes
from realrl.plan.memory.load import Load
from realrl.plan.memory.plan import CallState
from realrl.search.memory.links import connected, links_of, ordered_links, unordered_links


def drawn(rng, name, cluster):
    """A call of its own role on a random mesh."""
    mesh = rng.choice(list(legal_meshes(cluster)))
    size = cluster.n_devices_per_node
    tp = rng.choice([n for n in range(1, size + 1) if not (mesh.n_devices % n or size % n)])
    pp = rng.choice([n for n in range(1, mesh.n_devices // tp + 1) if not mesh.n_devices // tp % n])
    kind = rng.choice([InterfaceType.TRAIN_STEP, InterfaceType.INFERENCE])
    place = Allocation(mesh, ParallelStrategy(mesh.n_devices // tp // pp, tp, pp))
    return CallState(name, name, kind, place, CallHooks(), Load(1))


@pytest.mark.parametrize(
    "cluster", [Cluster(1, 8), Cluster(3, 8), Cluster(2, 6), Cluster(2, 4), Cluster(2, 16)], ids=str
)
def test_connections_are_those_of_a_run(cluster):
    rng = random.Random(str(cluster))
    for _ in range(60):
        calls = [drawn(rng, f"c{i}", cluster) for i in range(rng.randint(1, 6))]
        groups = process_groups([call.allocation for call in calls], cluster)
        exact = connection_bytes(groups, {}, calls, node_of=cluster.node_of, any_rows=False)
        links = [
            links_of(call.allocation.strategy, call.allocation.ranks[0], cluster,
                     is_trained=call.kind is InterfaceType.TRAIN_STEP)
            for call in calls
        ]  # fmt: skip
        found = connected(links, cluster.n_devices, cluster.n_devices_per_node)
        assert found.tolist() == [exact[rank] for rank in range(cluster.n_devices)]


@pytest.mark.parametrize("cluster", [Cluster(1, 8), Cluster(3, 8), Cluster(2, 6), Cluster(2, 4)], ids=str)
def test_orders_of_ranks(cluster):
    """A run has at least the connections that follow from an order, and those that hold in any order."""
    rng, ratios = random.Random(f"order {cluster}"), []
    for _ in range(60):
        calls = [drawn(rng, f"c{i}", cluster) for i in range(rng.randint(1, 4))]
        for number in range(rng.randint(1, 2)):
            place, at = calls[number % len(calls)].allocation, number % len(calls)
            s, ranks = place.strategy, np.array(place.mesh.ranks)
            shuffled = rng.choice([ranks[rng.sample(range(len(ranks)), len(ranks))],  # any order, or another nesting
                                   ranks.reshape(s.tp, s.dp, s.pp).T.ravel(), ranks])  # fmt: skip
            order = tuple(shuffled.tolist())
            kind = InterfaceType.INFERENCE
            calls[at] = replace(calls[at], kind=kind, allocation=replace(place, order=order))
        groups = process_groups([call.allocation for call in calls], cluster)
        exact = connection_bytes(groups, {}, calls, node_of=cluster.node_of, any_rows=False)
        known, unknown = [], []
        for call in calls:
            place, is_trained = call.allocation, call.kind is InterfaceType.TRAIN_STEP
            plain = links_of(place.strategy, place.mesh.ranks[0], cluster, is_trained=is_trained)
            is_plain = place.order is None
            known.append(plain if is_plain else ordered_links(place.strategy, place.ranks, frozenset(), cluster))
            unknown.append(plain if is_plain else unordered_links(place.strategy, place.mesh.ranks[0]))
        for links in (known, unknown):
            found = connected(links, cluster.n_devices, cluster.n_devices_per_node)
            assert all(found[rank] <= n for rank, n in exact.items())
        ratios += [
            (connected(known, cluster.n_devices, cluster.n_devices_per_node)[r] / n) for r, n in exact.items() if n
        ]
    assert np.mean(ratios) > 0.9


def test_parameters_that_move_connect_the_ranks_of_a_node():
    cluster = Cluster(2, 4)
    still = ordered_links(ParallelStrategy(2), (0, 1), frozenset(), cluster)
    moving = ordered_links(ParallelStrategy(2), (0, 1), frozenset({(2, 0), (3, 0)}), cluster)
    more = connected([moving], 8, 4) - connected([still], 8, 4)
    pair = 32 * (12 << 20)
    assert more.tolist() == [2 * pair, 0, pair, pair, 0, 0, 0, 0]


def test_peers_are_not_counted_in_nodes_of_very_many_devices():
    links = links_of(ParallelStrategy(tp=2), 0, Cluster(1, 128), is_trained=False)
    assert not np.any(links.peers)
