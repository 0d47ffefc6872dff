"""From the keys `algorithm.reward*` to calls and roles."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from realrl.config.compose import compose
from realrl.config.reward_options import RewardOptions
from realrl.config.schema import RunConfig
from realrl.config.serialize import dump_config, load_config
from realrl.data.kinds import DatasetKind
from realrl.errors import ConfigError
from realrl.experiment import rewards
from realrl.experiment.declaration import Experiment, Role
from realrl.experiment.rewards import reward_calls, reward_roles
from realrl.graph.build import build_graph
from realrl.graph.mfc import InterfaceRef, InterfaceType, MFCDef

TOY = "realrl.data.tiny:toy_reward"
ROOT = Path(__file__).parent.parent.parent
KEYS = ("input_ids", "prompt_mask", "metadata")


class Options(RewardOptions):
    pass


def calls(config: RunConfig) -> list[MFCDef]:
    n = config.n_seqs
    return [
        MFCDef("actor_gen", "actor", InterfaceType.GENERATE, "ppo_actor", ("prompt_ids",), KEYS[:2], n_seqs=n),
        *reward_calls(config),
        MFCDef("actor_train", "actor", InterfaceType.TRAIN_STEP, "ppo_actor", (*KEYS[:2], "rewards"), n_seqs=n),
    ]


DEMO = Experiment(
    name="demo",
    description="an experiment with rewards",
    roles={"actor": Role(trainable=True), "reward": Role(trainable=False, head="reward")},
    dataset=DatasetKind.PROMPT,
    mfcs=calls,
    options=Options,
    role_changes=reward_roles,
)


def demo(*overrides: str) -> RunConfig:
    return compose(DEMO, overrides)


def test_without_any_key_a_model_gives_the_reward() -> None:
    config = demo("n_seqs=6")
    [call] = reward_calls(config)
    assert (call.name, call.role, call.interface) == ("rew_inf", "reward", InterfaceRef("reward_model"))
    assert (call.input_keys, call.output_keys, call.n_seqs) == (("input_ids",), ("rewards",), 6)
    assert not call.may_drop
    assert reward_roles(config) == {"reward": Role(trainable=False, head="reward")}


def test_one_function_takes_the_place_of_the_model() -> None:
    config = demo(f"algorithm.reward_function={TOY}", "algorithm.reward_timeout_s=3", "launcher=inline")
    [call] = reward_calls(config)
    assert call.interface.name == "function_reward"
    assert call.interface.args == {
        "function": TOY,
        "reads": "auto",
        "timeout_s": 3.0,
        "on_failure": "error",
        "concurrency": 2,
        "async_concurrency": 32,
        "in_process": True,
    }
    assert (call.input_keys, call.output_keys) == (KEYS, ("rewards",))
    assert reward_roles(config) == {"reward": Role(trainable=False, head="none", path_from="actor")}


def test_parts_are_added_to_the_function_and_take_over_its_settings() -> None:
    config = demo(
        f"algorithm.reward_function={TOY}",
        "algorithm.reward_timeout_s=3",
        "algorithm.rewards.overlong=overlong",
        "algorithm.rewards.overlong.weight=0.5",
        "algorithm.rewards.short={function: realrl.data.tiny:toy_reward, timeout_s: 1, options: {scale: 2}}",
    )
    [call] = reward_calls(config)
    assert call.interface.name == "weighted_rewards"
    parts = call.interface.args["parts"]
    assert list(parts) == ["function", "overlong", "short"]
    assert parts["overlong"]["weight"] == 0.5
    assert parts["function"]["timeout_s"] == 3.0
    assert parts["short"] == {
        "function": TOY,
        "weight": 1.0,
        "reads": "auto",
        "timeout_s": 1.0,
        "on_failure": "error",
        "options": {"scale": 2},
    }
    assert reward_roles(config)["reward"].head == "none"


@pytest.mark.parametrize("parts", [("overlong=overlong",), ("judge=reward_model", f"toy={TOY}")])
def test_a_model_and_functions_make_two_calls(parts: tuple[str, ...]) -> None:
    config = demo(*(f"algorithm.rewards.{part}" for part in parts))
    model, scorer = reward_calls(config)
    assert (model.role, model.interface) == ("reward", InterfaceRef("reward_model"))
    assert (model.output_keys, model.output_key_remap) == (("model_rewards",), {"rewards": "model_rewards"})
    assert (scorer.name, scorer.role) == ("scorer_inf", "scorer")
    assert (scorer.input_keys, scorer.output_keys) == ((*KEYS, "model_rewards"), ("rewards",))
    assert {part["function"] for part in scorer.interface.args["parts"].values()} >= {"reward_model"}
    assert reward_roles(config)["scorer"] == Role(trainable=False, head="none", path_from="actor")
    assert config.models["scorer"].path == config.models["actor"].path
    graph = build_graph(calls(config), DEMO.dataset.keys)
    assert graph.edges["rew_inf", "scorer_inf"]["keys"] == ("model_rewards",)
    assert load_config(dump_config(config), DEMO) == config


def test_a_single_model_with_a_weight_is_weighted() -> None:
    config = demo("algorithm.rewards.judge={function: reward_model, weight: 2}")
    assert [call.name for call in reward_calls(config)] == ["rew_inf", "scorer_inf"]


def test_a_prefix_renames_calls_and_keys() -> None:
    config = demo("algorithm.rewards.overlong=overlong")
    model, scorer = reward_calls(config, prefix="greedy_")
    assert (model.name, model.input_keys, model.output_keys) == (
        *("greedy_rew_inf", ("greedy_input_ids",)),
        ("greedy_model_rewards",),
    )
    assert model.input_key_remap == {"greedy_input_ids": "input_ids"}
    assert model.output_key_remap == {"rewards": "greedy_model_rewards"}
    assert (scorer.name, scorer.output_keys, scorer.output_key_remap) == (
        *("greedy_scorer_inf", ("greedy_rewards",)),
        {"rewards": "greedy_rewards"},
    )
    assert scorer.input_keys == ("greedy_input_ids", "greedy_prompt_mask", "metadata", "greedy_model_rewards")
    assert scorer.input_key_remap == {
        "greedy_input_ids": "input_ids",
        "greedy_prompt_mask": "prompt_mask",
        "greedy_model_rewards": "model_rewards",
    }
    assert scorer.interface.args["metrics"] == "greedy_reward"


@pytest.mark.parametrize(
    ("overrides", "drops"),
    [
        ((f"reward_function={TOY}", "reward_on_failure=drop"), True),
        (("rewards.overlong=overlong", "reward_on_failure=drop"), False),
        ((f"rewards.toy={TOY}", "reward_on_failure=drop", "rewards.toy.on_failure=zero"), False),
        ((f"rewards.toy={TOY}", "rewards.toy.on_failure=drop"), True),
    ],
)
def test_only_a_call_whose_functions_may_drop_may_drop(overrides: tuple[str, ...], drops: bool) -> None:
    assert reward_calls(demo(*(f"algorithm.{override}" for override in overrides)))[-1].may_drop is drops


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("reward_function=no_such:f",), r"algorithm\.reward_function='no_such:f': there is no module 'no_such'"),
        (("rewards.a=no_such:f",), r"algorithm\.rewards\.a\.function='no_such:f': there is no module 'no_such'"),
        (("rewards={a: reward_model, b: reward_model}",), r"rewards\.b is the reward model a second time, after 'a'"),
        ((f"rewards.function={TOY}", f"reward_function={TOY}"), r"rewards\.function has the name of what"),
        (
            ("rewards.long={function: overlong, options: {cache_token: 3}}",),
            r"rewards\.long\.options\.cache_token: overlong has no such option\. Did you mean 'cache_tokens'",
        ),
        (
            ("rewards.long={function: overlong, timeout_s: 3}",),
            r"algorithm\.rewards\.long\.timeout_s has no effect: overlong is not a function",
        ),
        (
            ("rewards.long={function: overlong, options: {cache_tokens: 99}}",),
            r"options\.cache_tokens=99: must be a whole number from 1 to 32, which is max_tokens",
        ),
        (
            ("rewards.long={function: overlong, options: {max_tokens: 99}}",),
            r"options\.max_tokens=99: must be a whole number from 1 to 32, which is generation\.max_new_tokens",
        ),
    ],
)
def test_what_cannot_work_is_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        reward_calls(demo(*(f"algorithm.{override}" for override in overrides)))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rewards.a=math_verfy", r"'math_verfy' is not 'module:function'.*Did you mean 'math_verify'"),
        ("rewards.a.weight=1", r"algorithm\.rewards\.a\.function: has no default; give it"),
        ("rewards.a={function: overlong, wieght: 1}", r"rewards\.a\.wieght=1: unknown key\. Did you mean .*a\.weight'"),
        ("rewards.a={function: overlong, weight: heavy}", r"rewards\.a\.weight=heavy: must be a number"),
        (
            "rewards.a={function: overlong, on_failure: explode}",
            r"on_failure=explode: must be one of error, zero, drop",
        ),
        ("rewards.a=3", r"algorithm\.rewards\.a=3: must be"),
        ("rewards={a-b: overlong}", r"'a-b' cannot name a reward: use letters, digits and _"),
        ("reward_on_failure=dropp", r"must be one of error, zero, drop\. Did you mean 'drop'"),
    ],
)
def test_a_wrong_key_or_value_is_named(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        demo(f"algorithm.{override}")


def test_a_part_of_the_experiments_defaults_can_be_changed_and_removed() -> None:
    defaults = {"algorithm": {"rewards": {"long": {"function": "overlong", "options": {"cache_tokens": 4}}}}}
    declared = Experiment(**{**vars(DEMO), "defaults": defaults})
    changed = compose(declared, ["algorithm.rewards.long.options.cache_tokens=8", "algorithm.rewards.long.weight=2"])
    assert changed.algorithm.rewards["long"].options == {"cache_tokens": 8}
    assert changed.algorithm.rewards["long"].weight == 2.0
    removed = compose(declared, ["~algorithm.rewards.long"])
    assert removed.algorithm.rewards == {}
    assert set(removed.models) == {"actor", "reward"}


@pytest.mark.parametrize("name", ["math_verify", "reasoning_gym"])
def test_a_missing_package_is_named_with_the_command(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewards.importlib.util, "find_spec", lambda module: None)
    with pytest.raises(ConfigError, match=rf"algorithm\.reward_function={name} needs the package {name[:4]}") as error:
        reward_calls(demo(f"algorithm.reward_function={name}"))
    assert "pip install 'realrl[rewards]'" in str(error.value)


def test_importing_it_imports_no_torch() -> None:
    code = "import sys, realrl.experiment.rewards, realrl.rewards.server, realrl.data.reasoning_tasks; "
    code += "assert not {'torch', 'asyncio', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=ROOT)
