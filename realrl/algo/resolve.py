"""Instances of the interfaces that calls name."""

from __future__ import annotations

import inspect

from realrl.algo.api import ModelInterface
from realrl.errors import ConfigError, Error, did_you_mean
from realrl.experiment.loading import check_parameters, place_of_user_function, place_that_raised
from realrl.experiment.registry import find_interface
from realrl.graph.mfc import InterfaceRef, MFCDef
from realrl.sched.track.scores import WEIGHT

_METHODS = ("generate", "inference", "train_step", "evaluate")


def resolve_interface(ref: InterfaceRef) -> ModelInterface:
    """A new instance of the interface that `ref` names, made with its arguments.

    Calls of one role that name the same interface share state (value statistics, say): make one instance per worker,
    role and `InterfaceRef`.

    Raises:
        ConfigError: unknown name, not a `ModelInterface`, arguments that its constructor does not take, a constructor
            that raises, or a method that takes other ones than it gets.
    """
    cls = find_interface(ref.name)
    if not (isinstance(cls, type) and issubclass(cls, ModelInterface)):
        raise ConfigError(f"interface {ref.name!r} is not a class derived from realrl.algo.api.ModelInterface")
    _check_arguments(cls, ref)
    for method in _METHODS:
        function = inspect.getattr_static(cls, method)
        if inspect.isfunction(function):  # a static one is none
            check_parameters(function, ("model", "batch", "ctx"), f"{cls.__name__}.{method}", is_method=True)
    try:
        return cls(**ref.args)
    except Error:
        raise
    except Exception as err:
        raise ConfigError(
            f"interface {ref.name!r} cannot be made: its __init__ raised {type(err).__name__}: {err}",
            remedy=f"Look at {place_that_raised(err) or _place(cls)}.",
        ) from err


def check_interface(mfc: MFCDef) -> None:
    """Check that the interface of a call can be made, and has the method that serves the call.

    Raises:
        ConfigError: as `resolve_interface`, or the method is not there. Names the call.
    """
    cls = type(resolve_interface(mfc.interface))
    method = "evaluate" if WEIGHT in mfc.output_keys else mfc.interface_type.value
    if getattr(cls, method) is getattr(ModelInterface, method):
        own = [name for name in vars(cls) if not name.startswith("_")]
        raise ConfigError(
            f"call {mfc.name!r} is of type {mfc.interface_type.value}, but its interface {mfc.interface.name!r} has no "
            f"method {method}.{did_you_mean(method, own)}",
            remedy=f"Define {cls.__name__}.{method}(self, model, batch, ctx), or give the call another type.",
        )


def _place(cls: type) -> str:
    """Return ``file:line`` of a user's constructor, or else the name of the class."""
    own = inspect.getattr_static(cls, "__init__")
    return (inspect.isfunction(own) and place_of_user_function(own)) or f"class {cls.__name__}"


def _check_arguments(cls: type, ref: InterfaceRef) -> None:
    parameters = {n: p for n, p in inspect.signature(cls).parameters.items() if p.kind is not p.VAR_POSITIONAL}
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    takes = ", ".join(parameters) or "none"
    for name in ref.args:
        if name not in parameters:
            hint = did_you_mean(name, parameters)
            raise ConfigError(
                f"interface {ref.name!r} takes no argument {name!r}; it takes: {takes}.{hint}",
                remedy=f"Leave it out of the InterfaceRef of the call, or add it to __init__: see {_place(cls)}.",
            )
    missing = [n for n, p in parameters.items() if p.default is p.empty and n not in ref.args]
    if missing:
        given = ", ".join(f"{name!r}: ..." for name in (*ref.args, *missing))
        raise ConfigError(
            f"interface {ref.name!r} needs the argument {missing[0]!r}; it takes: {takes}.",
            remedy=f"Write InterfaceRef({ref.name!r}, {{{given}}}) in the call, or a default in __init__: "
            f"see {_place(cls)}.",
        )
