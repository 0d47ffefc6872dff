"""The running part of the master: samples through calls, step after step.

    load ─► buffer ─a call's inputs, version and devices are there─► RunCall to every rank of its mesh
              ▲                                                          │
              │                          outputs make samples ready  ◄───┘ CallDone
              └── every call is done with a sample: FreeSamples  ◄───────┘

Policy:
    - Urgency: calls of an older step first, then producers before consumers.
    - A call has at most one dispatch under way, and takes its batches in load order (see `call_queue`).
    - A call of the oldest unfinished step may be queued behind one other call on its devices, so that no device idles
      for a round trip. A call of a later step waits until all its devices are free: it then delays an older step by no
      more than its own duration.
    - A call of the oldest step that is ready but finds a device with a full queue reserves its devices: less urgent
      calls that share one are held back, so that it cannot starve.
    - All ranks of a mesh get a dispatch at the same position of one global order, and ranks execute in order, so their
      collectives cannot deadlock.
    - Samples of a whole step are loaded as soon as the capacity allows, and the request is sent before the calls that
      become ready by the same event.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum

from realrl.errors import InvalidTransitionError
from realrl.plan.cursor import DatasetCursor
from realrl.sched.buffer import SampleBuffer
from realrl.sched.devices import MAX_QUEUED, DeviceLoad
from realrl.sched.diagnosis import Fatal, bad_load, bad_output
from realrl.sched.dispatch import Dispatch, plan_work
from realrl.sched.events import Instruction, Send
from realrl.sched.master_plan import MasterPlan, ScheduledCall
from realrl.sched.messages import CallDone, FreeSamples, LoadSamples, RunCall, SamplesLoaded
from realrl.sched.outbox import Outbox
from realrl.sched.saving import CheckpointTracker
from realrl.sched.step_log import StepLog
from realrl.sched.story import Story, ranks_text


class CallPhase(Enum):
    """What one call is doing."""

    WAITING = "waiting"  # for samples, a version or devices
    RUNNING = "running"  # one dispatch is under way
    DONE = "done"


_NEXT_PHASES = {
    CallPhase.WAITING: {
        CallPhase.RUNNING,  # a batch had its inputs, version and devices: RunCall went to every rank of the mesh
    },
    CallPhase.RUNNING: {
        CallPhase.WAITING,  # every rank of the mesh is done, and the run needs the call again
        CallPhase.DONE,  # every rank of the mesh is done with the last batch of the last step
    },
    CallPhase.DONE: set[CallPhase](),
}


class Scheduler:
    """Decides what every worker does next, from the moment all are ready.

    Args:
        plan: the run.
        cursor: names the samples.
        last_step: last step of the run; fewer than `plan.steps` when the epochs end before.
        checkpoints: keeps train_step calls behind the checkpoints that need their old weights.
        outbox: numbers the requests.
        log: collects metrics.
        stories: call name -> its story.
    """

    def __init__(
        self,
        plan: MasterPlan,
        *,
        cursor: DatasetCursor,
        last_step: int,
        checkpoints: CheckpointTracker,
        outbox: Outbox,
        log: StepLog,
        stories: Mapping[str, Story],
    ) -> None:
        self.step = plan.first_step  # the oldest step that is not complete
        self.last_step = last_step
        self.n_events = 0  # for the stories
        self.dispatches: dict[int, Dispatch] = {}  # under way
        self._plan = plan
        self._calls = plan.calls
        self._cursor = cursor
        self._checkpoints = checkpoints
        self._outbox = outbox
        self._log = log
        self._stories = stories
        self._buffer = SampleBuffer(plan.calls, plan.step_size)
        self._phases = [CallPhase.WAITING] * len(plan.calls)
        self._position = {call.name: position for position, call in enumerate(plan.calls)}
        self._devices = DeviceLoad({call.name: call.ranks for call in plan.calls}, plan.n_ranks)
        self._next_dispatch_id = 0
        self._has_completed = False  # a dispatch was completed since a step was last found complete or not
        self._is_stale = True  # something changed that may let a call start
        self._lacking_devices: list[tuple[str, int]] = []  # call that had all else, and how deep its queues may be

    @property
    def is_done(self) -> bool:
        """Whether every step of the run is complete."""
        return self.step > self.last_step

    @property
    def n_living_samples(self) -> int:
        """Samples that are loaded, or being loaded, and not freed."""
        return len(self._buffer)

    # ------------------------------------------------------------ what happened

    def handle_loaded(self, reply: SamplesLoaded, request: LoadSamples) -> None:
        """Samples are there."""
        missing = sorted(set(self._plan.dataset_keys) - reply.meta.seqlens.keys())
        if reply.meta.ids != request.ids or missing:
            raise Fatal(bad_load(reply, request, missing))
        self._buffer.add_loaded(reply.rank, reply.meta)

    def handle_call_done(self, reply: CallDone, request: RunCall) -> list[Instruction]:
        """One rank is done with its part of a dispatch."""
        dispatch = self.dispatches[request.dispatch_id]
        dispatch.pending.discard(reply.rank)
        self._devices.remove(reply.rank)
        self._log.add_reply(dispatch, reply)
        if reply.output is not None and reply.output.ids:
            _check_output(dispatch, reply)
            self._buffer.add_rows(reply.rank, reply.output)
        if not dispatch.pending:
            return self._complete(dispatch)
        self._is_stale |= any(self._devices.of_call(name) <= depth for name, depth in self._lacking_devices)
        return []

    def _complete(self, dispatch: Dispatch) -> list[Instruction]:
        """Every rank of the mesh is done: free what nobody needs any more."""
        position = self._position[dispatch.call.name]
        missing = self._buffer.missing_output(position, dispatch.ids)
        if missing is not None:
            sample_id, key = missing
            raise Fatal(bad_output(dispatch, f"did not produce '{key}' of sample '{sample_id}'", sample_id=sample_id))
        del self.dispatches[dispatch.id]
        self._log.add_dispatch(dispatch)
        self._buffer.finish_arrivals(dispatch.arrivals)
        unneeded = self._buffer.finish(position, dispatch.ids)
        is_last = self._finished_step(position) == self.last_step
        self._enter(position, CallPhase.DONE if is_last else CallPhase.WAITING)
        self._note(dispatch.call, f"step {dispatch.step}, dispatch {dispatch.id}: all ranks are done")
        self._has_completed = self._is_stale = True
        if not unneeded:
            return []
        self._log.add_samples(dispatch.step, self._buffer.token_counts(unneeded))
        return [
            self._send(rank, FreeSamples(self._outbox.next_seq(rank), ids))
            for rank, ids in self._buffer.free(unneeded).items()
        ]

    # ------------------------------------------------------------ what to do next

    def finish_step(self) -> int | None:
        """Go on to the next step if every call is done with the oldest one; return the step that is now complete."""
        step = self.step
        if not self._has_completed or self.is_done:
            return None
        if any(self._finished_step(position) < step for position in range(len(self._calls))):
            self._has_completed = False
            return None
        self.step += 1
        self._is_stale = True
        return step

    def advance(self) -> list[Instruction]:
        """Load samples ahead, and dispatch every call that can start."""
        if not self._is_stale and not self._buffer.grew_ready:
            return []
        self._is_stale = False
        self._buffer.grew_ready = False
        instructions: list[Instruction] = []
        while self._can_load():
            instructions.append(self._load())
        held_back: list[ScheduledCall] = []
        self._lacking_devices = []
        for step, position in sorted(self._startable()):
            call = self._calls[position]
            is_oldest = step == self.step
            max_depth = MAX_QUEUED - 1 if is_oldest else 0
            is_reserved = any(self._devices.share_devices(call.name, other.name) for other in held_back)
            if not is_reserved and self._devices.of_call(call.name) <= max_depth:
                instructions += self._dispatch(position)
                continue
            self._lacking_devices.append((call.name, max_depth))
            if is_oldest:
                held_back.append(call)
        return instructions

    def _can_load(self) -> bool:
        n_wanted = (self.last_step - self._plan.first_step + 1) * self._plan.step_size
        has_room = len(self._buffer) + self._plan.step_size <= self._plan.capacity * self._plan.step_size
        return has_room and self._buffer.n_loaded < n_wanted

    def _load(self) -> Instruction:
        refs = self._cursor.take(self._cursor.start + self._buffer.n_loaded, self._plan.step_size)
        self._buffer.expect(refs)
        rank = self._plan.dataset_rank
        ids, rows = tuple(ref.id for ref in refs), tuple(ref.row for ref in refs)
        return self._send(rank, LoadSamples(self._outbox.next_seq(rank), ids, rows))

    def _startable(self) -> Iterator[tuple[int, int]]:
        """Yield (step, position) of every call that lacks nothing but perhaps devices."""
        for position in range(len(self._calls)):
            if self._phases[position] is CallPhase.WAITING and self._lack(position) is None:
                yield self._next_step(position), position

    def _lack(self, position: int) -> str | None:
        """Return what a waiting call waits for besides devices, or None."""
        call, step = self._calls[position], self._next_step(position)
        if not self._buffer.queues[position].batch_size():
            return f"samples of step {step}"
        for wait in call.waits_for:
            if self._finished_step(self._position[wait.trainer]) < step - wait.lag:
                return f"'{wait.trainer}' to finish step {step - wait.lag}"
        if call.is_train and self._checkpoints.blocks_training(step):
            return f"the checkpoint of a step before {step}, which needs the old weights"
        return None

    def _dispatch(self, position: int) -> list[Instruction]:
        call = self._calls[position]
        steps_before, ids = self._buffer.take(position)
        token_counts = self._buffer.token_counts(ids, call.input_keys)
        placements = self._buffer.placements(call.input_keys)
        work, arrivals = plan_work(call, ids, token_counts, placements, self._plan.cluster.node_of)
        self._buffer.begin_arrivals(arrivals)
        step = self._plan.first_step + steps_before
        dispatch = Dispatch(self._next_dispatch_id, call, step, ids, work, arrivals, pending=set(work))
        self._next_dispatch_id += 1
        self.dispatches[dispatch.id] = dispatch
        self._enter(position, CallPhase.RUNNING)
        self._note(
            call,
            f"step {step}, dispatch {dispatch.id}: {len(ids)} samples from '{ids[0]}' to '{ids[-1]}' "
            f"to ranks {ranks_text(call.ranks)}",
        )
        instructions = []
        for rank, request in dispatch.requests(self._outbox.next_seq, self.last_step):
            self._devices.add(rank)
            instructions.append(self._send(rank, request))
        return instructions

    # ------------------------------------------------------------ small things

    def explain(self, name: str) -> str:
        """Return what a call is doing, or what it waits for."""
        position = self._position[name]
        if self._phases[position] is CallPhase.DONE:
            return "done with the last step"
        if self._phases[position] is CallPhase.RUNNING:
            dispatch = next(d for d in self.dispatches.values() if d.call.name == name)
            return f"running step {dispatch.step} on ranks {ranks_text(dispatch.pending)}"
        return f"waits for {self._lack(position) or 'devices'}"

    def _next_step(self, position: int) -> int:
        """The step that the call takes samples of next."""
        return self._plan.first_step + self._buffer.queues[position].steps_taken

    def _finished_step(self, position: int) -> int:
        """The last step that the call is done with."""
        return self._plan.first_step - 1 + self._buffer.queues[position].steps_finished

    def _send(self, rank: int, request: LoadSamples | RunCall | FreeSamples) -> Instruction:
        self._outbox.add(rank, request)
        return Send(rank, request)

    def _enter(self, position: int, phase: CallPhase) -> None:
        call, old = self._calls[position], self._phases[position]
        if phase not in _NEXT_PHASES[old]:
            raise InvalidTransitionError(
                f"call '{call.name}' cannot go from {old.value} to {phase.value}", self._stories[call.name].lines()
            )
        self._phases[position] = phase

    def _note(self, call: ScheduledCall, line: str) -> None:
        self._stories[call.name].note(self.n_events, line)

    def validate(self) -> None:
        """Check what must hold between any two events.

        Raises:
            InvalidTransitionError: it does not.
        """
        self._buffer.validate()
        if len(self._buffer) > self._plan.capacity * self._plan.step_size:
            raise InvalidTransitionError(f"{len(self._buffer)} samples live, more than the capacity")
        running = sorted(d.call.name for d in self.dispatches.values())
        phases = sorted(c.name for c, p in zip(self._calls, self._phases) if p is CallPhase.RUNNING)
        if running != phases:
            raise InvalidTransitionError(f"calls {phases} are running, but dispatches of {running} are under way")
        for rank in range(self._plan.n_ranks):
            open_ids = {r.dispatch_id for r in self._outbox.of_rank(rank) if isinstance(r, RunCall)}
            pending_ids = {d.id for d in self.dispatches.values() if rank in d.pending}
            if open_ids != pending_ids or self._devices.of_rank(rank) != len(open_ids):
                raise InvalidTransitionError(f"worker {rank} has open calls {open_ids}, but {pending_ids} wait for it")
        if not self.is_done and self._outbox.is_empty:
            told = "; ".join(f"'{call.name}' {self.explain(call.name)}" for call in self._calls)
            raise InvalidTransitionError(f"step {self.step} is stuck, no worker has anything to do: {told}")


def _check_output(dispatch: Dispatch, reply: CallDone) -> None:
    """Refuse an output with keys or samples that this rank was not asked for."""
    assert reply.output is not None
    keys, expected = set(reply.output.seqlens), set(dispatch.call.output_keys)
    for key in sorted(keys ^ expected):
        problem = f"did not produce '{key}'" if key in expected else f"returned '{key}', which it does not declare"
        raise Fatal(bad_output(dispatch, f"{problem} on worker {reply.rank}", rank=reply.rank))
    asked = {sample_id for minibatch in dispatch.work[reply.rank].minibatches for sample_id in minibatch}
    for sample_id in reply.output.ids:
        if sample_id not in asked:
            problem = f"returned sample '{sample_id}', which worker {reply.rank} was not given"
            raise Fatal(bad_output(dispatch, problem, rank=reply.rank, sample_id=sample_id))
    for key, seqlens in reply.output.seqlens.items():
        if len(seqlens) != len(reply.output.ids):
            problem = f"returned '{key}' with {len(seqlens)} lengths for {len(reply.output.ids)} samples"
            raise Fatal(bad_output(dispatch, f"{problem} on worker {reply.rank}", rank=reply.rank))
