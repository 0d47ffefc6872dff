"""Faults of runs over two machines, which are network namespaces of this one: see `fault_campaign.py --nodes 2`.

Machine alpha has `realrl run`, its master and worker 0; beta has worker 1. Each has an agent, which is started again,
as a job scheduler would do it, when the fault has ended it; so is a run that ended to be queued again. Needs root,
`ip`, `unshare`, `nsenter` and `ss`.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from fault_campaign import BY_HAND, COMMON, LIMIT_S, MARK, MOMENTS, PATIENCE_STEPS, digest, draw  # noqa: E402

from realrl.errors import Error  # noqa: E402
from realrl.runtime.output.json_lines import last_step  # noqa: E402
from realrl.runtime.processes.lifeline import find_leftovers  # noqa: E402
from tests.helpers.machines import Machine, Site, machines, python  # noqa: E402

PORT = 29500
LEASE_S = 10.0
SHORT_CUT_S, LONG_CUT_S = 2.0, 20.0
STEPS_PER_FAULT = 3
END_LIMIT_S = 30.0  # for everything to end after the run
PREEMPTED = 75
_BEGIN = re.compile(r"^workers start on", re.MULTILINE)  # of an attempt; logs that are quoted are indented
SETTINGS = (
    *(word for word in COMMON if not word.startswith("cluster.")),
    "algorithm.n_minibatches=2",
    "cluster.worker_timeout_s=60",
)
ON_ONE = ("cluster.n_devices_per_node=2", "allocation.calls.actor_gen=d2@0:0-1")
ON_MACHINES = (
    "launcher=external", "cluster.n_nodes=2", f"cluster.master_port={PORT}", f"cluster.lease_s={LEASE_S:g}",
    "cluster.start_timeout_s=120", "allocation.calls.actor_gen=d2@0-1",
)  # fmt: skip


class MachinesRun:
    """A run over two machines, its agents, and what they told."""

    def __init__(self, folder: Path, site: Site, *overrides: str) -> None:
        self.site = site
        self.alpha, self.beta = site.machines
        self.run_dir = folder / "run"
        self._folder, self._code = folder, folder.parent / "code"
        self._overrides = overrides
        self._moments = folder / "moment"
        self.mark = secrets.token_hex(8)
        self._key = os.urandom(32).hex()
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        folder.mkdir()
        self.process = self.start()
        for machine in site.machines:
            self.join(machine)

    def start(self, *more: str) -> subprocess.Popen[bytes]:
        """Start `realrl run` on the first machine."""
        words = ["run", "ppo", *SETTINGS, *ON_MACHINES, *self._overrides, f"run_dir={self.run_dir}", *more]
        self.process = self._popen(self.alpha, "run", words)
        return self.process

    def join(self, machine: Machine) -> None:
        """Start the agent of a machine."""
        place = f"{self.alpha.address}:{PORT}"
        words = ["node", place, f"--index={self.site.machines.index(machine)}", "--patience=600"]
        self.agents[machine.name] = self._popen(machine, machine.name, words)

    def _popen(self, machine: Machine, name: str, words: Sequence[str]) -> subprocess.Popen[bytes]:
        variables = {"PYTHONPATH": str(self._code), MARK: self.mark, f"{MARK}_MOMENT": str(self._moments)}
        log = self._folder / f"{name}.log"
        variables["REALRL_KEY"] = self._key
        return machine.popen(python(), "-m", "realrl", *words, log=log, cwd=self._code, **variables)

    @property
    def said(self) -> str:
        return (self._folder / "run.log").read_text(errors="replace")

    @property
    def step(self) -> int:
        """The last step in metrics.jsonl; -1 while that file is being rewritten."""
        try:
            return last_step(self.run_dir / "metrics.jsonl")
        except (OSError, Error):
            return -1

    @property
    def n_attempts(self) -> int:
        return len(_BEGIN.findall(self.said))

    @property
    def steps_of_attempt(self) -> list[int]:
        """Steps that the last attempt told."""
        return [int(step) for step in re.findall(r"^step (\d+)/", _BEGIN.split(self.said)[-1], re.MULTILINE)]

    def moments(self) -> dict[str, str]:
        """Return what each worker does, as far as one is there."""
        found = {}
        for rank, machine in enumerate(self.site.machines):
            with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
                pid, _, moment = Path(f"{self._moments}{rank}").read_text().partition(" ")
                if int(pid) in machine.processes(f"worker --rank {rank}"):
                    found[f"worker {rank}"] = moment
        return found

    def kill(self, machine: Machine, word: str, signum: int = signal.SIGKILL) -> None:
        machine.signal(word, signum)

    def wait_until(self, condition: Callable[[], bool], limit_s: float) -> bool:
        """Wait for a condition; returns False if it did not come true in time."""
        end_s = time.monotonic() + limit_s
        while not condition():
            if time.monotonic() > end_s:
                return False
            time.sleep(0.02)
        return True

    def continue_by_hand(self) -> bool:
        """Start the run again when its processes on the first machine have ended; False if they stay."""
        self.process.wait(LIMIT_S)
        if not self.wait_until(lambda: not self.alpha.processes("main master"), END_LIMIT_S):
            return False
        with (self._folder / "run.log").open("a") as log:
            log.write(BY_HAND)
        self.start("resume=auto")
        return True

    def left(self) -> list[int]:
        """Processes of the run, on all machines; there must be none some seconds after its end."""

        def found() -> list[int]:
            inside = [pid for machine in self.site.machines for pid in machine.processes("realrl")]
            return [*find_leftovers(MARK, self.mark), *inside]

        self.wait_until(lambda: not found(), END_LIMIT_S)
        return found()

    def clean_up(self) -> None:
        for pid in find_leftovers(MARK, self.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in (self.process, *self.agents.values()):
            process.wait()


# ---------------------------------------------------------------- faults


def _worker(run: MachinesRun, rank: int) -> bool:
    run.kill(run.site.machines[rank], f"worker --rank {rank}")
    return True


def _agent(run: MachinesRun, machine: Machine) -> bool:
    run.kill(machine, "realrl node")
    run.agents[machine.name].wait(LIMIT_S)
    time.sleep(random.uniform(0.0, 2.0))
    run.join(machine)
    return True


def _master(run: MachinesRun) -> bool:
    run.kill(run.alpha, "main master")
    return True


def _run_itself(run: MachinesRun) -> bool:
    run.kill(run.alpha, "realrl run")
    return run.continue_by_hand()


def _far_machine(run: MachinesRun) -> bool:
    """Its cable is silent first, as that of a machine without power is."""
    run.site.unplug(run.beta)
    run.kill(run.beta, ".")
    run.agents[run.beta.name].wait(LIMIT_S)
    time.sleep(random.uniform(0.0, 3 * LEASE_S))
    run.site.plug(run.beta)
    run.join(run.beta)
    return True


def _first_machine(run: MachinesRun) -> bool:
    run.site.unplug(run.alpha)
    run.kill(run.alpha, ".")
    run.agents[run.alpha.name].wait(LIMIT_S)
    time.sleep(random.uniform(0.0, 3 * LEASE_S))
    run.site.plug(run.alpha)
    is_ended = run.continue_by_hand()
    run.join(run.alpha)
    return is_ended


def _cut(run: MachinesRun, seconds: float) -> bool:
    run.site.unplug(run.beta)
    time.sleep(seconds)
    run.site.plug(run.beta)
    return True


def _reset(run: MachinesRun) -> bool:
    run.beta.reset(f"dst {run.alpha.address}")
    return True


def _preempted(run: MachinesRun, machine: Machine, word: str) -> bool:
    """The run ends to be queued again, on all machines; then it is started again, unless the step was its last."""
    run.kill(machine, word, signal.SIGTERM)
    codes = [process.wait(LIMIT_S) for process in (run.process, *run.agents.values())]
    if not any(codes):
        return True  # whether it has all its steps is looked at later, as for every run
    if codes != [PREEMPTED] * len(codes):
        return False
    is_ended = run.continue_by_hand()
    for each in run.site.machines:
        run.join(each)
    return is_ended


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        do: does it, and what a job scheduler would do then; False if something was left or ended wrongly.
        n_attempts: attempts that must follow, at least and at most.
    """

    do: Callable[[MachinesRun], bool]
    n_attempts: tuple[int, int]


