"""Reward functions that behave and misbehave; run in other processes by the tests."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
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
    return 0.0
