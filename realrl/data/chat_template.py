"""Chat templates: programs that come with a model, rendered within limits of time and memory."""

from __future__ import annotations

import resource
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any

from realrl.errors import DataError

MAX_SECONDS = 2.0
_MAX_CHARS, _MAX_BYTES = 200_000, 1 << 30


def render(tokenizer: Any, messages: Sequence[Mapping[str, str]], *, asks: bool = True) -> str:
    """Render a conversation with the tokenizer's chat template.

    Args:
        asks: end with the beginning of an answer.

    Raises:
        DataError: the template is too large, fails, or needs more than `MAX_SECONDS` or a gigabyte.
    """
    try:
        _check(tokenizer.chat_template)
        with _limited():
            text: str = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=asks)
    except Exception as error:  # a template is a program: it raises whatever it likes
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"the tokenizer's chat template fails: {reason[:300]}") from error
    return text


@lru_cache(maxsize=16)
def _check(template: str) -> None:
    """Refuse powers: a single one can keep a processor busy for hours, and no timer interrupts it."""
    from jinja2 import Environment

    if len(template) > _MAX_CHARS:
        raise ValueError(f"it has {len(template):,} characters, more than {_MAX_CHARS:,}")
    if any((kind, text) == ("operator", "**") for _, kind, text in Environment().lex(template)):
        raise ValueError("it computes powers")


@contextmanager
def _limited() -> Iterator[None]:
    """Raise TimeoutError or MemoryError in the main thread at a limit; other threads have none."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"it takes more than {MAX_SECONDS:g} s")

    start_s, before, memory = (
        time.monotonic(),
        signal.signal(signal.SIGALRM, stop),
        resource.getrlimit(resource.RLIMIT_AS),
    )
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    left_s, _ = signal.setitimer(signal.ITIMER_REAL, MAX_SECONDS)
    if memory[0] == resource.RLIM_INFINITY or memory[0] > in_use + _MAX_BYTES:
        resource.setrlimit(resource.RLIMIT_AS, (in_use + _MAX_BYTES, memory[1]))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, memory)
        signal.signal(signal.SIGALRM, before)
        if left_s:  # of a timer of the caller's
            signal.setitimer(signal.ITIMER_REAL, max(left_s - (time.monotonic() - start_s), 0.001))
