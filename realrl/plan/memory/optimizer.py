"""Bytes of optimizer state and gradients of one rank.

Invariants:
- no function gives less for more parameters, nor more for a higher degree of sharding;
- a division over n ranks gives each rank at most what the first has: at least 1 / n of the whole, and less than one
  element more, or one `SLICE_ALIGNMENT` of each parameter with the native backend.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from realrl.plan.memory.buffers import (
    DEEPSPEED_BUCKET,
    FLOAT32,
    GRADIENT_BUCKET,
    MASTERS_BUCKET,
    REDUCTION_BUCKET,
    SLICE_ALIGNMENT,
)


@dataclass(frozen=True)
class OptimizerBytes:
    """Bytes that AdamW needs on one rank.

    Attributes:
        masters: float32 parameters beside those that compute.
        moments: first and second moments.
        gradients: gradients from the first backward of a minibatch to the optimizer's step.
        holds_gradients: the memory of gradients and buffers is never given back.
        buffers: message buffers, which exist as long as gradients.
        host: gradients and copies of an offloaded optimizer, in host memory beside masters and moments.
        parameters: share of the parameters that the rank keeps, 0 to 1.
        published: what gathers new parameters, at the end of the optimizer's step.
        host_gradients: gradients in host memory during the optimizer's step.
    """

    masters: int
    moments: int
    gradients: int
    holds_gradients: bool = False
    buffers: int = 0
    host: int = 0
    parameters: float = 1.0
    published: int = 0
    host_gradients: int = 0


@dataclass(frozen=True)
class OptimizerSharing:
    """Division of a role's optimizer over its ranks.

    Attributes:
        backend: "native", "megatron" or "deepspeed".
        zero_stage: 0 to 3.
        dp: data-parallel ranks.
        on_host: masters and moments are in host memory, where a float32 parameter has a master as well.
        whole_gradients: other ranks hold copies of parameters, or stages follow, so that gradients are not divided.
    """

    backend: str = "native"
    zero_stage: int = 0
    dp: int = 1
    on_host: bool = False
    whole_gradients: bool = False


_ALONE = OptimizerSharing()


def optimizer_bytes(
    sizes: Sequence[int], *, element_bytes: int, sharing: OptimizerSharing = _ALONE, largest: int = 0
) -> OptimizerBytes:
    """Return the bytes of state for training parameters of one rank.

    AdamW has two float32 moments, 8 bytes a parameter. In half precision there are float32 masters, 4 bytes.

    native      float32 gradients, 4 bytes; `zero_stage` 1 divides moments and masters over the dp ranks (ZeRO:
                Rajbhandari et al. 2020, section 5.1)
    megatron    its distributed optimizer: with gradients (float32, in one buffer that stays) and parameters, a bf16
                model takes 6 + 12 / dp bytes a parameter, a float32 one 8 + 8 / dp (Megatron-LM, docs/source/api-guide/
                dist_optimizer.md)
    deepspeed   gradients in the model's precision; stage 1 divides moments and masters over the dp ranks, stage 2
                gradients too, stage 3 parameters too (Rajbhandari et al. 2020, figure 1); with any of them there are
                masters in float32 as well. Divided gradients are added up in float32; those of stage 3 stay. An
                offloaded optimizer has float32 gradients in host memory too and, but with stage 3, a copy of its share
                of the parameters, two buffers for the largest gradient and, where float32 gradients are divided, those
                of the micro-batches so far

    Args:
        sizes: elements of each parameter of this rank that is trained.
        element_bytes: size of an element of the parameters that compute.
        sharing: by default one rank has it all.
        largest: elements of the largest parameter.

    Raises:
        ValueError: an unknown backend.
    """
    backend, zero_stage, dp, on_host = sharing.backend, sharing.zero_stage, sharing.dp, sharing.on_host
    if backend not in ("native", "megatron", "deepspeed"):
        raise ValueError(f"unknown training backend {backend!r}")
    is_deepspeed = backend == "deepspeed"
    has_masters = element_bytes < FLOAT32 or on_host or (is_deepspeed and zero_stage > 0)
    n_elements, slices = sum(sizes), [slice_elements(size, dp) for size in sizes]
    divided = _share(n_elements, dp if zero_stage > 0 else 1)
    if backend == "native" and zero_stage:
        divided = sum(map(min, sizes, slices))
    divides_gradients = is_deepspeed and (zero_stage == 3 or (zero_stage == 2 and not sharing.whole_gradients))
    gradient_elements = _share(n_elements, dp) if divides_gradients else n_elements
    gradient_bytes = element_bytes if is_deepspeed and not divides_gradients else FLOAT32
    host = 0
    if is_deepspeed and on_host:
        host = FLOAT32 * divided
        if zero_stage < 3:
            host += element_bytes * (divided + 2 * largest)
            host += FLOAT32 * divided if divides_gradients and element_bytes == FLOAT32 else 0
    published = 0
    if backend == "native" and zero_stage and dp > 1:
        bucket = min(dp * sum(slices), MASTERS_BUCKET + largest)
        published = element_bytes * (bucket + _share(bucket, dp) + 2 * largest)
        published += element_bytes * divided if has_masters else 0
    return OptimizerBytes(
        published=published,
        host_gradients=FLOAT32 * divided if backend == "native" and on_host else 0,
        masters=FLOAT32 * divided if has_masters else 0,
        moments=2 * FLOAT32 * divided,
        gradients=gradient_bytes * gradient_elements,
        holds_gradients=backend == "megatron" or zero_stage == 3,
        buffers=(FLOAT32 if zero_stage == 3 else element_bytes) * DEEPSPEED_BUCKET
        if is_deepspeed and zero_stage
        else 0,
        host=host,
        parameters=1 / dp if is_deepspeed and zero_stage >= 3 else 1.0,
    )


def reduction_bytes(gradient_bytes: int, largest: int, *, dp: int, partial: int = 0) -> int:
    """Return the bytes of gradients that ranks add up at a time, in buffers beside the gradients.

    Args:
        gradient_bytes: of all gradients, which data-parallel ranks add up.
        largest: of one parameter's.
        dp: data-parallel ranks.
        partial: of those that tensor-parallel ranks add up.
    """
    over_dp = 0 if dp == 1 else min(gradient_bytes, GRADIENT_BUCKET + largest)
    return max(over_dp, min(partial, REDUCTION_BUCKET * FLOAT32 + largest))


def slice_elements(n_elements: int, n_ranks: int) -> int:
    """Return the length of each rank's slice of a flat tensor; the last ranks' may be shorter or empty."""
    if n_ranks == 1:
        return n_elements
    return -(-n_elements // (n_ranks * SLICE_ALIGNMENT)) * SLICE_ALIGNMENT


def _share(n_elements: int, n_ranks: int) -> int:
    return math.ceil(n_elements / n_ranks)
