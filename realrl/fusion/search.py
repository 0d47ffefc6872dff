"""The search on this machine: probes on its cores, until the time is up.

Search.probes ──► helpers, and this process ──► Search.take
"""

from __future__ import annotations

import math
import multiprocessing
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

from realrl.fusion.compiled import kernels
from realrl.plan.fusion.instance import Instance
from realrl.plan.fusion.problem import Problem, problem_of
from realrl.plan.fusion.schedule import FusedSchedule
from realrl.plan.fusion.schedule_file import with_at_most
from realrl.plan.fusion.search.climb import Kernels
from realrl.plan.fusion.search.probes import Outcome, Probe, carry_out
from realrl.plan.fusion.search.rounds import Search

_ROUNDED = 1e-6  # of a unit of memory: a peak in activations is rounded


@dataclass(frozen=True)
class Progress:
    """State of a search: seconds since its start, the best latency and peak, the bound of the latency."""

    seconds: float
    latency: float
    peak: float
    bound: float


@dataclass(frozen=True)
class Fused:
    """Result of a search.

    Attributes:
        bound: time that no schedule can go below.
        least_peak: memory that no schedule of this latency can go below on its fullest device.
        front: for each latency that pays, the schedule with the lowest peak that was found; the first is `schedule`.
        seconds: of the search.
        seconds_to_latency: until the latency was found.
        n_rounds: of probes; the same number of rounds with the same seed finds the same.
        n_evaluations: list schedules that were made, and changes that annealing tried.
        was_stopped: True if Ctrl-C ended the search.
    """

    schedule: FusedSchedule
    bound: float
    least_peak: float
    front: tuple[FusedSchedule, ...]
    seconds: float
    seconds_to_latency: float
    n_rounds: int
    n_evaluations: int
    was_stopped: bool


@dataclass(frozen=True)
class Limits:
    """Limits of a search, and the number of its processes.

    Attributes:
        seconds: time that the search may take; a probe that has begun is not broken off.
        n_rounds: rounds of probes; None: as many as there is time for.
        n_evaluations: list schedules and changes after which no round begins; None: as many as there is time for.
        clock: what counts the seconds.
        peak: memory that is enough on the fullest device, once the latency is the bound; None: the least possible.
    """

    seconds: float = 10.0
    n_rounds: int | None = None
    n_evaluations: float | None = None
    peak: float | None = None
    n_processes: int = 1
    clock: Callable[[], float] = time.monotonic


class ScheduleSearch:
    """A search for the schedule with the lowest latency, and the lowest peak at that latency, which may go on later."""

    def __init__(self, instance: Instance, *, seed: int = 0, pareto: bool = False) -> None:
        """Begin with the schedules that rules give.

        Args:
            pareto: True looks for lower peaks at higher latencies, too.
        """
        self._instance, self._problem = instance, problem_of(instance)
        self._search = Search(self._problem, seed=seed, pareto=pareto)
        self._seconds = self._latency_at = 0.0
        self._n_rounds = 0
        self._begin_with: list[FusedSchedule] = []
        self._probes: tuple[Probe, ...] = ()  # of a round for which there was no time
        self._outcomes: dict[int, Outcome] = {}  # of those of them that are done

    def begin_with(self, schedule: FusedSchedule, *, where: str = "the schedule") -> None:
        """Go on from a schedule of these models in the next run; one with fewer micro-batches is stretched.

        Args:
            where: name of the schedule, for messages.

        Raises:
            UsageError: the schedule has another shape, more micro-batches, or needs more memory than the caps.
        """
        self._begin_with.append(with_at_most(schedule, self._instance, where=where))

    def run(self, limits: Limits, report: Callable[[Progress], None] = lambda progress: None) -> Fused:
        """Search until a limit is reached or nothing better is possible, and return what was found so far.

        Ctrl-C ends the run.

        Args:
            limits: of this run.
            report: called after every round.
        """
        problem, search, was_stopped = self._problem, self._search, False
        before, begin = self._seconds, limits.clock()
        most_rounds = math.inf if limits.n_rounds is None else self._n_rounds + limits.n_rounds
        most_evaluations = search.n_evaluations + (limits.n_evaluations or math.inf)
        enough = 0 if limits.peak is None else int(limits.peak / problem.unit + _ROUNDED)
        loops, _ = kernels()

        def is_over() -> bool:
            return limits.clock() - begin >= limits.seconds

        latency_before = search.best.latency
        for schedule in self._begin_with:
            counts = [schedule.instance.pipelines[p].n_micro_batches for p in problem.pipeline]
            own = problem.with_micro_batches(tuple(counts))
            search.begin_with(own, problem.words_of(schedule), loops.evaluated)
        self._begin_with.clear()
        self._seconds = before + limits.clock() - begin
        if search.best.latency < latency_before:
            self._latency_at = self._seconds
        with _helpers(problem, limits.n_processes - 1) as helpers:
            try:
                while not search.is_done and self._n_rounds < most_rounds:
                    if is_over() or search.n_evaluations >= most_evaluations:
                        break
                    if search.best.latency <= search.bound and search.best.peak <= enough:
                        break
                    latency_before, self._probes = search.best.latency, self._probes or search.probes()
                    _carry_out(problem, self._probes, self._outcomes, loops, helpers, is_over)
                    if len(self._outcomes) < len(self._probes):
                        for number, outcome in sorted(self._outcomes.items()):
                            search.note_early(self._probes[number], outcome)
                        break
                    search.take(self._probes, [self._outcomes[number] for number in range(len(self._probes))])
                    self._probes, self._outcomes = (), {}
                    self._n_rounds += 1
                    self._seconds = before + limits.clock() - begin
                    if search.best.latency < latency_before:
                        self._latency_at = self._seconds
                    latency, peak = problem.time(search.best.latency), problem.memory(search.best.peak)
                    report(Progress(self._seconds, latency, peak, problem.time(search.bound)))
            except KeyboardInterrupt:
                was_stopped = True
        self._seconds = before + limits.clock() - begin
        return self._found(was_stopped=was_stopped)

    def _found(self, *, was_stopped: bool) -> Fused:
        instance, problem, search = self._instance, self._problem, self._search
        schedules = [FusedSchedule.of_words(instance, problem.letters_of(found.words)) for found in search.front]
        return Fused(
            schedule=FusedSchedule.of_words(instance, problem.letters_of(search.best.words)),
            bound=problem.time(search.bound),
            least_peak=problem.memory(search.least_peak),
            front=tuple(schedules),
            seconds=self._seconds,
            seconds_to_latency=self._latency_at,
            n_rounds=self._n_rounds,
            n_evaluations=search.n_evaluations,
            was_stopped=was_stopped,
        )


