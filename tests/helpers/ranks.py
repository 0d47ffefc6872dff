"""Run one function on N gloo ranks and report the failure that explains the others.

CPU only. Ranks are forked from a server process that has already imported torch and the runtime: on
two idle cores 4 ranks take 0.5 to 1.2 s where `spawn` takes more than 5 s. Rendezvous goes through a
file, so there is no port to race for.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing as mp
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

from realrl.runtime.transport.sockets import RunKeys, WorkerKeys
from realrl.runtime.transport.zmq import ZmqKeyValueClient, ZmqKeyValueServer

mp.set_forkserver_preload(["torch.distributed", "torch._dynamo", "realrl.runtime.worker.model_worker"])

_REPORT_GRACE_S = 0.5
_LOST_PEER = ("by peer", "Connection closed", "Timed out waiting")


class RankFailure(AssertionError):
    """A rank raised, or died without a result; the message ends with the failures of the `others`."""

    def __init__(self, rank: int, detail: str, others: dict[int, str]) -> None:
        tail = "".join(f"\n  (rank {r}: {d.strip().splitlines()[-1]})" for r, d in sorted(others.items()))
        super().__init__(f"rank {rank} failed:\n{detail}{tail}")
        self.rank = rank


def run_ranks(
    world_size: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 60.0, joined: bool = True
) -> list[Any]:
    """Call `fn(rank, world_size, *args)` on every rank; return the results in rank order.

    Args:
        joined: True if the ranks are members of a gloo world when `fn` starts; otherwise `fn` may join one itself
            through its third argument, a `KeyValueClient`.

    Raises:
        RankFailure: a rank raised or died; the most likely cause is reported first.
        TimeoutError: some rank gave no result in `timeout_s` seconds. Stacks are on stderr.
    """
    ctx = mp.get_context("forkserver")
    keys = RunKeys.new()
    with tempfile.TemporaryDirectory() as tmp, contextlib.closing(ZmqKeyValueServer(keys)) as store:
        procs, pipes = [], []
        rendezvous = f"{tmp}/rendezvous" if joined else (store.address, keys.for_workers)
        for rank in range(world_size):
            recv_end, send_end = ctx.Pipe(duplex=False)
            proc = ctx.Process(target=_rank_main, args=(rank, world_size, rendezvous, timeout_s, send_end, fn, args))
            proc.start()
            send_end.close()  # so that a dead rank reads as end-of-file
            procs.append(proc)
            pipes.append(recv_end)
        try:
            return _collect(procs, pipes, timeout_s)
        finally:
            for proc in procs:
                proc.kill()
                proc.join()


def _rank_main(
    rank: int,
    world_size: int,
    rendezvous: str | tuple[str, WorkerKeys],
    timeout_s: float,
    out: Connection,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    faulthandler.dump_traceback_later(max(timeout_s - 2.0, 1.0), exit=False)
    torch.set_num_threads(1)
    try:
        if isinstance(rendezvous, str):
            dist.init_process_group(
                "gloo",
                init_method=f"file://{rendezvous}",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout_s),
            )
        else:
            args = (ZmqKeyValueClient(*rendezvous), *args)
        out.send((None, fn(rank, world_size, *args)))
    except BaseException:  # noqa: BLE001 - reported to the parent, whatever it is
        out.send((traceback.format_exc(), None))
        os._exit(1)  # a failed rank must not wait for its peers in destroy_process_group
    if dist.is_initialized():
        dist.destroy_process_group()


def _collect(procs: list[Any], pipes: list[Connection], timeout_s: float) -> list[Any]:
    results: list[Any] = [None] * len(procs)
    failures: dict[int, str] = {}
    pending = set(range(len(procs)))
    deadline = time.monotonic() + timeout_s
    while pending:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError(f"no result from ranks {sorted(pending)} in {timeout_s} s")
        ready = wait([pipes[r] for r in pending], remaining)
        for rank in [r for r in pending if pipes[r] in ready]:
            failure, results[rank] = _read(procs[rank], pipes[rank])
            pending.discard(rank)
            if failure is not None:
                failures[rank] = failure
        if failures:
            deadline = min(deadline, time.monotonic() + _REPORT_GRACE_S)
            if not pending or time.monotonic() >= deadline or not wait([pipes[r] for r in pending], _REPORT_GRACE_S):
                cause = min(failures, key=lambda r: (_blame(failures[r]), r))
                raise RankFailure(cause, failures.pop(cause), failures)
    for rank, proc in enumerate(procs):
        proc.join(10)
        if proc.exitcode != 0:
            raise RankFailure(rank, f"exit code {proc.exitcode} after its result", {})
    return results


def _read(proc: Any, pipe: Connection) -> tuple[str | None, Any]:
    try:
        failure, result = pipe.recv()
    except EOFError:
        proc.join(5)
        return f"process died with exit code {proc.exitcode}", None
    return failure, result


def _blame(failure: str) -> int:
    """Order of failures as causes: 0 for a dead process, 1 for an exception, 2 for a collective that lost a peer."""
    if failure.startswith("process died"):
        return 0
    return 2 if any(mark in failure for mark in _LOST_PEER) else 1
