"""Pipeline schedules as data: for each stage, its computations, sends and receives, in order.

A model is cut into chunks 0, 1, ..., n_chunks - 1 that each live on one stage; chunk k feeds chunk k + 1. A round is
one pass through all chunks; in generation the last chunk's tokens of a round feed the first chunk of the next round.
A stage's neighbouring messages, with no computation between them, are one batch: they are posted together.

Invariants:
- Per micro-batch, chunk and round there is one forward, on one stage, and in training one backward on the same stage.
- A computation comes after the one that feeds it: forward after the previous chunk's forward, backward after its own
  forward and the next chunk's backward. A result that crosses stages is sent once after it was computed, and received
  once before it is used.
- The n-th message that a stage sends to another is the n-th that the other receives from it.
- No deadlock, even where every send blocks until its receive is posted and a stage goes on only when its whole batch
  of messages is through.
- `one_f_one_b`: stage s holds the activations of at most n_stages - s micro-batches.
- `interleaved`: stage s has the chunks s, s + n_stages, ...; with v > 1 of them it holds the activations of at most
  2 (n_stages - s - 1) + (v - 1) n_stages + 1 forwards of a chunk. Where n_stages divides the number of micro-batches,
  free messages and equal chunks leave each stage idle for n_stages - 1 forwards and backwards of a chunk, v times less
  than `one_f_one_b`.

Why placing messages by time excludes deadlock: `place_messages` runs the computations on a clock. A message that is
computed at T joins the sender's batch at T, and the receiver's batch before its first computation that starts at T or
later. Call n(B) the start of the computation after batch B. When a batch A waits for a partner's batch B to be posted,
it waits for the partner's batch B' before B, and n(B') < T <= n(A). So waiting always leads to a batch that is earlier
on the clock, and can never form a cycle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from itertools import chain, groupby

from realrl.plan.memory.buffers import PIPELINE_PENDING


class StepKind(Enum):
    """Kind of a stage's step."""

    FORWARD = "forward"
    BACKWARD = "backward"
    SEND_FORWARD = "send_forward"  # the result of a chunk's forward, to the next chunk
    RECEIVE_FORWARD = "receive_forward"
    SEND_BACKWARD = "send_backward"  # the gradient of a chunk's input, to the previous chunk
    RECEIVE_BACKWARD = "receive_backward"

    @property
    def is_send(self) -> bool:
        return self in (StepKind.SEND_FORWARD, StepKind.SEND_BACKWARD)

    @property
    def is_receive(self) -> bool:
        return self in (StepKind.RECEIVE_FORWARD, StepKind.RECEIVE_BACKWARD)

    @property
    def is_message(self) -> bool:
        """True for a send or a receive, False for a computation."""
        return self.is_send or self.is_receive


Computation = tuple[StepKind, int, int, int]  # forward or backward, micro-batch, chunk, round


@dataclass(frozen=True, slots=True)
class Step:
    """One entry of a stage's list.

    Attributes:
        micro_batch: number from 0.
        chunk: the chunk of this stage that computes, sends or receives.
        round: number of the pass through all chunks, from 0; training has one.
        other: the chunk at the other end: the one that feeds a computation (None for the first chunk's forward and the
            last chunk's backward), or the one that a message goes to or comes from.
        peer: the stage at the other end of a message; None for computations.
    """

    kind: StepKind
    micro_batch: int
    chunk: int
    round: int = 0
    other: int | None = None
    peer: int | None = None

    @property
    def computation(self) -> Computation:
        """The computation on this stage that the step is, or whose result it sends, or whose input it receives."""
        is_forward = self.kind in (StepKind.FORWARD, StepKind.SEND_FORWARD, StepKind.RECEIVE_FORWARD)
        return StepKind.FORWARD if is_forward else StepKind.BACKWARD, self.micro_batch, self.chunk, self.round

    @property
    def source(self) -> Computation | None:
        """The computation that feeds this one, or whose result is received; None for sends and unfed computations.

        A forward that is fed by its own or a later chunk is fed by the round before.
        """
        if self.other is None or self.kind.is_send:
            return None
        kind, micro_batch, chunk, turn = self.computation
        is_fed_from_behind = kind is StepKind.FORWARD and self.other >= chunk
        return kind, micro_batch, self.other, turn - 1 if is_fed_from_behind else turn

    def __str__(self) -> str:
        where = f"{self.kind.value}(micro-batch {self.micro_batch}, chunk {self.chunk}, round {self.round})"
        if self.peer is None:
            return where
        return f"{where} {'to' if self.kind.is_send else 'from'} stage {self.peer}"


