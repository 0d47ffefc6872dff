"""Lengths of prompts and responses: recorded, or drawn from a distribution.

Invariants:
    - a sample's lengths depend on the seed, the sample's id, the call and the response's number alone, so they are the
      same under every plan and in every order of questions;
    - a length is at least 1 and at most its limit.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist, median
from typing import Any, Literal

from realrl.errors import ConfigError, did_you_mean

Kind = Literal["fixed", "uniform", "normal", "lognormal", "recorded"]
_PARAMETERS: Mapping[Kind, tuple[str, ...]] = {
    "fixed": ("tokens",),
    "uniform": ("least", "most"),
    "normal": ("mean", "std"),
    "lognormal": ("median", "sigma"),
}
_EXAMPLE = "prompt=fixed:256 response=lognormal:400,0.6"
_MOST_SIGMA = 10.0  # of a logarithm
_STANDARD = NormalDist()


@dataclass(frozen=True)
class Distribution:
    """One distribution of lengths.

    Attributes:
        kind: "fixed" is one length; "uniform" every whole number from least to most; "normal" has a mean and a standard
            deviation; "lognormal" a median and the standard deviation of the logarithm; "recorded" draws from lengths.
        values: the parameters of the kind in this order, or the recorded lengths.
    """

    kind: Kind
    values: tuple[float, ...]

    @property
    def typical(self) -> float:
        """The median."""
        if self.kind == "uniform":
            return sum(self.values) / 2
        return median(self.values) if self.kind == "recorded" else self.values[0]

    def at(self, share: float) -> float:
        """Return the length below which a share of all lengths lies, 0 < share < 1."""
        first, *rest = self.values
        if self.kind == "fixed":
            return first
        if self.kind == "uniform":
            return math.floor(first + share * (rest[0] + 1 - first))
        if self.kind == "recorded":
            return self._ascending[int(share * len(self._ascending))]
        z = _STANDARD.inv_cdf(share)
        return first + rest[0] * z if self.kind == "normal" else first * math.exp(rest[0] * z)

    @cached_property
    def _ascending(self) -> list[float]:
        return sorted(self.values)


@dataclass(frozen=True)
class Lengths:
    """The lengths of a run's samples.

    Attributes:
        prompts, responses: their distributions; longer lengths are cut to the limits.
        max_prompt_tokens, max_new_tokens: the limits.
        seed: chooses other lengths of the same distributions.
    """

    prompts: Distribution
    responses: Distribution
    max_prompt_tokens: int
    max_new_tokens: int
    seed: int = 1

    def prompt(self, sample_id: str) -> int:
        """Return the tokens of a sample's prompt."""
        return _cut(self.prompts.at(_uniform(self.seed, "prompt", sample_id)), self.max_prompt_tokens)

    def response(self, sample_id: str, number: int = 0, *, call: str = "") -> int:
        """Return the tokens of response `number` that a generate call makes for a sample."""
        share = _uniform(self.seed, "response", call, sample_id, number)
        return _cut(self.responses.at(share), self.max_new_tokens)


def lengths_from(
    wanted: str | Mapping[str, object], *, max_prompt_tokens: int, max_new_tokens: int, source: str, seed: int = 1
) -> Lengths:
    """Read distributions from a text like ``prompt=fixed:256 response=lognormal:400,0.6``, or from a mapping.

    Args:
        wanted: the text; or ``{"prompt": ..., "response": ...}`` with texts like "fixed:256", or lists of lengths.
        max_prompt_tokens, max_new_tokens: limits of the run.
        source: the option or file, for messages.

    Raises:
        ConfigError: the text is no distribution, or its typical length exceeds the limit.
    """
    parts = _split(wanted, source) if isinstance(wanted, str) else dict(wanted)
    for key in parts:
        if key not in ("prompt", "response"):
            raise ConfigError(
                f"{source}: there are no lengths of {key!r}." + did_you_mean(str(key), ("prompt", "response")),
                remedy=f"Write it like {_EXAMPLE}.",
            )
    found = {}
    for key, limit, name in (
        ("prompt", max_prompt_tokens, "dataset.max_prompt_tokens"),
        ("response", max_new_tokens, "generation.max_new_tokens"),
    ):
        if key not in parts:
            raise ConfigError(f"{source}: the lengths of {key}s are missing", remedy=f"Write it like {_EXAMPLE}.")
        found[key] = _distribution(parts[key], f"{source}: {key}")
        if found[key].typical > limit:
            raise ConfigError(
                f"{source}: {key}s of typically {found[key].typical:g} tokens exceed {name}={limit}",
                remedy=f"Set {name}={math.ceil(found[key].typical)} or more, or give shorter lengths.",
            )
    return Lengths(found["prompt"], found["response"], max_prompt_tokens, max_new_tokens, seed)


