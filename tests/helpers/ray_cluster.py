"""A Ray cluster over machines that are namespaces: one `ray start` on each, which ends with its machine."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.helpers.machines import Machine, Site, machines, python

PORT = 6379
_LIMIT_S = 240.0
_N_TRIES = 4  # Ray's own time limits are short for a machine that is busy
_PORTS = {  # given, or Ray waits for processes that choose them, and ends if that takes too long
    "metrics-export-port": 7001,
    "dashboard-agent-grpc-port": 7002,
    "dashboard-agent-listen-port": 7003,
    "runtime-env-agent-port": 7004,
    "min-worker-port": 20000,
    "max-worker-port": 20999,
}

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")


@contextmanager
def ray_cluster(**cpus: int) -> Iterator[Site]:
    """Boot machines by name, the first of them as the head, each with so many CPUs; nothing is left after the block."""
    folder = tempfile.mkdtemp(prefix="rr-", dir="/tmp")  # short: paths of sockets are below it
    try:
        with machines(*cpus) as site:
            head = site.machines[0]
            for machine in site.machines:
                machine.run("mount", "-t", "tmpfs", "none", folder)  # as disks of machines are: their own
                words = ["--head", f"--port={PORT}", "--include-dashboard=false"]
                _start(
                    machine, folder, cpus[machine.name], words if machine is head else [f"--address={address(site)}"]
                )
            yield site
        assert _alive(folder) == []
    finally:
        shutil.rmtree(folder)


def address(site: Site) -> str:
    """Address of the cluster."""
    return f"{site.machines[0].address}:{PORT}"


def ask(site: Site, code: str) -> str:
    """Run a driver's code on the head machine, with `ray` joined to the cluster; returns what it prints."""
    joined = f"import ray; ray.init({address(site)!r}, log_to_driver=False, logging_level='ERROR')\n{code}"
    command = site.machines[0].command(python(), "-c", joined)
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=_LIMIT_S).stdout


def _start(machine: Machine, folder: str, n_cpus: int, words: list[str]) -> None:
    ports = [f"--{name}={port}" for name, port in _PORTS.items()]
    command = [str(Path(python()).parent / "ray"), "start", f"--node-ip-address={machine.address}", *ports, *words]
    command += [f"--temp-dir={folder}", f"--num-cpus={n_cpus}", "--object-store-memory=80000000"]
    command += ["--disable-usage-stats", "--include-log-monitor=false"]
    for _ in range(_N_TRIES):
        done = subprocess.run(
            machine.command("env", "-C", "/", *command), capture_output=True, text=True, timeout=_LIMIT_S, env=_plain()
        )
        if done.returncode == 0:
            return
        if "ValueError" in done.stderr:  # no matter of time
            break
        for word in ("raylet", "gcs_server", "site-packages/ray/", "ray.util.client", "ray::"):
            subprocess.run(machine.command("pkill", "-9", "-f", word), check=False, timeout=_LIMIT_S)
    raise AssertionError(f"Ray does not start on {machine.name}: {done.stdout[-2000:]}{done.stderr[-2000:]}")


def _plain() -> Mapping[str, str]:
    """The environment without what a user of Ray may have set."""
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {"OMP_NUM_THREADS": "1"}


def _alive(word: str) -> list[str]:
    """Command lines of processes with a word in them, on all machines that are namespaces of this one."""
    found = subprocess.run(["pgrep", "-af", word], capture_output=True, text=True, check=False).stdout
    return found.splitlines()
