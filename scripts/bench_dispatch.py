"""Latency of a call: master to worker and back, over the encrypted socket transport.

    one worker      the round trip of one call to one worker process, less the work that the worker does
    all workers     sending one call to each of N simulated workers until the last reply is in; the simulated workers
                    are N connections with N identities, spread over a few processes of this machine

Prints a table and, with ``--out``, writes the same numbers as JSON. Messages are as large as in a run: each call names
its samples and each reply describes their outputs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from realrl.runtime.launchers.local import LocalLauncher
from realrl.runtime.transport.base import SampleClient
from realrl.runtime.transport.sockets import Admission, RunKeys, new_context
from realrl.runtime.transport.zmq import ZmqMaster, ZmqWorker
from realrl.sched.messages import (
    CallDone,
    Goodbye,
    Hello,
    Initialize,
    KeySchema,
    Per,
    Ready,
    Reply,
    Request,
    RunCall,
    SampleMeta,
    Shutdown,
    Span,
)

ONE_LIMIT_MS, ALL_LIMIT_MS = 0.3, 30.0
_START_LIMIT_S = 60.0
_WARM_UP = 50


class EchoHost:
    """Answers a call as a generation does: lengths of its output, a metric, a span; reports the time that it worked."""

    def __init__(self, rank: int, client: SampleClient, *, meeting: object) -> None:
        self.rank = rank

    def handle(self, request: Request) -> list[Reply]:
        start = time.perf_counter()
        if isinstance(request, Shutdown):
            return [Goodbye(self.rank, request.seq)]
        if isinstance(request, Initialize):
            return [Ready(self.rank, request.seq, (), 0, ())]
        assert isinstance(request, RunCall)
        return [answer(self.rank, request, work_s=time.perf_counter() - start)]

    def fetch(self, keys: Sequence[str], ids: Sequence[str]) -> bytes:
        raise NotImplementedError("the benchmark transfers no samples")


def make_call(seq: int, ids: tuple[str, ...]) -> RunCall:
    """A call on these samples."""
    return RunCall(seq, dispatch_id=seq, call="actor_gen", step=1, minibatches=(ids,), transfers=())


def answer(rank: int, request: RunCall, *, work_s: float = 0.0) -> CallDone:
    """A reply that describes one output key for each sample of `request`."""
    ids = request.minibatches[0]
    schemas = {"input_ids": KeySchema("int64", Per.TOKEN)}
    meta = SampleMeta(ids, schemas, {"input_ids": tuple((64,) for _ in ids)})
    now_s = time.time()
    span = Span(request.call, "call", now_s - work_s, now_s)
    return CallDone(rank, request.seq, request.dispatch_id, request.call, 1, meta, {"work_s": work_s}, (span,))


def time_one_worker(n_calls: int, ids: tuple[str, ...]) -> list[float]:
    """Milliseconds beyond the work, per call, to one worker process started by the local launcher."""
    keys = RunKeys.new()
    master = ZmqMaster(keys)
    with tempfile.TemporaryDirectory() as run_dir:
        launcher = LocalLauncher(Path(run_dir), "bench", host="bench_dispatch:EchoHost")
        os.environ["PYTHONPATH"] = os.pathsep.join((str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")))
        launcher.start(1, msgspec.msgpack.encode(Admission(master.address, "", keys.for_workers)))
        try:
            _await_hellos(master, 1, lambda: not launcher.poll())
            master.send(0, Initialize(0, b"", ()))
            return [_round_trip_ms(master, seq, ids) for seq in range(1, n_calls + _WARM_UP + 1)][_WARM_UP:]
        finally:
            launcher.stop()
            master.close()


def time_all_workers(n_workers: int, n_processes: int, n_rounds: int, ids: tuple[str, ...]) -> list[float]:
    """Milliseconds from the first send to the last reply, per round, over `n_workers` simulated workers."""
    keys = RunKeys.new()
    master = ZmqMaster(keys)
    admission = msgspec.msgpack.encode(Admission(master.address, "", keys.for_workers))
    shares = [range(n_workers)[i::n_processes] for i in range(n_processes)]
    processes = [
        subprocess.Popen([sys.executable, __file__, "--simulate", ",".join(map(str, share))], stdin=subprocess.PIPE)
        for share in shares
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(admission)
        process.stdin.close()
    try:
        _await_hellos(master, n_workers, lambda: all(process.poll() is None for process in processes))
        times = [_round_ms(master, n_workers, seq, ids) for seq in range(n_rounds + 5)][5:]
        for rank in range(n_workers):
            master.send(rank, Shutdown(n_rounds + 5))
        for process in processes:
            process.wait(_START_LIMIT_S)
        return times
    finally:
        for process in processes:
            process.kill()
            process.wait()
        master.close()


def simulate(ranks: Sequence[int]) -> None:
    """Play the workers `ranks`: the master sends in rank order, so they take turns."""
    admission = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Admission)
    context = new_context()
    workers = {rank: ZmqWorker(admission.master, rank, admission.keys, context=context) for rank in ranks}
    for rank, worker in workers.items():
        worker.send(Hello(rank, os.getpid(), ""))
    while workers:
        for rank, worker in list(workers.items()):
            request = worker.receive(_START_LIMIT_S)
            if isinstance(request, RunCall):
                worker.send(answer(rank, request))
            else:  # shut down, or the master is gone
                workers.pop(rank).close()
    context.term()


def _round_trip_ms(master: ZmqMaster, seq: int, ids: tuple[str, ...]) -> float:
    request = make_call(seq, ids)
    start = time.perf_counter()
    master.send(0, request)
    while not isinstance(reply := master.receive(_START_LIMIT_S), CallDone):
        assert reply is not None, "the worker does not answer"
    return (time.perf_counter() - start - reply.metrics["work_s"]) * 1e3


def _round_ms(master: ZmqMaster, n_workers: int, seq: int, ids: tuple[str, ...]) -> float:
    request = make_call(seq, ids)
    start = time.perf_counter()
    for rank in range(n_workers):
        master.send(rank, request)
    for _ in range(n_workers):
        assert master.receive(_START_LIMIT_S) is not None, "a simulated worker does not answer"
    return (time.perf_counter() - start) * 1e3


def _await_hellos(master: ZmqMaster, n_workers: int, are_alive: Callable[[], bool]) -> None:
    greeted: set[int] = set()
    deadline = time.monotonic() + _START_LIMIT_S
    while len(greeted) < n_workers:
        reply = master.receive(0.5)
        if isinstance(reply, Hello):
            greeted.add(reply.rank)
        if not are_alive() or time.monotonic() > deadline:
            raise SystemExit(f"only {len(greeted)} of {n_workers} workers started")


def _summary(times_ms: list[float], limit_ms: float) -> dict[str, float | bool]:
    deciles = statistics.quantiles(times_ms, n=100)
    median = statistics.median(times_ms)
    return {
        "n": len(times_ms),
        "median_ms": round(median, 4),
        "p10_ms": round(deciles[9], 4),
        "p90_ms": round(deciles[89], 4),
        "p99_ms": round(deciles[98], 4),
        "limit_ms": limit_ms,
        "within_limit": median <= limit_ms,
    }


def _print(results: dict[str, dict[str, float | bool]]) -> None:
    table = Table(title="Dispatch over ZeroMQ with CURVE, milliseconds")
    for column in ("round trip", "median", "p10", "p90", "p99", "limit", ""):
        table.add_column(column, justify="left" if column in ("round trip", "") else "right")
    for name, row in results.items():
        numbers = [f"{row[key]:.3f}" for key in ("median_ms", "p10_ms", "p90_ms", "p99_ms", "limit_ms")]
        table.add_row(name, *numbers, "[green]ok[/]" if row["within_limit"] else "[red]too slow[/]")
    Console().print(table)


def main() -> int:
    """Measure, print, write; exit code 1 when a median is above its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=2000, help="round trips to one worker")
    parser.add_argument("--rounds", type=int, default=50, help="rounds to all simulated workers")
    parser.add_argument("--workers", type=int, default=256, help="simulated workers")
    parser.add_argument("--processes", type=int, default=2, help="processes that simulate them")
    parser.add_argument("--samples", type=int, default=8, help="samples per call and worker")
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    parser.add_argument("--simulate", metavar="RANKS", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.simulate:
        simulate([int(rank) for rank in options.simulate.split(",")])
        return 0
    ids = tuple(f"0/{row}" for row in range(options.samples))
    results = {
        "one worker, beyond its work": _summary(time_one_worker(options.calls, ids), ONE_LIMIT_MS),
        f"{options.workers} simulated workers": _summary(
            time_all_workers(options.workers, options.processes, options.rounds, ids), ALL_LIMIT_MS
        ),
    }
    _print(results)
    if options.out:
        machine = {"cores": os.cpu_count(), "system": platform.system(), "python": platform.python_version()}
        options.out.write_text(json.dumps({"machine": machine, "samples": options.samples, **results}, indent=2) + "\n")
    return 0 if all(row["within_limit"] for row in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
