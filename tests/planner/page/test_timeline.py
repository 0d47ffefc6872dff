"""Bars of what devices do: nothing is lost, nothing overlaps, and times are those of the run."""

from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from realrl.mesh.device_mesh import Cluster
from realrl.planner.page.memory import FIELDS, series_of
from realrl.planner.page.timeline import TICKS, Bar, Row, Work, timeline_of
from realrl.sim.cluster import SimulatedCluster
from realrl.sim.report import figures_of
from tests.sched.plans import make_plan, on_all, plans, ppo
from tests.sim.durations import CallDurations, HashedDurations, draw

ANY = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
N_ROWS = 50


def meshes_of(plan):
    return {call.name: call.ranks for call in plan.main.calls}


@ANY
@given(plan=plans(), seed=st.integers(0, 1000))
def test_any_run(plan, seed):
    run = SimulatedCluster(plan, HashedDurations(seed), draw, n_rows=N_ROWS).run()
    timeline = timeline_of(run, meshes_of(plan))
    assert [rank for group in timeline.groups for rank in group.ranks] == list(range(run.n_ranks))
    for group in timeline.groups:
        assert sorted(rank for row in group.rows for rank in row.ranks) == list(group.ranks)
        assert all(set(group.calls) == {n for n, ranks in meshes_of(plan).items() if r in ranks} for r in group.ranks)
        for row in group.rows:
            for bar in row.bars:
                assert 0 <= bar.begin <= bar.start <= bar.end <= TICKS
            assert all(before.end <= after.begin for before, after in pairwise(row.bars))
        together = [band for band in group.bands if band.n_ranks == len(group.ranks)]
        solid = sorted((band.start, band.first_end) for band in together)
        assert all(before[1] <= after[0] for before, after in pairwise(solid)), "what all do at once overlaps"
        assert all(band.begin <= band.start <= band.first_end <= band.end for band in group.bands)
    edges = [edge for _, begin, end in timeline.steps for edge in (begin, end)]
    assert edges == sorted(edges)
    assert (edges[0], edges[-1]) == (0, TICKS)
    assert 1 <= len(timeline.steps) <= 3
    chain = timeline.chain
    assert chain[-1].end == TICKS
    assert all(before.end == after.begin for before, after in pairwise(chain))


def test_bars_take_as_long_as_their_calls():
    seconds = {
        "actor_gen": 3.0,
        "rew_inf": 1.0,
        "ref_inf": 1.0,
        "critic_inf": 1.0,
        "actor_train": 2.0,
        "critic_train": 2.0,
    }
    cluster = Cluster(1, 2)
    plan = make_plan(ppo(), on_all(ppo(), cluster), cluster, n_steps=6)
    run = SimulatedCluster(plan, CallDurations(seconds), draw).run()
    timeline = timeline_of(run, meshes_of(plan))
    assert timeline.seconds == pytest.approx(30.0)
    assert [number for number, _, _ in timeline.steps] == [4, 5, 6]
    (group,) = timeline.groups
    (row,) = group.rows
    took = defaultdict(float)
    for bar in row.bars:
        took[timeline.works[bar.work].name] += (bar.end - bar.start) / TICKS * timeline.seconds
    assert took == pytest.approx({name: 3 * s for name, s in seconds.items()}, rel=1e-3)
    bound = defaultdict(float)
    for stretch in timeline.chain:
        bound[stretch.name] += (stretch.end - stretch.begin) / TICKS * timeline.seconds / 3
    assert bound == pytest.approx(figures_of(run).bounds, rel=1e-3)


def usage(**n_bytes):
    return tuple(n_bytes.get(name, 0) for name in FIELDS)


def test_memory_over_time():
    """A call has its own usage, with its hooks; between calls there is what both have of what stays."""
    works = (Work("gen", "call"), Work("train", "before"), Work("train", "call"), Work("dataset", "dataset"))
    row = Row((0,), (Bar(3, 0, 0, 5), Bar(0, 10, 10, 30), Bar(1, 40, 40, 50), Bar(2, 50, 60, 100)))
    gen = usage(parameters=10, cache=30)
    train = usage(parameters=12, optimizer=20, activations=5)
    pieces = series_of(row, works, {"gen": gen, "train": train})
    between = usage(parameters=10)
    assert pieces == [
        (0, 10, between), (10, 30, gen), (30, 40, between), (40, 100, train), (100, TICKS, between)
    ]  # fmt: skip
    assert series_of(Row((0,), ()), works, {"gen": gen}) == []
