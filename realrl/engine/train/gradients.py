"""Reduction of gradients over the ranks of a layout, and their norm.

    partial over tp ──► summed over dp ──► a tied embedding's two added ──► norm over tp and pp, each parameter once

Copies of one parameter must stay bit-equal, so their gradients are reduced alike. Gradients that tensor ranks have in
common fill buckets of their own, because the order of additions depends on the place in a bucket. The two gradients of
a tied embedding are added last.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from realrl.engine.groups import Communicator
from realrl.engine.parallel import Parallel
from realrl.engine.tensor_parallel import sync_partial_gradients
from realrl.model.decoder import Decoder
from realrl.plan.memory.buffers import GRADIENT_BUCKET
from realrl.plan.parameters.specs import ParameterSpec, units_of

TIED = "embedding.weight"


@torch.no_grad()
def reduce_gradients(decoder: Decoder, gradients: Mapping[str, torch.Tensor], parallel: Parallel) -> float:
    """Complete the gradients in place and return their global norm, equal on all ranks; all of them call this.

    Args:
        gradients: global name -> float32 gradient of each trained parameter of this rank.
    """
    sync_partial_gradients(decoder, parallel.tp, gradients)
    if parallel.dp.n_ranks > 1:
        for bucket in _buckets(_by_holders(decoder, gradients)):
            _all_reduce_flat(bucket, parallel.dp)
    if parallel.tied.n_ranks > 1 and is_tied(decoder) and TIED in gradients:
        parallel.tied.all_reduce_(gradients[TIED])
    return _global_norm(decoder, gradients, parallel)


def _global_norm(decoder: Decoder, gradients: Mapping[str, torch.Tensor], parallel: Parallel) -> float:
    """sqrt(sum g^2) over the whole model."""
    if parallel.tp.n_ranks == parallel.pp.n_ranks == 1:
        return float(torch.nn.utils.get_total_norm(list(gradients.values())))
    counted = [g for name, g in gradients.items() if is_counted_here(decoder, name)]
    square = torch.zeros(1, dtype=torch.float64, device=decoder.device)
    if counted:
        square += torch.nn.utils.get_total_norm(counted).double().square()
    return math.sqrt(parallel.pp.all_reduce_(parallel.tp.all_reduce_(square)).item())


def is_copied(decoder: Decoder, parallel: Parallel, name: str) -> bool:
    """True if another rank of the same data-parallel replica holds the same slice of a parameter."""
    if name == TIED and parallel.tied.n_ranks > 1 and is_tied(decoder):
        return True
    spec, tp_size = decoder.specs[name], decoder.shard.tp_size
    return tp_size > 1 and (spec.sharded_dim is None or spec.n_units < tp_size)


def is_tied(decoder: Decoder) -> bool:
    """True if the head's weight is the embedding's."""
    return decoder.config.tied_embeddings and not decoder.config.is_scalar


def is_counted_here(decoder: Decoder, name: str) -> bool:
    """True if this rank is the first of those that hold the same slice."""
    if name == TIED and decoder.has_tied_copy:
        return False
    tp_rank = decoder.shard.tp_rank
    return tp_rank == 0 or (
        decoder.specs[name].sharded_dim is not None
        and _first_unit(decoder, name, tp_rank) != _first_unit(decoder, name, tp_rank - 1)
    )


def _first_unit(decoder: Decoder, name: str, tp_rank: int) -> int:
    return units_of(decoder.specs[name].n_units, tp_rank, decoder.shard.tp_size)[0]


def _by_holders(decoder: Decoder, gradients: Mapping[str, torch.Tensor]) -> list[list[torch.Tensor]]:
    """Gradients in groups with equally many holders among the tensor ranks."""
    tp_size = decoder.shard.tp_size
    if tp_size == 1:
        return [list(gradients.values())]

    def n_holders(spec: ParameterSpec) -> int:
        return tp_size if spec.sharded_dim is None else max(1, tp_size // spec.n_units)

    classes: dict[int, list[torch.Tensor]] = {}
    for name, gradient in gradients.items():
        classes.setdefault(n_holders(decoder.specs[name]), []).append(gradient)
    return [classes[n] for n in sorted(classes)]


def _buckets(classes: Iterable[Sequence[torch.Tensor]]) -> Iterator[list[torch.Tensor]]:
    """Neighbouring tensors of a class, of about `GRADIENT_BUCKET` together."""
    for tensors in classes:
        bucket: list[torch.Tensor] = []
        n_bytes = 0
        for tensor in tensors:
            if bucket and n_bytes + tensor.nbytes > GRADIENT_BUCKET:
                yield bucket
                bucket, n_bytes = [], 0
            bucket.append(tensor)
            n_bytes += tensor.nbytes
        if bucket:
            yield bucket


def _all_reduce_flat(bucket: Sequence[torch.Tensor], dp: Communicator) -> None:
    if len(bucket) == 1 and bucket[0].is_contiguous():
        dp.all_reduce_(bucket[0])
        return
    flat = torch.cat([t.flatten() for t in bucket])
    dp.all_reduce_(flat)
    for tensor, part in zip(bucket, torch.split(flat, [t.numel() for t in bucket]), strict=True):
        tensor.copy_(part.view(tensor.shape))
