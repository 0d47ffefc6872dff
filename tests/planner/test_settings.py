"""Settings of plans: nested like the configuration, and applied to it."""

import pytest

from realrl.config.compose import compose
from realrl.errors import AllocationError, ConfigError
from realrl.experiment.discovery import config_dir, load_experiment
from realrl.experiment.planning import plan_run
from realrl.planner.request import with_pinned_stages
from realrl.planner.settings import PlanSettings

PLACES = {
    "actor_gen": "d2t2@0:0-3",
    "rew_inf": "d1@0:4",
    "ref_inf": "d2@0:6-7",
    "critic_inf": "d1@0:5",
    "actor_train": "d2t2p1@0:0-3",
    "critic_train": "d2@0:4-5",
}
SETTINGS = PlanSettings(
    PLACES,
    n_mbs={"actor_train": 2},
    zero_stage={"actor": 1, "critic": 0},
    checkpointing={"actor": True},
    offload_optimizer={"critic": True},
    offload=("ref",),
)


def composed(*overrides, **settings):
    arguments = ["preset=tiny", "cluster.n_devices_per_node=8", *overrides]
    return compose(load_experiment("ppo"), arguments, config_dir=config_dir(), **settings)


def test_overrides_are_nested_like_the_configuration():
    assert SETTINGS.overrides() == {
        "allocation": {"mode": "manual", "calls": PLACES, "offload": ["ref"]},
        "calls": {"actor_train": {"n_mbs": 2}},
        "models": {
            "actor": {"activation_checkpointing": True, "optimizer": {"zero_stage": 1}},
            "critic": {"optimizer": {"zero_stage": 0, "offload": True}},
        },
    }
    bare = PlanSettings(PLACES).overrides()
    assert bare == {"allocation": {"mode": "manual", "calls": PLACES, "offload": []}}


def test_applied_settings_are_those_that_a_plan_file_would_bring():
    plain = composed()
    applied = SETTINGS.applied(plain)
    composed_ones = composed("plan=x.yaml", plan=SETTINGS.overrides())
    assert applied == composed_ones.model_copy(update={"plan": ""})
    assert plain == composed()  # is as it was
    plan = plan_run(applied, load_experiment("ppo"))
    assert {name: str(a) for name, a in plan.allocations.items()}["actor_gen"] == "d2t2p1@0:0-3"
    assert next(mfc.n_mbs for mfc in plan.mfcs if mfc.name == "actor_train") == 2


def test_virtual_stages_belong_to_pinned_strategies():
    """A plan chooses none by itself."""
    key = "calls.actor_train.virtual_stages=2"
    for pin, wanted in (("d1p2", "d1t1p2v2"), ("p2v2@0:0-1", "p2v2@0:0-1"), ("d2p2@0:0-3", "d2t1p2v2@0:0-3")):
        config = with_pinned_stages(composed(key, "calls.actor_train.n_mbs=3", f"allocation.calls.actor_train={pin}"))
        assert config.allocation.calls == {"actor_train": wanted}
        assert config.calls["actor_train"].virtual_stages is None
        assert config.calls["actor_train"].n_mbs == 3
    assert with_pinned_stages(composed("calls.actor_train.virtual_stages=1")).allocation.calls == {}
    for pins in ((), ("allocation.calls.actor_train=d2",), ("allocation.calls.actor_train=p2v3",)):
        with pytest.raises(
            ConfigError, match=r"calls\.actor_train\.virtual_stages=2: a plan chooses no virtual"
        ) as caught:
            with_pinned_stages(composed(key, *pins))
        assert "allocation.calls.actor_train=d1p2v2" in caught.value.remedy


def test_the_command_line_wins_over_a_plan():
    nested = SETTINGS.overrides()
    config = composed("plan=x", "allocation.calls.rew_inf=d1@0:7", "models.actor.optimizer.zero_stage=0", plan=nested)
    assert config.allocation.calls["rew_inf"] == "d1@0:7"
    assert config.allocation.calls["actor_gen"] == PLACES["actor_gen"]
    assert config.models["actor"].optimizer.zero_stage == 0
    assert composed("plan=x", "n_mbs=4", plan=nested).calls == {}
    budget = composed("plan=x", "calls.actor_train.max_tokens_per_mb=64", plan=nested)
    assert (budget.calls["actor_train"].n_mbs, budget.calls["actor_train"].max_tokens_per_mb) == (None, 64)


def test_a_strategy_of_the_command_line_is_for_the_mesh_that_a_plan_gives():
    nested = SETTINGS.overrides()
    config = composed("plan=x", "allocation.calls.actor_gen=t4", plan=nested)
    assert config.allocation.calls["actor_gen"] == "t4@0:0-3"
    wrong = composed("plan=x", "allocation.calls.actor_gen=t8", plan=nested)
    with pytest.raises(
        AllocationError, match=r"allocation\.calls\.actor_gen: strategy d1t8p1 needs 8 devices, its mesh"
    ):
        plan_run(wrong, load_experiment("ppo"))
