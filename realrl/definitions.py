"""Place where a user's class or function is defined, which stays the same when its file is read a second time."""

from __future__ import annotations

import inspect
from dataclasses import dataclass


@dataclass(frozen=True)
class Definition:
    """A place in source code; equal for two objects made by one definition."""

    file: str
    name: str

    def __str__(self) -> str:
        return f"{self.file}:{self.name}"


def definition_of(thing: object) -> Definition:
    """Return the definition of a class or a function; of another callable, which has no name, its module and `repr`.

    To be asked while the module is there: a class does not know its file once the module is gone.
    """
    code = getattr(thing, "__code__", None)
    file = code.co_filename if code is not None else getattr(inspect.getmodule(thing), "__file__", None)
    name = getattr(thing, "__qualname__", None) or repr(thing)
    return Definition(file or str(getattr(thing, "__module__", "")), name)
