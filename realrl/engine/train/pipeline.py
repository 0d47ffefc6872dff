"""Execution of one stage's pipeline steps: computations through callbacks, messages point to point.

    receive ──► inbox ──► forward ──► outbox ──► send          a batch of messages is posted at once and waited for
    receive ──► inbox ──► backward ─► outbox ──► send          when a computation needs one of them

The executor knows steps, chunks and tensors, but no models: chunks of one list may belong to several models. Input and
output of a forward are kept until its backward, per (micro-batch, chunk, round).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from realrl.algo.phases import Phases
from realrl.engine.groups import Communicator, Pending
from realrl.plan.memory.buffers import PIPELINE_PENDING
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
) -> None:
    """Execute the steps in order.

    A message without elements is not sent. Gradients accumulate in the parameters, as in autograd.

    Args:
        steps: this stage's list of a schedule of `realrl.plan.pipeline`.
        chunks: every chunk number of the list.
        stages: the pipeline; its ranks are the stages of the schedule.
        device: where received tensors are put.
        phases: recorder of backward passes, and of the waiting for other stages.
    """
    run = _Run(steps, chunks, stages, device, Phases() if phases is None else phases)
    for is_message, group in groupby(steps, key=lambda step: step.kind.is_message):
        if is_message:
            run.post(list(group))
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
        phases: Phases,
    ) -> None:
        self._chunks = chunks
        self._stages = stages
        self._device = device
        self._phases = phases
        backwards = [step for step in steps if step.kind is StepKind.BACKWARD]
        self._trained = {step.computation[1:] for step in backwards}
        self._last_backward = {step.chunk: step for step in backwards}
        received = {step.computation for step in steps if step.kind.is_receive}
        # results that a message or another computation takes
        self._wanted: set[Computation | None] = {step.computation for step in steps if step.kind.is_send}
        self._wanted |= {s.source for s in steps if not s.kind.is_message and s.computation not in received}
        self._pending: deque[Pending] = deque()
        self._n_waited = 0  # completed batches of messages
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
                self._inbox[step.computation] = (buffer, self._n_waited + len(self._pending))
                receives.append((step.peer, buffer))
        if len(self._pending) >= PIPELINE_PENDING:  # waiting earlier than needed is always safe
            self._wait_for_oldest()
        self._pending.append(
            self._stages.exchange([s for s in sends if s[1].numel()], [r for r in receives if r[1].numel()])
        )

    def compute(self, step: Step) -> None:
        """Run a forward or a backward; waits for its input."""
        if step.kind is StepKind.FORWARD:
            self._forward(step)
        else:
            self._backward(step)

    def finish(self) -> None:
        """Wait for all messages."""
        while self._pending:
            self._wait_for_oldest()

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
        with self._phases.phase("backward"):
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
        while self._n_waited <= batch:
            self._wait_for_oldest()
        return tensor

    def _wait_for_oldest(self) -> None:
        with self._phases.phase("wait for other stages"):
            self._pending.popleft().wait()
        self._n_waited += 1

    def _hand_on(self, step: Step, made: torch.Tensor) -> None:
        if step.computation in self._wanted:
            self._outbox[step.computation] = made.contiguous()
