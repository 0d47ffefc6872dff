"""Table of an experiment's keys: path, value, allowed values, meaning."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from realrl.cli.console import print_table
from realrl.cli.unused import is_unused, unused_keys

if TYPE_CHECKING:
    from realrl.config.keys import Key
    from realrl.config.schema import RunConfig
    from realrl.experiment.declaration import Experiment
    from realrl.graph.mfc import MFCDef

ANY_ROLE, ANY_CALL = "<role>", "<call>"
FOLDING = ("value", "accepts", "meaning")


def listed_keys(experiment: Experiment, config: RunConfig) -> list[tuple[Key, str]]:
    """Return the keys of this experiment with their values; those of roles and calls once: ``models.<role>``."""
    from dataclasses import replace

    from realrl.config.keys import entry_keys, known_keys
    from realrl.config.serialize import shown_config

    unused = unused_keys(experiment, experiment.calls(config))
    values = shown_config(config)
    listed: dict[str, tuple[Key, dict[str, str]]] = {}
    known = known_keys(experiment)
    for path, key in known.items():
        if path == "calls":
            for shown, inner in entry_keys(f"calls.{ANY_CALL}.", known).items():
                listed[shown] = (inner, {"": _by_call(config, shown.rpartition(".")[2])})
            continue
        if is_unused(path, unused):
            continue
        parts = path.split(".")
        role = parts[1] if parts[0] == "models" else ""
        shown = ".".join(("models", ANY_ROLE, *parts[2:])) if role else path
        listed.setdefault(shown, (key, {}))[1][role] = _show(values, parts)
    return [(replace(key, path=shown), _by_role(by_role)) for shown, (key, by_role) in listed.items()]


def print_config(experiment: Experiment, config: RunConfig) -> None:
    """Print all keys, the rarely changed ones in a table of their own."""
    from realrl.experiment.call_settings import KEYS

    listed, calls = listed_keys(experiment, config), call_rows(experiment, config)
    roles = ", ".join(f"{name}{'' if role.trainable else ' (frozen)'}" for name, role in experiment.roles.items())
    print(f"{experiment.name}: {experiment.description}")
    print(f"<role>: {roles}; a frozen role has no optimizer.\n")
    columns = ("key", "value", "accepts", "meaning")
    print_table(columns, _rows(pair for pair in listed if not pair[0].is_advanced), folding=FOLDING)
    rare = _rows(pair for pair in listed if pair[0].is_advanced)
    if rare:
        print_table(columns, rare, title="Rarely changed", folding=FOLDING)
    print_table(("call", *KEYS), calls, title=f"What holds for each call: calls.{ANY_CALL}.KEY")


def call_rows(experiment: Experiment, config: RunConfig) -> list[tuple[str, ...]]:
    """Return each call with its settings from any source; ``-`` where a key has no effect on a call.

    Raises:
        ConfigError: see `configured_calls`.
    """
    from realrl.experiment.call_settings import KEYS, configured_calls, why_not, with_run_settings

    mfcs = [with_run_settings(mfc, config) for mfc in configured_calls(experiment, config)]
    changed_roles = frozenset[str]().union(*(mfc.changed_roles for mfc in mfcs))
    roles = experiment.roles_for(config)

    def cell(mfc: MFCDef, key: str) -> str:
        return "-" if why_not(key, mfc, changed_roles, roles) else _show(getattr(mfc, key), [])

    return [(mfc.name, *(cell(mfc, key) for key in KEYS)) for mfc in mfcs]


def _rows(listed: Iterable[tuple[Key, str]]) -> list[tuple[str, str, str, str]]:
    return [(key.path, value, key.allowed, key.description) for key, value in listed]


def _show(values: object, parts: list[str]) -> str:
    import json

    for part in parts:
        values = values.get(part) if isinstance(values, dict) else None
    return values if isinstance(values, str) and values else json.dumps(values)


def _by_call(config: RunConfig, key: str) -> str:
    """Return the settings of single calls in words; null if there is none."""
    given = {name: getattr(own, key) for name, own in config.calls.items()}
    shown = [f"{name}: {_show(value, [])}" for name, value in given.items() if value is not None]
    return ", ".join(shown) or "null"


def _by_role(by_role: dict[str, str]) -> str:
    """Return one value if all roles agree, else each role's."""
    if len(set(by_role.values())) == 1:
        return next(iter(by_role.values()))
    return ", ".join(f"{role}: {value}" for role, value in by_role.items())
