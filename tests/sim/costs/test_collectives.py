import pytest
from hypothesis import given
from hypothesis import strategies as st

from realrl.mesh.device_mesh import Cluster, DeviceMesh
from realrl.sim.costs.collectives import Route, all_gather, all_reduce, route_of, send
from tests.sim.costs.models import hardware

LINKS = hardware().links


def test_a_group_of_one_takes_no_time():
    assert all_reduce(Route(1, 1, 8), LINKS)(1e9) == 0.0
    assert all_gather(Route(1, 1, 8), LINKS)(1e9) == 0.0
    assert all_reduce(Route(8, 1, 8), LINKS)(0) == 0.0


def test_inside_a_node_a_ring_moves_all_but_a_share():
    found = all_reduce(Route(8, 1, 8), LINKS)
    assert found.s_per_byte == pytest.approx(2 * 7 / 8 / LINKS.device.speed())
    assert found.latency_s == pytest.approx(6 * LINKS.device.latency_s)


def test_groups_share_the_network_cards_of_a_node():
    mesh = DeviceMesh.whole(Cluster(16, 8))
    alone = route_of(mesh.ranks, mesh)  # one group of all ranks: all cards are its own
    one_of_eight = route_of(mesh.ranks[::8], mesh)
    assert (alone.n_nodes, alone.per_node, alone.n_active) == (16, 8, 8)
    assert (one_of_eight.n_nodes, one_of_eight.per_node, one_of_eight.n_active) == (16, 1, 8)
    card = LINKS.node.speed()
    assert all_gather(one_of_eight, LINKS).s_per_byte == pytest.approx(15 / 16 / card)
    assert all_gather(alone, LINKS).s_per_byte == pytest.approx(max(15 / 16 / (8 * card), 7 / 8 / LINKS.device.speed()))


@given(st.integers(1, 8), st.integers(1, 16), st.floats(1, 1e10), st.floats(1, 1e10))
def test_more_bytes_and_more_nodes_never_take_less(per_node, n_nodes, n_bytes, more):
    route, wider = Route(per_node * n_nodes, n_nodes, 8), Route(2 * per_node * n_nodes, 2 * n_nodes, 8)
    assert all_reduce(route, LINKS)(n_bytes) <= all_reduce(route, LINKS)(n_bytes + more)
    assert all_reduce(route, LINKS)(n_bytes) <= all_reduce(wider, LINKS)(n_bytes) + 1e-12
    assert all_reduce(route, LINKS)(n_bytes) == pytest.approx(2 * all_gather(route, LINKS)(n_bytes))


def test_messages():
    assert send(False, 8, LINKS)(1e9) == pytest.approx(LINKS.device.latency_s + 1e9 / LINKS.device.speed())
    assert send(True, 8, LINKS)(1e9) > send(False, 8, LINKS)(1e9)
