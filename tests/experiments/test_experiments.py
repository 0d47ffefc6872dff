from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from realrl.cli import main
from realrl.config.compose import compose
from realrl.config.policy_options import PolicyOptions, PPOOptions
from realrl.config.schema import GenerationConfig, RunConfig
from realrl.errors import ConfigError
from realrl.experiment.declaration import Experiment, Role
from realrl.experiment.discovery import config_dir
from realrl.experiment.policy_calls import chosen_keys
from realrl.experiment.registry import check_interface_name
from realrl.graph.build import build_graph
from realrl.graph.mfc import InterfaceRef, MFCDef, ModelName, ParamReallocHook

FOLDER = Path(importlib.import_module("experiments").__file__ or "").parent
NAMES = sorted(file.stem for file in FOLDER.glob("*.py") if file.stem != "__init__")


def experiment(name: str) -> Experiment:
    found: Experiment = importlib.import_module(f"experiments.{name}").EXPERIMENT
    return found


def ppo(options: PPOOptions | None = None, **config: object) -> dict[str, MFCDef]:
    run = RunConfig.model_validate({"experiment": "ppo", "algorithm": options or PPOOptions(), **config})
    return {mfc.name: mfc for mfc in experiment("ppo").calls(run)}


@pytest.mark.parametrize("name", NAMES)
def test_a_file_has_at_most_60_lines_and_declares_a_graph(name: str) -> None:
    assert len((FOLDER / f"{name}.py").read_text().splitlines()) <= 60
    e = experiment(name)
    assert e.name == name
    config = compose(e, ["n_seqs=24"])
    mfcs = e.calls(config)
    graph = build_graph(mfcs, e.dataset.keys)
    assert set(graph) == {mfc.name for mfc in mfcs}
    assert {mfc.role for mfc in mfcs} == set(e.roles_for(config)) <= set(e.roles)
    for mfc in mfcs:
        check_interface_name(mfc.interface.name)
        assert mfc.n_seqs == 24
        assert e.roles[mfc.role].trainable == any(m.is_train for m in mfcs if m.role == mfc.role)


SHOWN_WHOLE = ("ppo", "grpo", "sft", "rw", "dpo", "safe_rlhf", "distill", "gen")
VARIANTS = ("dapo", "dr_grpo", "gspo", "kto", "ppo_ref_ema", "reinforce_pp", "rloo")


def drawn_calls(name: str, capsys: pytest.CaptureFixture[str]) -> dict[str, tuple[str, str, set[str], set[str]]]:
    """Call -> its role, kind, keys read and keys given that somebody reads, as ``realrl graph NAME`` prints them."""
    assert main(["graph", name]) == 0
    calls: dict[str, tuple[str, str, set[str], set[str]]] = {}
    reads: set[str] = set()
    gives: set[str] = set()
    for line in capsys.readouterr().out.splitlines():
        header = re.match(r"(\w+)  \[(\w+) (\w+), ", line)
        if header:
            reads, gives = set(), set()
            calls[header[1]] = (header[2], header[3], reads, gives)
        elif line.startswith("    <- ") and calls:
            reads.update(line.split(": ")[1].split(", "))
        elif line.startswith("    -> ") and calls:
            gives.add(line.removeprefix("    -> ").split(":")[0])
    return calls


def written_calls(name: str) -> dict[str, MFCDef]:
    """Call -> the `MFCDef` that stands in an experiment's file, evaluated by itself."""
    module = importlib.import_module(f"experiments.{name}")
    tree = ast.parse((FOLDER / f"{name}.py").read_text())
    function = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "mfcs")
    config = compose(module.EXPERIMENT)
    scope = {**vars(module), "config": config}
    for node in function.body:
        if isinstance(node, ast.Assign):
            exec(compile(ast.Module([node], []), name, "exec"), scope)
    found = [n for n in ast.walk(function) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "MFCDef"]
    calls = [eval(compile(ast.Expression(node), name, "eval"), scope) for node in found]
    return {call.name: call for call in calls}


