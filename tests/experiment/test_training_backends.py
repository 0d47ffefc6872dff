"""Backends that a run's roles ask for: refused before anything starts, or built with the groups that they need."""

from __future__ import annotations

from dataclasses import replace

import pytest

from realrl.config.compose import compose
from realrl.errors import ConfigError
from realrl.experiment.backends import check_installed, needs_library_groups, trained_roles
from realrl.experiment.discovery import load_experiment
from realrl.experiment.planning import check_models_fit, plan_run
from realrl.experiment.run_plan import RunPlan


def plan_of(*overrides: str) -> RunPlan:
    ppo = load_experiment("ppo")
    return plan_run(compose(ppo, list(overrides)), ppo)


def test_what_backends_know_of_the_trained_roles() -> None:
    plan = plan_of(
        "cluster.n_devices_per_node=2",
        "allocation=t2",
        "allocation.offload=[critic]",
        "models.actor.backend=deepspeed",
        "models.actor.optimizer.zero_stage=3",
        "models.critic.lora.rank=2",
    )
    roles = {role.name: role for role in trained_roles(plan)}
    assert roles.keys() == {"actor", "critic"}
    assert (roles["actor"].stage, roles["critic"].stage) == (3, 0)
    assert roles["actor"].shares_parameters
    assert not roles["critic"].shares_parameters
    assert [role.strategy.tp for role in roles.values()] == [2, 2]
    assert (roles["critic"].has_adapters, roles["critic"].is_offloaded) == (True, True)
    assert (roles["actor"].has_adapters, roles["actor"].is_offloaded) == (False, False)


def test_a_combination_that_does_not_work_is_refused_with_the_plan() -> None:
    plan = plan_of(
        "cluster.n_devices_per_node=2",
        "allocation=pipeline",
        "models.critic.backend=deepspeed",
        "models.critic.optimizer.zero_stage=3",
    )
    with pytest.raises(ConfigError, match=r"models\.critic\.optimizer\.zero_stage=3 shares out parameters"):
        check_models_fit(plan)


def test_a_role_that_is_not_trained_has_no_backend() -> None:
    dpo = load_experiment("dpo")
    frozen = replace(dpo, role_changes=lambda config: {"ref": replace(dpo.roles["ref"], trainable=False)})
    declared = replace(frozen, roles={**dpo.roles, "ref": replace(dpo.roles["ref"], trainable=True)})
    plan = plan_run(compose(declared, ["models.ref.backend=megatron"]), declared)
    with pytest.raises(ConfigError, match=r"models\.ref\.backend=megatron has no effect: role 'ref' is not trained"):
        check_models_fit(plan)


def test_a_package_that_is_missing() -> None:
    plan = plan_of("models.critic.backend=megatron")
    asked: list[str] = []
    with pytest.raises(
        ConfigError, match=r"models\.critic\.backend=megatron needs the package megatron\.core"
    ) as error:
        check_installed(plan, lambda package: asked.append(package) is not None)
    assert asked == ["megatron.core"]
    assert "pip install 'realrl[megatron]'" in str(error.value.remedy)
    check_installed(plan, lambda _: True)
    check_installed(plan_of(), lambda _: False)


def test_groups_of_one_rank_are_made_for_libraries_only() -> None:
    assert needs_library_groups(plan_of("models.critic.backend=megatron"))
    assert not needs_library_groups(plan_of())
