"""The owner's side of `realrl.rewards.server`, and its twin that runs functions in the calling thread."""

from __future__ import annotations

import json
import logging
import os
import select
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NoReturn

from realrl.errors import RunError
from realrl.rewards.call import SLICE_S, RewardFunction, Traits
from realrl.rewards.server import hard_limit_s, is_stopped, read_lines, time_limit_s

log = logging.getLogger(__name__)

Text = list[int] | str

TOO_LATE = "too late"
START_TIMEOUT_S = 120.0
GRACE_S = 30.0
OUTSTANDING_PER_WORKER = 2
MAX_RESTARTS = 3


@dataclass(frozen=True)
class FunctionSpec:
    """A function to run: its name, the form that it reads ("auto", "ids", "text"), seconds per response, options."""

    function: str
    reads: str
    timeout_s: float
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Request:
    """A response to score with function number `part`; for a group function, the list of a prompt's responses.

    `messages` is the conversation with the response, or a list of one for each response.
    """

    part: int
    prompt: Text
    response: Text | Sequence[Text]
    row: Mapping[str, Any] | None = None
    messages: Sequence[Any] | None = None


@dataclass(frozen=True)
class Outcome:
    """The rewards of request number `index`, one for each of its responses, or the failure as text.

    `fault` is `TOO_LATE`, `NO_NUMBER` or `NO_NUMBERS`, or empty for other failures. `work` is the number of the process
    that ran the function, and when (seconds since the epoch) it began and ended.
    """

    index: int
    rewards: Sequence[float] = ()
    failure: str | None = None
    fault: str = ""
    work: tuple[int, float, float] | None = None


class InProcessPool:
    """Runs functions in the calling thread, where a debugger can stop. It cannot interrupt a slow one, and logs that.

    Async functions wait together, `async_concurrency` at a time, and are cancelled when their time is over.
    """

    def __init__(self, specs: Sequence[FunctionSpec], async_concurrency: int) -> None:
        self._specs = specs
        self._async_concurrency = async_concurrency
        self._functions: list[RewardFunction] = []

    def traits(self) -> Sequence[Traits]:
        """Load the functions, and return the traits of each.

        Raises:
            ConfigError: there is no such function.
            RunError: the object is no function of a prompt and a response.
        """
        if not self._functions:
            self._functions = [_load(spec) for spec in self._specs]
        return [function.traits for function in self._functions]

    def score(self, requests: Sequence[Request]) -> Iterator[Outcome]:
        """Yield one outcome per request as each gets ready."""
        traits = self.traits()
        waiting = [index for index, request in enumerate(requests) if traits[request.part].is_async]
        for index, request in enumerate(requests):
            if not traits[request.part].is_async:
                yield self._outcome(index, request, self._evaluate(index, request))
        for index, result in self._gather(requests, waiting):
            yield self._outcome(index, requests[index], result)

    def close(self) -> None:
        """End nothing: there are no processes."""

    def _evaluate(self, index: int, request: Request) -> Mapping[str, Any]:
        limit_s = self._limit_s(request)
        timer = threading.Timer(limit_s, _complain, (self._specs[request.part].function, index, limit_s))
        timer.daemon = True
        timer.start()
        try:
            return self._functions[request.part].evaluate(_message(index, request))
        finally:
            timer.cancel()

    def _gather(self, requests: Sequence[Request], indices: Sequence[int]) -> list[tuple[int, Mapping[str, Any]]]:
        import asyncio

        async def run() -> list[Mapping[str, Any]]:
            free = asyncio.Semaphore(self._async_concurrency)

            async def one(index: int) -> Mapping[str, Any]:
                request = requests[index]
                async with free:
                    function = self._functions[request.part]
                    return await function.evaluate_async(_message(index, request), self._limit_s(request))

            return await asyncio.gather(*map(one, indices))

        return list(zip(indices, asyncio.run(run()), strict=True)) if indices else []

    def _limit_s(self, request: Request) -> float:
        return _limit_s(self._specs, self.traits(), request)

    def _outcome(self, index: int, request: Request, result: Mapping[str, Any]) -> Outcome:
        return _outcome(index, result, self._limit_s(request))