@pytest.mark.parametrize("name", SHOWN_WHOLE)
def test_a_file_shows_every_call_as_the_graph_has_it(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    written = written_calls(name)
    drawn = drawn_calls(name, capsys)
    e = experiment(name)
    needed = {call.name for call in e.calls(compose(e))}
    assert list(drawn) == [call for call in written if call in needed]
    assert set(written) - needed <= {"ref_inf"}  # a reference that nobody reads by default
    for call, (role, kind, reads, gives) in drawn.items():
        assert (written[call].role, written[call].interface_type.value) == (role, kind)
        assert set(written[call].input_keys) == reads
        assert set(written[call].output_keys) >= gives


@pytest.mark.parametrize("name", NAMES)
def test_what_options_add_is_all_that_the_graph_has_besides(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    e = experiment(name)
    config = compose(e)
    declared = {call.name: call for call in e.mfcs(config)}
    drawn = drawn_calls(name, capsys)
    assert set(drawn) - set(declared) == ({"filter"} if config.algorithm.model_dump().get("filter") else set())
    assert set(declared) - set(drawn) <= {"ref_inf", "opponent_ref_inf"}
    for call in set(drawn) & set(declared):
        role, kind, reads, gives = drawn[call]
        assert (declared[call].role, declared[call].interface_type.value) == (role, kind)
        assert set(declared[call].output_keys) >= gives
        if not declared[call].is_train:
            assert set(declared[call].input_keys) == reads


@pytest.mark.parametrize("name", NAMES)
def test_a_variant_states_in_25_lines_what_differs_from_its_parent(name: str) -> None:
    text = (FOLDER / f"{name}.py").read_text()
    assert (name in VARIANTS) == ("MFCDef(" not in text)
    if name in VARIANTS:
        assert len(text.splitlines()) <= 25
        assert text.count("from realrl_experiments.") == 1


def test_importing_them_imports_no_torch() -> None:
    imports = ", ".join(f"experiments.{name}" for name in NAMES)
    code = f"import {imports}, sys; assert not {{'torch', 'zmq', 'asyncio'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=FOLDER.parent)


def test_the_ppo_graph() -> None:
    graph = build_graph(list(ppo().values()), experiment("ppo").dataset.keys)
    data = {(a, b): set(d["keys"]) for a, b, d in graph.edges(data=True) if d.get("keys")}
    assert data["actor_gen", "rew_inf"] == {"input_ids"}
    assert data["actor_gen", "ref_inf"] == {"input_ids", "prompt_mask"}
    assert data["ref_inf", "actor_train"] == {"ref_logprobs"}
    assert data["critic_inf", "critic_train"] == {"values"}
    assert ("actor_train", "critic_train") not in data


def test_ppo_options_reach_the_calls() -> None:
    calls = ppo(PPOOptions(n_minibatches=3, ppo_epochs=2), n_seqs=12)
    assert {name: mfc.n_passes for name, mfc in calls.items()} == {
        name: 2 if mfc.is_train else 1 for name, mfc in calls.items()
    }
    assert {name: mfc.n_minibatches for name, mfc in calls.items() if mfc.is_train} == {
        "actor_train": 3,
        "critic_train": 3,
    }
    assert {mfc.n_seqs for mfc in calls.values()} == {12}


def test_a_reward_function_takes_the_place_of_the_model() -> None:
    options = PPOOptions(reward_function="realrl.data.tiny:toy_reward", reward_timeout_s=3.0)
    call = ppo(options)["rew_inf"]
    assert call.interface.name == "function_reward"
    assert call.interface.args["function"] == "realrl.data.tiny:toy_reward"
    assert call.interface.args["timeout_s"] == 3.0
    assert call.interface.args["in_process"] is False
    assert call.input_keys == ("input_ids", "prompt_mask", "metadata")
    assert ppo(options, launcher="inline")["rew_inf"].interface.args["in_process"] is True
    roles = experiment("ppo").roles_for(RunConfig(experiment="ppo", algorithm=options))
    assert roles["reward"].head == "none"
    assert roles["reward"].path_from == "actor"
    assert ppo()["rew_inf"].interface == InterfaceRef("reward_model")


def test_impossible_combinations_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.n_minibatches=4 is more than n_seqs=2"):
        ppo(n_seqs=2)
    with pytest.raises(ConfigError, match=r"generation\.temperature=0 samples greedily"):
        ppo(generation=GenerationConfig(temperature=0.0))
    with pytest.raises(ConfigError, match=r"algorithm\.reward_function='no_such:f': there is no module 'no_such'"):
        ppo(PPOOptions(reward_function="no_such:f"))


@pytest.mark.parametrize("name", ["f", ":f", "module:", "."])
def test_a_reward_function_must_be_a_name(name: str) -> None:
    with pytest.raises(ValueError, match=r"'module:function' or 'file\.py:function'"):
        PPOOptions(reward_function=name)


@pytest.mark.parametrize("name", NAMES)
def test_every_option_is_described(name: str) -> None:
    for key, field in experiment(name).options.model_fields.items():
        assert field.description, key


# ---------------------------------------------------------------- policy gradients


def calls_of(name: str, *overrides: str) -> dict[str, MFCDef]:
    e = experiment(name)
    return {mfc.name: mfc for mfc in e.calls(compose(e, list(overrides), config_dir=config_dir()))}


def test_the_grpo_graph() -> None:
    calls = calls_of("grpo")
    assert list(calls) == ["actor_gen", "rew_inf", "ref_inf", "actor_train"]
    tokens = ("input_ids", "prompt_mask")
    assert calls["actor_train"].input_keys == (*tokens, "old_logprobs", "truncated", "rewards", "ref_logprobs")


def test_a_reference_exists_only_where_something_reads_it() -> None:
    assert "ref_inf" not in calls_of("grpo", "algorithm.kl_loss_coef=0")
    assert "ref" not in compose(experiment("grpo"), ["algorithm.kl_loss_coef=0"]).models
    assert "ref_inf" not in calls_of("ppo", "algorithm.kl_coef=0")
    assert "ref_inf" in calls_of("ppo", "algorithm.kl_coef=0", "algorithm.kl_loss_coef=0.1")
    assert "ref_inf" in calls_of("distill", "algorithm.kl_loss_coef=0.1")


def test_an_actor_with_adapters_is_its_own_reference() -> None:
    call = calls_of("grpo", "models.actor.lora.rank=4")["ref_inf"]
    assert call.role == "actor"
    assert call.interface == InterfaceRef("ppo_actor", {"adapter": False})
    assert "ref" not in compose(experiment("grpo"), ["models.actor.lora.rank=4"]).models
    two = calls_of("self_play", "models.actor.lora.rank=4", "algorithm.kl_loss_coef=0.1")
    assert [two[name].role for name in ("ref_inf", "opponent_ref_inf")] == ["actor", "ref"]


def own(e: Experiment, *changed: MFCDef) -> dict[str, MFCDef]:
    """The calls of a variant in which some calls take the place of those of the same name, or come last."""
    names = {call.name for call in changed}
    variant = e.variant(
        "own", "a variant", mfcs=lambda c: [*(call for call in e.mfcs(c) if call.name not in names), *changed]
    )
    return {call.name: call for call in variant.calls(compose(variant))}


def test_what_a_variant_declares_itself_stays_as_it_is() -> None:
    grpo = experiment("grpo")
    declared = {call.name: call for call in grpo.mfcs(compose(grpo))}
    reward = replace(declared["rew_inf"], interface_impl="my_reward", input_keys=("input_ids", "prompt_mask"))
    assert own(grpo, reward)["rew_inf"] == reward
    train = replace(declared["actor_train"], input_keys=(*declared["actor_train"].input_keys, "ref_entropy"))
    entropy = replace(declared["ref_inf"], name="entropy_ref_inf", output_keys=("ref_entropy",), output_key_remap={})
    calls = own(grpo, entropy, train)
    assert calls["actor_train"].input_keys[-1] == "ref_entropy"
    assert own(grpo, entropy)["entropy_ref_inf"] == entropy  # nobody reads it: it may be there for its metrics


def test_a_reward_function_where_an_interface_gives_rewards_is_refused() -> None:
    grpo = experiment("grpo")
    reward = replace(next(c for c in grpo.mfcs(compose(grpo)) if c.name == "rew_inf"), interface_impl="my_reward")
    variant = grpo.variant("own", "a variant", mfcs=lambda c: [reward])
    with pytest.raises(
        ConfigError, match=r"algorithm\.reward_function has no effect: experiment own gives rewards by an"
    ):
        variant.calls(compose(variant, ["algorithm.reward_function=realrl.data.tiny:toy_reward"]))


def test_a_filter_stands_between_rewards_and_training() -> None:
    calls = calls_of("dapo")
    assert calls["filter"].may_drop
    assert calls["filter"].output_keys == ("kept_rewards",)
    assert calls["filter"].role == "filter"
    assert calls_of("dapo", "max_staleness=2")["filter"].max_staleness == 0  # like a reward, it reads no parameters
    assert calls["actor_train"].input_key_remap == {"kept_rewards": "rewards"}
    with_critic = calls_of("ppo", "algorithm.filter=equal_rewards", "generation.n_responses=2")
    assert with_critic["critic_train"].input_key_remap == {"kept_rewards": "rewards"}


@pytest.mark.parametrize("name", [name for name in NAMES if "filter" in experiment(name).roles])
def test_the_role_of_a_filter_has_no_weights_and_exists_with_the_filter_only(name: str) -> None:
    e = experiment(name)
    chosen = compose(e, ["algorithm.filter=equal_rewards", "generation.n_responses=2"])
    assert e.roles_for(chosen)["filter"] == Role(trainable=False, head="none", path_from="actor")
    assert "filter" in {call.role for call in e.calls(chosen)}
    assert "filter" not in e.roles_for(compose(e, ["algorithm.filter=null"]))


@pytest.mark.parametrize("overrides", [["max_staleness=2"], ["algorithm.importance_cap=3"]])
def test_off_policy_runs_recompute_old_logprobs(overrides: list[str]) -> None:
    calls = calls_of("grpo", *overrides)
    assert calls["actor_inf"].output_key_remap == {"logprobs": "old_logprobs"}
    assert calls["actor_inf"].max_staleness == 0
    assert "behavior_logprobs" in calls["actor_gen"].output_keys
    assert "behavior_logprobs" in calls["actor_train"].input_keys
    assert calls["actor_gen"].max_staleness == (2 if "max_staleness" in overrides[0] else 0)


def test_remax_generates_twice_and_rewards_both() -> None:
    calls = calls_of("remax", "algorithm.reward_function=realrl.data.tiny:toy_reward")
    assert calls["actor_gen_greedy"].interface.args == {"greedy": True}
    assert calls["greedy_rew_inf"].output_keys == ("greedy_rewards",)
    assert {"greedy_rewards", "greedy_truncated"} <= set(calls["actor_train"].input_keys)


def test_each_player_sees_the_other_ones_rewards() -> None:
    calls = calls_of("self_play")
    assert calls["actor_train"].input_key_remap == {"opponent_rewards": "other_rewards"}
    theirs = calls["opponent_train"]
    assert theirs.role == "opponent"
    assert theirs.input_key_remap["rewards"] == "other_rewards"
    assert theirs.input_key_remap["opponent_rewards"] == "rewards"
    assert theirs.input_key_remap["opponent_input_ids"] == "input_ids"


def test_costs_have_a_model_and_a_critic_of_their_own() -> None:
    calls = calls_of("safe_rlhf")
    assert {"costs", "cost_values", "values", "rewards"} <= set(calls["actor_train"].input_keys)
    remap = calls["cost_critic_train"].input_key_remap
    assert remap == {"costs": "rewards", "cost_values": "values"}
    assert calls["cost_critic_inf"].interface == calls["cost_critic_train"].interface
    assert experiment("safe_rlhf").roles_for(compose(experiment("safe_rlhf")))["cost"].head == "reward"
    ruled = compose(experiment("safe_rlhf"), ["algorithm.cost_function=realrl.data.tiny:toy_cost"])
    assert experiment("safe_rlhf").roles_for(ruled)["cost"].head == "none"
    with pytest.raises(ConfigError, match="lambda_init=3 is above lambda_max=2"):
        compose(experiment("safe_rlhf"), ["algorithm.lambda_init=3", "algorithm.lambda_max=2"])


def test_the_reference_follows_by_a_hook() -> None:
    [hook] = calls_of("ppo_ref_ema", "algorithm.ref_ema_eta=0.2")["actor_train"].post_hooks
    assert isinstance(hook, ParamReallocHook)
    assert (hook.target, hook.eta) == (ModelName("ref"), 0.2)
    with pytest.raises(ConfigError, match="moves the reference, and nothing reads it"):
        calls_of("ppo_ref_ema", "algorithm.kl_coef=0")
    with pytest.raises(ConfigError, match=r"models\.actor\.lora\.rank above 0"):
        calls_of("ppo_ref_ema", "models.actor.lora.rank=4")


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "gspo", "rloo"])
def test_group_methods_refuse_groups_of_one(name: str) -> None:
    with pytest.raises(ConfigError, match=r"n_responses=1 gives algorithm\.advantage=\w+ nothing to compare"):
        calls_of(name, "generation.n_responses=1")


