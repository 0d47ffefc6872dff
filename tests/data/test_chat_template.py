"""Limits of chat templates."""

from __future__ import annotations

import resource
import signal

import pytest

from realrl.data.chat_template import render
from realrl.data.tiny import tiny_tokenizer
from realrl.errors import DataError

MESSAGES = [{"role": "user", "content": "hello"}]
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
GROWS = "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (LOOPS, "it takes more than 2 s"),
        (GROWS, "fails: (MemoryError|it takes more than 2 s)"),
        ("{{ 9 ** 9 ** 9 }}", "it computes powers"),
        ("x" * 200_001, "it has 200,001 characters"),
        ("{{ messages[0].nothing.here }}", "no attribute"),
    ],
)
def test_a_template_that_is_no_template(template: str, message: str) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(DataError, match=message):
        render(tokenizer, MESSAGES)


def test_the_limits_end_with_the_rendering() -> None:
    before = resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGALRM)
    assert render(tiny_tokenizer(), MESSAGES, asks=False) == "<|user|>hello<|end|>"
    assert (resource.getrlimit(resource.RLIMIT_AS), signal.getsignal(signal.SIGALRM)) == before
