"""Messages of a reallocation on one rank, and the rounds in which they travel.

Invariants of `rounds_of`:
    - every transfer of the rank lies in its messages exactly once, whole or cut into rows;
    - two ranks derive the same messages for each other, and put the n-th messages of a pair into the n-th round. So
      ranks that go through their rounds in order never wait for a later one;
    - the messages of one rank in one round and direction hold at most `bucket_bytes`, plus for each peer one row of a
      matrix (stacked matrices are cut inside too) or the smallest share worth a message (a 64th of the bucket);
    - a message holds one dtype; small slices share a message, a large slice has its own and can travel without a copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from math import prod

from realrl.plan.parameters.realloc import ReallocPlan, SliceTransfer
from realrl.plan.parameters.specs import Slice

_LARGE_BYTES = 1 << 20  # below, a copy into a shared message costs less than a message
_SMALLEST_SHARE = 64


@dataclass(frozen=True)
class ShardSlice:
    """Slice of a parameter, in coordinates of this rank's own shard."""

    parameter: str
    slices: Slice

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.slices)

    @property
    def num_elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Message:
    """Pieces that travel one after the other, as one flat tensor."""

    peer: int
    dtype: str
    pieces: tuple[ShardSlice, ...]

    @property
    def num_elements(self) -> int:
        return sum(piece.num_elements for piece in self.pieces)


@dataclass(frozen=True)
class Round:
    """Messages that a rank sends and receives together."""

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]


def rounds_of(plan: ReallocPlan, rank: int, dtypes: Mapping[str, str], *, bucket_bytes: int) -> tuple[Round, ...]:
    """Rounds of one rank, which has nothing to do in later ones.

    All pairs of ranks spread their bytes evenly over as many rounds as the rank with the most bytes needs.

    Args:
        dtypes: parameter name -> dtype.
        bucket_bytes: limit of one round in each direction; the same on every rank.
    """
    busiest = max(max(plan.bytes_received(peer), plan.bytes_sent(peer)) for peer in plan.ranks)
    n_rounds = max(-(-busiest // bucket_bytes), 1)
    sends, receives = (
        [
            _messages(transfers, peer, dtypes, _limit(transfers, n_rounds, bucket_bytes))
            for peer, transfers in _grouped(found, by_target=is_sender).items()
        ]
        for found, is_sender in ((plan.transfers_from(rank), True), (plan.transfers_to(rank), False))
    )
    rounds = zip_longest(zip_longest(*sends, fillvalue=()), zip_longest(*receives, fillvalue=()), fillvalue=())
    return tuple(
        Round(tuple(m for peer in out for m in peer), tuple(m for peer in into for m in peer)) for out, into in rounds
    )


def _limit(transfers: Sequence[SliceTransfer], n_rounds: int, bucket_bytes: int) -> int:
    """Limit, in bytes, of one round from one rank to another."""
    num_bytes = sum(transfer.num_bytes for transfer in transfers)
    return max(-(-num_bytes // n_rounds), bucket_bytes // _SMALLEST_SHARE, 1)


def _grouped(transfers: Sequence[SliceTransfer], *, by_target: bool) -> dict[int, list[SliceTransfer]]:
    """Transfers by peer, peers ascending."""
    groups: dict[int, list[SliceTransfer]] = {}
    for transfer in transfers:
        groups.setdefault(transfer.target if by_target else transfer.source, []).append(transfer)
    return dict(sorted(groups.items()))


def _messages(
    transfers: Sequence[SliceTransfer], peer: int, dtypes: Mapping[str, str], limit: int
) -> list[list[Message]]:
    """Messages of the transfers with one peer, per round."""
    is_sender = transfers[0].target == peer
    rounds: list[list[Message]] = []
    parts: list[tuple[SliceTransfer, int, int]] = []
    space = limit
    for transfer in (part for whole in transfers for part in _unstacked(whole, limit)):
        n_rows = _n_rows(transfer)
        row_bytes = transfer.num_bytes // n_rows
        row = 0
        while row < n_rows:
            if space < row_bytes and parts:
                rounds.append(list(_pack(parts, peer, dtypes, is_sender)))
                parts, space = [], limit
            end = min(row + max(space // row_bytes, 1), n_rows)
            parts.append((transfer, row, end))
            space -= (end - row) * row_bytes
            row = end
    rounds.append(list(_pack(parts, peer, dtypes, is_sender)))
    return rounds


def _pack(
    parts: Sequence[tuple[SliceTransfer, int, int]], peer: int, dtypes: Mapping[str, str], is_sender: bool
) -> Iterator[Message]:
    small: dict[str, list[ShardSlice]] = {}
    large: list[Message] = []
    for transfer, start, stop in parts:
        piece = _piece(transfer, start, stop, is_sender)
        dtype = dtypes[transfer.parameter]
        if transfer.num_bytes // _n_rows(transfer) * (stop - start) >= _LARGE_BYTES:
            large.append(Message(peer, dtype, (piece,)))
        else:
            small.setdefault(dtype, []).append(piece)
    for dtype, pieces in small.items():
        yield Message(peer, dtype, tuple(pieces))
    yield from large


def _piece(transfer: SliceTransfer, start: int, stop: int, is_sender: bool) -> ShardSlice:
    slices = list(transfer.source_slice if is_sender else transfer.target_slice)
    dim = _row_dim(transfer)
    first = slices[dim][0]
    slices[dim] = (first + start, first + stop)
    return ShardSlice(transfer.parameter, tuple(slices))


def _unstacked(transfer: SliceTransfer, limit: int) -> Iterator[SliceTransfer]:
    """Split stacked matrices, such as those of experts, if a single one exceeds `limit`; keep other transfers whole."""
    n_matrices = _extent(transfer, 0)
    if len(transfer.source_slice) < 3 or transfer.num_bytes <= limit * n_matrices:
        yield transfer
        return
    for i in range(n_matrices):
        source, target = (
            ((where[0][0] + i, where[0][0] + i + 1), *where[1:])
            for where in (transfer.source_slice, transfer.target_slice)
        )
        num_bytes = transfer.num_bytes // n_matrices
        yield replace(transfer, source_slice=source, target_slice=target, num_bytes=num_bytes)


def _row_dim(transfer: SliceTransfer) -> int:
    """The dim along which a transfer is cut: 0, or 1 for a single matrix of a stack."""
    return 1 if len(transfer.source_slice) > 2 and _extent(transfer, 0) == 1 else 0


def _n_rows(transfer: SliceTransfer) -> int:
    return _extent(transfer, _row_dim(transfer))


def _extent(transfer: SliceTransfer, dim: int) -> int:
    start, stop = transfer.source_slice[dim]
    return stop - start
