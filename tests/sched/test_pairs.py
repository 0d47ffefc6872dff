"""Two calls that train together: any order of completion, nothing between them, and the samples that they get alone."""

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realrl.graph.mfc import MFCDef
from realrl.mesh.device_mesh import Allocation, Cluster, DeviceMesh, ParallelStrategy
from realrl.plan.hooks import Overlap
from realrl.sched.messages import RunCall
from realrl.sched.track.track_plan import ResumePoint
from tests.sched.plans import INFERENCE, TRAIN, make_plan, on_all, plans, ppo, with_resume
from tests.sched.simulator import Simulation
from tests.sched.test_orders import ROWS, SEEDS, membership, orders, requests

FUSE = ("actor_train", "critic_train")


def without_pairs(plan):
    """The same plan, with each call by itself."""
    calls = tuple(dataclasses.replace(call, partner="", joins="") for call in plan.main.calls)
    return dataclasses.replace(plan, main=dataclasses.replace(plan.main, calls=calls))


@orders(150)
@given(plan=plans(fuses=True), seed=SEEDS, n_rows=ROWS)
def test_any_plan_with_a_pair_ends_with_everything_done_once(plan, seed, n_rows):
    simulation = Simulation(plan, seed=seed, n_rows=n_rows).run()
    simulation.check_complete()
    assert simulation.start.last_step == plan.main.steps


@orders(60)
@given(plan=plans(fuses=True), seeds=st.tuples(SEEDS, SEEDS), n_rows=ROWS)
def test_membership_is_that_of_calls_by_themselves(plan, seeds, n_rows):
    together = Simulation(plan, seed=seeds[0], n_rows=n_rows, validate=False).run()
    apart = Simulation(without_pairs(plan), seed=seeds[1], n_rows=n_rows, validate=False).run()
    assert membership(together) == membership(apart)
    assert together.order == apart.order


@orders(60)
@given(plan=plans(fuses=True, drops=True), seed=SEEDS, n_rows=ROWS)
def test_pairs_where_samples_are_dropped(plan, seed, n_rows):
    Simulation(plan, seed=seed, n_rows=n_rows).run().check_complete()


@orders(60)
@given(plan=plans(fuses=True), seed=SEEDS, n_rows=ROWS, data=st.data())
def test_a_resumed_run_goes_on_with_the_same_pairs(plan, seed, n_rows, data):
    whole = Simulation(plan, seed=seed, n_rows=n_rows).run()
    step = data.draw(st.integers(0, plan.main.steps - 1))
    point = ResumePoint(step, whole.master.cursor_state(step))
    resumed = Simulation(with_resume(plan, point), seed=seed + 1, n_rows=n_rows).run()
    resumed.check_complete()
    after = {key: batches for key, batches in membership(whole).items() if key[1] > step}
    assert membership(resumed) == after


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_pair_of_ppo_starts_when_both_can(max_staleness):
    cluster = Cluster(1, 2)
    mfcs = ppo(4, max_staleness=max_staleness)
    plan = make_plan(mfcs, on_all(mfcs, cluster), cluster, fuse=FUSE, n_steps=3, save_every_steps=1)
    for seed in range(10):
        simulation = Simulation(plan, seed=seed, n_rows=9).run()
        simulation.check_complete()
        runs = [(rank, r) for rank, r in requests(simulation) if isinstance(r, RunCall)]
        for rank in range(2):
            mine = [request for at, request in runs if at == rank]
            for one, other in itertools.pairwise(mine):
                if one.joins == "opens":
                    assert (one.call, other.call, other.joins) == (*FUSE, "closes")
                    assert other.seq == one.seq + 1
                    assert other.step == one.step


def test_parameters_do_not_stay_behind_a_pair_that_changes_them():
    cluster = Cluster(1, 2)
    one = Allocation(DeviceMesh(cluster, (0,)), ParallelStrategy(1, 1, 1))
    mfcs = [
        MFCDef("first", "a", INFERENCE, "x", ("prompt_ids",), ("k0",), n_seqs=4),
        MFCDef("train_a", "a", TRAIN, "x", ("k0",), n_seqs=1),
        MFCDef("elsewhere", "c", INFERENCE, "x", ("k0",), ("k1",), n_seqs=1),
        MFCDef("train_c", "c", TRAIN, "x", ("k1",), n_seqs=1),
    ]
    places = {mfc.name: one for mfc in mfcs}
    places["elsewhere"] = Allocation(DeviceMesh(cluster, (0, 1)), ParallelStrategy(1, 1, 2))
    overlap = Overlap(frozenset({"elsewhere"}), frozenset(), {})
    plan = make_plan(mfcs, places, cluster, n_steps=2, fuse=("train_a", "train_c"), overlap=overlap)
    for seed in range(20):
        Simulation(plan, seed=seed, n_rows=8).run().check_complete()  # compares what is read with what is recorded


def test_a_call_tells_that_it_waits_for_its_partner():
    mfcs = [
        MFCDef("early", "a", TRAIN, "x", ("prompt_ids",), n_seqs=4),
        MFCDef("score", "c", INFERENCE, "x", ("prompt_ids",), ("score",), n_seqs=4),
        MFCDef("late", "b", TRAIN, "x", ("score",), n_seqs=4),
    ]
    cluster = Cluster(1, 1)
    plan = make_plan(mfcs, on_all(mfcs, cluster), cluster, fuse=("early", "late"), n_steps=1)
    simulation = Simulation(plan, seed=1, n_rows=9)
    told = set()
    while simulation.end is None:
        simulation.run(stop_after=1)
        told.add(simulation.master.explain("early"))
    assert "waits for 'late', which trains with it and waits for samples of step 1" in told
    simulation.check_complete()
