"""The built-in reward `math_verify`: compares the response's mathematical answer with that of the dataset's row.

Needs the extra ``rewards``. Imported by reward processes before they are forked, so that no response waits for it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from math_verify import parse, verify

FINAL_MARK = "####"

# the package warns that it watches no clock; the reward process does
logging.getLogger("math_verify").setLevel(logging.ERROR)


def math_verify(prompt: str, response: str, row: Mapping[str, Any], *, field: str = "answer") -> float:
    """Return 1 if the last formula or number of `response` equals the row's answer as mathematics, else 0.

    Args:
        prompt: unused.
        response: text with its answer in ``\\boxed{...}``, between dollar signs, or as a plain number or expression.
        row: the dataset row's fields.
        field: name of the field that holds the answer: a number, an expression in LaTeX with or without dollar signs or
            ``\\boxed``, or a solution that ends with ``#### answer``.

    Raises:
        KeyError: the row has no such field.
        ValueError: the row's answer is no mathematical expression.
    """
    if row.get(field) is None:
        raise KeyError(f"the dataset's row has no {field!r}, only {', '.join(row) or 'a prompt'}")
    gold = _parsed(_as_latex(str(row[field])))
    if not gold:
        raise ValueError(f"the row's {field} {row[field]!r:.200} is no mathematical expression")
    return float(verify(gold, _parsed(response), timeout_seconds=None))


def _as_latex(answer: str) -> str:
    answer = answer.rpartition(FINAL_MARK)[2].strip()
    return (
        answer if "$" in answer or "\\boxed" in answer or "\\(" in answer or "\\[" in answer else f"\\boxed{{{answer}}}"
    )


def _parsed(text: str) -> list[Any]:
    found: list[Any] = parse(text, parsing_timeout=None)  # type: ignore[arg-type]
    return found
