"""Parsing of ``key=value`` in Hydra's override grammar, and of ``models.*.key=value`` for every role."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from realrl.config.problems import Problem, subject_of
from realrl.config.schema import REASONING_TASKS
from realrl.config.secrets import masked, masked_argument

_STAR = re.compile(r"^([+~]*models\.)\*(?=[.=]|$)")
_STAND_IN = "every_role"  # the grammar has no star in keys


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
        # these hold characters that the grammar wants to be quoted
        if raw.startswith(REASONING_TASKS) or not (raw.isascii() or raw.startswith(("'", '"', "[", "{"))):
            argument = f"{key}='" + raw.replace("'", "\\'") + "'"
        try:
            parsed: Override = parser.parse_override(_STAR.sub(rf"\g<1>{_STAND_IN}", argument))
        except (HydraException, ValueError, RecursionError):
            problems.append(Problem(shown, _why_malformed(key, shown.partition("=")[2])))
            continue
        path = parsed.key_or_group
        if _STAR.match(argument):
            path = path.replace(_STAND_IN, "*", 1)
        if not path:
            problems.append(Problem(shown, "the key is missing; write KEY=VALUE"))
        elif parsed.package is not None:
            problems.append(Problem(shown, "packages (@) cannot be chosen; write KEY=VALUE"))
        elif parsed.is_sweep_override():
            problems.append(
                Problem(shown, f"several values, but this is one run; a list is {key}=[a,b], a text {key}='\"a,b\"'")
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


def _why_malformed(key: str, raw: str) -> str:
    if key != key.strip():
        return f"no spaces around '='; write {key.strip()}={raw.strip()}"
    if raw.count("[") != raw.count("]") or raw.count("{") != raw.count("}"):
        return "a bracket is not closed"
    if raw.startswith("~"):
        return "the shell did not expand ~; write the whole path, or $HOME"
    return f"not a valid value; quote text with special characters: {key}='\"{raw}\"'"
