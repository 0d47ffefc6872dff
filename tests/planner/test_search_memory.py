"""Bytes that the search counts: at most those of a run, so that no plan is left out that would fit, and little less."""

import json
import math
import random
from dataclasses import replace
from functools import lru_cache
from statistics import median

import pytest

from realrl.cli.machines import kernels_here
from realrl.planner.study import Study
from realrl.search.branch import search
from realrl.search.memory.devices import Learned
from realrl.search.space import Placed
from tests.planner.cases import request_for
from tests.search.problems import all_plans, few_of

GB = 1_000_000_000
LLAMA_1B = {
    "model_type": "llama",
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
}


@pytest.fixture(name="model")
def a_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_1B))
    return f"models.*.path={tmp_path}"


def random_plan(problem, rng):
    """A plan on the cluster, its halves and its quarters."""
    plan, n = [], problem.model.cluster.n_devices
    for choices in problem.choices:
        choice = rng.choice([one for one in choices if one.n_devices in (n, n // 2, n // 4)])
        start = rng.randrange(0, n, choice.n_devices)
        plan.append(Placed((start, start + choice.n_devices), choice))
    return tuple(plan)


def counted(name, model, devices, memories, n_plans, *settings, **machine):
    """Yield models of searches on devices of some sizes, random plans, and what a run's count shows of them."""
    rng = random.Random(name)
    for memory in memories:
        problem = Study(
            request_for(model, *settings, name=name, devices=devices, memory_bytes=memory, **machine)
        ).problem
        for _ in range(n_plans):
            plan = random_plan(problem, rng)
            yield problem.model, plan, problem.model.shows(plan)


def check(plans, *, likely=0.98):
    """Bytes are at most those of a run, about as many as likely, and known once a plan was refused."""
    is_left_out, shares, ratios, shares_known, n_more = [], [], [], [], 0
    for model, plan, shown in plans:
        least, learned = model.need(plan), Learned()
        assert least <= shown.n_bytes
        is_left_out.append(least > model.capacity)
        shares.append(least / shown.n_bytes)
        ratios.append(model.memory.likely(plan, learned) / shown.n_bytes)
        model.memory.learn(plan, shown, learned)
        known = model.memory.need(dict(enumerate(plan)), learned)
        assert least <= known <= shown.n_bytes <= model.memory.likely(plan, learned)
        shares_known.append(known / shown.n_bytes)
        n_more += known > least
    assert likely < median(ratios) < 1.02
    assert median(shares) > 0.8
    assert n_more > 0.2 * len(shares)
    assert median(shares_known) > 0.97  # the order of ranks says which parameters each device gets
    return is_left_out


@pytest.mark.parametrize("name", ["ppo", "remax", "ppo_ref_ema"])
def test_no_plan_that_fits_is_left_out(name, model):
    likely = 0.95 if name == "ppo_ref_ema" else 0.98  # copies for an average are not counted
    is_left_out = check(counted(name, model, 8, (10 * GB, 14 * GB, 20 * GB), 25), likely=likely)
    assert min(is_left_out.count(one) for one in (False, True)) >= 5


def test_devices_of_a_node_are_connected_for_rows_of_the_collective_plane(model):
    """The count of a run is known before a plan is refused, whatever the calls are."""
    check(counted("grpo", model, 16, (20 * GB,), 40, "cluster.data_plane=collective"), likely=0.99)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "devices"), [("safe_rlhf", 8), ("remax", 16), ("ppo", 24), ("self_play", 16)])
def test_bytes_on_one_node_and_on_several(name, devices, model):
    check(counted(name, model, devices, (80 * GB,), 60))


def test_a_save_takes_more_than_short_rows_do(model):
    """The search knows what a save gathers before a plan is refused."""
    short = (
        "models.actor.backend=megatron",
        "n_seqs=8",
        "dataset.max_prompt_tokens=16",
        "dataset.max_answer_tokens=16",
    )
    n_more = 0
    for saves in ("true", "false"):
        for fast, plan, shown in counted("sft", model, 8, (80 * GB,), 20, *short, f"save.at_end={saves}"):
            likely = fast.memory.likely(plan, Learned())
            assert fast.need(plan) <= shown.n_bytes
            assert likely == pytest.approx(shown.n_bytes, rel=0.001)
            n_more += likely if saves == "true" else -likely
    assert n_more > GB


OFFLOADED = ("models.actor.optimizer.offload=true", "allocation.offload=[ref]")


@pytest.mark.parametrize("settings", [(), OFFLOADED, ("save.every_steps=1",)])
def test_host_memory_is_a_cpus_own(settings, model):
    """State that is offloaded stays in it, and so do the copies of a save."""
    for fast, plan, shown in counted(
        "dpo", model, 2, (80 * GB,), 20, *settings, hardware="two_cores", kernels=kernels_here
    ):
        assert fast.need(plan) <= shown.n_bytes
        assert fast.memory.likely(plan, Learned()) == pytest.approx(shown.n_bytes, rel=0.05)


SEEDS = (59, 249, 316)  # small meshes fit beside one stage of a pipeline, and not beside the first
_SLOW = pytest.mark.slow, pytest.mark.timeout(600)
SLOW = [pytest.param(seed, marks=_SLOW) for seed in range(80) if seed not in SEEDS]


@pytest.mark.parametrize("seed", [*SEEDS, *SLOW])
def test_the_best_plan_that_fits_as_a_run_counts(seed):
    """Few choices, and no more memory than one of the faster plans needs; no walk looks for places."""
    rng = random.Random(seed)
    name, devices = rng.choice(["ppo", "grpo", "remax", "dpo"]), rng.choice([2, 4, 8])
    whole = Study(request_for(name=name, devices=devices)).problem
    shows = lru_cache(maxsize=None)(whole.model.shows)
    roomy = replace(whole.model, capacity=math.inf)
    found = replace(whole, model=roomy, choices=few_of(rng, roomy.cluster, whole.choices, 60), n_walks=0)
    plans = sorted((roomy.period(plan), shows(plan).n_bytes) for plan in all_plans(found))
    capacity = rng.choice(plans[: max(1, len(plans) // 3)])[1]
    tight = replace(roomy, capacity=capacity, accepts=lambda plan: shows(plan).n_bytes <= capacity, shows=shows)
    *_, last = search(replace(found, model=tight))
    assert last.period == pytest.approx(min(period for period, n_bytes in plans if n_bytes <= capacity))
    assert last.bound <= last.period
    assert shows(last.plan).n_bytes <= capacity
