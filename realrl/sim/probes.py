"""Single measurements on a machine, and the seconds that the costs give for them on modelled hardware.

Invariant: a probe is computed by the costs of `realrl.sim.costs` alone, so that hardware fitted to probes is fitted to
the forms that predict a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

import numpy as np

from realrl.mesh.device_mesh import Allocation, Cluster, DeviceMesh, ParallelStrategy
from realrl.plan.memory.formulas.local import Kernels
from realrl.shape import DecoderConfig, DType
from realrl.sim.costs.calls import decoding_model, packing_seconds
from realrl.sim.costs.collectives import FREE, LinearCost, Route, all_gather, all_reduce, send
from realrl.sim.costs.flops import Array, stage_work
from realrl.sim.costs.generation import StageDecoding, together_seconds
from realrl.sim.costs.moves import copy_seconds, realloc_of, realloc_seconds
from realrl.sim.costs.passes import Load
from realrl.sim.costs.samples import tokens_of
from realrl.sim.costs.training import (
    TRAINED_SIZES,
    StageLinks,
    Training,
    optimizer_seconds,
    passes_of,
    run_passes,
)
from realrl.sim.durations import SampleSizes
from realrl.sim.hardware import Hardware

Kind = Literal[
    "products", "inference", "train_step", "generate", "collectives", "reallocs", "copies", "rows", "calls", "rewards"
]
CALLS: tuple[Kind, ...] = ("generate", "inference", "train_step")
COMPUTING: tuple[Kind, ...] = ("products", *CALLS)
"""Kinds of which each worker does its own, whatever the others do."""
Way = Literal["", "all_reduce", "all_gather", "send"]

_ALONE = ParallelStrategy()
_LINKS = StageLinks(FREE, FREE, FREE, FREE, FREE)
_TRAINING = Training("native", 0, False, False, 1)


@dataclass(frozen=True)
class Probe:
    """One measurement, made by all workers at the same time, or by one while the others wait.

    Attributes:
        kind: "products" multiplies tokens by the matrices of blocks one after the other; "inference", "train_step" and
            "generate" go through the engine; "collectives" and "copies" carry bytes, "rows" those of sequences, and
            "reallocs" a model from the first worker to replicas on all; "calls" and "rewards" are whole calls of a
            worker that compute nothing, and that judge responses by the run's functions.
        model: key of `Bench.models`.
        n_layers: blocks that the model is cut to.
        n_sequences, prompt_tokens, response_tokens: sequences, of about these lengths.
        n_alike: sequences of a sample, which have one prompt; if there are several, their responses differ in length.
        way: kind of a collective, between all workers; each sends to the next one.
        n_bytes: of one rank's summand, of the gathered whole, or of the message.
        is_new: the number of tokens is another one each time.
        is_alone: one worker computes.
    """

    kind: Kind
    model: str = ""
    n_layers: int = 0
    n_sequences: int = 0
    prompt_tokens: int = 0
    response_tokens: int = 0
    n_alike: int = 1
    way: Way = ""
    n_bytes: int = 0
    is_new: bool = False
    is_alone: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return self.n_sequences * (self.prompt_tokens + self.response_tokens)

    @property
    def responses(self) -> tuple[int, ...]:
        """Lengths of a sample's responses; empty if there are none."""
        n = self.response_tokens
        if n == 0 or self.n_alike == 1:
            return (n,) if n else ()
        return tuple(max(1, varied(n, i)) for i in range(self.n_alike))

    def __str__(self) -> str:
        if self.n_bytes:
            return f"{self.way or self.kind} of {self.n_bytes:,} bytes"
        if not self.model:
            return f"{self.kind} of {self.n_sequences} x {self.prompt_tokens}+{self.response_tokens} tokens"
        lengths = f"{self.prompt_tokens}+{self.response_tokens}" if self.response_tokens else f"{self.prompt_tokens}"
        manner = " of new sizes" * self.is_new + " alone" * self.is_alone
        manner += f", {self.n_alike} to a prompt," * (self.n_alike > 1)
        return f"{self.kind}{manner} of {self.model}, {self.n_layers} blocks, {self.n_sequences} x {lengths} tokens"


@dataclass(frozen=True)
class Bench:
    """Models, workers and kernels that probes compute with.

    Attributes:
        models: name -> model, in the dtype of its computations.
        n_workers: workers that compute at the same time.
        kernels: the machine's kernels.
    """

    models: Mapping[str, DecoderConfig]
    n_workers: int
    kernels: Kernels


def varied(n: int, number: int) -> int:
    """Return up to a quarter more or less than n."""
    return n + n * ((5 * number + 4) % 9 - 4) // 16


def cut_to(model: DecoderConfig, n_layers: int) -> DecoderConfig:
    """Return a model that has only the first blocks."""
    windowed = model.windowed_layers
    moe = model.moe
    if moe is not None:
        moe = replace(moe, dense_layers=tuple(layer for layer in moe.dense_layers if layer < n_layers))
    return replace(
        model,
        n_layers=n_layers,
        windowed_layers=None if windowed is None else tuple(layer for layer in windowed if layer < n_layers),
        moe=moe,
    )


