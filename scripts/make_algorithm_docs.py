#!/usr/bin/env python
"""Bring docs/algorithms up to date with the code.

A page's prose and formulas are written by hand. The picture of the graph, and what stands between ``<!-- calls -->``
and ``<!-- options -->`` and their ``<!-- end -->``, come from the experiment. The index is docs/algorithms.md.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from realrl.cli import main as realrl
from realrl.config.compose import compose
from realrl.config.keys import known_keys
from realrl.config.policy_options import PolicyOptions
from realrl.config.reward_options import RewardOptions
from realrl.config.schema import RunConfig
from realrl.experiment.declaration import Experiment
from realrl.experiment.discovery import experiment_names, load_experiment
from realrl.experiment.pieces import BUILT_IN, chosen_pieces
from realrl.graph.mfc import MFCDef

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "algorithms"
GRAPH = ("cluster.n_devices_per_node=1",)  # so that pictures do not depend on the machine


def main() -> None:
    """Write the pictures and pages of the experiments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="an experiment; by default all of them")
    for name in parser.parse_args().names or experiment_names():
        draw(name, FOLDER / f"{name}.svg")
        page = FOLDER / f"{name}.md"
        page.write_text(updated(page.read_text(encoding="utf-8"), name), encoding="utf-8")
        print(f"wrote {page.relative_to(ROOT)} and its picture")


def draw(name: str, out: Path) -> None:
    """Draw the picture of an experiment's graph.

    Raises:
        SystemExit: `realrl graph` refuses.
    """
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = realrl(["graph", name, *GRAPH, "--out", str(out)])
    if code:
        raise SystemExit(said.getvalue())


def updated(page: str, name: str) -> str:
    """The page with the tables of today's experiment between its markers.

    Raises:
        ValueError: it lacks a marker.
    """
    experiment = load_experiment(name)
    config = compose(experiment)
    tables = {"calls": "\n".join(_calls(experiment, config)), "options": "\n".join(_options(experiment, config))}
    for marker, table in tables.items():
        pattern = re.compile(rf"(<!-- {marker} -->\n).*?(<!-- end -->)", re.DOTALL)
        page, n_found = pattern.subn(lambda found, table=table: f"{found[1]}{table}\n{found[2]}", page)
        if n_found != 1:
            raise ValueError(f"the page of {name} must have <!-- {marker} --> and <!-- end --> once")
    return page


# ---------------------------------------------------------------- calls


def _calls(experiment: Experiment, config: RunConfig) -> Iterator[str]:
    calls = experiment.calls(config)
    roles = experiment.roles_for(config)
    heads = {"value": ", a value head", "reward": ", a reward head", "none": ", no weights"}
    said = [f"`{n}` ({'trained' if r.trainable else 'frozen'}{heads.get(r.head, '')})" for n, r in roles.items()]
    produced = {key for call in calls for key in call.output_keys}
    read = dict.fromkeys(key for call in calls for key in call.input_keys if key not in produced)
    yield f"Roles: {', '.join(said)}."
    yield f"From the dataset: {_codes(read)}."
    yield ""
    yield "| call | role | does | reads | gives |"
    yield "|---|---|---|---|---|"
    for call in calls:
        yield f"| `{call.name}` | `{call.role}` | {_does(call)} | {_codes(call.input_keys)} | {_gives(call)} |"


def _does(call: MFCDef) -> str:
    what = call.interface_type.value.replace("_step", "")
    interface = call.interface
    arguments = ", ".join(f"{name}={value}" for name, value in interface.args.items())
    return f"{what}, `{interface.name}`" + (f" with {arguments}" if arguments else "")


def _gives(call: MFCDef) -> str:
    parts = [_codes(call.output_keys)] if call.output_keys else []
    parts += ["fewer samples, where it drops some"] if call.may_drop else []
    parts += [f"a new version of `{call.role}`"] if call.is_train else []
    parts += ["a reference that followed"] if call.post_hooks else []
    return "; ".join(parts)


def _codes(keys: Mapping[str, object] | tuple[str, ...]) -> str:
    return ", ".join(f"`{key}`" for key in keys)


# ---------------------------------------------------------------- options


def _options(experiment: Experiment, config: RunConfig) -> Iterator[str]:
    """The defaults of the experiment, then the options that it reads by default."""
    plain = dict(_leaves("", compose(replace(experiment, defaults={})).model_dump(mode="json")))
    changed = {path: value for path, value in _leaves("", experiment.defaults) if value != plain.get(path)}
    if changed:
        yield f"This experiment sets {', '.join(f'`{path}={_value(value)}`' for path, value in changed.items())}."
        yield ""
    yield "| option | default | meaning |"
    yield "|---|---|---|"
    shared = set(RewardOptions.model_fields)
    unread = _unread(config)
    values = config.algorithm.model_dump(mode="json")
    keys = known_keys(experiment)
    for path in sorted(keys, key=lambda path: path not in changed):  # options that the experiment sets come first
        name, key = path.removeprefix("algorithm."), keys[path]
        if path.startswith("algorithm.") and name not in shared | unread:
            yield f"| `algorithm.{name}` | `{_value(values[name])}` | {_cell(key.description)} |"
    if "reward" in experiment.roles and isinstance(config.algorithm, RewardOptions):
        yield ""
        yield "How responses are rewarded: [rewards](../algorithms.md#rewards)."
    if unread:
        yield ""
        yield f"Read by other pieces only, and refused without them: {_codes(tuple(sorted(unread)))}."


def _unread(config: RunConfig) -> set[str]:
    """Options that are read only by pieces that are not chosen by default."""
    if not isinstance(config.algorithm, PolicyOptions):
        return set()
    chosen = {option for piece in chosen_pieces(config.algorithm) for option in piece.options}
    read = {option for piece in BUILT_IN for option in piece.options}
    return {option for option in type(config.algorithm).model_fields if option in read - chosen}


def _leaves(path: str, value: object) -> Iterator[tuple[str, object]]:
    if not isinstance(value, Mapping):
        yield path, value
        return
    for name, inner in value.items():
        yield from _leaves(f"{path}.{name}" if path else str(name), inner)


def _value(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    main()
