"""Search for experiments, among the registered ones or in a user's file or module, and for their YAML.

Registered experiments are the modules of the package `realrl_experiments`. A wheel and an editable install both have
it; in a bare checkout it is the folder `experiments` beside `realrl`. The same holds for `realrl_configs` and
`configs`.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import pkgutil
import sys
from pathlib import Path
from types import ModuleType

from realrl.config.schema import RunConfig
from realrl.config.serialize import experiment_reference, load_config
from realrl.errors import ConfigError, did_you_mean
from realrl.experiment.declaration import Experiment, check_declaration
from realrl.experiment.loading import (
    OF_A_FILE,
    execute_module,
    find_working_directory,
    import_failed,
    importing,
    spec_of_file,
    staying,
)

ATTRIBUTE = "EXPERIMENT"
GIVEN = "given:"  # start of a reference to an object that only this process has
PACKAGE = "realrl_experiments"
CONFIG_PACKAGE = "realrl_configs"
ROOT = Path(__file__).resolve().parent.parent.parent
_given: dict[str, Experiment] = {}


def load_experiment(reference: str) -> Experiment:
    """Return the experiment that a reference names.

    Args:
        reference: a registered name (``ppo``), a file (``./my_algorithm.py``) or a module (``my_package.my_algo``).
            A file's folder becomes importable, as when Python runs it, so that its interfaces can be named
            ``my_algorithm:MyInterface``.

    Raises:
        ConfigError: there is no such experiment, its module cannot be imported, or declares none.
    """
    if reference.startswith(GIVEN):
        return _given_experiment(reference.removeprefix(GIVEN))
    with staying():
        if _is_file(reference):
            return _declared(_import_file(Path(reference)), reference)
        if reference in experiment_names():
            return _declared(_import_module(f"{_package().__name__}.{reference}", reference), reference)
        if "." in reference and all(part.isidentifier() for part in reference.split(".")):
            return _declared(_import_module(reference, reference), reference)
    raise _unknown("experiment", reference)


def give_experiment(experiment: Experiment) -> str:
    """Keep an object, in the place of one of the same name, and return a reference that holds in this process alone.

    Raises:
        ConfigError: a field is impossible.
    """
    checked_experiment(experiment, experiment.name)
    _given[experiment.name] = experiment
    return GIVEN + experiment.name


def _given_experiment(name: str) -> Experiment:
    if name not in _given:
        raise ConfigError(
            f"experiment '{name}' was an object of a Python session that is over",
            remedy="Save it as a file, such as ./my_algorithm.py, and name that.",
        )
    return _given[name]


def stable_reference(reference: str) -> str:
    """Return the reference for use by another process: files by their absolute path."""
    return str(Path(reference).resolve()) if _is_file(reference) else reference


def reference_of(experiment: Experiment) -> str | None:
    """Return the name, file or module by which another process finds an experiment; None if it cannot."""
    for name, module in list(sys.modules.items()):
        if getattr(module, "__dict__", {}).get(ATTRIBUTE) is not experiment:
            continue
        package, _, last = name.rpartition(".")
        if package == PACKAGE:
            return last
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and file.endswith(".py") and os.path.isfile(file):
            return os.path.abspath(file)
    return None


def forget_files(reference: str) -> None:
    """Let the next load of an experiment's file, and of files that a configuration names, read them anew."""
    path = os.path.realpath(reference)
    for name, module in list(sys.modules.items()):
        is_experiment = _is_file(reference) and getattr(module, "__file__", None) == path and name != "__main__"
        if is_experiment or name.startswith(OF_A_FILE):
            del sys.modules[name]


def experiment_names() -> list[str]:
    """Return the names of the registered experiments, sorted."""
    return sorted(info.name for info in pkgutil.iter_modules(_package().__path__) if not info.name.startswith("_"))


def list_experiments() -> list[Experiment]:
    """Return all registered experiments, sorted by name."""
    return [load_experiment(name) for name in experiment_names()]


