"""The messages of a reallocation: both ends of every pair agree, nothing is forgotten, and buckets bound them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from realrl.engine.parameters.realloc_rounds import Message, Round, ShardSlice, rounds_of
from realrl.plan.memory.buffers import REALLOC_ROUNDS
from realrl.plan.parameters.realloc import ReallocPlan, SliceTransfer, plan_realloc
from realrl.plan.parameters.specs import Slice
from tests.ranks.test_realloc import MODELS, parameter_specs, random_layout

ITEM_BYTES = {"float32": 4, "bfloat16": 2}


def num_bytes(messages: tuple[Message, ...]) -> int:
    return sum(message.num_elements * ITEM_BYTES[message.dtype] for message in messages)


def all_rounds(plan: ReallocPlan, bucket_bytes: int) -> dict[int, tuple[Round, ...]]:
    dtypes = {spec.name: spec.dtype for spec in plan.source_layout.specs}
    return {rank: rounds_of(plan, rank, dtypes, bucket_bytes=bucket_bytes) for rank in plan.ranks}


def rows_of(slices: Slice) -> Iterator[tuple[object, ...]]:
    """The rows of a matrix or a stack of them, or the elements of a vector."""
    *leading, last = slices if len(slices) > 1 else (*slices, None)
    return ((*indices, last) for indices in product(*(range(*where) for where in leading)))


def shape_of(message: Message) -> tuple[object, ...]:
    """Return what both ends must agree on."""
    return message.dtype, tuple((piece.parameter, piece.shape) for piece in message.pieces)


def n_pairs_of(transfers: Iterable[SliceTransfer]) -> int:
    return len({(one.source, one.target, one.origin) for one in transfers})


@settings(max_examples=15)
@given(
    st.integers(0, 10**6),
    st.sampled_from([250, 2000, 20_000, 1 << 30]),
    st.sampled_from([(1, 8), (2, 2), (2, 4), (3, 3), (4, 2), (2, 8)]),
)
def test_rounds(seed: int, bucket_bytes: int, cluster: tuple[int, int]) -> None:
    rng, (n_nodes, node_size) = random.Random(seed), cluster
    specs = parameter_specs(rng.choice(MODELS))
    layouts = (random_layout(specs, n_nodes * node_size, rng) for _ in range(2))
    plan = plan_realloc(*layouts, node_of=lambda rank: rank // node_size)
    rounds = all_rounds(plan, bucket_bytes)
    longest = max(spec.shape[-1] for spec in specs) * 4
    for rank, mine in rounds.items():
        assert sum(num_bytes(r.sends) for r in mine) == plan.bytes_sent(rank)
        assert sum(num_bytes(r.receives) for r in mine) == plan.bytes_received(rank)
        assert not mine or mine[-1].sends or mine[-1].receives
        n_sent, n_received = map(n_pairs_of, (plan.transfers_from(rank), plan.transfers_to(rank)))
        for number, current in enumerate(mine):
            for message in current.sends:
                theirs = [m for m in rounds[message.peer][number].receives if m.peer == rank]
                ours = [m for m in current.sends if m.peer == message.peer]
                assert [shape_of(m) for m in ours] == [shape_of(m) for m in theirs]
            for messages, n_pairs in ((current.sends, n_sent), (current.receives, n_received)):
                assert num_bytes(messages) <= bucket_bytes + n_pairs * max(longest, bucket_bytes // 64)
        _check_pieces(plan, rank, mine)
        _check_relay(mine)
    _check_that_nobody_waits_for_ever(rounds)


def _check_relay(rounds: tuple[Round, ...]) -> None:
    """Pieces that are passed on have come, as they are, by the time that the round is sent."""
    came = [piece for current in rounds for m in current.receives if not m.is_passed_on for piece in m.pieces]
    assert len(set(came)) == len(came)
    there: set[ShardSlice] = set()
    for number, current in enumerate(rounds):
        if number >= REALLOC_ROUNDS:  # the round before which this one is sent is done
            done = rounds[number - REALLOC_ROUNDS]
            there = {piece for m in done.receives for piece in m.pieces}
        for message in current.sends:
            assert not message.is_passed_on or there.issuperset(message.pieces)


def _check_that_nobody_waits_for_ever(rounds: dict[int, tuple[Round, ...]]) -> None:
    """Each rank waits for its rounds one after the other, and sends a round when that of two before is done."""
    done = dict.fromkeys(rounds, 0)

    def is_posted(rank: int, number: int) -> bool:
        return number < done[rank] + REALLOC_ROUNDS

    while True:
        ready = [
            rank
            for rank, number in done.items()
            if number < len(rounds[rank])
            and all(
                is_posted(message.peer, number)
                for message in (*rounds[rank][number].sends, *rounds[rank][number].receives)
            )
        ]
        if not ready:
            break
        done[ready[0]] += 1
    assert done == {rank: len(mine) for rank, mine in rounds.items()}


def _check_pieces(plan: ReallocPlan, rank: int, rounds: tuple[Round, ...]) -> None:
    """Row by row, what is sent and received is what the plan says."""
    for transfers, is_sender in ((plan.transfers_from(rank), True), (plan.transfers_to(rank), False)):
        planned: Counter[tuple[object, ...]] = Counter()
        for t in transfers:
            peer, slices = (t.target, t.source_slice) if is_sender else (t.source, t.target_slice)
            planned.update((peer, t.parameter, *row) for row in rows_of(slices))
        found: Counter[tuple[object, ...]] = Counter()
        for current in rounds:
            for message in current.sends if is_sender else current.receives:
                for piece in message.pieces:
                    found.update((message.peer, piece.parameter, *row) for row in rows_of(piece.slices))
        assert found == planned
