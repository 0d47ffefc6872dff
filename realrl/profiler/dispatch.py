"""The scheduler's part of an event: the real `MasterState` on a simulated cluster whose workers answer at once.

Imports no torch.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from realrl.errors import RunError
from realrl.experiment.planning import first_steps, plan_run
from realrl.experiment.run_plan import RunPlan
from realrl.runtime.checkpoints.resume import make_master_plan
from realrl.runtime.checkpoints.store import checkpoint_store
from realrl.sched.calls import ScheduledCall
from realrl.sched.events import Event, Instruction
from realrl.sched.messages import CallDone, HookTime, MoveRows, RunCall
from realrl.sim.cluster import SimulatedCluster
from realrl.sim.durations import SampleSizes, meeting_ranks

_STEPS = 16
_SIZES = SampleSizes((32,), (32,))


def handling_seconds(
    plan: RunPlan,
    *,
    n_steps: int = _STEPS,
    clock: Callable[[], float] = time.perf_counter,
    collector: tuple[int, int, int] | None = None,
    before: Callable[[], None] | None = None,
) -> float:
    """Return the seconds that `MasterState` takes for the end of a call, on average over a few steps of a run.

    Args:
        clock: tells the seconds.
        collector: thresholds of the garbage collector meanwhile, which sees what simulated workers keep as well;
            None: it rests, as it nearly does in a real master.
        before: called before each event that is timed.

    Raises:
        RunError: the run does not come to its end.
    """
    plan = plan_run(first_steps(plan.config, n_steps), plan.experiment)
    master_plan = make_master_plan(plan, checkpoint_store(plan, Path()), None)
    cluster = _Timed(master_plan, _Instant(), lambda _: _SIZES)
    cluster.clock, cluster.collects, cluster.before = clock, collector is not None, before
    thresholds = gc.get_threshold()
    gc.set_threshold(*(collector or thresholds))
    try:
        run = cluster.run()
    finally:
        gc.set_threshold(*thresholds)
    if run.failure is not None:
        raise RunError(f"the scheduler ended a run that nobody ran: {run.failure.message}")
    return cluster.seconds / cluster.n_timed


class _Timed(SimulatedCluster):
    """Counts ends of calls and adds up the master's seconds; other events are few, or begin and end a run."""

    n_timed, seconds = 0, 0.0
    collects = False
    before: Callable[[], None] | None = None
    clock: Callable[[], float] = staticmethod(time.perf_counter)

    def decide(self, event: Event) -> list[Instruction]:
        if self.before is not None and isinstance(event, CallDone):
            self.before()
        start_s = self.clock()
        if self.collects:
            gc.enable()
        instructions = super().decide(event)
        gc.disable()  # as a simulated cluster has it
        if isinstance(event, CallDone):
            self.seconds += self.clock() - start_s
            self.n_timed += 1
        return instructions


class _Instant:
    """`realrl.sim.durations.Durations` of workers that take no time for anything."""

    def call(
        self, call: ScheduledCall, requests: Mapping[int, RunCall], sizes: Mapping[str, SampleSizes]
    ) -> Mapping[int, float]:
        return dict.fromkeys(requests, 0.0)

    def meets(self, call: ScheduledCall) -> tuple[tuple[int, ...], ...]:
        return meeting_ranks(call)

    def hooks(self, call: ScheduledCall, when: HookTime, ranks: Collection[int]) -> Mapping[int, float]:
        return dict.fromkeys(ranks, 0.0)

    def onload(self, role: str, ranks: Collection[int]) -> Mapping[int, float]:
        return dict.fromkeys(ranks, 0.0)

    def received_bytes(self, call: ScheduledCall, when: HookTime, rank: int) -> int:
        return 0

    def rows(self, requests: Mapping[int, MoveRows | RunCall], sizes: Mapping[str, SampleSizes]) -> Mapping[int, float]:
        return dict.fromkeys(requests, 0.0)

    def load(self, n_samples: int) -> float:
        return 0.0

    def read(self, n_samples: int) -> float:
        return 0.0

    def free(self) -> float:
        return 0.0

    def save(self, rank: int) -> float:
        return 0.0

    def write(self, rank: int) -> float:
        return 0.0

    def start(self) -> float:
        return 0.0

    def handling(self, n_events: int) -> float:
        return 0.0

    def latency(self, rank: int) -> float:
        return 0.0
