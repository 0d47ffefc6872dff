"""Replies of simulated workers: what real ones would tell of the same request, with the times of the simulation.

Numbers that only data can give are missing: metrics of interfaces, memory. What is read of samples is zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from realrl.config.schema import RunConfig
from realrl.plan.hooks import Offload
from realrl.plan.samples.transfer import RowTransfer
from realrl.sched.calls import ScheduledCall
from realrl.sched.master.master_plan import MasterPlan
from realrl.sched.messages import (
    CallDone,
    CheckpointSaved,
    FreeSamples,
    Goodbye,
    HooksDone,
    Initialize,
    LoadSamples,
    MoveRows,
    ReadSamples,
    Ready,
    Reply,
    Request,
    RowsMoved,
    RunCall,
    RunHooks,
    SampleMeta,
    SamplesFreed,
    SamplesLoaded,
    SamplesRead,
    SaveCheckpoint,
    Span,
)
from realrl.sched.track.dispatch import PartRequest
from realrl.sim.durations import Durations
from realrl.sim.samples import Samples, tracks_of

_KEPT_LOADS = 4096
_WAIT_WORTH_TRACING_S = 0.001

Args = dict[str, str | int | float]


class Times(NamedTuple):
    """Times of one request on one rank.

    Attributes:
        idle_s: end of the request before it.
        begin_s: begin of this one.
        pulled_s: the rows that a call lacked are there.
        ready_s: parameters are there, too, and the others may come.
        end_s: end of this one.
        set_out_s: time at which the parameters that it waits for set out; None: they did not before it.
    """

    idle_s: float
    begin_s: float
    pulled_s: float
    ready_s: float
    end_s: float
    set_out_s: float | None = None


def row_ids(config: RunConfig, n_rows: int) -> tuple[str, ...]:
    """Return the ids of so many rows of a simulated dataset, as many of each of its files."""
    files = sorted(config.dataset.files) or [""]
    return tuple([f"{files[i * len(files) // n_rows]}/row{i}".removeprefix("/") for i in range(n_rows)])


class Replies:
    """Makes replies.

    Args:
        samples: lengths.
        n_rows: usable rows of the dataset.
    """

    def __init__(self, plan: MasterPlan, durations: Durations, samples: Samples, *, n_rows: int) -> None:
        self._plan = plan
        self._durations = durations
        self._samples = samples
        self._n_rows = n_rows
        tracks = tracks_of(plan)
        self._keys = {track.is_held_out: track.dataset_keys for track in tracks}
        calls = {call.name: call for track in tracks for call in track.calls}
        self._restored: dict[str, tuple[str, ...]] = {}  # sample -> keys that a checkpoint holds
        for record in plan.main.in_flight.calls:
            for sample_id in record.ids:
                keys = calls[record.call].mfc.output_keys if record.call in calls else ()
                self._restored[sample_id] = (*self._restored.get(sample_id, ()), *keys)
        self._loads: dict[str, dict[tuple[tuple[str, ...], ...], Args]] = {}  # call -> minibatches -> their counts

    def alone(self, rank: int, request: Request, span: Span) -> Reply:
        """Return the answer to a request that one rank executes alone."""
        spans = (span,)
        match request:
            case Initialize(seq=seq):
                is_dataset = rank == self._plan.main.dataset_rank
                rows = row_ids(self._plan.main.config, self._n_rows) if is_dataset else ()
                n_held_out = (self._plan.main.config.eval.n_seqs or self._n_rows) if is_dataset else 0
                return Ready(rank, seq, rows, 0, (), spans, tuple(map(str, range(n_held_out))))
            case LoadSamples(seq=seq, ids=ids, is_held_out=is_held_out):
                restored = tuple(self._samples.describe([i], self._restored[i]) for i in ids if i in self._restored)
                return SamplesLoaded(rank, seq, self._samples.describe(ids, self._keys[is_held_out]), spans, restored)
            case ReadSamples():
                return SamplesRead(rank, request.seq, request.step, self._columns(request), spans)
            case FreeSamples(seq=seq, ids=ids):
                if rank == self._plan.main.dataset_rank:  # it holds something of every sample
                    self._samples.forget(ids)
                return SamplesFreed(rank, seq)
            case SaveCheckpoint(seq=seq, step=step):
                return CheckpointSaved(rank, seq, step, spans)
            case _:
                return Goodbye(rank, request.seq)

    def of_part(self, rank: int, request: PartRequest, call: ScheduledCall, times: Times) -> Reply:
        """Return the answer to a request of a part."""
        args: Args = {"step": request.step, "dispatch": request.dispatch_id}
        common = (rank, request.seq, request.dispatch_id, request.call, request.step)
        spans: tuple[Span, ...] = ()
        if times.begin_s - times.idle_s >= _WAIT_WORTH_TRACING_S:
            spans = (Span("wait", "wait", times.idle_s, times.begin_s),)
        if isinstance(request, RunCall):
            return self._call_done(rank, request, call, times, spans)
        if isinstance(request, MoveRows):
            n_bytes = self._samples.bytes_of(request.receives)
            args |= _rows_args((*request.sends, *request.receives), n_bytes)
            spans += (Span(f"transfer for {call.name}", "transfer", times.begin_s, times.end_s, args),)
            return RowsMoved(*common, spans, n_bytes)
        n_bytes = 0
        if request.when != "ahead of":
            n_bytes = self._durations.received_bytes(call, request.when, rank)
            spans += _hook_spans(
                rank, request, call, times, args | {"for": call.name, "when": request.when, "bytes": n_bytes}
            )
        waited_s = times.end_s - times.begin_s if request.when != "after" else 0.0
        return HooksDone(*common, request.when, spans, n_bytes, waited_s=waited_s)

    def _call_done(
        self, rank: int, request: RunCall, call: ScheduledCall, times: Times, spans: tuple[Span, ...]
    ) -> CallDone:
        received = [*request.transfers, *[t for t in request.spreads if t.target == rank]]
        n_bytes = self._samples.bytes_of(received)
        args: Args = {"step": request.step, "dispatch": request.dispatch_id}
        if times.pulled_s > times.begin_s:
            told = args | _rows_args((*request.transfers, *request.spreads), n_bytes)
            what = "transfer" if request.transfers else "spread"
            spans += (Span(f"{what} for {call.name}", "transfer", times.begin_s, times.pulled_s, told),)
        args |= {"role": call.mfc.role, **self._load_of(request, call)}
        if times.ready_s > times.pulled_s:
            args["waited_s"] = times.ready_s - times.pulled_s
        spans += (Span(call.name, "call", times.ready_s, times.end_s, args),)
        output: SampleMeta | None = None
        if kept := self._samples.kept(call, request.keeps):
            output = self._samples.describe(kept, call.mfc.output_keys)
        return CallDone(
            rank=rank,
            seq=request.seq,
            dispatch_id=request.dispatch_id,
            call=call.name,
            step=request.step,
            output=output,
            metrics={},
            spans=spans,
            bytes_received=n_bytes,
            waited_s=times.ready_s - times.pulled_s,
        )

    def _load_of(self, request: RunCall, call: ScheduledCall) -> Args:
        """Return samples and tokens of a rank's share of a call; with responses and their tokens where it generates."""
        loads = self._loads.setdefault(call.name, {})
        minibatches = request.minibatches if call.hooks.home is not None else (request.keeps,)
        if minibatches not in loads:
            if len(loads) > _KEPT_LOADS:
                loads.clear()
            ids = dict.fromkeys(chain.from_iterable(minibatches))
            sizes = self._samples.sizes_of(self._samples.prefixes[call.name], ids).values()
            loads[minibatches] = {"samples": len(ids), "tokens": sum([sum(s.tokens) for s in sizes])}
            if call.is_generate:
                loads[minibatches]["responses"] = sum(len(s.response_tokens) for s in sizes)
                loads[minibatches]["new_tokens"] = sum(sum(s.response_tokens) for s in sizes)
        return loads[minibatches]

    def _columns(self, request: ReadSamples) -> dict[str, dict[str, tuple[float | bool | str, ...]]]:
        """Return the columns of `SamplesRead`: numbers are 0, texts empty, lengths those drawn."""
        columns: dict[str, dict[str, tuple[float | bool | str, ...]]] = {}
        for key, ids in request.keys.items():
            lengths = self._samples.describe(ids, (key,)).seqlens[key]
            columns[key] = {i: (0.0,) * len(rows) for i, rows in zip(ids, lengths)}
        for prefix, ids in request.texts.items():
            sizes = self._samples.sizes_of(prefix, ids)
            columns[f"{prefix}prompt_tokens"] = {i: s.prompt_tokens for i, s in sizes.items()}
            columns[f"{prefix}response_tokens"] = {i: s.response_tokens for i, s in sizes.items()}
            for text in ("prompt", "response"):
                columns[prefix + text] = {i: ("",) * len(s.prompt_tokens) for i, s in sizes.items()}
        return columns


def _rows_args(moved: Sequence[RowTransfer], n_bytes: int) -> Args:
    return {"keys": ", ".join(sorted({t.key for t in moved})), "bytes": n_bytes}


def _hook_spans(rank: int, request: RunHooks, call: ScheduledCall, times: Times, args: Args) -> tuple[Span, ...]:
    """Return one span for all hooks of a part on one rank, and one for the journey that they end."""
    hooks = [h for h in (call.hooks.before if request.when == "before" else call.hooks.after) if rank in h.ranks]
    names, is_realloc = [], False
    for hook in hooks:
        if isinstance(hook, Offload):
            names.append(f"offload {hook.role}")
            continue
        is_realloc = True
        names.append(f"{hook.source} to {hook.target if not hook.is_implied else call.name}")
    span = Span(", ".join(names), "realloc" if is_realloc else "offload", times.begin_s, times.end_s, args)
    if times.set_out_s is None:
        return (span,)
    return span, Span(span.name, "travel", times.set_out_s, times.end_s, args)
