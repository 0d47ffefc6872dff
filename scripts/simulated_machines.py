"""Machines that share this one: network namespaces, joined by a link of limited rate. Needs root, `ip` and `tc`."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

_CLONE_NEWNET = 0x40000000
_BURST_BYTES = 256 << 10  # that may go at once: a few segments of the largest size


@contextmanager
def two_machines(mb_per_s: float) -> Iterator[tuple[str, str]]:
    """Make two namespaces whose link carries `mb_per_s` (1e6 bytes) in each direction; they go with the block.

    Raises:
        SystemExit: this user may not make namespaces, or `ip` or `tc` is missing or failed; says what it said.
    """
    names = (f"realrl-{os.getpid()}-0", f"realrl-{os.getpid()}-1")
    with ExitStack() as stack:
        for name in names:
            _run("ip", "netns", "add", name)
            stack.callback(subprocess.run, ["ip", "netns", "del", name], check=False)
        ends = [["netns", name] for name in names]
        _run("ip", "link", "add", "link0", *ends[0], "type", "veth", "peer", "name", "link1", *ends[1])
        for number, name in enumerate(names):
            _run("ip", "-n", name, "addr", "add", f"10.0.0.{number + 1}/24", "dev", f"link{number}")
            for device in ("lo", f"link{number}"):
                _run("ip", "-n", name, "link", "set", device, "up")
            rate = ["rate", f"{round(mb_per_s * 8e3)}kbit", "burst", str(_BURST_BYTES), "latency", "400ms"]
            limit = ["tc", "qdisc", "add", "dev", f"link{number}", "root", "tbf", *rate]
            _run("ip", "netns", "exec", name, *limit)
        yield names


def enter_machine(name: str, number: int) -> None:
    """Move this process, which must have a single thread, to a namespace; gloo then uses its end of the link."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}") as namespace:
        if libc.setns(namespace.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {name}")
    os.environ["GLOO_SOCKET_IFNAME"] = f"link{number}"


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        said = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else str(error)
        raise SystemExit(f"cannot simulate machines: {' '.join(command)}: {said}") from error
