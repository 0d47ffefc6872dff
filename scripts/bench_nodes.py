"""The master of a run on many machines: start-up, dispatch of a call, and its share of a step.

    planned         calls, allocations, hooks and the master's plan for so many workers
    joined          the master's own launcher, until the simulated agents of all machines have joined it
    started         until the simulated workers of all machines have said hello
    one call        from the first request of a call to its last reply, as in bench_dispatch.py, with beats beside
    a step          CPU time of the master in a step of `--step-s`: beats of agents, heartbeats of workers, requests and
                    replies of every call, and the scheduler's own part of them (`MasterState`, on a simulated cluster)

Simulated agents are the real state machine and the real sockets, some tens of them in a process of this machine; their
workers are connections, as in bench_dispatch.py. All of them share this machine's cores with the master, so only CPU
times are the master's own.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import queue
import resource
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from bench_dispatch import answer, make_call

from realrl.config.compose import compose
from realrl.experiment.discovery import config_dir, load_experiment
from realrl.experiment.planning import plan_run
from realrl.experiment.run_plan import RunPlan
from realrl.profiler.dispatch import handling_seconds
from realrl.runtime.checkpoints.resume import make_master_plan
from realrl.runtime.checkpoints.store import checkpoint_store
from realrl.runtime.launchers.nodes import NodesLauncher, NodesStart
from realrl.runtime.master.master_worker import COLLECTOR
from realrl.runtime.nodes.survey import look
from realrl.runtime.processes.lifeline import lease_clock
from realrl.runtime.transport.nodes import NodeClient
from realrl.runtime.transport.sockets import Admission, RunKeys, new_context
from realrl.runtime.transport.zmq import ZmqMaster, ZmqWorker
from realrl.runtime.worker.heartbeat import heartbeat_interval_s
from realrl.sched.messages import CallDone, Heartbeat, Hello, Reply, RunCall, Shutdown
from realrl.sched.nodes.agent import Agent, Heard, Leave, Look, Looked, Say, Start, Ticked
from realrl.sched.nodes.messages import Greeting, NodeFacts, StartWorkers

LIMIT_S = 300.0
WORKER_TIMEOUT_S = 120.0  # the default of cluster.worker_timeout_s
LIMIT_SHARE = 0.01
SCHEDULED_STEPS = 4
_TURN_S = 0.02


class SimulatedAgents:
    """Agents of some machines in a thread; the orders to start workers go to a queue."""

    def __init__(self, numbers: Sequence[int], place: str, key: bytes) -> None:
        self.orders: queue.SimpleQueue[StartWorkers] = queue.SimpleQueue()
        self.is_over = threading.Event()
        self._context = new_context()
        self._clients = {number: NodeClient(key, place, context=self._context) for number in numbers}
        facts = NodeFacts(versions={}, digests={})
        self._agents = {
            number: Agent(
                Greeting(machine=f"m{number}", pid=1, address=f"10.0.0.{number}", facts=facts, index=number),
                place,
                patience_s=LIMIT_S,
                now_s=lease_clock(),
            )
            for number in numbers
        }
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def close(self) -> None:
        self.is_over.set()
        self._thread.join()
        for client in self._clients.values():
            client.close()
        self._context.term()

    def _serve(self) -> None:
        while not self.is_over.is_set():
            for number, client in self._clients.items():
                while (message := client.receive(0.0)) is not None:
                    self._handle(number, Heard(message, lease_clock(), time.time()))
                self._handle(number, Ticked(lease_clock(), time.time()))
            time.sleep(_TURN_S)

    def _handle(self, number: int, event: Heard | Looked | Ticked) -> None:
        for instruction in self._agents[number].handle(event):
            match instruction:
                case Say(message):
                    self._clients[number].send(message)
                case Look(examine):
                    self._handle(number, Looked(look(examine), lease_clock(), time.time()))
                case Start(order):
                    self.orders.put(order)
                case Leave():
                    self.is_over.set()


def simulate(numbers: Sequence[int]) -> None:
    """Play machines: their agents, then their workers, which answer calls in the order of their ranks."""
    place, key = json.loads(sys.stdin.read())
    agents = SimulatedAgents(numbers, place, bytes.fromhex(key))
    context, workers = new_context(), dict[int, ZmqWorker]()
    for _ in numbers:
        order = agents.orders.get(timeout=LIMIT_S)
        admission = msgspec.msgpack.decode(order.admission, type=Admission)
        for rank in range(order.first_rank, order.first_rank + order.n_workers):
            workers[rank] = ZmqWorker(admission.master, rank, admission.keys, context=context)
            workers[rank].send(Hello(rank, os.getpid(), ""))
    beating = threading.Thread(target=_heartbeats, args=(workers, admission.heartbeat_s, agents.is_over))
    beating.start()
    waiting = dict(sorted(workers.items()))
    while waiting:
        for rank, worker in list(waiting.items()):
            request = worker.receive(LIMIT_S)
            if isinstance(request, RunCall):
                worker.send(answer(rank, request))
            else:  # shut down, or the master is gone
                waiting.pop(rank)
    agents.close()
    beating.join()
    for worker in workers.values():
        worker.close()
    context.term()


def _heartbeats(workers: dict[int, ZmqWorker], interval_s: float, is_over: threading.Event) -> None:
    while True:  # the first at once, as in a run
        for rank, worker in workers.items():
            worker.send(Heartbeat(rank, 0, "actor_gen", 1.0))
        if is_over.wait(interval_s):
            return


class Measured:
    """The master of simulated machines."""

    def __init__(self, n_machines: int, n_each: int, n_processes: int, folder: Path) -> None:
        self.n_workers = n_machines * n_each
        key = secrets.token_bytes(32)
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        host, port = listener.getsockname()
        nodes = NodesStart(
            key=key, host=host, port=port, listening=listener.fileno(), n_machines=n_machines, n_workers_each=n_each,
            n_accelerators=0, lease_s=30.0, start_timeout_s=LIMIT_S, versions={}, digests={}, files={},
            directory=str(folder), device="cpu",
        )  # fmt: skip
        keys = RunKeys.derived(key, "bench-1")
        self.master = ZmqMaster(keys, endpoint=f"tcp://{host}:*")
        beat_s = heartbeat_interval_s(self.n_workers, WORKER_TIMEOUT_S)
        admission = msgspec.msgpack.encode(Admission(self.master.address, "", keys.for_workers, heartbeat_s=beat_s))
        self.launcher = NodesLauncher(
            folder,
            nodes,
            marks=("bench-1", ""),
            host="",
            tell=lambda _: None,
            beat=lambda: None,
            reclaim=lambda _: None,
        )
        self.processes = [
            subprocess.Popen(
                [sys.executable, __file__, "--simulate", ",".join(map(str, range(n_machines)[i::n_processes]))],
                stdin=subprocess.PIPE, text=True,
            )
            for i in range(n_processes)
        ]  # fmt: skip
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps([f"{host}:{port}", key.hex()]))
            process.stdin.close()
        with listener:
            begin_s, begin_cpu_s = time.monotonic(), time.process_time()
            self.launcher.start(self.n_workers, admission)
            self.joined_s = time.monotonic() - begin_s
            self.started_s = self._await_workers() - begin_s
            self.start_cpu_s = time.process_time() - begin_cpu_s

    def _await_workers(self) -> float:
        """Wait for the first words of all workers; returns the time at which the last one said hello.

        Heartbeats have connections of their own, whose handshakes belong to the start as well.
        """
        greeted, beating = set[int](), set[int]()
        greeted_s = deadline_s = time.monotonic() + LIMIT_S
        while min(len(greeted), len(beating)) < self.n_workers:
            reply = self.master.receive(0.5)
            if isinstance(reply, Hello):
                greeted.add(reply.rank)
                greeted_s = time.monotonic()
            elif isinstance(reply, Heartbeat):
                beating.add(reply.rank)
            if time.monotonic() > deadline_s:
                raise SystemExit(f"only {len(greeted)} of {self.n_workers} workers started")
        return greeted_s

    def idle_share(self, seconds: float) -> float:
        """Return CPU seconds of the master per second, while nothing comes but beats and heartbeats."""
        begin_s, begin_cpu_s = time.monotonic(), time.process_time()
        while time.monotonic() < begin_s + seconds:
            self.master.receive(0.1)
        return (time.process_time() - begin_cpu_s) / (time.monotonic() - begin_s)

    def round(self, seq: int, ids: tuple[str, ...]) -> tuple[float, float]:
        """Send a call to all workers and take all replies; returns seconds, and CPU seconds of the master."""
        request, n_left = make_call(seq, ids), self.n_workers
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        for rank in range(self.n_workers):
            self.master.send(rank, request)
        while n_left:
            reply: Reply | None = self.master.receive(LIMIT_S)
            assert reply is not None, "a simulated worker does not answer"
            n_left -= isinstance(reply, CallDone)
        return time.perf_counter() - begin_s, time.process_time() - begin_cpu_s

    def close(self, seq: int) -> None:
        for rank in range(self.n_workers):
            self.master.send(rank, Shutdown(seq))
        for process in self.processes:
            process.wait(LIMIT_S)
        self.launcher.stop()
        self.master.close()


def planned(n_machines: int, n_each: int) -> tuple[RunPlan, float]:
    """Plan a run of PPO on so many workers; returns the seconds that it took."""
    experiment = load_experiment("ppo")
    words = ["preset=tiny", f"n_seqs={8 * n_machines * n_each}", f"cluster.n_nodes={n_machines}"]
    words += [f"cluster.n_devices_per_node={n_each}", "launcher=external", "cluster.device=cpu"]
    config = compose(experiment, words, config_dir=config_dir())
    begin_s = time.process_time()
    plan = plan_run(config, experiment)
    make_master_plan(plan, checkpoint_store(plan, Path()), None)
    return plan, time.process_time() - begin_s


def main() -> int:
    """Measure and print; exit code 1 if the master takes more than its share of a step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", type=int, default=128, help="simulated machines")
    parser.add_argument("--workers", type=int, default=8, help="simulated workers on each")
    parser.add_argument("--processes", type=int, default=4, help="processes that simulate them")
    parser.add_argument("--rounds", type=int, default=20, help="calls to all simulated workers")
    parser.add_argument("--samples", type=int, default=8, help="samples per call and worker")
    parser.add_argument("--step-s", type=float, default=10.0, help="length of a step")
    parser.add_argument("--idle-s", type=float, default=10.0, help="time for which beats are measured")
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    parser.add_argument("--simulate", metavar="MACHINES", help=argparse.SUPPRESS)
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    if options.simulate:
        simulate([int(number) for number in options.simulate.split(",")])
        return 0
    plan, plan_cpu_s = planned(options.machines, options.workers)
    n_calls, handle_s = len(plan.mfcs), handling_seconds(plan, n_steps=SCHEDULED_STEPS, clock=time.process_time)
    collecting_s = {
        name: handling_seconds(plan, n_steps=SCHEDULED_STEPS, clock=time.process_time, collector=thresholds)
        for name, thresholds in (("Python's", gc.get_threshold()), ("the master's", COLLECTOR))
    }
    ids = tuple(f"0/{row}" for row in range(options.samples))
    with tempfile.TemporaryDirectory(prefix="realrl-bench-") as folder:
        measured = Measured(options.machines, options.workers, options.processes, Path(folder))
        idle_share = measured.idle_share(options.idle_s)
        rounds = [measured.round(seq, ids) for seq in range(options.rounds)]
        measured.close(options.rounds)
    round_s, round_cpu_s = (statistics.median(column) for column in zip(*rounds))
    n_workers = measured.n_workers
    parts = {
        "beats and heartbeats": idle_share * options.step_s,
        "requests and replies": n_calls * round_cpu_s,
        "scheduler": n_calls * n_workers * handle_s,
    }
    share = sum(parts.values()) / options.step_s
    found: dict[str, float] = {
        "planned, CPU s": plan_cpu_s,
        "joined, s": measured.joined_s,
        "started, s": measured.started_s,
        "start-up, CPU s of the master": measured.start_cpu_s,
        "one call, ms": round_s * 1e3,
        "one call, CPU ms of the master": round_cpu_s * 1e3,
        "scheduler, µs for the end of a call on a worker": handle_s * 1e6,
        **{f"the same with {name} collector": seconds * 1e6 for name, seconds in collecting_s.items()},
        **{f"a step: {name}, CPU s": seconds for name, seconds in parts.items()},
        f"share of a step of {options.step_s:g} s": share,
    }
    print(f"{n_workers} workers on {options.machines} machines, {n_calls} calls in a step")
    for name, number in found.items():
        print(f"  {name:<50} {number:10.4f}")
    if options.out:
        options.out.write_text(json.dumps(found, indent=2) + "\n")
    return 0 if share <= LIMIT_SHARE else 1


if __name__ == "__main__":
    sys.exit(main())