KINDS = {
    "worker 0 killed": Kind(lambda run: _worker(run, 0), (1, 1)),
    "worker 1 killed": Kind(lambda run: _worker(run, 1), (1, 1)),
    "agent alpha killed": Kind(lambda run: _agent(run, run.alpha), (1, 1)),
    "agent beta killed": Kind(lambda run: _agent(run, run.beta), (1, 1)),
    "master killed": Kind(_master, (1, 1)),
    "realrl run killed": Kind(_run_itself, (1, 1)),
    "machine beta dies": Kind(_far_machine, (1, 1)),
    "machine alpha dies": Kind(_first_machine, (1, 1)),
    "short cut": Kind(lambda run: _cut(run, SHORT_CUT_S), (0, 0)),
    "long cut": Kind(lambda run: _cut(run, LONG_CUT_S), (1, 1)),
    "reset": Kind(_reset, (0, 1)),
    "run preempted": Kind(lambda run: _preempted(run, run.alpha, "realrl run"), (1, 1)),
    "machine preempted": Kind(lambda run: _preempted(run, run.beta, "realrl node"), (1, 1)),
}


@dataclass
class MachineFault:
    """A fault, and what followed."""

    kind: str
    wanted: str
    seen: str = ""
    step: int = 0
    outcome: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        return (
            f"{self.step:>4}  {self.kind:<19} {self.wanted:<18} {self.seen:<52} {self.outcome:<14} {self.seconds:>6.1f}"
        )


