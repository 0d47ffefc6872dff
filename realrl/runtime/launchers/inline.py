"""Workers inside the master's own process and thread: for a debugger, and for small tests."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from realrl.runtime.launchers.base import WorkerEnd
from realrl.runtime.transport.inproc import InprocMaster, InprocSamples, InprocSampleServer
from realrl.runtime.worker.loop import HostFactory, WorkerLoop
from realrl.sched.messages import Hello


class InlineLauncher:
    """Attaches one worker loop per rank to an in-process transport.

    Args:
        transport: the master's transport; its `receive` executes the requests.
        make_host: returns the factory of a worker's host; called on a worker's first request.
    """

    def __init__(self, transport: InprocMaster, make_host: Callable[[], HostFactory]) -> None:
        self._transport = transport
        self._make_host = make_host
        self._samples = InprocSamples()
        self._servers: list[InprocSampleServer] = []

    def start(self, n_workers: int, admission: bytes) -> None:
        """Attach the workers. `admission` has no meaning inside one process."""
        for rank in range(n_workers):
            loop = WorkerLoop(rank, self._samples.client(), self._make_host, post=self._transport.deliver)
            server = self._samples.serve(loop.fetch)
            self._servers.append(server)
            self._transport.attach(rank, loop.execute)
            self._transport.deliver(Hello(rank, os.getpid(), server.address))

    def poll(self) -> list[WorkerEnd]:
        """Return nothing: a worker cannot end before its master here."""
        return []

    def stop(self) -> None:
        for server in self._servers:
            server.close()
        self._servers.clear()

    def dump_stack(self, rank: int) -> None:
        """Do nothing: the worker runs on the caller's own stack."""

    def log_path(self, rank: int) -> Path | None:
        """Return None: everything goes to the master's own output."""
        return None

    def machine(self, rank: int) -> str:
        return ""

    def clock_offset_s(self, rank: int) -> float:
        return 0.0
