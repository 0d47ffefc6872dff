"""Kill, stop and interrupt runs at many moments: they must finish with the weights of a quiet run.

    python scripts/fault_campaign.py [--kills 30] [--pauses 0] [--interrupts 0] [--per-run 6] [--seed 0]
                                     [--what ppo|grpo|supervisor|mixed] [--nodes 2] [key=value ...]

Each run has several faults. For every fault a victim and a kind of moment are drawn: generation, transfer of rows,
reallocation of parameters, optimizer step, writing of a checkpoint. A thread in every worker tells at which moment it
is, from the stacks of the others, and the script sends the signal at the right one. (It does not ask for the stacks by
a signal: faulthandler, which writes them at once, crashes a process now and then that is not stuck.)

- ppo: workers and the master are killed;
- grpo: processes that run reward functions as well, which are replaced without a restart; calls run two steps ahead;
- supervisor: the process that the user started is killed: all others must end, and the same command with resume=auto
  continues;
- mixed: all of these, in the run with reward functions.

Pauses (SIGSTOP) are drawn over the same processes, and the whole run. A short one ends soon and changes nothing. A long
pause of the whole run, or of its supervisor, takes twice `cluster.worker_timeout_s`, and changes nothing either. Any
other process stays frozen: a worker or master is found and killed, and the run started again; a reward process is
replaced.

Interruptions are SIGINT or SIGTERM to the process that the user started, or SIGTERM to all, as job schedulers send it.
The run must finish its step, save it and end with 130 or 143; the same command with resume=auto continues. With
`--kills 0 --interrupts 20` only every other step is saved anyway.

With `--nodes 2` runs are over two machines, which are network namespaces of this one (needs root). `--kills` faults are
drawn over workers, agents, whole machines, the master, `realrl run` and the link, which is cut for 2 or 20 seconds or
has its connections reset; or somebody wants the machines back, and the run is queued again. After every run all process
lists must be empty.

Further settings of the runs may follow: `allocation.overlap=true allocation.offload_frozen=true` has parameters under
way while calls compute.

Runs use a copy of the code, for one that is started again would pick up what was edited meanwhile. The table says where
the processes really were, by the last look before the fault, what became of the run, and what it told of the loss. The
exit code is 1 if a run did not finish, has other weights or was not started again as often as it should be.
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
STEPS_PER_FAULT = 3
PATIENCE_STEPS = 2  # steps to wait for a moment; then the fault happens at any moment
LIMIT_S = 600.0  # time in which a run must continue after a fault
TIMEOUT_S = 12.0  # cluster.worker_timeout_s: a worker starts within it on a busy machine
SHORT_S = 2.0
KILL, SHORT, LONG = "kill", "short pause", "long pause"
INTERRUPTS = {
    "SIGINT": ("SIGINT", "supervisor"),
    "SIGTERM": ("SIGTERM", "supervisor"),
    "SIGTERM all": ("SIGTERM", "all"),
}
ALL = "all"
END_LIMIT_S = 30.0  # time in which all processes must end after the death of their supervisor
MARK = "REALRL_CAMPAIGN"
BY_HAND = "\nrestart by hand: the supervisor has ended;\n"
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
    """A run, and the pairs of victim and moment that faults are drawn from."""

    experiment: str
    overrides: tuple[str, ...]
    targets: tuple[tuple[str, str], ...]


COMMON = (
    "preset=tiny", "n_seqs=8", "generation.max_new_tokens=12", "save.every_steps=1", "cluster.n_devices_per_node=2",
    "allocation=split", "recover.retries=100", f"cluster.worker_timeout_s={TIMEOUT_S:g}",
)  # fmt: skip
PPO = (
    *COMMON,
    "algorithm.n_minibatches=2",
    "allocation.calls.actor_gen=d2@0:0-1",
    "allocation.calls.critic_inf=d1@0:0",
)
GRPO = (*COMMON, "generation.n_responses=2", "max_staleness=2")
TARGETS = tuple((victim, moment) for moment in MOMENTS for victim in WORKERS_AND_MASTER)
REWARD_TARGETS = tuple((victim, "rewards") for victim in REWARDS) * 3
SUPERVISOR_TARGETS = tuple(("supervisor", moment) for moment in MOMENTS)
SCENARIOS = {
    "ppo": Scenario("ppo", PPO, TARGETS),
    "grpo": Scenario("grpo", GRPO, TARGETS + REWARD_TARGETS),
    "supervisor": Scenario("ppo", PPO, SUPERVISOR_TARGETS),
    "mixed": Scenario("grpo", GRPO, TARGETS + REWARD_TARGETS + SUPERVISOR_TARGETS),
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
class Fault:
    """A kill or a pause, and what followed."""

    kind: str
    victim: str
    wanted: str
    seen: str = ""
    step: int = 0
    outcome: str = ""
    seconds: float = 0.0
    told: str = ""

    @property
    def restarts(self) -> bool:
        """True if the run is started again, by itself or by hand."""
        survivors = REWARDS if self.kind == KILL else (*REWARDS, "supervisor", ALL)
        return self.kind in INTERRUPTS or (self.kind != SHORT and self.victim not in survivors)

    def __str__(self) -> str:
        return (
            f"{self.step:>4}  {self.kind:<11} {self.victim:<13} {self.wanted:<18} {self.seen:<44} {self.outcome:<12} "
            f"{self.seconds:>6.1f}  {self.told}"
        )


class Run:
    """A supervised run in processes of its own."""

    def __init__(self, run_dir: Path, scenario: Scenario, *overrides: str) -> None:
        self.run_dir = run_dir
        self._code = run_dir.parent / "code"
        self.mark = secrets.token_hex(8)
        self._pids: dict[str, int] = {}
        self._moments = run_dir.with_suffix(".moment")
        self._output, self._errors = run_dir.with_suffix(".out"), run_dir.with_suffix(".err")
        command = [sys.executable, "-m", "realrl", "run", scenario.experiment, *scenario.overrides, *overrides]
        self._command = [*command, f"run_dir={run_dir}"]
        self.process = self._start()

    def _start(self, *overrides: str) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "PYTHONPATH": str(self._code), "OMP_NUM_THREADS": "1", MARK: self.mark}
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
        """Wait for all processes to end after the supervisor, then continue the run.

        Returns the seconds until they had ended; None if some did not.
        """
        self.process.wait()
        start_s = time.monotonic()
        while find_leftovers(MARK, self.mark):
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
        if who in ("supervisor", ALL):
            return self.process.pid
        known = self._pids.get(who)
        if known is not None and _is_alive(known):
            return known
        for pid in find_leftovers(MARK, self.mark):
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

    def strike(self, fault: Fault) -> None:
        """Kill or stop the victim; let it go on after a pause that ends."""
        if fault.kind == KILL or fault.kind in INTERRUPTS:
            self._signal(fault, signal.Signals[INTERRUPTS.get(fault.kind, ("SIGKILL",))[0]])
            return
        self._signal(fault, signal.SIGSTOP)
        if fault.kind == SHORT or fault.victim in ("supervisor", ALL):
            time.sleep(SHORT_S if fault.kind == SHORT else 2 * TIMEOUT_S)
            self._signal(fault, signal.SIGCONT)

    def _signal(self, fault: Fault, signum: signal.Signals) -> None:
        for pid in find_leftovers(MARK, self.mark) if fault.victim == ALL else [self.pid(fault.victim)]:
            with contextlib.suppress(ProcessLookupError):
                if pid is not None:
                    os.kill(pid, signum)

    def clean_up(self) -> None:
        for pid in find_leftovers(MARK, self.mark):
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


def strike(run: Run, fault: Fault, armed_after: int) -> bool:
    """Wait until the run is at the fault's step and moment, then do it; False if the run ended before."""
    while run.step < armed_after and not run.is_over:
        time.sleep(0.02)
    seen: dict[str, str] = {}
    while not run.is_over:
        time.sleep(random.random() * 0.005)
        seen = run.moments()
        at = (
            [seen[fault.victim]] if fault.victim in seen else [] if fault.victim.startswith("worker") else seen.values()
        )
        if run.pid(fault.victim) is not None and (fault.wanted in at or run.step >= armed_after + PATIENCE_STEPS):
            fault.step = run.step + 1
            run.strike(fault)
            fault.seen = seen.get(fault.victim) or ", ".join(f"{who}: {what}" for who, what in seen.items())
            return True
    fault.outcome = "came late"
    return False


