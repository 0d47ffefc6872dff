"""Gathering of whole parameters from tensor-parallel slices, one at a time, and saving of sharded models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from realrl.engine.groups import Communicator
from realrl.model.decoder import Decoder
from realrl.model.files.adapter_files import save_adapters
from realrl.model.files.hf import save_index, save_stage
from realrl.model.lora import merged_shards, trained_parameters
from realrl.plan.parameters.adapters import is_trained
from realrl.plan.parameters.decoder_specs import parameter_specs
from realrl.plan.parameters.specs import ParameterSpec, Slice, slice_of
from realrl.plan.parameters.stages import stage_layers, stage_of_layers

Copy = Callable[[str, torch.Tensor], torch.Tensor]
"""``copy(name, tensor)``: a copy in host memory."""

WriteModel = Callable[[Path], list[Path]]
"""Writes one rank's share of a model into a folder; returns the tensor files. It needs no other rank.

Raises `OSError` where the disk is full or the folder cannot be written.
"""


Present = Callable[[str], AbstractContextManager[None]]
"""``present(name)``: a context in which this rank has the parameter, if others share it out."""


def copy_sharded(
    decoder: Decoder, copy: Copy, *, tp: Communicator, pp: Communicator, present: Present = lambda _: nullcontext()
) -> WriteModel | None:
    """Copy the model to host memory; all ranks of one data-parallel replica call this together.

    Adapters are merged into the model's weights, and also copied themselves.

    Args:
        copy: called with a name and a tensor that may change afterwards; returns a copy in host memory.
        tp: the ranks that share this stage's layers.
        pp: the ranks at the same place in all stages, in order.
        present: entered once for each parameter of this rank, in the order of `Decoder.named_shards`.

    Returns:
        A function that writes this rank's copy: the tensor files of its stage, and on the first stage the index and
        the adapters. None if the rank writes nothing.
    """
    kept = {}
    if decoder.config.lora is not None:
        adapters = gather_trained(decoder, tp=tp, pp=pp)
        kept = {name: copy(f"adapter/{name}", adapters.pop(name)) for name in list(adapters)}
    tensors = []
    for name, whole in gather_parameters(decoder, tp, present):
        tensors.append((name, copy(name, whole)))
        del whole  # or it would stay while the next one is gathered
    if tp.rank != 0:
        return None
    config, adapted, pp_rank = replace(decoder.config, lora=None), decoder.config, pp.rank
    stages = stage_layers(config, pp.n_ranks, len(decoder.shard.chunks))

    def write(folder: Path) -> list[Path]:
        files = save_stage(config, folder, tensors, pp_rank=pp_rank, stages=stages)
        if pp_rank == 0:
            save_index(config, folder, stages=stages)
            if kept:
                save_adapters(adapted, folder / "adapter", kept)
        return files

    return write


def gather_parameters(
    decoder: Decoder, tp: Communicator, present: Present = lambda _: nullcontext()
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, whole tensor) of this stage's parameters on the first rank of the group, nothing on the others.

    All ranks of the group iterate to the end together. At any time the first rank holds one whole parameter beside its
    shard. A tied head that is a copy of another stage's embedding is left out, and adapters are merged.

    Args:
        tp: the ranks that share this stage's layers.
        present: see `copy_sharded`.
    """
    return _gather_all(decoder, merged_shards(decoder, present), tp)


def gather_trained(decoder: Decoder, *, tp: Communicator, pp: Communicator) -> dict[str, torch.Tensor]:
    """Gather the whole model's adapters and scalar head, float32, on the first rank of all; others return nothing.

    Args:
        tp: the ranks that share this stage's layers.
        pp: the ranks at the same place in all stages, in order.
    """
    mine = {name: whole.float() for name, whole in _gather_all(decoder, trained_parameters(decoder), tp)}
    if tp.rank != 0:
        return {}
    stage_of = stage_of_layers(stage_layers(decoder.config, pp.n_ranks, len(decoder.shard.chunks)))
    gathered: dict[str, torch.Tensor] = {}
    for spec in parameter_specs(decoder.config):
        if not is_trained(decoder.config, spec.name):
            continue
        stage = stage_of[spec.layer]
        if pp.rank == 0:
            gathered[spec.name] = mine[spec.name] if stage == 0 else torch.empty(spec.shape, device=decoder.device)
            if stage != 0:
                pp.exchange([], [(stage, gathered[spec.name])]).wait()
        elif pp.rank == stage:
            pp.exchange([(0, mine[spec.name])], []).wait()
    return gathered


def _gather_all(
    decoder: Decoder, parts: Iterable[tuple[str, torch.Tensor]], tp: Communicator
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, part in parts:
        spec = decoder.specs[name]
        if not decoder.shard.has(spec.layer):
            continue
        if tp.n_ranks > 1 and spec.sharded_dim is not None:
            whole = _gather(spec, part.detach().contiguous(), tp)
        else:
            whole = part.detach() if tp.rank == 0 else None
        del part  # neither stays while the next parameter is there
        if whole is not None:
            yield name, whole
        del whole


def _gather(spec: ParameterSpec, part: torch.Tensor, tp: Communicator) -> torch.Tensor | None:
    holders: dict[Slice, int] = {}  # the first holder of each slice: ranks may share a KV head
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
