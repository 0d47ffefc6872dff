"""Execution of one stage's pipeline steps: computations through callbacks, messages point to point.

    receive ──► inbox ──► forward ──► outbox ──► send          a batch of messages is posted at once and waited for
    receive ──► inbox ──► backward ─► outbox ──► send          when a computation needs one of them

The executor knows steps, chunks and tensors, but no models: chunks of one list may belong to several models. Input and
output of a forward are kept until its backward, per (micro-batch, chunk, round).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from realrl.algo.phases import Phases
from realrl.engine.groups import Communicator, Pending
from realrl.plan.memory.buffers import FUSED_PENDING, PIPELINE_PENDING
from realrl.plan.pipeline import Computation, Step, StepKind

Backward = Callable[[torch.Tensor | None, torch.Tensor | None, bool], None]
"""``backward(output, gradient, is_last)`` adds gradients to the leaves of the output's graph."""


def propagate(output: torch.Tensor | None, gradient: torch.Tensor | None, is_last: bool) -> None:
    """Add gradients to the leaves through autograd; does nothing without a graph."""
    if output is not None and output.requires_grad:
        torch.autograd.backward(output, gradient)


@dataclass(frozen=True)
class Chunk:
    """Callbacks of one chunk.

    Attributes:
        forward: computes a step from the previous chunk's output (None for the first chunk). The last chunk of a
            training list returns a scalar loss, or None for nothing to propagate.
        received: shape and dtype of the previous chunk's message for a step; unused by a chunk that receives nothing.
        backward: propagates the gradient of `forward`'s output (None for a loss); its last argument is True in the
            chunk's last backward of the list.
    """

    forward: Callable[[Step, torch.Tensor | None], torch.Tensor | None]
    received: Callable[[Step], tuple[tuple[int, ...], torch.dtype]]
    backward: Backward = propagate


def run_stage(
    steps: Sequence[Step],
    chunks: Mapping[int, Chunk],
    stages: Communicator,
    *,
    device: torch.device,
    phases: Phases | None = None,
    batched: bool = True,
) -> None:
    """Execute the steps in order.

    A message without elements is not sent. Gradients accumulate in the parameters, as in autograd.

    Args:
        steps: this stage's list of a schedule of `realrl.plan.pipeline`, or of `realrl.plan.fusion.messages`.
        chunks: every chunk number of the list.
        stages: the pipeline; its ranks are the stages of the schedule.
        device: where received tensors are put.
        phases: recorder of the waiting for other stages.
        batched: True if neighbouring messages are one batch, as `realrl.plan.pipeline` places them; False if each is
            posted by itself, as `realrl.plan.fusion.messages` wants it.
    """
    limit = PIPELINE_PENDING if batched else FUSED_PENDING
    run = _Run(steps, chunks, stages, device, limit=limit, phases=Phases() if phases is None else phases)
    for is_message, group in groupby(steps, key=lambda step: step.kind.is_message):
        if is_message and batched:
            run.post(list(group))
        elif is_message:
            for step in group:
                run.post([step])
        else:
            for step in group:
                run.compute(step)
    run.finish()


class _Run:
    """State of one `run_stage`."""

    def __init__(
        self,
        steps: Sequence[Step],
        chunks: Mapping[int, Chunk],
        stages: Communicator,
        device: torch.device,
        *,
        phases: Phases,
        limit: int = PIPELINE_PENDING,
    ) -> None:
        self._chunks = chunks
        self._stages = stages
        self._device = device
        self._phases = phases
        self._limit = limit
        backwards = [step for step in steps if step.kind is StepKind.BACKWARD]
        self._trained = {step.computation[1:] for step in backwards}
        self._last_backward = {step.chunk: step for step in backwards}
        received = {step.computation for step in steps if step.kind.is_receive}
        # results that a message or another computation takes
        self._wanted: set[Computation | None] = {step.computation for step in steps if step.kind.is_send}
        self._wanted |= {s.source for s in steps if not s.kind.is_message and s.computation not in received}
        self._pending: dict[int, Pending] = {}  # by number of the batch, ascending
        self._n_posted = 0
        self._inbox: dict[Computation, tuple[torch.Tensor, int]] = {}  # tensor, batch
        self._outbox: dict[Computation, torch.Tensor] = {}
        # input and output of a forward, for its backward
        self._saved: dict[tuple[int, ...], tuple[torch.Tensor | None, torch.Tensor | None]] = {}

    def post(self, steps: Sequence[Step]) -> None:
        """Start a batch of messages."""
        sends: list[tuple[int, torch.Tensor]] = []
        receives: list[tuple[int, torch.Tensor]] = []
        for step in steps:
            assert step.peer is not None
            if step.kind.is_send:
                sends.append((step.peer, self._outbox.pop(step.computation)))
            else:
                buffer = self._buffer(step)
                self._inbox[step.computation] = (buffer, self._n_posted)
                receives.append((step.peer, buffer))
        if len(self._pending) >= self._limit:  # waiting earlier than needed is always safe
            self._wait_for(next(iter(self._pending)))
        self._pending[self._n_posted] = self._stages.exchange(
            [s for s in sends if s[1].numel()], [r for r in receives if r[1].numel()]
        )
        self._n_posted += 1

    def compute(self, step: Step) -> None:
        """Run a forward or a backward; waits for its input."""
        if step.kind is StepKind.FORWARD:
            self._forward(step)
        else:
            self._backward(step)

    def finish(self) -> None:
        """Wait for all messages."""
        while self._pending:
            self._wait_for(next(iter(self._pending)))

    def _forward(self, step: Step) -> None:
        key = step.computation[1:]
        received = self._take(step)
        if key in self._trained and received is not None:
            received.requires_grad_()
        output = self._chunks[step.chunk].forward(step, received)
        if key in self._trained:
            self._saved[key] = (received, output)
        if output is not None:
            self._hand_on(step, output.detach())

    def _backward(self, step: Step) -> None:
        gradient = self._take(step)
        received, output = self._saved.pop(step.computation[1:])
        self._chunks[step.chunk].backward(output, gradient, step is self._last_backward[step.chunk])
        if received is not None:
            self._hand_on(step, torch.zeros_like(received) if received.grad is None else received.grad)

    def _buffer(self, step: Step) -> torch.Tensor:
        if step.kind is StepKind.RECEIVE_FORWARD:
            shape, dtype = self._chunks[step.chunk].received(step)
            return torch.empty(shape, dtype=dtype, device=self._device)
        output = self._saved[step.computation[1:]][1]
        assert output is not None
        return torch.empty_like(output, memory_format=torch.contiguous_format, requires_grad=False)

    def _take(self, step: Step) -> torch.Tensor | None:
        """Input of a computation: received, or made by another chunk of this stage."""
        if step.source is None:
            return None
        if step.computation not in self._inbox:
            return self._outbox.pop(step.source)
        tensor, batch = self._inbox.pop(step.computation)
        self._wait_for(batch)
        return tensor

    def _wait_for(self, batch: int) -> None:
        """Wait until a batch is through, unless that was waited for already."""
        pending = self._pending.pop(batch, None)
        if pending is not None:
            with self._phases.phase("wait for other stages"):
                pending.wait()

    def _hand_on(self, step: Step, made: torch.Tensor) -> None:
        if step.computation in self._wanted:
            self._outbox[step.computation] = made.contiguous()
