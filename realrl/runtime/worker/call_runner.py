"""One call on one rank: fetch missing rows, run the interface, check and keep its output."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import torch

from realrl.algo.api import CallContext, MetricSums, MicroBatching, Model, ModelInterface, SampleNotes
from realrl.algo.checks import check_metrics, check_output, check_recorded, explain
from realrl.algo.phases import MOST_OF_A_CALL, CallPhases, Phases
from realrl.data.rows import SampleStore, decode_rows
from realrl.data.sample import SequenceSample
from realrl.engine import device as devices
from realrl.engine.fused import FusedEngines
from realrl.engine.groups import Communicator
from realrl.engine.row_exchange import exchange_rows
from realrl.errors import RunError
from realrl.experiment.evaluation import eval_generation
from realrl.experiment.loading import place_of_user_function
from realrl.experiment.models import fused_models
from realrl.experiment.run_plan import RunPlan
from realrl.graph.mfc import InterfaceType, MFCDef
from realrl.plan.samples.transfer import pulls_of
from realrl.runtime.transport.base import SampleClient
from realrl.runtime.worker.idle_ranks import without
from realrl.runtime.worker.observer import UNOBSERVED, Observer
from realrl.runtime.worker.roles import HostedRole
from realrl.sched.messages import CallDone, MoveRows, RowsMoved, RunCall, SampleMeta, Span
from realrl.sched.track.readout import TOKENS
from realrl.sched.track.scores import WEIGHT

_WAIT_WORTH_TELLING_S = 0.001

Args = dict[str, str | int | float]


@dataclass
class _Started:
    """A call whose rows and parameters are there; times are seconds since the epoch."""

    request: RunCall
    mfc: MFCDef
    is_at_home: bool
    spans: list[Span]
    bytes_received: int
    start_s: float
    pulled_s: float
    call_start_s: float


@dataclass
class _Result:
    """Records and output of a call's interface."""

    recorded: MetricSums
    notes: SampleNotes
    output: SampleMeta | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    args: Args = field(default_factory=dict)