def recorded_lengths(lines: Iterable[str], *, source: str) -> dict[str, list[int]]:
    """Return the lengths in a file of JSON lines, such as ``generations.jsonl``, as `lengths_from` takes them.

    A line has ``response_tokens``, and may have ``prompt_tokens``; an entry is missing where no line has it.

    Raises:
        ConfigError: a line is no JSON object, or a length is no positive whole number; or no line has a length.
    """
    found: dict[str, list[int]] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            raise ConfigError(
                f"{source}: line {number} is no JSON object", remedy="Give the generations.jsonl of a run."
            )
        for key in ("prompt", "response"):
            value = row.get(f"{key}_tokens")
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
                raise ConfigError(
                    f"{source}: line {number} has {key}_tokens={str(value)[:40]!r}",
                    remedy="A length is a whole number of tokens, 1 or more.",
                )
            found.setdefault(key, []).append(value)
    if not found:
        raise ConfigError(
            f"{source}: no line has response_tokens or prompt_tokens", remedy="Give the generations.jsonl of a run."
        )
    return found


def _split(text: str, source: str) -> dict[str, object]:
    parts: dict[str, object] = {}
    for word in text.split():
        key, equals, value = word.partition("=")
        if not equals or key in parts:
            raise ConfigError(
                f"{source}: {word[:60]!r} is no lengths of prompts or responses", remedy=f"Write it like {_EXAMPLE}."
            )
        parts[key] = value
    return parts


def _distribution(value: object, where: str) -> Distribution:
    if isinstance(value, Sequence) and not isinstance(value, str):
        lengths = tuple(float(n) for n in value if isinstance(n, int) and n >= 1)
        if not lengths or len(lengths) < len(value):
            raise ConfigError(f"{where}: recorded lengths are whole numbers of 1 or more", remedy="Correct the list.")
        return Distribution("recorded", lengths)
    name, _, rest = str(value).partition(":")
    kind = next((kind for kind in _PARAMETERS if kind == name), None)
    if kind is None:
        raise ConfigError(
            f"{where}={str(value)[:60]!r} is no distribution of lengths." + did_you_mean(name, _PARAMETERS),
            remedy="Use " + ", ".join(f"{known}:{','.join(args).upper()}" for known, args in _PARAMETERS.items()) + ".",
        )
    names = _PARAMETERS[kind]
    values = tuple(_positive(text) for text in rest.split(","))
    is_falling = kind == "uniform" and values[0] > values[-1]
    is_wide = kind == "lognormal" and values[-1] > _MOST_SIGMA
    if len(values) != len(names) or not all(values) or is_falling or is_wide:
        more = {"uniform": " in ascending order", "lognormal": f", and a sigma of {_MOST_SIGMA:g} at most"}
        raise ConfigError(
            f"{where}={str(value)[:60]!r}: {kind} takes {' and '.join(names)}, positive numbers{more.get(kind, '')}",
            remedy=f"Write it like {_EXAMPLE}.",
        )
    return Distribution(kind, values)


def _positive(text: str) -> float:
    """Return the number that a text is; 0 if it is none, or not positive and below 2**31."""
    try:
        number = float(text)
    except ValueError:
        return 0.0
    return number if 0 < number < 2**31 else 0.0


def _cut(length: float, limit: int) -> int:
    return max(1, min(round(length), limit))


def _uniform(*key: Any) -> float:
    """Return a number between 0 and 1, both excluded, that `key` alone decides."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(errors="surrogatepass"), digest_size=8).digest()
    return (int.from_bytes(digest, "big") + 0.5) / 2**64