Schedule = tuple[tuple[Step, ...], ...]  # one list per stage
Cost = Callable[[Step], float]


def default_cost(step: Step) -> float:
    """Return the time of a step in forwards of one chunk: a backward computes two gradients, messages are free."""
    if step.kind.is_message:
        return 0.0
    return 2.0 if step.kind is StepKind.BACKWARD else 1.0


# ---------------------------------------------------------------- schedules


def one_f_one_b(n_stages: int, n_micro_batches: int) -> Schedule:
    """One chunk per stage; after warming up, each stage alternates a forward and a backward (PipeDream-flush,
    Narayanan et al. 2021, "Memory-efficient pipeline-parallel DNN training")."""
    return interleaved(n_stages, n_micro_batches, 1)


@lru_cache(maxsize=256)
def interleaved(n_stages: int, n_micro_batches: int, vpp: int) -> Schedule:
    """Several chunks per stage: smaller bubbles, more messages; 1F1B with one chunk (Narayanan et al. 2021, "Efficient
    large-scale language model training on GPU clusters using Megatron-LM", section 2.2).

    Args:
        n_micro_batches: any number, not only multiples of `n_stages`; these have the smallest bubbles.
        vpp: chunks of each stage.
    """
    return place_messages(orders_of(n_stages, n_micro_batches, vpp, trains=True))


@lru_cache(maxsize=256)
def inference(n_stages: int, n_micro_batches: int, vpp: int = 1) -> Schedule:
    """Forward only, with `vpp` chunks per stage."""
    return place_messages(orders_of(n_stages, n_micro_batches, vpp, trains=False))


