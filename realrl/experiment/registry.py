"""Names of interfaces: the built-in ones, and those that users register. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from realrl.definitions import Definition, definition_of
from realrl.errors import ConfigError, did_you_mean
from realrl.experiment.loading import load_object

BUILT_IN = {
    "sft": "realrl.algo.supervised.sft:SFT",
    "dpo": "realrl.algo.supervised.dpo:DPO",
    "kto": "realrl.algo.supervised.kto:KTO",
    "reward_model": "realrl.algo.supervised.rw:RewardModel",
    "filter": "realrl.algo.policy.filters:Filter",
    "ppo_actor": "realrl.algo.policy.actor:PolicyActor",
    "ppo_critic": "realrl.algo.policy.critic:PPOCritic",
    "function_reward": "realrl.rewards.interface:FunctionReward",
    "weighted_rewards": "realrl.rewards.interface:WeightedRewards",
}

RENAMED = {"policy": "ppo_actor", "rw": "reward_model"}

_registered: dict[str, type] = {}
_definitions: dict[str, Definition] = {}  # kept, since modules may be gone when their files are read anew

Interface = TypeVar("Interface", bound=type)


def register_interface(name: str) -> Callable[[Interface], Interface]:
    """Class decorator: make an interface known under `name`.

    Raises:
        ConfigError: the name is a built-in one, or another class has it.

    Examples:
        >>> from realrl.algo.api import ModelInterface
        >>> @register_interface("my_actor")
        ... class MyActor(ModelInterface):
        ...     '''Does as its base class does.'''
    """

    def register(cls: Interface) -> Interface:
        other = _registered.get(name)
        definition = definition_of(cls)
        if name in BUILT_IN:
            raise ConfigError(f"the interface name {name!r} is a built-in one", remedy="Choose another name.")
        if other is not None and _definitions[name] != definition:
            taken = f"{other.__module__}:{other.__qualname__}"
            raise ConfigError(f"the interface name {name!r} is taken by {taken}", remedy="Choose another name.")
        _registered[name] = cls
        _definitions[name] = definition
        return cls

    return register


def interface_names() -> tuple[str, ...]:
    """Return every name that an MFC can use besides ``"package.module:Class"``."""
    return tuple(sorted({*BUILT_IN, *_registered}))


def check_interface_name(name: str) -> None:
    """Refuse a name that cannot be resolved, without importing anything.

    Raises:
        ConfigError: the name is neither registered nor of the form ``"package.module:Class"``.
    """
    if name in RENAMED and name not in _registered:
        raise ConfigError(f"the interface {name!r} is called {RENAMED[name]!r} now", remedy="Write its new name.")
    if ":" not in name and name not in interface_names():
        hint = did_you_mean(name, interface_names()) or f" Known: {', '.join(interface_names())}."
        raise ConfigError(
            f"there is no interface {name!r}.{hint}",
            remedy="Or write 'package.module:Class', or decorate the class with @register_interface.",
        )


def find_interface(name: str) -> object:
    """Return the object that a name stands for: a registered class, a built-in one, or a ``"package.module:Class"``.

    Raises:
        ConfigError: there is none.
    """
    check_interface_name(name)
    return _registered.get(name) or load_object(BUILT_IN.get(name, name))
