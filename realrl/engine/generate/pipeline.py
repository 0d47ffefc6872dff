"""Generation over the stages of a pipeline and the ranks of a tensor-parallel group.

The rows are divided into as many runs as there are stages, all in flight at once. Time goes in ticks, which end with
one exchange of messages between all stages. With P stages, run r begins a step at ticks r, r + P, r + 2 P, ...; stage s
computes it s ticks later, and the tokens that the last stage samples from it reach every stage at the end of tick
r + P - 1, in time for the run's next step:

    tick      0     1     2     3     4
    stage 0   run 0 run 1 run 2 run 0 run 1
    stage 1         run 0 run 1 run 2 run 0
    stage 2               run 0 run 1 run 2
                            └ tokens of run 0 to all stages

With V virtual stages a step goes V times through the stages, chunk after chunk: run r begins one at ticks r, r + P V,
r + 2 P V, ..., and stage s computes its chunk number j of it j P + s ticks later.

Invariants:
- a stage computes one chunk of one run in a tick, at most;
- every rank begins and finishes every step at the same tick, with the same tokens: all know at all times the rows that
  exist, and so the shape of every message;
- all messages of a tick are posted together before any is waited for, so no order of them can deadlock.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import count

import torch

from realrl.algo.phases import Phases
from realrl.cpu import InvalidLogitsError, SampledTokens
from realrl.engine.generate.decode_batch import DecodeBatch, PendingStep
from realrl.engine.generate.network import FusedNetwork
from realrl.engine.groups import Communicator
from realrl.engine.parallel import Parallel

_FIELDS = 3  # token, log-probability, policy log-probability


def run_batches(
    batches: Sequence[DecodeBatch], network: FusedNetwork, parallel: Parallel, device: torch.device, phases: Phases
) -> None:
    """Generate all responses: this rank's part.

    Args:
        batches: at most one per stage, alike on every rank.
        network: this rank's layers.
        parallel: this rank's place.
        device: device of the messages.
        phases: recorder of the ticks, neighbours of one kind as one phase.

    Raises:
        CallError: logits are not finite; raised on every rank alike.
    """
    stage, n_stages = parallel.pp_rank, parallel.strategy.pp
    n_chunks = n_stages * parallel.strategy.vpp
    slots = [*batches, *[None] * (n_chunks - len(batches))]  # by the tick that begins their steps, modulo chunks

    def pending_at(start: int) -> tuple[DecodeBatch, PendingStep] | None:
        """The batch and its step that began at tick `start`; None if there is none."""
        batch = slots[start % n_chunks]
        return None if batch is None or batch.pending is None else (batch, batch.pending)

    def work_at(tick: int) -> tuple[int, DecodeBatch, PendingStep] | None:
        """The chunk of this stage that computes at a tick, the batch and its step; None if there is none."""
        for chunk in range(stage, n_chunks, n_stages):
            if (found := pending_at(tick - chunk)) is not None:
                return chunk, *found
        return None

    hidden: torch.Tensor | None = None  # from the chunk before, for the step that this stage computes next
    now_s = time.time()
    for tick in count():
        if all(batch.is_done for batch in batches):
            return
        starting = slots[tick % n_chunks]
        if starting is not None and not starting.is_done:
            starting.begin()
        computing, finishing = work_at(tick), pending_at(tick - n_chunks + 1)
        sends: list[tuple[int, torch.Tensor]] = []
        receives: list[tuple[int, torch.Tensor]] = []
        computed = None
        if computing is not None:
            chunk, batch, step = computing
            computed = batch.compute(step, hidden, chunk // n_stages)
            if chunk < n_chunks - 1 and step.n_tokens:
                sends.append(((stage + 1) % n_stages, computed.contiguous()))
        coming = work_at(tick + 1)
        hidden = None
        if coming is not None and coming[0] > 0 and coming[2].n_tokens:
            hidden = torch.empty(coming[2].n_tokens, network.config.hidden_size, dtype=network.dtype, device=device)
            receives.append(((stage - 1) % n_stages, hidden))
        packet = torch.empty(0)
        if finishing is not None:
            packet = torch.empty(1 + _FIELDS * len(finishing[1].rows), dtype=torch.float64, device=device)
            if stage == n_stages - 1:
                assert computed is not None, "the last chunk computes what finishes"
                _sample(*finishing, computed, packet, parallel.tp)
                sends += [(peer, packet) for peer in range(stage)]
            else:
                receives.append((n_stages - 1, packet))
        parallel.pp.exchange(sends, receives).wait()
        if finishing is not None:
            _finish(*finishing, packet)
        name, n_tokens = _phase_of(None if computing is None else computing[2])
        now_s = phases.add(name, now_s, n_tokens, goes_on=True)


def _phase_of(step: PendingStep | None) -> tuple[str, int]:
    """Return the name of a tick that computes a step, or none, and the number of its tokens."""
    if step is None:
        return "wait for other stages", 0
    return ("decode", len(step.rows)) if step.admission is None else ("prefill", step.n_tokens)


def _sample(
    batch: DecodeBatch, step: PendingStep, logits: torch.Tensor, packet: torch.Tensor, tp: Communicator
) -> None:
    """Fill the packet: the first row whose logits are not finite, or -1, and then the sampled tokens.

    One rank samples for the whole tensor-parallel group, so that rounding cannot part them.
    """
    if tp.rank == 0:
        packet[0] = -1
        try:
            packet[1:] = batch.sample(step, logits).flatten()
        except InvalidLogitsError as error:
            packet.fill_(error.row)
    tp.broadcast_(packet, 0)


def _finish(batch: DecodeBatch, step: PendingStep, packet: torch.Tensor) -> None:
    values = packet.cpu()
    if values[0] >= 0:
        raise batch.invalid_logits(step, int(values[0]))
    tokens, logprobs, policy_logprobs = values[1:].view(_FIELDS, -1)
    batch.finish(step, SampledTokens(tokens.long(), logprobs.float(), policy_logprobs.float()))
