"""Functions that `realrl.run` was given and that only this process has: those of a notebook's cells, lambdas.

The configuration calls one ``realrl.python.given:NAME``. Another process finds nothing under this name, so that only
runs inside this one (``launcher=inline``) can have it.
"""

from __future__ import annotations

_functions: dict[str, object] = {}


def give_function(name: str, function: object) -> str:
    """Keep a function, in the place of one of the same name, and return the reference to it."""
    _functions[name] = function
    return f"{__name__}:{name}"


def __getattr__(name: str) -> object:
    try:
        return _functions[name]
    except KeyError:
        raise AttributeError(f"no function {name!r} was given to realrl.run in this process") from None
