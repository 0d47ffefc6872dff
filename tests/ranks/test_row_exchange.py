"""Sample rows between gloo ranks: they arrive as they were stored, uneven batches and idle ranks included."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist

from realrl.data.rows import SampleStore, encode_rows
from realrl.data.sample import SampleError, SequenceSample
from realrl.engine.groups import ALONE, Communicator
from realrl.engine.row_exchange import exchange_rows
from realrl.errors import TransportError
from realrl.plan.samples.placements import Placement
from realrl.plan.samples.transfer import RowTransfer, Share, plan_transfers
from tests.data.samples import SCHEMAS, make_sample
from tests.helpers.ranks import run_ranks

CPU = torch.device("cpu")
KEYS = tuple(SCHEMAS)


def held_by(rank: int, n_samples: int) -> SequenceSample:
    """The batch that a rank produced: other lengths on every rank."""
    rng = random.Random(rank)
    return make_sample([[rng.randint(1, 9) for _ in range(rng.randint(1, 3))] for _ in range(n_samples)], f"r{rank}-")


def random_transfers(world_size: int, n_samples: int, seed: int) -> list[RowTransfer]:
    rng = random.Random(seed)
    found = []
    for _ in range(12 * world_size):
        source, target = rng.sample(range(world_size), 2)
        ids = tuple(rng.sample(held_by(source, n_samples).ids, rng.randint(0, n_samples)))
        found.append(RowTransfer(source, target, rng.choice(KEYS), ids))
    return found


def _exchange(rank: int, world_size: int, seeds: list[int], n_samples: int) -> None:
    world = Communicator(dist.group.WORLD, world_size, rank)
    mine = held_by(rank, n_samples)
    for seed in seeds:
        transfers = random_transfers(world_size, n_samples, seed)
        store = SampleStore()
        store.put(mine)
        incoming = [t for t in transfers if t.target == rank and t.ids]
        n_bytes = exchange_rows(transfers, store=store, world=world, device=CPU)
        assert n_bytes == sum(len(encode_rows(_rows(t, n_samples))) for t in incoming)
        for t in incoming:
            expected, arrived = _rows(t, n_samples), store.get(t.ids, (t.key,))
            assert (arrived.ids, arrived.schemas, arrived.seqlens) == (t.ids, expected.schemas, expected.seqlens)
            assert torch.equal(arrived[t.key], expected[t.key])
        wanted = {(i, t.key) for t in incoming for i in t.ids}
        others = [i for r in range(world_size) if r != rank for i in held_by(r, n_samples).ids]
        assert {(i, k) for i in others for k in KEYS} - set(store.missing(others, KEYS)) == wanted


def _through_relays(rank: int, world_size: int, n_samples: int) -> int:
    """Two nodes of two ranks, which all need the rows of rank 0; returns the bytes received from another node."""
    store, mine = SampleStore(), held_by(0, n_samples)
    if rank == 0:
        store.put(mine)
    placements = {key: dict.fromkeys(mine.ids, Placement(frozenset({0}))) for key in KEYS}
    share = Share(tuple(range(world_size)), mine.ids)
    routes, _ = plan_transfers([share], placements, node_of=lambda rank: rank // 2)
    world = Communicator(dist.group.WORLD, world_size, rank)
    exchange_rows([r for r in routes if rank in (r.source, r.target)], store=store, world=world, device=CPU)
    for key in KEYS:
        assert torch.equal(store.get(mine.ids, (key,))[key], mine[key])
    far = [r for r in routes if r.target == rank and r.source // 2 != rank // 2]
    return sum(store.get(r.ids, (r.key,))[r.key].nbytes for r in far)


def test_rows_cross_to_a_node_once_and_are_passed_on() -> None:
    n_samples = 6
    crossed = run_ranks(4, _through_relays, n_samples)
    assert sum(crossed) == sum(held_by(0, n_samples)[key].nbytes for key in KEYS)
    assert crossed[:2] == [0, 0]
    assert min(crossed[2:]) > 0


def _rows(transfer: RowTransfer, n_samples: int) -> SequenceSample:
    store = SampleStore()
    store.put(held_by(transfer.source, n_samples))
    return store.get(transfer.ids, (transfer.key,))


@pytest.mark.parametrize("world_size", [2, 4])
def test_planned_rows_arrive_and_nothing_else(world_size: int) -> None:
    run_ranks(world_size, _exchange, [1, 2, 3], 7)


def _few_take_part(rank: int, world_size: int) -> list[int]:
    """Ranks without a transfer need not call, or may call with nothing; whoever calls twice fetches the second list."""
    world = Communicator(dist.group.WORLD, world_size, rank)
    store = SampleStore()
    store.put(held_by(rank, 3))
    routes = [
        [RowTransfer(0, 2, "input_ids", ("r0-2", "r0-0")), RowTransfer(0, 2, "rewards", ("r0-2",))],
        [
            RowTransfer(2, 0, "hidden", ("r2-1",)),
            RowTransfer(0, 2, "hidden", ("r0-1",)),
            RowTransfer(1, 2, "weight", ()),
        ],
    ]
    if rank == 1:
        return [exchange_rows(routes[1], store=store, world=world, device=CPU)]
    return [exchange_rows(transfers, store=store, world=world, device=CPU) for transfers in routes]


def test_idle_ranks_stay_idle() -> None:
    received = run_ranks(3, _few_take_part)
    assert received[1] == [0]
    assert [n > 0 for n in received[0]] == [False, True]
    assert [n > 0 for n in received[2]] == [True, True]


def _unplanned(rank: int, world_size: int) -> str:
    """The two sides disagree about the list."""
    world = Communicator(dist.group.WORLD, world_size, rank)
    store = SampleStore()
    store.put(held_by(rank, 3))
    key = ["rewards", "weight"][rank]
    try:
        exchange_rows([RowTransfer(0, 1, key, ("r0-0", "r0-1"))], store=store, world=world, device=CPU)
    except TransportError as error:
        return error.message
    return ""


def test_rows_that_were_not_planned_are_refused() -> None:
    sender, receiver = run_ranks(2, _unplanned)
    assert sender == ""
    assert receiver == "worker 1 expected 'weight' of 2 samples from worker 0, but received rewards of 2 samples"


def test_a_single_worker_exchanges_nothing() -> None:
    assert exchange_rows([], store=SampleStore(), world=ALONE, device=CPU) == 0


def test_rows_for_oneself_and_rows_that_are_not_there_are_refused() -> None:
    with pytest.raises(TransportError, match="'rewards' were to go from worker 0 to itself"):
        exchange_rows([RowTransfer(0, 0, "rewards", ("a",))], store=SampleStore(), world=ALONE, device=CPU)
    with pytest.raises(SampleError, match="sample 'a' is not on this worker"):
        exchange_rows([RowTransfer(0, 1, "rewards", ("a",))], store=SampleStore(), world=ALONE, device=CPU)
