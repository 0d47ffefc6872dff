"""An interrupted run finishes and saves the step under way, whatever that is; resumed, it ends as if it had gone on."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realrl.config.schema import SaveConfig
from realrl.mesh.device_mesh import Cluster
from realrl.sched.events import AnnounceStop, Finish, Interrupted, SaveIntervalPassed, Send
from realrl.sched.master.master_state import RunPhase
from realrl.sched.messages import RunCall, SaveCheckpoint
from tests.sched.plans import make_plan, on_all, plans, ppo, saved_every_step
from tests.sched.samples.test_in_flight import assert_same_end, reads_settled_versions, resume
from tests.sched.simulator import Simulation
from tests.sched.test_orders import ROWS, SEEDS, orders, split_ppo


def saved_at_the_end(plan):
    """The same plan, whose only checkpoint follows the last step."""
    return dataclasses.replace(plan, save=SaveConfig(every_s=0.0))


def interrupt(simulation):
    """Interrupt a run between its first step and its end; returns the step that it ends with, or None."""
    if simulation.master.phase is not RunPhase.RUNNING:
        return None
    announced = [i for i in simulation.feed(Interrupted("SIGINT")) if isinstance(i, AnnounceStop)]
    simulation.run()
    assert simulation.end == Finish("SIGINT", simulation.end.spans)
    return announced[0].step


def check_stop(simulation, step):
    """The last step that was reported is the announced one, and its checkpoint is in place."""
    assert [report.step for report in simulation.reports][-1:] == [step]
    assert simulation.checkpoints[step] is not None
    assert step not in simulation.commits
    assert simulation.checkpoints[step].is_last == (step == simulation.start.last_step)
    assert max(simulation.checkpoints) == step


@orders(100)
@given(plan=plans(), seed=SEEDS, n_rows=ROWS, n_actions=st.integers(0, 150))
def test_any_run_ends_with_its_step_saved(plan, seed, n_rows, n_actions):
    simulation = Simulation(saved_at_the_end(plan), seed=seed, n_rows=n_rows).run(stop_after=n_actions)
    step = interrupt(simulation)
    if step is not None:
        check_stop(simulation, step)


@orders(40)
@given(plan=plans(max_staleness=0, drops=True).filter(reads_settled_versions), seed=SEEDS, n_rows=ROWS, data=st.data())
def test_runs_that_drop_samples_continue_exactly(plan, seed, n_rows, data):
    plan = saved_at_the_end(plan)
    whole = Simulation(saved_every_step(plan), seed=seed, n_rows=n_rows).run()
    stopped = Simulation(plan, seed=seed + 1, n_rows=n_rows).run(stop_after=data.draw(st.integers(0, 200)))
    step = interrupt(stopped)
    if step is None or step == plan.main.steps:
        return
    check_stop(stopped, step)
    resumed = resume(stopped, step, seed=seed + 2).run()
    resumed.check_complete_after_resume()
    assert_same_end(resumed, whole, step)


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
@pytest.mark.parametrize("min_n_seqs", [None, 2])
@pytest.mark.parametrize("devices", ["split", "shared"])
@pytest.mark.parametrize("stride", [95, pytest.param(12, marks=pytest.mark.slow)])
def test_runs_with_steps_ahead_and_streams_continue_exactly(max_staleness, min_n_seqs, devices, stride):
    settings = {"n_seqs": 4, "gen_n_seqs": 2, "max_staleness": max_staleness, "min_n_seqs": min_n_seqs}
    if devices == "split":
        plan = split_ppo(**settings, n_steps=6)
    else:
        mfcs = ppo(**settings)
        plan = make_plan(mfcs, on_all(mfcs, Cluster(1, 2)), Cluster(1, 2), n_steps=6)
    whole = Simulation(saved_every_step(plan), seed=1, n_rows=9).run()
    seen = set()
    for n_actions in range(20, 600, stride):
        stopped = Simulation(saved_at_the_end(plan), seed=n_actions, n_rows=9).run(stop_after=n_actions)
        step = interrupt(stopped)
        if step is None:
            continue
        check_stop(stopped, step)
        seen.add(step)
        if step < 6:
            resumed = resume(stopped, step, seed=n_actions).run()
            resumed.check_complete()
            assert_same_end(resumed, whole, step)
    assert len(seen) >= (3 if stride > 12 else 6)


def test_only_the_announced_step_and_what_it_needs_goes_on():
    plan = saved_at_the_end(split_ppo(n_seqs=4, n_steps=6))
    for seed in range(20):
        simulation = Simulation(plan, seed=seed, n_rows=9).run(stop_after=60)
        n_before = len(simulation.instructions)
        step = interrupt(simulation)
        later = [i.request for batch in simulation.instructions[n_before:] for i in batch if isinstance(i, Send)]
        assert {request.step for request in later if isinstance(request, RunCall)} <= {step}
        assert all(request.waits for request in later if isinstance(request, SaveCheckpoint))


def test_the_clock_is_quiet_afterwards():
    simulation = Simulation(saved_at_the_end(split_ppo(n_seqs=4, n_steps=6)), seed=3, n_rows=9).run(stop_after=60)
    (announced, *_) = simulation.feed(Interrupted("SIGTERM"))
    while simulation.end is None:
        simulation.feed(SaveIntervalPassed())
        if simulation.end is None:
            simulation.act()
    assert list(simulation.checkpoints) == [announced.step]
