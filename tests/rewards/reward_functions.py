"""Reward functions that behave and misbehave; run in other processes by the tests."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any


def text_length(prompt: str, response: str) -> float:
    print("a reward function may print")
    return len(prompt) + len(response) / 10


def sum_ids(prompt_ids: Sequence[int], response_ids: Sequence[int]) -> int:
    return sum(prompt_ids) * 100 + sum(response_ids)


def of_process(prompt_ids: Sequence[int], response_ids: Sequence[int]) -> float:
    time.sleep(0.05)
    return os.getpid()


def misbehave(prompt_ids: Sequence[int], response_ids: Sequence[int]) -> Any:
    """By the first token of the response."""
    match response_ids[0]:
        case 0:
            return 0.5
        case 1:
            raise ValueError("no answer found")
        case 2:
            return None
        case 3:
            return float("nan")
        case 4:
            time.sleep(60)
        case 5:  # holds the interpreter's lock
            return len(re.findall(r"(a+)+$", "a" * 60 + "b"))
        case 6:
            raise SystemExit(3)
        case 7:
            os.kill(os.getpid(), signal.SIGSEGV)
        case 8:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            subprocess.run(["sleep", "61"], check=True)
        case 9:
            return "0.5"
        case 10:
            return [0.5]
        case 11:
            return 10**400
        case 12:
            return -1e300
        case 13:
            raise Unprintable
    return 0.0


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


async def misbehave_async(prompt_ids: Sequence[int], response_ids: Sequence[int]) -> Any:
    """By the first token of the response."""
    match response_ids[0]:
        case 0:
            await asyncio.sleep(0.1)
            return 0.5
        case 1:
            raise ValueError("no answer found")
        case 2:
            return None
        case 3:
            await asyncio.sleep(60)
        case 4:
            time.sleep(60)
        case 5:
            os.kill(os.getpid(), signal.SIGSEGV)
        case 6:
            while True:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(60)
    return 0.0


async def wait(prompt_ids: Sequence[int], response_ids: Sequence[int]) -> float:
    await asyncio.sleep(0.2)
    return response_ids[0]


async def long_complaint(prompt_ids: Sequence[int], response_ids: Sequence[int]) -> float:
    raise ValueError("x" * 100_000)


def scaled_length(prompt: str, response: str, row: Mapping[str, Any]) -> float:
    return row["scale"] * (len(response) + 1 if row["note"] == "é" else len(response))


def rank(prompt_ids: Sequence[int], responses_ids: Sequence[Sequence[int]]) -> list[int]:
    """1 for the longest response of a prompt that has several."""
    longest = max(map(len, responses_ids))
    return [int(len(responses_ids) > 1 and len(ids) == longest) for ids in responses_ids]


def too_few(prompt: str, responses: Sequence[str]) -> list[float]:
    return [0.5]


def no_list(prompt: str, responses: Sequence[str]) -> float:
    return 0.5


def a_string_among_them(prompt: str, responses: Sequence[str]) -> list[Any]:
    return ["good"] * len(responses)


def only_one(response: str) -> float:
    return 0.0


def four(prompt: str, response: str, row: Mapping[str, Any], tokenizer: Any) -> float:
    return 0.0


def scaled_ids(prompt_ids: Sequence[int], response_ids: Sequence[int], *, scale: float = 1.0) -> float:
    return scale * len(response_ids)


def told(prompt: str, response: str, row: Mapping[str, Any], messages: Sequence[Mapping[str, str]]) -> float:
    """1 if what is told is consistent, by the row's expectations."""
    assert [message["role"] for message in messages] == row["roles"], messages
    assert messages[-1]["content"] == row["last"], messages
    return 1.0


def of_conversations(
    prompt: str, responses: Sequence[str], *, messages: Sequence[Sequence[Mapping[str, str]]]
) -> list[float]:
    return [float(talk[-1]["content"] == response) for talk, response in zip(messages, responses, strict=True)]


def with_option(prompt: str, response: str, row: float = 0.0) -> float:
    """`row` is an option here."""
    return float(row)
