"""Runs in which old log-probabilities are computed again before training."""

from __future__ import annotations

import pytest

from realrl.config.compose import compose
from realrl.errors import ConfigError
from realrl.experiment.discovery import load_experiment
from realrl.experiment.planning import plan_run
from realrl.experiment.run_plan import RunPlan


def plan(name: str, *overrides: str) -> RunPlan:
    experiment = load_experiment(name)
    return plan_run(compose(experiment, overrides), experiment)


@pytest.mark.parametrize("name", ["ppo", "grpo", "rloo", "safe_rlhf"])
@pytest.mark.parametrize(
    ("overrides", "again"),
    [
        ((), False),
        (("precision=bf16",), True),
        (("cluster.device=cuda",), True),
        (("cluster.device=cuda", "precision=fp32"), True),
        (("algorithm.recompute_logprobs=true",), True),
        (("precision=bf16", "algorithm.recompute_logprobs=false"), False),
    ],
)
def test_where_kernels_differ(name: str, overrides: tuple[str, ...], again: bool) -> None:
    calls = {call.name: call for call in plan(name, *overrides).mfcs}
    assert ("actor_inf" in calls) is again
    assert ("old_logprobs" in calls["actor_gen"].output_keys) is not again
    assert "behavior_logprobs" not in calls["actor_train"].input_keys
    assert "old_logprobs" in calls["actor_train"].input_keys


def test_off_policy_needs_them() -> None:
    for override, reason in (("max_staleness=1", "max_staleness"), ("algorithm.importance_cap=2", "importance_cap")):
        with pytest.raises(ConfigError, match=f"recompute_logprobs=false, but .*{reason} weighs tokens"):
            plan("ppo", override, "algorithm.recompute_logprobs=false")
