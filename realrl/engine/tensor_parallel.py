"""Tensor and sequence parallelism over a group of ranks: `realrl.model.parallel` with torch.distributed.

An operation that gathers in the forward pass scatters in the backward pass, and the other way round. All ranks run the
collectives of the backward pass in the same order, because they record the same graph.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from realrl.engine.groups import Communicator
from realrl.model.decoder import Decoder
from realrl.model.parallel import TensorParallel
from realrl.plan.memory.buffers import REDUCTION_BUCKET
from realrl.plan.parameters.specs import slice_of, units_of


class TensorParallelGroup(TensorParallel):
    """The group over a communicator.

    Args:
        communicator: the ranks that share each layer.
        sp: sequence-parallel as well; ignored by a group of one.
    """

    def __init__(self, communicator: Communicator, *, sp: bool = False) -> None:
        self._communicator = communicator
        self.tp_rank, self.tp_size = communicator.rank, communicator.n_ranks
        self.is_sequence_parallel = sp and communicator.n_ranks > 1

    def n_local_rows(self, n_rows: int) -> int:
        return -(-n_rows // self.tp_size) if self.is_sequence_parallel else n_rows

    def enter(self, x: torch.Tensor, n_rows: int) -> torch.Tensor:
        if self.tp_size == 1:
            return x
        if self.is_sequence_parallel:
            return _GatherRows.apply(x, n_rows, self._communicator, True)
        return _AddGradients.apply(x, self._communicator)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        if self.tp_size == 1:
            return x
        if self.is_sequence_parallel:
            return _AddAndScatterRows.apply(x, self._communicator)
        return _Add.apply(x, self._communicator)

    def gather_rows(self, x: torch.Tensor, n_rows: int) -> torch.Tensor:
        return _GatherRows.apply(x, n_rows, self._communicator, False) if self.is_sequence_parallel else x

    def reduce_max(self, x: torch.Tensor) -> torch.Tensor:
        return self._communicator.all_reduce_(x, "max")

    def reduce_sum(self, x: torch.Tensor) -> torch.Tensor:
        return self._communicator.all_reduce_(x)

    def gather_logits(self, logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
        n = self.tp_size
        if n == 1:
            return logits
        ends = [units_of(vocab_size, rank, n) for rank in range(n)]
        widest = max(stop - start for start, stop in ends)
        padded = F.pad(logits, (0, widest - logits.shape[1]))
        parts = self._communicator.all_gather(padded).unflatten(0, (n, -1))  # [n, T, widest]
        return torch.cat([part[:, : stop - start] for part, (start, stop) in zip(parts, ends, strict=True)], dim=1)


def sync_partial_gradients(decoder: Decoder, group: Communicator, gradients: Mapping[str, torch.Tensor]) -> None:
    """Add up, in place, the gradients that each rank of the group has computed in part.

    They belong to parameters that see only some rows on each rank (sequence parallelism), and to KV heads that several
    ranks hold for different query heads. The latter are added up in a buffer of all KV heads, where each rank fills in
    its own.

    Args:
        decoder: names the gradients, see `Decoder.tp_partial_gradients`.
        group: the tensor-parallel ranks; all of them call this.
        gradients: by global parameter name; must hold the partial ones, all of one dtype.
    """
    if group.n_ranks == 1:
        return
    bucket: list[_Partial] = []
    n_elements = 0
    for name, _, kind in decoder.tp_partial_gradients():
        spec, grad = decoder.specs[name], gradients[name]
        place = slice_of(spec, group.rank, group.n_ranks) if kind == "kv" else tuple((0, n) for n in grad.shape)
        bucket.append(_Partial(grad, spec.shape, tuple(slice(start, stop) for start, stop in place)))
        n_elements += spec.n_elements
        if n_elements >= REDUCTION_BUCKET:
            _add_up(bucket, group)
            bucket, n_elements = [], 0
    if bucket:
        _add_up(bucket, group)


@dataclass(frozen=True)
class _Partial:
    gradient: torch.Tensor
    whole_shape: tuple[int, ...]
    place: tuple[slice, ...]  # the gradient's place in the whole parameter


def _add_up(bucket: Sequence[_Partial], group: Communicator) -> None:
    sizes = [math.prod(part.whole_shape) for part in bucket]
    total = bucket[0].gradient.new_zeros(sum(sizes))
    places = [flat.view(part.whole_shape)[part.place] for part, flat in zip(bucket, total.split(sizes), strict=True)]
    gradients = [part.gradient for part in bucket]
    torch._foreach_copy_(places, gradients)
    group.all_reduce_(total)
    torch._foreach_copy_(gradients, places)


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Communicator) -> torch.Tensor:
        ctx.mark_dirty(x)
        return group.all_reduce_(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _AddGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Communicator) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        # a copy: another branch of the graph may hold the same gradient tensor
        return ctx.group.all_reduce_(grad.clone(memory_format=torch.contiguous_format)), None


class _AddAndScatterRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Communicator) -> torch.Tensor:
        ctx.n_rows, ctx.group = x.shape[0], group
        return group.reduce_scatter(_pad_rows(x, group.n_ranks))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.group.all_gather(grad)[: ctx.n_rows], None


class _GatherRows(torch.autograd.Function):
    """Backward keeps this rank's rows of the gradient, summed over the group first if `is_partial`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, n_rows: int, group: Communicator, is_partial: bool) -> torch.Tensor:
        ctx.group, ctx.is_partial = group, is_partial
        return group.all_gather(x)[:n_rows]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        padded = _pad_rows(grad, ctx.group.n_ranks)
        if ctx.is_partial:
            return ctx.group.reduce_scatter(padded), None, None, None
        return padded.chunk(ctx.group.n_ranks)[ctx.group.rank], None, None, None


def _pad_rows(x: torch.Tensor, multiple: int) -> torch.Tensor:
    """Append zeros to dim 0 up to a multiple."""
    missing = -x.shape[0] % multiple
    return x if missing == 0 else torch.cat((x, x.new_zeros(missing, *x.shape[1:])))
