"""Workers of a simulated run: requests in order, each with a begin, an end and a reply.

    request ─► inbox of a rank ─► begin ─► the others of its part enter ─► end ─► reply
                                     ▲                                      │
                                     └──────── the rank's next request ◄────┘

Nothing that a worker does depends on what happens later elsewhere, so the times of a request are computed as soon as
those of all that it waits for are known, ahead of the master's clock. Rendezvous are those of real workers: a call's
groups (`Durations.meets`), all ranks of MoveRows, all ranks of hooks that move parameters. A rank goes on from hooks
ahead of a call at once; the hooks before the call then wait for what they began.

Invariants:
    - a rank executes its requests in the order of sending, one at a time;
    - a request begins neither before it arrives nor before the one before it ends;
    - a rendezvous ends on no rank before all its ranks have entered it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import NamedTuple

from realrl.plan.hooks import Offload, Realloc
from realrl.sched.calls import ScheduledCall
from realrl.sched.events import Send
from realrl.sched.master.master_plan import MasterPlan
from realrl.sched.messages import (
    FreeSamples,
    HookTime,
    Initialize,
    LoadSamples,
    MoveRows,
    ReadSamples,
    Reply,
    Request,
    RunCall,
    RunHooks,
    SaveCheckpoint,
    Shutdown,
    Span,
)
from realrl.sched.track.dispatch import PartKind, PartRequest
from realrl.sched.worker_state import WorkerState
from realrl.sim.durations import Durations
from realrl.sim.replies import Replies, Times
from realrl.sim.samples import Samples, tracks_of

NO_CAUSE = -1
_WHEN: dict[PartKind, HookTime] = {PartKind.AHEAD: "ahead of", PartKind.BEFORE: "before", PartKind.AFTER: "after"}


class Activity(NamedTuple):
    """Work that ranks did together, or one alone.

    Attributes:
        name: the call for its parts; else what a rank does.
        kind: kind of the part ("call", "rows", "before", ...), or the name itself.
        begins: rank -> time at which it came to the work.
        start_s: time at which all of them were ready, with their rows and parameters.
        came_s: begin of the rank that was ready last.
        ends: rank -> time at which it goes on to its next request.
        cause: index of the activity whose end decided `came_s`; `NO_CAUSE` at the start of the run.
    """

    name: str
    kind: str
    begins: Mapping[int, float]
    start_s: float
    came_s: float
    ends: Mapping[int, float]
    cause: int


class Answer(NamedTuple):
    """A reply on its way to the master.

    Attributes:
        at_s: time of its arrival.
        activity: index of the activity that it reports.
    """

    at_s: float
    activity: int
    reply: Reply


class _Entry(NamedTuple):
    """A rank's arrival at a rendezvous, as `Times` has it."""

    begin_s: float
    pulled_s: float
    ready_s: float
    cause: int


class _Part:
    """A part that was sent: its ranks in the groups that meet, and those that have come."""

    __slots__ = ("call", "entered", "group_of", "n_entered", "n_left", "pull_s", "requests", "seconds")

    def __init__(
        self, call: ScheduledCall, requests: Mapping[int, PartRequest], group_of: Mapping[int, tuple[int, ...]]
    ) -> None:
        self.call = call
        self.requests = requests
        self.group_of = group_of
        self.entered: dict[int, _Entry] = {}
        self.n_entered = dict.fromkeys(group_of.values(), 0)
        self.n_left = len(requests)
        self.seconds: Mapping[int, float] | None = None
        self.pull_s: Mapping[int, float] = {}


class _Rank:
    """One worker."""

    __slots__ = ("activity", "back_s", "free_s", "inbox", "is_waiting", "offloaded", "state")

    def __init__(self, rank: int) -> None:
        self.state = WorkerState(rank)
        self.inbox: deque[tuple[float, int, Request]] = deque()  # arrival, its cause, request
        self.free_s = 0.0
        self.is_waiting = False  # in a rendezvous
        self.activity = NO_CAUSE  # the last one
        self.offloaded: set[str] = set()
        self.back_s: dict[str, float] = {}  # role that was offloaded -> when it is back


