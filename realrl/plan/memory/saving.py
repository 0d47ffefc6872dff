"""Bytes that one rank needs to copy its share of a checkpoint: what it gathers on the device, and the copies.

Ranks gather what they share out piece by piece, and a piece goes to the host before the next one is gathered. A thread
of the collectives may hold a piece until the next one is there, so that two of them count; but slices of the native
optimizer's state come in the same room, piece by piece.

Invariants:
- nothing is gathered of a role whose ranks share out neither parameters nor optimizer state;
- the copies of one data-parallel replica's ranks add up to the role's checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from realrl.plan.memory.buffers import FLOAT32, MASTERS_BUCKET, SLICE_ALIGNMENT
from realrl.plan.memory.optimizer import OptimizerSharing
from realrl.plan.parameters.adapters import LORA_A, is_adapter, is_trained
from realrl.plan.parameters.shards import ModelShard
from realrl.plan.parameters.specs import DTYPE_BYTES, ParameterSpec
from realrl.shape import DecoderConfig

_PIECES = 2  # that the collectives may hold at a time


@dataclass(frozen=True)
class Saves:
    """Checkpoints of a run, as far as memory depends on them.

    Attributes:
        is_staged: tensors leave the device through pinned buffers; without them the devices are CPUs.
        is_repeated: the run goes on after some of them, and their copies stay for the next one.
    """

    is_staged: bool = True
    is_repeated: bool = True

    @property
    def copies_all(self) -> bool:
        """True unless tensors that are in host memory anyway, and do not change any more, stay where they are."""
        return self.is_staged or self.is_repeated


def gathered_state(sizes: Sequence[int], sharing: OptimizerSharing) -> int:
    """Return the bytes that the optimizer state takes on the device at its largest moment, above what is kept.

    native      shared out: room for a bucket of all ranks' slices and this rank's own of it, and one whole tensor
    megatron    one whole tensor
    deepspeed   one whole tensor, with the padding of stage 3; nothing with stage 0

    Args:
        sizes: elements of each parameter that this rank trains.
        sharing: see `optimizer_bytes`.
    """
    dp, stage, largest = sharing.dp, sharing.zero_stage, max(sizes, default=0)
    if not stage or not sizes or (sharing.backend == "native" and dp == 1):
        return 0
    if sharing.backend != "native":
        part = math.ceil(largest / dp) if sharing.on_host else 0
        return FLOAT32 * (_PIECES * (largest + (dp if stage == 3 else 0)) + part)
    unit = dp * SLICE_ALIGNMENT
    padded = [math.ceil(size / unit) * unit for size in sizes]
    bucket = min(sum(padded), MASTERS_BUCKET + max(padded))
    return FLOAT32 * (bucket + bucket // dp + max(padded))


def gathered_model(specs: Sequence[ParameterSpec], shard: ModelShard, *, zero_stage: int, is_copied: bool) -> int:
    """Return the bytes that the model takes on the device at its largest moment, above what is kept.

    Each rank merges its adapters, in float32; the first tensor rank gathers whole parameters, and adapters before them.

    Args:
        is_copied: whole parameters are copied; else they are the copies.
    """
    names = {spec.name for spec in specs}
    is_gathering = shard.tp_size > 1 and shard.tp_rank == 0
    pieces = [0.0]
    for spec in specs:
        n_elements, width = shard.n_elements_of(spec), spec.num_bytes // spec.n_elements
        piece = float(_PIECES * width * n_elements if zero_stage == 3 else 0)
        if spec.name.removesuffix(".weight") + LORA_A in names:
            piece += FLOAT32 * n_elements * (1 if width == FLOAT32 else 2)
        if is_gathering and shard.has(spec.layer) and spec.sharded_dim is not None:
            others = 0 if spec.sharded_dim == 0 else 1 - 1 / shard.tp_size  # arrive in memory of their own
            piece += spec.num_bytes * (is_copied + others)
        pieces.append(piece)
    adapters = FLOAT32 * sum(spec.n_elements for spec in specs if is_adapter(spec.name))
    is_alone = shard.tp_size == 1 and shard.has_embedding and shard.has_head
    return math.ceil(max(*pieces, 0 if is_alone or shard.tp_rank else adapters))


def state_copies(model: DecoderConfig, sizes: Sequence[int]) -> int:
    """Return the bytes of one shard's optimizer state in a checkpoint: moments, and masters that the model lacks."""
    return FLOAT32 * sum(sizes) * (2 if model.lora is None and model.dtype == "float32" else 3)


def model_copies(model: DecoderConfig, specs: Sequence[ParameterSpec], shard: ModelShard) -> int:
    """Return the bytes of the model that the rank of a shard writes, with all adapters on the first stage."""
    if shard.tp_rank:
        return 0
    total = sum(spec.num_bytes for spec in specs if shard.has(spec.layer) and not is_adapter(spec.name))
    if model.lora is not None and shard.has_embedding:
        total += sum(FLOAT32 * spec.n_elements for spec in specs if is_trained(model, spec.name))
    return total


def made_copies(model: DecoderConfig, specs: Sequence[ParameterSpec], shard: ModelShard, *, zero_stage: int) -> int:
    """Return the bytes of `model_copies` that are gathered or merged, and so no tensors of the rank itself."""
    if shard.tp_rank:
        return 0
    names, total = {spec.name for spec in specs}, 0
    for spec in specs:
        is_gathered = zero_stage == 3 or (shard.tp_size > 1 and spec.sharded_dim is not None)
        if shard.has(spec.layer) and not is_adapter(spec.name):
            is_merged = spec.name.removesuffix(".weight") + LORA_A in names
            total += spec.num_bytes if is_gathered or is_merged else 0
        if model.lora is not None and shard.has_embedding and is_trained(model, spec.name):
            total += FLOAT32 * spec.n_elements if is_gathered or not shard.has(spec.layer) else 0
    return total


def averaging_masters(model: DecoderConfig, n_bytes: int) -> int:
    """Return the bytes of float32 masters that a role which is averaged has beside `n_bytes` of parameters."""
    return FLOAT32 * (n_bytes // DTYPE_BYTES[model.dtype])
