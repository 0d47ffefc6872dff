"""Settings of several runs: what differs, which runs differ by their seed alone, and how to name them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from realrl.config.serialize import flattened

_SEED = "seed"
_OF_NO_CONSEQUENCE = ("run_dir", "resume", "track", "show", "save", "recover", _SEED)  # for the numbers of a run

Flat = Mapping[str, Any]


def flat_settings(settings: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the settings of each run as path -> value."""
    return [flattened(one) for one in settings]


def differing(runs: Sequence[Flat]) -> list[str]:
    """Return the paths whose values differ between runs, in the order in which the runs have them."""
    paths = dict.fromkeys(path for run in runs for path in run)
    return [path for path in paths if any(not _same(runs[0].get(path), run.get(path)) for run in runs[1:])]


def seed_groups(runs: Sequence[Flat]) -> list[list[int]]:
    """Return the positions of runs that differ by their seed alone, as far as numbers depend on settings.

    Runs without settings are groups of their own, and so are those with the same seed, which differ in something else.
    """
    groups: dict[str, list[int]] = {}
    for i, run in enumerate(runs):
        kept = {path: value for path, value in run.items() if path.partition(".")[0] not in _OF_NO_CONSEQUENCE}
        key = json.dumps(kept, sort_keys=True, default=str) if kept else f"run {i}"
        members = groups.setdefault(key, [])
        if any(_same(run.get(_SEED), runs[j].get(_SEED)) for j in members):
            groups[f"{key} {i}"] = [i]
        else:
            members.append(i)
    return list(groups.values())


def group_names(runs: Sequence[Flat], groups: Sequence[Sequence[int]], names: Sequence[str]) -> list[str]:
    """Return a name for each group: what sets it apart from the others in a few words, or the name of its run.

    Args:
        names: names of the runs.
    """
    if len(groups) == 1:
        return [names[groups[0][0]] if len(groups[0]) == 1 else f"{len(groups[0])} seeds"]
    firsts = [runs[group[0]] for group in groups]
    paths = [path for path in differing(firsts) if path.partition(".")[0] not in _OF_NO_CONSEQUENCE]
    short = short_paths(paths)
    told = [
        ", ".join(f"{short[path]}={shown(first.get(path))}" for path in paths[:3] if path in first) for first in firsts
    ]
    many = len(paths) > 3
    return [
        text if text and not many and told.count(text) == 1 else names[group[0]]
        for text, group in zip(told, groups, strict=True)
    ]


def run_names(paths: Sequence[str]) -> list[str]:
    """Return the shortest ends of paths, at least one part long, that tell runs apart."""
    parts = [path.rstrip("/").split("/") for path in paths]
    longest = max(map(len, parts), default=1)
    for n in range(1, longest + 1):
        names = ["/".join(one[-n:]) for one in parts]
        if len(set(names)) == len(names):
            return names
    return list(paths)


def short_paths(paths: Sequence[str]) -> dict[str, str]:
    """Return path -> its shortest end, in whole parts, that no other path has."""
    found = {}
    for path in paths:
        parts = path.split(".")
        ends = (".".join(parts[-n:]) for n in range(1, len(parts) + 1))
        found[path] = next((e for e in ends if sum(p == e or p.endswith("." + e) for p in paths) == 1), path)
    return found


def shown(value: Any) -> str:
    """Return a value as the command line takes it."""
    if isinstance(value, str):
        return value or "''"
    return json.dumps(value, ensure_ascii=False, default=str)


def _same(a: Any, b: Any) -> bool:
    """Return True for equal values; 1 and 1.0 are equal, 1 and True are not."""
    are_numbers = all(isinstance(one, int | float) and not isinstance(one, bool) for one in (a, b))
    return bool(a == b) if are_numbers or type(a) is type(b) else False