def orders_of(n_stages: int, n_micro_batches: int, vpp: int = 1, *, trains: bool) -> list[list[Step]]:
    """Return the computations of each stage of `interleaved`, or of `inference`, without messages.

    Micro-batches go through a stage's chunks in groups of `n_stages`. The last group is filled up for ordering, and the
    fillers are left out again: with a smaller group, forwards and backwards in turn would wait for each other.
    """
    _check(n_stages=n_stages, n_micro_batches=n_micro_batches, vpp=vpp)
    n_chunks, n_filled = n_stages * vpp, -(-n_micro_batches // n_stages) * n_stages
    orders = []
    for stage in range(n_stages):
        chunks = range(stage, n_chunks, n_stages)
        order = [forward_step(i, chunk) for i, chunk in _in_groups(n_filled, chunks, n_stages)]
        if trains:
            backwards = [backward_step(i, chunk, n_chunks) for i, chunk in _in_groups(n_filled, chunks[::-1], n_stages)]
            n_warm_up = n_stages - 1 - stage
            order = alternate(
                order, backwards, n_warm_up=n_warm_up if vpp == 1 else 2 * n_warm_up + (vpp - 1) * n_stages
            )
        orders.append([step for step in order if step.micro_batch < n_micro_batches])
    return orders


def _in_groups(n_micro_batches: int, chunks: Sequence[int], size: int) -> Iterator[tuple[int, int]]:
    """Yield (micro_batch, chunk): groups of micro-batches, each through all chunks before the next group."""
    for first in range(0, n_micro_batches, size):
        for chunk in chunks:
            for micro_batch in range(first, first + size):
                yield micro_batch, chunk


@dataclass(frozen=True, slots=True)
class InFlight:
    """Memory that a training stage holds while it computes a backward.

    Attributes:
        held: for each of its chunks, the forwards whose backward is not done yet; this one's is among them.
        place: place of the computing chunk among the stage's.
        n_messages: results that have come for later computations; and gradients whose sending nobody has waited for,
            and such outputs of forwards whose backward is done.
    """

    held: tuple[int, ...]
    place: int
    n_messages: int = 0

    def covers(self, other: InFlight) -> bool:
        """Return True if the stage holds all that it holds in the other state, while it computes the same."""
        ours, theirs = (*self.held, self.n_messages), (*other.held, other.n_messages)
        return self.place == other.place and all(a >= b for a, b in zip(ours, theirs, strict=True))


@lru_cache(maxsize=4096)
def in_flight(n_stages: int, n_micro_batches: int, vpp: int, stage: int) -> tuple[InFlight, ...]:
    """Return the states of a stage in `interleaved` of which none is covered by another one.

    With one chunk that is a single state, in which `n_messages` does not count. Messages are waited for as
    `realrl.engine.train.pipeline` does it.
    """
    if vpp == 1:
        return (InFlight((min(n_stages - stage, n_micro_batches),), 0),)
    held, inbox, found = [0] * vpp, dict[Computation, int](), dict[InFlight, None]()
    pending: dict[int, list[Step]] = {}  # batch of messages -> those that are sent
    done: set[tuple[int, int]] = set()
    n_batches = 0
    for is_message, group in groupby(interleaved(n_stages, n_micro_batches, vpp)[stage], lambda s: s.kind.is_message):
        steps = list(group)
        if is_message:
            inbox.update({step.computation: n_batches for step in steps if step.kind.is_receive})
            if len(pending) == PIPELINE_PENDING:
                del pending[next(iter(pending))]
            pending[n_batches] = [step for step in steps if step.kind.is_send]
            n_batches += 1
            continue
        for step in steps:
            pending.pop(inbox.pop(step.computation, -1), None)
            place = step.chunk // n_stages
            if step.kind is StepKind.FORWARD:
                held[place] += 1
            else:
                sent = chain.from_iterable(pending.values())
                kept = sum(s.kind is StepKind.SEND_BACKWARD or (s.micro_batch, s.chunk) in done for s in sent)
                found[InFlight(tuple(held), place, len(inbox) + kept)] = None
                held[place] -= 1
                done.add((step.micro_batch, step.chunk))
    return tuple(state for state in found if not any(other != state and other.covers(state) for other in found))


@lru_cache(maxsize=4096)
def most_received(n_stages: int, n_micro_batches: int, vpp: int, stage: int) -> int:
    """Return how many messages have come to a stage for later computations, at most, in `inference`."""
    now = most = 0
    for step in inference(n_stages, n_micro_batches, vpp)[stage]:
        now += step.kind.is_receive
        now -= not step.kind.is_message and step.other is not None
        most = max(most, now)
    return most


@lru_cache(maxsize=64)
def generation(n_stages: int, n_micro_batches: int, n_rounds: int) -> Schedule:
    """Decoding: every round computes one token for each row of each micro-batch, and the last stage sends it to the
    first. With n_stages micro-batches or more in flight no stage waits once the pipeline is full."""
    _check(n_stages=n_stages, n_micro_batches=n_micro_batches, n_rounds=n_rounds)
    return place_messages(
        [
            [
                forward_step(i, stage, round_index=turn, n_chunks=n_stages)
                for turn in range(n_rounds)
                for i in range(n_micro_batches)
            ]
            for stage in range(n_stages)
        ]
    )


# ---------------------------------------------------------------- steps and messages


def forward_step(micro_batch: int, chunk: int, *, round_index: int = 0, n_chunks: int = 0) -> Step:
    """Return a forward; in a later round the first of `n_chunks` chunks is fed by the last one."""
    other: int | None = chunk - 1
    if chunk == 0:
        other = n_chunks - 1 if round_index else None
    return Step(StepKind.FORWARD, micro_batch, chunk, round_index, other)


def backward_step(micro_batch: int, chunk: int, n_chunks: int) -> Step:
    """Return a backward; that of the last chunk starts from the loss."""
    return Step(StepKind.BACKWARD, micro_batch, chunk, 0, chunk + 1 if chunk + 1 < n_chunks else None)


def place_messages(orders: Sequence[Sequence[Step]], cost: Cost = default_cost) -> Schedule:
    """Add the messages that computations on several stages need, such that no order of arrival can block.

    The chunks may be those of several models, as long as their numbers differ.

    Args:
        orders: the computations of each stage, in order.
        cost: time of a computation; positive. Places of messages depend on it; the lists are right for any cost.

    Raises:
        ValueError: a computation has no positive cost, is computed twice or fed by nothing, or the orders wait for each
            other in a circle.
    """
    clock = _Clock(orders, cost)
    # per stage and gap (the place before a computation, or at the end): (time, message)
    gaps: list[list[list[tuple[float, Step]]]] = [[[] for _ in range(len(order) + 1)] for order in orders]
    for stage, order in enumerate(orders):
        for index, step in enumerate(order):
            if step.other is None:
                continue
            source_stage, source_index, source = clock.source_of(stage, step)
            if source_stage == stage:
                continue
            sent_at = clock.ends[source_stage][source_index]
            is_forward = step.kind is StepKind.FORWARD
            send_kind = StepKind.SEND_FORWARD if is_forward else StepKind.SEND_BACKWARD
            receive_kind = StepKind.RECEIVE_FORWARD if is_forward else StepKind.RECEIVE_BACKWARD
            send = replace(source, kind=send_kind, other=step.chunk, peer=stage)
            receive = replace(step, kind=receive_kind, peer=source_stage)
            gaps[source_stage][source_index + 1].append((sent_at, send))
            starts = clock.starts[stage]
            gap = next(i for i in range(index + 1) if starts[i] >= sent_at)
            gaps[stage][gap].append((sent_at, receive))
    return tuple(
        tuple(_merge(order, [[step for _, step in sorted(gap, key=_by_time)] for gap in stage_gaps]))
        for order, stage_gaps in zip(orders, gaps, strict=True)
    )


class _Clock:
    """Start and end of each computation, if messages take no time and every stage follows its order."""

    def __init__(self, orders: Sequence[Sequence[Step]], cost: Cost) -> None:
        self._place: dict[Computation, tuple[int, int]] = {}
        self._orders = orders
        for stage, order in enumerate(orders):
            for index, step in enumerate(order):
                place = self._place.setdefault(step.computation, (stage, index))
                if place != (stage, index):
                    raise ValueError(f"{step} is computed twice: on stages {place[0]} and {stage}")
        self.starts: list[list[float]] = [[] for _ in orders]
        self.ends: list[list[float]] = [[] for _ in orders]
        while sum(self._advance(stage, cost) for stage in range(len(orders))):
            pass
        waiting = [
            f"stage {stage} in {order[len(self.ends[stage])]}"
            for stage, order in enumerate(orders)
            if len(self.ends[stage]) < len(order)
        ]
        if waiting:
            raise ValueError(f"stages wait for each other: {', '.join(waiting)}")

    def source_of(self, stage: int, step: Step) -> tuple[int, int, Step]:
        """Return stage, index and step of the computation that feeds another one."""
        assert step.source is not None
        place = self._place.get(step.source)
        if place is None:
            raise ValueError(f"nothing feeds {step} of stage {stage}")
        return *place, self._orders[place[0]][place[1]]

    def _advance(self, stage: int, cost: Cost) -> int:
        """Run a stage until it has to wait; return how many computations it did."""
        order, starts, ends = self._orders[stage], self.starts[stage], self.ends[stage]
        before = len(ends)
        for step in order[before:]:
            start = ends[-1] if ends else 0.0
            if step.other is not None:
                source_stage, source_index, _ = self.source_of(stage, step)
                if source_index >= len(self.ends[source_stage]):
                    break
                start = max(start, self.ends[source_stage][source_index])
            duration = cost(step)
            if not duration > 0:
                raise ValueError(f"{step} costs {duration}; a computation takes time")
            starts.append(start)
            ends.append(start + duration)
        return len(ends) - before


def _by_time(entry: tuple[float, Step]) -> float:
    return entry[0]


def _merge(order: Sequence[Step], gaps: Sequence[Sequence[Step]]) -> Iterator[Step]:
    for gap, step in zip(gaps, order, strict=False):
        yield from gap
        yield step
    yield from gaps[-1]


def alternate(forwards: Sequence[Step], backwards: Sequence[Step], *, n_warm_up: int) -> list[Step]:
    """Return the first forwards, then forward and backward in turn, then the last backwards."""
    n_warm_up = min(n_warm_up, len(forwards))
    order = list(forwards[:n_warm_up])
    for forward, backward in zip(forwards[n_warm_up:], backwards, strict=False):
        order += (forward, backward)
    return order + list(backwards[len(forwards) - n_warm_up :])


def _check(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"a pipeline schedule has {name}={size}; use 1 or more")