class CallRunner:
    """Runs calls against the roles that this rank hosts.

    Args:
        roles: the roles that this rank hosts.
        store: this rank's rows.
        world: the group of all ranks.
        client: client that pulls rows from other stores; None if there is a single worker.
        peers: data-server address of every rank.
        device: device of the calls.

    Attributes:
        observer: sees every call; set before the first one.
    """

    observer: Observer = UNOBSERVED

    def __init__(
        self,
        plan: RunPlan,
        roles: Mapping[str, HostedRole],
        store: SampleStore,
        *,
        world: Communicator,
        client: SampleClient | None,
        peers: tuple[str, ...],
        device: torch.device,
    ) -> None:
        self.rank = world.rank
        self._plan = plan
        evaluating = () if plan.evaluation is None else plan.evaluation.mfcs
        self._mfcs = {mfc.name: mfc for mfc in (*plan.mfcs, *evaluating)}
        self._trains = any(mfc.is_train for mfc in plan.mfcs)
        self._roles = roles
        self._store = store
        self._world = world
        self._client = client
        self._peers = peers
        self._device = device
        self._phases = {mfc.role: Phases(MOST_OF_A_CALL) for mfc in self._mfcs.values()}
        for role, hosted in roles.items():
            hosted.record(self._phases[role])
        self._fused: FusedEngines | None = None

    def run(self, request: RunCall) -> CallDone:
        """Execute this rank's part of the call and keep its output in the store."""
        started = self._prepare(request)
        return self._finish(started, self._compute(started))

    def run_pair(self, first: RunCall, second: RunCall) -> tuple[CallDone, CallDone]:
        """Execute this rank's part of two calls that train at the same time, each as it would alone.

        Both take from the start of the first until both are done.
        """
        one, other = self._prepare(first), self._prepare(second)
        other.call_start_s = one.call_start_s
        results = self._fused_engines().run(lambda: self._compute(one), lambda: self._compute(other))
        done = [self._finish(started, result) for started, result in zip((one, other), results, strict=True)]
        return done[0], done[1]

    def _prepare(self, request: RunCall) -> _Started:
        """Fetch rows and parameters."""
        mfc = self._mfcs[request.call]
        hosted, allocation = self._roles[mfc.role], self._plan.allocation_of(request.call)
        start_s = time.time()
        spans: list[Span] = []
        is_at_home = allocation == hosted.home
        if is_at_home:
            hosted.prefetch()
        bytes_received = self._pull(request, spans) + self._spread(request, spans)
        pulled_s = time.time()
        if is_at_home:
            hosted.wait_resident()
        elif hosted.has_weights:
            hosted.decoder(allocation).set_parameters(hosted.visiting[mfc.name])
        return _Started(request, mfc, is_at_home, spans, bytes_received, start_s, pulled_s, time.time())

    def _compute(self, started: _Started) -> _Result:
        """Run the interface on the rows of a call."""
        request, mfc = started.request, started.mfc
        minibatches = request.minibatches if self._roles[mfc.role].has_weights else (request.keeps,)
        ids = tuple(dict.fromkeys(sample_id for minibatch in minibatches for sample_id in minibatch))
        result = _Result(MetricSums(), SampleNotes())
        args: Args = {"step": request.step, "dispatch": request.dispatch_id, "role": mfc.role, "samples": len(ids)}
        with self._parameters_of(mfc, started.is_at_home):
            if ids:
                batch = self._store.get(ids, mfc.input_keys, device=self._device).remap(mfc.input_key_remap)
                context = self._context(mfc, request.step, minibatches, result.recorded)
                context = replace(context, notes=result.notes)
                result.output, result.metrics, counts = self._call(mfc, batch, request, context)
                args |= counts
        result.args = args
        return result

    def _finish(self, started: _Started, result: _Result) -> CallDone:
        """Free what was brought for a call, and describe what it did."""
        request, mfc, spans = started.request, started.mfc, started.spans
        hosted = self._roles[mfc.role]
        if hosted.has_weights and not started.is_at_home:
            hosted.decoder(self._plan.allocation_of(mfc.name)).release_parameters()
            if not request.keeps_parameters:
                hosted.send_home(mfc.name)
        devices.synchronize(self._device)
        end_s = time.time()
        waited_s, args = started.call_start_s - started.pulled_s, result.args
        if waited_s > _WAIT_WORTH_TELLING_S:
            args["waited_s"] = waited_s
        if self._plan.fusion is not None and mfc.name in self._plan.fusion:
            args["fused"] = str(self._plan.fusion)
        phases = self._phases[mfc.role].take(request.step)
        args |= {f"phase_s/{name}": round(seconds, 6) for name, seconds in phases.seconds.items()}
        spans.append(Span(mfc.name, "call", started.call_start_s, end_s, args))
        spans += _inside(phases)
        return CallDone(
            rank=self.rank,
            seq=request.seq,
            dispatch_id=request.dispatch_id,
            call=mfc.name,
            step=request.step,
            output=result.output,
            metrics={**result.metrics, f"time_s/{mfc.name}": end_s - started.start_s},
            spans=tuple(spans),
            bytes_received=started.bytes_received,
            memory_gb=devices.memory_gb(self._device),
            sums=result.recorded.sums,
            maxima=result.recorded.maxima,
            waited_s=waited_s,
            notes=self._wanted(mfc, result.notes),
        )

    def _fused_engines(self) -> FusedEngines:
        """Return the engines of the two calls that train together on this rank."""
        if self._fused is None:
            assert self._plan.fusion is not None
            mfcs = [self._mfcs[name] for name in self._plan.fusion.calls]
            engines = [self._roles[mfc.role].home_engine for mfc in mfcs]
            assert engines[0] is not None
            assert engines[1] is not None
            shapes = {mfc.role: engine.decoder.config for mfc, engine in zip(mfcs, engines, strict=True) if engine}
            self._fused = FusedEngines((engines[0], engines[1]), fused_models(self._plan, shapes))
        return self._fused

    def _wanted(self, mfc: MFCDef, notes: SampleNotes) -> dict[str, dict[str, tuple[float, ...]]]:
        """Return the notes with the prefix of the call's keys, if responses are written to a file."""
        if self._plan.config.save.n_generations == 0 or self._plan.is_evaluating(mfc.name):
            return {}
        prefix = next((key.removesuffix(TOKENS) for key in mfc.input_keys if key.endswith(TOKENS)), "")
        return {prefix + name: values for name, values in notes.values.items()}

    def move_rows(self, request: MoveRows) -> RowsMoved:
        """Send rows that others lack for a call, and receive rows that this rank lacks."""
        start_s = time.time()
        moved = (*request.sends, *request.receives)
        bytes_received = exchange_rows(moved, store=self._store, world=self._world, device=self._device)
        args = _args_of(request, (transfer.key for transfer in moved), bytes_received)
        return RowsMoved(
            rank=self.rank,
            seq=request.seq,
            dispatch_id=request.dispatch_id,
            call=request.call,
            step=request.step,
            spans=(Span(f"transfer for {request.call}", "transfer", start_s, time.time(), args),),
            bytes_received=bytes_received,
        )

    def _parameters_of(self, mfc: MFCDef, is_at_home: bool) -> AbstractContextManager[None]:
        """Gather, for the duration of a call, parameters that the backend shards between calls.

        Ranks without samples take part. A training call gathers parameters block by block itself.
        """
        engine = self._roles[mfc.role].home_engine
        return nullcontext() if mfc.is_train or not is_at_home or engine is None else engine.whole_parameters()

    def _context(
        self, mfc: MFCDef, step: int, minibatches: tuple[tuple[str, ...], ...], recorded: MetricSums
    ) -> CallContext:
        config = self._plan.config
        is_evaluating = self._plan.is_evaluating(mfc.name)
        return CallContext(
            call=mfc.name,
            step=0 if is_evaluating else step,  # every evaluation draws the same numbers
            seed=config.seed,
            micro_batching=MicroBatching(mfc.n_mbs, mfc.max_tokens_per_mb),
            minibatches=minibatches,
            n_passes=mfc.n_passes,
            generation=eval_generation(config) if is_evaluating else config.generation,
            algorithm=config.algorithm,
            metrics=recorded,
            phases=self._phases[mfc.role],
        )

    def _call(
        self, mfc: MFCDef, batch: SequenceSample, request: RunCall, context: CallContext
    ) -> tuple[SampleMeta | None, dict[str, float], dict[str, int]]:
        """Run the interface; return what this rank keeps of its output, its metrics, and counts for the trace."""
        hosted = self._roles[mfc.role]
        model = without(request.idle_ranks, hosted.models[self._plan.allocation_of(mfc.name)], mfc.name)
        interface = hosted.interfaces[mfc.name]
        run = _method(interface, mfc)
        model, batch = self.observer.begin(mfc, context, interface, model, batch)
        try:
            if mfc.interface_type is InterfaceType.TRAIN_STEP:
                hosted.set_schedule_end(request.n_steps)
                hosted.forget_visits()
                metrics = run(model, batch, context)
                check_recorded(context, mfc)
                hosted.version += 1
                self._check_replicas(hosted)
                metrics = check_metrics(context, mfc, metrics)
                self.observer.end(context, model, hosted.home_engine, metrics)
                return None, metrics, _counts(mfc, batch)
            result = check_output(context, mfc, batch, run(model, batch, context))
            if not self._trains:
                _record_responses(context.metrics, result)
            check_recorded(context, mfc)
            self.observer.end(context, model, None, result)
        except Exception as err:  # noqa: BLE001 - whatever user code raises
            error = explain(context, mfc, batch, err, place_of_user_function(run))
            error.worker = self.rank
            raise error from error.__cause__
        returned = set(result.ids)
        keeps = [sample_id for sample_id in request.keeps if sample_id in returned]  # a call may drop the others
        if not keeps:
            return None, {}, _counts(mfc, batch, result)
        kept = result.select(keeps)
        self._store.put(kept)
        return kept.describe(), {}, _counts(mfc, batch, result)

    def _check_replicas(self, hosted: HostedRole) -> None:
        """Compare the replicas of a role after a train_step, if that is due."""
        every, engine = self._plan.config.cluster.check_replicas_every_steps, hosted.home_engine
        if engine is not None and every and hosted.version % every == 0:
            engine.check_replicas(self.rank)

    def _pull(self, request: RunCall, spans: list[Span]) -> int:
        """Fetch the planned rows that this rank lacks. Returns the bytes received.

        Rows that a relay passes on come last: then this rank has what it must pass on itself.
        """
        strays = {transfer.target for transfer in request.transfers} - {self.rank}
        if strays:
            raise RunError(f"worker {self.rank} received a transfer meant for worker {min(strays)}")
        n_bytes = 0
        for (is_passed_on, source), pulls in groupby(pulls_of(request.transfers), lambda pull: pull[:2]):
            if self._client is None:
                raise RunError(f"call '{request.call}' needs rows of worker {source}, but this run has one worker")
            start_s, received, keys = time.time(), 0, list[str]()
            for pull in pulls:
                payload = self._client.pull(self._peers[source], pull.keys, pull.ids, waits=is_passed_on)
                received += len(payload)
                keys += pull.keys
                self._store.put(decode_rows(payload).to(self._device))
            args: Args = {"from": source, **_args_of(request, keys, received)}
            spans.append(Span(f"transfer for {request.call}", "transfer", start_s, time.time(), args))
            n_bytes += received
        return n_bytes

    def _spread(self, request: RunCall, spans: list[Span]) -> int:
        """Pass rows on inside the replica. Returns the bytes received."""
        if not request.spreads:
            return 0
        start_s = time.time()
        received = exchange_rows(request.spreads, store=self._store, world=self._world, device=self._device)
        args = _args_of(request, (transfer.key for transfer in request.spreads), received)
        spans.append(Span(f"spread for {request.call}", "transfer", start_s, time.time(), args))
        return received


