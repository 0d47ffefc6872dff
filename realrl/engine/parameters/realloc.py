"""Execution of a `ReallocPlan` on one rank: parameters move from one layout to another.

    source shards ──pack──► messages ──round by round──► unpack ──► target shards
         └───────── what the rank keeps itself: shared, or copied ─────────┘

At most two rounds of messages exist at a time, so a reallocation needs little memory beyond the two layouts. What both
layouts have of a parameter on one rank exists once, where the source's tensors may move: source and target are views of
one tensor, their union.

A relay passes on what another node sent it from its own target shard; where the target is an average, which is not what
was sent, it keeps the messages of a round until it has passed them on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from realrl.engine.groups import Communicator, Pending
from realrl.engine.parameters.realloc_rounds import Message, Round, ShardSlice, rounds_of
from realrl.errors import RunError
from realrl.model.dtypes import torch_dtype
from realrl.plan.memory.buffers import REALLOC_BUCKET, REALLOC_ROUNDS
from realrl.plan.parameters.layout import ParameterLayout
from realrl.plan.parameters.realloc import Keep, ReallocPlan
from realrl.plan.parameters.specs import Slice

Arrived = Mapping[ShardSlice, torch.Tensor]


@dataclass(frozen=True)
class ReallocResult:
    """Result of a reallocation on one rank.

    Attributes:
        parameters: this rank's shard of the target layout, by global name; empty where the target layout has no shard.
        moved: the given source tensors that are views of larger tensors now.
        bytes_received, bytes_sent: parameter bytes from and to other ranks.
        peak_bytes: largest sum of source shard, new tensors and messages under way.
    """

    parameters: dict[str, torch.Tensor]
    moved: tuple[torch.Tensor, ...]
    bytes_received: int
    bytes_sent: int
    peak_bytes: int


class Reallocator:
    """Executes a plan, any number of times; keeps no tensor in between.

    Args:
        plan: the same on every rank.
        world: the group of all ranks; the plan's ranks are places in it.
        device: where all tensors are.
        bucket_bytes: limit of the messages of one round and direction; twice as much may be under way. The same on
            every rank.
    """

    def __init__(
        self,
        plan: ReallocPlan,
        world: Communicator,
        rank: int,
        device: torch.device,
        *,
        bucket_bytes: int = REALLOC_BUCKET,
    ) -> None:
        self.plan = plan
        self._world = world
        self._rank = rank
        self._device = device
        self._dtypes = {spec.name: spec.dtype for spec in (*plan.source_layout.specs, *plan.target_layout.specs)}
        self._source_shapes = _shapes(plan.source_layout, rank)
        self._target_shapes = _shapes(plan.target_layout, rank)
        self._rounds = rounds_of(plan, rank, self._dtypes, bucket_bytes=bucket_bytes)

    def run(
        self,
        source: Mapping[str, torch.Tensor] | None,
        *,
        target: Mapping[str, torch.Tensor] | None = None,
        eta: float = 1.0,
        alias: bool = True,
        moves_source: bool = False,
    ) -> ReallocResult:
        """Start, and wait for the end."""
        return self.start(source, target=target, eta=eta, alias=alias, moves_source=moves_source).wait()

    @torch.no_grad()
    def start(
        self,
        source: Mapping[str, torch.Tensor] | None,
        *,
        target: Mapping[str, torch.Tensor] | None = None,
        eta: float = 1.0,
        alias: bool = True,
        moves_source: bool = False,
        at_once: bool = False,
    ) -> Reallocation:
        """Send the first messages and copy what the rank keeps; all ranks of both layouts call this in the same order.

        The source must not be written before `Reallocation.wait` has returned.

        Args:
            source: this rank's shard of the source layout by global name, parameters or other tensors; ignored where
                the layout has none.
            target: write ``eta * source + (1 - eta) * target`` into these tensors, which lie apart from the source's;
                None makes new ones.
            alias: let a target shard that is a part of the source shard be a view of it, contiguous or not.
            moves_source: let the source's tensors, the given objects, become views of larger tensors that contain their
                target shards too. Their own memory is free then, one tensor after the other, if nothing else refers to
                it.
            at_once: send all rounds now, so that nothing is left to send in `wait`. It takes memory for all messages.

        Raises:
            RunError: a tensor is missing, or its shape, dtype or device is not the plan's.
        """
        held = self._checked("source", source, self._source_shapes)
        kept = {keep.parameter: keep for keep in self.plan.keeps(self._rank)}
        if target is not None:
            shards = _Shards(held, self._checked("target", target, self._target_shapes), eta)
        else:
            shards = _Shards(held, {})
            for name, shape in self._target_shapes.items():
                keep = kept.get(name)
                if alias and keep is not None and (moves_source or keep.is_whole_target):
                    assert source is not None
                    union = held[name] if keep.is_whole_target else shards.widen(source[name], keep)
                    shards.target[name] = _view(union, keep.target_place)
                    del kept[name]
                    continue
                shards.target[name] = torch.empty(shape, dtype=torch_dtype(self._dtypes[name]), device=self._device)
                shards.account(shards.target[name].nbytes)
        under_way = Reallocation(
            self._world, self._rounds, shards, n_rounds=len(self._rounds) if at_once else REALLOC_ROUNDS
        )
        for keep in kept.values():  # while the first messages travel
            value = _view(held[keep.parameter], keep.source_slice)
            shards.write([(keep.parameter, keep.target_slice)], [value])
        return under_way

    def _checked(
        self, side: str, tensors: Mapping[str, torch.Tensor] | None, shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, torch.Tensor]:
        """The plan's tensors, detached; raises `RunError` if one is missing or unfit."""
        shard = {}
        for name, shape in shapes.items():
            tensor = None if tensors is None else tensors.get(name)
            if tensor is None:
                raise RunError(f"worker {self._rank} has no {side} tensor {name!r} to reallocate", worker=self._rank)
            given = (tuple(tensor.shape), tensor.dtype, tensor.device.type)
            planned = (shape, torch_dtype(self._dtypes[name]), self._device.type)
            if given != planned:
                raise RunError(
                    f"{side} tensor {name!r} of worker {self._rank} is {_described(*given)}, "
                    f"but the reallocation was planned for {_described(*planned)}",
                    worker=self._rank,
                )
            shard[name] = tensor.detach()
        return shard