class ProcessPool:
    """Runs functions in `concurrency` processes beside this one. Processes that end or hang are replaced."""

    def __init__(self, specs: Sequence[FunctionSpec], concurrency: int, async_concurrency: int) -> None:
        self._specs = specs
        self._concurrency = concurrency
        self._async_concurrency = async_concurrency
        self._connection: _Connection | None = None
        self._traits: Sequence[Traits] = ()

    def traits(self) -> Sequence[Traits]:
        """Load the functions, and return the traits of each.

        Raises:
            RunError: a function cannot be imported, or does not take a prompt and a response.
        """
        n_lost = 0
        while True:
            try:
                self._traits = self._traits or self._connect().traits
                return self._traits
            except _Lost as lost:
                n_lost += 1
                self._replace(lost, n_lost)

    def score(self, requests: Sequence[Request]) -> Iterator[Outcome]:
        """Yield one outcome per request as each gets ready; a lost server's open requests go to a new one.

        Raises:
            RunError: the server was lost more than `MAX_RESTARTS` times.
        """
        traits = self.traits()
        limits_s = [_limit_s(self._specs, traits, request) for request in requests]
        slots = [self._async_concurrency if t.is_async else OUTSTANDING_PER_WORKER for t in traits]
        window = self._concurrency * max(slots, default=1)
        # A reply may wait for a queue of requests that all take their full time, and async ones may be tried twice.
        hard_s = [hard_limit_s(s, is_async=traits[r.part].is_async) for s, r in zip(limits_s, requests, strict=True)]
        patience_s = OUTSTANDING_PER_WORKER * max(hard_s, default=0.0) + GRACE_S
        waiting, outstanding = deque(range(len(requests))), set[int]()
        n_lost = 0
        while waiting or outstanding:
            try:
                connection = self._connect()
                while waiting and len(outstanding) < window:
                    index = waiting.popleft()
                    outstanding.add(index)
                    connection.send(_message(index, requests[index]))
                reply = connection.receive(patience_s)
            except _Lost as lost:
                n_lost += 1
                self._replace(lost, n_lost)
                waiting.extendleft(sorted(outstanding, reverse=True))
                outstanding.clear()
                continue
            index = reply["id"]
            outstanding.discard(index)
            yield _outcome(index, reply, limits_s[index])

    def close(self) -> None:
        """End all processes; the other methods may start new ones."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _connect(self) -> _Connection:
        if self._connection is None:
            try:
                self._connection = _Connection(self._specs, self._concurrency, self._async_concurrency)
            except _Silent as silent:  # another attempt would take as long again
                self._report(silent, 1)
        return self._connection

    def _replace(self, lost: _Lost, n_times: int) -> None:
        """Close the connection, so that the next use starts another server; give up if too many were lost."""
        self.close()
        if n_times > MAX_RESTARTS:
            self._report(lost, n_times)
        log.warning("the process that runs the reward functions %s; another takes its place", lost)

    def _report(self, lost: _Lost, n_times: int) -> NoReturn:
        names = ", ".join(repr(spec.function) for spec in self._specs)
        times = f", {n_times} times in one call" if n_times > 1 else ""
        raise RunError(
            f"the process that runs the reward function {names} {lost}{times}",
            remedy="Its output is in the worker's log.",
        ) from None


class _Lost(Exception):
    """The server is of no use any more; the message completes the sentence "the process ..."."""


class _Silent(_Lost):
    """The server lives, but does not answer."""


class _Connection:
    """A running server whose functions are loaded, and its pipes."""

    def __init__(self, specs: Sequence[FunctionSpec], concurrency: int, async_concurrency: int) -> None:
        spec = {
            "functions": [asdict(spec) for spec in specs],
            "concurrency": concurrency,
            "async_concurrency": async_concurrency,
            "search_path": [path or os.getcwd() for path in sys.path],
        }
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "realrl.rewards.server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            bufsize=0,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests_fd = self._process.stdin.fileno()
        os.set_blocking(self._requests_fd, False)
        self._replies_fd = self._process.stdout.fileno()
        self._replies = read_lines(self._replies_fd)
        self._lines: deque[bytes] = deque()
        self.close = weakref.finalize(self, _end, self._process)
        self.send(spec)  # by the pipe: arguments of a process are read by every user of the machine
        ready = self.receive(START_TIMEOUT_S)
        if "failed" in ready:
            self.close()
            raise LoadError(specs[ready["part"]].function, ready["failed"], remedy=ready["remedy"])
        self.traits = [Traits(**traits) for traits in ready["functions"]]

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a request, and read replies while the pipe is full: the server may be waiting for that."""
        data = json.dumps(message).encode() + b"\n"
        while data:
            try:
                data = data[os.write(self._requests_fd, data) :]
            except BlockingIOError:
                readable, writable = _wait_for([self._replies_fd], [self._requests_fd], GRACE_S)
                if readable:
                    self._read()
                elif not writable:
                    raise self._lost(f"took no request for {GRACE_S:g} s") from None
            except BrokenPipeError:
                raise self._lost("ended") from None

    def receive(self, timeout_s: float) -> dict[str, Any]:
        while not self._lines:
            if not _wait_for([self._replies_fd], [], timeout_s)[0]:
                kind = _Lost if is_stopped(self._process.pid) else _Silent
                raise kind(*self._lost(f"was silent for {timeout_s:g} s").args)
            self._read()
        message: dict[str, Any] = json.loads(self._lines.popleft())
        return message

    def _read(self) -> None:
        lines = next(self._replies, None)
        if lines is None:
            raise self._lost("ended")
        self._lines.extend(lines)

    def _lost(self, what: str) -> _Lost:
        self.close()
        return _Lost(f"{what} (status {self._process.returncode})")