def machine_campaign(folder: Path, n_faults: int, per_run: int, overrides: Sequence[str]) -> int:
    """Do a quiet run on one machine, then runs over two with faults; returns 0 if all ended with the same weights."""
    n_steps = STEPS_PER_FAULT * per_run + 2
    settings = (*overrides, f"steps={n_steps}")
    targets = draw([(kind, moment) for kind in KINDS for moment in MOMENTS], n_faults)
    faults = [MachineFault(*target) for target in targets]
    words = [python(), "-m", "realrl", "run", "ppo", *SETTINGS, *ON_ONE, *settings]
    environment = {**os.environ, "PYTHONPATH": str(folder / "code"), "OMP_NUM_THREADS": "1"}
    quiet = subprocess.run(
        [*words, f"run_dir={folder / 'quiet'}"], cwd=folder / "code", env=environment, capture_output=True, text=True
    )
    assert quiet.returncode == 0, quiet.stderr
    expected = digest(folder / "quiet")
    print(f"quiet run on one machine: {n_steps} steps, {len(expected)} tensor files", flush=True)
    print(f"{'run':>3} {'step':>4}  {'fault':<19} {'wanted':<18} {'was at':<52} {'outcome':<14} seconds", flush=True)
    is_good, start_s = True, time.monotonic()
    for number, first in enumerate(range(0, n_faults, per_run), 1):
        with _run(folder / f"run{number}", settings) as run:
            is_good &= _hurt(number, run, n_steps, faults[first : first + per_run], expected)
    survived = sum(fault.outcome == "went on" for fault in faults)
    hit = sum(fault.wanted in fault.seen for fault in faults)
    minutes = (time.monotonic() - start_s) / 60
    print(f"{survived} of {n_faults} faults were survived, {hit} hit the wanted moment; {minutes:.0f} minutes")
    return 0 if is_good and survived == n_faults else 1


@contextlib.contextmanager
def _run(folder: Path, settings: Sequence[str]) -> Iterator[MachinesRun]:
    with machines("alpha", "beta") as site:
        run = MachinesRun(folder, site, *settings)
        try:
            yield run
        finally:
            run.clean_up()


def _hurt(
    number: int, run: MachinesRun, n_steps: int, faults: Sequence[MachineFault], expected: dict[str, str]
) -> bool:
    """Do one run with its faults; True if it ended with the right weights, and nothing is left of it."""
    try:
        for place, fault in enumerate(faults):
            _strike(run, fault, place * STEPS_PER_FAULT + 1)
            print(f"{number:>3} {fault}", flush=True)
            if run.process.poll() not in (None, 0):
                break
        exit_code = run.process.wait(LIMIT_S)
        codes = [exit_code, *(agent.wait(END_LIMIT_S) for agent in run.agents.values())]
    except subprocess.TimeoutExpired as error:
        print(f"{number:>3} did not finish: {error}\n{run.said[-3000:]}", flush=True)
        return False
    metrics = run.run_dir / "metrics.jsonl"
    steps = [line.split(",")[0] for line in metrics.read_text().splitlines()] if metrics.exists() else []
    has_all_steps = len(steps) == len(set(steps)) == n_steps
    left, is_equal = run.left(), digest(run.run_dir) == expected
    is_good = codes == [0, 0, 0] and is_equal and has_all_steps and not left
    told = "bit-equal to the quiet run" if is_good else f"exit codes {codes}, equal: {is_equal}, left: {left}"
    print(f"{number:>3} ended, {len(steps)} rows of metrics, {run.n_attempts} attempts: {told}", flush=True)
    if not is_good:
        print(run.said[-4000:], flush=True)
    return is_good


def _strike(run: MachinesRun, fault: MachineFault, armed_after: int) -> None:
    """Wait for the fault's step and moment, do it, and wait until the run is past that step again."""
    run.wait_until(lambda: run.step >= armed_after or run.process.poll() is not None, LIMIT_S)
    seen: dict[str, str] = {}
    while run.process.poll() is None and run.step < armed_after + PATIENCE_STEPS:
        seen = run.moments()
        if fault.wanted in seen.values():
            break
    fault.seen = ", ".join(f"{who}: {what}" for who, what in seen.items())
    fault.step, n_before, begin_s = run.step + 1, run.n_attempts, time.monotonic()
    if not KINDS[fault.kind].do(run):
        fault.outcome = "ended wrongly"
        return
    least, most = KINDS[fault.kind].n_attempts

    def is_past() -> bool:
        n_more = run.n_attempts - n_before
        is_new = n_more >= least and max(run.steps_of_attempt, default=0) >= fault.step
        return is_new or run.process.poll() is not None

    if not run.wait_until(is_past, LIMIT_S):
        fault.outcome = "stuck"
    elif run.process.poll() == 0 and run.n_attempts == n_before:  # it was about to end
        fault.outcome = "went on"
    elif run.process.poll() not in (None, 0):
        fault.outcome = f"ended with {run.process.poll()}"
    else:
        n_more = run.n_attempts - n_before
        fault.outcome = "went on" if least <= n_more <= most else f"{n_more} attempts"
    fault.seconds = time.monotonic() - begin_s
