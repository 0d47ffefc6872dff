"""Lists of hosts and of counts in SLURM's short notation, written out.

Invariants:

- Hosts keep their order, and numbers their zeros: ``n[08-10]`` is n08, n09, n10.
- A list that is no such notation, or has more than `MOST_HOSTS` hosts, is a `ValueError` that names it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product

MOST_HOSTS = 65_536
_PARTS = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def expand_hosts(text: str) -> tuple[str, ...]:
    """Return the hosts of ``n[01-03,7],m1``. Raises `ValueError`."""
    found: list[str] = []
    for term in _terms(text):
        choices = [_numbers(inside, text) if outside == "" else [outside] for inside, outside in _PARTS.findall(term)]
        size = 1
        for choice in choices:
            size *= len(choice)
        if not choices or len(found) + size > MOST_HOSTS:
            raise ValueError(f"{text[:200]!r} is no list of hosts")
        found += map("".join, product(*choices))
    return tuple(found)


def expand_counts(text: str) -> tuple[int, ...]:
    """Return the counts of ``16(x2),8``, one for each host: 16, 16, 8. Raises `ValueError`."""
    found: list[int] = []
    for term in text.split(","):
        match = _COUNT.fullmatch(term)
        n_hosts = int(match[2] or 1) if match else MOST_HOSTS + 1
        if match is None or len(found) + n_hosts > MOST_HOSTS:
            raise ValueError(f"{text[:200]!r} is no list of counts")
        found += [int(match[1])] * n_hosts
    return tuple(found)


def _terms(text: str) -> Iterator[str]:
    """Split at commas outside brackets; checks the brackets."""
    begin, is_inside = 0, False
    for place, letter in enumerate(text + ","):
        if letter == "," and not is_inside:
            yield text[begin:place]
            begin = place + 1
        elif letter in "[]":
            if is_inside == (letter == "["):
                raise ValueError(f"{text[:200]!r} is no list of hosts")
            is_inside = letter == "["
    if is_inside:
        raise ValueError(f"{text[:200]!r} is no list of hosts")


def _numbers(inside: str, text: str) -> list[str]:
    found: list[str] = []
    for part in inside.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise ValueError(f"{text[:200]!r} is no list of hosts")
        first, last = match[1], match[2] or match[1]
        if not 0 <= int(last) - int(first) < MOST_HOSTS:
            raise ValueError(f"{text[:200]!r} is no list of hosts")
        found += [f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]
    return found
