from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realrl.mesh.device_mesh import Allocation, Cluster, DeviceMesh
from realrl.mesh.notation import parse_strategy
from realrl.plan.memory.buffers import REALLOC_BUCKET
from realrl.plan.samples.transfer import RowTransfer
from realrl.sim.costs.moves import ROW_BYTES, RowBytes, copy_seconds, exchange_seconds, pull_seconds, realloc_of
from realrl.sim.costs.moves import realloc_seconds as seconds_of
from realrl.sim.durations import SampleSizes
from tests.sim.costs.models import hardware, small

A100 = hardware()
NO_LATENCY = replace(
    A100.links, device=replace(A100.links.device, latency_s=0.0), node=replace(A100.links.node, latency_s=0.0)
)
PACKING = replace(A100, device=replace(A100.device, tensor_s=1e-4))
CLUSTER = Cluster(2, 4)
MODEL = small()


def place(text, first, last):
    return Allocation(DeviceMesh(CLUSTER, tuple(range(first, last + 1))), parse_strategy(text))


def seconds(plan, links=NO_LATENCY):
    return seconds_of(plan, replace(A100, links=links), CLUSTER.node_of)


def test_inside_a_node_the_busiest_rank_decides():
    plan = realloc_of(MODEL, place("t4", 0, 3), place("d2t2", 0, 3))
    most = max(max(plan.bytes_received(rank), plan.bytes_sent(rank)) for rank in plan.ranks)
    assert seconds(plan) == pytest.approx(most / A100.links.device.speed())
    assert seconds(plan, A100.links) == pytest.approx(seconds(plan) + A100.links.device.latency_s)


@pytest.mark.parametrize(("source", "target", "share"), [("t4", "d2t2", 2.0), ("p4", "t4", 1.25), ("p2t2", "p4", 0.75)])
def test_tensors_of_a_stage_are_packed_and_unpacked(source, target, share):
    plan = realloc_of(MODEL, place(source, 0, 3), place(target, 0, 3))
    n_tensors = len(plan.source_layout.specs)
    packing = seconds_of(plan, PACKING, CLUSTER.node_of) - seconds_of(plan, A100, CLUSTER.node_of)
    assert packing == pytest.approx(share * n_tensors * 1e-4)


def test_between_nodes_the_cards_decide():
    plan = realloc_of(MODEL, place("t4", 0, 3), place("d4", 4, 7))
    model = sum(spec.num_bytes for spec in plan.source_layout.specs)
    assert plan.bytes_between_nodes == sum(plan.bytes_to_other_nodes(rank) for rank in range(4)) == model
    links = replace(NO_LATENCY, node=replace(NO_LATENCY.node, sharing=1))
    assert seconds(plan, links) == pytest.approx(model / links.node.speed())
    busiest = max(max(plan.bytes_from_other_nodes(r), plan.bytes_to_other_nodes(r)) for r in range(8))
    assert seconds(plan) >= busiest / NO_LATENCY.node.speed()


def test_what_stays_takes_no_time():
    plan = realloc_of(MODEL, place("t2", 0, 1), place("t2", 0, 1))
    assert seconds_of(plan, PACKING, CLUSTER.node_of) == 0.0


@settings(max_examples=20)
@given(
    st.sampled_from([("t4", 0, 3), ("p4", 0, 3), ("d2p2", 4, 7), ("d8", 0, 7), ("t2p4", 0, 7)]),
    st.sampled_from([("t4", 0, 3), ("d4", 4, 7), ("t2d2", 0, 3), ("d4t2", 0, 7)]),
)
def test_bytes_over_bandwidth_is_the_least(source, target):
    plan = realloc_of(MODEL, place(*source), place(*target))
    found = seconds(plan)
    for rank in plan.ranks:
        inside = plan.bytes_received(rank) - plan.bytes_from_other_nodes(rank)
        assert found >= inside / A100.links.device.speed() * (1 - 1e-12)
    assert found >= plan.bytes_between_nodes / 2 / 4 / A100.links.node.speed() * (1 - 1e-12)
    assert seconds(plan, A100.links) <= found + 4 * A100.links.node.latency_s  # a bucket holds this model
    assert sum(spec.num_bytes for spec in plan.source_layout.specs) < REALLOC_BUCKET


def test_copies_to_host_memory():
    host = A100.links.host
    assert copy_seconds(0, 8, A100) == 0.0
    assert copy_seconds(1e9, 8, A100) == pytest.approx(host.latency_s + 1e9 / host.speed(8))


def test_rows():
    bytes_of = RowBytes({"a": SampleSizes((3,), (4,)), "b": SampleSizes((5, 5), (1, 2))})
    near, far = RowTransfer(0, 1, "x", ("a", "b")), RowTransfer(0, 5, "x", ("a",))
    assert [bytes_of(near), bytes_of(far)] == [20 * ROW_BYTES, 7 * ROW_BYTES]
    other_key = RowTransfer(0, 1, "y", ("a", "b"))  # one message for both
    pulled = pull_seconds([near, far, other_key], bytes_of, A100)
    host = A100.host
    assert pulled == pytest.approx(4 * host.message_s + 47 * ROW_BYTES / host.socket_bytes_per_s)
    slow = replace(A100, host=replace(host, pull_s=0.5, row_s=0.01))
    pulled = pull_seconds([near, far, other_key], bytes_of, slow)
    assert pulled == pytest.approx(2 * 0.5 + 5 * 0.01 + 47 * ROW_BYTES / host.socket_bytes_per_s)
    both = exchange_seconds([near, far], bytes_of, A100, CLUSTER.node_of)
    links = A100.links
    expected = 20 * ROW_BYTES / links.device.speed() + 7 * ROW_BYTES / links.node.speed() + links.node.latency_s
    assert both == pytest.approx(expected)
    assert exchange_seconds([], bytes_of, A100, CLUSTER.node_of) == 0.0
