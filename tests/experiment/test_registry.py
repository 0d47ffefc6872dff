from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from realrl.algo.api import ModelInterface
from realrl.algo.policy.actor import PolicyActor
from realrl.algo.policy.critic import PPOCritic
from realrl.algo.resolve import check_interface, resolve_interface
from realrl.algo.supervised.rw import RewardModel
from realrl.algo.supervised.sft import SFT
from realrl.errors import ConfigError
from realrl.experiment import registry
from realrl.experiment.registry import check_interface_name, interface_names, register_interface
from realrl.graph.mfc import InterfaceRef, InterfaceType, MFCDef
from realrl.rewards.interface import FunctionReward


class Custom(ModelInterface):
    def __init__(self, beta: float, *, gamma: float = 1.0) -> None:
        self.beta = beta


class Broken(ModelInterface):
    def __init__(self) -> None:
        raise KeyError("beta")


class Misspelt(ModelInterface):
    def inferences(self, model: object, batch: object, ctx: object) -> None:
        """Nobody calls it."""


@pytest.fixture(autouse=True)
def _no_registrations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})


@pytest.mark.parametrize(
    ("name", "cls"),
    [
        ("sft", SFT),
        ("reward_model", RewardModel),
        ("ppo_actor", PolicyActor),
        ("ppo_critic", PPOCritic),
    ],
)
def test_built_in_names(name: str, cls: type) -> None:
    assert type(resolve_interface(InterfaceRef(name))) is cls


def test_arguments_reach_the_constructor() -> None:
    assert isinstance(resolve_interface(InterfaceRef("function_reward", {"function": "math:hypot"})), FunctionReward)
    custom = resolve_interface(InterfaceRef(f"{__name__}:Custom", {"beta": 0.5}))
    assert custom.beta == 0.5


def test_a_constructor_that_raises_is_named_with_its_line() -> None:
    with pytest.raises(ConfigError, match="Broken' cannot be made: its __init__ raised KeyError: 'beta'") as caught:
        resolve_interface(InterfaceRef(f"{__name__}:Broken"))
    assert re.search(r"Look at \S+test_registry.py:\d+\.", str(caught.value.remedy))


def test_the_method_that_a_call_needs_is_there() -> None:
    name = f"{__name__}:Misspelt"
    call = MFCDef("judge", "actor", InterfaceType.INFERENCE, name, ("input_ids",), ("rewards",))
    told = "call 'judge' is of type inference, but its interface .* has no method inference. Did you mean 'inferences'"
    with pytest.raises(ConfigError, match=told) as caught:
        check_interface(call)
    assert "Define Misspelt.inference(self, model, batch, ctx)" in str(caught.value.remedy)
    check_interface(MFCDef("gen", "actor", InterfaceType.GENERATE, "ppo_actor", ("prompt_ids",), ("input_ids",)))


def test_every_resolution_is_a_new_instance() -> None:
    assert resolve_interface(InterfaceRef("ppo_actor")) is not resolve_interface(InterfaceRef("ppo_actor"))


def test_an_unknown_name_offers_the_closest() -> None:
    with pytest.raises(ConfigError, match=r"no interface 'ppo_acter'\. Did you mean 'ppo_actor'"):
        resolve_interface(InterfaceRef("ppo_acter"))
    with pytest.raises(ConfigError, match=r"no interface 'zzz'\. Known: dpo, filter, function_reward, kto, ppo_actor"):
        check_interface_name("zzz")


@pytest.mark.parametrize(("name", "now"), registry.RENAMED.items())
def test_a_name_of_before_says_what_it_is_now(name: str, now: str) -> None:
    with pytest.raises(ConfigError, match=f"the interface '{name}' is called '{now}' now"):
        check_interface_name(name)
    assert now in interface_names()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"betta": 1}, r"takes no argument 'betta'; it takes: beta, gamma\. Did you mean 'beta'"),
        ({"gamma": 1}, r"needs the argument 'beta'; it takes: beta, gamma"),
    ],
)
def test_wrong_arguments_are_named(args: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolve_interface(InterfaceRef(f"{__name__}:Custom", args))
    assert re.search(r"InterfaceRef.* __init__: see \S+test_registry.py:\d+\.", str(caught.value.remedy))
    with pytest.raises(ConfigError, match="'sft' takes no argument 'lr'; it takes: none"):
        resolve_interface(InterfaceRef("sft", {"lr": 1}))


def test_a_class_that_is_no_interface_is_refused() -> None:
    with pytest.raises(ConfigError, match="'fractions:Fraction' is not a class derived from"):
        resolve_interface(InterfaceRef("fractions:Fraction"))


class TokenEntropy(ModelInterface):
    def inference(self, model: Any, batch: Any) -> None:  # type: ignore[override]
        """Lacks a parameter."""

    @staticmethod
    def evaluate(model: Any, batch: Any, ctx: Any) -> None:  # type: ignore[override]
        """Gets no instance."""


def test_a_method_with_other_parameters_is_refused() -> None:
    with pytest.raises(ConfigError) as error:
        resolve_interface(InterfaceRef(f"{__name__}:TokenEntropy"))
    assert str(error.value) == "TokenEntropy.inference must take (model, batch, ctx), not (model, batch)"


def test_a_registered_interface_is_found_by_name() -> None:
    register_interface("mine")(Custom)
    assert "mine" in interface_names()
    assert type(resolve_interface(InterfaceRef("mine", {"beta": 1.0}))) is Custom
    register_interface("mine")(Custom)


def test_a_taken_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="'sft' is a built-in one"):
        register_interface("sft")(Custom)
    register_interface("mine")(Custom)
    with pytest.raises(ConfigError, match=r"'mine' is taken by .*:Custom"):
        register_interface("mine")(SFT)


def test_a_file_can_hold_an_interface(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("from realrl.algo.supervised.sft import SFT\nclass Mine(SFT): pass\n")
    assert type(resolve_interface(InterfaceRef(f"{file}:Mine"))).__name__ == "Mine"


def test_names_are_checked_without_torch() -> None:
    code = (
        "import sys; import realrl.experiment.registry as r, realrl.experiment.policy_calls, realrl.rewards.server; "
        "r.check_interface_name('sft'); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
