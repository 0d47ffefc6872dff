"""Calls that run ahead of training: by how many steps, with which parameters, and that all of it is told."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realrl.errors import ConfigError
from realrl.graph.build import LeadWait, build_graph, lead_waits
from realrl.graph.mfc import MFCDef, ModelName, ParamReallocHook
from realrl.mesh.device_mesh import Cluster
from realrl.plan.samples.cursor import DatasetCursor
from realrl.sched.events import Send
from realrl.sched.messages import CallDone, RunCall
from realrl.sched.track.track_plan import ResumePoint
from tests.sched.plans import INFERENCE, TRAIN, make_plan, on_all, plans, ppo
from tests.sched.simulator import Simulation
from tests.sched.test_dropping import grpo, split_plan
from tests.sched.test_orders import ROWS, SEEDS, membership, orders, split_ppo


def leads(mfcs):
    return {(wait.writer, wait.reader): wait.lead for wait in lead_waits(build_graph(mfcs, ["prompt_ids"]))}


def with_staleness(mfcs, **staleness):
    return [dataclasses.replace(mfc, max_staleness=staleness.get(mfc.name, 0)) for mfc in mfcs]


# ---------------------------------------------------------------- how far ahead


def test_a_reader_leads_by_its_staleness():
    assert leads(ppo()) == {}
    assert leads(with_staleness(ppo(), actor_gen=2)) == {("actor_train", "actor_gen"): 2}


def test_a_reader_behind_a_fresher_one_has_no_lead():
    assert leads(with_staleness(ppo(), critic_inf=2)) == {}  # generation waits for the newest actor
    both = leads(with_staleness(ppo(), critic_inf=3, actor_gen=1))
    assert both == {("actor_train", "actor_gen"): 1, ("critic_train", "critic_inf"): 1}


def test_where_a_fresh_call_decides_what_is_dropped_nothing_leads():
    mfcs = with_staleness(grpo(), gen=2)
    assert leads(mfcs) == {("train", "gen"): 2}
    judge = MFCDef("judge", "actor", INFERENCE, "x", ("input_ids",), ("verdict",), n_seqs=4)
    mfcs = [dataclasses.replace(m, input_keys=("rewards", "verdict")) if m.name == "filter" else m for m in mfcs]
    assert leads([*mfcs, judge]) == {("train", "gen"): 1}  # the judge of step i - 1 waits for training at i - 2


def test_a_reader_that_changes_parameters_has_no_fixed_lead():
    pull = {"pre_hooks": (ParamReallocHook(source=ModelName("actor")),), "max_staleness": 2}
    mfcs = [dataclasses.replace(mfc, **pull) if mfc.name == "ref_inf" else mfc for mfc in ppo()]
    assert leads(mfcs) == {}


def test_parameters_that_a_hook_reads_after_the_call_must_be_read_before_they_change():
    push = (ParamReallocHook(target=ModelName("copy")),)
    mfcs = [*ppo(), MFCDef("copied", "copy", INFERENCE, "x", ("input_ids",), ("hints",), n_seqs=8)]
    mfcs = [dataclasses.replace(m, max_staleness=1) if m.name == "actor_gen" else m for m in mfcs]
    waits = lead_waits(build_graph(mfcs, ["prompt_ids"]))
    assert waits == (LeadWait("actor_train", "actor_gen", 1),)
    mfcs = [dataclasses.replace(m, post_hooks=push) if m.name == "actor_gen" else m for m in mfcs]
    assert lead_waits(build_graph(mfcs, ["prompt_ids"])) == ()  # it changes the copy


def test_replacements_are_waited_for_unless_they_wait_for_training():
    stay = (ParamReallocHook(source=ModelName("actor")),)
    mfcs = [dataclasses.replace(m, post_hooks=stay) if m.name == "gen" else m for m in with_staleness(grpo(), gen=1)]
    assert lead_waits(build_graph(mfcs, ["prompt_ids"])) == (LeadWait("train", "gen", 1, "finished"),)
    plan = split_plan(mfcs, n_steps=4)
    for seed in range(5):
        simulation = Simulation(plan, seed=seed, n_rows=9, drop_share=0.5).run()
        simulation.check_complete()
        assert all(simulation.versions_read["gen", step] == {max(0, step - 2)} for step in range(1, 5))


def test_capacity_must_hold_what_runs_ahead():
    mfcs = ppo(max_staleness=2)
    make_plan(mfcs, on_all(mfcs, Cluster(1, 1)), Cluster(1, 1), capacity_steps=3)
    with pytest.raises(ConfigError, match="capacity_steps=2: with stale calls 3 steps of samples must fit"):
        make_plan(mfcs, on_all(mfcs, Cluster(1, 1)), Cluster(1, 1), capacity_steps=2)


# ---------------------------------------------------------------- with which parameters


@pytest.mark.parametrize("max_staleness", [0, 1, 2])
@pytest.mark.parametrize("devices", ["split", "shared"])
def test_every_step_is_generated_by_one_known_version(max_staleness, devices):
    settings = {"n_seqs": 4, "gen_n_seqs": 2, "max_staleness": max_staleness}
    if devices == "split":
        plan = split_ppo(**settings, n_steps=5, save_every_steps=1)
    else:
        mfcs = ppo(**settings)
        plan = make_plan(mfcs, on_all(mfcs, Cluster(1, 2)), Cluster(1, 2), n_steps=5, save_every_steps=1)
    memberships = []
    for seed in range(10):
        simulation = Simulation(plan, seed=seed, n_rows=50, validate=seed < 2).run()
        simulation.check_complete()
        memberships.append(membership(simulation))
        for (name, step), versions in simulation.versions_read.items():
            lead = max_staleness if name in ("actor_gen", "critic_inf") else 0
            assert versions == {max(0, step - 1 - lead)}, (name, step)
        if max_staleness:
            expected = [min(step - 1, max_staleness) for step in range(1, 6)]
            assert [report.metrics["staleness/mean"] for report in simulation.reports] == expected
            assert [report.metrics["staleness/max"] for report in simulation.reports] == expected
        else:
            assert all("staleness/mean" not in report.metrics for report in simulation.reports)
    assert all(found == memberships[0] for found in memberships)


def test_generation_overlaps_training_on_other_devices():
    """While the actor trains step 1, generation of step 2 is under way."""
    plan = overlap_plan()
    overlaps = 0
    for seed in range(10):
        simulation = Simulation(plan, seed=seed, n_rows=50).run()
        log = [e for batch in zip_events(simulation) for e in batch]
        sent = log.index(("sent", "train", 1))
        overlaps += log.index(("sent", "gen", 2)) < sent < log.index(("done", "gen", 2))
    assert overlaps


def overlap_plan():
    mfcs = [m for m in with_staleness(grpo(), gen=1) if m.name != "filter"]
    train = dataclasses.replace(mfcs[-1], input_keys=("input_ids", "rewards", "ref_logprobs"))
    return split_plan([*mfcs[:-1], train])


def zip_events(simulation):
    """Yield what the master learnt and sent, event by event."""
    for event, instructions in zip(simulation.events, simulation.instructions, strict=True):
        yield [("done", event.call, event.step)] if isinstance(event, CallDone) else []
        requests = [i.request for i in instructions if isinstance(i, Send)]
        yield [("sent", request.call, request.step) for request in requests if isinstance(request, RunCall)]


def test_a_resumed_run_begins_with_the_parameters_of_its_checkpoint():
    rows = [f"row{i}" for i in range(50)]
    cursor = DatasetCursor(rows, seed=7, shuffle=True).state(8)
    plan = split_ppo(n_seqs=4, max_staleness=1, n_steps=5, resume=ResumePoint(2, cursor))
    simulation = Simulation(plan, seed=3, n_rows=50).run()
    simulation.check_complete()
    assert [simulation.versions_read["actor_gen", step] for step in (3, 4, 5)] == [{0}, {0}, {1}]  # after resuming
    assert [report.metrics["staleness/mean"] for report in simulation.reports] == [0.0, 1.0, 1.0]


@pytest.mark.parametrize("max_staleness", [1, 2])
def test_replacements_are_at_most_as_stale(max_staleness):
    plan = split_plan(with_staleness(grpo(), gen=max_staleness), n_steps=5, save_every_steps=1)
    for seed in range(10):
        simulation = Simulation(plan, seed=seed, n_rows=9, validate=seed < 2, drop_share=0.5).run()
        simulation.check_complete()
        for step in range(1, 6):
            oldest = max(0, step - 1 - max_staleness)
            versions = simulation.versions_read["gen", step]
            assert min(versions) == oldest
            assert max(versions) <= step - 1
            metrics = simulation.reports[step - 1].metrics
            assert 0 <= metrics["staleness/mean"] <= metrics["staleness/max"] <= max_staleness


@pytest.mark.parametrize("n_seqs", [1, 4])
def test_training_waits_for_no_replacements_of_a_step_that_waits_for_it(n_seqs):
    """The judge of step 2 waits for training at step 1, which waits for the stale call to be done with step 2."""
    mfcs = [
        MFCDef("stale", "a", INFERENCE, "x", ("prompt_ids",), ("k0",), n_seqs=1, max_staleness=1,
               post_hooks=(ParamReallocHook(source=ModelName("a")),)),
        MFCDef("judge", "a", INFERENCE, "x", ("k0",), ("k1",), n_seqs=n_seqs, may_drop=True),
        MFCDef("train", "a", TRAIN, "x", ("k1",), n_seqs=n_seqs),
    ]  # fmt: skip
    assert lead_waits(build_graph(mfcs, ["prompt_ids"])) == (LeadWait("train", "stale", 1, "read"),)
    plan = make_plan(mfcs, on_all(mfcs, Cluster(1, 1)), Cluster(1, 1), n_steps=3, max_refill_rounds=100)
    for seed in range(20):
        simulation = Simulation(plan, seed=seed, n_rows=9).run()
        simulation.check_complete()
        for step in range(1, 4):
            versions = simulation.versions_read["stale", step]
            assert min(versions) == max(0, step - 2)
            assert max(versions) < step


@orders(25)
@given(plan=plans(drops=True, max_staleness=2), seed=SEEDS, n_rows=ROWS, share=st.sampled_from([0.1, 0.4]))
def test_what_the_master_records_is_what_ranks_read(plan, seed, n_rows, share):
    simulation = Simulation(plan, seed=seed, n_rows=n_rows, drop_share=share).run()
    simulation.check_complete()
