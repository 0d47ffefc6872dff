"""Master weights in float32: whole, or this rank's slice of each over data-parallel ranks; on the device or the host.

    working parameters ──► masters (slice of this rank) ──optimizer──► masters ──publish──► working parameters
                                                                          all-gather over data-parallel ranks

A parameter is cut, as a flat tensor, into as many equal slices as there are ranks, the last ones shorter or empty. In
float32 and on the device, a master is no copy but a part of the parameter itself, from `attach` to `detach`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import torch

from realrl.engine import device as devices
from realrl.engine.backends.base import move
from realrl.engine.groups import Communicator
from realrl.engine.train.precision import TrainedParameters
from realrl.plan.memory.buffers import MASTERS_BUCKET
from realrl.plan.memory.optimizer import slice_elements


class Room:
    """Memory for one bucket of slices, this rank's and those of all ranks; the next bucket takes it again.

    A bucket of its own would come beside the one before, which a thread of the collectives may hold for a moment.
    """

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None

    def take(self, n_elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a flat tensor of so many elements, in memory of earlier ones of this dtype if they were as large."""
        if self._memory is None or self._memory.numel() < n_elements:
            self._memory = torch.empty(n_elements, dtype=dtype, device=device)
        return self._memory[:n_elements]


class Masters:
    """The slices that this rank updates.

    Args:
        trained: parameters before their conversion to the working dtype, which happens here.
        dp: the ranks that share the masters; a group of one keeps them whole.
        on_host: True keeps masters, and with them the optimizer, in host memory.

    Attributes:
        tensors: flat float32 slices, in the order of ``trained.names``; empty where this rank's slice is.
    """

    def __init__(self, trained: TrainedParameters, dp: Communicator, *, on_host: bool) -> None:
        self._trained = trained
        self._dp = dp
        self._on_host = on_host
        self.sizes = [slice_elements(p.numel(), dp.n_ranks) for p in trained.parameters]
        self.tensors: list[torch.Tensor] = []
        self._is_view: list[bool] = []
        with torch.no_grad():
            for name, p in zip(trained.names, trained.parameters, strict=True):
                is_view = trained.dtype_of(name) == torch.float32 and not on_host
                value = p.detach().float()
                if is_view:
                    p.data = value
                    master = torch.empty(0, device=p.device)
                elif on_host:
                    master = devices.to_host(self.part_of(value))
                else:  # the parameter gets memory of another dtype
                    part = self.part_of(value)
                    master = part.clone() if dp.n_ranks > 1 else part
                self.tensors.append(master)
                self._is_view.append(is_view)
        trained.convert()

    def part_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's slice of a whole parameter, or of another tensor of its shape, as a flat view."""
        size = slice_elements(tensor.numel(), self._dp.n_ranks)
        start = min(self._dp.rank * size, tensor.numel())
        return tensor.reshape(-1)[start : start + size]

    def attach(self) -> None:
        """Point masters that are views at their parameters again, which may have moved."""
        for master, p, is_view in zip(self.tensors, self._trained.parameters, self._is_view, strict=True):
            if is_view:
                master.data = self.part_of(p.data)

    def detach(self) -> None:
        """Let go of the parameters' memory, so that they may move."""
        for master, is_view in zip(self.tensors, self._is_view, strict=True):
            if is_view:
                master.data = master.data.new_empty(0)

    def take_gradients(self) -> list[torch.Tensor]:
        """Give each master its slice of the completed gradient, and return these slices."""
        slices = [self.part_of(gradient) for gradient in self._trained.gradients()]
        if self._on_host:
            slices = [devices.to_host(part) for part in slices]
        for master, part in zip(self.tensors, slices, strict=True):
            master.grad = part
        return slices

    @torch.no_grad()
    def move(self, values: Iterable[tuple[str, torch.Tensor]], eta: float) -> None:
        """Move masters towards whole values, given by name, and publish them."""
        self.attach()
        masters = dict(zip(self._trained.names, self.tensors, strict=True))
        for name, value in values:
            move(masters[name].data, self.part_of(value), eta)
        self.publish()
        self.detach()

    @torch.no_grad()
    def publish(self) -> None:
        """Copy all ranks' masters into the working parameters."""
        for master in self.tensors:
            master.grad = None
        parameters = self._trained.parameters
        if self._dp.n_ranks == 1:
            copies = [i for i, is_view in enumerate(self._is_view) if not is_view]
            if copies:
                torch._foreach_copy_([parameters[i].data.view(-1) for i in copies], [self.tensors[i] for i in copies])
            return
        dtypes = [p.dtype for p in parameters]
        working = [t.to(p.device, p.dtype) for t, p in zip(self.tensors, parameters, strict=True)]
        for dtype in dict.fromkeys(dtypes):
            chosen = [i for i, found in enumerate(dtypes) if found == dtype]
            for i, whole in zip(chosen, self.whole([working[i] for i in chosen], chosen), strict=True):
                parameters[i].data.copy_(whole)

    def whole(
        self, parts: Iterable[torch.Tensor], places: Sequence[int], room: Room | None = None
    ) -> Iterator[torch.Tensor]:
        """Gather every rank's slices into whole tensors of the parameters' shapes; all ranks iterate to the end.

        At any time there are the room for one bucket of slices and one whole tensor.

        Args:
            parts: this rank's flat slices, of one dtype; each is asked for when its bucket is filled.
            places: index of each slice's parameter in `tensors`.
            room: that of earlier calls with slices of this dtype.
        """
        if self._dp.n_ranks == 1:
            for part, place in zip(parts, places, strict=True):
                yield part.view(self._trained.parameters[place].shape)
            return
        buckets, room, source = self._buckets(places), room or Room(), iter(parts)
        most = max((sum(self.sizes[place] for place in bucket) for bucket in buckets), default=0)
        for bucket in buckets:
            yield from self._gather(bucket, list(islice(source, len(bucket))), room, most)

    def _buckets(self, places: Sequence[int]) -> list[list[int]]:
        buckets: list[list[int]] = []
        n_elements = MASTERS_BUCKET
        for place in places:
            if n_elements >= MASTERS_BUCKET:
                buckets.append([])
                n_elements = 0
            buckets[-1].append(place)
            n_elements += self.sizes[place] * self._dp.n_ranks
        return buckets

    def _gather(
        self, places: Sequence[int], parts: Sequence[torch.Tensor], room: Room, most: int
    ) -> Iterator[torch.Tensor]:
        """Gather one bucket; the largest has `most` elements of each rank."""
        sizes, n_ranks = [self.sizes[place] for place in places], self._dp.n_ranks
        memory = room.take((1 + n_ranks) * most, parts[0].dtype, self._trained.parameters[0].device)
        own, of_all = memory[: sum(sizes)], memory[most : most + n_ranks * sum(sizes)]
        for part, slot in zip(parts, own.split(sizes), strict=True):
            slot[: part.numel()].copy_(part)
        by_rank = self._dp.all_gather(own, out=of_all).view(n_ranks, -1)
        for place, slices in zip(places, by_rank.split(sizes, dim=1), strict=True):
            shape = self._trained.parameters[place].shape
            yield slices.clone(memory_format=torch.contiguous_format).view(-1)[: shape.numel()].view(shape)