def wait_for_progress(run: Run, fault: Fault, n_attempts: int) -> None:
    """Wait until the attempt after the fault has done the step of the fault, or the run is over."""
    start_s, is_past = time.monotonic(), False
    if fault.kind in INTERRUPTS:
        exit_code = run.process.wait(LIMIT_S)
        fault.told = f"ended with {exit_code} after {time.monotonic() - start_s:.1f} s; "
        if exit_code != 128 + signal.Signals[INTERRUPTS[fault.kind][0]]:
            fault.outcome = "lost its step"
            return
    if fault.kind in INTERRUPTS or (fault.victim == "supervisor" and fault.kind == KILL):
        ended_s = run.continue_by_hand()
        if ended_s is None:
            fault.outcome = "left processes"
            return
        fault.told += f"all processes ended within {ended_s:.1f} s; "
    n_expected = n_attempts + fault.restarts
    while not is_past and not run.is_over and time.monotonic() < start_s + LIMIT_S:
        time.sleep(0.05)
        attempts = run.attempts
        steps = [int(step) for step in re.findall(r"^step (\d+)/", attempts[-1], re.MULTILINE)]
        is_past = len(attempts) >= n_expected and max(steps, default=0) >= fault.step
    fault.seconds = time.monotonic() - start_s
    is_past |= run.process.poll() == 0
    fault.outcome = "went on" if is_past else f"ended with {run.process.poll()}" if run.is_over else "stuck"
    later = run.attempts[n_attempts:]
    if len(later) != n_expected - n_attempts:
        fault.outcome = f"{len(later)} restarts"
    fault.told += "; ".join(re.sub(r"^\d+ of \d+: ", "", attempt.splitlines()[0]) for attempt in later)


