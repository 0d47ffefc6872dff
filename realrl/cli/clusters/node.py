"""``realrl node``: this machine takes part in a run on several machines."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from realrl.cli.clusters.jobs import following, is_surplus, place_in_job
from realrl.errors import UsageError

EXAMPLES = """\
examples:
  realrl node --join ~/.cache/realrl/join/ppo-....json   as `realrl run ... launcher=external` tells it
  REALRL_KEY=... realrl node 10.0.0.1:29500              the same without a file
  realrl node --new-key                                  a key, for REALRL_KEY of the run and of its machines

The run says how many machines it needs, and starts its workers when they are there. A machine that is left over is a
spare. In a job of SLURM, torchrun, mpirun or Kubernetes `realrl run` starts agents itself: docs/clusters.md.
Exit codes: that of the run; 2 if it refused this machine; 75 if its master is gone.
"""


_PATIENCE_S = 300.0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message, remedy=f"See: {self.prog} --help")


def node(arguments: Sequence[str]) -> int:
    """``realrl node``: join a run, and start this machine's workers."""
    parser = _Parser(
        prog="realrl node",
        description="Let this machine take part in a run with launcher=external.",
        epilog=EXAMPLES,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("place", metavar="HOST:PORT", nargs="?", help="where the run's master listens")
    parser.add_argument("--join", metavar="FILE", help="file with address and key, which the run has written")
    parser.add_argument("--new-key", action="store_true", help="print a new key, and do nothing else")
    parser.add_argument("--with-parent", action="store_true", help=argparse.SUPPRESS)  # end with who holds stdin
    parser.add_argument("--index", metavar="I", type=int, help="number of this machine, from 0; default: its job's")
    parser.add_argument(
        "--patience",
        metavar="S",
        type=float,
        help=f"seconds to wait for a master; default {_PATIENCE_S:g}, or 0 once the run that this has joined is gone",
    )
    options = parser.parse_args(arguments)
    from realrl.runtime.nodes.key import KEY_VARIABLE, new_key, read_join_file, take_key

    if options.new_key:
        print(new_key().hex())
        return 0
    if (options.place is None) == (options.join is None):
        raise UsageError(
            "realrl node needs HOST:PORT or --join FILE, one of them",
            remedy="`realrl run` with launcher=external tells it.",
        )
    if options.index is not None and options.index < 0:
        raise UsageError(f"--index {options.index} is no number of a machine", remedy="They begin with 0.")
    patience_s = _PATIENCE_S if options.patience is None else options.patience
    if not 1 <= patience_s <= 1e6:
        raise UsageError(f"--patience {patience_s:g} is no time to wait", remedy="Give it in seconds, from 1 on.")
    if options.with_parent:
        from realrl.runtime.processes.lifeline import die_with_parent, take_stdin

        die_with_parent(take_stdin(), death_signal=signal.SIGKILL, on_parent_gone=lambda: os._exit(1))
    key, place = take_key(), options.place
    job = place_in_job()
    if is_surplus(job):
        return 0
    if options.join is not None:
        place, key = read_join_file(Path(options.join))
    if key is None:
        raise UsageError(
            f"there is no key: the environment has no {KEY_VARIABLE}",
            remedy="Use --join FILE, or set it to that of the run.",
        )
    from realrl.runtime.nodes.agent import JobPlace, run_agent

    index = options.index if options.index is not None or job is None else job.index
    n_machines = job.n_machines if job is not None and job.is_everywhere else 0  # else other jobs may join, too
    machine = JobPlace(index, n_machines)
    find = (lambda: None) if options.join is None else following(Path(options.join))
    outlives_run = options.patience is not None
    return run_agent(place, key, machine, patience_s=patience_s, outlives_run=outlives_run, find=find)
