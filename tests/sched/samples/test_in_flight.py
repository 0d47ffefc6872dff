"""A run that continues from a checkpoint does what the uninterrupted one does; what ran ahead is not done again."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from realrl.mesh.device_mesh import Cluster
from realrl.sched.events import CommitCheckpoint, SaveIntervalPassed, Send
from realrl.sched.messages import RunCall, SaveCheckpoint
from realrl.sched.samples.in_flight import SURPLUS, CallRecord, FlightLog, InFlight
from realrl.sched.track.track_plan import ResumePoint
from tests.sched.plans import make_plan, on_all, plans, ppo, saved_every_step, with_resume
from tests.sched.simulator import Simulation
from tests.sched.test_dropping import dropped, grpo, split
from tests.sched.test_orders import ROWS, SEEDS, membership, orders, split_ppo
from tests.sched.test_staleness import overlap_plan, with_staleness

NOISE = ("time_s/", "memory_gb/", "bytes/")


def resume(whole, step, **settings):
    """A run that continues from a checkpoint of another one, through the form that a file keeps."""
    commit = whole.checkpoints[step]
    commit = msgspec.json.decode(msgspec.json.encode(commit), type=CommitCheckpoint)
    point = ResumePoint(step, commit.cursor, commit.versions, commit.in_flight)
    plan = with_resume(whole.master_plan, point)
    restored = whole.saved_rows.get(step, {})
    return Simulation(plan, n_rows=whole.n_rows, drop_share=whole.drop_share, restored=restored, **settings)


def numbers(simulation, after):
    """Metrics of later steps that timing must not change."""
    return [
        {name: value for name, value in report.metrics.items() if not name.startswith(NOISE) and name[-2:] != "/n"}
        for report in simulation.reports
        if report.step > after
    ]


def assert_same_end(resumed, whole, step):
    """Loaded samples, versions that they were made with, batches and numbers are those of the uninterrupted run."""
    cursor = whole.checkpoints[step].cursor
    loaded = [i for i in whole.order[cursor.rows_consumed :] if i not in resumed.plan.in_flight.dropped]
    assert resumed.order == loaded
    made_before = {(r.call, i): r.version for r in resumed.plan.in_flight.calls for i in r.ids if r.version is not None}
    assert not made_before.keys() & resumed.versions.keys()
    later = set(whole.order[cursor.rows_consumed :])
    assert {**made_before, **resumed.versions} == {k: v for k, v in whole.versions.items() if k[1] in later}
    assert numbers(resumed, step) == numbers(whole, step)


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
@pytest.mark.parametrize("min_n_seqs", [None, 2])
@pytest.mark.parametrize("devices", ["split", "shared"])
def test_stale_runs_continue_exactly(max_staleness, min_n_seqs, devices):
    settings = {"n_seqs": 4, "gen_n_seqs": 2, "max_staleness": max_staleness, "min_n_seqs": min_n_seqs}
    if devices == "split":
        plan = split_ppo(**settings, n_steps=6, save_every_steps=1)
    else:
        mfcs = ppo(**settings)
        plan = make_plan(mfcs, on_all(mfcs, Cluster(1, 2)), Cluster(1, 2), n_steps=6, save_every_steps=1)
    for seed in range(3):
        whole = Simulation(plan, seed=seed, n_rows=9).run()
        whole.check_complete()
        for step in range(1, 6):
            resumed = resume(whole, step, seed=seed + 10).run()
            resumed.check_complete()
            assert_same_end(resumed, whole, step)
            generated = {r.step for r in resumed.plan.in_flight.calls if r.call == "actor_gen" and r.version < step}
            assert generated == set(range(step + 1, min(step + max_staleness, 6) + 1))


def test_a_resumed_run_is_saved_and_resumed_again():
    plan = split_ppo(n_seqs=4, max_staleness=2, n_steps=6, save_every_steps=1)
    whole = Simulation(plan, seed=1, n_rows=9).run()
    again = resume(whole, 2, seed=2).run()
    last = resume(again, 3, seed=3).run()
    assert_same_end(last, whole, 3)
    stale = {(r.call, r.step, r.version) for r in whole.checkpoints[3].in_flight.calls if r.call == "actor_gen"}
    assert {(r.call, r.step, r.version) for r in last.plan.in_flight.calls if r.call == "actor_gen"} >= {
        found for found in stale if found[2] < 3
    }


@orders(60)
@given(plan=plans(), seed=SEEDS, n_rows=ROWS, data=st.data())
def test_any_plan_continues_with_every_sample_once(plan, seed, n_rows, data):
    plan = saved_every_step(plan)
    whole = Simulation(plan, seed=seed, n_rows=n_rows).run()
    step = data.draw(st.integers(1, plan.main.steps))
    if step == plan.main.steps:
        assert whole.checkpoints[step].in_flight == InFlight()
        return
    resumed = resume(whole, step, seed=seed + 1).run()
    resumed.check_complete()
    assert resumed.order == whole.order[step * plan.main.step_size :]


def reads_settled_versions(plan):
    """Return True if timing has no part in which version a call reads.

    Then a trained role's other calls all lead to its training, which is one call a step.
    """
    producers = {key: call for call in plan.main.calls for key in call.mfc.output_keys}

    def before(call):
        found = {producers[key].name: producers[key] for key in call.mfc.input_keys if key in producers}
        return found.keys() | {name for producer in found.values() for name in before(producer)}

    trains = {call.mfc.role: call for call in plan.main.calls if call.mfc.is_train}
    return all(
        call.mfc.is_train
        or call.mfc.role not in trains
        or (call.name in before(trains[call.mfc.role]) and trains[call.mfc.role].mfc.n_seqs == plan.main.step_size)
        for call in plan.main.calls
    )


@orders(25)
@given(plan=plans(max_staleness=0, drops=True).filter(reads_settled_versions), seed=SEEDS, n_rows=ROWS, data=st.data())
def test_runs_that_drop_samples_continue_exactly(plan, seed, n_rows, data):
    plan = saved_every_step(plan)
    whole = Simulation(plan, seed=seed, n_rows=n_rows).run()
    step = data.draw(st.integers(1, plan.main.steps))
    if step == plan.main.steps:
        return
    resumed = resume(whole, step, seed=seed + 1).run()
    resumed.check_complete_after_resume()
    assert_same_end(resumed, whole, step)


def test_stale_runs_that_drop_samples_continue_with_the_same_ones():
    """Timing decides which parameters a replacement reads, and not which samples are loaded, dropped and kept."""
    mfcs = with_staleness(grpo(), gen=2)
    cluster, allocations = split(mfcs)
    allocations["rew"] = allocations["ref"]  # training shares its devices with no other call
    plan = make_plan(mfcs, allocations, cluster, n_steps=5, save_every_steps=1, max_refill_rounds=100)
    seen = set()
    for seed in range(10):
        whole = Simulation(plan, seed=seed, n_rows=19, drop_share=(0.3, 0.7)[seed % 2], validate=seed < 3).run()
        for step in range(1, 5):
            resumed = resume(whole, step, seed=seed + 1, validate=seed < 3).run()
            in_flight = resumed.plan.in_flight
            seen |= {"surplus" if call == SURPLUS else "dropped" for call in in_flight.dropped.values()}
            assert [dropped(r) for r in resumed.reports] == [dropped(r) for r in whole.reports[step:]]
            later = {key: batches for key, batches in membership(whole).items() if key[0] == "train" and key[1] > step}
            assert {key: batches for key, batches in membership(resumed).items() if key[0] == "train"} == later
            before = {(r.call, i): r.version for r in in_flight.calls for i in r.ids if r.version is not None}
            assert before.items() <= whole.versions.items()
            assert not before.keys() & resumed.versions.keys()
    assert seen == {"dropped", "surplus"}


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_run_that_is_killed_at_any_moment_ends_the_same(max_staleness):
    """Everything but the checkpoints that are in place is lost; from the newest of them the run goes on."""
    plan = split_ppo(n_seqs=4, gen_n_seqs=2, max_staleness=max_staleness, n_steps=5, save_every_steps=1)
    whole = Simulation(plan, seed=1, n_rows=9).run()
    n_actions = 0
    for moment in range(10, 10_000, 11):
        hurt = Simulation(plan, seed=2, n_rows=9, validate=False).run(stop_after=moment)
        if hurt.end is not None:
            break
        in_place = [step for step, commit in hurt.checkpoints.items() if commit and step not in hurt.commits]
        if not in_place:
            continue
        if hurt.checkpoints[max(in_place)].is_last:  # a restart finds nothing to do
            assert max(in_place) == plan.main.steps
            continue
        n_actions += 1
        resumed = resume(hurt, max(in_place), seed=moment, validate=False).run()
        resumed.check_complete()
        assert_same_end(resumed, whole, max(in_place))
    assert n_actions > 12


def test_a_checkpoint_waits_for_calls_that_read_older_parameters():
    """No dispatch under way when the ranks are asked reads parameters older than those of the checkpoint."""
    waited, plan = 0, saved_every_step(overlap_plan())
    for seed in range(10):
        simulation = Simulation(plan, seed=seed, n_rows=9)
        while simulation.end is None:
            simulation.run(stop_after=1)
            run = simulation.master._run
            if run is None or not simulation.instructions:
                continue
            for instruction in simulation.instructions[-1]:
                if isinstance(instruction, Send) and isinstance(instruction.request, SaveCheckpoint):
                    assert not run.main.scheduler.reading_before(instruction.request.step)
            waited += run._checkpoints._held is not None
    assert waited


def test_the_clock_saves_the_step_whose_parameters_are_still_there():
    for seed in range(5):
        simulation = Simulation(split_ppo(n_seqs=4, n_steps=5), seed=seed, n_rows=9).run(stop_after=20 * seed + 30)
        trained = {
            i.request.step
            for batch in simulation.instructions
            for i in batch
            if isinstance(i, Send) and isinstance(i.request, RunCall) and i.request.call.endswith("_train")
        }
        assert simulation.feed(SaveIntervalPassed()) == []
        wanted = max([simulation.master.step, *trained])
        simulation.run()
        assert list(simulation.checkpoints) == [wanted]


def test_what_is_complete_is_forgotten():
    log = FlightLog(InFlight())
    log.add_call(CallRecord("gen", 2, ("1/a",), 1))
    log.add_call(CallRecord("gen", 3, ("1/b", "1/c"), 1))
    log.add_dropped(3, "filter", ["1/c"])
    assert log.after(2) == InFlight((CallRecord("gen", 3, ("1/b", "1/c"), 1),), {"1/c": "filter"})
    assert log.after(1).steps == {2, 3}
    log.forget(2)
    log.forget(3)
    assert log.after(0) == InFlight()


def test_what_was_done_before_is_told_once():
    log = FlightLog(
        InFlight((CallRecord("gen", 3, ("1/b", "1/c"), 1), CallRecord("rew", 3, ("1/b",))), {"1/c": "filter"})
    )
    assert log.done_before("1/b") == {"gen": 1, "rew": None}
    assert log.knows("gen")
    assert log.knows_all("gen", ["1/b", "1/c"])
    assert not log.knows_all("gen", ["1/b", "1/d"])
    assert log.split("gen", ("1/b", "1/d")) == (("1/d",), ("1/b",))
    assert log.split("gen", ("1/b",)) == (("1/b",), ())
    assert log.was_dropped("1/c")
    assert log.take_drops(["1/c"]) == {"filter": ["1/c"]}
    assert not log.was_dropped("1/c")