class Workers:
    """All workers of a run.

    Args:
        durations: seconds of everything.
        samples: lengths.
        n_rows: usable rows of the dataset.
    """

    def __init__(self, plan: MasterPlan, durations: Durations, samples: Samples, *, n_rows: int) -> None:
        self.activities: list[Activity] = []
        self._durations = durations
        self._samples = samples
        self._calls = {call.name: call for track in tracks_of(plan) for call in track.calls}
        self._replies = Replies(plan, durations, samples, n_rows=n_rows)
        self._groups: dict[str, dict[int, tuple[int, ...]]] = {}  # of calls
        self._ranks = [_Rank(rank) for rank in range(plan.main.n_ranks)]
        self._parts: dict[tuple[int, PartKind], _Part] = {}
        self._set_out: dict[int, list[float]] = {}  # dispatch -> when its parameters left, by rank
        self._answers: list[Answer] = []

    def send(self, sends: Iterable[Send], *, now_s: float, cause: int) -> list[Answer]:
        """Take requests that the master sends at `now_s` because of an activity; return the replies that follow.

        All requests of one part come together.
        """
        parts: dict[tuple[int, PartKind], dict[int, PartRequest]] = {}
        touched: dict[int, None] = {}
        for send in sends:
            rank, request = send.rank, send.request
            self._ranks[rank].inbox.append((now_s + self._durations.latency(rank), cause, request))
            touched[rank] = None
            if isinstance(request, RunCall | RunHooks | MoveRows):
                parts.setdefault((request.dispatch_id, PartKind.of(request)), {})[rank] = request
        self._parts |= {key: self._open(key[1], requests) for key, requests in parts.items()}
        self._go_on(list(touched))
        answers, self._answers = self._answers, []
        return answers

    # ------------------------------------------------------------ one request after another

    def _go_on(self, ranks: list[int]) -> None:
        """Let ranks begin what they can, and those that this frees."""
        while ranks:
            number = ranks.pop()
            rank = self._ranks[number]
            while rank.inbox and not rank.is_waiting:
                arrival_s, cause, request = rank.inbox.popleft()
                begin_s = max(arrival_s, rank.free_s)
                cause = cause if arrival_s >= rank.free_s else rank.activity
                assert rank.state.begin(request, now_s=begin_s)
                if isinstance(request, RunCall | RunHooks | MoveRows):
                    rank.is_waiting = True
                    ranks += self._enter(number, request, begin_s, cause)
                else:
                    self._do_alone(number, request, begin_s, cause)

    def _do_alone(self, number: int, request: Request, begin_s: float, cause: int) -> None:
        d, later_s, args = self._durations, 0.0, dict[str, str | int | float]()
        match request:
            case Initialize():
                name, kind, seconds = "initialize", "init", d.start()
            case LoadSamples(ids=ids):
                name, kind, seconds, args = "dataset", "load", d.load(len(ids)), {"samples": len(ids)}
            case ReadSamples(step=step, texts=texts, keys=keys):
                n = len({i for ids in (*texts.values(), *keys.values()) for i in ids})
                name, kind, seconds, args = "read", "read", d.read(n), {"step": step, "samples": n}
            case FreeSamples():
                name, kind, seconds = "free", "free", d.free()
            case SaveCheckpoint(step=step):
                name, kind, seconds, args = "checkpoint", "save", d.save(number), {"step": step}
                later_s = d.write(number)
            case _:
                assert isinstance(request, Shutdown)
                name, kind, seconds = "shutdown", "shutdown", 0.0
        end_s = begin_s + seconds
        span = Span(name, kind, begin_s, end_s, args)
        activity = self._note(Activity(name, kind, {number: begin_s}, begin_s, begin_s, {number: end_s}, cause))
        self._end(number, end_s, activity, self._replies.alone(number, request, span), later_s=later_s)

    def _note(self, activity: Activity) -> int:
        self.activities.append(activity)
        return len(self.activities) - 1

    def _end(self, number: int, end_s: float, activity: int, reply: Reply, *, later_s: float = 0.0) -> None:
        rank = self._ranks[number]
        rank.state.finish(now_s=end_s)
        rank.free_s, rank.activity, rank.is_waiting = end_s, activity, False
        self._answers.append(Answer(end_s + later_s + self._durations.latency(number), activity, reply))

    # ------------------------------------------------------------ parts

    def _open(self, kind: PartKind, requests: dict[int, PartRequest]) -> _Part:
        """Return a part whose requests are on their way."""
        call = self._calls[next(iter(requests.values())).call]
        if kind is PartKind.CALL:
            if call.name not in self._groups:
                self._groups[call.name] = {rank: group for group in self._durations.meets(call) for rank in group}
            return _Part(call, requests, self._groups[call.name])
        hooks = {PartKind.BEFORE: call.hooks.before, PartKind.AFTER: call.hooks.after}.get(kind, ())
        meets = kind is PartKind.ROWS or any(isinstance(hook, Realloc) for hook in hooks)
        everyone = tuple(requests)
        return _Part(call, requests, {rank: everyone if meets else (rank,) for rank in everyone})

    def _enter(self, number: int, request: PartRequest, begin_s: float, cause: int) -> tuple[int, ...]:
        """Let a rank come to its part; return the ranks that are free then, if its group is complete with it."""
        kind = PartKind.of(request)
        part = self._parts[request.dispatch_id, kind]
        if part.seconds is None:
            part.seconds = self._seconds_of(part, kind)
        pulled_s = ready_s = begin_s + part.pull_s.get(number, 0.0)
        for role in _used_roles(part.call, kind, number):
            present_s = self._bring_back(number, role, begin_s)
            ready_s = max(ready_s, present_s) if kind is not PartKind.AHEAD or part.call.hooks.before else ready_s
        part.entered[number] = _Entry(begin_s, pulled_s, ready_s, cause)
        group = part.group_of[number]
        part.n_entered[group] += 1
        if part.n_entered[group] < len(group):
            return ()
        self._meet(part, kind, group)
        return group

    def _bring_back(self, number: int, role: str, now_s: float) -> float:
        """Let parameters that are in host memory set out for the device; return when they are there."""
        rank = self._ranks[number]
        if role in rank.offloaded:
            rank.offloaded.discard(role)
            rank.back_s[role] = now_s + self._durations.onload(role, (number,))[number]
        return rank.back_s.get(role, now_s)

    def _seconds_of(self, part: _Part, kind: PartKind) -> Mapping[int, float]:
        """Return rank -> seconds of a part, and note those of the pulls before a call."""
        call, d, prefix = part.call, self._durations, self._samples.prefixes[part.call.name]
        if kind is PartKind.CALL:
            calls = {rank: request for rank, request in part.requests.items() if isinstance(request, RunCall)}
            ids = dict.fromkeys(chain.from_iterable(chain.from_iterable({r.minibatches for r in calls.values()})))
            sizes = self._samples.sizes_of(prefix, sorted(ids))
            if any(request.transfers or request.spreads for request in calls.values()):
                part.pull_s = d.rows(calls, sizes)
            return d.call(call, calls, sizes)
        if kind is PartKind.ROWS:
            moves = {rank: request for rank, request in part.requests.items() if isinstance(request, MoveRows)}
            moved = {i for request in moves.values() for transfer in request.receives for i in transfer.ids}
            return d.rows(moves, self._samples.sizes_of(prefix, sorted(moved)))
        return d.hooks(call, _WHEN[kind], part.requests.keys())

    def _meet(self, part: _Part, kind: PartKind, group: tuple[int, ...]) -> None:
        """Let a complete group work, and each of its ranks reply."""
        assert part.seconds is not None
        some, entries = part.requests[group[0]], {rank: part.entered[rank] for rank in group}
        last = max(entries.values(), key=lambda entry: entry.ready_s)
        seconds, set_out_s = part.seconds, None
        ends = {rank: last.ready_s + seconds[rank] for rank in group}
        if kind is PartKind.AHEAD and part.call.hooks.before:
            self._set_out.setdefault(some.dispatch_id, []).extend(ends.values())
        elif kind is PartKind.BEFORE and some.dispatch_id in self._set_out:
            set_out_s = max(self._set_out.pop(some.dispatch_id))
            ends = {rank: max(last.ready_s, set_out_s + seconds[rank]) for rank in group}
        begins = {rank: entry.begin_s for rank, entry in entries.items()}
        what = (part.call.name, kind.value, begins, last.ready_s, last.begin_s, ends, last.cause)
        activity = self._note(Activity(*what))
        for number, (begin_s, pulled_s, ready_s, _) in entries.items():
            rank, request = self._ranks[number], part.requests[number]
            if kind is PartKind.AFTER:
                rank.offloaded |= {
                    h.role for h in part.call.hooks.after if isinstance(h, Offload) and number in h.ranks
                }
            idle_s = begin_s if rank.activity == NO_CAUSE else rank.free_s
            times = Times(idle_s, begin_s, pulled_s, ready_s, ends[number], set_out_s)
            self._end(number, ends[number], activity, self._replies.of_part(number, request, part.call, times))
        part.n_left -= len(group)
        if not part.n_left:
            del self._parts[some.dispatch_id, kind]


def _used_roles(call: ScheduledCall, kind: PartKind, rank: int) -> list[str]:
    """Return the roles whose resident parameters a rank needs for a part."""
    home = call.hooks.home
    if kind is PartKind.CALL or (kind is PartKind.AHEAD and not call.hooks.before):
        return [call.mfc.role] if home == call.allocation else []
    hooks = call.hooks.after if kind is PartKind.AFTER else call.hooks.before
    reallocs = [hook for hook in hooks if isinstance(hook, Realloc)] if kind is not PartKind.ROWS else []
    read = [hook.source for hook in reallocs if rank in hook.source_allocation.ranks]
    return [*read, *(h.target for h in reallocs if not h.is_implied and rank in h.target_allocation.ranks)]