def find_schedule(
    instance: Instance,
    limits: Limits,
    *,
    seed: int = 0,
    pareto: bool = False,
    report: Callable[[Progress], None] = lambda progress: None,
) -> Fused:
    """Run a `ScheduleSearch` once."""
    return ScheduleSearch(instance, seed=seed, pareto=pareto).run(limits, report)


def _carry_out(
    problem: Problem,
    probes: Sequence[Probe],
    outcomes: dict[int, Outcome],
    loops: Kernels,
    helpers: Sequence[Connection],
    is_over: Callable[[], bool],
) -> None:
    """Add the outcomes of probes that have none, until time is up: each helper has one at a time, as this process."""
    to_do = deque(number for number in range(len(probes)) if number not in outcomes)

    def compute() -> None:
        for number in _taken(to_do, is_over):
            outcomes[number] = carry_out(problem, probes[number], loops)

    def ask(helper: Connection) -> None:
        for number in _taken(to_do, is_over):
            try:
                helper.send(probes[number])
                outcomes[number] = helper.recv()
            except (EOFError, OSError):  # it has died
                to_do.append(number)
                return

    threads = [threading.Thread(target=ask, args=(helper,), daemon=True) for helper in helpers]
    for thread in threads:
        thread.start()
    compute()
    for thread in threads:
        thread.join()
    compute()  # what those that died have left


def _taken(numbers: deque[int], is_over: Callable[[], bool]) -> Iterator[int]:
    """Take numbers, as other threads do at the same time, until none is left or time is up."""
    while not is_over():
        try:
            number = numbers.popleft()
        except IndexError:
            return
        yield number


@contextmanager
def _helpers(problem: Problem, n_helpers: int) -> Iterator[list[Connection]]:
    """Start processes that carry out probes, and end them."""
    context = multiprocessing.get_context("spawn")
    if multiprocessing.current_process().daemon:
        n_helpers = 0  # it may have no children
    processes, connections = [], []
    for _ in range(n_helpers):
        ours, theirs = context.Pipe()
        process = context.Process(target=_help, args=(theirs, problem), daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        connections.append(ours)
    try:
        yield connections
    finally:
        for process, connection in zip(processes, connections, strict=True):
            process.kill()  # first, so that no thread waits for its answer
            process.join()
            connection.close()


def _help(connection: Connection, problem: Problem) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that asks ends this one
    loops, _ = kernels()
    with suppress(EOFError, OSError):
        while True:
            connection.send(carry_out(problem, connection.recv(), loops))
