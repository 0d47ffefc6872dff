"""A cluster in one thread: ranks that execute what the master sends, in any order that a real cluster could show.

Each rank executes its requests in order, through the real `WorkerState`. RunCall, RunHooks and MoveRows are rendezvous:
a rank enters one, and can end it only after every rank that was sent the same part entered it; hooks ahead of a call
are none: a rank does its share and goes on. Parameters are numbers:
how often they were trained, or written by a hook. Replies of one rank arrive in order, those
of different ranks in any order. Which of all possible actions comes next is drawn from a seed. Whatever a correct
master must never do is checked on the way. What a dropping call drops depends on the sample and the call alone.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field
from functools import cached_property

from realrl.plan.hooks import Realloc
from realrl.sched.events import (
    Abort,
    CheckpointCommitted,
    CommitCheckpoint,
    Finish,
    OpenCheckpoint,
    ReportStart,
    ReportStep,
    Send,
    Start,
)
from realrl.sched.master.master_state import MasterState
from realrl.sched.messages import (
    CallDone,
    CheckpointSaved,
    FreeSamples,
    Goodbye,
    Hello,
    HooksDone,
    Initialize,
    KeySchema,
    LoadSamples,
    MoveRows,
    Per,
    Ready,
    RowsMoved,
    RunCall,
    RunHooks,
    SampleMeta,
    SamplesFreed,
    SamplesLoaded,
    SaveCheckpoint,
    Shutdown,
    Span,
)
from realrl.sched.track.dispatch import PartKind
from realrl.sched.worker_state import WorkerState
from tests.sched.simulation_checks import PARTS, Checks, ids_of, part_of

TOKEN = KeySchema("int64", Per.TOKEN)


@dataclass
class Rank:
    """One worker: its logic, its requests, its replies on their way, and the keys of each sample in its store."""

    state: WorkerState
    inbox: deque = field(default_factory=deque)
    replies: deque = field(default_factory=deque)
    store: dict = field(default_factory=lambda: defaultdict(set))
    home: dict = field(default_factory=dict)  # role -> how often its parameters changed, on the ranks of its home
    visiting: dict = field(default_factory=dict)  # call -> the same, of parameters that a hook brought for it
    setting_out: dict = field(default_factory=dict)  # call -> the same, of its role in this rank's home, on the way
    offloaded: set = field(default_factory=set)
    positions: list = field(default_factory=list)  # of the parts that it was sent
    has_entered: bool = False
    opening: RunCall | None = None  # of a pair, waits for the call that closes it
    is_dead: bool = False


class Stuck(AssertionError):
    """Nothing can happen any more, and the run is not over."""


class Simulation(Checks):
    """One run of a plan over `n_rows` dataset rows, in the order that `seed` gives."""

    def __init__(self, plan, *, seed, n_rows, validate=True, drop_share=0.3, restored=None):
        self.master_plan, self.plan = plan, plan.main
        self.drop_share = drop_share
        self.random = random.Random(seed)
        self.n_rows = n_rows
        self.validate = validate
        self.master = MasterState(plan)
        self.ranks = [Rank(WorkerState(rank)) for rank in range(plan.main.n_ranks)]
        self.calls = {call.name: call for call in self.plan.calls}
        self.events, self.instructions = [], []  # the log
        self.reports, self.checkpoints, self.start = [], {}, None
        self.end = None  # Finish or Abort
        self.commits = deque()
        self.entered = defaultdict(dict)  # part -> rank -> the parameters in its homes then
        self.position = {}  # part -> in the order of sending
        self.sent = defaultdict(dict)  # part -> rank -> request
        self.answered = defaultdict(set)  # part -> ranks whose reply the master has
        for call in self.plan.calls:
            for rank in () if call.hooks.home is None else call.hooks.home.ranks:
                self.ranks[rank].home[call.mfc.role] = 0
        self.known = defaultdict(set)  # call -> samples that it was done with before the run was resumed
        for record in self.plan.in_flight.calls:
            self.known[record.call] |= set(record.ids)
        self.restored = restored or {}  # sample -> keys that a checkpoint holds of it
        self.saved_rows = {}  # step -> the same, of the checkpoints of this run
        self.order = []  # sample ids as they were loaded
        self.index = {}
        self.visible = defaultdict(set)  # sample -> keys that the master knows of
        self.taken = defaultdict(set)  # call -> numbers of the samples that it was sent
        self.done = defaultdict(set)  # call -> the same, of those that the master knows to be done
        self.n_dispatched = Counter()  # call -> dispatches
        self.dispatch_of = {}  # (call, sample) -> dispatch
        self.n_done = Counter()  # call -> dispatches that the master knows to be done
        self.versions_read = defaultdict(set)  # (call, step) -> versions of its role on its ranks
        self.versions = {}  # (call, sample) -> version of its role, counted from the very first step
        self.versions_moved = defaultdict(set)  # (call, step, target) -> versions of the source that a hook wrote there

    # ------------------------------------------------------------ driving

    def run(self, stop_after=None):
        """Run to the end, or for `stop_after` actions."""
        if not self.events:
            hellos = [Hello(rank, 100 + rank, f"address {rank}") for rank in range(self.plan.n_ranks)]
            first = [Start(b"run"), *hellos]
            self.random.shuffle(first)
            for event in first:
                self.feed(event)
        n_actions = 0
        while self.end is None and n_actions != stop_after:
            self.act()
            n_actions += 1
        return self

    def act(self):
        """Let one of all things that can happen next happen."""
        actions = [("deliver", rank) for rank, r in enumerate(self.ranks) if r.replies]
        actions += [("work", rank) for rank in range(self.plan.n_ranks) if self.can_work(rank)]
        actions += [("commit", -1)] if self.commits else []
        if not actions:
            heads = [r.inbox[0] if r.inbox else None for r in self.ranks]
            raise Stuck(f"{self.master.phase}, heads {heads}, {[self.master.explain(c) for c in self.calls]}")
        kind, rank = self.random.choice(actions)
        if kind == "deliver":
            self.feed(self.ranks[rank].replies.popleft())
        elif kind == "commit":
            self.feed(CheckpointCommitted(self.commits.popleft()))
        else:
            self.work(rank)

    def feed(self, event):
        """Give the master one event, and perform what it answers."""
        self.events.append(event)
        self.see(event)
        instructions = self.master.handle(event)
        self.instructions.append(instructions)
        if self.validate:
            self.master.validate()
        self.check_decisions(instructions)
        for instruction in instructions:
            assert self.end is None, f"{instruction} after {self.end}"
            self.perform(instruction)
        assert self.master.n_living_samples <= self.plan.max_living
        return instructions

    def see(self, event):
        if isinstance(event, SamplesLoaded):
            for sample_id in event.meta.ids:
                self.visible[sample_id] |= {*event.meta.seqlens, *self.restored.get(sample_id, ())}
        if isinstance(event, CallDone) and event.output is not None:
            for sample_id in event.output.ids:
                self.visible[sample_id] |= set(event.output.seqlens)
        if isinstance(event, CallDone | HooksDone | RowsMoved):
            kind = PartKind(event.when) if isinstance(event, HooksDone) else REPLY_KIND[type(event)]
            self.answered[event.dispatch_id, kind].add(event.rank)
            parts = [(event.dispatch_id, kind) for kind in PartKind]
            is_whole = (event.dispatch_id, PartKind.CALL) in self.sent
            is_whole &= not self.calls[event.call].hooks.after or (event.dispatch_id, PartKind.AFTER) in self.sent
            if is_whole and all(self.answered[p] == self.sent[p].keys() for p in parts):
                self.n_done[event.call] += 1
                self.done[event.call] |= self.taken[event.call]

    def perform(self, instruction):
        match instruction:
            case Send(rank=rank, request=request):
                self.ranks[rank].inbox.append(request)
                if isinstance(request, LoadSamples):
                    self.check_load(rank, request)
                if isinstance(request, PARTS):
                    part = part_of(request)
                    position = self.position.setdefault(part, len(self.position))
                    assert not self.entered[part], "a part is sent in two goes"
                    assert position > max(self.ranks[rank].positions, default=-1), "ranks see parts in different orders"
                    self.ranks[rank].positions.append(position)
                    self.sent[part][rank] = request
            case ReportStart():
                assert self.start is None
                self.start = instruction
            case ReportStep():
                expected = self.plan.first_step + len(self.reports)
                assert instruction.step == expected
                self.reports.append(instruction)
            case OpenCheckpoint(step=step):
                assert step not in self.checkpoints
                self.checkpoints[step] = None
            case CommitCheckpoint(step=step):
                assert self.checkpoints[step] is None
                self.checkpoints[step] = instruction
                self.commits.append(step)
            case Finish() | Abort():
                self.end = instruction

    # ------------------------------------------------------------ ranks

    def can_work(self, rank):
        r = self.ranks[rank]
        if not r.inbox or r.is_dead:
            return False
        if not r.has_entered:
            return True
        head = r.inbox[0]
        if isinstance(head, RunHooks) and head.when == "ahead of":
            return True
        parts = [part_of(request) for request in (r.opening, head) if isinstance(request, PARTS)]
        return all(self.entered[part].keys() == self.sent[part].keys() for part in parts)

    def work(self, rank):
        """The rank begins its oldest request, or ends the one that it began."""
        r = self.ranks[rank]
        request = r.inbox[0]
        if not r.has_entered:
            assert r.state.begin(request, now_s=float(len(self.events)))
            if isinstance(request, RunCall) and request.joins == "opens":
                assert r.opening is None, "a pair is opened twice"
                r.opening = r.inbox.popleft()
                r.state.finish(now_s=float(len(self.events)))
                return
            joins = request.joins if isinstance(request, RunCall) else ""
            assert (r.opening is not None) == (joins == "closes"), "something came between the calls of a pair"
            if r.opening is not None:
                assert self.calls[request.call].partner == r.opening.call
                assert request.step == r.opening.step
                self.entered[part_of(r.opening)][rank] = dict(r.home)
                self.enter_call(rank, r.opening)
            r.has_entered = True
            if isinstance(request, PARTS):
                self.entered[part_of(request)][rank] = dict(r.home)
            if isinstance(request, RunCall):
                self.enter_call(rank, request)
            return
        opened = [] if r.opening is None else [self.end_request(rank, r.opening)]
        r.opening = None
        reply = self.end_request(rank, request)
        r.state.finish(now_s=float(len(self.events)))
        r.state.validate()
        r.has_entered = False
        r.inbox.popleft()
        r.replies += [*opened, reply]

    def end_request(self, rank, request):
        r = self.ranks[rank]
        match request:
            case Initialize():
                rows = tuple(f"row{i}" for i in range(self.n_rows)) if rank == self.plan.dataset_rank else ()
                return Ready(rank, request.seq, rows, 0, ())
            case LoadSamples():
                for sample_id in request.ids:
                    assert sample_id not in self.plan.in_flight.dropped, "it was dropped before the run was resumed"
                    r.store[sample_id] |= {*self.plan.dataset_keys, *self.restored.get(sample_id, ())}
                known = [meta([i], sorted(self.restored[i])) for i in request.ids if i in self.restored]
                loaded = meta(request.ids, self.plan.dataset_keys)
                return SamplesLoaded(rank, request.seq, loaded, (), tuple(known))
            case RunCall():
                return self.end_call(rank, request)
            case MoveRows():
                return self.end_rows(rank, request)
            case RunHooks():
                return self.end_hooks(rank, request)
            case FreeSamples():
                for sample_id in request.ids:
                    assert r.store.pop(sample_id, None), f"rank {rank} has nothing of {sample_id} to free"
                return SamplesFreed(rank, request.seq)
            case SaveCheckpoint(step=step, rows=rows):
                self.check_save(rank, step)
                for key, ids in rows.items():
                    for sample_id in ids:
                        assert key in r.store[sample_id], "rows that are to be saved are not there"
                        saved = self.saved_rows.setdefault(step, {}).setdefault(sample_id, set())
                        assert key not in saved, "a row is saved twice"
                        saved.add(key)
                return CheckpointSaved(rank, request.seq, step)
            case Shutdown():
                return Goodbye(rank, request.seq)

    def enter_call(self, rank, request):
        call = self.calls[request.call]
        assert rank in call.ranks
        r = self.ranks[rank]
        for transfer in request.transfers:
            assert transfer.target == rank != transfer.source
            assert transfer.key in call.mfc.input_keys
            self.fetch(
                transfer, self.sent[part_of(request)][transfer.source].transfers if transfer.is_passed_on else ()
            )
        for transfer in request.spreads:
            sent = self.sent[part_of(request)]
            assert all(transfer in sent[end].spreads for end in (transfer.source, transfer.target)), "a peer is missing"
            for sample_id in transfer.ids if transfer.target == rank else ():
                assert transfer.key not in r.store[sample_id], "the target has these rows"
                r.store[sample_id].add(transfer.key)
        for sample_id in ids_of(request):
            assert set(call.mfc.input_keys) <= r.store[sample_id], "rows are missing"
        if call.mfc.role in self.homes:
            is_visiting = call.hooks.home != call.allocation
            assert (call.name in r.visiting) == is_visiting, "parameters are missing, or in the way"
            beside = self.plan.overlap.early
            assert all(name == call.name or call.name in beside[name] for name in r.setting_out), "no room for both"
            version = r.visiting[call.name] if is_visiting else self.use(rank, call.mfc.role)
            if call.mfc.role in self.changing_roles:
                self.versions_read[call.name, request.step].add(version)
            at_start = self.plan.versions_after(self.plan.first_step - 1).get(call.mfc.role)
            if at_start is not None:
                recorded = next(d.version for d in self.master.dispatches if d.id == request.dispatch_id)
                assert recorded == at_start + version, "the master takes it for another"
                self.versions.update({(call.name, sample_id): recorded for sample_id in ids_of(request)})
        if len(self.entered[part_of(request)]) == 1:
            self.check_dispatch(request)

    @property
    def homes(self):
        """Role -> home, of the roles that have parameters."""
        return {call.mfc.role: call.hooks.home for call in self.plan.calls if call.hooks.home is not None}

    @property
    def changing_roles(self):
        """Roles that are trained, or written by a hook."""
        hooks = [h for call in self.plan.calls for h in (*call.hooks.before, *call.hooks.after) if not self.is_local(h)]
        return {call.mfc.role for call in self.plan.calls if call.mfc.is_train} | {hook.target for hook in hooks}

    def use(self, rank, role):
        """The parameters in a home are read or written: they come back from the host if they are there."""
        self.ranks[rank].offloaded.discard(role)
        return self.ranks[rank].home[role]

    def end_rows(self, rank, request):
        assert request.sends or request.receives
        for transfer in request.sends:
            assert transfer.source == rank
            assert transfer in self.sent[part_of(request)][transfer.target].receives
        for transfer in request.receives:
            assert transfer.target == rank != transfer.source
            assert transfer in self.sent[part_of(request)][transfer.source].sends
            self.fetch(transfer, self.sent[part_of(request)][transfer.source].receives if transfer.is_passed_on else ())
        return RowsMoved(rank, request.seq, request.dispatch_id, request.call, request.step, (), 10)

    def fetch(self, transfer, of_relay):
        """The target gets rows that the source has, or that it fetches for the same part if it is a relay."""
        passed_on = {(t.key, sample_id) for t in of_relay if not t.is_passed_on for sample_id in t.ids}
        for sample_id in transfer.ids:
            has = transfer.key in self.ranks[transfer.source].store[sample_id]
            is_there = (transfer.key, sample_id) in passed_on if transfer.is_passed_on else has
            assert is_there, "the source has no such rows"
            assert transfer.key not in self.ranks[transfer.target].store[sample_id], "the target has these rows"
            self.ranks[transfer.target].store[sample_id].add(transfer.key)

    def end_hooks(self, rank, request):
        """All ranks of the part are there: what each had in its homes when it came is what the hooks move."""
        r, call = self.ranks[rank], self.calls[request.call]
        hooks = call.hooks
        if request.when == "ahead of":
            assert request.call not in r.setting_out
            assert not r.setting_out, "two journeys on one rank"
            role = call.mfc.role
            r.setting_out[request.call] = self.use(rank, role) if rank in hooks.home.ranks else None
            return hooks_done(rank, request)
        mine = [hook for hook in getattr(hooks, request.when) if rank in hook.ranks]
        assert mine, "a rank is asked for hooks that do not concern it"
        for hook in mine:
            if not isinstance(hook, Realloc):
                r.offloaded.add(hook.role)
                continue
            found = {self.entered[part_of(request)][other][hook.source] for other in hook.source_allocation.ranks}
            if hook.is_implied and request.call in r.setting_out:
                journey = self.entered[request.dispatch_id, PartKind.AHEAD]
                assert journey.keys() == set(hook.ranks), "some rank does not take part in the journey"
                assert {journey[other][hook.source] for other in hook.source_allocation.ranks} == found, (
                    "the source was written while its parameters travelled"
                )
                del r.setting_out[request.call]
            assert len(found) == 1, "the ranks of a home have different versions"
            if rank in hook.source_allocation.ranks:
                self.use(rank, hook.source)
            if rank not in hook.target_allocation.ranks:
                continue
            if hook.is_implied:
                assert request.when == "before"
                role_changes = hook.source in self.changing_roles
                assert request.call not in r.visiting or role_changes, "what has stayed is brought again"
                r.visiting[request.call] = found.pop()
            else:
                is_own_training = call.mfc.is_train and hook.target == call.mfc.role  # one version, with its pulls
                r.home[hook.target] = self.use(rank, hook.target) + (not is_own_training)
                self.versions_moved[request.call, request.step, hook.target] |= found
        return hooks_done(rank, request)

    def end_call(self, rank, request):
        call, r = self.calls[request.call], self.ranks[rank]
        for transfer in request.spreads:
            for sample_id in transfer.ids if transfer.source == rank else ():
                assert transfer.key in r.store[sample_id], "the source has no such rows"
        output = self.random.choice([None, SampleMeta((), {}, {})])
        if not request.keeps_parameters:
            r.visiting.pop(call.name, None)
        if call.hooks.home == call.allocation:
            r.setting_out.pop(call.name, None)
        assert call.name not in r.setting_out, "nobody took in what was on its way"
        if call.mfc.is_train:
            assert not request.keeps
            r.home[call.mfc.role] += 1
        elif keeps := [sample_id for sample_id in request.keeps if not self.is_dropped_by(call, sample_id)]:
            output = meta(keeps, call.mfc.output_keys)
            for sample_id in keeps:
                r.store[sample_id] |= set(call.mfc.output_keys)
        return CallDone(
            rank=rank,
            seq=request.seq,
            dispatch_id=request.dispatch_id,
            call=call.name,
            step=request.step,
            output=output,
            metrics={f"{call.name}/loss": float(request.step), f"{call.name}/n": float(request.dispatch_id)},
            spans=(Span(call.name, "call", 1.0, 1.5 + rank),),
            bytes_received=10,
            memory_gb=0.5,
        )

    # ------------------------------------------------------------ dropping

    def is_dropped_by(self, call, sample_id):
        """Return True if a dropping call drops a sample."""
        return call.mfc.may_drop and zlib.crc32(f"{call.name} {sample_id}".encode()) < self.drop_share * 2**32

    def is_dropped(self, sample_id):
        """Return True if some call drops a sample that nobody dropped before."""
        return any(self.is_dropped_by(call, sample_id) for call in self.plan.calls)

    def expected_steps(self, n_steps):
        """By step: the samples that it must load, and those that its last calls must see, in order of their place.

        Written down from the rules alone, without a master.
        """
        size, refs, steps = self.plan.step_size, self.refs(), []
        for _ in range(n_steps):
            loaded = [next(refs) for _ in range(size)]
            n_kept = sum(not self.is_dropped(i) for i in loaded)
            places = [None if self.is_dropped(i) else i for i in loaded]
            while None in places:
                n_vacant = places.count(None)
                wanted = min(size, int(n_vacant * len(loaded) / n_kept + 0.5)) if n_kept else size
                round_ = [next(refs) for _ in range(wanted)]
                loaded += round_
                survivors = [i for i in round_ if not self.is_dropped(i)]
                n_kept += len(survivors)
                for sample_id in survivors[:n_vacant]:
                    places[places.index(None)] = sample_id
            steps.append((loaded, places))
        return steps

    @cached_property
    def all_steps(self):
        """`expected_steps` of the whole run."""
        return self.expected_steps(self.start.last_step - self.plan.first_step + 1)

    def refs(self):
        """Ids of the samples in the order of the dataset."""
        cursor = self.plan.cursor([f"row{i}" for i in range(self.n_rows)])
        position = cursor.start
        while True:
            yield cursor.take(position, 1)[0].id
            position += 1


def hooks_done(rank, request):
    """The answer to hooks."""
    return HooksDone(rank, request.seq, request.dispatch_id, request.call, request.step, request.when, (), 100, 0.25)


REPLY_KIND = {CallDone: PartKind.CALL, RowsMoved: PartKind.ROWS}


def meta(ids, keys):
    """Samples with lengths that depend on the id."""
    lengths = tuple((1 + sum(sample_id.encode()) % 7,) for sample_id in ids)
    return SampleMeta(tuple(ids), dict.fromkeys(keys, TOKEN), dict.fromkeys(keys, lengths))