def digest(run_dir: Path) -> dict[str, str]:
    """Path -> SHA-256 of every tensor file of the newest checkpoint."""
    folder = run_dir / "checkpoints" / "latest"
    files = sorted(folder.rglob("*.safetensors"))
    return {str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def main() -> int:
    """Run the campaign; returns 0 if every run finished with the right weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--pauses", type=int, default=0)
    parser.add_argument("--interrupts", type=int, default=0)
    parser.add_argument("--per-run", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--what", choices=SCENARIOS, default="ppo")
    parser.add_argument("--nodes", type=int, choices=(1, 2), default=1, help="machines; two need root")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="a new folder for runs and what they told")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="further settings of the runs")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it, and their children
    random.seed(options.seed)
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))  # after cleaning up
    with contextlib.ExitStack() as stack:
        if options.keep is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="realrl-faults-")))
        else:
            folder = options.keep.absolute()
            folder.mkdir(parents=True)
        copy_code(folder / "code")
        if options.nodes == 1:
            return campaign(folder, options)
        from fault_machines import machine_campaign  # it imports this file

        return machine_campaign(folder, options.kills, options.per_run, options.overrides)


def copy_code(folder: Path) -> None:
    """Copy the code that runs use, with a thread in every worker that tells the moment."""
    for package in ("realrl", "experiments", "configs"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "sitecustomize.py").write_text(WATCH.format(signs=SIGNS, mark=MARK))


def campaign(folder: Path, options: argparse.Namespace) -> int:
    """Do a quiet run, then the runs with faults."""
    scenario, overrides = SCENARIOS[options.what], list(options.overrides)
    if scenario.experiment == "grpo":
        (folder / "slow_reward.py").write_text(SLOW_REWARD)
        overrides.insert(0, f"algorithm.reward_function={folder / 'slow_reward.py'}:score")
        overrides.insert(0, "algorithm.reward_timeout_s=3")
    pauses = [*scenario.targets, *((ALL, moment) for moment in MOMENTS)] * 2
    faults = [Fault(KILL, *target) for target in draw(scenario.targets, options.kills)]
    faults += [Fault((SHORT, LONG)[n % 2], *target) for n, target in enumerate(draw(pauses, options.pauses))]
    names = [list(INTERRUPTS)[n % len(INTERRUPTS)] for n in range(options.interrupts)]
    moments = draw([("", moment) for moment in MOMENTS], options.interrupts)
    faults += [Fault(name, INTERRUPTS[name][1], moment) for name, (_, moment) in zip(names, moments)]
    if not options.kills and not options.pauses:
        overrides.insert(0, "save.every_steps=2")
    random.shuffle(faults)
    n_steps = STEPS_PER_FAULT * options.per_run + 2
    overrides.append(f"steps={n_steps}")
    quiet = Run(folder / "quiet", scenario, *overrides)
    try:
        assert quiet.process.wait() == 0, quiet.errors
    finally:
        quiet.clean_up()
    expected = digest(quiet.run_dir)
    print(f"quiet run: {n_steps} steps, {len(expected)} tensor files", flush=True)
    titles = f"{'run':>3} {'step':>4}  {'fault':<11} {'victim':<13} {'wanted':<18} {'was at':<44} {'outcome':<12}"
    print(f"{titles} seconds  told", flush=True)
    is_good = True
    start_s = time.monotonic()
    for number, dealt in enumerate(deal(faults, options.per_run), 1):
        run = Run(folder / f"run{number}", scenario, *overrides)
        try:
            is_good &= hurt(number, run, n_steps, dealt, expected)
        finally:
            run.clean_up()
    for kind in (KILL, SHORT, LONG, *INTERRUPTS):
        those = [fault for fault in faults if fault.kind == kind]
        if those:
            went_on, struck = (sum(x) for x in zip(*((f.outcome == "went on", f.wanted in f.seen) for f in those)))
            is_good &= went_on == len(those)
            print(f"{kind}: {went_on} of {len(those)} were survived, {struck} hit the wanted moment")
    print(f"{len(faults)} faults took {(time.monotonic() - start_s) / 60:.0f} minutes")
    return 0 if is_good else 1


def draw(targets: Sequence[tuple[str, str]], n: int) -> list[tuple[str, str]]:
    """Draw `n` targets: each about equally often, in random order."""
    drawn: list[tuple[str, str]] = []
    while len(drawn) < n:
        drawn += random.sample(targets, len(targets))
    return drawn[:n]


def deal(faults: Sequence[Fault], per_run: int) -> list[list[Fault]]:
    """Share out the faults among runs; a long pause of a supervisor, in which its run goes on, is the last of a run."""
    last = [fault for fault in faults if fault.kind == LONG and fault.victim == "supervisor"]
    others = [fault for fault in faults if fault not in last]
    runs = []
    while others or last:
        n = per_run - bool(last)
        runs.append([*others[:n], *last[:1]])
        del others[:n], last[:1]
    return runs


def hurt(number: int, run: Run, n_steps: int, faults: Sequence[Fault], expected: dict[str, str]) -> bool:
    """Do one run with its faults; True if it ended by itself with the right weights, and nothing is left of it."""
    try:
        for place, fault in enumerate(faults):
            n_attempts = len(run.attempts)
            if strike(run, fault, place * STEPS_PER_FAULT + 1):
                wait_for_progress(run, fault, n_attempts)
            print(f"{number:>3} {fault}", flush=True)
        exit_code = run.process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        print(f"{number:>3} did not finish within {LIMIT_S:.0f} s\n{run.errors[-2000:]}", flush=True)
        return False
    found = digest(run.run_dir)
    steps = [line.split(",")[0] for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    has_all_steps = len(steps) == len(set(steps)) == n_steps
    left = find_leftovers(MARK, run.mark)
    is_equal = exit_code == 0 and found == expected and has_all_steps and not left
    different = [path for path in expected if found.get(path) != expected[path]]
    bad = f"exit code {exit_code}, different: {different}, processes left: {left}"
    told = "bit-equal to the quiet run" if is_equal else bad
    n_restarts, n_expected = len(run.attempts) - 1, sum(fault.restarts for fault in faults)
    print(f"{number:>3} ended, {len(steps)} rows of metrics, {n_restarts} restarts: {told}", flush=True)
    if exit_code != 0:
        print(run.errors[-4000:], flush=True)
    return is_equal and n_restarts == n_expected


if __name__ == "__main__":
    sys.exit(main())
