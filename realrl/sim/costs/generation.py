"""Seconds of generation on one data-parallel replica, by the engine's own rules of admission.

    shares of prompts, one for each stage ──► slots: admit and prefill, or decode one token for every row

A decoding step of B rows takes f(B), plus the bandwidth's time for the keys and values that its rows see. So time adds
up between the moments when a row ends: with response lengths L_1 >= L_2 >= ... of rows that enter together, exactly k
rows are decoded in L_k - L_(k+1) steps. In a pipeline every tick takes as long as its slowest stage; there a row's keys
and values count at their mean.

Invariants:
    - without a pipeline, the seconds are the sum over all steps of what each step takes;
    - more rows, longer prompts or longer responses never take less time.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain

import numpy as np

from realrl.config.schema import GenerationConfig
from realrl.plan.samples.slot_table import SlotTable, divide_prompts, prefill_chunks, rows_at_a_time
from realrl.sim.costs.collectives import LinearCost
from realrl.sim.costs.flops import LOGIT_BYTES, Array, StageWork, attended
from realrl.sim.costs.passes import Indices, Load, PassCost
from realrl.sim.hardware import Device

_PACKET_BYTES = 24.0  # token and two log-probabilities, from the last stage to all others


Prompt = tuple[int, tuple[int, ...]]
"""Tokens of a sample's prompt, and of each response that it gets."""


@dataclass(frozen=True)
class StageDecoding:
    """Decoding on one stage.

    Args:
        tensor: an all-reduce of the tensor-parallel group, by bytes.
        forward: a message to another stage, by bytes; free without a pipeline.
        max_rows: most rows that are decoded together.
    """

    work: StageWork
    device: Device
    tensor: LinearCost
    forward: LinearCost
    max_rows: int

    @cached_property
    def prefill(self) -> PassCost:
        """Cost of a pass over prompts."""
        return PassCost(self.work, self.device.generating, self.tensor)

    @cached_property
    def steps(self) -> Array:
        """Seconds of a step by its rows, 0 to `max_rows`, without the keys and values that it reads."""
        work, device, rows = self.work, self.device.generating, np.arange(self.max_rows + 1.0)
        rate, half = device.rate(work.dtype), device.half_tokens
        # ranks that exchange activations compute block after block, as in training, and not all blocks in one call
        block_s = max(device.block_s, self.device.block_s) if self.tensor.latency_s else device.block_s
        seconds = work.n_layers * block_s + np.maximum(
            work.product_flops(1.0) * (rows + half) / rate, work.bytes_read(rows) / device.stream
        )
        seconds += work.row_bytes * rows / device.activation_stream
        n_exchanges = 2 * work.n_layers + work.has_embedding
        seconds += n_exchanges * (self.tensor.latency_s + self.tensor.s_per_byte * work.hidden_bytes * rows)
        if work.has_head:
            head = np.maximum(work.head_flops(rows + half) / rate, work.head * work.element_bytes / device.stream)
            gathered = self.tensor.latency_s + self.tensor.s_per_byte * work.logits * work.element_bytes * rows
            seconds += head + gathered + device.token_s + rows * work.logits * LOGIT_BYTES / device.activation_stream
        seconds += self.forward.latency_s + self.forward.s_per_byte * (work.hidden_bytes + _PACKET_BYTES) * rows
        seconds[0] = 0.0
        return seconds

    def reading(self, prompts: Array, responses: Array) -> Array:
        """Return the seconds in which decoding a response reads keys and values, from its second token on."""
        seen = sum(
            (n * (attended(prompts + responses - 1, w) - attended(prompts, w)) for w, n in self.work.windows),
            np.zeros_like(prompts),
        )
        return seen * self.work.cache_bytes / self.device.generating.stream

    def prefilling(self, lengths: Sequence[Sequence[int]], n_copied: Sequence[int]) -> Array:
        """Return the seconds of admissions: as many passes over prompts as the engine takes, and copies of caches.

        Args:
            lengths: tokens of the prompts of each admission that are computed, in the order of entry.
            n_copied: tokens of each admission's prompts that are copied for further responses.
        """
        flat = np.fromiter(chain.from_iterable(lengths), dtype=float)
        chunks = [(i, len(part)) for i, some in enumerate(lengths) for part in prefill_chunks(some)]
        admission, sizes = np.array(chunks, dtype=int).reshape(-1, 2).T
        starts = np.cumsum(sizes) - sizes
        pairs = {window: _sums(attended(flat, window), starts) for window, _ in self.work.windows}
        passes = self.prefill(Load(_sums(flat, starts), sizes.astype(float), pairs))
        seconds = np.zeros(len(lengths))
        np.add.at(seconds, admission, passes)
        copying = 2 * self.work.n_layers * self.work.cache_bytes / self.device.generating.stream
        sampling = self.device.token_s if self.work.has_head else 0.0
        return seconds + copying * np.array(n_copied, dtype=float) + sampling