def load_run(data: bytes) -> tuple[Experiment, RunConfig]:
    """Return the experiment and the configuration that `dump_config` wrote.

    Raises:
        ConfigError: the data, or the experiment that it names, cannot be loaded.
    """
    experiment = load_experiment(experiment_reference(data))
    return experiment, load_config(data, experiment)


def config_dir() -> Path:
    """Return the folder of the YAML groups preset, cluster, allocation and model."""
    spec = importlib.util.find_spec(CONFIG_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(folders[0]) if folders else ROOT / "configs"


def _is_file(reference: str) -> bool:
    return reference.endswith(".py") or "/" in reference or "\\" in reference


def _package() -> ModuleType:
    """Return the package of registered experiments, under its installed name also in a bare checkout."""
    if PACKAGE in sys.modules:
        return sys.modules[PACKAGE]
    if importlib.util.find_spec(PACKAGE) is not None:
        return importlib.import_module(PACKAGE)
    folder = ROOT / "experiments"
    spec = importlib.util.spec_from_file_location(
        PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is None or not folder.is_dir():
        raise ConfigError(f"the registered experiments are missing: there is no package {PACKAGE} and no '{folder}'")
    return execute_module(spec, PACKAGE)


def _import_module(name: str, reference: str) -> ModuleType:
    """Import a module by name; the current folder counts, as it does for ``python -m``."""
    find_working_directory()
    try:
        with importing(name):
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise _unknown("experiment or module", reference) from error
        raise import_failed(f"experiment '{reference}'", error) from error
    except (Exception, SystemExit) as error:
        raise import_failed(f"experiment '{reference}'", error) from error


def _unknown(kind: str, reference: str) -> ConfigError:
    names = experiment_names()
    is_beside = os.path.isfile(f"{reference}.py")
    meant = f" Did you mean ./{reference}.py?" if is_beside else did_you_mean(reference, names)
    return ConfigError(
        f"there is no {kind} '{reference}'.{meant}",
        remedy=f"Choose from {', '.join(names)}, or give a file such as ./my_algorithm.py.",
    )


def _import_file(path: Path) -> ModuleType:
    if not os.path.isfile(path):
        folder = path.parent
        start = "./" if folder == Path() else f"{folder}/"
        near = sorted(start + other.name for other in folder.glob("*.py")) if os.path.isdir(folder) else []
        wanted = start + path.name
        raise ConfigError(f"there is no experiment file '{wanted}'.{did_you_mean(wanted, near)}")
    path = path.resolve()
    name = path.stem
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__file__", None) == str(path):
        return loaded
    other = importlib.util.find_spec(name.partition(".")[0] or name) if loaded is None else None
    is_taken = loaded is not None or (other is not None and other.origin != str(path))  # its folder may be on the path
    if is_taken:
        name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
        if name in sys.modules:
            return sys.modules[name]
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    if path.suffix != ".py":
        raise ConfigError(f"'{path}' is not a Python file")
    try:
        return execute_module(spec_of_file(name, path), name)
    except (Exception, SystemExit) as error:
        raise import_failed(f"experiment '{path}'", error) from error


def _declared(module: ModuleType, reference: str) -> Experiment:
    if not hasattr(module, ATTRIBUTE):
        near = did_you_mean(ATTRIBUTE, vars(module))
        raise ConfigError(
            f"'{reference}' declares no experiment: it has no attribute {ATTRIBUTE}.{near}",
            remedy=f"End it with {ATTRIBUTE} = realrl.Experiment(name=..., roles=..., mfcs=...).",
        )
    return checked_experiment(getattr(module, ATTRIBUTE), reference)


def checked_experiment(experiment: object, reference: str) -> Experiment:
    """Return an experiment whose fields have the types that they must have.

    Raises:
        ConfigError: it is none, or a field is impossible.
    """
    if not isinstance(experiment, Experiment):
        raise ConfigError(f"{ATTRIBUTE} in '{reference}' is of type {type(experiment).__name__}, not realrl.Experiment")
    check_declaration(experiment, reference)
    return experiment
