"""Settings of single calls: their effects and their refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from realrl.config.compose import compose
from realrl.config.schema import CallConfig, RunConfig
from realrl.config.serialize import dump_config, load_config
from realrl.errors import AllocationError, ConfigError, GraphError
from realrl.experiment.call_settings import KEYS, configured_calls
from realrl.experiment.declaration import Experiment
from realrl.experiment.discovery import config_dir, load_experiment
from realrl.experiment.planning import check_models_fit, plan_run
from realrl.experiment.run_plan import RunPlan
from realrl.graph.build import lead_waits
from realrl.graph.mfc import MFCDef

FUNCTION = "algorithm.reward_function=realrl.data.tiny:toy_reward"


def plan(name: str, *overrides: str) -> RunPlan:
    experiment = load_experiment(name)
    return plan_run(compose(experiment, overrides, config_dir=config_dir()), experiment)


def values(planned: RunPlan, key: str) -> dict[str, object]:
    return {mfc.name: getattr(mfc, key) for mfc in planned.mfcs}


def declaring(name: str, **changes: object) -> Experiment:
    """An experiment whose calls set these fields."""
    experiment = load_experiment(name)
    return replace(experiment, mfcs=lambda c: [replace(mfc, **changes) for mfc in experiment.calls(c)], adds=())  # type: ignore[arg-type]


# ---------------------------------------------------------------- what decides


@pytest.mark.parametrize(
    ("key", "value"),
    [("n_mbs", 3), ("max_tokens_per_mb", 40), ("min_n_seqs", 4), ("balanced_dp", True), ("protocol", "DP_PROTO")],
)
def test_a_setting_reaches_its_call_alone(key: str, value: object) -> None:
    before, after = plan("ppo"), plan("ppo", f"calls.ref_inf.{key}={value}")
    changed = {mfc.name: mfc for mfc, was in zip(after.mfcs, before.mfcs, strict=True) if mfc != was}
    assert set(changed) == {"ref_inf"}
    assert getattr(changed["ref_inf"], key) == value
    assert plan("ppo", f"calls.ref_inf.{key}={value}", f"calls.ref_inf.{key}=null").mfcs == before.mfcs
    assert plan("ppo", f"calls.ref_inf.{key}={value}", "~calls.ref_inf").mfcs == before.mfcs


def test_every_key_is_a_field_of_a_call() -> None:
    assert set(KEYS) <= set(MFCDef.__dataclass_fields__)
    assert CallConfig() == CallConfig(**dict.fromkeys(KEYS))


def test_a_setting_takes_the_place_of_what_run_and_algorithm_say() -> None:
    found = values(plan("ppo", "n_mbs=2", "calls.actor_train.n_mbs=5"), "n_mbs")
    assert found.pop("actor_train") == 5
    assert set(found.values()) == {2}
    sft = declaring("sft", n_mbs=3, protocol="DP_PROTO", balanced_dp=True)
    overrides = ["calls.actor_train.balanced_dp=false", "calls.actor_train.max_tokens_per_mb=50", "n_mbs=7"]
    [train] = plan_run(compose(sft, overrides), sft).mfcs
    assert (train.n_mbs, train.max_tokens_per_mb, train.balanced_dp, train.protocol) == (None, 50, False, "DP_PROTO")
    [train] = plan_run(compose(sft, ["calls.actor_train={protocol: 3D_PROTO}"]), sft).mfcs
    assert (train.n_mbs, train.balanced_dp, train.protocol) == (3, True, "3D_PROTO")


def test_one_kind_of_micro_batching_takes_the_place_of_the_other() -> None:
    planned = plan("ppo", "max_tokens_per_mb=100", "calls.actor_train.n_mbs=2")
    assert {name for name, budget in values(planned, "max_tokens_per_mb").items() if budget != 100} == {"actor_train"}
    assert values(planned, "n_mbs")["actor_train"] == 2


def test_one_call_streams_or_waits_for_all() -> None:
    planned = plan("ppo", "min_n_seqs=4", "calls.ref_inf.min_n_seqs=32", "calls.critic_inf.min_n_seqs=8")
    assert values(planned, "min_n_seqs") == {
        "actor_gen": 4, "rew_inf": 4, "ref_inf": 32, "critic_inf": 8, "actor_train": None, "critic_train": None,
    }  # fmt: skip


def test_settings_of_a_preset_and_of_config_json(tmp_path: Path) -> None:
    preset = tmp_path / "mine.yaml"
    preset.write_text("calls:\n  actor_gen: {max_staleness: 1}\n  ref_inf:\n    min_n_seqs: 8\n    n_mbs: 2\n")
    ppo = load_experiment("ppo")
    config = compose(ppo, [f"preset={preset}", "calls.ref_inf.n_mbs=4"])
    assert config.calls == {"actor_gen": CallConfig(max_staleness=1), "ref_inf": CallConfig(min_n_seqs=8, n_mbs=4)}
    again = load_config(dump_config(config), ppo)
    assert again == config
    assert plan_run(again, ppo).mfcs == plan_run(config, ppo).mfcs
    assert json.loads(dump_config(config))["calls"]["ref_inf"]["n_mbs"] == 4


# ---------------------------------------------------------------- calls that run ahead


@pytest.mark.parametrize("name", ["ppo", "grpo", "rloo", "remax", "dapo", "safe_rlhf"])
def test_a_generation_that_runs_ahead_is_corrected_for_as_if_the_run_said_so(name: str) -> None:
    whole, single = plan(name, "max_staleness=2"), plan(name, "calls.actor_gen.max_staleness=2")
    assert whole.mfcs == single.mfcs
    assert "actor_inf" in {mfc.name for mfc in single.mfcs}
    assert plan(name, "max_staleness=2", "calls.actor_gen.max_staleness=1").mfcs == plan(name, "max_staleness=1").mfcs


def test_a_reference_without_adapter_follows_its_policy() -> None:
    adapter = "models.actor.lora.rank=4"
    assert plan("ppo", "max_staleness=1", adapter).mfcs == plan("ppo", "calls.actor_gen.max_staleness=1", adapter).mfcs


def test_one_of_two_players_runs_ahead() -> None:
    planned = plan("self_play", "calls.opponent_gen.max_staleness=1")
    ahead = {name for name, lead in values(planned, "max_staleness").items() if lead}
    assert ahead == {"opponent_gen"}
    calls = {mfc.name: mfc for mfc in planned.mfcs}
    assert "opponent_inf" in calls
    assert "actor_inf" not in calls
    assert "opponent_behavior_logprobs" in calls["opponent_train"].input_keys
    assert "behavior_logprobs" not in calls["actor_train"].input_keys


def test_the_greedy_response_may_be_fresher() -> None:
    planned = plan("remax", "max_staleness=2", "calls.actor_gen_greedy.max_staleness=0")
    assert {name: lead for name, lead in values(planned, "max_staleness").items() if lead} == {"actor_gen": 2}


def test_an_inference_that_runs_ahead_with_generation() -> None:
    planned = plan("ppo", "calls.actor_gen.max_staleness=2", "calls.critic_inf.max_staleness=1")
    leads = {(wait.writer, wait.reader): wait.lead for wait in lead_waits(planned.graph)}
    assert leads == {("actor_train", "actor_gen"): 2, ("critic_train", "critic_inf"): 1}


def test_a_preset_that_runs_ahead_may_be_taken_back() -> None:
    assert plan("grpo", "max_staleness=1", "calls.actor_gen.max_staleness=0").mfcs == plan("grpo").mfcs
    with pytest.raises(ConfigError, match=r"max_staleness=1 has no effect: no call of experiment 'sft' runs ahead"):
        plan("sft", "max_staleness=1")


# ---------------------------------------------------------------- evaluation


def test_an_evaluation_takes_over_what_matters_to_it() -> None:
    settings = ("calls.actor_gen.max_staleness=1", "calls.rew_inf.min_n_seqs=4", "calls.actor_gen.balanced_dp=true")
    beside = plan("ppo", "eval.every_steps=1", *settings, "calls.actor_train.n_mbs=2").evaluation
    assert beside is not None
    generation, reward = beside.mfcs
    assert (generation.name, generation.balanced_dp, generation.max_staleness) == ("eval_actor_gen", True, 0)
    assert (reward.name, reward.min_n_seqs) == ("eval_rew_inf", None)
    alone = plan("ppo", "eval.only=true", *settings, "calls.actor_train.n_mbs=2")
    assert values(alone, "balanced_dp") == {"actor_gen": True, "rew_inf": False}
    assert values(alone, "min_n_seqs") == {"actor_gen": None, "rew_inf": 4}
    assert set(values(alone, "max_staleness").values()) == {0}


def test_a_call_that_judges_is_set_as_the_one_that_trains() -> None:
    settings = ("n_mbs=3", "calls.actor_train.n_mbs=2")
    assert values(plan("sft", "eval.only=true", *settings), "n_mbs") == {"actor_judge": 2}
    beside = plan("dpo", "eval.every_steps=1", *settings).evaluation
    assert beside is not None
    assert {mfc.name: mfc.n_mbs for mfc in beside.mfcs} == {"eval_ref_inf": 3, "eval_actor_judge": 2}


@pytest.mark.parametrize("mode", ["eval.only=true", "eval.every_steps=1"])
def test_an_evaluation_refuses_what_training_refuses(mode: str) -> None:
    with pytest.raises(ConfigError, match="there is no call 'actor_gn'"):
        plan("ppo", mode, "calls.actor_gn.n_mbs=2")


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["calls.actr_gen.n_mbs=4"],
            "calls.actr_gen: there is no call 'actr_gen'; the calls are actor_gen, rew_inf, ref_inf, critic_inf, "
            "actor_train, critic_train. Did you mean 'actor_gen'",
        ),
        (["calls.actor_inf.n_mbs=4"], "calls.actor_inf: there is no call 'actor_inf'; the calls are actor_gen, "),
        (
            ["calls.actor_gen.protocol=DP_PRTO"],
            "calls.actor_gen.protocol=DP_PRTO: there is no such protocol; choose from 3D_PROTO, DP_PROTO, ONE_TO_ALL, "
            "ALL_TO_ALL, 3D_ALL_MICRO_DP, 3D_PP_ONLY",
        ),
        (["calls.ref_inf.min_n_seqs=33"], "calls.ref_inf.min_n_seqs=33: is more than the n_seqs=32 of the call"),
        (
            ["calls.actor_train.min_n_seqs=8"],
            "calls.actor_train.min_n_seqs=8: has no effect: a train_step needs its whole batch",
        ),
        (
            ["calls.actor_train.max_staleness=1"],
            "calls.actor_train.max_staleness=1: has no effect: a train_step has the newest parameters; give it to the "
            "calls that read the role",
        ),
        (
            ["calls.ref_inf.max_staleness=1"],
            "calls.ref_inf.max_staleness=1: has no effect: role 'ref' is never trained, so that the call cannot run ",
        ),
        (
            ["calls.critic_inf.max_staleness=1"],
            "calls.critic_inf.max_staleness=1: what the call waits for lets it run at most 0 train_steps ahead; say 0, "
            "or raise that of the calls before it",
        ),
        (
            ["calls.critic_inf.max_staleness=3", "calls.actor_gen.max_staleness=1"],
            "calls.critic_inf.max_staleness=3: what the call waits for lets it run at most 1 train_steps ahead",
        ),
        (
            [FUNCTION, "calls.rew_inf.n_mbs=2"],
            "calls.rew_inf.n_mbs=2: has no effect: role 'reward' has no weights, so that there is nothing to cut into ",
        ),
        (
            ["calls.actor_gen.virtual_stages=2"],
            "calls.actor_gen.virtual_stages=2: has no effect: the call is no train_step; on the train_step's mesh",
        ),
        ([FUNCTION, "calls.rew_inf.max_tokens_per_mb=2"], "calls.rew_inf.max_tokens_per_mb=2: has no effect: role 're"),
        (
            ["calls.ref_inf.protocol=ONE_TO_ALL", "calls.ref_inf.balanced_dp=true"],
            "calls.ref_inf.balanced_dp=true: has no effect: protocol ONE_TO_ALL does not go by tokens",
        ),
        (
            ["calls.ref_inf.min_n_seqs=99", "calls.x.n_mbs=1"],
            "2 things are wrong with the configuration:\n  calls.ref_inf.min_n_seqs=99: ",
        ),
    ],
)
def test_what_a_call_cannot_have(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan("ppo", *overrides)
    assert message in str(caught.value)
    assert caught.value.remedy is not None
    assert "realrl config ppo" in caught.value.remedy


def test_a_call_whose_hook_changes_a_role_does_not_stream() -> None:
    experiment = load_experiment("ppo_ref_ema")
    [hook] = next(mfc.post_hooks for mfc in experiment.calls(compose(experiment)) if mfc.name == "actor_train")

    def mfcs(config: RunConfig) -> list[MFCDef]:
        calls = [replace(mfc, post_hooks=()) for mfc in experiment.calls(config)]
        return [replace(mfc, post_hooks=(hook,)) if mfc.name == "actor_gen" else mfc for mfc in calls]

    moved = replace(experiment, mfcs=mfcs, adds=())
    with pytest.raises(ConfigError, match=r"calls\.actor_gen\.min_n_seqs=4: has no effect: the call has a hook that "):
        plan_run(compose(moved, ["calls.actor_gen.min_n_seqs=4"]), moved)


def test_a_generation_that_an_algorithm_has_not_provided_for() -> None:
    """Such as one that does not weigh tokens by how much likelier they became."""
    unaware = declaring("grpo", max_staleness=0)
    with pytest.raises(ConfigError) as caught:
        plan_run(compose(unaware, ["calls.actor_gen.max_staleness=1"]), unaware)
    assert "experiment 'grpo' has not provided for it; let it ask for it: " in str(caught.value)
    assert "MFCDef(..., max_staleness=config.staleness_of('actor_gen'))" in str(caught.value)


def test_what_does_not_fit_the_mesh() -> None:
    two = ("cluster.n_devices_per_node=2", "allocation=t2")
    with pytest.raises(
        AllocationError, match=r"call 'ref_inf' has protocol DP_PROTO, which on d1t2p1@0:0-1 gives diff"
    ):
        plan("ppo", *two, "calls.ref_inf.protocol=DP_PROTO")
    with pytest.raises(AllocationError, match=r"call 'ref_inf' has min_n_seqs=1, fewer than its 2 data-parallel ranks"):
        plan("ppo", two[0], "calls.ref_inf.min_n_seqs=1")


PIPELINE = ("cluster.n_devices_per_node=2", "allocation=pipeline")


def test_virtual_stages_are_a_part_of_where_the_role_lives() -> None:
    """A call of the role that differs in nothing else has them too; in another layout its parameters move."""
    planned = plan("ppo", *PIPELINE, "calls.actor_train.virtual_stages=2", "allocation.calls.critic_inf=d2")
    texts = {name: str(allocation.strategy) for name, allocation in planned.allocations.items()}
    assert texts["actor_train"] == texts["actor_gen"] == "d1t1p2v2"
    assert texts["ref_inf"] == texts["critic_train"] == "d1t1p2"
    assert not planned.hooks["actor_gen"].before
    assert (
        plan("ppo", *PIPELINE, "calls.actor_train.virtual_stages=1").allocations == plan("ppo", *PIPELINE).allocations
    )
    other = plan("ppo", *PIPELINE, "allocation.calls.actor_train=p2v2", "allocation.calls.actor_gen=p2v3")
    assert str(other.allocations["actor_gen"].strategy) == "d1t1p2v3"
    assert len(other.hooks["actor_gen"].before) == 1


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["cluster.n_devices_per_node=2"],
            "call 'actor_train' has virtual_stages=2, but runs on d2t1p1@0:0-1, which is ",
        ),
        ([*PIPELINE, "allocation.calls.actor_train=p2v3"], "virtual_stages=2, but runs on d1t1p2v3@0:0-1"),
    ],
)
def test_virtual_stages_that_the_strategy_cannot_have(overrides: list[str], message: str) -> None:
    with pytest.raises(AllocationError) as caught:
        plan("ppo", *overrides, "calls.actor_train.virtual_stages=2")
    assert message in str(caught.value)


def test_virtual_stages_of_a_model_with_too_few_layers() -> None:
    planned = plan("ppo", *PIPELINE, "preset=tiny", "calls.actor_train.virtual_stages=3")
    with pytest.raises(AllocationError, match="3 virtual stages do not fit a model of 4 layers on pp=2") as caught:
        check_models_fit(planned)
    assert caught.value.remedy == "The most that fit is 2."
    with pytest.raises(ConfigError, match=r"models\.actor\.backend=deepspeed has no virtual stages"):
        check_models_fit(plan("ppo", *PIPELINE, "calls.actor_train.virtual_stages=2", "models.actor.backend=deepspeed"))


def test_virtual_stages_of_an_algorithm() -> None:
    for name, v, message in (
        ("sft", 0, "call 'actor_train' has virtual_stages=0"),
        ("ppo", 2, "call 'actor_gen' is a generate and has virtual_stages=2"),
    ):
        experiment = declaring(name, virtual_stages=v)
        with pytest.raises(GraphError, match=message):
            plan_run(compose(experiment), experiment)


def test_a_plan_of_calls_without_settings_is_the_declared_one() -> None:
    ppo = load_experiment("ppo")
    config = compose(ppo)
    assert configured_calls(ppo, config) == ppo.calls(config)