def _sums(values: Array, starts: Indices) -> Array:
    found: Array = np.add.reduceat(values, starts) if len(starts) else np.zeros(0)
    return found


def replica_seconds(
    prompts: Sequence[Prompt], stages: Sequence[StageDecoding], generation: GenerationConfig, *, waits: bool = True
) -> float:
    """Return the seconds in which one replica generates for its prompts.

    Args:
        prompts: in the order of the replica's samples.
        stages: the pipeline.
        waits: stages wait for each other; else the time is that of the slowest stage of each round.
    """
    if not prompts:
        return 0.0
    batches, steps = _rounds_of(tuple(prompts), min(len(stages), generation.max_batch_size), generation.max_batch_size)
    pairs = {(id(batch), id(stage)): (batch, stage) for batch in batches for stage in stages}
    found = {pair: batch.seconds(stage, len(steps)) for pair, (batch, stage) in pairs.items()}
    seconds = np.stack([[found[id(batch), id(stage)] for stage in stages] for batch in batches])
    rounds = _round_seconds(seconds) if waits else seconds.sum(axis=0).max(axis=0)
    return float(np.dot(rounds, steps))


@lru_cache(maxsize=1024)  # of layouts that differ in tensor parallelism alone
def _rounds_of(
    prompts: tuple[Prompt, ...], n_shares: int, max_batch_size: int
) -> tuple[tuple[_Batch, ...], tuple[int, ...]]:
    """Return the batches of a pipeline, run to their end, and the decoding steps of each round.

    All batches decode as often in a round, or one of them admits.
    """
    shares = divide_prompts([n for n, _ in prompts], n_shares)
    n_responses = max(len(made) for _, made in prompts)
    max_rows = rows_at_a_time(
        max(map(len, shares)),
        n_shares=len(shares),
        n_responses=n_responses,
        max_batch_size=max_batch_size,
    )
    of_shares = [tuple([prompts[i] for i in share]) for share in shares]
    batches = {own: _Batch(own, n_responses, max_rows) for own in of_shares}  # alike shares have the same history
    steps: list[int] = []
    while left := [batch for batch in batches.values() if not batch.is_done]:
        n = 1 if any(batch.can_admit for batch in left) else min(batch.n_until_end for batch in left)
        for batch in left:
            batch.go(n, number=len(steps))
        steps.append(n)
    return tuple([batches[own] for own in of_shares]), tuple(steps)


def together_seconds(replicas: Sequence[Sequence[Prompt]], stage: StageDecoding) -> Array:
    """Return the seconds of replicas without a pipeline whose rows all enter together."""
    if not replicas:
        return np.zeros(0)
    prompts = [*chain.from_iterable(replicas)]
    made = [responses for _, responses in prompts]
    n_made = [len(responses) for responses in made]
    counts = np.array([sum([len(responses) for _, responses in some]) for some in replicas])
    replica = np.repeat(np.arange(len(replicas)), counts)
    prompt_tokens = np.repeat(np.array([float(n) for n, _ in prompts]), n_made)
    responses = np.array([*chain.from_iterable(made)], dtype=float)
    order = np.lexsort((-responses, replica))
    steps = responses[order] - 1.0
    starts = np.cumsum(counts) - counts
    number = np.arange(len(steps)) - starts[replica]  # rows of the replica that last longer
    shorter = np.append(steps[1:], 0.0)
    shorter[np.append(starts[1:], len(steps)) - 1] = 0.0  # behind the last row of a replica
    seconds = (steps - shorter) * stage.steps[number + 1] + stage.reading(prompt_tokens, responses)[order]
    longest_first = [sorted([n for n, _ in some], reverse=True) for some in replicas]
    copied = [sum([n * (len(responses) - 1) for n, responses in some]) for some in replicas]
    return _sums(seconds, starts) + stage.prefilling(longest_first, copied)


