"""From the name in an MFC to its `ModelInterface`. Importing this module imports no torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from realrl.algo.loading import load_object
from realrl.errors import ConfigError, did_you_mean
from realrl.graph.mfc import InterfaceRef

if TYPE_CHECKING:
    from realrl.algo.api import ModelInterface

BUILT_IN = {
    "sft": "realrl.algo.sft:SFT",
    "rw": "realrl.algo.rw:RewardModel",
    "dpo": "realrl.algo.dpo:DPO",
    "kto": "realrl.algo.kto:KTO",
    "reward_model": "realrl.algo.rw:RewardModel",
    "policy": "realrl.algo.policy:PolicyActor",
    "filter": "realrl.algo.filters:Filter",
    "ppo_actor": "realrl.algo.ppo:PPOActor",
    "ppo_critic": "realrl.algo.ppo:PPOCritic",
    "function_reward": "realrl.algo.function_reward:FunctionReward",
    "weighted_rewards": "realrl.algo.function_reward:WeightedRewards",
}

_registered: dict[str, type[ModelInterface]] = {}

Interface = TypeVar("Interface", bound="type[ModelInterface]")


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
        same = other is not None and (other.__qualname__, _file(other)) == (cls.__qualname__, _file(cls))
        if name in BUILT_IN:
            raise ConfigError(f"the interface name {name!r} is a built-in one", remedy="Choose another name.")
        if other is not None and not same:
            taken = f"{other.__module__}:{other.__qualname__}"
            raise ConfigError(f"the interface name {name!r} is taken by {taken}", remedy="Choose another name.")
        _registered[name] = cls
        return cls

    return register


def _file(cls: type) -> str:
    return getattr(inspect.getmodule(cls), "__file__", None) or cls.__module__


def interface_names() -> tuple[str, ...]:
    """Every name that an MFC can use besides ``"package.module:Class"``."""
    return tuple(sorted({*BUILT_IN, *_registered}))


def check_interface_name(name: str) -> None:
    """Refuse a name that cannot be resolved, without importing anything.

    Raises:
        ConfigError: neither registered nor of the form ``"package.module:Class"``.
    """
    if ":" not in name and name not in interface_names():
        hint = did_you_mean(name, interface_names()) or f" Known: {', '.join(interface_names())}."
        raise ConfigError(
            f"there is no interface {name!r}.{hint}",
            remedy="Or write 'package.module:Class', or decorate the class with @register_interface.",
        )


def resolve_interface(ref: InterfaceRef) -> ModelInterface:
    """A new instance of the interface that `ref` names, made with its arguments.

    Calls of one role that name the same interface share state (value statistics, say): make one instance per worker,
    role and `InterfaceRef`.

    Raises:
        ConfigError: unknown name, not a `ModelInterface`, or arguments that its constructor does not take.
    """
    from realrl.algo.api import ModelInterface

    check_interface_name(ref.name)
    cls = _registered.get(ref.name) or load_object(BUILT_IN.get(ref.name, ref.name))
    if not (isinstance(cls, type) and issubclass(cls, ModelInterface)):
        raise ConfigError(f"interface {ref.name!r} is not a class derived from realrl.algo.api.ModelInterface")
    _check_arguments(cls, ref)
    return cls(**ref.args)


def _check_arguments(cls: type, ref: InterfaceRef) -> None:
    parameters = {n: p for n, p in inspect.signature(cls).parameters.items() if p.kind is not p.VAR_POSITIONAL}
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    takes = ", ".join(parameters) or "none"
    for name in ref.args:
        if name not in parameters:
            hint = did_you_mean(name, parameters)
            raise ConfigError(f"interface {ref.name!r} takes no argument {name!r}; it takes: {takes}.{hint}")
    missing = [n for n, p in parameters.items() if p.default is p.empty and n not in ref.args]
    if missing:
        raise ConfigError(f"interface {ref.name!r} needs the argument {missing[0]!r}; it takes: {takes}.")
