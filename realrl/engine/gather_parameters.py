"""Whole parameters from the slices of a tensor-parallel group, one at a time, and models saved that way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from realrl.engine.groups import Communicator
from realrl.model.decoder import Decoder
from realrl.model.hf import save_index, save_stage
from realrl.plan.layout import ParameterSpec, Slice, slice_of


def save_sharded(decoder: Decoder, folder: str | Path, *, tp: Communicator, pp: Communicator) -> None:
    """Write the model in Hugging Face format; all ranks of one data-parallel replica call this together.

    The first tensor rank of each stage writes the stage's files, and that of the first stage completes the folder.

    Args:
        tp: the ranks that share this stage's layers.
        pp: the ranks at the same place of the other stages, in order.

    Raises:
        OSError: the disk is full or the folder cannot be written; only the rank that met it raises, and the folder
            gets no index and no `config.json`.
    """
    tensors = gather_parameters(decoder, tp)
    failed = torch.ones(1, device=decoder.device)
    try:
        if tp.rank == 0:
            save_stage(decoder.config, folder, tensors, pp_rank=pp.rank, pp_size=pp.n_ranks)
        failed.zero_()
    finally:
        for _ in tensors:  # other ranks are sending: they must not wait for one whose disk is full
            pass
        is_complete = not pp.all_reduce_(failed, "max").item()
    if is_complete and tp.rank == 0 and pp.rank == 0:
        save_index(decoder.config, folder, pp_size=pp.n_ranks)


def gather_parameters(decoder: Decoder, tp: Communicator) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, whole tensor) of this stage's parameters on the first rank of the group, nothing on the others.

    All ranks of the group iterate to the end together. At any time the first rank holds one whole parameter beside its
    shard. A tied head that is a copy of another stage's embedding is left out.

    Args:
        tp: the ranks that share this stage's layers.
    """
    for name, parameter in decoder.named_shards():
        spec = decoder.specs[name]
        if not decoder.shard.has(spec.layer):
            continue
        part = parameter.detach()
        if tp.n_ranks > 1 and spec.sharded_dim is not None:
            whole = _gather(spec, part.contiguous(), tp)
            if whole is not None:
                yield name, whole
        elif tp.rank == 0:
            yield name, part


def _gather(spec: ParameterSpec, part: torch.Tensor, tp: Communicator) -> torch.Tensor | None:
    holders: dict[Slice, int] = {}  # the first, of ranks that share a KV head
    for rank in range(tp.n_ranks):
        holders.setdefault(slice_of(spec, rank, tp.n_ranks), rank)
    if tp.rank != 0:
        if tp.rank in holders.values():
            tp.exchange([(0, part)], []).wait()
        return None
    whole = part.new_empty(spec.shape)
    places = [whole[tuple(slice(start, stop) for start, stop in place)] for place in holders]
    buffers = [part, *(place if place.is_contiguous() else torch.empty_like(place) for place in places[1:])]
    peers = list(holders.values())[1:]
    tp.exchange([], list(zip(peers, buffers[1:], strict=True))).wait()
    for place, buffer in zip(places, buffers, strict=True):
        if place is not buffer:
            place.copy_(buffer)
    return whole
