"""Rows of samples between workers, point to point over the global group: the collective twin of the socket data plane.

    store ──encode──► one message per peer ──exchange──► decode ──► store

Both ends derive the messages from the same list of transfers: one per (source, target), in two rounds. The first sends
sizes, the second the messages. Two more rounds follow, in which relays pass rows that came in these on in their node. A
message holds its transfers' rows in the order of the list::

    number of bytes (uint64, little endian) of each block | blocks as `encode_rows` writes them, padded to 16 bytes
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch

from realrl.data.rows import SampleStore, decode_rows, encode_frames
from realrl.engine.groups import Communicator
from realrl.errors import TransportError

_ALIGN = 16  # decoded tensors alias the message


class RowTransfer(Protocol):
    """Rows of `key` of the samples `ids`, from one global rank to another: a planned route or its message."""

    @property
    def source(self) -> int: ...
    @property
    def target(self) -> int: ...
    @property
    def key(self) -> str: ...
    @property
    def ids(self) -> tuple[str, ...]: ...
    @property
    def is_passed_on(self) -> bool: ...


def exchange_rows(
    transfers: Sequence[RowTransfer], *, store: SampleStore, world: Communicator, device: torch.device
) -> int:
    """Send rows that others lack, and receive those that this rank lacks into its store.

    Every rank that occurs in `transfers` calls this at the same position of its requests.

    Args:
        transfers: in the same order on all ranks. Those between other ranks may be left out; those without samples are
            ignored.
        world: the group of all ranks.
        device: where the group's backend needs its tensors.

    Returns:
        Bytes of the rows received, counted as over the socket.

    Raises:
        TransportError: a transfer is from a rank to itself, or rows came that were not planned.
        SampleError: rows to send are not in the store.
    """
    return sum(
        _exchange([t for t in transfers if t.is_passed_on == is_passed_on], store=store, world=world, device=device)
        for is_passed_on in (False, True)
    )


def _exchange(
    transfers: Sequence[RowTransfer], *, store: SampleStore, world: Communicator, device: torch.device
) -> int:
    outgoing, incoming = _by_peer(transfers, world.rank)
    messages = {peer: _pack(planned, store) for peer, planned in outgoing.items()}
    sizes = {peer: torch.zeros(1, dtype=torch.int64, device=device) for peer in incoming}
    world.exchange(
        [(peer, torch.tensor([len(message)], device=device)) for peer, message in messages.items()],
        list(sizes.items()),
    ).wait()
    received = {
        peer: torch.empty(int(size), dtype=torch.uint8, device=device) for peer, size in sizes.items()
    }  # reading a size waits for it
    world.exchange([(peer, message.to(device)) for peer, message in messages.items()], list(received.items())).wait()
    return sum(_unpack(message.cpu(), incoming[peer], store) for peer, message in received.items())


def _by_peer(
    transfers: Sequence[RowTransfer], rank: int
) -> tuple[Mapping[int, list[RowTransfer]], Mapping[int, list[RowTransfer]]]:
    """This rank's transfers by target and by source, peers ascending."""
    outgoing: dict[int, list[RowTransfer]] = {}
    incoming: dict[int, list[RowTransfer]] = {}
    for transfer in transfers:
        if not transfer.ids or rank not in (transfer.source, transfer.target):
            continue
        if transfer.source == transfer.target:
            raise TransportError(f"rows of {transfer.key!r} were to go from worker {rank} to itself", worker=rank)
        if transfer.source == rank:
            outgoing.setdefault(transfer.target, []).append(transfer)
        else:
            incoming.setdefault(transfer.source, []).append(transfer)
    return dict(sorted(outgoing.items())), dict(sorted(incoming.items()))


def _pack(transfers: Sequence[RowTransfer], store: SampleStore) -> torch.Tensor:
    """The message [number of bytes], uint8, in host memory."""
    blocks = [encode_frames(store.get(transfer.ids, (transfer.key,))) for transfer in transfers]
    sizes = [sum(len(frame) for frame in block) for block in blocks]
    header = struct.pack(f"<{len(sizes)}Q", *sizes)
    message = torch.empty(_padded(len(header)) + sum(map(_padded, sizes)), dtype=torch.uint8)
    view = message.numpy().data
    view[: len(header)] = header
    start = _padded(len(header))
    for block, size in zip(blocks, sizes, strict=True):
        position = start
        for frame in block:
            view[position : position + len(frame)] = frame
            position += len(frame)
        start += _padded(size)
    return message


def _unpack(message: torch.Tensor, transfers: Sequence[RowTransfer], store: SampleStore) -> int:
    """Put the rows of one peer's message into the store; returns their bytes."""
    n_bytes = 0
    for transfer, block in zip(transfers, _blocks(message.numpy().data, len(transfers)), strict=True):
        rows = decode_rows(block)
        if rows.ids != tuple(transfer.ids) or rows.keys != (transfer.key,):
            raise TransportError(
                f"worker {transfer.target} expected {transfer.key!r} of {len(transfer.ids)} samples from worker "
                f"{transfer.source}, but received {', '.join(rows.keys)} of {len(rows.ids)} samples",
                worker=transfer.target,
            )
        store.put(rows)
        n_bytes += len(block)
    return n_bytes


def _blocks(view: memoryview, n_blocks: int) -> Iterator[memoryview]:
    start = _padded(8 * n_blocks)
    if len(view) < start:
        raise TransportError(f"a message of {len(view)} bytes was expected to hold {n_blocks} blocks of sample rows")
    for size in struct.unpack_from(f"<{n_blocks}Q", view):
        yield view[start : start + size]
        start += _padded(size)


def _padded(n_bytes: int) -> int:
    return -(-n_bytes // _ALIGN) * _ALIGN
