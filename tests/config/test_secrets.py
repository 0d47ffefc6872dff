"""Keys that hold secrets, whose values are shown nowhere."""

from __future__ import annotations

import json

import pytest

from realrl.config.secrets import HIDDEN, is_secret, masked, masked_argument, without_secrets


@pytest.mark.parametrize(
    "name",
    ["api_key", "apiKey", "API_KEY", "OPENAI_API_KEY", "token", "hf_token", "accessToken", "password", "db-passwd"]
    + ["secret_url", "client_secret", "credentials", "Authorization", "service.key", "private_key"],
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    ["eos_token", "pad_token", "max_tokens", "key", "keys", "monkey", "tokenizer", "n_mbs", "output_key", "", "1"],
)
def test_names_of_other_things(name: str) -> None:
    assert not is_secret(name)


def test_secrets_are_masked_at_any_depth_and_nothing_else_changes() -> None:
    value = {"judge": [{"api_key": "sk-1", "url": "http://x", "token": ""}], "password": ["a", "b"], "n": 3, "s": "***"}
    before = json.dumps(value)
    assert masked(value) == {
        "judge": [{"api_key": HIDDEN, "url": "http://x", "token": ""}],
        "password": HIDDEN,
        "n": 3,
        "s": "***",
    }
    assert json.dumps(value) == before


def test_messages_lose_every_secret_but_no_common_word() -> None:
    options = {"api_key": "sk-12345", "credentials": {"user": "anna", "pin": 1234, "short": "a"}, "model": "judge"}
    said = without_secrets("anna has sk-12345-6, pin 1234, asks the judge for a", options)
    assert said == "*** has ***-6, pin ***, asks the judge for a"


def test_a_secret_within_another_leaves_no_rest() -> None:
    assert without_secrets("key abcdef", {"api_key": "abcd", "token": "abcdef"}) == "key ***"


@pytest.mark.parametrize(
    ("argument", "shown"),
    [
        ("a.api_key=sk-1,sk-2", "a.api_key=***"),
        ("a.secrets.b=[sk-1", "a.secrets.b=***"),
        ("a={url: x, api_key: sk-1, n: 2", "a={url: x, api_key: ***, n: 2"),
        ("a={'token': 'sk-1, sk-2'", "a={'token': ***"),
        ('a=["b", {password:"sk-1', 'a=["b", {password:***'),
        ("a=token", "a=token"),
        ("a.eos_token=x", "a.eos_token=x"),
        ("a.api_key=", "a.api_key="),
        ("a", "a"),
    ],
)
def test_arguments_that_cannot_be_parsed_show_no_secret(argument: str, shown: str) -> None:
    assert masked_argument(argument) == shown
