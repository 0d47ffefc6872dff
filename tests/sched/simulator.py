"""A cluster in one thread: ranks that execute what the master sends, in any order that a real cluster could show.

Each rank executes its requests in order, through the real `WorkerState`. RunCall, RunHooks and MoveRows are rendezvous:
a rank enters one, and can end it only after every rank that was sent the same part entered it. Parameters are numbers:
how often they were trained, or written by a hook. Replies of one rank arrive in order, those
of different ranks in any order. Which of all possible actions comes next is drawn from a seed. Whatever a correct
master must never do is checked on the way. What a dropping call drops depends on the sample and the call alone.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter, defaultdict, deque
from dataclasses import dataclass, field

from realrl.plan.cursor import DatasetCursor
from realrl.plan.hooks import Realloc
from realrl.sched.dispatch import PartKind
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
from realrl.sched.master_state import MasterState
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
from realrl.sched.worker_state import WorkerState

TOKEN = KeySchema("int64", Per.TOKEN)
PARTS = RunCall | RunHooks | MoveRows


@dataclass
class Rank:
    """One worker: its logic, its requests, its replies on their way, and the keys of each sample in its store."""

    state: WorkerState
    inbox: deque = field(default_factory=deque)
    replies: deque = field(default_factory=deque)
    store: dict = field(default_factory=lambda: defaultdict(set))
    home: dict = field(default_factory=dict)  # role -> how often its parameters changed, on the ranks of its home
    visiting: dict = field(default_factory=dict)  # call -> the same, of parameters that a hook brought for it
    offloaded: set = field(default_factory=set)
    positions: list = field(default_factory=list)  # of the parts that it was sent
    has_entered: bool = False
    is_dead: bool = False


class Stuck(AssertionError):
    """Nothing can happen any more, and the run is not over."""


class Simulation:
    """One run of a plan over `n_rows` dataset rows, in the order that `seed` gives."""

    def __init__(self, plan, *, seed, n_rows, validate=True, drop_share=0.3):
        self.plan = plan
        self.drop_share = drop_share
        self.random = random.Random(seed)
        self.n_rows = n_rows
        self.validate = validate
        self.master = MasterState(plan)
        self.ranks = [Rank(WorkerState(rank)) for rank in range(plan.n_ranks)]
        self.calls = {call.name: call for call in plan.calls}
        self.events, self.instructions = [], []  # the log
        self.reports, self.checkpoints, self.start = [], {}, None
        self.end = None  # Finish or Abort
        self.commits = deque()
        self.entered = defaultdict(dict)  # part -> rank -> the parameters in its homes then
        self.position = {}  # part -> in the order of sending
        self.sent = defaultdict(dict)  # part -> rank -> request
        self.answered = defaultdict(set)  # part -> ranks whose reply the master has
        for call in plan.calls:
            for rank in () if call.hooks.home is None else call.hooks.home.ranks:
                self.ranks[rank].home[call.role] = 0
        self.order = []  # sample ids as they were loaded
        self.index = {}
        self.visible = defaultdict(set)  # sample -> keys that the master knows of
        self.taken = defaultdict(set)  # call -> numbers of the samples that it was sent
        self.n_dispatched = Counter()  # call -> dispatches
        self.dispatch_of = {}  # (call, sample) -> dispatch
        self.n_done = Counter()  # call -> dispatches that the master knows to be done
        self.versions_read = defaultdict(set)  # (call, step) -> versions of its role on its ranks
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
                self.visible[sample_id] |= set(event.meta.seqlens)
        if isinstance(event, CallDone) and event.output is not None:
            for sample_id in event.output.ids:
                self.visible[sample_id] |= set(event.output.seqlens)
        if isinstance(event, CallDone | HooksDone | RowsMoved):
            kind = PartKind(event.when) if isinstance(event, HooksDone) else REPLY_KIND[type(event)]
            self.answered[event.dispatch_id, kind].add(event.rank)
            parts = [(event.dispatch_id, kind) for kind in PartKind]
            is_whole = not self.calls[event.call].hooks.after or (event.dispatch_id, PartKind.AFTER) in self.sent
            self.n_done[event.call] += is_whole and all(self.answered[p] == self.sent[p].keys() for p in parts)

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
        return not isinstance(head, PARTS) or self.entered[part_of(head)].keys() == self.sent[part_of(head)].keys()

    def work(self, rank):
        """The rank begins its oldest request, or ends the one that it began."""
        r = self.ranks[rank]
        request = r.inbox[0]
        if not r.has_entered:
            assert r.state.begin(request, now_s=float(len(self.events)))
            r.has_entered = True
            if isinstance(request, PARTS):
                self.entered[part_of(request)][rank] = dict(r.home)
            if isinstance(request, RunCall):
                self.enter_call(rank, request)
            return
        reply = self.end_request(rank, request)
        r.state.finish(now_s=float(len(self.events)))
        r.state.validate()
        r.has_entered = False
        r.inbox.popleft()
        r.replies.append(reply)

    def end_request(self, rank, request):
        r = self.ranks[rank]
        match request:
            case Initialize():
                rows = tuple(f"row{i}" for i in range(self.n_rows)) if rank == self.plan.dataset_rank else ()
                return Ready(rank, request.seq, rows, 0, ())
            case LoadSamples():
                for sample_id in request.ids:
                    r.store[sample_id] |= set(self.plan.dataset_keys)
                return SamplesLoaded(rank, request.seq, meta(request.ids, self.plan.dataset_keys))
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
            case SaveCheckpoint(step=step):
                self.check_save(rank, step)
                return CheckpointSaved(rank, request.seq, step)
            case Shutdown():
                return Goodbye(rank, request.seq)

    def enter_call(self, rank, request):
        call = self.calls[request.call]
        assert rank in call.ranks
        r = self.ranks[rank]
        for transfer in request.transfers:
            assert transfer.target == rank != transfer.source
            assert transfer.key in call.input_keys
            for sample_id in transfer.ids:
                assert transfer.key in self.ranks[transfer.source].store[sample_id], "the source has no such rows"
                assert transfer.key not in r.store[sample_id], "the target has these rows"
                r.store[sample_id].add(transfer.key)
        for sample_id in ids_of(request):
            assert set(call.input_keys) <= r.store[sample_id], "rows are missing"
        if call.role in self.homes:
            is_visiting = call.hooks.home != call.allocation
            assert (call.name in r.visiting) == is_visiting, "parameters are missing, or in the way"
            version = r.visiting[call.name] if is_visiting else self.use(rank, call.role)
            if call.role in self.changing_roles:
                self.versions_read[call.name, request.step].add(version)
            at_start = self.plan.versions_after(self.plan.first_step - 1).get(call.role)
            if at_start is not None:
                recorded = next(d.version for d in self.master._dispatches() if d.id == request.dispatch_id)
                assert recorded == at_start + version, "the master takes it for another"
        if len(self.entered[part_of(request)]) == 1:
            self.check_dispatch(request)

    @property
    def homes(self):
        """Role -> home, of the roles that have parameters."""
        return {call.role: call.hooks.home for call in self.plan.calls if call.hooks.home is not None}

    @property
    def changing_roles(self):
        """Roles that are trained, or written by a hook."""
        hooks = [h for call in self.plan.calls for h in (*call.hooks.before, *call.hooks.after) if not self.is_local(h)]
        return {call.role for call in self.plan.calls if call.is_train} | {hook.target for hook in hooks}

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
            for sample_id in transfer.ids:
                assert transfer.key in self.ranks[transfer.source].store[sample_id], "the source has no such rows"
                assert transfer.key not in self.ranks[rank].store[sample_id], "the target has these rows"
                self.ranks[rank].store[sample_id].add(transfer.key)
        return RowsMoved(rank, request.seq, request.dispatch_id, request.call, request.step, (), 10)

    def end_hooks(self, rank, request):
        """All ranks of the part are there: what each had in its homes when it came is what the hooks move."""
        r, hooks = self.ranks[rank], self.calls[request.call].hooks
        mine = [hook for hook in getattr(hooks, request.when) if rank in hook.ranks]
        assert mine, "a rank is asked for hooks that do not concern it"
        for hook in mine:
            if not isinstance(hook, Realloc):
                r.offloaded.add(hook.role)
                continue
            found = {self.entered[part_of(request)][other][hook.source] for other in hook.source_allocation.ranks}
            assert len(found) == 1, "the ranks of a home have different versions"
            if rank in hook.source_allocation.ranks:
                self.use(rank, hook.source)
            if rank not in hook.target_allocation.ranks:
                continue
            if hook.is_implied:
                assert request.when == "before"
                assert request.call not in r.visiting
                r.visiting[request.call] = found.pop()
            else:
                r.home[hook.target] = self.use(rank, hook.target) + 1
                self.versions_moved[request.call, request.step, hook.target] |= found
        return HooksDone(
            rank, request.seq, request.dispatch_id, request.call, request.step, request.when, (), 100, 0.25
        )

    def end_call(self, rank, request):
        call, r = self.calls[request.call], self.ranks[rank]
        output = self.random.choice([None, SampleMeta((), {}, {})])
        r.visiting.pop(call.name, None)
        if call.is_train:
            assert not request.keeps
            r.home[call.role] += 1
        elif keeps := [sample_id for sample_id in request.keeps if not self.is_dropped_by(call, sample_id)]:
            output = meta(keeps, call.output_keys)
            for sample_id in keeps:
                r.store[sample_id] |= set(call.output_keys)
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
        """What a dropping call decides about a sample."""
        return call.may_drop and zlib.crc32(f"{call.name} {sample_id}".encode()) < self.drop_share * 2**32

    def is_dropped(self, sample_id):
        """Whether some call drops a sample that nobody dropped before."""
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

    def refs(self):
        """Ids of the samples in the order of the dataset."""
        rows, plan = [f"row{i}" for i in range(self.n_rows)], self.plan
        cursor = DatasetCursor(rows, seed=plan.seed, shuffle=plan.shuffle, start=plan.resume and plan.resume.cursor)
        position = cursor.start
        while True:
            yield cursor.take(position, 1)[0].id
            position += 1

    # ------------------------------------------------------------ what must never happen

    def check_load(self, rank, request):
        assert rank == self.plan.dataset_rank
        assert len(request.ids) == len(request.rows)
        for sample_id, row in zip(request.ids, request.rows, strict=True):
            assert sample_id.split("/")[1] == f"row{row}"
            assert sample_id not in self.index, "loaded twice"
            self.index[sample_id] = len(self.order)
            self.order.append(sample_id)

    def check_decisions(self, instructions):
        """Look at what the master decided, with no more than what it was told."""
        dispatches = {}
        for instruction in instructions:
            if isinstance(instruction, Send) and isinstance(instruction.request, RunCall):
                request = instruction.request
                dispatches.setdefault(request.dispatch_id, (request.call, request.step, set()))[2].update(
                    self.index[sample_id] for sample_id in ids_of(request)
                )
        for name, step, indices in dispatches.values():
            call, steps_before = self.calls[name], step - self.plan.first_step
            self.n_dispatched[name] += 1
            assert self.n_dispatched[name] - self.n_done[name] == 1, "two dispatches of one call are under way"
            if call.is_train:
                assert self.steps_done(name) >= steps_before
            for wait in call.waits_for:
                if not self.calls[wait.trainer].feeds_drop:
                    assert self.steps_done(wait.trainer) >= steps_before + 1 - wait.lag, "the weights are too old"
            if call.min_n_seqs is not None and not self.plan.drops:
                assert sorted(indices) == self.ready(call, steps_before)[: len(indices)], "not the oldest samples"
            self.taken[name] |= indices
        for rank in range(self.plan.n_ranks):
            sent = [i.request for i in instructions if isinstance(i, Send) and i.rank == rank]
            n_open = sum(isinstance(request, RunCall) for request in [*self.ranks[rank].inbox, *sent])
            n_unseen = sum(isinstance(reply, CallDone) for reply in self.ranks[rank].replies)
            assert n_open + n_unseen <= 2, "a device has a long queue"

    def steps_done(self, name):
        """Steps of this run that the master knows a call that does not stream to be done with."""
        return self.n_done[name] * self.calls[name].n_seqs // self.plan.step_size

    def ready(self, call, steps_before):
        """Numbers of the samples of one step that a call could take, as far as the master knows."""
        size = self.plan.step_size
        step = range(steps_before * size, (steps_before + 1) * size)
        return [
            i
            for i in step
            if i < len(self.order) and i not in self.taken[call.name]
            and set(call.input_keys) <= self.visible[self.order[i]]
        ]  # fmt: skip

    def check_dispatch(self, request):
        """The first rank entered a dispatch: look at what all ranks of the mesh were sent."""
        call = self.calls[request.call]
        parts = {}
        for rank in call.ranks:
            parts[rank] = next(
                q for q in self.ranks[rank].inbox if isinstance(q, RunCall) and q.dispatch_id == request.dispatch_id
            )
            assert (parts[rank].call, parts[rank].step) == (call.name, request.step)
            assert parts[rank].n_steps == self.start.last_step
        for part in parts.values():
            assert len(part.minibatches) == call.n_minibatches
            assert all(part.minibatches) or call.feeds_drop, "a rank has no sample in some minibatch"
        if call.protocol == "3D_PROTO":
            for dp_rank in range(call.allocation.strategy.dp):
                members = [parts[rank].minibatches for rank in call.allocation.dp_group_members(dp_rank)]
                assert len(set(members)) == 1
        ids = sorted({sample_id for part in parts.values() for sample_id in ids_of(part)})
        if not call.is_train:
            assert sorted(sample_id for part in parts.values() for sample_id in part.keeps) == ids
        for sample_id in ids:
            assert (call.name, sample_id) not in self.dispatch_of, "a call reads a sample twice"
            self.dispatch_of[call.name, sample_id] = request.dispatch_id

    def check_batches(self):
        """Look at the whole run: every batch that every call took, in order."""
        batches = self.batches()
        size, first = self.plan.step_size, self.plan.first_step
        if self.plan.drops:
            self.check_batches_with_drops(batches)
            return
        for name, call in self.calls.items():
            position = 0
            for step, indices in batches[name]:
                assert {first + index // size for index in indices} == {step}
                if call.min_n_seqs is None:
                    assert indices == list(range(position, position + call.n_seqs))
                else:
                    assert call.min_n_seqs <= len(indices) <= call.n_seqs
                position += len(indices)
            assert sorted(i for _, indices in batches[name] for i in indices) == list(range(position))

    def check_batches_with_drops(self, batches):
        """Calls after the dropping ones see the survivors by their place, and the others all that is loaded."""
        size, first = self.plan.step_size, self.plan.first_step
        expected = self.expected_steps(self.start.last_step - first + 1)
        assert self.order == [sample_id for loaded, _ in expected for sample_id in loaded]
        dropping = []
        for name, call in self.calls.items():
            gates = [*(self.calls[other] for other in call.gates), *(dropping if call.may_drop else ())]
            dropping += [call] if call.may_drop else []
            for index, (loaded, places) in enumerate(expected):
                found = [[self.order[i] for i in batch] for step, batch in batches[name] if step == first + index]
                seen = [sample_id for batch in found for sample_id in batch]
                assert all(batch and len(batch) <= call.n_seqs for batch in found)
                if call.feeds_drop:
                    assert set(seen) <= set(loaded)
                    assert not any(self.is_dropped_by(gate, i) for gate in gates for i in seen)
                    if not self.behind_a_dropping_call(call):
                        assert sorted(seen) == sorted(loaded)
                        assert seen == loaded or call.min_n_seqs is not None
                elif call.min_n_seqs is None:
                    assert [sorted(b) for b in found] == [
                        sorted(places[i : i + call.n_seqs]) for i in range(0, size, call.n_seqs)
                    ]
                else:
                    assert sorted(seen) == sorted(places)
                assert len(set(seen)) == len(seen)

    def behind_a_dropping_call(self, call):
        """Whether some dropping call comes before this one, by data or by an edge of its own."""
        produced = {key: other for other in self.plan.calls for key in other.output_keys}
        before = [*(produced[key] for key in call.input_keys if key in produced), *(self.calls[g] for g in call.gates)]
        return any(other.may_drop or self.behind_a_dropping_call(other) for other in before)

    def batches(self):
        """Call -> its batches in the order of dispatch, each a step and the sorted numbers of its samples."""
        found = defaultdict(dict)
        for instructions in self.instructions:
            for instruction in instructions:
                if isinstance(instruction, Send) and isinstance(instruction.request, RunCall):
                    request = instruction.request
                    batch = found[request.call].setdefault(request.dispatch_id, (request.step, set()))
                    batch[1].update(self.index[sample_id] for sample_id in ids_of(request))
        return {
            name: [(step, sorted(found[name][d][1])) for d, (step, _) in sorted(found[name].items())]
            for name in self.calls
        }

    def check_save(self, rank, step):
        """The homes hold exactly what `step` steps made of them."""
        n_steps = step - self.plan.first_step + 1
        for call in self.plan.calls:
            per_step = self.plan.step_size // call.n_seqs
            targets = [h.target for h in (*call.hooks.before, *call.hooks.after) if not self.is_local(h)]
            for role in [*targets, *([call.role] if call.is_train else [])]:
                if rank in self.homes[role].ranks:
                    assert self.ranks[rank].home[role] == n_steps * per_step

    @staticmethod
    def is_local(hook):
        return not isinstance(hook, Realloc) or hook.is_implied

    def check_complete(self):
        """The run ended on its own: everything was done once, and nothing is left."""
        assert self.end == Finish(spans=self.end.spans), self.end
        n_steps = self.start.last_step - self.plan.first_step + 1
        assert [report.step for report in self.reports] == list(range(self.plan.first_step, self.start.last_step + 1))
        if not self.plan.drops:
            assert len(self.order) == n_steps * self.plan.step_size
            assert len(self.dispatch_of) == len(self.order) * len(self.calls)
        assert self.master.n_living_samples == 0
        for r in self.ranks:
            assert not r.inbox
            assert not r.replies
            assert not any(r.store.values()), "samples were never freed"
            assert not r.visiting, "parameters of a call are still there"
        assert all(self.answered[part] == ranks.keys() for part, ranks in self.sent.items())
        self.check_batches()
        assert all(commit is not None for commit in self.checkpoints.values())


REPLY_KIND = {CallDone: PartKind.CALL, RowsMoved: PartKind.ROWS}


def part_of(request):
    """What all ranks of one part have in common."""
    return request.dispatch_id, PartKind.of(request)


def ids_of(request):
    """All samples of one rank's part of a call."""
    return tuple(sample_id for minibatch in request.minibatches for sample_id in minibatch)


def meta(ids, keys):
    """Samples with lengths that depend on the id."""
    lengths = tuple((1 + sum(sample_id.encode()) % 7,) for sample_id in ids)
    return SampleMeta(tuple(ids), dict.fromkeys(keys, TOKEN), dict.fromkeys(keys, lengths))
