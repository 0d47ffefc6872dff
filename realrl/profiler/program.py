"""The master of a profile: asks the workers for one probe after the other, fits the answers, writes the file."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeVar, get_args

import msgspec

from realrl.errors import Error, RunError, UsageError
from realrl.experiment.discovery import load_run
from realrl.experiment.planning import plan_run
from realrl.experiment.run_plan import RunPlan
from realrl.files import write_output
from realrl.profiler.caches import sweep_caches
from realrl.profiler.dispatch import handling_seconds
from realrl.profiler.machine import REPETITION, SECONDS, Machine
from realrl.profiler.measurements import Measurements, fitted_hardware, fitted_text
from realrl.profiler.sizes import judging_call, probes_of, subjects_of, work_of
from realrl.runtime.processes.session import Session
from realrl.sched.messages import (
    CallDone,
    Goodbye,
    Hello,
    Initialize,
    Ready,
    Request,
    RunCall,
    Shutdown,
    WorkerFailed,
)
from realrl.sched.silence import Silences
from realrl.sim.fit import LEAST_POINTS, Measured
from realrl.sim.hardware import Hardware
from realrl.sim.probes import COMPUTING, Kind, Probe
from realrl.sim.scatter import scatter_of

RESULT, SETTINGS, MEASURED = "hardware.yaml", "profile.json", "measurements.json"
_POLL_S = 0.2
_N_MESSAGES = 200
_MOST_REPEATS, _MOST_SIZES = 31, 9  # repetitions of a probe; of those that take another size each time
_PASSES = 3
_BAR = 24  # characters
_SHARES: Mapping[Kind, float] = {
    "collectives": 0.05, "reallocs": 0.03, "copies": 0.03, "rows": 0.02, "calls": 0.02, "rewards": 0.02,
    "products": 0.1, "generate": 0.23, "inference": 0.2, "train_step": 0.33,
}  # fmt: skip
"""Class -> its share of the time; what one leaves, the next ones get."""


class Settings(msgspec.Struct, frozen=True):
    """Settings of a profile, beside those of the run.

    Attributes:
        seconds: time for all measurements, without the start of the workers.
        base: name or file of hardware that has what is not measured; "" for one with this kind of device.
    """

    seconds: float
    base: str = ""


def run_profile(session: Session) -> int:
    """Measure, fit, and write the hardware file into the session's folder; the program of a profile's session.

    Raises:
        ConfigError: too little could be measured.
        RunError: a worker failed or ended.
    """
    session.beat()
    experiment, config = load_run(session.run)
    plan = plan_run(config, experiment)
    settings = msgspec.json.decode((session.run_dir / SETTINGS).read_bytes(), type=Settings)
    workers = _Workers(session, plan)
    start_s = time.monotonic()
    machine = workers.start()
    start_s = time.monotonic() - start_s
    subjects = subjects_of(plan, memory_bytes=machine.memory_bytes)
    message_s, transport_s = workers.message_seconds()
    n_judged = 0 if judging_call(plan) is None else plan.config.generation.n_responses
    probes = probes_of(subjects, n_workers=plan.n_workers, n_judged=n_judged)
    measured = _measure(workers, probes, settings.seconds)
    workers.end()
    session.progress.phase(f"fitting {len(measured)} measurements")
    raw = Measurements(
        experiment=plan.experiment.name,
        machine=machine,
        n_workers=plan.n_workers,
        models={name: subject.config for name, subject in subjects.items()},
        message_s=message_s,
        event_s=transport_s + handling_seconds(plan, before=sweep_caches),
        start_s=start_s,
        measured=measured,
    )
    found = fitted_hardware(raw, settings.base)
    write_output(session.run_dir / MEASURED, raw.encoded())
    write_output(session.run_dir / RESULT, fitted_text(raw, found, settings.base).encode())
    session.progress.finished(summary(found))
    return 0


class Timing(NamedTuple):
    """Repetitions of a probe.

    Attributes:
        seconds: their median; of collectives, and of what each worker computes for itself, the workers' mean, of other
            probes that of the slowest one.
        scatter: standard deviation of the logarithms of the workers' medians; 0 if there is no telling.
        repetition_s: what one takes in all.
    """

    seconds: float
    scatter: float
    repetition_s: float


def timing_of(kind: Kind, metrics: Sequence[Mapping[str, float]]) -> Timing:
    """Return what the workers' metrics say of a probe of some kind."""
    seconds, repetition_s = [one[SECONDS] for one in metrics], max(one[REPETITION] for one in metrics)
    if kind in COMPUTING and min(seconds) > 0.0:
        return Timing(statistics.geometric_mean(seconds), scatter_of(seconds), repetition_s)
    if kind == "collectives":  # who computes faster waits longer: the mean makes up for the usual worker's computing
        return Timing(statistics.fmean(seconds), 0.0, repetition_s)
    return Timing(max(seconds), 0.0, repetition_s)


