"""The actor on each machine of a Ray cluster: it starts an agent as a process of its own, and waits for its end.

An actor imports this by name, so it needs nothing but Python, and is fast.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

from realrl.runtime.processes.lifeline import framed

_THREADS = "OMP_NUM_THREADS"
_ERROR = "realrl: error: "


class AgentHolder:
    """Starts agents, one after another. Its process is the parent of the agent: both end together."""

    def machine(self) -> str:
        """Host name of this machine."""
        return socket.gethostname()

    def __init__(self) -> None:
        self._agent: subprocess.Popen[bytes] | None = None
        self._said = ""

    def start(self, start: bytes) -> None:
        """Start an agent, after the end of the one before.

        Must run in the thread that lives as long as this process, the main one, as methods of actors do.

        Args:
            start: an `AgentStart`, for the agent alone to read.
        """
        self._agent, self._said = None, ""
        command = [sys.executable, "-P", "-m", "realrl.runtime.ray.agent"]
        self._agent = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=own_environment()
        )
        assert self._agent.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # dead already, as its exit code tells
            os.write(self._agent.stdin.fileno(), framed(start))

    def wait(self) -> tuple[int, str]:
        """Wait for the end of the agent; returns its exit code (negative ones are signals), and its error or last line.

        May be called again, by who has not got the answer.
        """
        agent = self._agent
        if agent is None or agent.stdin is None or agent.stdout is None:
            raise RuntimeError("the process of the agent could not be started")
        if not agent.stdin.closed:
            for line in agent.stdout:
                text = line.decode(errors="replace").rstrip()
                print(text, flush=True)  # into Ray's log of this actor
                is_less = self._said.startswith(_ERROR) and not text.startswith(_ERROR)
                self._said = self._said if is_less else text[:500]
            agent.stdin.close()
            agent.stdout.close()
        return agent.wait(), self._said


def own_environment() -> dict[str, str]:
    """Return the environment for an agent: without the number of threads that Ray has set for the actor.

    Ray sets as many as the actor has CPUs, which is not what one of several workers on them should take.
    """
    environment = dict(os.environ)
    given = Path("/proc/self/environ").read_bytes().split(b"\0")  # of the process, as it was started
    if not any(entry.startswith(f"{_THREADS}=".encode()) for entry in given):
        environment.pop(_THREADS, None)
    return environment