def _method(interface: ModelInterface, mfc: MFCDef) -> Callable[[Model, SequenceSample, CallContext], Any]:
    """Return the method that serves a call."""
    if mfc.interface_type is InterfaceType.TRAIN_STEP:
        return interface.train_step
    if WEIGHT in mfc.output_keys:
        return interface.evaluate
    return interface.generate if mfc.interface_type is InterfaceType.GENERATE else interface.inference


def _args_of(request: RunCall | MoveRows, keys: Iterable[str], n_bytes: int) -> Args:
    """Return the trace's arguments of rows that moved."""
    names = ", ".join(sorted(set(keys)))
    return {"keys": names, "bytes": n_bytes, "step": request.step, "dispatch": request.dispatch_id}


def _inside(phases: CallPhases) -> Iterator[Span]:
    """Yield spans of a call's phases, and of the processes that served it."""
    for phase in phases.phases:
        args: Args = {"tokens": phase.n_tokens} if phase.n_tokens else {}
        yield Span(phase.name, "phase", phase.begin_s, phase.end_s, args)
    for work in phases.work:
        args = {"process": work.process, "responses": work.count}
        yield Span(work.name, "reward", work.begin_s, work.end_s, args)


def _counts(mfc: MFCDef, batch: SequenceSample, result: SequenceSample | None = None) -> dict[str, int]:
    """Return tokens of all sequences that a call worked on; of a generation also its responses and their tokens."""
    generates = mfc.interface_type is InterfaceType.GENERATE
    source = result if generates and result is not None else batch
    key = next((key for key in source.seqlens if key.endswith("input_ids")), None)
    if key is None:
        return {}
    lengths = source.seqlens[key]
    counts = {"tokens": sum(map(sum, lengths))}
    if generates and "prompt_ids" in batch.seqlens:
        prompts = dict(zip(batch.ids, batch.seqlens["prompt_ids"], strict=True))
        n_prompt = sum(len(own) * sum(prompts[i]) for i, own in zip(source.ids, lengths, strict=True))
        counts |= {"responses": sum(map(len, lengths)), "new_tokens": counts["tokens"] - n_prompt}
    return counts


def _record_responses(metrics: MetricSums, result: SequenceSample) -> None:
    """Add means of rewards, lengths and truncated responses, for runs without a train_step that reports them."""
    if "rewards" in result:
        metrics.add_values("reward", result["rewards"].double().tolist())
    if "prompt_mask" in result:
        n_responses = sum(len(sequences) for sequences in result.seqlens["prompt_mask"])
        metrics.add("response_length/mean", float((~result["prompt_mask"]).sum()), n_responses)
    if "truncated" in result:
        metrics.add("truncated/mean", float(result["truncated"].sum()), len(result["truncated"]))
