"""Kill processes of runs at many moments: they must finish by themselves with the weights of a quiet run.

    python scripts/fault_campaign.py [--kills 30] [--per-run 6] [--seed 0] [--what ppo|grpo|supervisor] [key=value ...]

Each run has several kills. For every kill a victim and a kind of moment are drawn: generation, transfer of rows,
reallocation of parameters, optimizer step, writing of a checkpoint. A thread in every worker tells at which moment it
is, from the stacks of the others, and the script sends SIGKILL at the right one. (It does not ask for the stacks by a
signal: faulthandler, which writes them at once, crashes a process now and then that is not stuck.)

- ppo: workers and the master are killed;
- grpo: processes that run reward functions as well, which are replaced without a restart; calls run two steps ahead;
- supervisor: the process that the user started is killed: all others must end, and the same command with resume=auto
  continues.

Runs use a copy of the code, for one that is started again would pick up what was edited meanwhile. The table says where
the processes really were, by the last look before the kill, what became of the run, and what it told of the loss. The
exit code is 1 if a run did not finish, has other weights or was started again without a kill.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import random
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from realrl.errors import Error
from realrl.runtime.output.json_lines import last_step
from realrl.runtime.processes.lifeline import find_leftovers

ROOT = Path(__file__).resolve().parent.parent
MOMENTS = ("generation", "transfer", "realloc", "optimizer step", "checkpoint writing")
WORKERS_AND_MASTER = ("worker 0", "worker 1", "master")
REWARDS = ("reward server", "reward worker")  # the process that forks the others, and one of the others
STEPS_PER_KILL = 3
PATIENCE_STEPS = 2  # steps to wait for a moment; then the kill happens at any moment
LIMIT_S = 600.0  # time in which a run must continue after a kill
END_LIMIT_S = 30.0  # time in which all processes must end after the death of their supervisor
MARK = "REALRL_CAMPAIGN"
BY_HAND = "\nrestart by hand: the supervisor was killed;\n"
SLOW_REWARD = """
import time

from realrl.data.tiny import toy_reward


def score(prompt_ids, response_ids):
    time.sleep(0.05)
    return toy_reward(prompt_ids, response_ids)
"""


# The file sitecustomize.py of the runs' code: Python imports it at the start of every process.
WATCH = """
import os
import sys
import threading
import time

SIGNS = {signs!r}


def moment():
    frames = [frame for ident, frame in sys._current_frames().items() if ident != threading.get_ident()]
    lines = []
    for frame in frames:
        while frame is not None:
            lines.append(f"{{frame.f_code.co_filename}} in {{frame.f_code.co_name}}")
            frame = frame.f_back
    found = (name for name, file, function in SIGNS if any(file in line and function in line for line in lines))
    return next(found, "waiting")


def watch(path):
    told = None
    while True:
        now = f"{{os.getpid()}} {{moment()}}"
        if now != told:
            with open(path + ".new", "w") as file:
                file.write(now)
            os.replace(path + ".new", path)
            told = now
        time.sleep(0.005)


if "realrl.runtime.processes.main" in sys.orig_argv and "--rank" in sys.orig_argv:
    rank = sys.orig_argv[sys.orig_argv.index("--rank") + 1]
    threading.Thread(target=watch, args=(os.environ["{mark}_MOMENT"] + rank,), daemon=True).start()
