"""Machines of a Ray cluster for a run, from the side of `realrl run`: it starts the keeper, and ends it."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from realrl.config.schema import ClusterConfig
from realrl.errors import MachinesError, RunError, UsageError
from realrl.files import open_output
from realrl.runtime.launchers.nodes import NodesStart
from realrl.runtime.output.logs import tail
from realrl.runtime.processes.lifeline import framed
from realrl.runtime.ray.address import check_ray
from realrl.runtime.ray.messages import AgentStart, Connected, KeeperStart, News, Placed, Refusal, Told

_CONNECT_LIMIT_S = 60.0  # Ray alone may take some of it, where the machine is busy
_HOLD_LIMIT_S = 120.0  # for Ray to start its processes, beyond the time in which it gives the machines
_END_LIMIT_S = 15.0
_PROGRAM = "realrl.runtime.ray.keeper"


def keeper_start(cluster: ClusterConfig, nodes: NodesStart, name: str, address: str) -> KeeperStart:
    """Return what the keeper of a run is told."""
    n_cpus = cluster.ray_cpus or cluster.n_devices_per_node
    agent = AgentStart(
        place=f"{nodes.host}:{nodes.port}",
        key=nodes.key,
        index=0,
        n_machines=nodes.n_machines,
        n_threads=max(1, n_cpus // cluster.n_devices_per_node),
    )
    return KeeperStart(
        address=address,
        name=name,
        n_machines=nodes.n_machines,
        n_cpus=n_cpus,
        n_gpus=nodes.n_accelerators,
        start_timeout_s=nodes.start_timeout_s,
        agent=agent,
    )


@contextlib.contextmanager
def agents_on_ray(cluster: ClusterConfig, name: str, nodes: NodesStart, logs: Path) -> Iterator[None]:
    """Have an agent of a run on each of its machines during the block. Those that Ray loses are started again.

    Args:
        name: what Ray's lists call it.
        logs: folder for what the keeper writes.

    Raises:
        UsageError: Ray is not installed, or the cluster is not there or unfit; nothing was started.
        MachinesError: the cluster has no room.
    """
    start = keeper_start(cluster, nodes, name, check_ray(cluster, os.environ))
    with Keeper(start, logs / "ray.log") as keeper:
        machines = keeper.wait_for_machines()
        print(f"agents on {', '.join(machines)} by Ray", flush=True)
        keeper.pass_on()
        yield


class Keeper:
    """The process of the keeper, and the socket to it, which is its lifeline."""

    def __init__(self, start: KeeperStart, log: Path, *, program: str = _PROGRAM) -> None:
        self._start = start
        self._log = log
        self._ours, stdin = socket.socketpair()
        self._is_ended = False
        self._passing = threading.Thread(target=self._pass_on, name="ray", daemon=True)
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-P", "-m", program]
        with stdin, open_output(log, append=True) as output:
            self._process = subprocess.Popen(
                command, stdin=stdin.fileno(), stdout=output, stderr=output, process_group=0
            )

    def __enter__(self) -> Keeper:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._ours.sendall(framed(msgspec.msgpack.encode(self._start)))
        return self

    def __exit__(self, *_: object) -> None:
        """Tell the keeper that the run is over, and wait until it has given the machines back."""
        self._is_ended = True
        with contextlib.suppress(OSError):
            self._ours.shutdown(socket.SHUT_WR)
        try:
            self._process.wait(_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._passing.is_alive():
            self._passing.join()  # what it reads ends with the process
        self._ours.close()

    def wait_for_machines(self) -> tuple[str, ...]:
        """Return the names of the machines, when each has an agent.

        Raises:
            UsageError, MachinesError: why not.
            RunError: the keeper died.
        """
        limit_s = time.monotonic() + _CONNECT_LIMIT_S
        while True:
            match self._next(limit_s):
                case Placed(machines):
                    return machines
                case Refusal(message, remedy, exit_code):
                    kind = UsageError if exit_code == UsageError.exit_code else MachinesError
                    raise kind(message, remedy=remedy or None)
                case Connected():
                    limit_s = time.monotonic() + self._start.start_timeout_s + _HOLD_LIMIT_S
                case Told(text):
                    print(text, flush=True)

    def pass_on(self) -> None:
        """Show the user what the keeper tells from now on."""
        self._passing.start()

    def _pass_on(self) -> None:
        with contextlib.suppress(OSError, RunError):
            while True:
                news = self._next(None)
                if isinstance(news, Told) and not self._is_ended:
                    print(f"realrl: {news.text}", file=sys.stderr, flush=True)
        if not self._is_ended:
            print(
                f"realrl: the process that has the machines of the Ray cluster died; its log: {self._log}",
                file=sys.stderr,
                flush=True,
            )

    def _next(self, until_s: float | None) -> News:
        size = int.from_bytes(self._read(8, until_s), "big")
        news: News = msgspec.msgpack.decode(self._read(size, until_s), type=News)
        return news

    def _read(self, size: int, until_s: float | None) -> bytes:
        data = b""
        while len(data) < size:
            left_s = None if until_s is None else max(0.0, until_s - time.monotonic())
            if not select.select([self._ours], [], [], left_s)[0]:
                raise MachinesError(
                    f"Ray does not answer; what it says is in {self._log}",
                    remedy="Is the cluster well? See: ray status",
                )
            chunk = self._ours.recv(size - len(data))
            if not chunk:
                said = " ".join(tail(self._log, 1))
                raise RunError(
                    f"the process that asks Ray for machines died: {said}", remedy=f"Its log is {self._log}."
                )
            data += chunk
        return data
