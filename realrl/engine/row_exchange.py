"""Rows of samples between workers, point to point over the global group: the collective twin of the socket data plane.

    store ──► one message per peer ──exchange, device to device──► views of the message ──► store

Both ends derive the messages from the same list of transfers: one per (source, target), in two rounds. The first sends
sizes, the second the messages. Two more rounds follow, in which relays pass rows that came in these on in their node. A
message holds its transfers' rows in the order of the list::

    start of each block as `encode_start` writes it | tensors of all blocks, each padded to 16 bytes

The host sees the starts only. Tensors stay on the group's device, on both ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from realrl.data.rows import SampleStore, byte_view, decode_start, decode_tensors, encode_start, padded
from realrl.engine.groups import Communicator
from realrl.errors import TransportError


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
    messages = {peer: _pack(planned, store, device) for peer, planned in outgoing.items()}
    sizes = {peer: torch.zeros(2, dtype=torch.int64, device=device) for peer in incoming}
    world.exchange(
        [(peer, torch.tensor([n_start, len(message)]).to(device)) for peer, (message, n_start) in messages.items()],
        list(sizes.items()),
    ).wait()
    known = {peer: size.cpu().tolist() for peer, size in sizes.items()}  # waits for them
    received = {peer: torch.empty(size, dtype=torch.uint8, device=device) for peer, (_, size) in known.items()}
    world.exchange([(peer, message) for peer, (message, _) in messages.items()], list(received.items())).wait()
    return sum(_unpack(message, known[peer][0], incoming[peer], store) for peer, message in received.items())


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


def _pack(transfers: Sequence[RowTransfer], store: SampleStore, device: torch.device) -> tuple[torch.Tensor, int]:
    """The message [number of bytes], uint8, on the device; and the bytes of its starts."""
    blocks = [store.get(transfer.ids, (transfer.key,), device=device) for transfer in transfers]
    start = b"".join(map(encode_start, blocks))
    views = [byte_view(block[key]) for block in blocks for key in block.keys]
    message = torch.empty(len(start) + sum(padded(len(view)) for view in views), dtype=torch.uint8, device=device)
    message[: len(start)].copy_(torch.frombuffer(bytearray(start), dtype=torch.uint8))
    position = len(start)
    for view in views:
        message[position : position + len(view)].copy_(view)
        position += padded(len(view))
    return message, len(start)


def _unpack(message: torch.Tensor, n_start: int, transfers: Sequence[RowTransfer], store: SampleStore) -> int:
    """Put the rows of one peer's message into the store; returns their bytes."""
    starts = message[:n_start].cpu().numpy().data
    position = 0
    for transfer in transfers:
        header, size = decode_start(starts)
        starts = starts[size:]
        if header.meta.ids != tuple(transfer.ids) or header.keys != (transfer.key,):
            raise TransportError(
                f"worker {transfer.target} expected {transfer.key!r} of {len(transfer.ids)} samples from worker "
                f"{transfer.source}, but received {', '.join(header.keys)} of {len(header.meta.ids)} samples",
                worker=transfer.target,
            )
        store.put(decode_tensors(header, message[n_start + position :]))
        position += sum(map(padded, header.sizes_bytes))
    return n_start + position
