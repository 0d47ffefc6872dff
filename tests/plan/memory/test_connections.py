"""Memory of NCCL's connections, against counts by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from realrl.graph.mfc import InterfaceType
from realrl.mesh.device_mesh import Allocation, Cluster, DeviceMesh, ParallelStrategy
from realrl.plan.groups import process_groups
from realrl.plan.hooks import CallHooks, Realloc
from realrl.plan.memory.connections import (
    CONNECTION,
    MESSAGE_CHANNELS,
    RING_CHANNELS,
    connection_bytes,
)
from realrl.plan.memory.load import Load
from realrl.plan.memory.plan import CallState, RoleState
from realrl.shape import DecoderConfig

MODEL = DecoderConfig(64, 16, 8, 8, 8, 2, 32)
RING, PAIR = RING_CHANNELS * CONNECTION, MESSAGE_CHANNELS * CONNECTION


def place(cluster: Cluster, **sizes: int) -> Allocation:
    return Allocation(DeviceMesh.whole(cluster), ParallelStrategy(**sizes))


def planned(
    home: Allocation, elsewhere: Allocation | None = None, *, any_rows: bool = False
) -> list[tuple[float, float]]:
    """Rings and pairs of each rank, for a role that is trained at home and generates elsewhere."""
    calls = [CallState("train", "actor", InterfaceType.TRAIN_STEP, home, CallHooks(), Load(1))]
    if elsewhere is not None:
        hooks = CallHooks((Realloc("actor", home, "actor", elsewhere),))
        calls.append(CallState("gen", "actor", InterfaceType.GENERATE, elsewhere, hooks, Load(1)))
    cluster = home.mesh.cluster
    found = connection_bytes(
        process_groups([call.allocation for call in calls], cluster),
        {"actor": RoleState(MODEL, home, is_trained=True)},
        calls,
        node_of=cluster.node_of,
        any_rows=any_rows,
    )
    assert [*found] == list(range(cluster.n_devices))
    counts = []
    for n_bytes in found.values():
        n_rings = next(n for n in range(9) if (n_bytes - n * RING) % PAIR == 0 and n_bytes >= n * RING)
        counts.append((n_rings, (n_bytes - n_rings * RING) // PAIR))
    return counts


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"dp": 1}, [(0, 0)]),
        ({"dp": 4}, [(1, 0)] * 4),
        # rows inside the replica, over the world; the first collects what is saved, over a group of the same members
        ({"tp": 4}, [(1, 3)] * 4),
        # two rings each; the mate in tp in the world and in the group
        ({"dp": 2, "tp": 2}, [(2, 2)] * 4),
        # one group of both stages, which is the world, the pipeline and the tied group at once
        ({"pp": 2}, [(1, 1)] * 2),
    ],
)
def test_one_node(sizes: dict[str, int], expected: list[tuple[int, int]]) -> None:
    assert planned(place(Cluster(1, len(expected)), **sizes)) == expected


def test_stages_talk_to_their_neighbours_and_to_the_first() -> None:
    counts = planned(place(Cluster(1, 8), pp=4, dp=2))
    n_rings, n_pairs = zip(*counts, strict=True)
    # the pipeline and data groups; the two ends have the tied group too
    assert n_rings == (3, 3, 2, 2, 2, 2, 3, 3)
    # three mates in the world; in the pipeline the first has three, the second two, the third three, the last two
    assert n_pairs == (6, 6, 5, 5, 6, 6, 5, 5)


def test_parameters_that_move() -> None:
    home, nested = place(Cluster(1, 4), dp=2, tp=2), place(Cluster(1, 4), dp=4)
    alone = planned(home)
    # each rank lacks the half that its mates in tp hold, one of which it sends to anyway; a group of four more
    moved = planned(home, nested)
    assert [rings for rings, _ in moved] == [rings + 1 for rings, _ in alone]
    assert all(pairs >= before for (_, pairs), (_, before) in zip(moved, alone, strict=True))
    assert planned(place(Cluster(1, 4), dp=4), place(Cluster(1, 4), tp=4))[3] == (1, 3)  # nothing moves, one group


def test_rows_of_the_collective_plane_may_go_anywhere() -> None:
    assert planned(place(Cluster(1, 4), dp=4), any_rows=True) == [(1, 3)] * 4


def test_pairs_on_different_nodes_take_nothing() -> None:
    assert planned(place(Cluster(2, 2), dp=4), any_rows=True) == [(1, 1)] * 4
    assert planned(place(Cluster(4, 1), tp=4)) == [(1, 0)] * 4


def test_a_role_without_a_model_moves_nothing() -> None:
    home = place(Cluster(1, 2), dp=2)
    call = CallState("rew", "reward", InterfaceType.INFERENCE, home, CallHooks(), Load(1))
    groups = process_groups([home], home.mesh.cluster)
    found = connection_bytes(groups, {}, [call], node_of=home.mesh.cluster.node_of, any_rows=False)
    assert found == {0: RING, 1: RING}
    hooks = CallHooks((Realloc("reward", home, "reward", place(Cluster(1, 2), tp=2)),))
    moving = replace(call, hooks=hooks)
    assert connection_bytes(groups, {}, [moving], node_of=home.mesh.cluster.node_of, any_rows=False) == found
