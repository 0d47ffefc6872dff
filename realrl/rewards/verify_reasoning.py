"""The built-in reward `reasoning_gym`: the score that a task of reasoning-gym gives a response.

Needs the extra ``rewards``, and rows of ``dataset.path=reasoning_gym:<task>``. Imported by reward processes before they
are forked, so that no response waits for it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import reasoning_gym as _package  # noqa: F401 - now rather than under the first response's time limit

from realrl.data.reasoning_tasks import FIELD, task_entry

ANSWER_PLACES = ("tag_or_last_line", "tag", "last_line", "response")


def reasoning_gym(
    prompt: str, response: str, row: Mapping[str, Any], *, answer_in: str = "tag_or_last_line", tag: str = "answer"
) -> float:
    """Return the task's own score of the answer in `response`, mostly in [0, 1], above 0 for a nearly right one.

    Args:
        prompt: unused.
        response: text.
        row: row of a reasoning-gym dataset.
        answer_in: place of the answer: "tag", in the last ``<tag>...</tag>``, else there is none; "last_line", the last
            line that is not blank; "tag_or_last_line", the tag, or else the last line; "response", all of it.
        tag: name of the tag.

    Raises:
        KeyError: the row comes from another dataset.
        ValueError: `answer_in` names no such place.
    """
    if FIELD not in row:
        raise KeyError(f"the dataset's row has no {FIELD!r}: this reward needs dataset.path=reasoning_gym:<task>")
    dataset, entry = task_entry(row[FIELD])
    return float(dataset.score_answer(find_answer(response, answer_in, tag), entry))


def find_answer(response: str, answer_in: str, tag: str) -> str | None:
    """Find the answer in a response; None if there is none. White space is stripped. See `reasoning_gym`."""
    if answer_in not in ANSWER_PLACES:
        raise ValueError(f"answer_in={answer_in!r}: must be one of {', '.join(ANSWER_PLACES)}")
    if answer_in == "response":
        return response.strip()
    if answer_in != "last_line":
        tagged = re.findall(f"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", response, re.DOTALL)
        if tagged or answer_in == "tag":
            return tagged[-1].strip() if tagged else None
    lines = [line.strip() for line in response.splitlines() if line.strip()]
    return lines[-1] if lines else None
