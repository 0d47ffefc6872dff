"""Instances of the interfaces that calls name."""

from __future__ import annotations

import inspect

from realrl.algo.api import ModelInterface
from realrl.errors import ConfigError, did_you_mean
from realrl.experiment.loading import check_parameters
from realrl.experiment.registry import find_interface
from realrl.graph.mfc import InterfaceRef

_METHODS = ("generate", "inference", "train_step", "evaluate")


def resolve_interface(ref: InterfaceRef) -> ModelInterface:
    """A new instance of the interface that `ref` names, made with its arguments.

    Calls of one role that name the same interface share state (value statistics, say): make one instance per worker,
    role and `InterfaceRef`.

    Raises:
        ConfigError: unknown name, not a `ModelInterface`, arguments that its constructor does not take, or a method
            that takes other ones than it gets.
    """
    cls = find_interface(ref.name)
    if not (isinstance(cls, type) and issubclass(cls, ModelInterface)):
        raise ConfigError(f"interface {ref.name!r} is not a class derived from realrl.algo.api.ModelInterface")
    _check_arguments(cls, ref)
    for method in _METHODS:
        function = inspect.getattr_static(cls, method)
        if inspect.isfunction(function):  # a static one is none
            check_parameters(function, ("model", "batch", "ctx"), f"{cls.__name__}.{method}", is_method=True)
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
