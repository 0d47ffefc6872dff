"""One batch of one call on its way: rows and parameters come to its mesh, it runs, and hooks follow.

A part of a dispatch is work that several ranks do together: each of them gets one request for it, and all get it at the
same position of the global order of parts.

    AHEAD ─► ROWS ─► BEFORE ─► CALL ─► AFTER        only the parts that the dispatch needs

Two calls that train together have a dispatch each. Their parts are sent at once: what comes before the calls, then CALL
and CALL with nothing between them, then what follows.

AHEAD is sent before the dispatch exists, while its samples are still being made (see `visits`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from itertools import chain

import msgspec

from realrl.plan.minibatches import share_minibatches
from realrl.plan.protocols import divide
from realrl.plan.samples.placements import Placement
from realrl.plan.samples.spread import plan_spreads
from realrl.plan.samples.transfer import Arrival, RowTransfer, Share, plan_transfers
from realrl.sched.calls import ScheduledCall
from realrl.sched.messages import CallDone, MoveRows, RunCall, RunHooks
from realrl.sched.samples.in_flight import CallRecord
from realrl.sched.story import ranks_text

PartRequest = MoveRows | RunHooks | RunCall


class PartKind(Enum):
    """Kind of work that ranks do together; the comments name its requests."""

    AHEAD = "ahead of"  # RunHooks
    ROWS = "rows"  # MoveRows
    BEFORE = "before"  # RunHooks
    CALL = "call"  # RunCall
    AFTER = "after"  # RunHooks

    __hash__ = object.__hash__  # enum's own is written in Python, and parts are looked up with every reply

    @classmethod
    def of(cls, request: PartRequest) -> PartKind:
        """Return the kind of part that a request belongs to."""
        if isinstance(request, MoveRows):
            return cls.ROWS
        return cls.CALL if isinstance(request, RunCall) else cls(request.when)


@dataclass
class Part:
    """A part that was sent.

    Attributes:
        position: place in the global order of parts; every rank executes its requests in this order.
        pending: ranks that have not answered.
        waited_s: rank -> seconds that it was busy with parameters, for hooks.
    """

    position: int
    pending: set[int]
    waited_s: dict[int, float] = field(default_factory=dict)


class RankWork(msgspec.Struct, frozen=True, gc=False):
    """One rank's share of a call.

    Attributes:
        transfers: rows that it fetches.
        spreads: rows that it then passes on to its replica, or gets from there.
    """

    minibatches: tuple[tuple[str, ...], ...]
    transfers: tuple[RowTransfer, ...]
    keeps: tuple[str, ...]
    spreads: tuple[RowTransfer, ...] = ()


@dataclass
class Dispatch:
    """A batch of a call.

    Attributes:
        step: step, counted from 1.
        ids: samples of the batch, oldest first.
        known: samples of the batch that the call was done with before the run was resumed.
        work: rank of the mesh -> its share; in mesh order.
        arrivals: changes of placements by the fetching of rows.
        moves_rows: rows move by collectives, in a part of their own, and are not pulled by the ranks of the mesh.
        parts: parts that were sent.
        replies: rank that is done with the call -> its reply.
        version: version of the parameters that the call reads, in train_step calls; None until that is decided.
        has_parameters: the parameters of the batch before are still there, so that no hook must bring them.
        keeps_parameters: they stay for the next batch.
    """

    id: int
    call: ScheduledCall
    step: int
    ids: tuple[str, ...]
    work: Mapping[int, RankWork]
    arrivals: tuple[Arrival, ...]
    moves_rows: bool = False
    known: tuple[str, ...] = ()
    parts: dict[PartKind, Part] = field(default_factory=dict)
    replies: dict[int, CallDone] = field(default_factory=dict)
    version: int | None = None
    has_parameters: bool = False
    keeps_parameters: bool = False

    @cached_property
    def recording_ranks(self) -> tuple[int, ...]:
        """Ranks whose recorded sums count, ascending: one for each set of samples, or all without parameters."""
        if self.call.hooks.home is None:  # each works on the samples that it keeps, and on no others
            return tuple(sorted(self.work))
        return tuple(sorted({work.minibatches: rank for rank, work in self.work.items()}.values()))

    @property
    def pending(self) -> set[int]:
        """Ranks that have not answered some request."""
        return set[int]().union(*(part.pending for part in self.parts.values()))

    @property
    def first_parts(self) -> tuple[PartKind, ...]:
        """Parts that go out when the call is dispatched, in this order.

        They include the hooks after the call if only the mesh takes part: no other rank then waits for the call.
        """
        kinds = [PartKind.ROWS] if self.moves_rows and any(work.transfers for work in self.work.values()) else []
        kinds += [PartKind.BEFORE] if self.call.hooks.before and not self.has_parameters else []
        kinds.append(PartKind.CALL)
        has_local_end = self.call.hooks.after and set(self.call.hooks.after_ranks) <= set(self.call.ranks)
        return (*kinds, PartKind.AFTER) if has_local_end else tuple(kinds)

    @property
    def last_parts(self) -> tuple[PartKind, ...]:
        """Parts that go out when the whole mesh is done."""
        return (PartKind.AFTER,) if self.call.hooks.after and PartKind.AFTER not in self.first_parts else ()

    def explain(self) -> str:
        """Return a description of the part under way, with its step and ranks."""
        doing = {
            PartKind.AHEAD: "in the hooks ahead of",
            PartKind.ROWS: "moving rows for",
            PartKind.BEFORE: "in the hooks before",
            PartKind.CALL: "running",
            PartKind.AFTER: "in the hooks after",
        }
        kind, part = next((kind, part) for kind, part in self.parts.items() if part.pending)
        return f"{doing[kind]} step {self.step} on ranks {ranks_text(part.pending)}"

    def record(self) -> CallRecord:
        """Return the record of the call, once all ranks of the mesh are done.

        Returned metrics are equal on all ranks; sums count once for each set of samples.
        """
        replies = self.replies
        maxima: dict[str, float] = {}
        for reply in replies.values():
            for name, value in reply.maxima.items() if reply.maxima else ():
                maxima[name] = max(value, maxima.get(name, value))
        return CallRecord(
            call=self.call.name,
            step=self.step,
            ids=self.ids,
            version=self.version,
            seconds=max(map(_seconds, replies.values())),
            metrics=replies[self.call.ranks[0]].metrics if self.call.reports_metrics else {},
            sums=tuple([replies[rank].sums for rank in self.recording_ranks if replies[rank].sums]),
            maxima=maxima,
            memory_gb={rank: reply.memory_gb for rank, reply in replies.items() if reply.memory_gb > 0},
            bytes_received=sum([reply.bytes_received for reply in replies.values()]),
            realloc_wait_s=self._longest_wait_s(),
        )

    def _longest_wait_s(self) -> float:
        """Seconds that some rank of the mesh waited for parameters, those included that their setting out took."""
        waits_s = [self.parts[kind].waited_s for kind in (PartKind.AHEAD, PartKind.BEFORE) if kind in self.parts]
        if not any(waits_s):
            return max([reply.waited_s for reply in self.replies.values()])
        return max([reply.waited_s + sum([s.get(rank, 0.0) for s in waits_s]) for rank, reply in self.replies.items()])

    def requests(self, kind: PartKind, next_seq: Callable[[int], int], n_steps: int) -> dict[int, PartRequest]:
        """Return rank -> its request for one part."""
        name, step = self.call.name, self.step
        if kind is PartKind.CALL:
            idle_ranks = tuple(rank for rank, work in self.work.items() if not any(work.minibatches))
            return {
                rank: RunCall(
                    seq=next_seq(rank),
                    dispatch_id=self.id,
                    call=name,
                    step=step,
                    minibatches=work.minibatches,
                    transfers=() if self.moves_rows else work.transfers,
                    n_steps=n_steps,
                    keeps=work.keeps,
                    spreads=work.spreads,
                    keeps_parameters=self.keeps_parameters,
                    joins=self.call.joins,
                    idle_ranks=idle_ranks,
                )
                for rank, work in self.work.items()
            }
        if kind is PartKind.ROWS:
            receives = {rank: work.transfers for rank, work in self.work.items() if work.transfers}
            sends: dict[int, list[RowTransfer]] = {}
            for transfers in receives.values():
                for transfer in transfers:
                    sends.setdefault(transfer.source, []).append(transfer)
            return {
                rank: MoveRows(next_seq(rank), self.id, name, step, tuple(sends.get(rank, ())), receives.get(rank, ()))
                for rank in sorted({*sends, *receives})
            }
        if kind is PartKind.BEFORE:
            return {r: RunHooks(next_seq(r), self.id, name, step, "before") for r in self.call.hooks.before_ranks}
        return {r: RunHooks(next_seq(r), self.id, name, step, "after") for r in self.call.hooks.after_ranks}


def units(dispatches: Sequence[Dispatch]) -> Iterator[list[Dispatch]]:
    """Yield dispatches that start at the same moment one by one, those of a pair together."""
    unit: list[Dispatch] = []
    for dispatch in dispatches:
        unit.append(dispatch)
        if dispatch.call.joins != "opens":
            yield unit
            unit = []


def _seconds(reply: CallDone) -> float:
    return sum([span.end_s - span.start_s for span in reply.spans if span.kind == "call"])


def plan_work(
    call: ScheduledCall,
    ids: Sequence[str],
    token_counts: Sequence[int],
    placements: Mapping[str, Mapping[str, Placement]],
    node_of: Callable[[int], int],
    *,
    key: tuple[int, int, int],
) -> tuple[dict[int, RankWork], tuple[Arrival, ...]]:
    """Divide a batch over the ranks of a call's mesh by its protocol, and plan the rows that each must fetch.

    Args:
        ids: samples, oldest first.
        token_counts: tokens of each sample.
        placements: key -> sample id -> placement, for the call's input keys.
        node_of: global rank -> node.
        key: seed of the run, step, and number of the batch in the step; they decide the minibatches of a train_step.

    Returns:
        Rank -> its work, in mesh order; and the changes of placements by the fetching.
    """
    minibatches_of: Mapping[tuple[int, ...], tuple[tuple[str, ...], ...]]
    kept: Mapping[int, tuple[str, ...]] = {}
    if call.mfc.is_train:
        seed, step, batch = key
        minibatches_of = share_minibatches(call.mfc, ids, token_counts, call.layout, seed=seed, step=step, batch=batch)
    else:
        divided, kept = divide(call.mfc.protocol, list(ids), list(token_counts), call.layout, call=call.name)
        minibatches_of = {share.ranks: (share.ids,) for share in divided}
    shares = [
        Share(
            ranks, tuple(dict.fromkeys(minibatches[0] if len(minibatches) == 1 else chain.from_iterable(minibatches)))
        )
        for ranks, minibatches in minibatches_of.items()
    ]
    routes, arrivals = plan_transfers(shares, placements, node_of=node_of)
    pulls, spreads = plan_spreads(shares, routes, placements, node_of=node_of)
    transfers_of = dict[int, list[RowTransfer]]()
    for route in pulls:
        transfers_of.setdefault(route.target, []).append(route)
    spreads_of = dict[int, list[RowTransfer]]()
    for route in spreads:
        spreads_of.setdefault(route.source, []).append(route)
        spreads_of.setdefault(route.target, []).append(route)
    minibatches_on = {rank: minibatches for ranks, minibatches in minibatches_of.items() for rank in ranks}
    work = {
        rank: RankWork(
            minibatches_on[rank],
            tuple(transfers_of.get(rank, ())),
            kept.get(rank, ()),
            tuple(spreads_of.get(rank, ())),
        )
        for rank in call.ranks
    }
    return work, arrivals