def moved_between(n_workers: int) -> tuple[Allocation, Allocation]:
    """Return the layouts of a reallocation: one worker's, and replicas on all."""
    cluster = Cluster(1, n_workers)
    first, every = DeviceMesh(cluster, (0,)), DeviceMesh(cluster, tuple(range(n_workers)))
    return Allocation(first, _ALONE), Allocation(every, ParallelStrategy(dp=n_workers))


def seconds_of(probes: Sequence[Probe], hardware: Hardware, bench: Bench) -> Array:
    """Return the seconds of probes on modelled hardware."""
    seconds = np.zeros(len(probes))
    groups: dict[tuple[Kind, str, int], list[int]] = {}
    for i, probe in enumerate(probes):
        groups.setdefault((probe.kind, probe.model, probe.n_layers), []).append(i)
    for (kind, name, n_layers), members in groups.items():
        some = [probes[i] for i in members]
        if kind == "reallocs":
            plan = realloc_of(cut_to(bench.models[name], n_layers), *moved_between(bench.n_workers))
            seconds[members] = realloc_seconds(plan, hardware, lambda rank: 0)
        elif name:
            together = _computing(kind, some, cut_to(bench.models[name], n_layers), hardware, bench)
            seconds[members] = together / np.where([probe.is_alone for probe in some], hardware.device.alone, 1.0)
        else:
            seconds[members] = [_around(probe, hardware, bench.n_workers) for probe in some]
    return seconds


def _computing(kind: Kind, probes: Sequence[Probe], model: DecoderConfig, hardware: Hardware, bench: Bench) -> Array:
    device, work = hardware.device, stage_work(model, _ALONE, 0)
    if kind == "generate":
        work = stage_work(decoding_model(model, bench.kernels), _ALONE, 0)
        stage = StageDecoding(work, device, FREE, FREE, max(probe.n_sequences for probe in probes))
        replicas = [[(p.prompt_tokens, (p.response_tokens,))] * p.n_sequences for p in probes]
        return together_seconds(replicas, stage) + packing_seconds(model, _ALONE, bench.kernels, device.generating)
    if kind == "products":
        tokens = np.array([float(probe.tokens) for probe in probes])
        per_token = work.product_flops(1.0) / device.rate(work.dtype)
        return cast(Array, np.maximum(per_token * (tokens + device.half_tokens), work.matrix_bytes / device.stream))
    load, links = _load(probes, model), [_LINKS]
    is_new = np.array([float(probe.is_new) for probe in probes])
    if kind == "inference":
        return run_passes(load, *passes_of([work], links, hardware, None), links) + is_new * device.size_s
    passes = run_passes(load, *passes_of([work], links, hardware, _TRAINING), links)
    return passes + optimizer_seconds(work, _LINKS, hardware, _TRAINING) + is_new * TRAINED_SIZES * device.size_s


def _load(probes: Sequence[Probe], model: DecoderConfig) -> Load:
    """Return one micro-batch for each probe, as arrays [1, probes]."""
    sizes = {
        str(i): SampleSizes((probe.prompt_tokens,) * probe.n_alike, probe.responses) for i, probe in enumerate(probes)
    }
    one = tokens_of(sizes, model, shares_prefixes=True).load
    times = np.array([p.n_sequences / p.n_alike for p in probes])
    pairs = {window: n * times for window, n in one.pairs.items()}
    return Load(one.tokens * times, one.scored * times, pairs, one.forks * times).reshape(1, len(probes))


def _around(probe: Probe, hardware: Hardware, n_workers: int) -> float:
    """Return the seconds of a probe without a model."""
    host = hardware.host
    if probe.kind == "copies":
        return copy_seconds(probe.n_bytes, n_workers, hardware)
    if probe.kind == "rows":
        return host.pull_seconds(probe.n_sequences, probe.n_bytes)
    if probe.kind == "calls":
        return host.call_s + host.sample_s * probe.n_sequences / probe.n_alike
    if probe.kind == "rewards":
        return host.call_s + host.pool_s + host.reward_s * probe.n_sequences
    route, links = Route(n_workers, 1, n_workers), hardware.links
    cost: LinearCost = send(False, n_workers, links)
    if probe.way != "send":
        cost = (all_reduce if probe.way == "all_reduce" else all_gather)(route, links)
    return cost(probe.n_bytes)


def computing_dtypes(bench: Bench) -> set[DType]:
    """Return the dtypes in which models train and score."""
    return {model.dtype for model in bench.models.values()}


def decoding_dtypes(bench: Bench) -> set[DType]:
    """Return the dtypes in which models generate."""
    return {decoding_model(model, bench.kernels).dtype for model in bench.models.values()}
