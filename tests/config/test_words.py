"""Settings of Python as words of the command line."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realrl.config.keys import known_keys
from realrl.config.overrides import parse_overrides
from realrl.config.words import words_of
from realrl.errors import UsageError
from realrl.experiment.discovery import load_experiment

KEYS = known_keys(load_experiment("grpo"))
TEXTS = st.text(st.characters(blacklist_categories=("Cs", "Cc")), max_size=20).filter(lambda text: "${" not in text)
SPECIAL = ("null", "true", "false", "nan", "inf")
PATHS = st.from_regex(r"(?a:[A-Za-z_./0-9][A-Za-z0-9_./@:-]{0,8})", fullmatch=True)
PLAIN = st.one_of(
    TEXTS, PATHS, st.booleans(), st.none(), st.integers(), st.floats(allow_nan=False, allow_infinity=False)
)
NESTED = st.one_of(
    PLAIN,
    st.lists(PLAIN, max_size=3),
    st.dictionaries(st.from_regex(r"(?a:[a-z][\w-]{0,5})", fullmatch=True).filter(lambda n: n not in SPECIAL), PLAIN),
)


@given(NESTED)
def test_what_a_word_says_is_what_it_was_made_of(value: object) -> None:
    words = words_of({"algorithm.x": value}, KEYS)
    [edit], problems = parse_overrides(words)
    assert not problems
    assert edit.path == "algorithm.x"
    assert edit.value == value
    assert type(edit.value) is type(value)


def test_nested_and_dotted_keys() -> None:
    settings = {
        "models": {"actor": {"path": Path("/a b")}, "*": {"optimizer.lr": 1e-3}},
        "lr": Fraction(1, 4),
        "generation": {"stop_ids": (1, 2)},
        "cluster": "two_workers",
    }
    assert words_of(settings, KEYS) == [
        "models.actor.path='/a b'",
        "models.*.optimizer.lr=0.001",
        "lr=0.25",
        "generation.stop_ids=[1,2]",
        "cluster=two_workers",
    ]


def test_a_mapping_that_is_a_value_stays_one() -> None:
    assert words_of({"algorithm": {"advantage": {"grpo": 0.5, "rloo": 1}}}, KEYS) == [
        "algorithm.advantage={grpo:0.5,rloo:1}"
    ]
    part = {"function": "m:f", "options": {"a": [1]}}
    assert words_of({"algorithm": {"rewards": {"short": part}}}, KEYS) == [
        "algorithm.rewards={short:{function:'m:f',options:{a:[1]}}}"
    ]


def test_words_stay_as_they_are() -> None:
    assert words_of(["steps=5", "~lr"], KEYS) == ["steps=5", "~lr"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"steps": object()}, "steps cannot be of type object"),
        ({"steps": {1, 2}}, "steps cannot be of type set"),
        ({"a=b": 1}, "'a=b' is no key of the configuration"),
        ({3: 1}, "3 is no key of the configuration"),
        ({"algorithm.advantage": {"my piece": 1}}, "algorithm.advantage: 'my piece' cannot be a name"),
        ("steps=5", "overrides are neither a mapping nor a list of words"),
        ([1], "overrides are neither a mapping nor a list of words"),
    ],
)
def test_what_has_no_words_is_refused(settings: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        words_of(settings, KEYS)  # type: ignore[arg-type]
