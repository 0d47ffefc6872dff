"""Calls on made-up samples: what reaches a reward function, and what goes wrong in one."""

import json
from collections import Counter

import pytest
import torch

from realrl.config.compose import compose
from realrl.engine.groups import ALONE
from realrl.errors import CallError
from realrl.experiment.discovery import load_experiment
from realrl.experiment.models import with_precision
from realrl.experiment.planning import plan_run
from realrl.profiler.calls import CallBench
from realrl.sim.probes import Probe

FUNCTIONS = """
import json

def judge(prompt, response, row):
    with open({path!r}, "a") as seen:
        seen.write(json.dumps([prompt, row["answer"]]) + chr(10))
    return 1.0

def group(prompt_ids, responses_ids):
    with open({path!r}, "a") as seen:
        seen.write(json.dumps([len(response) for response in responses_ids]) + chr(10))
    return [0.0 for _ in responses_ids]

def fail(prompt, response):
    raise ValueError("no such thing")
"""


@pytest.fixture
def make(tmp_path):
    functions, data = tmp_path / "mine.py", tmp_path / "data.jsonl"
    functions.write_text(FUNCTIONS.format(path=str(tmp_path / "seen.jsonl")))
    data.write_text('{"prompt": "a b", "answer": "c"}\n{"prompt": "b", "answer": "d"}\n')

    def bench(function, *overrides):
        experiment = load_experiment("grpo")
        settings = ["precision=fp32", "launcher=inline", f"dataset.path={data}", *overrides]
        settings.append(f"algorithm.reward_function={functions}:{function}")
        return CallBench(
            plan_run(with_precision(compose(experiment, settings)), experiment), ALONE, torch.device("cpu")
        )

    return bench


def seen_in(folder):
    return [json.loads(line) for line in (folder / "seen.jsonl").read_text().splitlines()]


def test_reward_functions_judge_random_responses_to_prompts_of_the_dataset(make, tmp_path):
    call = make("judge").call(Probe("rewards", "", 0, 12, 6, 4, 4))
    assert call() > 0
    assert Counter(map(tuple, seen_in(tmp_path))) == {("a b", "c"): 8, ("b", "d"): 4}
    call()
    assert len(seen_in(tmp_path)) == 24


def test_functions_of_groups_get_all_responses_to_a_prompt(make, tmp_path):
    make("group").call(Probe("rewards", "", 0, 8, 6, 5, 4))()
    assert seen_in(tmp_path) == [[5, 5, 5, 5]] * 2


def test_a_function_that_fails_ends_the_call_as_it_would_end_a_run(make):
    call = make("fail").call(Probe("rewards", "", 0, 4, 6, 4, 4))
    with pytest.raises(CallError, match=r"(?s)no such thing.*reward_on_failure"):
        call()
    assert make("fail", "algorithm.reward_on_failure=zero").call(Probe("rewards", "", 0, 4, 6, 4, 4))() > 0


def test_calls_of_several_sizes_follow_each_other(make):
    bench = make("judge")
    for n in (4, 1, 16):
        assert bench.call(Probe("calls", "", 0, n, 6, 4))() > 0
