"""Runs whose workers count the bytes of live tensors in every call, and what the memory plan says of the same calls.

Workers are forked from a process that has imported torch, which saves the seconds of importing it for every run. On
CUDA torch's allocator counts.
"""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing as mp
import os
import threading
import traceback
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import msgspec
import torch

from realrl.config.schema import RunConfig
from realrl.config.serialize import dump_config
from realrl.data.datasets import load_dataset
from realrl.doctor.data_checks import row_lengths
from realrl.doctor.memory import memory_plan
from realrl.experiment.models import role_configs
from realrl.experiment.run_plan import RunPlan
from realrl.plan.memory.plan import SAVE, Usage
from realrl.runtime.launchers.base import WorkerEnd
from realrl.runtime.master.master_worker import run_master
from realrl.runtime.output.metrics import open_sinks
from realrl.runtime.output.progress import PlainProgress
from realrl.runtime.output.trace import TraceWriter
from realrl.runtime.processes.main import run_worker
from realrl.runtime.processes.session import Session
from realrl.runtime.transport.sockets import Admission, RunKeys, endpoint_beside
from realrl.runtime.transport.zmq import ZmqKeyValueClient, ZmqKeyValueServer, ZmqMaster
from realrl.runtime.worker.model_worker import ModelWorker
from realrl.runtime.worker.roles import role_tokenizer
from realrl.sched.messages import Initialize, Reply, Request, RunCall, RunHooks, SaveCheckpoint, Shutdown
from tests.helpers.allocated_memory import AllocatedMemory
from tests.helpers.live_memory import LiveMemory

mp.set_forkserver_preload(
    ["torch.distributed", "torch._dynamo", "transformers.tokenization_utils_tokenizers", __name__]
)


@dataclass(frozen=True)
class Counted:
    """Bytes of one rank in a call, or in a save: those that lived at its fullest moment, and those that are planned.

    On the CPU, what is planned for host memory is in the same memory. On CUDA that is not counted, nor is what the
    driver and the libraries take.
    """

    rank: int
    call: str
    counted: int
    usage: Usage
    is_on_host: bool

    @property
    def planned(self) -> int:
        return self.usage.total + (self.usage.host if self.is_on_host else -self.usage.runtime - self.usage.rows)

    @property
    def ratio(self) -> float:
        """Planned bytes over counted ones."""
        return self.planned / max(1, self.counted)


def count_run(plan: RunPlan) -> list[Counted]:
    """Do a run in its folder, which is there, and return what its workers counted beside what is planned.

    `cluster.device` is cpu, or cuda for a run with one worker.

    Raises:
        RuntimeError: the run failed; with the end of the workers' logs.
    """
    tokenizer = role_tokenizer(plan)
    dataset = load_dataset(plan.config.dataset, plan.experiment.dataset, tokenizer)
    device = torch.device(plan.config.cluster.device)
    planned = memory_plan(plan, role_configs(plan), row_lengths(dataset, tokenizer), device=device)
    counts = _run(plan.config)
    return [
        Counted(rank, call, n_bytes, planned.calls[call][rank], is_on_host=device.type == "cpu")
        for rank, by_call in enumerate(counts)
        for call, n_bytes in by_call.items()
        if rank in planned.calls.get(call, {})
    ]


def _run(config: RunConfig) -> list[dict[str, int]]:
    """Return what each worker counted: call -> bytes."""
    folder, keys, said = Path(config.run_dir), RunKeys.new(), io.StringIO()
    with contextlib.ExitStack() as stack:
        transport = ZmqMaster(keys, endpoint=f"ipc://{folder}/master")
        store = ZmqKeyValueServer(keys, endpoint=endpoint_beside(transport.address, "key-values"))
        launcher = ForkedLauncher(folder, config.cluster.device)
        metrics, trace = open_sinks(folder), TraceWriter(folder / "trace.json")
        for close in (metrics.close, trace.close, store.close, transport.close, launcher.stop):
            stack.callback(close)
        admission = msgspec.msgpack.encode(Admission(transport.address, store.address, keys.for_workers))
        progress = PlainProgress(said, said)
        code = run_master(
            Session(dump_config(config), folder, transport, launcher, admission, progress, metrics, trace)
        )
    n_workers = config.cluster.n_nodes * config.cluster.n_devices_per_node
    if code:
        logs = [path.read_text()[-2000:] for rank in range(n_workers) if (path := launcher.log_path(rank)).exists()]
        raise RuntimeError("\n".join([said.getvalue(), *logs]))
    return [json.loads(_counts(folder, rank).read_text()) for rank in range(n_workers)]