"""


@dataclass(frozen=True)
class Scenario:
    """A run, and the pairs of victim and moment that kills are drawn from."""

    experiment: str
    overrides: tuple[str, ...]
    targets: tuple[tuple[str, str], ...]


COMMON = (
    "preset=tiny", "n_seqs=8", "generation.max_new_tokens=12", "save.every_steps=1", "cluster.n_devices_per_node=2",
    "allocation=split", "recover.retries=100",
)  # fmt: skip
PPO = (
    *COMMON,
    "algorithm.n_minibatches=2",
    "allocation.calls.actor_gen=d2@0:0-1",
    "allocation.calls.critic_inf=d1@0:0",
)
GRPO = (*COMMON, "generation.n_responses=2", "max_staleness=2")
KILLS = tuple((victim, moment) for moment in MOMENTS for victim in WORKERS_AND_MASTER)
SCENARIOS = {
    "ppo": Scenario("ppo", PPO, KILLS),
    "grpo": Scenario("grpo", GRPO, KILLS + tuple((victim, "rewards") for victim in REWARDS) * 3),
    "supervisor": Scenario("ppo", PPO, tuple(("supervisor", moment) for moment in MOMENTS)),
}
# Moments by their stacks, most telling first: a part of a file's path, and of the text " in " and a function's name.
SIGNS = (
    ("checkpoint writing", "checkpoints/writer.py", "_write"),
    ("checkpoint writing", "checkpoints/writer.py", "save"),
    ("optimizer step", "engine/backends/", " in step"),
    ("realloc", "hook_runner.py", ""),
    ("transfer", "call_runner.py", "_pull"),
    ("transfer", "model_worker.py", " in fetch"),
    ("transfer", "engine/row_exchange.py", ""),
    ("generation", "engine/generate/", ""),
    ("rewards", "rewards/pool.py", ""),
    ("training", "engine/decoder_engine.py", "train_batch"),
    ("inference", "engine/decoder_engine.py", " in forward"),
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
    told: str = ""

    @property
    def is_survived_without_restart(self) -> bool:
        return self.victim in REWARDS

    def __str__(self) -> str:
        return (
            f"{self.step:>4}  {self.victim:<13} {self.wanted:<18} {self.seen:<44} {self.outcome:<12} "
            f"{self.seconds:>6.1f}  {self.told}"
        )


class Run:
    """A supervised run in processes of its own."""

    def __init__(self, run_dir: Path, scenario: Scenario, *overrides: str) -> None:
        self.run_dir = run_dir
        self._code = run_dir.parent / "code"
        self._mark = secrets.token_hex(8)
        self._pids: dict[str, int] = {}
        self._moments = run_dir.with_suffix(".moment")
        self._output, self._errors = run_dir.with_suffix(".out"), run_dir.with_suffix(".err")
        command = [sys.executable, "-m", "realrl", "run", scenario.experiment, *scenario.overrides, *overrides]
        self._command = [*command, f"run_dir={run_dir}"]
        self.process = self._start()

    def _start(self, *overrides: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "PYTHONPATH": str(self._code), "OMP_NUM_THREADS": "1", MARK: self._mark}
        environment[f"{MARK}_MOMENT"] = str(self._moments)
        with self._output.open("ab") as output, self._errors.open("ab") as errors:
            return subprocess.Popen(
                [*self._command, *overrides],
                cwd=self._code,
                stdout=output,
                stderr=errors,
                env=environment,
                start_new_session=True,
            )

    def continue_by_hand(self) -> float | None:
        """Wait for all processes to end after the death of the supervisor, then continue the run.

        Returns the seconds until they had ended; None if some did not.
        """
        self.process.wait()
        start_s = time.monotonic()
        while find_leftovers(MARK, self._mark):
            if time.monotonic() > start_s + END_LIMIT_S:
                return None
            time.sleep(0.01)
        ended_s = time.monotonic() - start_s
        with self._output.open("a") as output:
            output.write(BY_HAND)
        self.process = self._start("resume=auto")
        return ended_s

    @property
    def errors(self) -> str:
        return self._errors.read_text()

    @property
    def is_over(self) -> bool:
        return self.process.poll() is not None

    @property
    def step(self) -> int:
        """The last step in metrics.jsonl; -1 while that file is being rewritten."""
        try:
            return last_step(self.run_dir / "metrics.jsonl")
        except (OSError, Error):
            return -1

    @property
    def attempts(self) -> list[str]:
        """Output of every attempt."""
        return self._output.read_text().split("\nrestart ")

    def pid(self, who: str) -> int | None:
        """Process id of a victim; None while it is not up."""
        if who == "supervisor":
            return self.process.pid
        known = self._pids.get(who)
        if known is not None and _is_alive(known):
            return known
        for pid in find_leftovers(MARK, self._mark):
            if _role(pid) == who:
                self._pids[who] = pid
                return pid
        return None

    def moments(self) -> dict[str, str]:
        """Current moment of each worker; workers that are not up are left out."""
        found = {}
        for rank in (0, 1):
            try:
                pid, _, moment = Path(f"{self._moments}{rank}").read_text().partition(" ")
            except OSError:
                continue
            if int(pid) == self.pid(f"worker {rank}"):
                found[f"worker {rank}"] = moment
        return found

    def clean_up(self) -> None:
        for pid in find_leftovers(MARK, self._mark):
            os.kill(pid, signal.SIGKILL)
        self.process.wait()


def _role(pid: int) -> str:
    """Role of a process in its run."""
    words = _command_line(pid)
    if "realrl.rewards.server" in words:
        return "reward worker" if "realrl.rewards.server" in _command_line(_parent(pid)) else "reward server"
    if "realrl.runtime.processes.main" not in words:
        return ""
    return f"worker {words[words.index('--rank') + 1]}" if "--rank" in words else "master"


def _command_line(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _is_alive(pid: int) -> bool:
    """True if a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def strike(run: Run, kill: Kill, armed_after: int) -> None:
    """Wait until the run is at the kill's step and moment, then kill."""
    while run.step < armed_after and not run.is_over:
        time.sleep(0.02)
    seen: dict[str, str] = {}
    while not run.is_over:
        time.sleep(random.random() * 0.005)
        seen = run.moments()
        at = [seen[kill.victim]] if kill.victim in seen else [] if kill.victim.startswith("worker") else seen.values()
        pid = run.pid(kill.victim)
        if pid is not None and (kill.wanted in at or run.step >= armed_after + PATIENCE_STEPS):
            os.kill(pid, signal.SIGKILL)
            break
    kill.step = run.step + 1
    kill.seen = seen.get(kill.victim) or ", ".join(f"{who}: {what}" for who, what in seen.items())