def _round_seconds(seconds: Array) -> Array:
    """Return the seconds of rounds: in tick k of a round stage s computes batch (k - s) mod the number of stages.

    All wait for the slowest stage of a tick.

    Args:
        seconds: [batches, stages, rounds], those of a batch's step on a stage; at most as many batches as stages.
    """
    n_batches, n_stages, n_rounds = seconds.shape
    total = np.zeros(n_rounds)
    for tick in range(n_stages):
        at_work = [((tick - s) % n_stages, s) for s in range(n_stages) if (tick - s) % n_stages < n_batches]
        total += np.max([seconds[batch, stage] for batch, stage in at_work], axis=0)
    return total


class _Batch:
    """One share of prompts, and what happens to it in rounds: the engine's slots admit, or all rows decode.

    When rows enter and end does not depend on seconds, so these are counted afterwards, for all rounds at once.
    """

    def __init__(self, prompts: Sequence[Prompt], n_responses: int, max_rows: int) -> None:
        self._prompts, self._n_responses = prompts, n_responses
        self._slots = SlotTable([n for n, _ in prompts], n_responses=n_responses, max_rows=max_rows)
        self._n_steps = 0
        self._ends: list[tuple[int, int]] = []  # (step after which it ends, row) of each present row, a heap
        self._decoded: list[tuple[int, int]] = []  # (round, rows)
        self._admitted: list[tuple[int, list[int], int]] = []  # (round, tokens of computed prompts, copied tokens)
        n_rows = len(prompts) * n_responses
        self._first, self._last = [0] * n_rows, [0] * n_rows  # rounds in which a row enters and ends

    @property
    def is_done(self) -> bool:
        return self._slots.is_done

    @property
    def can_admit(self) -> bool:
        return self._slots.can_admit

    @property
    def n_until_end(self) -> int:
        """Decoding steps until a row ends."""
        return self._ends[0][0] - self._n_steps

    def go(self, n: int, *, number: int) -> None:
        """Admit in a round, or decode n times."""
        if self.can_admit:
            self._admit(number)
        else:
            self._decoded.append((number, len(self._slots.rows)))
            self._n_steps += n
        n_ended = 0
        while self._ends and self._ends[0][0] <= self._n_steps:
            self._last[heapq.heappop(self._ends)[1]] = number
            n_ended += 1
        self._slots.retire(range(n_ended))  # whichever rows: admission depends on their number alone

    def seconds(self, stage: StageDecoding, n_rounds: int) -> Array:
        """Return the seconds of one step in each round on a stage; 0 in rounds without any."""
        rows, seconds = np.zeros(n_rounds, dtype=int), np.zeros(n_rounds)
        for number, n in self._decoded:
            rows[number] = n
        numbers, computed, copied = zip(*self._admitted, strict=True)
        seconds[list(numbers)] = stage.prefilling(computed, copied)
        prompts = np.repeat(np.array([float(n) for n, _ in self._prompts]), self._n_responses)
        responses = np.array([n for _, made in self._prompts for n in made], dtype=float)
        reading = stage.reading(prompts, responses) / np.maximum(responses - 1, 1)
        change = np.zeros(n_rounds + 1)
        np.add.at(change, self._first, reading)
        np.subtract.at(change, np.array(self._last) + 1, reading)
        return seconds + np.where(rows > 0, stage.steps[rows] + np.cumsum(change)[:-1], 0.0)

    def _admit(self, number: int) -> None:
        admission = self._slots.admit()
        for entry in admission.entries:
            sample, response = entry.row.sample, entry.row.response
            row = sample * self._n_responses + response
            heapq.heappush(self._ends, (self._n_steps + self._prompts[sample][1][response] - 1, row))
            self._first[row] = number
        computed, copied = (
            [self._prompts[entry.row.sample][0] for entry in entries]
            for entries in (admission.prefills, admission.copies)
        )
        self._admitted.append((number, computed, sum(copied)))
