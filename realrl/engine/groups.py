"""Process groups, created from the planned list in one order on every rank, and their collectives."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from realrl.engine.device import backend_name
from realrl.engine.rendezvous import RunStore, prove_connections
from realrl.errors import TransportError
from realrl.plan.groups import ProcessGroup, axes
from realrl.sched.key_value import KeyValueClient

_LEAVE_LIMIT_S = 5.0
# the names of torch 2.13; the older ones still exist there, but warn
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Communicator:
    """One rank's membership in a group; a group of one rank has no handle and communicates nothing.

    Attributes:
        handle: the torch.distributed group.
        n_ranks: number of members.
        rank: this rank's place in the group; peers and roots below are places in the group too.
        order: place in the group -> rank in the handle, where these differ: torch sorts the members of its groups.
        library_handle: group for other libraries: the handle, or that of a group of one if the run needs it.
    """

    handle: dist.ProcessGroup | None = None
    n_ranks: int = 1
    rank: int = 0
    order: tuple[int, ...] | None = None
    library_handle: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, group: ProcessGroup, rank: int, handle: dist.ProcessGroup | None) -> Communicator:
        """Make the membership of a global rank in a planned group, over a handle with the same members."""
        ascending = sorted(group.ranks)
        order = None if ascending == list(group.ranks) else tuple(map(ascending.index, group.ranks))
        own = None if group.n_ranks == 1 else handle
        return cls(own, group.n_ranks, group.ranks.index(rank), order, handle)

    def all_reduce_(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Reduce in place over the group ("sum" or "max") and return the tensor."""
        reduce_op = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}[op]
        if self.handle is not None:
            dist.all_reduce(tensor, reduce_op, group=self.handle)
        return tensor

    def all_gather(self, tensor: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Concatenate every member's tensor of equal shape along dim 0, in group order; in `out`, unless it moves."""
        if self.handle is None:
            return tensor
        tensor = tensor.contiguous()
        if out is None:
            out = tensor.new_empty(self.n_ranks * tensor.shape[0], *tensor.shape[1:])
        all_gather_single(out, tensor, group=self.handle)
        return self._chunks_moved(out, self.order)

    def reduce_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the group, and keep this rank's equal part of dim 0."""
        if self.handle is None:
            return tensor
        places = None if self.order is None else sorted(range(self.n_ranks), key=self.order.__getitem__)
        tensor = self._chunks_moved(tensor, places).contiguous()
        out = tensor.new_empty(tensor.shape[0] // self.n_ranks, *tensor.shape[1:])
        reduce_scatter_single(out, tensor, group=self.handle)
        return out

    def broadcast_(self, tensor: torch.Tensor, root: int) -> torch.Tensor:
        """Overwrite the tensor with the root's, and return it."""
        if self.handle is not None:
            dist.broadcast(tensor, group=self.handle, group_src=self._handle_rank(root))
        return tensor

    def broadcast_bytes(self, payload: bytes, root: int, device: torch.device) -> bytes:
        """Return the root's bytes on every member; the payload of other members is ignored."""
        if self.handle is None:
            return payload
        size = self.broadcast_(torch.tensor([len(payload)], device=device), root)
        buffer = torch.empty(int(size), dtype=torch.uint8, device=device)
        if self.rank == root:
            buffer.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
        return self.broadcast_(buffer, root).cpu().numpy().tobytes()

    def broadcast_unknown(self, tensor: torch.Tensor | None, root: int, device: torch.device) -> torch.Tensor:
        """Return the root's tensor on every member; the others pass None and need not know its shape and dtype."""
        if self.handle is None:
            assert tensor is not None
            return tensor
        described = b""
        if tensor is not None:
            described = json.dumps([str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]).encode()
        dtype, shape = json.loads(self.broadcast_bytes(described, root, device))
        if tensor is None:
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        if tensor.numel():
            flat = tensor.contiguous().flatten()
            self.broadcast_(flat.view(torch.uint8), root)  # bytes: not every backend knows every dtype
            tensor = flat.view(shape)
        return tensor

    def exchange(
        self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]
    ) -> Pending:
        """Start sending and receiving point to point: (peer, contiguous tensor) each.

        The n-th tensor sent to a peer meets the n-th one that the peer receives from here. Two ranks must post the
        messages between them in the same order.

        Raises:
            ValueError: a tensor's peer is this rank itself, or the tensor is not contiguous.
        """
        for peer, tensor in (*sends, *receives):
            if peer == self.rank or not tensor.is_contiguous():
                raise ValueError(f"rank {self.rank} cannot exchange {tuple(tensor.shape)} with rank {peer}")
        if not sends and not receives:
            return Pending((), ())
        operations = [
            dist.P2POp(operation, tensor, group=self.handle, group_peer=self._handle_rank(peer))
            for operation, messages in ((dist.isend, sends), (dist.irecv, receives))
            for peer, tensor in messages
        ]
        return Pending(tuple(dist.batch_isend_irecv(operations)), tuple(t for _, t in (*sends, *receives)))

    def barrier(self) -> None:
        """Wait for every member."""
        if self.handle is not None:
            dist.barrier(group=self.handle)

    def _handle_rank(self, place: int) -> int:
        return place if self.order is None else self.order[place]

    def _chunks_moved(self, tensor: torch.Tensor, sources: Sequence[int] | None) -> torch.Tensor:
        """Permute the tensor's `n_ranks` equal chunks of dim 0: chunk i is then ``sources[i]``; None moves none."""
        if sources is None:
            return tensor
        chunks = tensor.chunk(self.n_ranks)
        return torch.cat([chunks[source] for source in sources])


@dataclass(frozen=True)
class Pending:
    """Transfers under way; keeps their tensors alive, and copies what arrived in host memory (tensor, its copy)."""

    works: tuple[dist.Work, ...]
    tensors: tuple[torch.Tensor, ...]
    arriving: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()

    def wait(self) -> None:
        """Wait until all transfers are done (on CUDA: until later work on the current stream sees them done)."""
        for work in self.works:
            work.wait()
        for tensor, copy in self.arriving:
            tensor.copy_(copy)


ALONE = Communicator()


class HostStaged(Communicator):
    """A membership whose operations go through copies in host memory: ranks that share a GPU can meet, for tests.

    Sums are those of gloo on CPU tensors, bit for bit. Every operation waits for the device.
    """

    def all_reduce_(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        return tensor if self.handle is None else tensor.copy_(super().all_reduce_(_staged(tensor), op))

    def all_gather(self, tensor: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if self.handle is None:
            return tensor
        gathered = super().all_gather(_staged(tensor))
        return gathered.to(tensor.device) if out is None else out.copy_(gathered)

    def reduce_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.handle is None else super().reduce_scatter(_staged(tensor)).to(tensor.device)

    def broadcast_(self, tensor: torch.Tensor, root: int) -> torch.Tensor:
        return tensor if self.handle is None else tensor.copy_(super().broadcast_(_staged(tensor), root))

    def exchange(
        self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]
    ) -> Pending:
        copies = [(peer, torch.empty_like(tensor, device="cpu")) for peer, tensor in receives]
        pending = super().exchange([(peer, _staged(tensor)) for peer, tensor in sends], copies)
        arriving = tuple((tensor, copy) for (_, tensor), (_, copy) in zip(receives, copies, strict=True))
        return Pending(pending.works, pending.tensors, arriving)


def _staged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class GroupSettings:
    """Settings of all groups of a run.

    Attributes:
        collective_timeout_s: limit of each collective, and of the wait for its last member.
        for_libraries: True gives groups of one rank a `library_handle`, and a single worker a world of its own.
        through_host: True gives `HostStaged` communicators, over gloo on any device.
    """

    collective_timeout_s: float = 3600.0
    for_libraries: bool = False
    through_host: bool = False


class Groups:
    """The communicators of this rank, by planned group."""

    def __init__(self, communicators: Mapping[ProcessGroup, Communicator], *, store: RunStore | None = None) -> None:
        self._communicators = dict(communicators)
        self._owns_world = store is not None
        self._store = store  # kept for torch, which has its C++ half only

    @classmethod
    def create(
        cls,
        planned: Sequence[ProcessGroup],
        *,
        rank: int,
        world_size: int,
        meeting: KeyValueClient | None,
        device: torch.device,
        timeout_s: float,
        settings: GroupSettings = GroupSettings(),
    ) -> Groups:
        """Meet the other ranks and create all groups; every rank calls this with the same list.

        Groups with equal members share one handle, whatever their order; groups of one rank get none, and a single
        worker meets nobody.

        Args:
            planned: groups from `realrl.plan.groups.process_groups`, in its order.
            meeting: key-value store through which the ranks find each other; unused by a single worker without
                a world of its own.
            timeout_s: limit of the meeting.

        Raises:
            TransportError: the key-value store cannot be reached, some rank did not come in time, or a stranger did.
        """
        mine = [group for group in planned if rank in group.ranks]
        if world_size == 1 and not settings.for_libraries:
            return cls(dict.fromkeys(mine, ALONE))
        assert meeting is not None
        timeout, later = timedelta(seconds=timeout_s), timedelta(seconds=settings.collective_timeout_s)
        store = RunStore(meeting, timeout_s=timeout_s)
        backend = backend_name(torch.device("cpu") if settings.through_host else device)
        is_bound = backend == backend_name(device) and device.type == "cuda"
        with _loopback_only() if meeting.is_local else nullcontext():
            try:
                dist.init_process_group(
                    backend,
                    store=store,
                    rank=rank,
                    world_size=world_size,
                    timeout=timeout,
                    device_id=device if is_bound else None,
                )
                make = _split if is_bound else partial(_new_groups, rank=rank, timeout=timeout)
                handles = create_handles(planned, rank, make, smallest=1 if settings.for_libraries else 2)
                if not is_bound:
                    prove_connections(handles, store=store, rank=rank)
                for handle in handles.values():
                    dist.distributed_c10d._set_pg_timeout(later, handle)
            except (dist.DistError, RuntimeError, OSError) as error:
                raise TransportError(
                    f"worker {rank} could not join the {world_size} workers of this run: {str(error).splitlines()[0]}",
                    worker=rank,
                ) from error
        kind = HostStaged if settings.through_host else Communicator
        return cls({g: kind.of(g, rank, handles.get(frozenset(g.ranks))) for g in mine}, store=store)

    def __getitem__(self, group: ProcessGroup) -> Communicator:
        """The communicator of a planned group that this rank is a member of."""
        return self._communicators[group]

    def destroy(self) -> None:
        """Leave all groups; give up after a few seconds if other members are gone."""
        self._communicators.clear()
        if not self._owns_world:
            return
        self._owns_world = False
        leaving = threading.Thread(target=dist.destroy_process_group, name="leave-groups", daemon=True)
        leaving.start()
        leaving.join(_LEAVE_LIMIT_S)


MakeGroups = Callable[[list[list[int]]], dist.ProcessGroup | None]
"""Makes groups that share no rank, given by their ascending ranks; returns the one of this rank, if it has one."""


def create_handles(
    planned: Sequence[ProcessGroup], rank: int, make: MakeGroups, *, smallest: int
) -> dict[frozenset[int], dist.ProcessGroup]:
    """Make the handles of this rank's groups, by members: equal members share one, and one axis takes one `make`.

    The first planned group is the world, which exists. Every rank calls `make` with the same lists in one order.

    Args:
        smallest: members of the smallest group that gets a handle.
    """
    world = frozenset(planned[0].ranks)
    known = {world}
    handles = {world: dist.group.WORLD}
    for axis in axes(planned):
        new = [group for group in axis if group.n_ranks >= smallest and frozenset(group.ranks) not in known]
        if not new:
            continue
        known.update(frozenset(group.ranks) for group in new)
        handle = make([sorted(group.ranks) for group in new])
        mine = next((group for group in new if rank in group.ranks), None)
        if mine is not None:
            assert handle is not None
            handles[frozenset(mine.ranks)] = handle
    return handles


def _split(groups: list[list[int]]) -> dist.ProcessGroup | None:
    """Split the world, which is bound to a device: one collective of all ranks, members or not."""
    return dist.split_group(split_ranks=groups)


def _new_groups(groups: list[list[int]], *, rank: int, timeout: timedelta) -> dist.ProcessGroup | None:
    """Make one group after another; all ranks of the world take part.

    If only members met, torch would name a group after the number of groups that a member has: they may differ.
    """
    mine = None
    for ranks in groups:
        handle = dist.new_group(ranks, timeout=timeout)
        mine = handle if rank in ranks else mine
    return mine


@contextmanager
def _loopback_only() -> Iterator[None]:
    """Keep gloo's own sockets on the loopback interface."""
    variable = "GLOO_SOCKET_IFNAME"
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if variable in os.environ or not names:
        yield
        return
    os.environ[variable] = names[0]
    try:
        yield
    finally:
        del os.environ[variable]