@dataclass
class _Taken:
    """A probe's repetitions so far, those of a pass together, and how many later passes have left.

    Two or more are left, or none: the first one of a pass does not count.
    """

    probe: Probe
    timings: list[Timing]
    n_left: int = 0

    @property
    def repetition_s(self) -> float:
        """Seconds that a repetition takes in all, by the first pass."""
        return self.timings[0].repetition_s

    @property
    def measured(self) -> Measured:
        """The median of the passes, and the mean of their scatter."""
        seconds = statistics.median(timing.seconds for timing in self.timings)
        return Measured(self.probe, seconds, statistics.fmean(timing.scatter for timing in self.timings))


def _measure(workers: _Workers, probes: Sequence[Probe], seconds: float) -> list[Measured]:
    """Take the probes class by class, as many as their share of the time allows, and a few in any case.

    Repetitions are spread over passes: a machine that is slow for a while is so in one of them, and the medians of the
    others decide. The first one of a pass does not count, since libraries may have to prepare its size again.
    """
    begin_s = time.monotonic()
    taken = _first_pass(workers, probes, seconds)
    by_engine = sorted(taken, key=lambda one: (one.probe.model, one.probe.n_layers))  # each is made once in a pass
    for number in range(2, _PASSES + 1):
        again = [one for one in by_engine if one.n_left]
        for i, one in enumerate(again):
            if time.monotonic() - begin_s + one.repetition_s > seconds:
                break
            workers.show(i, len(again), one.probe, number)
            n = math.ceil(one.n_left / min(_PASSES + 1 - number, one.n_left // 2))
            workers.time(one.probe, 1)
            one.timings.append(workers.time(one.probe, n - 1))
            one.n_left -= n
    return [one.measured for one in taken]


def _first_pass(workers: _Workers, probes: Sequence[Probe], seconds: float) -> list[_Taken]:
    """Take all probes for which there is time, and leave most repetitions to later passes."""
    taken: list[_Taken] = []
    present = [kind for kind in get_args(Kind) if any(probe.kind == kind for probe in probes)]
    kinds = [kind for kind in _SHARES if kind in present]
    whole, begin_s = sum(_SHARES[kind] for kind in kinds), time.monotonic()
    done, share, later_s = 0, 0.0, 0.0
    for kind in kinds:
        some = [probe for probe in probes if probe.kind == kind]
        share += _SHARES[kind] / whole
        end_s = begin_s + share * seconds
        last: _Taken | None = None
        for i, probe in enumerate(some):
            workers.show(done, len(probes), probe)
            done += 1
            left_s = end_s - time.monotonic() - later_s
            least_s = 0.0 if last is None else last.repetition_s * max(1.0, work_of(probe) / work_of(last.probe))
            if i >= LEAST_POINTS and least_s > left_s:
                continue
            timing, n_left = workers.time(probe, 1), 0
            own_s = left_s / (2 * (len(some) - i))
            n = min(_MOST_SIZES if probe.is_new else _MOST_REPEATS, int(own_s / max(timing.repetition_s, 1e-6)) - 1)
            if n >= 1:
                n_passes = min(_PASSES, (n + 1) // 2)
                n_now = math.ceil((n - n_passes + 1) / n_passes)
                timing, n_left = workers.time(probe, n_now), n - n_now
            last = _Taken(probe, [timing], n_left)
            later_s += last.n_left * last.repetition_s
            taken.append(last)
    return taken


Answer = TypeVar("Answer", Hello, Ready, CallDone, Goodbye)


class _Workers:
    """The workers, asked together."""

    def __init__(self, session: Session, plan: RunPlan) -> None:
        self._session, self._ranks = session, range(plan.n_workers)
        self._limit_s = plan.config.cluster.worker_timeout_s
        self._seq = [0] * plan.n_workers
        self._doing = "the start"
        self._shown = ""

    def start(self) -> Machine:
        """Start the workers, and wait until each has made its groups and a model."""
        n = len(self._ranks)
        self._session.progress.phase(f"starting {n} worker{'s' if n > 1 else ''}")
        self._session.launcher.start(n, self._session.admission)
        hellos = self._answers(Hello, self._ranks)
        peers = tuple(hellos[rank].data_address for rank in self._ranks)
        found = self._ask(lambda seq: Initialize(seq, self._session.run, peers), Ready)
        return msgspec.json.decode(found[0].notes[0], type=Machine)

    def end(self) -> None:
        """Let the workers leave their groups."""
        self._doing = "the end"
        self._ask(Shutdown, Goodbye)

    def message_seconds(self) -> tuple[float, float]:
        """Return the seconds of a message in one direction, and those that this process takes for an answer.

        Caches are swept before each, since in a run messages come after a model's passes.
        """
        self._doing = "messages"
        seconds = []
        used_s = 0.0
        for i in range(-_N_MESSAGES // 10, _N_MESSAGES):
            sweep_caches()
            before_s, used_before_s = time.perf_counter(), time.process_time()
            self._ask(partial(_call, "message"), CallDone, ranks=(0,))
            if i >= 0:
                seconds.append(time.perf_counter() - before_s)
                used_s += time.process_time() - used_before_s
        return statistics.median(seconds) / 2, used_s / _N_MESSAGES

    def time(self, probe: Probe, n: int) -> Timing:
        """Let the workers repeat a probe `n` times."""
        self._doing = str(probe)
        text = msgspec.json.encode(probe).decode()
        ranks = (0,) if probe.is_alone else self._ranks
        found = self._ask(partial(_call, str(probe), text=text, n=n), CallDone, ranks=ranks)
        return timing_of(probe.kind, [done.metrics for done in found.values()])

    def show(self, n_done: int, n_all: int, probe: Probe, number: int = 1) -> None:
        """Show the progress in a pass: a bar on a terminal, elsewhere a line for each class, then for each pass."""
        what = probe.kind if number == 1 else f"pass {number} of {_PASSES}"
        if sys.stdout.isatty():
            n = _BAR * n_done // n_all
            which = "" if number == 1 else f"{what}, "
            self._session.progress.phase(f"{'█' * n}{'░' * (_BAR - n)} {n_done}/{n_all}  {which}{probe}")
        elif self._shown != what:
            self._session.progress.phase(f"{n_done} of {n_all} measurements, next: {what}")
        self._shown = what

    def _ask(
        self, make: Callable[[int], Request], kind: type[Answer], *, ranks: Sequence[int] | None = None
    ) -> dict[int, Answer]:
        """Send a request, made of its number, to workers; return their answers."""
        asked = self._ranks if ranks is None else ranks
        for rank in asked:
            self._session.transport.send(rank, make(self._seq[rank]))
            self._seq[rank] += 1
        return self._answers(kind, asked)

    def _answers(self, kind: type[Answer], ranks: Sequence[int]) -> dict[int, Answer]:
        found: dict[int, Answer] = {}
        silences = Silences(self._limit_s, ranks, now_s=time.monotonic())
        while len(found) < len(ranks):
            reply = self._session.transport.receive(_POLL_S)
            self._session.beat()
            if isinstance(reply, kind):
                found[reply.rank] = reply
            elif isinstance(reply, WorkerFailed):
                raise _failed(reply, self._doing)
            if reply is not None:
                silences.hear(reply.rank)
                continue
            for rank, exit_code, _ in self._session.launcher.poll():
                if rank not in found or kind is not Goodbye:
                    raise RunError(
                        f"worker {rank} ended with exit code {exit_code} in {self._doing}",
                        remedy=f"Its log says more: {self._session.launcher.log_path(rank)}",
                        worker=rank,
                    )
            for rank, silent_s in silences.look(time.monotonic()):
                raise RunError(
                    f"worker {rank} was silent for {silent_s:.0f} s in {self._doing}",
                    remedy="Set cluster.worker_timeout_s to more, if the machine is busy.",
                    worker=rank,
                )
        return found


def _call(what: str, seq: int, *, text: str = "", n: int = 1) -> RunCall:
    return RunCall(seq, seq, what, 0, ((text,),) if text else (), (), n_steps=n)


def _failed(reply: WorkerFailed, doing: str) -> Error:
    message = f"worker {reply.rank} failed in {doing}: {reply.message}"
    if reply.exit_code == UsageError.exit_code:
        return UsageError(message)
    return RunError(f"{message}\n{reply.traceback}".rstrip(), worker=reply.rank)


def summary(found: Hardware) -> dict[str, str]:
    """Return class -> its errors, in words."""
    assert found.profile is not None
    return {
        kind: f"{error.n_points} points; error of {error.n_held_out} held out: median {error.median:.0%}, worst "
        f"{error.worst:.0%}; of the others at most {error.worst_fitted:.0%}"
        for kind, error in found.profile.errors.items()
    }
