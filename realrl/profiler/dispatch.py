"""The scheduler's part of an event: the real `MasterState`, whose workers answer at once with lengths and nothing else.

Imports no torch. Checkpoints, evaluation and responses on disk, which few steps have, are left out.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from realrl.errors import RunError
from realrl.experiment.planning import plan_run
from realrl.experiment.run_plan import RunPlan
from realrl.graph.build import dataset_keys
from realrl.runtime.checkpoints.resume import make_master_plan
from realrl.runtime.checkpoints.store import checkpoint_store
from realrl.sched.events import Abort, Event, Finish, Send, Start
from realrl.sched.master.master_state import MasterState
from realrl.sched.messages import (
    CallDone,
    FreeSamples,
    Goodbye,
    Hello,
    HooksDone,
    Initialize,
    KeySchema,
    LoadSamples,
    MoveRows,
    Per,
    Ready,
    Reply,
    Request,
    RowsMoved,
    RunCall,
    RunHooks,
    SampleMeta,
    SamplesFreed,
    SamplesLoaded,
    Shutdown,
)

_STEPS, _TOKENS = 16, 64
_TOKEN = KeySchema("int64", Per.TOKEN)


def handling_seconds(plan: RunPlan) -> float:
    """Return the seconds that `MasterState` takes for an event, on average over a few steps of a run.

    Raises:
        RunError: the run does not come to its end.
    """
    config = plan.config
    changes = {
        "steps": _STEPS,
        "epochs": _STEPS + 1,
        "save": config.save.model_copy(update={"at_end": False, "every_steps": 0, "every_epochs": 0, "every_s": 0.0,
                                               "n_generations": 0, "keep_best": ""}),
        "eval": config.eval.model_copy(update={"every_steps": 0, "at_start": False}),
    }  # fmt: skip
    plan = plan_run(config.model_copy(update=changes), plan.experiment)
    state = MasterState(make_master_plan(plan, checkpoint_store(plan, Path()), None))
    events: deque[Event] = deque([Start(), *(Hello(rank, 0, "") for rank in range(plan.n_workers))])
    n_events, seconds = 0, 0.0
    while events:
        event = events.popleft()
        start_s = time.perf_counter()
        instructions = state.handle(event)
        if isinstance(event, CallDone):  # the others are few, or begin and end a run
            seconds += time.perf_counter() - start_s
            n_events += 1
        for instruction in instructions:
            if isinstance(instruction, Send):
                events.append(_answer(instruction.rank, instruction.request, plan))
            elif isinstance(instruction, Finish) and n_events:
                return seconds / n_events
            elif isinstance(instruction, Abort):
                raise RunError(f"the scheduler ended a run that nobody ran: {instruction.failure.message}")
    raise RunError("the scheduler waits for workers that have answered")


def _answer(rank: int, request: Request, plan: RunPlan) -> Reply:
    seq = request.seq
    match request:
        case Initialize():
            n_rows = plan.samples_per_step if rank == plan.dataset_rank else 0
            return Ready(rank, seq, tuple(f"row {i}" for i in range(n_rows)), 0, ())
        case LoadSamples():
            return SamplesLoaded(rank, seq, _lengths(request.ids, tuple(dataset_keys(plan.graph))))
        case RunCall():
            mfc = next(mfc for mfc in plan.mfcs if mfc.name == request.call)
            output = _lengths(request.keeps, mfc.output_keys) if request.keeps else None
            return CallDone(rank, seq, request.dispatch_id, request.call, request.step, output, {}, ())
        case RunHooks():
            return HooksDone(rank, seq, request.dispatch_id, request.call, request.step, request.when)
        case MoveRows():
            return RowsMoved(rank, seq, request.dispatch_id, request.call, request.step)
        case FreeSamples():
            return SamplesFreed(rank, seq)
        case Shutdown():
            return Goodbye(rank, seq)
        case _:
            raise RunError(f"the scheduler asks for {type(request).__name__}, which a profile has left out")


def _lengths(ids: Sequence[str], keys: Sequence[str]) -> SampleMeta:
    lengths = ((_TOKENS,),) * len(ids)
    return SampleMeta(tuple(ids), dict.fromkeys(keys, _TOKEN), dict.fromkeys(keys, lengths))