def wait_for_progress(run: Run, kill: Kill, n_attempts: int) -> None:
    """Wait until the attempt after the kill has done the step of the kill, or the run is over."""
    start_s, is_past = time.monotonic(), False
    if kill.victim == "supervisor":
        ended_s = run.continue_by_hand()
        if ended_s is None:
            kill.outcome = "left processes"
            return
        kill.told = f"all processes ended within {ended_s:.1f} s; "
    n_expected = n_attempts + (not kill.is_survived_without_restart)
    while not is_past and not run.is_over and time.monotonic() < start_s + LIMIT_S:
        time.sleep(0.05)
        attempts = run.attempts
        steps = [int(step) for step in re.findall(r"^step (\d+)/", attempts[-1], re.MULTILINE)]
        is_past = len(attempts) >= n_expected and max(steps, default=0) >= kill.step
    kill.seconds = time.monotonic() - start_s
    is_past |= run.process.poll() == 0
    kill.outcome = "went on" if is_past else f"ended with {run.process.poll()}" if run.is_over else "stuck"
    later = run.attempts[n_attempts:]
    if len(later) != n_expected - n_attempts:
        kill.outcome = f"{len(later)} restarts"
    kill.told += "; ".join(re.sub(r"^\d+ of \d+: ", "", attempt.splitlines()[0]) for attempt in later)


