"""Import of a user's objects: ``"package.module:object"``, ``"package.module.object"`` or ``"path/to/file.py:object"``.

Imports no torch. Modules in the working directory are found as they would be by ``python -m``.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from realrl.errors import ConfigError, did_you_mean


def load_object(name: str) -> Any:
    """Import the object that `name` refers to.

    Raises:
        ConfigError: the name has no such form, there is no such module, file or object, or the import needs a module
            that is missing.
    """
    where, attribute = split_name(name)
    module = _load_file(name, where) if where.endswith(".py") else _import(name, where)
    try:
        return getattr(module, attribute)
    except AttributeError:
        public = [n for n in vars(module) if not n.startswith("_")]
        raise ConfigError(
            f"{where!r} has no {attribute!r} (asked for as {name!r}).{did_you_mean(attribute, public)}"
        ) from None


def require_module(name: str, key: str) -> None:
    """Refuse a name whose module or file does not exist, without importing it.

    Args:
        name: as for `load_object`.
        key: configuration key that holds the name, for the message.

    Raises:
        ConfigError: the module or file is missing; names `key`.
    """
    where, _ = split_name(name)
    if where.endswith(".py"):
        found = Path(where).is_file()
    else:
        find_working_directory()
        try:
            found = importlib.util.find_spec(where) is not None
        except ModuleNotFoundError:
            found = False
    if not found:
        kind = "file" if where.endswith(".py") else "module"
        raise ConfigError(
            f"{key}={name!r}: there is no {kind} {where!r}",
            remedy="Write 'module:object' for a module that Python can import from here, or 'file.py:object'.",
        )


def split_name(name: str) -> tuple[str, str]:
    """Split a name into "package.module" or "file.py", and "object".

    Raises:
        ConfigError: `name` has no such two parts.
    """
    where, _, attribute = name.rpartition(":" if ":" in name else ".")
    if not where or not attribute:
        raise ConfigError(f"{name!r} names no object", remedy="Write 'module:object' or 'file.py:object'.")
    return where, attribute


def _import(name: str, module: str) -> ModuleType:
    find_working_directory()
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and (module == error.name or module.startswith(error.name + ".")):
            raise ConfigError(f"there is no module {module!r} (asked for as {name!r})") from error
        raise ConfigError(f"{module!r} (asked for as {name!r}) needs a module that is missing: {error}") from error


def _load_file(name: str, path: str) -> ModuleType:
    file = Path(path).resolve()
    if not file.is_file():
        raise ConfigError(f"there is no file {path!r} (asked for as {name!r})")
    module_name = f"realrl_user_{file.stem}_{abs(hash(str(file))):x}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, file)
    assert spec is not None
    return execute_module(spec, module_name)


def execute_module(spec: importlib.machinery.ModuleSpec, name: str) -> ModuleType:
    """Return a new module under `name`; one that raises leaves no trace, so that it can be loaded anew."""
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def find_working_directory() -> None:
    """Let imports find modules in the current folder, as under ``python -m``."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
