"""Responses that a page shows: some of all steps, the best, the worst, and prompts that come again.

A line of ``generations.jsonl`` has a prompt and a response as text, or as messages with a role and a content each.
Every other number in it may be the reward or a part of it.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

from realrl.report.curves import rounded
from realrl.report.run_files import Row, finite

_SCORES = ("rewards", "reward", "kept_rewards", "score", "payoffs")
_TEXTS = ("prompt", "messages", "response")
_KNOWN = ("step", "epoch", "sample", "file", "row_id", "response_index", "role", "call", "version")
_OTHER = ("row", "long_fields")
_EXTREMES = 0.15  # share of the samples that are the best ones, and the same of the worst
_RETURNING = 0.4  # share that are prompts which come again
_MOST_FIELDS, _MOST_TURNS = 24, 24
_LEAST_CHARS = 120


def choose_samples(rows: Sequence[Row], n: int) -> list[Row]:
    """Return at most n lines in the order of steps, always the same ones of a file.

    Among them are prompts that come again, the best, the worst, and some of all steps.
    """
    usable = sorted((row for row in rows if _step(row) is not None and any(row.get(key) for key in _TEXTS)), key=_order)
    if len(usable) <= n:
        return usable
    chosen: dict[int, Row] = {}

    def take(some: Iterable[Row], most: int) -> None:
        for row in some:
            if len(chosen) >= most:
                return
            chosen.setdefault(id(row), row)

    take(_returning(usable), int(_RETURNING * n))
    with_scores = [(score, row) for row in usable if (score := score_of(row)) is not None]
    scored = [row for _, row in sorted(with_scores, key=itemgetter(0))]  # stable: by step where scores are equal
    extreme = int(_EXTREMES * n)
    take(scored[: -extreme - 1 : -1], len(chosen) + extreme)
    take(scored[:extreme], len(chosen) + extreme)
    room = max(1, n - len(chosen))
    take((usable[(len(usable) - 1) * i // max(1, room - 1)] for i in range(room)), n)
    return sorted(chosen.values(), key=_order)


def score_of(row: Mapping[str, Any]) -> float | None:
    """Return the reward of a line; None if it has none."""
    for name in _SCORES:
        value = finite(row.get(name))
        if value is not None:
            return value
    return None


def shown_samples(rows: Sequence[Row], most_bytes: int, all_rows: Sequence[Row] = ()) -> list[dict[str, Any]]:
    """Return lines as the page's script takes them, with texts cut in the middle until they fit.

    Each has ``step``, ``score``, ``key`` (equal for equal prompts), ``turns`` (who and what), ``about`` (names and
    values), ``fields`` (numbers, such as parts of the reward), ``row`` (fields of the dataset's row) and ``mean``, with
    the number of responses to the same prompt in the step and their mean score.

    Args:
        all_rows: what `rows` were chosen from.
    """
    most_chars = 4000
    keys: dict[str, int] = {}
    scores = _scores_of({(prompt_key(row), row["step"]) for row in rows}, all_rows or rows)
    while True:
        shown = [_shown(row, most_chars, keys) for row in rows]
        for one, row in zip(shown, rows, strict=True):
            own = scores[prompt_key(row), row["step"]]
            one["mean"] = [len(own), rounded(math.fsum(own) / len(own))] if own else [0, None]
        if (
            most_chars <= _LEAST_CHARS
            or len(json.dumps(shown, ensure_ascii=False).encode(errors="replace")) <= most_bytes
        ):
            return shown
        most_chars = most_chars * 2 // 3


# ---------------------------------------------------------------- choice


def _returning(rows: Sequence[Row]) -> Iterator[Row]:
    """Yield lines of prompts that come at several steps, those with most steps first, one line a step."""
    steps: dict[str, dict[int, Row]] = defaultdict(dict)
    for row in rows:
        known = steps[prompt_key(row)]
        step = _step(row) or 0
        if step not in known or _index(row) < _index(known[step]):
            known[step] = row
    several = sorted((s for s in steps.values() if len(s) > 1), key=lambda s: (-len(s), min(s)))
    for found in several:
        ordered = [found[step] for step in sorted(found)]
        yield from ordered if len(ordered) <= 6 else [ordered[(len(ordered) - 1) * i // 5] for i in range(6)]


def prompt_key(row: Mapping[str, Any]) -> str:
    """Return what two lines with the same prompt have in common: the texts before the first answer."""
    prompt = row.get("prompt")
    if isinstance(prompt, str):
        return f"{row.get('role')} {row.get('call')}\n{prompt}"
    turns = []
    for who, text in _turns(row):
        if who in ("response", "assistant"):
            break
        turns.append(f"{who}: {text}")
    return f"{row.get('role')} {row.get('call')}\n" + "\n".join(turns)


def _order(row: Mapping[str, Any]) -> tuple[int, str, int]:
    return _step(row) or 0, str(row.get("sample", "")), _index(row)


def _step(row: Mapping[str, Any]) -> int | None:
    step = row.get("step")
    return step if isinstance(step, int) and not isinstance(step, bool) and 0 <= step < 2**53 else None


def _index(row: Mapping[str, Any]) -> int:
    index = row.get("response_index")
    return index if isinstance(index, int) else 0


# ---------------------------------------------------------------- form


def _scores_of(wanted: Collection[tuple[str, int]], rows: Iterable[Row]) -> dict[tuple[str, int], list[float]]:
    """Return the scores of all responses to a prompt in a step, for the prompts and steps that are wanted."""
    found: dict[tuple[str, int], list[float]] = defaultdict(list)
    steps = {step for _, step in wanted}
    for row in rows:
        step = _step(row)
        if (
            step is not None
            and step in steps
            and (key := (prompt_key(row), step)) in wanted
            and (score := score_of(row)) is not None
        ):
            found[key].append(score)
    return found


def _shown(row: Row, most_chars: int, keys: dict[str, int]) -> dict[str, Any]:
    key = keys.setdefault(prompt_key(row), len(keys))
    turns = [[who, _cut(text, most_chars)] for who, text in _turns(row)]
    about = {name: _cut(str(row[name]), 200) for name in _KNOWN if name != "step" and row.get(name) is not None}
    fields = {
        _cut(name, 80): value
        for name, value in list(_numbers({k: v for k, v in row.items() if k not in (*_KNOWN, *_OTHER, *_TEXTS)}))[
            :_MOST_FIELDS
        ]
    }
    of_row = row.get("row")
    of_row = list(of_row.items())[:_MOST_FIELDS] if isinstance(of_row, dict) else []
    return {
        "step": row["step"],
        "score": rounded(score_of(row)),
        "key": key,
        "turns": turns,
        "about": about,
        "fields": fields,
        "row": {_cut(name, 80): _cut(_text(value), 200) for name, value in of_row},
    }


def _turns(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return who said what, in the order in which it was said."""
    found: list[tuple[str, str]] = []
    for key in ("messages",) if row.get("messages") else _TEXTS:
        value = row.get(key)
        if isinstance(value, str) and (value or key == "response"):
            found.append((key, value))
        elif isinstance(value, list):
            found += [
                (_text(one.get("role", "")), _text(one.get("content", ""))) for one in value if isinstance(one, dict)
            ]
    if row.get("messages") and isinstance(row.get("response"), str) and all(w != "assistant" for w, _ in found):
        found.append(("response", row["response"]))
    if len(found) > _MOST_TURNS:
        left_out = len(found) - _MOST_TURNS
        found[_MOST_TURNS // 2 : -_MOST_TURNS // 2] = [("...", f"{left_out} messages left out")]
    return found


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _cut(text: str, most_chars: int) -> str:
    if len(text) <= most_chars:
        return text
    half = (most_chars - 40) // 2
    return f"{text[:half]} [... {len(text) - 2 * half:,} characters ...] {text[-half:]}"


def _numbers(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield names and values of numbers and of what is true or false, those of mappings inside too."""
    for name, value in values.items():
        if isinstance(value, dict) and not prefix:
            yield from _numbers(value, f"{name}.")
        elif isinstance(value, bool):
            yield prefix + name, value
        elif (number := finite(value)) is not None:
            yield prefix + name, rounded(number)
