"""Small checks of this machine's GPU, each in a process of its own, with one line of JSON each.

    python scripts/gpu_check.py                        # all; exit code 1 if one does not hold
    python scripts/gpu_check.py versions attention     # some

A line has the check's name, whether it holds ("yes" or "no"), a reason for "no", figures, the seconds that it took and
its limit: a check that takes longer does not hold. Without a GPU the same checks run on the CPU, with figures that have
a meaning there; the others read "skipped: " and the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.gpu_checks import engines, hardware, runs  # noqa: E402
from scripts.gpu_checks.common import DoesNotHoldError, Figures  # noqa: E402


@dataclass(frozen=True)
class Check:
    """A check, and the longest that it may take on a busy machine, the start of its process included."""

    run: Callable[[], Figures]
    limit_s: float


CHECKS: Mapping[str, Check] = {
    "versions": Check(hardware.versions, 120),
    "collectives_of_one_rank": Check(hardware.collectives_of_one_rank, 120),
    "collectives_of_two_ranks": Check(hardware.collectives_of_two_ranks, 240),
    "host_staged_2": Check(lambda: runs.staged(2, "allocation.mode=tensor"), 480),
    "host_staged_4": Check(
        lambda: runs.staged(4, "allocation.mode=d1t2p2", "allocation.calls.actor_gen=d2t2@0:0-3"), 600
    ),
    "attention": Check(hardware.attention, 240),
    "logprobs_of_generation": Check(engines.logprobs_of_generation, 120),
    "decode_step": Check(engines.decode_step, 240),
    "fragmentation": Check(engines.fragmentation, 120),
    "train_step": Check(engines.train_step, 240),
    "head_chunks": Check(engines.head_chunks, 240),
    "saving": Check(engines.saving, 120),
    "offload_overlap": Check(engines.offload_overlap, 120),
    "two_equal_runs": Check(runs.two_equal_runs, 480),
    "ppo_killed_and_resumed": Check(lambda: runs.killed_and_resumed("ppo"), 600),
    "grpo_killed_and_resumed": Check(lambda: runs.killed_and_resumed("grpo"), 600),
}


def outcome(name: str, run: Callable[[], Figures]) -> dict[str, Any]:
    """Do one check here; any error means that it does not hold."""
    try:
        return {"name": name, "holds": "yes", "figures": run()}
    except DoesNotHoldError as reason:
        return {"name": name, "holds": "no", "reason": str(reason), "figures": reason.figures}
    except Exception as error:  # noqa: BLE001 - the line says what happened
        return {"name": name, "holds": "no", "reason": f"{type(error).__name__}: {error}"[:600], "figures": {}}


def outcome_apart(name: str, limit_s: float) -> dict[str, Any]:
    """Do one check in a process of its own, which ends with all that it started."""
    command = [sys.executable, "-m", "scripts.gpu_check", "--here", name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True, cwd=ROOT) as process:
        try:
            lines = process.communicate(timeout=limit_s)[0].splitlines()
            reason = f"its process ended with {process.returncode}"
        except subprocess.TimeoutExpired:
            lines, reason = [], f"it took longer than {limit_s:g} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    found: dict[str, Any] = {"name": name, "holds": "no", "reason": reason, "figures": {}}
    return json.loads(lines[-1]) if lines else found


def main(arguments: list[str] | None = None) -> int:
    """Do the named checks, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="CHECK", help=f"of {', '.join(CHECKS)}")
    parser.add_argument("--here", action="store_true", help="do the checks in this process, without a limit")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in CHECKS]
    if unknown:
        parser.error(f"no such check: {', '.join(unknown)}")
    is_fine = True
    for name in options.names or CHECKS:
        check, start_s = CHECKS[name], time.perf_counter()
        found = outcome(name, check.run) if options.here else outcome_apart(name, check.limit_s)
        found |= {"seconds": round(time.perf_counter() - start_s, 1), "limit_s": check.limit_s}
        print(json.dumps(found), flush=True)
        is_fine &= found["holds"] != "no"
    return 0 if is_fine else 1


if __name__ == "__main__":
    sys.exit(main())
