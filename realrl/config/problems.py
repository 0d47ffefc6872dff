"""Problems of a configuration, collected so that a user sees all of them at once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from realrl.config.secrets import HIDDEN, is_secret_path, masked
from realrl.errors import ConfigError

MAX_SHOWN = 10
MAX_VALUE_CHARS = 60


@dataclass(frozen=True)
class Problem:
    """One line: ``subject: text (origin)``.

    Attributes:
        subject: the key and its value, as the user would type them.
        text: the problem, and the allowed values.
        origin: source of the value, unless it was typed on the command line.
    """

    subject: str
    text: str
    origin: str = ""

    def __str__(self) -> str:
        return f"{self.subject}: {self.text}" + (f" (from {self.origin})" if self.origin else "")


def raise_problems(problems: Sequence[Problem], reference: str) -> None:
    """Raise one `ConfigError` that lists the problems, if there are any."""
    if not problems:
        return
    remedy = f"All keys, their defaults and what they accept: realrl config {reference}"
    lines = list(dict.fromkeys(str(problem) for problem in problems))
    if len(lines) == 1:
        raise ConfigError(lines[0], remedy=remedy)
    shown = lines[:MAX_SHOWN]
    if len(lines) > MAX_SHOWN:
        shown.append(f"... and {len(lines) - MAX_SHOWN} more")
    raise ConfigError(
        f"{len(lines)} things are wrong with the configuration:\n" + "\n".join(f"  {line}" for line in shown),
        remedy=remedy,
    )


def subject_of(path: str, value: object) -> str:
    """Return ``path=value`` without secrets, as a user would type it."""
    has_secret = is_secret_path(path) and value not in (None, "")
    return f"{path}={HIDDEN if has_secret else show(masked(value))}"


def show(value: object) -> str:
    """Return a value as it would be typed, cut to a reasonable length."""
    try:
        text = value if isinstance(value, str) else json.dumps(value, default=str)
    except (ValueError, RecursionError):
        text = f"<{type(value).__name__}>"
    return text if len(text) <= MAX_VALUE_CHARS else text[: MAX_VALUE_CHARS - 3] + "..."
