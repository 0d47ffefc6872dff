"""Machines that share this one: each has its own network, address, host name, hosts file, loopback and process list.

A machine is a process in namespaces of its own; when it is killed, everything on it dies, and its end of the cable goes
with it. A third namespace is the switch between them. Needs root, `ip`, `unshare` and `nsenter`.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

TOOLS = ("ip", "unshare", "nsenter", "ss")
NETWORK = "10.77.0"
_LIMIT_S = 20.0


def why_not() -> str:
    """Return why there can be no machines here; "" if there can."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "only root can make namespaces"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)}"
    tried = subprocess.run(["unshare", "--net", "--uts", "--pid", "--mount", "--fork", "true"], capture_output=True)
    return "" if tried.returncode == 0 else f"no namespaces: {tried.stderr.decode().strip()}"


needs_machines = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")


def can_reset() -> bool:
    """Return True if this system can break single connections (CONFIG_INET_DIAG_DESTROY)."""
    if why_not():
        return False
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            broken = subprocess.run(["ss", "-HtnK", "dport", "=", f":{port}"], capture_output=True, text=True)
    return bool(broken.stdout.strip())


class Machine:
    """One machine: commands run on it as if it were there."""

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.address = f"{NETWORK}.{number}"
        self.port = f"sw{number}"  # its place at the switch
        self.pid = 0  # of its first process, seen from outside

    def start(self, stack: ExitStack, switch: int, hosts: Path) -> None:
        """Boot it, with a cable to the switch; its host name leads to 127.0.1.1, as on Debian."""
        boot = f"hostname {self.name} && mount --bind {hosts} /etc/hosts && echo up && exec sleep infinity"
        self.pid = stack.enter_context(_held("--net", "--uts", "--pid", "--mount", "--mount-proc", command=boot))
        _run(
            "ip",
            "link",
            "add",
            "eth0",
            "netns",
            str(self.pid),
            "type",
            "veth",
            "peer",
            "name",
            self.port,
            "netns",
            str(switch),
        )
        inside(switch, "ip", "link", "set", self.port, "master", "br0", "up")
        inside(self.pid, "ip", "addr", "add", f"{self.address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            inside(self.pid, "ip", "link", "set", device, "up")

    def command(self, *words: str) -> list[str]:
        """Words that run a command on this machine."""
        return ["nsenter", "--target", str(self.pid), "--net", "--uts", "--pid", "--mount", *words]

    def popen(self, *words: str, log: Path, cwd: Path, **environment: str) -> subprocess.Popen[bytes]:
        """Start a command whose output goes to a file."""
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **environment}
        with log.open("ab") as output:
            command = [*self.command("env", "-C", str(cwd), *words)]
            return subprocess.Popen(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=variables)

    def run(self, *words: str) -> str:
        """Run a command and return what it prints."""
        return subprocess.run(self.command(*words), check=True, capture_output=True, text=True, timeout=_LIMIT_S).stdout

    def processes(self, word: str) -> list[int]:
        """Numbers, on this machine, of processes with a word in their command line."""
        found = subprocess.run(self.command("pgrep", "-f", word), capture_output=True, text=True, timeout=_LIMIT_S)
        return [int(line) for line in found.stdout.split()]

    def signal(self, word: str, signum: int) -> None:
        """Send a signal to all processes with a word in their command line."""
        found = [str(pid) for pid in self.processes(word)]
        subprocess.run(self.command("kill", f"-{signum}", *found), capture_output=True, timeout=_LIMIT_S)

    def listening(self) -> list[str]:
        """Addresses on which somebody listens."""
        return [line.split()[3] for line in self.run("ss", "-ltnH").splitlines()]

    def reset(self, chosen: str) -> int:
        """Break connections of this machine, as a box on the way may do, and return how many: both ends see a reset.

        Args:
            chosen: a filter of `ss`.
        """
        broken = self.run("ss", "-HtnK", "state", "connected", *chosen.split())
        return len(broken.splitlines())

    def die(self) -> None:
        """Cut its power."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


class Site:
    """Machines and the switch between them."""

    def __init__(self, machines: Sequence[Machine], switch: int) -> None:
        self.machines = list(machines)
        self._switch = switch

    def unplug(self, machine: Machine) -> None:
        """Pull the cable of a machine: nobody is told."""
        inside(self._switch, "ip", "link", "set", machine.port, "nomaster")

    def plug(self, machine: Machine) -> None:
        """Put the cable back."""
        inside(self._switch, "ip", "link", "set", machine.port, "master", "br0")


@contextmanager
def machines(*names: str) -> Iterator[Site]:
    """Boot machines with these names; nothing of them is left after the block."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="realrl-machines-")))
        switch = stack.enter_context(_held("--net", command="echo up && exec sleep infinity"))
        inside(switch, "ip", "link", "add", "br0", "type", "bridge")
        inside(switch, "ip", "link", "set", "br0", "up")
        made = []
        for number, name in enumerate(names, 1):
            hosts = folder / f"hosts-{name}"
            hosts.write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n")
            machine = Machine(name, number)
            machine.start(stack, switch, hosts)
            made.append(machine)
        yield Site(made, switch)


def inside(pid: int, *words: str) -> None:
    """Run a command in the network of a process."""
    _run("nsenter", "--target", str(pid), "--net", *words)


def python() -> str:
    """The interpreter of this environment."""
    return sys.executable


@contextmanager
def _held(*namespaces: str, command: str) -> Iterator[int]:
    """Run a process in new namespaces, and give its number when it says that it is up."""
    holder = subprocess.Popen(
        ["unshare", *namespaces, "--fork", "--kill-child", "sh", "-c", command], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    with holder.stdout as said:
        assert said.readline() == "up\n", "a machine did not boot"
    pid = int(Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()[0])
    try:
        yield pid
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        holder.wait(_LIMIT_S)


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=_LIMIT_S)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
