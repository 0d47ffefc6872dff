"""Messages of a reallocation on one rank, and the rounds in which they travel.

A relay passes on in round k + `REALLOC_ROUNDS` what it gets from another node in round k: the first that is sent after
round k has come: while it is passed on inside the node, later rounds cross between nodes.

Invariants of `rounds_of`:
    - every transfer of the rank lies in its messages exactly once, whole or cut into rows;
    - two ranks derive the same messages for each other, and put the n-th messages of a pair into the same round. So
      ranks that go through their rounds in order never wait for a later one;
    - a relay passes on only what has come `REALLOC_ROUNDS` rounds before, in the rows in which it has come;
    - the messages of one rank in one round and direction hold at most `bucket_bytes`, plus for each pair of ranks
      whose bytes are among them one row of a matrix (stacked matrices are cut inside too) or the smallest share worth
      a message (a 64th of the bucket);
    - a message holds one dtype; small slices share a message, a large slice has its own and can travel without a copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from math import prod
from typing import NamedTuple

from realrl.plan.memory.buffers import REALLOC_LARGE, REALLOC_ROUNDS
from realrl.plan.parameters.realloc import ReallocPlan, SliceTransfer
from realrl.plan.parameters.specs import Slice

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
    """Pieces that travel one after the other, as one flat tensor.

    Attributes:
        is_passed_on: the sender is a relay, which takes the pieces from its shard of the target layout.
    """

    peer: int
    dtype: str
    pieces: tuple[ShardSlice, ...]
    is_passed_on: bool = False

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

    All pairs of ranks spread their bytes evenly over as many rounds as the rank with the most bytes needs; relays pass
    theirs on as they come.

    Args:
        dtypes: parameter name -> dtype.
        bucket_bytes: limit of one round in each direction; the same on every rank.
    """
    busiest = max(max(plan.bytes_received(peer), plan.bytes_sent(peer)) for peer in plan.ranks)
    cutter = _Cutter(plan, max(-(-busiest // bucket_bytes), 1), bucket_bytes)
    sends, receives = (
        [
            [tuple(_pack(parts, peer, dtypes, is_sender=is_sender)) for parts in cutter.cut(transfers)]
            for (peer, _), transfers in _grouped(found, by_target=is_sender).items()
        ]
        for found, is_sender in ((plan.transfers_from(rank), True), (plan.transfers_to(rank), False))
    )
    rounds = zip_longest(zip_longest(*sends, fillvalue=()), zip_longest(*receives, fillvalue=()), fillvalue=())
    return tuple(
        Round(tuple(m for peer in out for m in peer), tuple(m for peer in into for m in peer)) for out, into in rounds
    )


def _grouped(transfers: Sequence[SliceTransfer], *, by_target: bool) -> dict[tuple[int, bool], list[SliceTransfer]]:
    """Transfers by peer, and whether they are passed on by a relay; peers ascending."""
    groups: dict[tuple[int, bool], list[SliceTransfer]] = {}
    for transfer in transfers:
        peer = transfer.target if by_target else transfer.source
        groups.setdefault((peer, transfer.origin is not None), []).append(transfer)
    return dict(sorted(groups.items()))


class _Part(NamedTuple):
    """Rows of a transfer, of all of it or of one matrix of a stack."""

    transfer: SliceTransfer
    matrix: int | None
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return _row_bytes(self.transfer, self.matrix) * (self.stop - self.start)

    def piece(self, *, is_sender: bool) -> ShardSlice:
        """Its place in the shard of one end."""
        slices = list(self.transfer.source_slice if is_sender else self.transfer.target_slice)
        if self.matrix is not None:
            first = slices[0][0] + self.matrix
            slices[0] = (first, first + 1)
        dim = _row_dim(self.transfer, self.matrix)
        first = slices[dim][0]
        slices[dim] = (first + self.start, first + self.stop)
        return ShardSlice(self.transfer.parameter, tuple(slices))


class _Cutter:
    """Cuts the transfers between two ranks into rounds."""

    def __init__(self, plan: ReallocPlan, n_rounds: int, bucket_bytes: int) -> None:
        self._plan = plan
        self._n_rounds = n_rounds
        self._bucket_bytes = bucket_bytes
        self._arrivals_at: dict[int, dict[tuple[str, Slice], list[tuple[int, _Part]]]] = {}

    def cut(self, transfers: Sequence[SliceTransfer]) -> list[list[_Part]]:
        """Parts by round, of transfers from one rank to another that are all passed on by a relay, or none of them."""
        relay = transfers[0].source
        if transfers[0].origin is None:
            return list(_rounds(transfers, self._limit(transfers)))
        if relay not in self._arrivals_at:
            self._arrivals_at[relay] = self._arrivals(relay)
        rounds: list[list[_Part]] = []
        for transfer in transfers:
            for number, part in self._arrivals_at[relay][transfer.parameter, transfer.source_slice]:
                rounds += [[] for _ in range(number + REALLOC_ROUNDS + 1 - len(rounds))]
                rounds[number + REALLOC_ROUNDS].append(part._replace(transfer=transfer))
        return rounds

    def _arrivals(self, relay: int) -> dict[tuple[str, Slice], list[tuple[int, _Part]]]:
        """Place in the relay's shard of the target layout -> the rounds in which it arrives, and its rows in them."""
        found: dict[tuple[str, Slice], list[tuple[int, _Part]]] = {}
        for transfers in _grouped(self._plan.direct_transfers_to(relay), by_target=False).values():
            for number, parts in enumerate(self.cut(transfers)):
                for part in parts:
                    place = (part.transfer.parameter, part.transfer.target_slice)
                    found.setdefault(place, []).append((number, part))
        return found

    def _limit(self, transfers: Sequence[SliceTransfer]) -> int:
        """Limit, in bytes, of one round from one rank to another."""
        num_bytes = sum(transfer.num_bytes for transfer in transfers)
        return max(-(-num_bytes // self._n_rounds), self._bucket_bytes // _SMALLEST_SHARE, 1)


def _rounds(transfers: Iterable[SliceTransfer], limit: int) -> Iterator[list[_Part]]:
    """Parts of the transfers, in order, by round."""
    parts: list[_Part] = []
    space = limit
    for transfer in transfers:
        for matrix in _matrices(transfer, limit):
            n_rows, row_bytes = _extent(transfer, _row_dim(transfer, matrix)), _row_bytes(transfer, matrix)
            row = 0
            while row < n_rows:
                if space < row_bytes and parts:
                    yield parts
                    parts, space = [], limit
                end = min(row + max(space // row_bytes, 1), n_rows)
                parts.append(_Part(transfer, matrix, row, end))
                space -= (end - row) * row_bytes
                row = end
    yield parts


def _pack(parts: Sequence[_Part], peer: int, dtypes: Mapping[str, str], *, is_sender: bool) -> Iterator[Message]:
    small: dict[str, list[ShardSlice]] = {}
    large: list[Message] = []
    is_passed_on = bool(parts) and parts[0].transfer.origin is not None
    for part in parts:
        piece, dtype = part.piece(is_sender=is_sender), dtypes[part.transfer.parameter]
        if part.num_bytes >= REALLOC_LARGE:
            large.append(Message(peer, dtype, (piece,), is_passed_on))
        else:
            small.setdefault(dtype, []).append(piece)
    for dtype, pieces in small.items():
        yield Message(peer, dtype, tuple(pieces), is_passed_on)
    yield from large


def _matrices(transfer: SliceTransfer, limit: int) -> Iterable[int | None]:
    """The matrices of a stack, such as those of experts, if a single one exceeds `limit`; else the whole, as None."""
    n_matrices = _extent(transfer, 0)
    is_cut = len(transfer.source_slice) > 2 and transfer.num_bytes > limit * n_matrices
    return range(n_matrices) if is_cut else (None,)


def _row_dim(transfer: SliceTransfer, matrix: int | None) -> int:
    """The dim along which a transfer is cut: 0, or 1 for a single matrix of a stack."""
    is_single = matrix is not None or (len(transfer.source_slice) > 2 and _extent(transfer, 0) == 1)
    return 1 if is_single else 0


def _row_bytes(transfer: SliceTransfer, matrix: int | None) -> int:
    num_bytes = transfer.num_bytes if matrix is None else transfer.num_bytes // _extent(transfer, 0)
    return num_bytes // _extent(transfer, _row_dim(transfer, matrix))


def _extent(transfer: SliceTransfer, dim: int) -> int:
    start, stop = transfer.source_slice[dim]
    return stop - start
