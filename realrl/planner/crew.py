"""Processes that share the work of planning.

    questions ──► helpers ──────┐
        └───────► this process ─┴──► answers, in the order of questions

An answer is a pure function of the request and the question. So it depends neither on the number of processes nor on
which of them gives it; a helper that dies is not missed. (`concurrent.futures` has no way to end a process that is
busy, and in Python 3.11 fails where one dies while questions are given up.)
"""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

from realrl.config.serialize import dump_config
from realrl.errors import Error
from realrl.experiment.discovery import load_run
from realrl.planner.request import Request
from realrl.planner.study import Study

_STOP_S = 2.0  # in which a helper without work ends by itself
_AHEAD = 2  # questions that a helper has at a time, so that it need not wait for this process
_MANY = 4  # questions waiting for each helper, with which it gets one ahead


class _Process(Protocol):
    def start(self) -> None: ...
    def join(self, timeout: float | None = None) -> None: ...
    def kill(self) -> None: ...


@dataclass(eq=False)
class Asked:
    """A question, which names a method of `Study` and its argument, and the answer once `is_answered`.

    Attributes:
        is_for_all: every helper is asked, and nobody waits for an answer.
    """

    kind: str
    about: Any
    answer: Any = None
    is_answered: bool = False
    is_for_all: bool = False


@dataclass(eq=False)
class _Helper:
    process: _Process
    connection: Connection
    under_way: deque[Asked] = field(default_factory=deque)

    @property
    def n_asked(self) -> int:
        """Questions under way of which somebody awaits the answer."""
        return sum(not asked.is_for_all for asked in self.under_way)


class Crew:
    """This process, and helpers.

    Args:
        n_processes: this one included. A process that may have no children has no helpers.
    """

    def __init__(self, study: Study, n_processes: int = 1) -> None:
        self._study = study
        self._helpers: list[_Helper] = []
        self._waiting: deque[Asked] = deque()
        if n_processes > 1 and not multiprocessing.current_process().daemon:
            self._start(n_processes - 1)

    def _start(self, n_helpers: int) -> None:
        request, context = self._study.request, multiprocessing.get_context("spawn")
        told = request.hardware, request.lengths, request.given, request.kernels, request.memory_bytes
        arguments = dump_config(request.config), told, self._study.seed
        with _deaf():
            for _ in range(n_helpers):
                ours, theirs = context.Pipe()
                process = context.Process(target=_help, args=(theirs, *arguments), daemon=True)
                process.start()
                theirs.close()
                self._helpers.append(_Helper(process, ours))

    @property
    def has_helpers(self) -> bool:
        return bool(self._helpers)

    def close(self) -> None:
        """End all helpers."""
        for helper in self._helpers:
            helper.connection.close()
            if not helper.under_way:
                helper.process.join(_STOP_S)  # it finds nothing more to do
            helper.process.kill()
            helper.process.join()
        self._helpers = []

    def tell(self, kind: str, about: Any) -> None:
        """Ask all helpers the same, and wait for none."""
        for helper in list(self._helpers):
            self._hand(helper, Asked(kind, about, is_for_all=True))

    def ask(self, kind: str, about: Any) -> Asked:
        """Ask a question that a helper may begin with now."""
        asked = Asked(kind, about)
        self._waiting.append(asked)
        self.go_on()
        return asked

    def go_on(self) -> None:
        """Take in answers that have come, and hand out what waits for a helper."""
        self._take_in(0.0)
        for helper in list(self._helpers):
            while self._waiting and helper.n_asked < self._n_ahead and helper in self._helpers:
                self._hand(helper, self._waiting.popleft())

    @property
    def _n_ahead(self) -> int:
        """Questions that a helper may have: the last ones go to who has time first."""
        return _AHEAD if len(self._waiting) > _MANY * len(self._helpers) else 1

    def answers(self, questions: Sequence[Asked]) -> Iterator[Any]:
        """Yield the answers to questions in their order; others that wait are given up.

        Helpers begin with what was asked first, and this process with what it needs next.
        """
        handed_out = {asked for helper in self._helpers for asked in helper.under_way}
        wanted = [one for one in questions if not one.is_answered and one not in handed_out]
        self._waiting = deque(dict.fromkeys([*filter(wanted.__contains__, self._waiting), *wanted]))
        for asked in questions:
            while not asked.is_answered:
                self.go_on()
                if asked.is_answered:
                    break
                if self._waiting:
                    own = asked if asked in self._waiting else self._waiting[0]
                    self._waiting.remove(own)
                    own.answer, own.is_answered = getattr(self._study, own.kind)(own.about), True
                else:
                    self._take_in(None)
            yield asked.answer

    def _hand(self, helper: _Helper, asked: Asked) -> None:
        helper.under_way.append(asked)
        try:
            helper.connection.send((asked.kind, asked.about))
        except OSError:
            self._miss(helper)

    def _take_in(self, timeout_s: float | None) -> None:
        """Note answers that have come; None waits for one."""
        busy = {helper.connection: helper for helper in self._helpers if helper.under_way}
        for connection in wait(list(busy), timeout_s) if busy else ():
            helper = next(helper for helper in busy.values() if helper.connection is connection)
            try:
                answer = helper.connection.recv()
            except (EOFError, OSError):
                self._miss(helper)
                continue
            asked = helper.under_way.popleft()
            asked.answer, asked.is_answered = answer, True

    def _miss(self, helper: _Helper) -> None:
        """Do without a helper that has died."""
        self._helpers.remove(helper)
        self._waiting.extendleft(asked for asked in helper.under_way if not asked.is_for_all)
        helper.connection.close()
        helper.process.kill()
        helper.process.join()


def _help(connection: Connection, config: bytes, told: tuple[Any, ...], seed: int) -> None:
    """Answer questions until the other end of the connection is closed."""
    try:
        study = Study(Request(*load_run(config), *told), seed)
    except Error:  # an experiment that only the process that asks can load
        return
    with suppress(EOFError, OSError):
        while True:
            kind, about = connection.recv()
            connection.send(getattr(study, kind)(about))


@contextmanager
def _deaf() -> Iterator[None]:
    """Keep Ctrl-C for later, and from processes that are started for good.

    A mask is of one thread: another one may take the signal, and Python tells the main thread all the same.
    """
    heard: list[int] = []
    is_told = threading.current_thread() is threading.main_thread()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    handler = signal.signal(signal.SIGINT, lambda number, _: heard.append(number)) if is_told else None
    try:
        yield
    finally:
        if handler is not None:
            signal.signal(signal.SIGINT, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if heard:
            signal.raise_signal(signal.SIGINT)
