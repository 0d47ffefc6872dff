"""The ModelWorker: one device, shards of many roles, requests executed in order.

    request ──► handle ──► Initialize      groups, roles, dataset
                           LoadSamples     dataset rows -> store
                           MoveRows        store -> other stores, by collectives
                           RunHooks        parameters between layouts and roles, or to host memory
                           RunCall         pull missing rows -> interface -> store
                           ReadSamples     store -> text and numbers
                           FreeSamples     store
                           SaveCheckpoint  roles, rows -> host memory -> files, by a thread of its own
                           Shutdown        leave the groups

It owns no socket: a worker loop feeds it requests and reports their exceptions, and a sample server may read its store
from another thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import torch

from realrl.data.datasets import Dataset, load_dataset
from realrl.data.rows import SampleStore, encode_rows
from realrl.data.tokenizer import load_tokenizer
from realrl.engine import device as devices
from realrl.engine.groups import Groups, GroupSettings
from realrl.errors import RunError
from realrl.experiment.backends import needs_library_groups
from realrl.experiment.discovery import load_run
from realrl.experiment.evaluation import held_out_data
from realrl.experiment.models import notes_of_models, role_configs
from realrl.experiment.planning import plan_run
from realrl.experiment.run_plan import RunPlan
from realrl.plan.groups import GroupKind
from realrl.runtime.checkpoints.roles import restore_roles
from realrl.runtime.checkpoints.samples import RestoredSamples
from realrl.runtime.checkpoints.store import load_manifest
from realrl.runtime.checkpoints.writer import CheckpointWriter
from realrl.runtime.transport.base import SampleClient
from realrl.runtime.worker.call_runner import CallRunner
from realrl.runtime.worker.hook_runner import HookRunner
from realrl.runtime.worker.observer import UNOBSERVED, Observer
from realrl.runtime.worker.reallocs import Reallocs
from realrl.runtime.worker.roles import HostedRole, build_roles, role_tokenizer
from realrl.runtime.worker.sample_text import read_samples
from realrl.sched.key_value import KeyValueClient
from realrl.sched.messages import (
    FreeSamples,
    Goodbye,
    Initialize,
    LoadSamples,
    MoveRows,
    ReadSamples,
    Ready,
    Reply,
    Request,
    RunCall,
    RunHooks,
    SampleMeta,
    SamplesFreed,
    SamplesLoaded,
    SamplesRead,
    SaveCheckpoint,
    Shutdown,
    Span,
)

_WAIT_WORTH_TRACING_S = 0.001

_log = logging.getLogger(__name__)


class ModelWorker:
    """Executes requests on one device.

    Args:
        rank: global rank.
        client: client that pulls rows from other workers' stores; None if there is a single worker.
        meeting: key-value store through which the workers' process groups are made; None if there is a single worker.
        observer: sees every call.
    """

    def __init__(
        self,
        rank: int,
        client: SampleClient | None = None,
        *,
        meeting: KeyValueClient | None = None,
        observer: Observer = UNOBSERVED,
    ) -> None:
        self.rank = rank
        self._observer = observer
        self.store = SampleStore()
        self._client = client
        self._meeting = meeting
        self._plan: RunPlan | None = None
        self._groups: Groups | None = None
        self._roles: dict[str, HostedRole] = {}
        self._dataset: Dataset | None = None
        self._held_out: Dataset | None = None
        self._runner: CallRunner | None = None
        self._hooks: HookRunner | None = None
        self._writer: CheckpointWriter | None = None
        self._restored: RestoredSamples | None = None
        self._idle_since_s: float | None = None
        self._opening: RunCall | None = None

    def fetch(self, keys: Sequence[str], ids: Sequence[str]) -> bytes:
        """Encode rows for another worker; called from the server's thread."""
        devices.use_one_thread()
        return encode_rows(self.store.get(ids, keys))

    def handle(self, request: Request) -> list[Reply | Future[Reply]]:
        """Execute one request and return its reply, or a future for a checkpoint; exceptions pass through.

        A call that opens a pair is answered with the one that closes it.
        """
        start_s = time.time()
        if isinstance(request, RunCall) and request.joins == "opens":
            self._opening = request
            return []
        replies = self._run_pair(request, start_s) if self._opening else [self._execute(request, start_s)]
        self._idle_since_s = time.time()
        return replies

    def _run_pair(self, request: Request, start_s: float) -> list[Reply | Future[Reply]]:
        """Run the call that waits, and the one that closes its pair, together."""
        opening, self._opening = self._opening, None
        assert opening is not None
        assert self._runner is not None
        if not isinstance(request, RunCall) or request.joins != "closes":
            raise RunError(
                f"worker {self.rank} received {type(request).__name__} before the call that trains with "
                f"'{opening.call}'",
                worker=self.rank,
            )
        wait = self._wait_span(start_s)
        first, second = self._runner.run_pair(opening, request)
        return [msgspec.structs.replace(first, spans=wait + first.spans), second]

    def _execute(self, request: Request, start_s: float) -> Reply | Future[Reply]:
        if isinstance(request, Initialize):
            return self._initialize(request, start_s)
        if isinstance(request, Shutdown):
            return self._shutdown(request)
        if self._writer is None or self._runner is None or self._hooks is None:
            raise RunError(f"worker {self.rank} received {type(request).__name__} before Initialize", worker=self.rank)
        if isinstance(request, RunCall):
            wait = self._wait_span(start_s)
            done = self._runner.run(request)
            return msgspec.structs.replace(done, spans=wait + done.spans)
        if isinstance(request, RunHooks):
            wait = self._wait_span(start_s)
            hooks_done = self._hooks.run(request)
            return msgspec.structs.replace(hooks_done, spans=wait + hooks_done.spans)
        if isinstance(request, MoveRows):
            wait = self._wait_span(start_s)
            moved = self._runner.move_rows(request)
            return msgspec.structs.replace(moved, spans=wait + moved.spans)
        if isinstance(request, LoadSamples):
            wait = self._wait_span(start_s)
            meta, restored = self._load(request)
            spans = (
                *wait,
                Span("dataset", "load", start_s, time.time(), {"samples": len(request.ids)}),
            )
            return SamplesLoaded(self.rank, request.seq, meta, spans, restored)
        if isinstance(request, ReadSamples):
            wait = self._wait_span(start_s)
            columns, rows = read_samples(self.store, request, self._tokenizer)
            n_samples = len({i for ids in (*request.texts.values(), *request.keys.values()) for i in ids})
            spans = (
                *wait,
                Span("read", "read", start_s, time.time(), {"step": request.step, "samples": n_samples}),
            )
            return SamplesRead(self.rank, request.seq, request.step, columns, spans, rows)
        if isinstance(request, FreeSamples):
            self.store.free(request.ids)
            return SamplesFreed(self.rank, request.seq)
        if isinstance(request, SaveCheckpoint):
            return self._writer.save(request)
        raise TypeError(f"unknown request {type(request).__name__}")

    def _initialize(self, request: Initialize, start_s: float) -> Ready:
        experiment, config = load_run(request.run)
        plan = plan_run(config, experiment)
        device = devices.resolve_device(config.cluster.device)
        torch.manual_seed(config.seed)  # nothing should depend on it, but an oversight is then repeatable
        planned = plan.process_groups
        self.store.device_limit_bytes = config.cluster.device_rows_bytes
        self._groups = Groups.create(
            planned,
            rank=self.rank,
            world_size=plan.n_workers,
            meeting=self._meeting,
            device=device,
            timeout_s=config.cluster.worker_timeout_s,
            settings=GroupSettings(
                collective_timeout_s=config.cluster.collective_timeout_s,
                for_libraries=needs_library_groups(plan),
                through_host=config.cluster.shares_devices,
            ),
        )
        world = self._groups[next(group for group in planned if group.kind is GroupKind.GLOBAL)]
        resume_from = Path(request.resume_from) if request.resume_from else None
        configs = role_configs(plan)
        self._roles = build_roles(plan, self.rank, self._groups, device, configs=configs, resume_from=resume_from)
        if resume_from is not None:
            manifest = load_manifest(resume_from)
            restore_roles(self._roles, self.rank, resume_from, manifest, configs)
            if self.rank == plan.dataset_rank:
                self._restored = RestoredSamples(resume_from, manifest.files)
        self._writer = CheckpointWriter(plan, self.rank, self._roles, self.store, device)
        self._plan = plan
        self._runner = CallRunner(
            plan, self._roles, self.store, world=world, client=self._client, peers=request.peers, device=device
        )
        self._runner.observer = self._observer
        self._hooks = HookRunner(plan, self._roles, reallocs=Reallocs(plan, configs), world=world, device=device)
        self._log_start(device)
        row_ids: tuple[str, ...] = ()
        n_dropped, notes = 0, tuple[str, ...]()
        if self.rank == plan.dataset_rank:
            row_ids, n_dropped, notes = self._open_datasets(plan)
            notes += notes_of_models(plan) if resume_from is None else ()
            _log.info("dataset: %d rows, %d dropped", len(row_ids), n_dropped)
        held_out_ids = () if self._held_out is None else self._held_out.row_ids
        content = "" if self._dataset is None else self._dataset.digest
        spans = (Span("initialize", "init", start_s, time.time()),)
        return Ready(
            self.rank, request.seq, tuple(row_ids), n_dropped, tuple(notes), spans, tuple(held_out_ids), content
        )

    def _log_start(self, device: torch.device) -> None:
        n_threads = torch.get_num_threads()
        _log.info("worker %d: %s, %s, %d threads", self.rank, device, devices.device_name(device), n_threads)
        for name, hosted in self._roles.items():
            engine = hosted.home_engine
            n_here = 0 if engine is None else sum(p.numel() for _, p in engine.decoder.named_shards())
            home = "no weights" if hosted.home is None else f"lives in {hosted.home}, {n_here:,} parameters here"
            _log.info("role %s: %s; calls %s", name, home, ", ".join(call.name for call in hosted.calls))

    def _open_datasets(self, plan: RunPlan) -> tuple[tuple[str, ...], int, tuple[str, ...]]:
        """Load the datasets; returns row ids, number of dropped rows and notes of the run's own one."""
        config, kind, tokenizer = plan.config, plan.experiment.dataset, role_tokenizer(plan)
        if plan.evaluation is not None or config.eval.only:
            self._held_out = load_dataset(held_out_data(config), kind, tokenizer, is_held_out=True)
        if config.eval.only:
            self._dataset = self._held_out
        else:
            self._dataset = load_dataset(config.dataset, kind, tokenizer)
        assert self._dataset is not None
        notes = () if self._held_out in (None, self._dataset) else tuple(f"eval: {n}" for n in self._held_out.notes)
        return self._dataset.row_ids, self._dataset.n_dropped, (*self._dataset.notes, *notes)

    def _load(self, request: LoadSamples) -> tuple[SampleMeta, tuple[SampleMeta, ...]]:
        """Put samples of the dataset, and a checkpoint's rows of them, into the store; returns descriptions of both."""
        dataset = self._held_out if request.is_held_out else self._dataset
        if dataset is None:
            raise RunError(f"worker {self.rank} holds no dataset, but was asked for samples", worker=self.rank)
        samples = dataset.samples(request.ids, request.rows)
        self.store.put(samples)
        restored = [] if self._restored is None else self._restored.take(request.ids)
        for batch in restored:
            self.store.put(batch)
        return samples.describe(), tuple(batch.describe() for batch in restored)

    def _tokenizer(self, role: str) -> Any:
        assert self._plan is not None
        hosted = self._roles.get(role)
        return load_tokenizer(self._plan.config.models[role].path) if hosted is None else hosted.tokenizer

    def _shutdown(self, request: Shutdown) -> Goodbye:
        if self._writer is not None:
            self._writer.close()
        if self._groups is not None:
            self._groups.destroy()
        if self._client is not None:
            self._client.close()
        return Goodbye(self.rank, request.seq)

    def _wait_span(self, now_s: float) -> tuple[Span, ...]:
        since = self._idle_since_s
        if since is None or now_s - since < _WAIT_WORTH_TRACING_S:
            return ()
        return (Span("wait", "wait", since, now_s),)
