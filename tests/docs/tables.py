"""Tables in docs/configuration.md: keys, and fields of rows. Run as a module, it rewrites the document."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from realrl.config.keys import Key, base_values, entry_keys, known_keys
from realrl.data.kinds import DatasetKind
from realrl.experiment.declaration import Experiment
from realrl.experiment.discovery import experiment_names, load_experiment

ROOT = Path(__file__).resolve().parent.parent.parent
DOCUMENT = ROOT / "docs" / "configuration.md"
MARKER = "<!-- keys -->\n"
FIELDS = re.compile(r"(<!-- fields -->\n).*?(<!-- end -->)", re.DOTALL)
ALGORITHMS = ("ppo", "rw", "sft")


def key_tables() -> str:
    """One table for all experiments, one for the options of each algorithm."""
    ppo = load_experiment("ppo")
    common = [key for key in _with_calls(known_keys(ppo)) if not key.path.startswith("algorithm.")]
    parts = [_table(ppo, [key for key in common if _is_first_role(key)])]
    for name in ALGORITHMS:
        experiment = load_experiment(name)
        options = [key for key in known_keys(experiment).values() if key.path.startswith("algorithm.")]
        parts.append(f"### Options of `{name}`\n{_table(experiment, options)}")
    return "\n".join(parts)


def _with_calls(known: Mapping[str, Key]) -> Iterator[Key]:
    """The keys; the mapping of calls by the keys of one call."""
    for key in known.values():
        if key.path != "calls":
            yield key
        else:
            yield from (replace(inner, path=path) for path, inner in entry_keys("calls.<call>.", known).items())


def _is_first_role(key: Key) -> bool:
    return not key.path.startswith("models.") or key.path.startswith("models.actor.")


def _table(experiment: Experiment, keys: Iterable[Key]) -> str:
    values = base_values(experiment)
    rows = ["| key | default | accepts | meaning |", "|---|---|---|---|"]
    for key in keys:
        value: object = values
        for part in key.path.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        path = key.path.replace("models.actor.", "models.<role>.")
        rows.append(f"| `{path}` | `{json.dumps(value)}` | {_cell(key.allowed)} | {_cell(key.description)} |")
    return "\n".join(rows) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def field_table() -> str:
    """A line for each kind of dataset: the experiments that read it, and the forms of its rows."""
    names: dict[DatasetKind, list[str]] = {}
    for name in experiment_names():
        names.setdefault(load_experiment(name).dataset, []).append(f"`{name}`")
    rows = ["| experiment | a row holds |", "|---|---|"]
    for kind in DatasetKind:
        forms = "; or ".join(", ".join(f"`{field}`" for field in form) for form in kind.forms)
        rows.append(f"| {', '.join(names.get(kind, []))} | {forms} |")
    return "\n".join(rows) + "\n"


def document_with(tables: str, fields: str) -> str:
    """The document with the tables of keys below their marker, and that of fields between its own."""
    text = DOCUMENT.read_text(encoding="utf-8").partition(MARKER)[0]
    text, n_found = FIELDS.subn(lambda found: found[1] + fields + found[2], text)
    assert n_found == 1
    return text + MARKER + tables


if __name__ == "__main__":
    DOCUMENT.write_text(document_with(key_tables(), field_table()), encoding="utf-8")
