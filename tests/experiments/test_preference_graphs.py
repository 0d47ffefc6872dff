"""The graphs of dpo, kto and gen, and what they leave out."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from realrl.config.compose import compose
from realrl.data.kinds import DatasetKind
from realrl.experiment.declaration import Experiment
from realrl.graph.build import build_graph
from realrl.graph.mfc import MFCDef


def experiment(name: str) -> Experiment:
    found: Experiment = importlib.import_module(f"experiments.{name}").EXPERIMENT
    return found


def graph_of(name: str, *overrides: str) -> tuple[dict[str, MFCDef], Any]:
    """The calls by name, and the roles."""
    declared = experiment(name)
    config = compose(declared, overrides)
    mfcs = declared.calls(config)
    build_graph(mfcs, declared.dataset.keys)
    roles = declared.roles_for(config)
    assert {mfc.role for mfc in mfcs} == set(roles)
    return {mfc.name: mfc for mfc in mfcs}, roles


@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_the_reference_comes_before_training(name: str) -> None:
    calls, roles = graph_of(name, "n_seqs=12", "algorithm.n_minibatches=3")
    assert list(calls) == ["ref_inf", "actor_train"]
    assert calls["ref_inf"].role == "ref"
    assert calls["ref_inf"].output_keys == ("ref_logprobs",)
    train = calls["actor_train"]
    assert (train.interface.name, train.n_minibatches, train.n_seqs) == (name, 3, 12)
    assert ("label" in train.input_keys) == (name == "kto")
    assert not roles["ref"].trainable
    assert roles["ref"].path_from == "actor"


@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_an_actor_with_an_adapter_is_its_own_reference(name: str) -> None:
    calls, roles = graph_of(name, "models.actor.lora.rank=4")
    assert set(roles) == {"actor"}
    assert calls["ref_inf"].role == "actor"
    assert calls["ref_inf"].interface.args == {"adapter": False}


def test_gen_trains_nothing_and_scores_on_request() -> None:
    calls, roles = graph_of("gen")
    assert list(calls) == ["actor_gen"]
    assert set(roles) == {"actor"}
    assert not roles["actor"].trainable
    calls, roles = graph_of("gen", "algorithm.reward_function=realrl.data.tiny:toy_reward")
    assert list(calls) == ["actor_gen", "rew_inf"]
    assert roles["reward"].head == "none"
    calls, roles = graph_of("gen", "algorithm.rewards={model: reward_model}")
    assert calls["rew_inf"].interface.name == "reward_model"
    assert roles["reward"].head == "reward"


def test_gen_goes_through_the_file_once_in_its_order() -> None:
    config = compose(experiment("gen"), [])
    assert (config.epochs, config.dataset.shuffle, config.save.n_generations) == (1, False, None)
    assert experiment("gen").dataset is DatasetKind.PROMPT