def test_other_impossible_choices_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"advantage=grpo reads no values, and experiment ppo has a critic"):
        calls_of("ppo", "algorithm.advantage=grpo", "generation.n_responses=2")
    with pytest.raises(ConfigError, match=r"advantage=grpo reads no values"):  # the reason why nothing reads kl_coef
        calls_of("ppo", "preset=tiny", "algorithm.advantage=grpo", "generation.n_responses=2")
    told = r"algorithm\.kl_coef=0\.01 \(from preset=tiny\) has no effect: .*\n  Add algorithm\.kl_coef=0\.05, or choose"
    with pytest.raises(ConfigError, match=told):
        calls_of("rloo", "preset=tiny", "algorithm.advantage=grpo")
    with pytest.raises(ConfigError, match=r"algorithm\.kl_coef=0\.02 has no effect: .*\n  Leave it out, or choose"):
        calls_of("rloo", "preset=tiny", "algorithm.advantage=grpo", "algorithm.kl_coef=0.02")
    with pytest.raises(ConfigError, match=r"advantage=versus compares .* experiment grpo has no other player"):
        calls_of("grpo", "algorithm.advantage=versus")
    with pytest.raises(ConfigError, match=r"algorithm\.sampler=greedy samples greedily"):
        calls_of("ppo", "algorithm.sampler=greedy")
    with pytest.raises(ConfigError, match=r"algorithm\.clip_ratio=0\.1 has no effect"):
        calls_of("remax", "algorithm.clip_ratio=0.1")
    one_pass = [replace(mfc, n_passes=1) for mfc in calls_of("ppo").values()]
    with pytest.raises(ConfigError, match=r"ppo_epochs=2, and every train_step of experiment ppo makes one pass"):
        chosen_keys(compose(experiment("ppo"), ["algorithm.ppo_epochs=2"]), one_pass)


@pytest.mark.parametrize("name", [name for name in NAMES if issubclass(experiment(name).options, PolicyOptions)])
def test_every_policy_and_critic_makes_the_passes_of_ppo_epochs(name: str) -> None:
    calls = calls_of(name, "algorithm.ppo_epochs=3").values()
    assert all(mfc.n_passes == (3 if mfc.is_train else 1) for mfc in calls)


@pytest.mark.parametrize("name", NAMES)
def test_an_experiments_own_defaults_are_read(name: str) -> None:
    assert calls_of(name)
