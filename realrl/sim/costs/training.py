"""Seconds of a train_step: passes of every minibatch, reduction of gradients, the optimizer.

    micro-batches ──► pipeline of each replica ──► the slowest replica ──► reduction, norm, AdamW ──► next minibatch

Bytes of the optimizer are those of `realrl.engine.backends`: fused AdamW reads a parameter, its gradient and both
moments, and writes all but the gradient, 28 bytes in float32; clipping reads and writes the gradient, a norm reads it.

Invariants:
    - a minibatch takes at least as long as its slowest replica;
    - a role without data-parallel copies reduces nothing, and one whose optimizer is shared never updates more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from realrl.plan.memory.buffers import FLOAT32, GRADIENT_BUCKET
from realrl.sim.costs.collectives import FREE, LinearCost
from realrl.sim.costs.flops import Array, StageWork
from realrl.sim.costs.passes import Indices, Load, PassCost, pipeline_seconds
from realrl.sim.hardware import Hardware

_ADAMW_BYTES = 7 * FLOAT32
_NORM_AND_CLIP_BYTES = 3 * FLOAT32
_FLATTEN_BYTES = 4 * FLOAT32  # gradients are copied into a bucket and out of it again
_STATS_BYTES = 64.0
STATISTICS = 5.0  # meetings of data-parallel ranks in a train_step, for moments of its batch and numbers of its units
TRAINED_SIZES = 3.0  # products prepared for a new number of tokens: forward one for each matrix, backward two


@dataclass(frozen=True)
class Training:
    """Settings of a role's training, as far as they take time.

    Attributes:
        backend, zero_stage: see `realrl.plan.memory.optimizer`.
        on_host: masters and moments are in host memory.
        checkpointing: blocks are computed again in the backward pass.
        dp, pp: data-parallel ranks, and stages.
    """

    backend: str
    zero_stage: int
    on_host: bool
    checkpointing: bool
    dp: int
    pp: int = 1

    @property
    def n_shares(self) -> int:
        """Number of ranks that share the update of a parameter."""
        return self.dp if self.zero_stage > 0 else 1


@dataclass(frozen=True)
class StageLinks:
    """Collectives of one stage's ranks, by bytes.

    Attributes:
        tensor: all-reduce of a tensor-parallel group.
        reduce, gather: all-reduce and all-gather of a data-parallel group.
        tied: all-reduce of the first and the last stage.
        forward: a message to the next stage.
    """

    tensor: LinearCost
    reduce: LinearCost
    gather: LinearCost
    tied: LinearCost
    forward: LinearCost


@dataclass(frozen=True)
class Free:
    """Parts of a call that take no time, to tell what they cost.

    Attributes:
        waits: stages of a pipeline never wait for each other.
        forward, tensor: messages between stages, and of tensor-parallel groups.
        sharing: gradients and parameters that data-parallel ranks, or the ends of a pipeline, share.
        optimizer: all else between the last backward pass and the new parameters.
    """

    waits: bool = False
    forward: bool = False
    tensor: bool = False
    sharing: bool = False
    optimizer: bool = False

    def of(self, links: StageLinks) -> StageLinks:
        """Return links without those that are free."""
        names = ["forward"] * self.forward + ["tensor"] * self.tensor + ["reduce", "gather", "tied"] * self.sharing
        return replace(links, **dict.fromkeys(names, FREE)) if names else links


NOTHING_FREE = Free()

Run = Callable[[Load, Sequence[PassCost], Sequence[PassCost], Sequence[StageLinks]], Array]
"""Seconds of pipelines: `run_passes`, or `busiest_stage`, with the costs and links of each chunk."""


def passes_of(
    works: Sequence[StageWork], links: Sequence[StageLinks], hardware: Hardware, training: Training | None
) -> tuple[list[PassCost], list[PassCost]]:
    """Return the costs of forward and backward passes of each stage; without training there are no backward ones.

    Stages with the same work and equal links have the same objects.
    """
    made: dict[object, tuple[PassCost, PassCost | None]] = {}
    for work, link in zip(works, links, strict=True):
        if (id(work), link) in made:
            continue
        is_gathered = training is not None and training.zero_stage == 3
        gather = link.gather(work.n_trained * work.element_bytes) if is_gathered else 0.0
        forward = PassCost(work, hardware.device, link.tensor, extra_s=gather)
        backward: PassCost | None = None
        if training is not None:
            width = 3 * FLOAT32 if work.is_frozen or work.element_bytes >= FLOAT32 else work.element_bytes + 2 * FLOAT32
            added = work.n_trained * width / hardware.device.stream
            backward = PassCost(
                work,
                hardware.device,
                link.tensor,
                is_backward=True,
                recomputes=training.checkpointing,
                extra_s=added + gather,
            )
        made[id(work), link] = forward, backward
    costs = [made[id(work), link] for work, link in zip(works, links, strict=True)]
    return [forward for forward, _ in costs], [backward for _, backward in costs if backward is not None]


def run_passes(
    load: Load,
    forwards: Sequence[PassCost],
    backwards: Sequence[PassCost],
    links: Sequence[StageLinks],
    n_stages: int | None = None,
) -> Array:
    """Return the seconds of pipelines of micro-batches.

    Args:
        load: arrays [micro-batches, pipelines].
        forwards: costs of each chunk of the model.
        backwards: empty in inference.
        links: those of each chunk's stage.
        n_stages: stages that share the chunks out; as many as chunks by default.
    """
    messages = [
        link.forward.latency_s + link.forward.s_per_byte * cost.work.message_bytes * load.tokens
        for link, cost in zip(links[:-1], forwards[:-1], strict=True)
    ]
    each = _each(backwards, load) if backwards else None
    return pipeline_seconds(_each(forwards, load), each, messages, n_stages=n_stages)


def _each(costs: Sequence[PassCost], load: Load) -> list[Array]:
    """Return the seconds of each stage; those of alike stages are computed once."""
    found = {id(cost): cost(load) for cost in {id(cost): cost for cost in costs}.values()}
    return [found[id(cost)] for cost in costs]


def busiest_stage(
    load: Load,
    forwards: Sequence[PassCost],
    backwards: Sequence[PassCost],
    links: Sequence[StageLinks],
    n_stages: int | None = None,
) -> Array:
    """Return the seconds of the stage of each pipeline that has the most work, as if it waited for no other."""
    n_stages = n_stages or len(forwards)
    stages = np.zeros((n_stages, load.tokens.shape[1]))
    for costs in (forwards, backwards):
        for chunk, cost in enumerate(costs):
            stages[chunk % n_stages] += cost(load).sum(axis=0)
    most: Array = np.max(stages, axis=0)
    return most


def optimizer_seconds(work: StageWork, link: StageLinks, hardware: Hardware, training: Training) -> float:
    """Return the seconds from a minibatch's last backward pass to its new parameters on one stage."""
    n, device = work.n_trained, hardware.device
    width = FLOAT32 if work.is_frozen else work.element_bytes  # of a parameter that computes
    gradient = n * (width if training.backend == "deepspeed" else FLOAT32)
    seconds = link.tensor(_STATS_BYTES) + link.reduce(_STATS_BYTES)
    # all stages get the loss, in two messages, and add up their norms
    seconds += (2 + 2) * math.ceil(math.log2(training.pp)) * link.forward.latency_s
    if training.dp > 1:
        n_buckets = max(1, -(-int(gradient) // GRADIENT_BUCKET))
        is_divided = training.backend == "megatron" or training.zero_stage >= 2
        reduce = link.gather if is_divided else link.reduce
        seconds += reduce(gradient) + (n_buckets - 1) * reduce.latency_s + n * _FLATTEN_BYTES / device.stream
        if training.zero_stage in (1, 2):
            seconds += link.gather(n * width)
    if work.is_tied and not work.is_frozen:
        seconds += link.tied(FLOAT32 * work.logits * work.hidden_bytes / work.element_bytes)
    updated = n / training.n_shares
    seconds += n * FLOAT32 / device.stream  # the norm
    moved = updated * (_ADAMW_BYTES + _NORM_AND_CLIP_BYTES - FLOAT32)
    published = updated * (FLOAT32 + width) if width < FLOAT32 or training.n_shares > 1 else 0.0
    if training.on_host:
        host = hardware.links.host
        seconds += moved / hardware.host.bytes_per_s + (FLOAT32 + width) * updated / host.speed() + 2 * host.latency_s
    else:
        seconds += moved / device.stream
    return seconds + published / device.stream


def train_seconds(
    by_minibatch: Sequence[tuple[Sequence[int], Indices, Load]],
    n_minibatches: int,
    passes: tuple[Sequence[PassCost], Sequence[PassCost]],
    links: Sequence[StageLinks],
    end_s: float,
    run: Run = run_passes,
) -> float:
    """Return the seconds of all minibatches of a train_step.

    Args:
        by_minibatch: minibatches that shares belong to, the column of each, and micro-batches [micro-batches, columns].
        n_minibatches: number of minibatches of all passes.
        end_s: seconds from the last backward pass of a minibatch to the next one.
        run: seconds of pipelines.
    """
    slowest = np.zeros(n_minibatches)
    for minibatches, columns, load in by_minibatch:
        np.maximum.at(slowest, np.asarray(minibatches), run(load, *passes, links)[columns])
    return float(slowest.sum()) + n_minibatches * end_s