def _wait_for(reads: list[int], writes: list[int], timeout_s: float) -> tuple[list[int], list[int]]:
    """Descriptors that are ready; none when the time is over, of which a pause of this process takes a slice only."""
    while timeout_s > 0:
        readable, writable, _ = select.select(reads, writes, [], min(timeout_s, SLICE_S))
        if readable or writable:
            return readable, writable
        timeout_s -= SLICE_S
    return [], []


def _end(process: subprocess.Popen[bytes]) -> None:
    """Close the server's input, upon which it kills its workers and exits."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    try:
        process.wait(timeout=5.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()


def _load(spec: FunctionSpec) -> RewardFunction:
    try:
        return RewardFunction(spec.function, spec.reads, spec.options)
    except TypeError as error:
        raise LoadError(spec.function, f"TypeError: {error}") from error


class LoadError(RunError):
    """A reward function cannot be loaded.

    Args:
        remedy: such as ``file:line: text`` of the line at fault; empty: the key that names the function.

    Attributes:
        function: its name.
    """

    def __init__(self, function: str, why: str, *, remedy: str = "", key: str = "it") -> None:
        super().__init__(
            f"the reward function {function!r} cannot be loaded: {why}",
            remedy=remedy or f"Set {key} to 'file.py:function' or 'module:function'.",
        )
        self.function, self._why, self._remedy = function, why, remedy

    def set_by(self, keys: Sequence[str]) -> LoadError:
        """Return the error with the keys of the configuration that name the function, for the remedy."""
        return LoadError(self.function, self._why, remedy=self._remedy, key=" and ".join(keys)) if keys else self


def _message(index: int, request: Request) -> dict[str, Any]:
    message = {"id": index, "part": request.part, "prompt": request.prompt, "response": request.response}
    more = {"row": request.row, "messages": request.messages}
    return message | {name: value for name, value in more.items() if value is not None}


def _limit_s(specs: Sequence[FunctionSpec], traits: Sequence[Traits], request: Request) -> float:
    is_group = traits[request.part].is_group
    return time_limit_s(specs[request.part].timeout_s, {"response": request.response}, is_group=is_group)


def _outcome(index: int, result: Mapping[str, Any], limit_s: float) -> Outcome:
    late = f"did not answer within {limit_s:g} s" if result.get("timeout") else None
    work = (result["process"], *result["work_s"]) if "work_s" in result else None
    fault = TOO_LATE if late else result.get("fault", "")
    return Outcome(index, result.get("rewards", ()), late or result.get("error"), fault, work)


def _complain(function: str, index: int, limit_s: float) -> None:
    log.warning(
        "reward function %r has been busy with response %d for %g s; launcher=inline cannot interrupt it, "
        "launcher=local can",
        function,
        index,
        limit_s,
    )
