"""Values that files, pictures and messages show as ``***``: keys of services, passwords, tokens of access."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

HIDDEN = "***"
_MIN_LENGTH = 4  # shorter texts occur by chance in any message
_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")
_NAMED = re.compile(r"""(["']?([^\s=:,{}\[\]"']+)["']?\s*[=:]\s*)("[^"]*"?|'[^']*'?|[^,}]*)""")
_ANYWHERE = frozenset(
    {"password", "passwd", "passphrase", "secret", "secrets", "credential", "credentials", "apikey", "authorization"}
)
_BEFORE_KEY = frozenset({"api", "access", "private", "auth", "signing", "encryption", "service", "account"})
_BEFORE_TOKEN = frozenset({"api", "access", "auth", "bearer", "refresh", "hf", "hub", "session", "id", "service"})


def is_secret(name: str) -> bool:
    """Return True if a key of this name holds a secret: ``api_key``, ``token``, ``dbPassword``, ``secret_url``.

    Tokens of text are none: ``eos_token``, ``max_tokens``.
    """
    words = [word.lower() for word in _WORDS.findall(name)]
    if not _ANYWHERE.isdisjoint(words):
        return True
    *before, last = words or [""]
    if last == "token":
        return not before or before[-1] in _BEFORE_TOKEN
    return last == "key" and bool(before) and before[-1] in _BEFORE_KEY


def is_secret_path(path: str) -> bool:
    """Return True if a part of a dotted path names a secret, which everything below it belongs to."""
    return any(map(is_secret, path.split(".")))


def masked(value: Any) -> Any:
    """Return a copy of nested mappings and lists in which `HIDDEN` stands for each secret.

    An empty value stays, so that a reader sees that nothing was given.
    """
    if isinstance(value, Mapping):
        return {key: HIDDEN if is_secret(str(key)) and inner else masked(inner) for key, inner in value.items()}
    return [masked(inner) for inner in value] if isinstance(value, list | tuple) else value


def masked_argument(argument: str) -> str:
    """Return ``path=value``, of which nothing is parsed yet, with `HIDDEN` for what secrets are."""
    path, equals, value = argument.partition("=")
    if value and is_secret_path(path):
        return f"{path}={HIDDEN}"
    inner = _NAMED.sub(lambda found: found[1] + (HIDDEN if is_secret(found[2]) and found[3] else found[3]), value)
    return path + equals + inner


def without_secrets(message: str, value: Any) -> str:
    """Return the message with `HIDDEN` in the place of each text that `masked` hides in `value`."""
    hidden = {text for text in _secret_texts(value, inside=False) if len(text) >= _MIN_LENGTH}
    for text in sorted(hidden, key=len, reverse=True):
        message = message.replace(text, HIDDEN)
    return message


def _secret_texts(value: Any, *, inside: bool) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _secret_texts(inner, inside=inside or is_secret_path(str(key)))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _secret_texts(inner, inside=inside)
    elif inside:
        yield str(value)
