"""Strategies that spoil valid documents: values of other types and sizes, missing and strange keys, damaged bytes."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

# Text that JSON's writer cannot make stands in a document as one of these words, and is put in when it is written.
RAW = {
    "@digits@": "9" * 5000,
    "@float@": "1e999999",
    "@deep@": "[" * 100_000 + "]" * 100_000,
    "@objects@": '{"a":' * 3000 + "1" + "}" * 3000,
    "@nan@": "NaN",
    "@surrogate@": '"\\ud800"',
}

NASTY_TEXTS = [
    "",
    " ",
    "\0",
    "a\0b",
    "\n\n",
    "x" * 300,
    "y" * 5000,
    "../x",
    "/dev/zero",
    "/",
    "~/x",
    "модель/😀",
    "\x1b[31m",
    "%s",
    "{}",
    "${seed}",
    "${",
    "${oc.env:HOME}",
    "${a.b.c}",
    "nan",
    "-0",
    "1e5",
    "0x10",
    "true",
    "null",
    "None",
    "@digits@",
    "'",
    '"',
    "a b",
    "a=b",
    "[",
    "{a:1}",
    "*",
    "..",
    "a" * 40 + "." * 40,
    "\u202e",
    "__class__",
    "\ufeff",
    "s\udcff",
]
NASTY_NUMBERS = [0, -1, 1, 2, 7, 4095, 2**31, 2**53 + 1, 2**63, -(2**63) - 1, 10**18, 10**40, 0.5, -0.0, 1e-320, 1e308]

numbers = st.sampled_from(NASTY_NUMBERS) | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
texts = st.sampled_from(NASTY_TEXTS) | st.text(max_size=20)
scalars = st.none() | st.booleans() | numbers | texts | st.sampled_from(sorted(RAW))
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4), max_leaves=8
)


def to_json(document: Any) -> bytes:
    """Write JSON, with `RAW` in the place of its words."""
    text = json.dumps(document)
    for word, raw in RAW.items():
        text = text.replace(f'"{word}"', raw)
    return text.encode("utf-8", "surrogatepass")


def _places(document: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in a document, itself included."""
    yield above
    items = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, value in items:
        yield from _places(value, (*above, key))


@st.composite
def spoilt(draw: st.DrawFn, document: Any, most: int = 3) -> Any:
    """A document with up to `most` values replaced, removed, renamed or added."""
    document = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, most))):
        path = draw(st.sampled_from(list(_places(document))))
        if not path:
            if draw(st.integers(0, 9)) == 0:
                return draw(values)
            continue
        parent = document
        for key in path[:-1]:
            parent = parent[key]
        action = draw(st.sampled_from(["replace", "replace", "replace", "remove", "add", "wrap"]))
        if action == "replace":
            parent[path[-1]] = draw(values)
        elif action == "wrap":
            parent[path[-1]] = draw(
                st.sampled_from([[parent[path[-1]]], {"a": parent[path[-1]]}, str(parent[path[-1]])])
            )
        elif action == "remove":
            del parent[path[-1]]
        elif isinstance(parent, dict):
            parent[draw(texts)] = draw(values)
        else:
            parent.insert(0, draw(values))
    return document


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """Bytes that were cut, overwritten, repeated or filled up."""
    content = bytearray(content)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(0, len(content) - 1)) | st.integers(0, 40))
        action = draw(st.sampled_from(["overwrite", "overwrite", "cut", "insert", "repeat", "end"]))
        if action == "overwrite":
            new = draw(
                st.binary(min_size=1, max_size=8) | st.sampled_from([b"\xff" * 8, b"\0" * 8, b"\x7f" + b"\xff" * 7])
            )
            content[at : at + len(new)] = new
        elif action == "cut":
            del content[at : at + draw(st.integers(1, 4000))]
        elif action == "insert":
            content[at:at] = draw(st.binary(max_size=20) | st.sampled_from([b"[" * 100_000, b"\0", b"\xed\xa0\x80"]))
        elif action == "repeat":
            content[at:at] = content[at : at + draw(st.integers(1, 200))] * draw(st.integers(1, 30))
        else:
            del content[at:]
    return bytes(content)
