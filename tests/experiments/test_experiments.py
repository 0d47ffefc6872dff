from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from realrl.algo.registry import check_interface_name
from realrl.config.algorithms import PPOOptions
from realrl.config.schema import GenerationConfig, RunConfig
from realrl.errors import ConfigError
from realrl.experiment import Experiment
from realrl.graph.build import build_graph
from realrl.graph.mfc import InterfaceRef, MFCDef

FOLDER = Path(importlib.import_module("experiments").__file__ or "").parent
NAMES = sorted(file.stem for file in FOLDER.glob("*.py") if file.stem != "__init__")


def experiment(name: str) -> Experiment:
    found: Experiment = importlib.import_module(f"experiments.{name}").EXPERIMENT
    return found


def ppo(options: PPOOptions | None = None, **config: object) -> dict[str, MFCDef]:
    run = RunConfig.model_validate({"experiment": "ppo", "algorithm": options or PPOOptions(), **config})
    return {mfc.name: mfc for mfc in experiment("ppo").mfcs(run)}


@pytest.mark.parametrize("name", NAMES)
def test_a_file_has_at_most_60_lines_and_declares_a_graph(name: str) -> None:
    assert len((FOLDER / f"{name}.py").read_text().splitlines()) <= 60
    e = experiment(name)
    assert e.name == name
    config = RunConfig(experiment=name, algorithm=e.options(), n_seqs=24)
    mfcs = e.mfcs(config)
    graph = build_graph(mfcs, e.dataset.keys)
    assert set(graph) == {mfc.name for mfc in mfcs}
    assert {mfc.role for mfc in mfcs} == set(e.roles) == set(e.roles_for(config))
    for mfc in mfcs:
        check_interface_name(mfc.interface.name)
        assert mfc.n_seqs == 24
        assert e.roles[mfc.role].trainable == any(m.is_train for m in mfcs if m.role == mfc.role)


def test_importing_them_imports_no_torch() -> None:
    imports = ", ".join(f"experiments.{name}" for name in NAMES)
    code = f"import {imports}, sys; assert not {{'torch', 'zmq', 'asyncio'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=FOLDER.parent)


def test_the_ppo_graph() -> None:
    graph = build_graph(list(ppo().values()), ("prompt_ids",))
    data = {(a, b): set(d["keys"]) for a, b, d in graph.edges(data=True) if d.get("keys")}
    assert data["actor_gen", "rew_inf"] == {"input_ids"}
    assert data["actor_gen", "ref_inf"] == {"input_ids", "prompt_mask"}
    assert data["ref_inf", "actor_train"] == {"ref_logprobs"}
    assert data["critic_inf", "critic_train"] == {"values"}
    assert ("actor_train", "critic_train") not in data


def test_ppo_options_reach_the_calls() -> None:
    calls = ppo(PPOOptions(n_minibatches=3), n_seqs=12)
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
    assert call.input_keys == ("input_ids", "prompt_mask")
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
