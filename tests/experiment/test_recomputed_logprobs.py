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


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (("max_staleness=1",), "max_staleness"),
        (("algorithm.importance_cap=2",), "algorithm.importance_cap"),
        (("calls.actor_gen.max_staleness=1",), "calls.actor_gen.max_staleness"),
        (("max_staleness=1", "calls.actor_gen.max_staleness=2"), "calls.actor_gen.max_staleness"),
    ],
)
def test_off_policy_needs_them(overrides: tuple[str, ...], reason: str) -> None:
    with pytest.raises(ConfigError, match=f"recompute_logprobs=false, but {reason} weighs tokens"):
        plan("ppo", *overrides, "algorithm.recompute_logprobs=false")


def test_the_settings_of_calls_decide() -> None:
    false = "algorithm.recompute_logprobs=false"
    on_policy = plan("self_play", "max_staleness=1", "calls.actor_gen.max_staleness=0", "algorithm.importance_cap=null")
    assert "actor_inf" not in {call.name for call in on_policy.mfcs}
    with pytest.raises(ConfigError, match="but max_staleness weighs"):  # the opponent's
        plan("self_play", "max_staleness=1", "calls.actor_gen.max_staleness=0", false)
    with pytest.raises(ConfigError, match=r"but calls\.opponent_gen\.max_staleness weighs"):
        plan("self_play", "calls.opponent_gen.max_staleness=1", false)
    names = {call.name for call in plan("ppo", "max_staleness=1", "calls.actor_gen.max_staleness=0", false).mfcs}
    assert "actor_inf" not in names
