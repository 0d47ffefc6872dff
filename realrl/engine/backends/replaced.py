"""Temporary values for attributes of another package, for choices that it does not offer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Give attributes of a module or an object other values within the block.

    Afterwards the owner is as it was: an attribute that it inherited is inherited again.

    Raises:
        AttributeError: the owner has no such attribute, so that nobody would ask for the value.
    """
    for name in values:
        getattr(owner, name)
    own = {name: vars(owner)[name] for name in values if name in vars(owner)}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name in values:
            if name in own:
                setattr(owner, name, own[name])
            else:
                delattr(owner, name)