class Reallocation:
    """A reallocation under way; `Reallocator.start` makes it."""

    def __init__(self, world: Communicator, rounds: Sequence[Round], shards: _Shards, *, n_rounds: int) -> None:
        self._world = world
        self._shards = shards
        self._waiting = deque(rounds)
        self._under_way: deque[_UnderWay] = deque()
        self._bytes_sent = self._bytes_received = 0
        for _ in range(n_rounds):
            self._send_next()

    @torch.no_grad()
    def wait(self) -> ReallocResult:
        """Return when this rank's target shard is complete and nothing reads its source tensors any more.

        On CUDA this holds for all later work on the current stream.
        """
        while self._under_way:
            self._send_next(self._finish(self._under_way.popleft()))
        shards = self._shards
        return ReallocResult(
            shards.target, tuple(shards.moved), self._bytes_received, self._bytes_sent, shards.peak_bytes
        )

    def _send_next(self, arrived: Arrived = MappingProxyType({})) -> None:
        """Send the next round; `arrived` are the pieces that it passes on, if the target does not have them."""
        if not self._waiting:
            return
        messages = self._waiting.popleft()
        sends = [(message, *self._shards.outgoing(message, arrived)) for message in messages.sends]
        receives = [(message, *self._shards.incoming(message)) for message in messages.receives]
        num_bytes = sum(flat.nbytes for _, flat, is_copy in (*sends, *receives) if is_copy)
        self._shards.account(num_bytes)
        self._shards.account(-sum(tensor.nbytes for tensor in arrived.values()))
        self._bytes_sent += sum(flat.nbytes for _, flat, _ in sends)
        self._bytes_received += sum(flat.nbytes for _, flat, _ in receives)
        pending = self._world.exchange(
            [(message.peer, flat) for message, flat, _ in sends],
            [(message.peer, flat) for message, flat, _ in receives],
        )
        unpack = tuple((message, flat) for message, flat, is_copy in receives if is_copy)
        self._under_way.append(_UnderWay(pending, unpack, num_bytes))

    def _finish(self, under_way: _UnderWay) -> Arrived:
        """Wait for a round, write it to the target, and return what the next one passes on but the target lacks."""
        under_way.pending.wait()
        arrived: dict[ShardSlice, torch.Tensor] = {}
        passed_on: set[ShardSlice] = set()
        if self._waiting and self._shards.lacks_what_arrives:
            passed_on.update(piece for m in self._waiting[0].sends if m.is_passed_on for piece in m.pieces)
        for message, flat in under_way.unpack:
            values = _split(message, flat)
            self._shards.write([(piece.parameter, piece.slices) for piece in message.pieces], values)
            arrived.update((p, value) for p, value in zip(message.pieces, values, strict=True) if p in passed_on)
        self._shards.account(sum(tensor.nbytes for tensor in arrived.values()) - under_way.num_bytes)
        return arrived


