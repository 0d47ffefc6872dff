"""The scheduler of a track: samples through calls, step after step.

    load ─► buffer ─a call's inputs, version and devices are there─► MoveRows, RunHooks, RunCall to its ranks
              ▲                                                          │
              │                          outputs make samples ready  ◄───┘ CallDone, HooksDone
              └── every call is done with a sample: FreeSamples  ◄───────┘

A dispatch consists of parts (see `dispatch`): rows move where they move by collectives, hooks run, then the call, then
the hooks after it. It is complete when all of them are answered.

Policy:
    - Urgency: calls of an older step first, then producers before consumers.
    - A call has at most one dispatch under way, and takes its batches in load order (see `call_queue`).
    - A call of the oldest unfinished step may be queued behind one other call on its devices, so that no device idles
      for a round trip. A call of a later step waits until all its devices are free: it then delays an older step by no
      more than its own duration.
    - A call of the oldest step that is ready but finds a device with a full queue reserves its devices: less urgent
      calls that share one are held back, so that it cannot starve.
    - All ranks of a part get it at the same position of one global order of parts, and ranks execute in order, so their
      collectives cannot deadlock.
    - A call starts when its mesh and the devices that its hooks need have room. Hooks and rows are short: they do not
      fill a device's queue, and of the calls that start at the same moment those whose hooks need devices of others are
      served first. Their rows and hooks go out ahead of all these calls, unless a device would then hold the
      parameters of two calls at once; so none of them waits for another one's computation.
    - Hooks after a call follow it at once if only its own mesh takes part; otherwise they are sent when the whole mesh
      is done, so that a long call keeps no other rank waiting.
    - Samples are loaded ahead (see `loader`), and the request is sent before the calls that become ready by the same
      event.
    - Where calls drop samples, a step is filled up in rounds (see `rounds`); the next one is loaded after that, and
      parameters do not change before it.
    - Work for later steps that was done before the run was resumed is not repeated (see `in_flight`).
    - Calls that may be stale run ahead by a fixed number of steps (see `waits`).
    - Two calls that train together start together, or not at all, with all that each of them waits for. Nothing is
      sent to a rank between them, and they fill one place of its queue.
    - Parameters come early, while other calls compute, and stay for the next batch, where the plan has room (see
      `visits`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from functools import partial

from realrl.errors import InvalidTransitionError
from realrl.plan.samples.cursor import DatasetCursor
from realrl.sched.calls import ScheduledCall
from realrl.sched.events import Instruction
from realrl.sched.messages import (
    CallDone,
    HooksDone,
    LoadSamples,
    MoveRows,
    RowsMoved,
    RunCall,
    RunHooks,
    SamplesLoaded,
)
from realrl.sched.outbox import Outbox
from realrl.sched.samples.buffer import SampleBuffer
from realrl.sched.samples.in_flight import FlightLog, InFlight
from realrl.sched.story import Stories, ranks_text
from realrl.sched.track.devices import MAX_QUEUED, DeviceLoad
from realrl.sched.track.dispatch import Dispatch, Part, PartKind, plan_work, units
from realrl.sched.track.faults import check_all_produced, check_output
from realrl.sched.track.loader import SampleLoader
from realrl.sched.track.readout import SampleReader
from realrl.sched.track.release import release
from realrl.sched.track.step_log import StepLog
from realrl.sched.track.track_plan import TrackPlan
from realrl.sched.track.versions import Versions
from realrl.sched.track.waits import Hold, Waits
from realrl.sched.visits import Journey, Visits


class CallPhase(Enum):
    """State of one call."""

    WAITING = "waiting"  # for samples, a version or devices
    RUNNING = "running"  # one dispatch is under way, its hooks included
    DONE = "done"


NEXT_CALL_PHASES = {
    CallPhase.WAITING: {
        CallPhase.RUNNING,  # a batch had its inputs, version and devices: requests went to every rank it needs
        CallPhase.DONE,  # the last step has no replacements that it must see, or was done before the run was resumed
    },
    CallPhase.RUNNING: {
        CallPhase.WAITING,  # every rank is done, hooks included, and the run needs the call again
        CallPhase.DONE,  # every rank is done with the last batch of the last step
    },
    CallPhase.DONE: set[CallPhase](),
}


class Scheduler:
    """Decides the next requests to every worker, from the moment all are ready.

    Args:
        cursor: order of the samples.
        log: collects metrics.
        reader: selects the samples that are read before they are freed.
        stories: accounts of the calls for error messages.
        holds: keep calls from changing parameters that a checkpoint or an evaluation still needs.
    """

    def __init__(
        self,
        plan: TrackPlan,
        cursor: DatasetCursor,
        *,
        outbox: Outbox,
        log: StepLog,
        reader: SampleReader,
        stories: Stories,
        holds: Sequence[Hold] = (),
    ) -> None:
        self.step = plan.first_step  # the oldest step that is not complete
        self.dispatches: dict[int, Dispatch] = {}  # under way
        self._plan = plan
        self._calls = plan.calls
        self._outbox = outbox
        self._log = log
        self._stories = stories
        self._position = {call.name: position for position, call in enumerate(plan.calls)}
        known = [record for record in plan.in_flight.calls if record.call in self._position]
        for record in known:
            log.add_call(record)
        self._flight = FlightLog(InFlight(tuple(known), plan.in_flight.dropped))
        self._buffer = SampleBuffer(plan.calls, plan.step_size, plan.n_samples(cursor, plan.last_step(cursor)))
        self._loader = SampleLoader(plan, cursor, buffer=self._buffer, flight=self._flight, log=log, outbox=outbox)
        self._release = partial(release, plan=plan, buffer=self._buffer, log=log, reader=reader, outbox=outbox)
        self._versions = Versions(plan, buffer=self._buffer, log=log)
        self._waits = Waits(plan, buffer=self._buffer, loader=self._loader, holds=holds)
        self._visits = Visits(plan, buffer=self._buffer, waits=self._waits, flight=self._flight)
        self._has_leads = any(call.leads for call in plan.calls)
        self._phases = [CallPhase.WAITING] * len(plan.calls)
        self._devices = DeviceLoad({call.name: call.extent for call in plan.calls}, plan.n_ranks)
        self._needs_others = [set(call.extent) != set(call.ranks) for call in plan.calls]
        self._partners = {i: self._position[call.partner] for i, call in enumerate(plan.calls) if call.partner}
        self._has_completed = False  # a dispatch was completed since a step was last found complete or not
        self._has_news = True  # something changed that may let a call start
        self._lacking_devices: list[tuple[str, int]] = []  # call that had all else, and how deep its queues may be
        self._stop_step: int | None = None

    @property
    def last_step(self) -> int:
        """The last step of the run: that of the configuration, or an earlier one where the epochs end."""
        return self._loader.last_step

    @property
    def is_done(self) -> bool:
        """True if every step of the run is complete, or the one that it was told to stop after."""
        return self.step > (self.last_step if self._stop_step is None else self._stop_step)

    @property
    def has_news(self) -> bool:
        """True if something happened that may complete a step, or let a call start."""
        return self._has_completed or self._has_news or self._buffer.grew_ready

    @property
    def n_living_samples(self) -> int:
        """Samples that are loaded, or being loaded, and not freed."""
        return len(self._buffer)

    @property
    def step_to_save(self) -> int:
        """The first step that a checkpoint can still be wanted of: its parameters were not overwritten."""
        return max(self.step, self._versions.trained_step)

    def n_consumed(self, step: int) -> int:
        """Return how many samples this run takes from the dataset up to `step`, which must have all of them."""
        return self._loader.n_consumed(step)

    def stop_after(self, step: int) -> None:
        """Let the track end after `step`, as if a checkpoint of it held everything later back for good.

        Until parameters change for the last time, calls of later steps go on where they read older ones.
        """
        self._stop_step = step
        self.wake()

    def _has_stopped(self) -> bool:
        """Return True if no call of a later step than the last one has to start any more."""
        stop, calls = self._stop_step, enumerate(self._calls)
        return stop is not None and all(
            self._waits.begun_step(position) >= stop for position, call in calls if call.changes_parameters
        )

    # ------------------------------------------------------------ for checkpoints

    def reading_before(self, step: int) -> frozenset[int]:
        """Return the dispatches of later steps under way that read older parameters than those after `step`."""
        return self._versions.reading_before(step, self.dispatches.values())

    def in_flight(self, step: int) -> InFlight:
        """Return the work of complete dispatches for steps after `step`."""
        return self._flight.after(step)

    def rows_in_flight(self, in_flight: InFlight) -> dict[int, dict[str, tuple[str, ...]]]:
        """Return rank -> key -> samples: for outputs of these dispatches, one rank that holds each sample's rows."""
        return self._buffer.rows_of((self._position[record.call], record.ids) for record in in_flight.calls)

    # ------------------------------------------------------------ replies

    def handle_loaded(self, reply: SamplesLoaded, request: LoadSamples) -> None:
        """Take in loaded samples."""
        self._loader.add_loaded(reply, request)

    def handle_call_done(self, reply: CallDone, request: RunCall) -> list[Instruction]:
        """Note that one rank is done with its share of a call."""
        dispatch, rank, output = self.dispatches[request.dispatch_id], reply.rank, reply.output
        if dispatch.call.joins != "opens":
            self._devices.remove(rank)
        dispatch.replies[rank] = reply
        if output is not None and output.ids:
            check_output(dispatch, reply)
            self._buffer.add_output(self._position[dispatch.call.name], rank, output, len(dispatch.ids))
        if self._lacking_devices:
            self._has_news |= any(self._devices.of_call(name) <= depth for name, depth in self._lacking_devices)
        return self._answer(dispatch, PartKind.CALL, rank)

    def handle_part_done(self, reply: RowsMoved | HooksDone, request: MoveRows | RunHooks) -> list[Instruction]:
        """Note that one rank is done with the rows or hooks of a dispatch."""
        self._log.add_movement(reply.step, reply)
        journeys = self._visits.journeys.values()  # to dispatches that do not exist yet
        journey = next((one for one in journeys if one.id == request.dispatch_id), None)
        if journey is not None:
            journey.part.pending.discard(reply.rank)
            journey.part.waited_s[reply.rank] = reply.waited_s if isinstance(reply, HooksDone) else 0.0
            return []
        dispatch, kind = self.dispatches[request.dispatch_id], PartKind.of(request)
        if isinstance(reply, HooksDone):
            dispatch.parts[kind].waited_s[reply.rank] = reply.waited_s
        return self._answer(dispatch, kind, reply.rank)

    def _answer(self, dispatch: Dispatch, kind: PartKind, rank: int) -> list[Instruction]:
        """Note that a rank is done with a part; the last rank leads to the next part, or completes the dispatch."""
        pending = dispatch.parts[kind].pending
        pending.discard(rank)
        if pending:
            return []
        if kind is PartKind.CALL:
            position = self._position[dispatch.call.name]
            self._buffer.take_in(position)
            if not dispatch.call.mfc.may_drop:
                check_all_produced(dispatch, self._buffer.missing_output(position, dispatch.ids))
            if dispatch.last_parts:
                told = f"step {dispatch.step}, dispatch {dispatch.id}: the mesh is done, hooks follow"
                self._note(dispatch.call, told)
                return [send for part in dispatch.last_parts for send in self._send_part(dispatch, part)]
        return [] if dispatch.pending else self._complete(dispatch)

    def _complete(self, dispatch: Dispatch) -> list[Instruction]:
        """Complete a dispatch after its last answer, hooks included."""
        position = self._position[dispatch.call.name]
        del self.dispatches[dispatch.id]
        record = dispatch.record()
        self._log.add_call(record)
        self._flight.add_call(record)
        self._buffer.finish_arrivals(dispatch.arrivals)
        self._enter(position, CallPhase.WAITING)
        freed, n_dropped = self._finish_batch(position, dispatch.step, (*dispatch.ids, *dispatch.known))
        left_out = f", {n_dropped} samples are dropped" if n_dropped else ""
        self._note(dispatch.call, f"step {dispatch.step}, dispatch {dispatch.id}: all ranks are done{left_out}")
        return freed

    def _finish_batch(self, position: int, step: int, ids: tuple[str, ...]) -> tuple[list[Instruction], int]:
        """Free samples that no call needs any more; return the requests, and how many samples the call dropped."""
        may_drop = self._calls[position].mfc.may_drop
        dropped = self._buffer.unproduced(position, ids) if may_drop else frozenset()
        unneeded = self._buffer.finish(position, ids, dropped)
        if may_drop:
            unneeded += self._loader.settle(position, step, ids, dropped)
        self._end_calls()
        self._has_completed = self._has_news = True
        return self._release(step, unneeded), len(dropped)

    def _end_calls(self) -> None:
        """Move waiting calls that are done with the last step to DONE."""
        for position, phase in enumerate(self._phases):
            if phase is CallPhase.WAITING and self._waits.finished_step(position) == self.last_step:
                self._enter(position, CallPhase.DONE)

    # ------------------------------------------------------------ next requests

    def finish_step(self) -> int | None:
        """Go on to the next step if every call is done with the oldest one; return the step that is now complete."""
        step = self.step
        if not self._has_completed or self.is_done:
            return None
        if any(self._waits.finished_step(position) < step for position in range(len(self._calls))):
            self._has_completed = False
            return None
        self.step += 1
        self._flight.forget(step)
        self._has_news = True
        return step

    def wake(self) -> None:
        """Note a change outside of the track that may let a call start."""
        self._has_news = True

    def advance(self) -> list[Instruction]:
        """Load samples ahead, and dispatch every call that can start."""
        if not self._has_news and not self._buffer.grew_ready:
            return []
        self._has_news = self._buffer.grew_ready = False
        instructions: list[Instruction] = []
        passed: list[Instruction] | None = []
        while passed is not None:  # a passed batch may make room
            instructions += [*passed, *self._loader.load()]
            if self._loader.has_dropped:
                self._loader.has_dropped = False
                self._has_completed = self._has_news = True
            passed = self._pass_known()
        while started := self._start_calls():
            instructions += self._send_all(started)
            if not self._has_leads:  # else a call that changes parameters may wait for one that was sent just now
                break
        return instructions

    def _start_calls(self) -> list[Dispatch]:
        """Start every call that can; their requests are still to be sent."""
        held_back: list[ScheduledCall] = []
        started: list[Dispatch] = []
        self._lacking_devices = []
        for step, _, position in sorted(self._startable()):
            together = [position, *self._partner_of(position)]
            calls = [self._calls[p] for p in together]
            is_oldest = step == self.step
            max_depth = MAX_QUEUED - 1 if is_oldest else 0
            is_reserved = any(self._devices.share_devices(c.name, other.name) for c in calls for other in held_back)
            if not is_reserved and all(self._devices.of_call(c.name) <= max_depth for c in calls):
                started += [self._start(p) for p in together]
                continue
            self._lacking_devices += [(c.name, max_depth) for c in calls]
            if is_oldest:
                held_back += calls
        return started

    def _pass_known(self) -> list[Instruction] | None:
        """Let a call pass a batch that it was done with before the run was resumed; None if there is none."""
        for position, call in enumerate(self._calls):
            is_waiting = self._phases[position] is CallPhase.WAITING
            if is_waiting and self._flight.knows(call.name) and self._buffer.queues[position].batch_size():
                if not self._flight.knows_all(call.name, self._buffer.peek(position)):
                    continue
                step = self._waits.next_step(position)
                _, ids = self._buffer.take(position)
                self._flight.split(call.name, ids)
                self._note(call, f"step {step}: {len(ids)} samples were done before the run was resumed")
                return self._finish_batch(position, step, ids)[0]
        return None

    def _startable(self) -> Iterator[tuple[int, bool, int]]:
        """Yield (step, True if hooks stay within the mesh, position) of every call that lacks at most devices."""
        has_stopped = self._has_stopped()
        for position, call in enumerate(self._calls):
            together = [position, *self._partner_of(position)]
            if call.joins == "closes" or not all(self._lacks_at_most_devices(p) for p in together):
                continue
            step = self._waits.next_step(position)
            if self._stop_step is None or step <= self._stop_step or not has_stopped:
                yield step, not any(self._needs_others[p] for p in together), position

    def _partner_of(self, position: int) -> list[int]:
        """Return the call that starts with another one, if there is one."""
        return [self._partners[position]] if position in self._partners else []

    def _lacks_at_most_devices(self, position: int) -> bool:
        is_waiting = self._phases[position] is CallPhase.WAITING
        return is_waiting and self._waits.lack(position) is None and self._visits.blocked(position) is None

    def _start(self, position: int) -> Dispatch:
        """Take a batch of a call and occupy its devices; its requests are still to be sent."""
        call, step = self._calls[position], self._waits.next_step(position)
        _, taken = self._buffer.take(position)
        ids, known = self._flight.split(call.name, taken)
        token_counts = self._buffer.token_counts(ids, call.mfc.input_keys)
        placements = self._buffer.placements(call.mfc.input_keys)
        place = self._buffer.places(taken[:1]).get(taken[0], 0)  # every sample of a train_step has one
        key = self._plan.config.seed, step, place % self._plan.step_size // call.mfc.n_seqs
        work, arrivals = plan_work(call, ids, token_counts, placements, self._plan.cluster.node_of, key=key)
        self._buffer.begin_arrivals(arrivals)
        journey = self._visits.journeys.get(position)
        number = self._outbox.next_dispatch() if journey is None else journey.id
        dispatch = Dispatch(number, call, step, ids, work, arrivals, self._plan.moves_rows, known)
        self.dispatches[dispatch.id] = dispatch
        self._versions.add_started(dispatch)
        self._visits.add_started(dispatch, position)
        for rank in call.ranks if call.joins != "opens" else ():  # a pair fills one place
            self._devices.add(rank)
        self._enter(position, CallPhase.RUNNING)
        self._note(
            call,
            f"step {step}, dispatch {dispatch.id}: {len(ids)} samples from '{ids[0]}' to '{ids[-1]}' "
            f"to ranks {ranks_text(call.ranks)}",
        )
        return dispatch

    def _send_all(self, dispatches: list[Dispatch]) -> list[Instruction]:
        """Send the first parts of dispatches that start at the same moment: short ones first, where devices differ."""
        first, then = list[tuple[Dispatch, PartKind]](), list[tuple[Dispatch, PartKind]]()
        taken: set[int] = set()
        for unit in units(dispatches):
            goes_first = taken.isdisjoint(unit[0].call.ranks)
            taken |= set(unit[0].call.ranks)
            parts = [(dispatch, kind) for dispatch in unit for kind in dispatch.first_parts]
            short = [part for part in parts if part[1] in (PartKind.ROWS, PartKind.BEFORE)]
            (first if goes_first else then).extend(short)
            for these in (PartKind.CALL, PartKind.AFTER):
                then += [part for part in parts if part[1] is these]
        sent: list[Instruction] = []
        for dispatch, kind in (*first, *then):
            if kind is PartKind.CALL and dispatch.call.joins != "closes":  # nothing comes between a pair
                for position in self._visits.setting_out(dispatch, self.dispatches):
                    sent += self._set_out(position)
            sent += self._send_part(dispatch, kind)
        return sent

    def _set_out(self, position: int) -> list[Instruction]:
        """Let the parameters of a call set out for its next dispatch."""
        call, step, number = self._calls[position], self._waits.next_step(position), self._outbox.next_dispatch()
        ranks = call.hooks.before_ranks or call.ranks
        self._visits.journeys[position] = Journey(number, position, step, Part(self._outbox.next_part(), set(ranks)))
        self._note(call, f"step {step}: its parameters set out for dispatch {number}")
        asked = {rank: RunHooks(self._outbox.next_seq(rank), number, call.name, step, "ahead of") for rank in ranks}
        return [self._outbox.send(rank, request, self._plan.owner) for rank, request in asked.items()]

    def _send_part(self, dispatch: Dispatch, kind: PartKind) -> list[Instruction]:
        self._versions.add_sent(dispatch, kind)
        self._visits.add_sent(dispatch)
        requests = dispatch.requests(kind, self._outbox.next_seq, self.last_step)
        dispatch.parts[kind] = Part(self._outbox.next_part(), set(requests))
        return [self._outbox.send(rank, request, self._plan.owner) for rank, request in requests.items()]

    # ------------------------------------------------------------ small things

    def explain(self, name: str) -> str:
        """Return the activity of a call, or its reason to wait."""
        position = self._position[name]
        if self._phases[position] is CallPhase.DONE:
            return "done with the last step"
        if self._phases[position] is CallPhase.RUNNING:
            dispatch = next(d for d in self.dispatches.values() if d.call.name == name)
            return dispatch.explain()
        told = self._lack_of(position)
        if told is None and position in self._partners:
            told = self._lack_of(self._partners[position])
            partner = self._calls[position].partner
            told = None if told is None else f"'{partner}', which trains with it and waits for {told}"
        return f"waits for {told or 'devices'}"

    def _lack_of(self, position: int) -> str | None:
        """Return what a call waits for other than devices, or None."""
        lack, traveller = self._waits.lack(position), self._visits.blocked(position)
        return lack or (None if traveller is None else f"'{traveller}', whose parameters are on their way")

    def _enter(self, position: int, phase: CallPhase) -> None:
        call, old = self._calls[position], self._phases[position]
        if phase not in NEXT_CALL_PHASES[old]:
            raise InvalidTransitionError(
                f"call '{call.name}' cannot go from {old.value} to {phase.value}", self._stories.lines(call.name)
            )
        self._phases[position] = phase

    def _note(self, call: ScheduledCall, line: str) -> None:
        self._stories.note(line, call.name)

    def validate(self) -> None:
        """Check invariants, which hold between any two events.

        Raises:
            InvalidTransitionError: one of them is broken.
        """
        self._buffer.validate()
        if len(self._buffer) > self._plan.max_living:
            raise InvalidTransitionError(f"{len(self._buffer)} samples live, more than the capacity")
        running = sorted(d.call.name for d in self.dispatches.values())
        phases = sorted(c.name for c, p in zip(self._calls, self._phases) if p is CallPhase.RUNNING)
        if running != phases:
            raise InvalidTransitionError(f"calls {phases} are running, but dispatches of {running} are under way")
        for rank in range(self._plan.n_ranks):
            requests = self._outbox.of_rank(rank, self._plan.owner)
            asked = [request for request in requests if isinstance(request, RunCall | RunHooks | MoveRows)]
            found = {(r.dispatch_id, PartKind.of(r)) for r in asked}
            parts = {(d.id, k): p for d in self.dispatches.values() for k, p in d.parts.items()}
            parts |= {(j.id, PartKind.AHEAD): j.part for j in self._visits.journeys.values()}
            known = {key for key, part in parts.items() if rank in part.pending}
            n_calls = sum(isinstance(r, RunCall) and r.joins != "opens" for r in asked)
            if found != known or len(found) != len(asked) or self._devices.of_rank(rank) != n_calls:
                raise InvalidTransitionError(f"worker {rank} has open parts {found}, but {known} wait for it")
            positions = [parts[r.dispatch_id, PartKind.of(r)].position for r in asked]
            if positions != sorted(positions):
                raise InvalidTransitionError(f"worker {rank} was sent parts out of order: {positions}")
        if not self.is_done and self._outbox.is_empty:
            told = "; ".join(f"'{call.name}' {self.explain(call.name)}" for call in self._calls)
            raise InvalidTransitionError(f"step {self.step} is stuck, no worker has anything to do: {told}")