class _LiveTensors(LiveMemory):
    """Leaves out numbers by themselves, such as the counters of an optimizer."""

    def count(self, tensor: torch.Tensor) -> None:
        if tensor.dim():
            super().count(tensor)


class CountingWorker(ModelWorker):
    """A worker that writes the most bytes that lived at a time: call, or save -> bytes.

    The dataset is left out, and rows of samples that were there before a call: on accelerators they have a limit of
    their own, and on CPUs no plan counts them.
    """

    def __init__(self, rank: int, *args: Any, folder: Path, device: str, **kwargs: Any) -> None:
        super().__init__(rank, *args, **kwargs)
        self._file, self._is_on_host = _counts(folder, rank), device == "cpu"
        self._memory = _LiveTensors() if self._is_on_host else AllocatedMemory()
        self._peaks = dict[str, int]()
        self._outside = 0  # bytes of the dataset

    def handle(self, request: Request) -> list[Reply | Future[Reply]]:
        copies_rows = self._is_on_host and isinstance(request, SaveCheckpoint)
        outside = self._outside + self.store.size_bytes * (2 if copies_rows else 1)
        self._memory.restart()
        with self._memory:
            replies = super().handle(request)
        if isinstance(request, Initialize):
            for hosted in self._roles.values():
                for tensor in () if hosted.home_engine is None else hosted.home_engine.kept_tensors().values():
                    self._memory.count(tensor)
        name = SAVE if isinstance(request, SaveCheckpoint) else ""
        if isinstance(request, RunCall | RunHooks):
            name = request.call
        if name:
            self._peaks[name] = max(self._peaks.get(name, 0), self._memory.peak - outside)
        if isinstance(request, Shutdown):
            self._file.write_text(json.dumps(self._peaks))
        return replies

    def _open_datasets(self, plan: RunPlan) -> tuple[tuple[str, ...], int, tuple[str, ...]]:
        before = self._memory.now
        found = super()._open_datasets(plan)
        self._outside = self._memory.now - before
        return found


class ForkedLauncher:
    """A `Launcher` of counting workers with one thread each."""

    def __init__(self, folder: Path, device: str) -> None:
        self._folder, self._device = folder, device
        self._processes: list[ForkServerProcess] = []
        self._reported = set[int]()

    def start(self, n_workers: int, admission: bytes) -> None:
        for rank in range(n_workers):
            process = mp.get_context("forkserver").Process(
                target=_work, args=(rank, admission, self._folder, self._device), daemon=True
            )
            process.start()
            self._processes.append(process)

    def poll(self) -> list[WorkerEnd]:
        ended = [(rank, process.exitcode) for rank, process in enumerate(self._processes)]
        new = [WorkerEnd(rank, code) for rank, code in ended if code is not None and rank not in self._reported]
        self._reported |= {end.rank for end in new}
        return new

    def stop(self, grace_s: float = 5.0) -> None:
        for process in self._processes:
            process.join(grace_s)
            process.kill()
            process.join()

    def dump_stack(self, rank: int) -> None:
        """Do nothing: a worker that fails tells its log."""

    def log_path(self, rank: int) -> Path:
        return _log(self._folder, rank)

    def machine(self, rank: int) -> str:
        return ""

    def clock_offset_s(self, rank: int) -> float:
        return 0.0


def _counts(folder: Path, rank: int) -> Path:
    return folder / f"counted-{rank}.json"


def _log(folder: Path, rank: int) -> Path:
    return folder / f"worker-{rank}.log"


def _work(rank: int, admission: bytes, folder: Path, device: str) -> None:
    parent = mp.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    output = os.open(_log(folder, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.set_num_threads(1)
    admitted = msgspec.msgpack.decode(admission, type=Admission)
    meeting = ZmqKeyValueClient(admitted.key_values, admitted.keys)
    try:
        run_worker(rank, admitted, lambda: partial(CountingWorker, meeting=meeting, folder=folder, device=device))
    except BaseException:
        traceback.print_exc()
        raise
    meeting.close()


def _end_with(parent: Any) -> None:
    parent.join()
    os._exit(1)
