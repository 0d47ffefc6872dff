"""Settings as Python has them, nested or with dotted keys, as words of the command line.

    {"models": {"actor": {"path": "x y"}}, "lr": 1e-4, "save.every_steps": 5}
    models.actor.path='x y'   lr=0.0001   save.every_steps=5

Invariant: `realrl.config.overrides.parse_overrides` reads from a word the value that it was made of.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral, Real
from os import PathLike, fspath

from realrl.config.keys import Key, key_of, sections
from realrl.errors import UsageError

_NAME = re.compile(r"(?!(?i:null|true|false|nan|inf)$)[A-Za-z_][\w-]*", re.ASCII)
_BARE = re.compile(r"(?!(?i:null|true|false|nan|inf)$)[A-Za-z_./][\w./@:-]*[\w/]", re.ASCII)  # texts without quotes
_ROLE = re.compile(r"models(\.[^.]+)?")  # sections also under names that an experiment lacks, and for every role
_BEFORE_QUOTE = re.compile(r"(\\*)('|$)")


def words_of(settings: Mapping[str, object] | Sequence[str], keys: Mapping[str, Key]) -> list[str]:
    """Return settings as ``key=value``; a list of such words is returned as it is.

    Args:
        keys: the experiment's, by which a mapping that is a value is told from nested keys.

    Raises:
        UsageError: a key or a value has no form on the command line; names it.
    """
    if isinstance(settings, Mapping):
        known = sections(keys)
        return [f"{path}={_shown(value, path)}" for path, value in _leaves("", settings, known, keys)]
    if isinstance(settings, str) or not all(isinstance(word, str) for word in settings):
        raise UsageError(
            "overrides are neither a mapping nor a list of words",
            remedy="Write {'steps': 5}, or ['steps=5'].",
        )
    return list(settings)


def _leaves(
    path: str, settings: Mapping[str, object], known: set[str], keys: Mapping[str, Key]
) -> Iterator[tuple[str, object]]:
    """Yield dotted paths with their values."""
    for name, value in settings.items():
        if not isinstance(name, str) or not name or "=" in name or name != name.strip():
            raise UsageError(f"{name!r} is no key of the configuration", remedy="See: realrl config NAME")
        inner = f"{path}.{name}" if path else name
        is_section = inner in known or bool(_ROLE.fullmatch(inner)) or _is_entry(inner, keys)
        if isinstance(value, Mapping) and value and is_section:
            yield from _leaves(inner, value, known, keys)
        else:
            yield inner, value


def _is_entry(path: str, keys: Mapping[str, Key]) -> bool:
    """Return True if a path is a named section of a mapping, as ``algorithm.rewards.NAME`` is."""
    key = key_of(path, keys)
    return key is not None and bool(key.fields) and key.path != path


def _shown(value: object, path: str) -> str:
    """Return a value as people would type it."""
    return value if isinstance(value, str) and _BARE.fullmatch(value) else _value(value, path)


def _value(value: object, path: str) -> str:
    """Return a value in Hydra's grammar."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Integral):
        return str(int(value))
    if isinstance(value, Real):
        return repr(float(value))
    if isinstance(value, str | PathLike):
        return _quoted(str(fspath(value)))
    if isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise UsageError(f"{path}: {name!r} cannot be a name", remedy="Use letters, digits, '_' and '-'.")
        return "{" + ",".join(f"{name}:{_value(inner, path)}" for name, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(_value(inner, path) for inner in value) + "]"
    raise UsageError(
        f"{path} cannot be of type {type(value).__name__}",
        remedy="Values are texts, numbers, True, False, None, lists and mappings of these.",
    )


def _quoted(text: str) -> str:
    """Return a text in quotes, with the escapes that the grammar has: backslashes count before quotes alone."""
    return "'" + _BEFORE_QUOTE.sub(lambda found: found[1] * 2 + ("\\'" if found[2] else ""), text) + "'"
