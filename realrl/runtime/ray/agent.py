"""The process of an agent below an actor of Ray: `realrl node`, with its key and its lifeline on stdin."""

from __future__ import annotations

import os
import signal
import sys

import msgspec

from realrl.errors import UsageError
from realrl.runtime.nodes.agent import JobPlace, run_agent
from realrl.runtime.processes.lifeline import die_with_parent, read_framed, take_stdin
from realrl.runtime.ray.messages import AgentStart

_PATIENCE_S = 300.0  # without a master; where the run is over, the lifeline ends before


def main() -> int:
    """Join the run, and serve it to its end; returns the exit code. Ends at once with the actor."""
    lifeline = take_stdin()
    start = msgspec.msgpack.decode(read_framed(lifeline), type=AgentStart)
    die_with_parent(lifeline, death_signal=signal.SIGHUP, on_parent_gone=_hang_up)
    os.environ.setdefault("OMP_NUM_THREADS", str(start.n_threads))
    try:
        place = JobPlace(start.index, start.n_machines)
        return run_agent(start.place, start.key, place, patience_s=_PATIENCE_S)
    except UsageError as error:
        print(f"realrl: error: {error}", file=sys.stderr, flush=True)
        return error.exit_code


def _hang_up() -> None:
    """Have the agent end its workers and itself, as on the end of a terminal."""
    os.kill(os.getpid(), signal.SIGHUP)


if __name__ == "__main__":
    sys.exit(main())
