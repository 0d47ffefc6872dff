"""Calls that evaluate an experiment."""

from __future__ import annotations

import pytest

from realrl.config.compose import compose
from realrl.errors import ConfigError
from realrl.experiment.discovery import load_experiment
from realrl.experiment.evaluation import eval_generation, evaluation_experiment
from realrl.experiment.planning import plan_run
from realrl.experiment.run_plan import RunPlan

TWO = ("cluster.n_devices_per_node=2",)


def plan(name: str, *overrides: str) -> RunPlan:
    experiment = load_experiment(name)
    return plan_run(compose(experiment, overrides), experiment)


@pytest.mark.parametrize(
    ("name", "calls"),
    [
        ("ppo", ["eval_actor_gen", "eval_rew_inf"]),
        ("dapo", ["eval_actor_gen", "eval_rew_inf"]),
        ("remax", ["eval_actor_gen", "eval_rew_inf"]),
        ("self_play", ["eval_actor_gen", "eval_rew_inf"]),
        ("safe_rlhf", ["eval_actor_gen", "eval_rew_inf", "eval_cost_inf"]),
        ("distill", ["eval_actor_gen"]),
        ("sft", ["eval_actor_judge"]),
        ("rw", ["eval_reward_judge"]),
        ("dpo", ["eval_ref_inf", "eval_actor_judge"]),
    ],
)
def test_what_evaluates(name: str, calls: list[str]) -> None:
    training = plan(name)
    evaluated = plan(name, "eval.every_steps=2")
    assert evaluated.evaluation is not None
    assert [mfc.name for mfc in evaluated.evaluation.mfcs] == calls
    assert not any(mfc.is_train or mfc.may_drop or mfc.max_staleness for mfc in evaluated.evaluation.mfcs)
    assert (training.mfcs, training.allocations, training.process_groups) == (
        evaluated.mfcs, evaluated.allocations, evaluated.process_groups
    )  # fmt: skip
    alone = plan(name, "eval.only=true")
    assert [mfc.name for mfc in alone.mfcs] == [call.removeprefix("eval_") for call in calls]
    assert alone.evaluation is None
    assert set(alone.roles) == {mfc.role for mfc in alone.mfcs}
    assert not any(role.trainable for role in alone.roles.values())


def test_an_evaluation_runs_where_training_does() -> None:
    calls = ("allocation.calls.actor_gen=t2", "allocation.calls.rew_inf=d1@0:1")
    planned = plan("ppo", *TWO, *calls, "eval.every_steps=1", "allocation.offload=[reward]")
    assert planned.evaluation is not None
    for base in ("actor_gen", "rew_inf"):
        assert planned.allocation_of(f"eval_{base}") == planned.allocations[base]
        ours, theirs = planned.hooks_of(f"eval_{base}"), planned.hooks[base]
        assert (ours.before, ours.after, ours.home) == (theirs.before, theirs.after, theirs.home)
    assert planned.hooks_of("eval_actor_gen").before, "the parameters must come in the layout of generation"
    assert planned.is_evaluating("eval_rew_inf")
    assert not planned.is_evaluating("rew_inf")


def test_a_followed_reference_is_left_alone() -> None:
    planned = plan("ppo_ref_ema", "eval.every_steps=1")
    assert planned.evaluation is not None
    assert all(not hooks.after for hooks in planned.evaluation.hooks.values())


def test_generation_of_an_evaluation() -> None:
    config = compose(load_experiment("grpo"), ["generation.temperature=0.7", "eval.n_responses=3"])
    assert (eval_generation(config).temperature, eval_generation(config).n_responses) == (0.7, 3)
    config = compose(load_experiment("grpo"), ["generation.temperature=0.7", "eval.temperature=0"])
    assert (eval_generation(config).temperature, eval_generation(config).n_responses) == (0.0, 1)


def test_failed_rewards_count_instead_of_being_dropped() -> None:
    function = "algorithm.reward_function=realrl.data.tiny:toy_reward"
    planned = plan("grpo", function, "algorithm.reward_on_failure=drop", "eval.every_steps=1")
    assert planned.evaluation is not None
    assert [mfc.interface.args["on_failure"] for mfc in planned.mfcs if mfc.name == "rew_inf"] == ["drop"]
    assert planned.evaluation.mfcs[1].interface.args["on_failure"] == "zero"


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("kto", (), "experiment 'kto' has nothing to evaluate"),
        ("gen", (), "trains nothing, so that there is nothing to evaluate on the way"),
        ("sft", ("dataset.path=rows.jsonl",), "there is nothing to evaluate on: eval.path is empty"),
        ("grpo", ("eval.n_responses=4", "eval.temperature=0"), "the same response so many times"),
    ],
)
def test_what_cannot_be_evaluated(name: str, overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        plan(name, "eval.every_steps=1", *overrides)
    assert caught.value.remedy


def test_roles_without_a_part_in_it_are_gone() -> None:
    experiment = load_experiment("ppo")
    config = compose(experiment, ["eval.only=true"])
    assert set(evaluation_experiment(experiment, config).roles_for(config)) == {"actor", "reward"}