def digest(run_dir: Path) -> dict[str, str]:
    """Path -> SHA-256 of every tensor file of the newest checkpoint."""
    folder = run_dir / "checkpoints" / "latest"
    files = sorted(folder.rglob("*.safetensors"))
    return {str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def main() -> int:
    """Run the campaign; returns 0 if every run finished with the right weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--per-run", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--what", choices=SCENARIOS, default="ppo")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="a new folder for runs and what they told")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="further settings of the runs")
    options = parser.parse_args()
    random.seed(options.seed)
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))  # after cleaning up
    with contextlib.ExitStack() as stack:
        if options.keep is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="realrl-faults-")))
        else:
            folder = options.keep.absolute()
            folder.mkdir(parents=True)
        return campaign(folder, options)


def campaign(folder: Path, options: argparse.Namespace) -> int:
    """Do a quiet run, then the runs with kills."""
    scenario, overrides = SCENARIOS[options.what], list(options.overrides)
    for package in ("realrl", "experiments", "configs"):
        shutil.copytree(ROOT / package, folder / "code" / package, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "code" / "sitecustomize.py").write_text(WATCH.format(signs=SIGNS, mark=MARK))
    if scenario.experiment == "grpo":
        (folder / "slow_reward.py").write_text(SLOW_REWARD)
        overrides.insert(0, f"algorithm.reward_function={folder / 'slow_reward.py'}:score")
    targets = list(scenario.targets)
    random.shuffle(targets)
    targets *= options.kills // len(targets) + 1
    kills = [Kill(*target) for target in targets[: options.kills]]
    n_steps = STEPS_PER_KILL * options.per_run + 2
    overrides.append(f"steps={n_steps}")
    quiet = Run(folder / "quiet", scenario, *overrides)
    try:
        assert quiet.process.wait() == 0, quiet.errors
    finally:
        quiet.clean_up()
    expected = digest(quiet.run_dir)
    print(f"quiet run: {n_steps} steps, {len(expected)} tensor files", flush=True)
    titles = f"{'run':>3} {'step':>4}  {'victim':<13} {'wanted':<18} {'was at':<44} {'outcome':<12} seconds  told"
    print(titles, flush=True)
    is_good = True
    for number, first in enumerate(range(0, len(kills), options.per_run), 1):
        run = Run(folder / f"run{number}", scenario, *overrides)
        try:
            is_good &= hurt(number, run, n_steps, kills[first : first + options.per_run], expected)
        finally:
            run.clean_up()
    struck = sum(kill.wanted in kill.seen for kill in kills)
    went_on = sum(kill.outcome == "went on" for kill in kills)
    print(f"{went_on} of {len(kills)} kills were survived; {struck} hit the wanted moment")
    return 0 if is_good and went_on == len(kills) else 1


def hurt(number: int, run: Run, n_steps: int, kills: Sequence[Kill], expected: dict[str, str]) -> bool:
    """Do one run with its kills; True if it ended by itself with the right weights."""
    try:
        for place, kill in enumerate(kills):
            n_attempts = len(run.attempts)
            strike(run, kill, place * STEPS_PER_KILL + 1)
            wait_for_progress(run, kill, n_attempts)
            print(f"{number:>3} {kill}", flush=True)
        exit_code = run.process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        print(f"{number:>3} did not finish within {LIMIT_S:.0f} s\n{run.errors[-2000:]}", flush=True)
        return False
    found = digest(run.run_dir)
    steps = [line.split(",")[0] for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    has_all_steps = len(steps) == len(set(steps)) == n_steps
    is_equal = exit_code == 0 and found == expected and has_all_steps
    different = [path for path in expected if found.get(path) != expected[path]]
    told = "bit-equal to the quiet run" if is_equal else f"exit code {exit_code}, different: {different}"
    n_restarts, n_expected = len(run.attempts) - 1, sum(not kill.is_survived_without_restart for kill in kills)
    print(f"{number:>3} ended by itself, {len(steps)} rows of metrics, {n_restarts} restarts: {told}", flush=True)
    if exit_code != 0:
        print(run.errors[-4000:], flush=True)
    return is_equal and n_restarts == n_expected


if __name__ == "__main__":
    sys.exit(main())
