"""Bytes that the search counts: less than a run's, so that no plan is left out that would fit."""

import json
import random

import pytest

from realrl.planner.evaluate import is_possible
from realrl.planner.study import Study
from realrl.search.fast import Placed
from tests.planner.cases import request_for

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


def random_plan(problem, rng):
    """A plan on the node or its halves."""
    plan = []
    for choices in problem.choices:
        choice = rng.choice([one for one in choices if one.n_devices >= 4])
        start = rng.randrange(0, 8, choice.n_devices)
        plan.append(Placed((start, start + choice.n_devices), choice))
    return tuple(plan)


@pytest.mark.parametrize("name", ["ppo", "remax"])
def test_no_plan_that_fits_is_left_out(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_1B))
    fits = {False: 0, True: 0}
    rng = random.Random(name)
    for memory in (10 * GB, 14 * GB, 20 * GB):
        request = request_for(f"models.*.path={tmp_path}", name=name, devices=8, memory_bytes=memory)
        problem = Study(request).problem
        for _ in range(25):
            plan = random_plan(problem, rng)
            is_left_out = bool(problem.model.overflow(plan))
            assert not (is_left_out and is_possible(request, plan))
            fits[is_left_out] += 1
    assert min(fits.values()) >= 5
