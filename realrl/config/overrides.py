"""Parsing of ``key=value`` in Hydra's override grammar, and of ``models.*.key=value`` for every role.

``lr=value`` is short for ``models.*.optimizer.lr=value``.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from realrl.config.problems import Problem, subject_of
from realrl.config.schema import REASONING_TASKS
from realrl.config.secrets import masked, masked_argument
from realrl.errors import UsageError

_STAR = re.compile(r"^([+~]*models\.)\*(?=[.=]|$)")
_STAND_IN = "every_role"  # the grammar has no star in keys
SHORT_KEYS = {"lr": "models.*.optimizer.lr"}


@dataclass(frozen=True)
class Edit:
    """One override.

    Attributes:
        path: dotted path.
        value: the parsed value; nested lists and dicts of plain values.
        raw: the value as typed.
        is_deletion: True for ``~path``, which goes back to the schema's default.
    """

    path: str
    value: object
    raw: str
    is_deletion: bool = False

    @property
    def subject(self) -> str:
        """The edit as the user typed it, cut to a reasonable length."""
        if self.is_deletion:
            return f"~{self.path}"
        return subject_of(self.path, self.raw if repr(masked(self.value)) == repr(self.value) else self.value)

    @property
    def text(self) -> str | None:
        """A single value as text, as typed unless it was quoted; None for lists, mappings and null."""
        if isinstance(self.value, str):
            return self.value
        return self.raw if isinstance(self.value, bool | int | float) else None


def parse_overrides(arguments: Sequence[str]) -> tuple[list[Edit], list[Problem]]:
    """Parse command-line overrides; those that cannot be parsed become problems.

    ``+key=value`` and ``++key=value`` mean ``key=value``: every declared key is there already.
    """
    if not arguments:
        return [], []  # before the parser is imported, which takes longer than the rest of `realrl list`
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import Override, OverrideType
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    edits: list[Edit] = []
    problems: list[Problem] = []
    for argument in arguments:
        key, equals, raw = argument.partition("=")
        shown = masked_argument(argument)
        if not equals and not argument.startswith("~"):
            problems.append(Problem(shown, f"not an override; write it as {argument}=VALUE"))
            continue
        try:
            parsed: Override = parser.parse_override(_for_parser(argument))
        except (HydraException, ValueError, RecursionError):
            problems.append(Problem(shown, _why_malformed(key, shown.partition("=")[2])))
            continue
        path = parsed.key_or_group
        if _STAR.match(argument):
            path = path.replace(_STAND_IN, "*", 1)
        path = SHORT_KEYS.get(path, path)
        if not path:
            problems.append(Problem(shown, "the key is missing; write KEY=VALUE"))
        elif parsed.package is not None:
            problems.append(Problem(shown, "packages (@) cannot be chosen; write KEY=VALUE"))
        elif parsed.is_sweep_override():
            problems.append(
                Problem(
                    shown,
                    f"several values, but this is one run; --sweep makes a run of each, a list is {key}=[a,b], "
                    f"a text {key}='\"a,b\"'",
                )
            )
        else:
            edits.append(
                Edit(
                    path=path,
                    value=parsed.value(),
                    raw=raw,
                    is_deletion=parsed.type is OverrideType.DEL,
                )
            )
    return edits, problems


def several_values(argument: str, most: int) -> list[str]:
    """Return the values that an override gives one after the other, as they would be typed; empty if it gives one.

    Args:
        most: no more values than this are made.

    Raises:
        UsageError: the values cannot be listed.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    key, _, raw = argument.partition("=")
    try:
        parsed = OverridesParser.create().parse_override(_for_parser(argument))
        if not parsed.is_sweep_override():
            return []
        if parsed.is_interval_sweep():
            raise HydraException("an interval has no values of its own")
        values = list(itertools.islice(parsed.sweep_string_iterator(), most))
    except (HydraException, ValueError, TypeError, RecursionError, ZeroDivisionError) as error:
        if "=" in argument and any(word in raw for word in ("choice(", "range(", "interval(", "glob(")):
            message = f"{masked_argument(argument)}: no values to sweep"
            raise UsageError(message, remedy=f"Write {key}=a,b,c, or {key}=range(1,4).") from error
        return []  # composition tells what is wrong with it
    typed = [value.strip() for value in raw.split(",")]
    is_plain = len(typed) == len(values) and not re.search(r"[()\[\]{}'\"]", raw)
    return typed if is_plain else values


def _for_parser(argument: str) -> str:
    """Return an override as the parser takes it: with quotes around what it wants to be quoted, and no star."""
    key, _, raw = argument.partition("=")
    if raw.startswith(REASONING_TASKS) or not (raw.isascii() or raw.startswith(("'", '"', "[", "{"))):
        argument = f"{key}='" + raw.replace("'", "\\'") + "'"
    return _STAR.sub(rf"\g<1>{_STAND_IN}", argument)


def _why_malformed(key: str, raw: str) -> str:
    if key != key.strip():
        return f"no spaces around '='; write {key.strip()}={raw.strip()}"
    if raw.count("[") != raw.count("]") or raw.count("{") != raw.count("}"):
        return "a bracket is not closed"
    if raw.startswith("~"):
        return "the shell did not expand ~; write the whole path, or $HOME"
    return f"not a valid value; quote text with special characters: {key}='\"{raw}\"'"
