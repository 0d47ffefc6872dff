"""Kill a worker or the master of a PPO run at many moments: it must finish by itself with the weights of a quiet run.

    python scripts/fault_campaign.py [--kills 30] [--per-run 6] [--seed 0]

Each run has several kills. For every kill a victim and a kind of moment are drawn: generation, transfer of rows,
reallocation of parameters, optimizer step, writing of a checkpoint. The script asks the workers for their stacks
(SIGUSR1) until one is at such a moment, and sends SIGKILL. The table says where the processes really were, by the last
stacks before the kill, and what became of the run. Exit code 1 if a run did not finish or has other weights.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from realrl.errors import Error
from realrl.runtime.json_lines import last_step
from realrl.runtime.lifeline import find_leftovers

MOMENTS = ("generation", "transfer", "realloc", "optimizer step", "checkpoint writing")
VICTIMS = ("worker 0", "worker 1", "master")
STEPS_PER_KILL = 3
PATIENCE_STEPS = 2  # to wait for a moment; then the kill happens wherever the processes are
LIMIT_S = 600.0  # for a run to go on after a kill
MARK = "REALRL_CAMPAIGN"
PPO = (
    "preset=tiny", "n_seqs=8", "generation.max_new_tokens=12", "algorithm.n_minibatches=2", "save.every_steps=1",
    "cluster.n_devices_per_node=2", "allocation=split", "allocation.calls.actor_gen=d2@0:0-1",
    "allocation.calls.critic_inf=d1@0:0", "recover.retries=100",
)  # fmt: skip
# What a stack tells, most telling first: a part of a file's name and of a function's.
SIGNS = (
    ("checkpoint writing", "checkpoint_writer.py", "_write"),
    ("checkpoint writing", "checkpoint_writer.py", "save"),
    ("optimizer step", "engine/backends/", " in step"),
    ("realloc", "hook_runner.py", ""),
    ("transfer", "call_runner.py", "_pull"),
    ("transfer", "model_worker.py", " in fetch"),
    ("generation", "engine/generate/", ""),
    ("training", "engine/native.py", "train_batch"),
    ("inference", "engine/native.py", " in forward"),
    ("starting", "model_worker.py", "_initialize"),
)


@dataclass
class Kill:
    """One kill and what followed."""

    victim: str
    wanted: str
    seen: str = ""
    step: int = 0
    outcome: str = ""
    seconds: float = 0.0


class Run:
    """A supervised run in processes of its own."""

    def __init__(self, run_dir: Path, n_steps: int) -> None:
        self.run_dir = run_dir
        self._mark = secrets.token_hex(8)
        self._pids: dict[str, int] = {}
        self._output, self._errors = run_dir.with_suffix(".out"), run_dir.with_suffix(".err")
        command = [sys.executable, "-m", "realrl", "run", "ppo", *PPO, f"steps={n_steps}", f"run_dir={run_dir}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", MARK: self._mark}
        with self._output.open("wb") as output, self._errors.open("wb") as errors:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=errors, env=environment, start_new_session=True
            )

    @property
    def errors(self) -> str:
        """What it complained of."""
        return self._errors.read_text()

    @property
    def is_over(self) -> bool:
        return self.process.poll() is not None

    @property
    def step(self) -> int:
        """The last step in metrics.jsonl; -1 while that is being rewritten."""
        try:
            return last_step(self.run_dir / "metrics.jsonl")
        except (OSError, Error):
            return -1

    @property
    def attempts(self) -> list[str]:
        """What every attempt printed."""
        return self._output.read_text().split("\nrestart ")

    def pid(self, who: str) -> int | None:
        """Process id of "master" or "worker R"."""
        known = self._pids.get(who)
        if known is not None and _is_alive(known):
            return known
        wanted = f"worker\0--rank\0{who.split()[1]}\0" if who.startswith("worker") else "process\0master\0"
        for pid in find_leftovers(MARK, self._mark):
            try:
                if wanted in Path(f"/proc/{pid}/cmdline").read_text():
                    self._pids[who] = pid
                    return pid
            except OSError:
                continue
        return None

    def moments(self) -> dict[str, str]:
        """What each worker is at, from a stack that it is asked for; workers that are not up are left out."""
        found = {}
        for rank in (0, 1):
            pid, log = self.pid(f"worker {rank}"), self.run_dir / "logs" / f"worker_{rank}.log"
            if pid is None or not log.exists():
                continue
            offset = log.stat().st_size
            if not _catches_signal(pid):
                continue
            os.kill(pid, signal.SIGUSR1)
            time.sleep(0.003)
            with log.open("rb") as file:
                file.seek(offset)
                found[f"worker {rank}"] = classify(file.read().decode(errors="replace"))
        return found

    def clean_up(self) -> None:
        for pid in find_leftovers(MARK, self._mark):
            os.kill(pid, signal.SIGKILL)
        self.process.wait()


def _is_alive(pid: int) -> bool:
    """Whether a process is there, and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _catches_signal(pid: int) -> bool:
    """Whether a process has installed its handler of SIGUSR1, which would end it otherwise."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = int(next(line for line in status.splitlines() if line.startswith("SigCgt")).split()[1], 16)
    return bool(caught >> (signal.SIGUSR1 - 1) & 1)


def classify(stack: str) -> str:
    """The kind of moment that a dump of all threads shows."""
    for moment, file, function in SIGNS:
        if any(file in line and function in line for line in stack.splitlines()):
            return moment
    return "waiting" if stack else "unknown"


def strike(run: Run, kill: Kill, armed_after: int) -> None:
    """Wait until the run is that far and at the wanted moment, then kill."""
    while run.step < armed_after and not run.is_over:
        time.sleep(0.02)
    seen: dict[str, str] = {}
    while not run.is_over:
        time.sleep(random.random() * 0.01)
        seen = run.moments()
        at = seen.values() if kill.victim == "master" else [seen.get(kill.victim)]
        pid = run.pid(kill.victim)
        if pid is not None and (kill.wanted in at or run.step >= armed_after + PATIENCE_STEPS):
            os.kill(pid, signal.SIGKILL)
            break
    kill.step = run.step + 1
    kill.seen = seen.get(kill.victim) or ", ".join(f"{who}: {what}" for who, what in seen.items())


def wait_for_progress(run: Run, kill: Kill, n_attempts: int) -> None:
    """Wait until the attempt after the kill has done the step of the kill, or the run is over."""
    start_s, is_past = time.monotonic(), False
    while not is_past and not run.is_over and time.monotonic() < start_s + LIMIT_S:
        time.sleep(0.05)
        attempts = run.attempts
        steps = [int(step) for step in re.findall(r"^step (\d+)/", attempts[-1], re.MULTILINE)]
        is_past = len(attempts) > n_attempts and max(steps, default=0) >= kill.step
    kill.seconds = time.monotonic() - start_s
    is_past |= run.process.poll() == 0
    kill.outcome = "went on" if is_past else f"ended with {run.process.poll()}" if run.is_over else "stuck"


def digest(run_dir: Path) -> dict[str, str]:
    """Path -> SHA-256 of every tensor file of the newest checkpoint."""
    folder = run_dir / "checkpoints" / "latest"
    files = sorted(folder.rglob("*.safetensors"))
    return {str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def main() -> int:
    """Run the campaign; 0 if every run finished with the right weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--per-run", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    random.seed(options.seed)
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))  # after cleaning up
    pairs = [(victim, moment) for moment in MOMENTS for victim in VICTIMS] * (options.kills // 15 + 1)
    kills = [Kill(*pair) for pair in pairs[: options.kills]]
    random.shuffle(kills)
    n_steps = STEPS_PER_KILL * options.per_run + 2
    with tempfile.TemporaryDirectory(prefix="realrl-faults-") as folder:
        quiet = Run(Path(folder) / "quiet", n_steps)
        try:
            assert quiet.process.wait() == 0, quiet.errors
        finally:
            quiet.clean_up()
        expected = digest(quiet.run_dir)
        print(f"quiet run: {n_steps} steps, {len(expected)} tensor files", flush=True)
        print(
            f"{'run':>3} {'step':>4}  {'victim':<9} {'wanted':<19} {'was at':<44} {'outcome':<14} seconds", flush=True
        )
        is_good = True
        for number, first in enumerate(range(0, len(kills), options.per_run), 1):
            is_good &= hurt(
                number, Path(folder) / f"run{number}", n_steps, kills[first : first + options.per_run], expected
            )
    struck = sum(kill.wanted in kill.seen for kill in kills)
    went_on = sum(kill.outcome == "went on" for kill in kills)
    print(f"{went_on} of {len(kills)} kills were survived; {struck} hit the wanted moment")
    return 0 if is_good else 1


def hurt(number: int, run_dir: Path, n_steps: int, kills: list[Kill], expected: dict[str, str]) -> bool:
    """One run with its kills; whether it ended by itself with the right weights."""
    run = Run(run_dir, n_steps)
    try:
        for place, kill in enumerate(kills):
            n_attempts = len(run.attempts)
            strike(run, kill, place * STEPS_PER_KILL + 1)
            wait_for_progress(run, kill, n_attempts)
            print(
                f"{number:>3} {kill.step:>4}  {kill.victim:<9} {kill.wanted:<19} {kill.seen:<44} {kill.outcome:<14} "
                f"{kill.seconds:.1f}",
                flush=True,
            )
        exit_code = run.process.wait(LIMIT_S)
        found = digest(run_dir)
        steps = [line.split(",")[0] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        has_all_steps = len(steps) == len(set(steps)) == n_steps
        is_equal = exit_code == 0 and found == expected and has_all_steps
        different = [path for path in expected if found.get(path) != expected[path]]
        told = "bit-equal to the quiet run" if is_equal else f"exit code {exit_code}, different: {different}"
        print(f"{number:>3} ended by itself, {len(steps)} rows of metrics: {told}", flush=True)
        if exit_code != 0:
            print(run.errors[-4000:], flush=True)
        return is_equal
    except subprocess.TimeoutExpired:
        print(f"{number:>3} did not finish within {LIMIT_S:.0f} s\n{run.errors[-2000:]}", flush=True)
        return False
    finally:
        run.clean_up()


if __name__ == "__main__":
    sys.exit(main())
