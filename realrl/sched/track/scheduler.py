"""The running part of the master: samples through calls, step after step.

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
    - All ranks that take part in something get it at the same position of one global order of parts, and ranks execute
      in order, so their collectives cannot deadlock.
    - A call starts when its mesh and the devices that its hooks need have room. Hooks and rows are short: they do not
      fill a device's queue, and of the calls that start at the same moment those whose hooks need devices of others are
      served first. Their rows and hooks go out ahead of all these calls, unless a device would then hold the
      parameters of two calls at once; so none of them waits for another one's computation.
    - Hooks after a call follow it at once if only its own mesh takes part; otherwise they are sent when the whole mesh
      is done, so that nobody is kept waiting by a long call.
    - Samples of a whole step are loaded as soon as the capacity allows, and the request is sent before the calls that
      become ready by the same event.
    - Where calls drop samples, a step is filled up in rounds (see `rounds`); the next one is loaded after that, and
      parameters do not change before it.
    - What calls did for later steps before the run was resumed is not done again (see `in_flight`).
    - A call that may be stale runs a fixed number of steps ahead of the training of its role, never more and never
      less: training waits until it was sent. At step i it reads what step ``i - 1 - max_staleness`` left (what the run
      began with, for the first steps, also of a resumed run). The exceptions: what else the call waits for holds it
      back (see `lead_waits`), and replacements of dropped samples may read later parameters, up to those of step i - 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from realrl.errors import InvalidTransitionError
from realrl.plan.samples.cursor import DatasetCursor
from realrl.sched.calls import ScheduledCall
from realrl.sched.events import Instruction, Send
from realrl.sched.master.diagnosis import Fatal, bad_load, bad_output, too_many_dropped
from realrl.sched.master.evaluation_times import EvaluationTimes
from realrl.sched.master.saving import CheckpointTracker
from realrl.sched.messages import (
    CallDone,
    FreeSamples,
    HooksDone,
    LoadSamples,
    MoveRows,
    ReadSamples,
    Request,
    RowsMoved,
    RunCall,
    RunHooks,
    SamplesLoaded,
)
from realrl.sched.outbox import Outbox
from realrl.sched.samples.buffer import SampleBuffer
from realrl.sched.samples.in_flight import SURPLUS, FlightLog, InFlight
from realrl.sched.samples.rounds import Rounds
from realrl.sched.story import Story, ranks_text
from realrl.sched.track.call_phase import NEXT_CALL_PHASES, CallPhase, Counters
from realrl.sched.track.devices import MAX_QUEUED, DeviceLoad
from realrl.sched.track.dispatch import Dispatch, Part, PartKind, plan_work
from realrl.sched.track.readout import SampleReader, plan_reads
from realrl.sched.track.step_log import StepLog
from realrl.sched.track.track_plan import TrackPlan


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
        reader: what is read of samples before they are freed; None: nothing.
        counters: shared with other schedulers; None: there are none.
        evaluations: keep train_step calls behind the evaluations that need their old weights.
    """

    def __init__(
        self,
        plan: TrackPlan,
        *,
        cursor: DatasetCursor,
        last_step: int,
        checkpoints: CheckpointTracker,
        outbox: Outbox,
        log: StepLog,
        stories: Mapping[str, Story],
        reader: SampleReader | None = None,
        counters: Counters | None = None,
        evaluations: EvaluationTimes | None = None,
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
        self._reader = reader
        self._counters = counters or Counters()
        self._evaluations = evaluations
        self._n_total = plan.n_samples(cursor, last_step)
        self._buffer = SampleBuffer(plan.calls, plan.step_size, self._n_total)
        self._rounds = Rounds(plan.step_size) if plan.drops else None
        self._position = {call.name: position for position, call in enumerate(plan.calls)}
        known = [record for record in plan.in_flight.calls if record.call in self._position]
        self._flight = FlightLog(InFlight(tuple(known), plan.in_flight.dropped))
        for record in known:
            log.add_call(record)
        self._trained_step = 0  # the last step of which a call that changes parameters was sent
        self._last_dropping = max((i for i, call in enumerate(plan.calls) if call.mfc.may_drop), default=-1)
        self._versions = plan.versions_after(plan.first_step - 1)  # that calls which are sent from now on read
        self._is_stale_allowed = any(call.mfc.max_staleness for call in plan.calls)
        self._has_leads = any(call.leads for call in plan.calls)
        self._phases = [CallPhase.WAITING] * len(plan.calls)
        self._devices = DeviceLoad({call.name: call.extent for call in plan.calls}, plan.n_ranks)
        self._needs_others = [set(call.extent) != set(call.ranks) for call in plan.calls]
        self._has_completed = False  # a dispatch was completed since a step was last found complete or not
        self._has_news = True  # something changed that may let a call start
        self._lacking_devices: list[tuple[str, int]] = []  # call that had all else, and how deep its queues may be

    @property
    def is_done(self) -> bool:
        """Whether every step of the run is complete."""
        return self.step > self.last_step

    @property
    def n_living_samples(self) -> int:
        """Samples that are loaded, or being loaded, and not freed."""
        return len(self._buffer)

    @property
    def step_to_save(self) -> int:
        """The first step of whose parameters nothing is lost yet: a checkpoint of it can still be wanted."""
        return max(self.step, self._trained_step)

    def n_consumed(self, step: int) -> int:
        """Samples that this run takes from the dataset up to `step`, which must have all of them."""
        n_steps = step - self._plan.first_step + 1
        if self._rounds is not None:
            return self._rounds.loaded_at_end(n_steps)
        n_samples = n_steps * self._plan.step_size
        return n_samples if self._n_total is None else min(n_samples, self._n_total)

    # ------------------------------------------------------------ what a checkpoint needs

    def reading_before(self, step: int) -> frozenset[int]:
        """Dispatches of later steps under way that read older parameters than those after `step`."""
        versions, written = self._plan.versions_after(step), self._plan.written_roles
        found = []
        for dispatch in self.dispatches.values():
            role, version = dispatch.call.mfc.role, dispatch.version
            is_older = version is not None and version < versions.get(role, 0)
            is_unknown = version is None and role in written and dispatch.call.mfc.max_staleness > 0
            if dispatch.step > step and (is_older or is_unknown):
                found.append(dispatch.id)
        return frozenset(found)

    def in_flight(self, step: int) -> InFlight:
        """What complete dispatches did for steps after `step`."""
        return self._flight.after(step)

    def rows_in_flight(self, in_flight: InFlight) -> dict[int, dict[str, tuple[str, ...]]]:
        """Rank -> key -> samples: where rows that these dispatches produced lie, each once."""
        rows: dict[int, dict[str, list[str]]] = {}
        for record in in_flight.calls:
            for key in self._calls[self._position[record.call]].mfc.output_keys:
                for sample_id in filter(self._buffer.is_living, record.ids):
                    rank = min(self._buffer.holders(key, sample_id))
                    rows.setdefault(rank, {}).setdefault(key, []).append(sample_id)
        return {rank: {key: tuple(ids) for key, ids in keys.items()} for rank, keys in rows.items()}

    # ------------------------------------------------------------ what happened

    def handle_loaded(self, reply: SamplesLoaded, request: LoadSamples) -> None:
        """Samples are there."""
        missing = sorted(set(self._plan.dataset_keys) - reply.meta.seqlens.keys())
        if reply.meta.ids != request.ids or missing:
            raise Fatal(bad_load(reply, request, missing))
        self._buffer.add_loaded(reply.rank, reply.meta)
        for meta in reply.restored:
            self._buffer.add_rows(reply.rank, meta)
        for sample_id in reply.meta.ids:
            for call, version in self._flight.done_before(sample_id).items():
                lost = self._buffer.missing_output(self._position[call], (sample_id,))
                if lost is not None:
                    raise Fatal(bad_load(reply, request, [lost[1]]))
                if version is not None:
                    self._buffer.restore_version(sample_id, call, version)

    def handle_call_done(self, reply: CallDone, request: RunCall) -> list[Instruction]:
        """One rank is done with its share of a call."""
        dispatch = self.dispatches[request.dispatch_id]
        self._devices.remove(reply.rank)
        dispatch.replies[reply.rank] = reply
        if reply.output is not None and reply.output.ids:
            _check_output(dispatch, reply)
            self._buffer.add_rows(reply.rank, reply.output)
        self._has_news |= any(self._devices.of_call(name) <= depth for name, depth in self._lacking_devices)
        return self._answer(dispatch, PartKind.CALL, reply.rank)

    def handle_part_done(self, reply: RowsMoved | HooksDone, request: MoveRows | RunHooks) -> list[Instruction]:
        """One rank is done with the rows or hooks of a dispatch."""
        dispatch = self.dispatches[request.dispatch_id]
        self._log.add_movement(dispatch.step, reply)
        return self._answer(dispatch, PartKind.of(request), reply.rank)

    def _answer(self, dispatch: Dispatch, kind: PartKind, rank: int) -> list[Instruction]:
        """A rank is done with a part: go on to the next part, or complete the dispatch, if it was the last rank."""
        dispatch.parts[kind].pending.discard(rank)
        if dispatch.parts[kind].pending:
            return []
        if kind is PartKind.CALL:
            if not dispatch.call.mfc.may_drop:
                self._check_all_produced(dispatch)
            if dispatch.last_parts:
                self._note(
                    dispatch.call, f"step {dispatch.step}, dispatch {dispatch.id}: the mesh is done, hooks follow"
                )
                return [send for part in dispatch.last_parts for send in self._send_part(dispatch, part)]
        return [] if dispatch.pending else self._complete(dispatch)

    def _check_all_produced(self, dispatch: Dispatch) -> None:
        missing = self._buffer.missing_output(self._position[dispatch.call.name], dispatch.ids)
        if missing is not None:
            sample_id, key = missing
            raise Fatal(bad_output(dispatch, f"did not produce '{key}' of sample '{sample_id}'", sample_id=sample_id))

    def _complete(self, dispatch: Dispatch) -> list[Instruction]:
        """Every rank is done, hooks included."""
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
        """A call is done with samples: free what nobody needs any more. Also tells how many it dropped."""
        call = self._calls[position]
        dropped = self._buffer.unproduced(position, ids) if call.mfc.may_drop else frozenset()
        unneeded = self._buffer.finish(position, ids, dropped)
        if self._rounds is not None and call.mfc.may_drop:
            kept = [sample_id for sample_id in ids if position == self._last_dropping and sample_id not in dropped]
            gone = [sample_id for sample_id in ids if sample_id in dropped]
            if kept or gone:  # its hooks may end when calls after it have settled the step
                unneeded += self._decide(self._rounds, step, call.name, kept, gone)
        self._end_calls()
        self._has_completed = self._has_news = True
        if not unneeded:
            return [], len(dropped)
        trained = [sample_id for sample_id in unneeded if not self._buffer.is_dropped(sample_id)]
        self._log.add_samples(step, self._buffer.token_counts(trained))
        reads = [] if self._reader is None else self._read(self._reader, trained)
        frees = [
            self._send(rank, FreeSamples(self._outbox.next_seq(rank), freed))
            for rank, freed in self._buffer.free(unneeded).items()
        ]
        return [*reads, *frees], len(dropped)

    def _read(self, reader: SampleReader, ids: list[str]) -> list[Instruction]:
        """Ask for the contents of those samples, about to be freed, of which they are wanted."""
        size = self._plan.step_size
        instructions: list[Instruction] = []
        for step, wanted in reader.select(
            {i: divmod(place, size) for i, place in self._buffer.places(ids).items()}, self._plan.first_step
        ).items():
            versions = {sample_id: self._buffer.versions(sample_id) for sample_id in wanted}
            reader.expect(step, wanted, versions)
            for rank, (texts, keys) in plan_reads(self._buffer, reader.readout, list(wanted)).items():
                seq = self._outbox.next_seq(rank)
                roles = {prefix: reader.readout.roles[prefix] for prefix in texts}
                reader.asked(step, rank, seq)
                instructions.append(self._send(rank, ReadSamples(seq, step, texts, roles, keys)))
        return instructions

    def _decide(self, rounds: Rounds, step: int, call: str, kept: list[str], gone: list[str]) -> list[str]:
        """The fate of some samples is known; return those that are left over and can be freed.

        Raises:
            Fatal: samples are still missing, and were replaced as often as they may.
        """
        self._flight.add_dropped(step, call, gone)
        decision = rounds.decide(call, kept=self._buffer.numbers(kept), dropped=self._buffer.numbers(gone))
        self._buffer.give_places(decision.places)
        self._flight.add_dropped(step, SURPLUS, self._buffer.ids_of(decision.surplus))
        unneeded = self._buffer.drop(decision.surplus)
        if not rounds.is_open:
            self._buffer.close_step()
            self._log.add_dropped(step, rounds.n_dropped, rounds.n_surplus)
        elif rounds.n_wanted and rounds.n_refills >= self._plan.config.max_refill_rounds:
            n_loaded, n_refills = rounds.n_loaded_in_step, rounds.n_refills
            raise Fatal(too_many_dropped(step, rounds.n_vacant, n_loaded, n_refills, rounds.n_dropped))
        return unneeded

    def _end_calls(self) -> None:
        """Waiting calls that are done with the last step are done."""
        for position, phase in enumerate(self._phases):
            if phase is CallPhase.WAITING and self._finished_step(position) == self.last_step:
                self._enter(position, CallPhase.DONE)

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
        self._flight.forget(step)
        self._has_news = True
        return step

    def wake(self) -> None:
        """Something outside changed that may let a call start."""
        self._has_news = True

    def advance(self) -> list[Instruction]:
        """Load samples ahead, and dispatch every call that can start."""
        if not self._has_news and not self._buffer.grew_ready:
            return []
        self._has_news = False
        self._buffer.grew_ready = False
        instructions: list[Instruction] = []
        passed: list[Instruction] | None = []
        while passed is not None:  # what is passed may make room
            while n_samples := self._n_loadable():
                passed += self._load(n_samples)
            instructions += passed
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
            call = self._calls[position]
            is_oldest = step == self.step
            max_depth = MAX_QUEUED - 1 if is_oldest else 0
            is_reserved = any(self._devices.share_devices(call.name, other.name) for other in held_back)
            if not is_reserved and self._devices.of_call(call.name) <= max_depth:
                started.append(self._start(position))
                continue
            self._lacking_devices.append((call.name, max_depth))
            if is_oldest:
                held_back.append(call)
        return started

    def _n_loadable(self) -> int:
        """Samples to load now: those of the next step, or replacements."""
        rounds, size = self._rounds, self._plan.step_size
        if rounds is not None and rounds.is_open:
            return rounds.n_wanted if len(self._buffer) + rounds.n_wanted <= self._plan.max_living else 0
        n_begun = self._buffer.n_loaded // size if rounds is None else rounds.n_settled
        has_room = len(self._buffer) + size <= self._plan.capacity * size
        size = size if self._n_total is None else min(size, self._n_total - self._buffer.n_loaded)
        return size if has_room and self._plan.first_step + n_begun <= self.last_step else 0

    def _load(self, n_samples: int) -> list[Instruction]:
        refs = self._cursor.take(self._cursor.start + self._buffer.n_loaded, n_samples)
        self._buffer.expect(refs)
        if self._rounds is not None:
            self._rounds.open_round()
            self._drop_again(self._rounds, [ref.id for ref in refs if self._flight.was_dropped(ref.id)])
            refs = [ref for ref in refs if self._buffer.is_living(ref.id)]
        if not refs:
            return []
        rank = self._plan.dataset_rank
        ids, rows = tuple(ref.id for ref in refs), tuple(ref.row for ref in refs)
        is_held_out = self._plan.is_held_out
        return [self._send(rank, LoadSamples(self._outbox.next_seq(rank), ids, rows, is_held_out))]

    def _drop_again(self, rounds: Rounds, ids: list[str]) -> None:
        """Samples that were dropped before the run was resumed need not be loaded."""
        step = self._settled_step(rounds) + 1
        unneeded = self._buffer.drop(self._buffer.numbers(ids))
        for call, dropped in self._flight.take_drops(ids).items():
            if call == SURPLUS:
                self._decide(rounds, step, self._calls[self._last_dropping].name, dropped, [])
            else:
                self._decide(rounds, step, call, [], dropped)
        self._buffer.free(unneeded)
        self._has_completed = self._has_news = True

    def _pass_known(self) -> list[Instruction] | None:
        """Let a call pass a batch that it was done with before the run was resumed; None if there is none."""
        for position, call in enumerate(self._calls):
            is_waiting = self._phases[position] is CallPhase.WAITING
            if is_waiting and self._flight.knows(call.name) and self._buffer.queues[position].batch_size():
                if not self._flight.knows_all(call.name, self._buffer.peek(position)):
                    continue
                step = self._next_step(position)
                _, ids = self._buffer.take(position)
                self._flight.split(call.name, ids)
                self._note(call, f"step {step}: {len(ids)} samples were done before the run was resumed")
                return self._finish_batch(position, step, ids)[0]
        return None

    def _startable(self) -> Iterator[tuple[int, bool, int]]:
        """Yield (step, whether hooks need no devices of others, position) of every call that lacks at most devices."""
        for position in range(len(self._calls)):
            if self._phases[position] is CallPhase.WAITING and self._lack(position) is None:
                yield self._next_step(position), not self._needs_others[position], position

    def _lack(self, position: int) -> str | None:
        """Return what a waiting call waits for besides devices, or None."""
        call, step = self._calls[position], self._next_step(position)
        if not self._buffer.queues[position].batch_size():
            return f"samples of step {step}"
        for wait in call.waits_for:
            if self._finished_step(self._position[wait.trainer]) < step - wait.lag:
                return f"'{wait.trainer}' to finish step {step - wait.lag}"
        for lead in call.leads:
            ahead, reader = min(step + lead.lead, self.last_step), self._position[lead.reader]
            if (self._finished_step(reader) if lead.is_done else self._begun_step(reader)) < ahead:
                return f"'{lead.reader}' to read the same parameters at step {ahead}"
        if call.changes_parameters and self._rounds is not None and self._settled_step(self._rounds) < step:
            return f"replacements of dropped samples of step {step}"
        if call.changes_parameters and self._checkpoints.blocks_training(step):
            return f"the checkpoint of a step before {step}, which needs the old weights"
        if call.changes_parameters and self._evaluations is not None and self._evaluations.blocks_training(step):
            return f"the evaluation before step {step}, which needs the old weights"
        return None

    def _start(self, position: int) -> Dispatch:
        """Take a batch of a call and occupy its devices; its requests are still to be sent."""
        call, step = self._calls[position], self._next_step(position)
        _, taken = self._buffer.take(position)
        ids, known = self._flight.split(call.name, taken)
        if call.changes_parameters:
            self._trained_step = max(self._trained_step, step)
        token_counts = self._buffer.token_counts(ids, call.mfc.input_keys)
        placements = self._buffer.placements(call.mfc.input_keys)
        work, arrivals = plan_work(call, ids, token_counts, placements, self._plan.cluster.node_of)
        self._buffer.begin_arrivals(arrivals)
        number = self._counters.next_dispatch()
        dispatch = Dispatch(number, call, step, ids, work, arrivals, self._plan.moves_rows, known)
        self.dispatches[dispatch.id] = dispatch
        for rank in call.ranks:
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
        for dispatch in dispatches:
            goes_first = taken.isdisjoint(dispatch.call.ranks)
            taken |= set(dispatch.call.ranks)
            for kind in dispatch.first_parts:
                is_short = kind in (PartKind.ROWS, PartKind.BEFORE)
                (first if is_short and goes_first else then).append((dispatch, kind))
        return [send for dispatch, kind in (*first, *then) for send in self._send_part(dispatch, kind)]

    def _send_part(self, dispatch: Dispatch, kind: PartKind) -> list[Instruction]:
        self._note_version(dispatch, kind)
        requests = dispatch.requests(kind, self._outbox.next_seq, self.last_step)
        dispatch.parts[kind] = Part(self._counters.next_part(), set(requests))
        return [self._send(rank, request) for rank, request in requests.items()]

    def _note_version(self, dispatch: Dispatch, kind: PartKind) -> None:
        """Parts are executed in the order in which they are sent: what was sent decides which version a call reads."""
        call, position = dispatch.call, self._position[dispatch.call.name]
        if call.mfc.role not in self._versions or kind not in (PartKind.BEFORE, PartKind.CALL):
            return
        is_brought = call.hooks.home not in (None, call.allocation)  # the parameters come by a hook
        if kind is (PartKind.BEFORE if is_brought else PartKind.CALL):
            dispatch.version = version = self._versions[call.mfc.role]
            if call.mfc.output_keys:
                self._buffer.set_version(position, dispatch.ids, version)
            if call.mfc.is_train:
                self._versions[call.mfc.role] += 1
                if self._is_stale_allowed:
                    self._log.add_staleness(dispatch.step, self._buffer.n_behind(call.mfc.role, dispatch.ids, version))

    # ------------------------------------------------------------ small things

    def explain(self, name: str) -> str:
        """Return what a call is doing, or what it waits for."""
        position = self._position[name]
        if self._phases[position] is CallPhase.DONE:
            return "done with the last step"
        if self._phases[position] is CallPhase.RUNNING:
            dispatch = next(d for d in self.dispatches.values() if d.call.name == name)
            return dispatch.explain()
        return f"waits for {self._lack(position) or 'devices'}"

    def _next_step(self, position: int) -> int:
        """The step that the call takes samples of next."""
        return self._plan.first_step + self._buffer.queues[position].steps_taken

    def _begun_step(self, position: int) -> int:
        """The last step of which the call was sent all samples but replacements."""
        return self._plan.first_step - 1 + self._buffer.queues[position].steps_begun

    def _settled_step(self, rounds: Rounds) -> int:
        """The last step that has all its samples."""
        return self._plan.first_step - 1 + rounds.n_settled

    def _finished_step(self, position: int) -> int:
        """The last step that the call is done with."""
        return self._plan.first_step - 1 + self._buffer.queues[position].steps_finished

    def _send(self, rank: int, request: Request) -> Instruction:
        self._outbox.add(rank, request)
        return Send(rank, request)

    def _enter(self, position: int, phase: CallPhase) -> None:
        call, old = self._calls[position], self._phases[position]
        if phase not in NEXT_CALL_PHASES[old]:
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
        if len(self._buffer) > self._plan.max_living:
            raise InvalidTransitionError(f"{len(self._buffer)} samples live, more than the capacity")
        running = sorted(d.call.name for d in self.dispatches.values())
        phases = sorted(c.name for c, p in zip(self._calls, self._phases) if p is CallPhase.RUNNING)
        if running != phases:
            raise InvalidTransitionError(f"calls {phases} are running, but dispatches of {running} are under way")
        for rank in range(self._plan.n_ranks):
            parts = [r for r in self._outbox.of_rank(rank) if isinstance(r, RunCall | RunHooks | MoveRows)]
            asked = [request for request in parts if request.call in self._position]
            found = {(r.dispatch_id, PartKind.of(r)) for r in asked}
            known = {(d.id, k) for d in self.dispatches.values() for k, p in d.parts.items() if rank in p.pending}
            n_calls = sum(isinstance(r, RunCall) for r in asked)
            if found != known or len(found) != len(asked) or self._devices.of_rank(rank) != n_calls:
                raise InvalidTransitionError(f"worker {rank} has open parts {found}, but {known} wait for it")
            positions = [self.dispatches[r.dispatch_id].parts[PartKind.of(r)].position for r in asked]
            if positions != sorted(positions):
                raise InvalidTransitionError(f"worker {rank} was sent parts out of order: {positions}")
        if not self.is_done and self._outbox.is_empty:
            told = "; ".join(f"'{call.name}' {self.explain(call.name)}" for call in self._calls)
            raise InvalidTransitionError(f"step {self.step} is stuck, no worker has anything to do: {told}")


def _check_output(dispatch: Dispatch, reply: CallDone) -> None:
    """Refuse an output with keys or samples that this rank was not asked for."""
    assert reply.output is not None
    keys, expected = set(reply.output.seqlens), set(dispatch.call.mfc.output_keys)
    for key in sorted(keys ^ expected):
        problem = f"did not produce '{key}'" if key in expected else f"returned '{key}', which it does not declare"
        raise Fatal(bad_output(dispatch, f"{problem} on worker {reply.rank}", rank=reply.rank))
    kept = set(dispatch.work[reply.rank].keeps)
    for sample_id in reply.output.ids:
        if sample_id not in kept:
            problem = f"returned sample '{sample_id}', which worker {reply.rank} was not to keep"
            raise Fatal(bad_output(dispatch, problem, rank=reply.rank, sample_id=sample_id))
    for key, seqlens in reply.output.seqlens.items():
        if len(seqlens) != len(reply.output.ids):
            problem = f"returned '{key}' with {len(seqlens)} lengths for {len(reply.output.ids)} samples"
            raise Fatal(bad_output(dispatch, f"{problem} on worker {reply.rank}", rank=reply.rank))
