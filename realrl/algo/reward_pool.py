"""The owner's side of `realrl.algo.reward_server`, and its twin that runs the function in the calling thread."""

from __future__ import annotations

import json
import logging
import os
import select
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from realrl.algo.loading import load_object
from realrl.algo.reward_server import Lines, evaluate, reads_ids, write_line
from realrl.errors import RunError

log = logging.getLogger(__name__)

Reads = Literal["ids", "text"]
Response = tuple[list[int], list[int]] | tuple[str, str]
Encode = Callable[[Reads], Sequence[Response]]

START_TIMEOUT_S = 120.0
GRACE_S = 30.0
OUTSTANDING_PER_WORKER = 2


@dataclass(frozen=True)
class Outcome:
    """One response's reward, or why there is none."""

    index: int
    reward: float = 0.0
    failure: str | None = None


class RewardPool(Protocol):
    """Scores responses. `encode` gives the (prompt, response) pairs in the form that the function reads."""

    def score(self, encode: Encode) -> Iterator[Outcome]:
        """One outcome per pair, in the order in which they get ready."""

    def close(self) -> None:
        """End all processes; `score` may start new ones."""


class InProcessPool:
    """Runs the function in the calling thread, where a debugger can stop. Cannot interrupt a slow one, and says so."""

    def __init__(self, function: str, reads: Literal["auto", "ids", "text"], timeout_s: float) -> None:
        self._name = function
        self._reads = reads
        self._timeout_s = timeout_s

    def score(self, encode: Encode) -> Iterator[Outcome]:
        function = load_object(self._name)
        reads: Reads = ("ids" if reads_ids(function) else "text") if self._reads == "auto" else self._reads
        for index, (prompt, response) in enumerate(encode(reads)):
            timer = threading.Timer(self._timeout_s, self._complain, (index,))
            timer.daemon = True
            timer.start()
            try:
                outcome = evaluate(function, prompt, response)
            finally:
                timer.cancel()
            yield Outcome(index, outcome.get("reward", 0.0), outcome.get("error"))

    def close(self) -> None:
        pass

    def _complain(self, index: int) -> None:
        log.warning(
            "reward function %r has been busy with response %d for %g s; launcher=inline cannot interrupt it, "
            "launcher=local can",
            self._name,
            index,
            self._timeout_s,
        )


class ProcessPool:
    """Runs the function in `concurrency` processes beside this one, each response for at most `timeout_s`."""

    def __init__(
        self, function: str, reads: Literal["auto", "ids", "text"], timeout_s: float, concurrency: int
    ) -> None:
        self._spec = {"function": function, "reads": reads, "timeout_s": timeout_s, "concurrency": concurrency}
        self._timeout_s = timeout_s
        self._window = OUTSTANDING_PER_WORKER * concurrency
        self._connection: _Connection | None = None

    def score(self, encode: Encode) -> Iterator[Outcome]:
        """See `RewardPool`.

        Raises:
            RunError: the function cannot be imported, or the server process ended or fell silent.
        """
        if self._connection is None:
            self._connection = _Connection(self._spec)
        connection = self._connection
        waiting = deque(enumerate(encode(connection.reads())))
        n_outstanding = 0
        while waiting or n_outstanding:
            while waiting and n_outstanding < self._window:
                index, (prompt, response) = waiting.popleft()
                connection.send({"id": index, "prompt": prompt, "response": response})
                n_outstanding += 1
            reply = connection.receive(OUTSTANDING_PER_WORKER * self._timeout_s + GRACE_S)
            n_outstanding -= 1
            late = f"did not answer within {self._timeout_s:g} s" if reply.get("timeout") else None
            yield Outcome(reply["id"], reply.get("reward", 0.0), late or reply.get("error"))

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class _Connection:
    """A running server and its pipes."""

    def __init__(self, spec: dict[str, object]) -> None:
        self._name = str(spec["function"])
        paths = [path or os.getcwd() for path in sys.path]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "realrl.algo.reward_server", json.dumps(spec)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
            bufsize=0,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests_fd = self._process.stdin.fileno()
        self._replies = Lines(self._process.stdout.fileno())
        self._lines: deque[bytes] = deque()
        self._reads: Reads | None = None
        self.close = weakref.finalize(self, _end, self._process)

    def reads(self) -> Reads:
        """Wait until the function is imported; what it wants to read."""
        if self._reads is None:
            message = self.receive(START_TIMEOUT_S)
            if "failed" in message:
                self.close()
                raise RunError(
                    f"the reward function {self._name!r} cannot be loaded: {message['failed']}",
                    remedy="Correct algorithm.reward_function: 'module:function' or 'file.py:function'.",
                )
            self._reads = "ids" if message["reads"] == "ids" else "text"
        return self._reads

    def send(self, message: dict[str, object]) -> None:
        try:
            write_line(self._requests_fd, message)
        except BrokenPipeError:
            raise self._lost("ended") from None

    def receive(self, timeout_s: float) -> dict[str, Any]:
        deadline_s = time.monotonic() + timeout_s
        while not self._lines:
            wait_s = max(deadline_s - time.monotonic(), 0.0)
            if not select.select([self._replies.fd], [], [], wait_s)[0]:
                raise self._lost(f"was silent for {timeout_s:g} s")
            lines = self._replies.read()
            if lines is None:
                raise self._lost("ended")
            self._lines.extend(lines)
        message: dict[str, Any] = json.loads(self._lines.popleft())
        return message

    def _lost(self, what: str) -> RunError:
        self.close()
        return RunError(
            f"the process that runs the reward function {self._name!r} {what} (status {self._process.returncode})",
            remedy="Its output is in the worker's log.",
        )


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