@dataclass(frozen=True)
class _UnderWay:
    """A round under way: its messages to unpack, and the memory that it takes."""

    pending: Pending
    unpack: tuple[tuple[Message, torch.Tensor], ...]
    num_bytes: int


class _Shards:
    """This rank's source and target tensors, from which messages are made and to which they are written.

    `peak_bytes` is the most memory that the tensors and the messages took so far.
    """

    def __init__(self, source: dict[str, torch.Tensor], target: dict[str, torch.Tensor], eta: float = 1.0) -> None:
        self.source = source
        self.target = target
        self.peak_bytes = self._num_bytes = sum(t.nbytes for t in source.values())
        self.moved: list[torch.Tensor] = []
        self._eta = eta

    def account(self, num_bytes: int) -> None:
        """Count memory that was taken (or, negative, given back)."""
        self._num_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self._num_bytes)

    def widen(self, tensor: torch.Tensor, keep: Keep) -> torch.Tensor:
        """Move a source tensor into a new one that has room for its target tensor too; returns the new one."""
        union = tensor.detach().new_empty(keep.shape)
        self.account(union.nbytes)
        place = _view(union, keep.source_place)
        place.copy_(tensor)
        self.account(-tensor.nbytes)
        self.source[keep.parameter] = tensor.data = place
        self.moved.append(tensor)
        return union

    @property
    def lacks_what_arrives(self) -> bool:
        """The target has averages of what it had with what arrives."""
        return self._eta != 1.0

    def outgoing(self, message: Message, arrived: Arrived) -> tuple[torch.Tensor, bool]:
        """The message's elements [n], and True if they are a copy, as are those of `arrived`, which go afterwards."""
        is_kept = not (message.is_passed_on and self.lacks_what_arrives)
        tensors = self.target if message.is_passed_on else self.source
        views = [_view(tensors[p.parameter], p.slices) if is_kept else arrived[p] for p in message.pieces]
        if len(views) == 1 and views[0].is_contiguous() and is_kept:
            return views[0].view(-1), False
        flat = views[0].new_empty(message.num_elements)
        torch._foreach_copy_(_split(message, flat), views)
        return flat, True

    def incoming(self, message: Message) -> tuple[torch.Tensor, bool]:
        """A buffer for the message's elements [n], and True if they must be written to the target afterwards."""
        if len(message.pieces) == 1 and self._eta == 1.0:
            (piece,) = message.pieces
            view = _view(self.target[piece.parameter], piece.slices)
            if view.is_contiguous():
                return view.view(-1), False
        return self.target[message.pieces[0].parameter].new_empty(message.num_elements), True

    def write(self, places: Sequence[tuple[str, Slice]], values: list[torch.Tensor]) -> None:
        """Overwrite these slices of the target, or move them by `eta` towards the values."""
        views = [_view(self.target[parameter], slices) for parameter, slices in places]
        if self._eta == 1.0:
            torch._foreach_copy_(views, values)
        else:
            torch._foreach_lerp_(views, values, self._eta)


def _view(tensor: torch.Tensor, slices: Slice) -> torch.Tensor:
    for dim, (start, stop) in enumerate(slices):
        if stop - start != tensor.shape[dim]:
            tensor = tensor.narrow(dim, start, stop - start)
    return tensor


def _split(message: Message, flat: torch.Tensor) -> list[torch.Tensor]:
    """The pieces of a message's elements [n], each in its own shape."""
    parts = torch.split(flat, [piece.num_elements for piece in message.pieces])
    return [part.view(piece.shape) for part, piece in zip(parts, message.pieces, strict=True)]


def _shapes(layout: ParameterLayout, rank: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the rank's shard by parameter; empty if the layout has none on it."""
    if rank not in layout:
        return {}
    return {name: tuple(stop - start for start, stop in slices) for name, slices in layout.slices_of(rank).items()}


def _described(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)} on {device}"
