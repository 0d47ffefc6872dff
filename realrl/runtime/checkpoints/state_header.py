"""Headers of state files: the tree of names, and errors of damaged files. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from safetensors import SafetensorError, safe_open

from realrl.errors import AssetError


def tree_of(file: Any) -> Any:
    """The state in an open safetensors file, with names in the place of tensors."""
    return json.loads((file.metadata() or {})["tree"])


def names_in(path: Path) -> set[str]:
    """Read the names at the top of the state.

    Raises:
        AssetError: the file is missing or damaged.
    """
    with explained(path), cast("Any", safe_open(path, framework="np")) as file:
        return set(tree_of(file))


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn the errors of a missing or damaged file into `AssetError`."""
    try:
        yield
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RecursionError) as err:
        raise AssetError(f"the state file {path} cannot be read: {err}") from err
