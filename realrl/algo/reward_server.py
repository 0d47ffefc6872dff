"""A process that runs a reward function in forked workers: ``python -m realrl.algo.reward_server SPEC`` (JSON).

    owner --requests--> server --one request at a time--> worker 1..n      (all pipes, one JSON object a line)
          <--replies---        <--------result------------

The server imports the function once and forks workers from itself, so that a worker which hung or died is replaced in
milliseconds. After the import it runs no user code: it always notices a time limit, a dead worker and the end of its
owner (end of file on its input), and then kills its workers.

Requests: ``{"id", "prompt", "response"}``. First reply: ``{"ready": true, "reads": "ids" | "text"}`` or
``{"failed": text}``; then ``{"id", "reward"}``, ``{"id", "error"}`` or ``{"id", "timeout": true}`` for each request.
What the function prints goes to stderr.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import math
import os
import selectors
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from realrl.algo.loading import load_object

RewardFunction = Callable[[Any, Any], float]

CHUNK_BYTES = 1 << 16
MAX_ERROR_CHARS = 2000


def reads_ids(function: RewardFunction) -> bool:
    """Whether the function asks for token ids: its first two parameters are named ``*_ids``."""
    names = list(inspect.signature(function).parameters)[:2]
    return len(names) == 2 and all(name.endswith("_ids") for name in names)


def evaluate(function: RewardFunction, prompt: Any, response: Any) -> dict[str, Any]:
    """``{"reward": float}``, or ``{"error": text}`` if the function raises or gives no finite number."""
    try:
        value = function(prompt, response)
    except Exception as error:  # noqa: BLE001 - whatever user code raises is reported to its owner
        where = "".join(traceback.format_exception(error)[-3:])
        return {"error": f"raised {type(error).__name__}: {error}\n{where}"[:MAX_ERROR_CHARS]}
    try:
        reward = float(value)
    except (TypeError, ValueError):
        return {"error": f"returned {value!r:.100}, which is not a number"}
    if not math.isfinite(reward):
        return {"error": f"returned {reward}"}
    return {"reward": reward}


class Lines:
    """Whole lines out of a pipe."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._rest = b""

    def read(self) -> list[bytes] | None:
        """Complete lines that a single read brings; None at the end of the file."""
        chunk = os.read(self.fd, CHUNK_BYTES)
        if not chunk:
            return None
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        return lines


def write_line(fd: int, message: Mapping[str, Any]) -> None:
    """Write one JSON object, wholly."""
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(fd, data) :]


class Worker:
    """One forked process and the request it works on."""

    def __init__(self, function: RewardFunction, inherited: set[int]) -> None:
        request_read, self.request_fd = os.pipe()
        result_read, result_write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setpgid(0, 0)
                for fd in inherited | {self.request_fd, result_read}:
                    os.close(fd)
                _work(function, request_read, result_write)
            finally:
                os._exit(1)  # whatever happens, the fork never returns into the server's code
        os.close(request_read)
        os.close(result_write)
        self.results = Lines(result_read)
        self.request_id: int | None = None
        self.deadline_s = math.inf

    @property
    def fds(self) -> set[int]:
        """The server's ends of the pipes."""
        return {self.request_fd, self.results.fd}

    def give(self, request: Mapping[str, Any], deadline_s: float) -> None:
        """Start a request."""
        self.request_id = request["id"]
        self.deadline_s = deadline_s
        write_line(self.request_fd, request)

    def end(self) -> int:
        """Kill the process and what it started; returns its exit status (negative: the signal)."""
        for fd in self.fds:
            os.close(fd)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


def _work(function: RewardFunction, requests_fd: int, results_fd: int) -> None:
    requests = Lines(requests_fd)
    while (lines := requests.read()) is not None:
        for line in lines:
            request = json.loads(line)
            outcome = evaluate(function, request["prompt"], request["response"])
            sys.stdout.flush()
            write_line(results_fd, outcome)
    os._exit(0)


class Server:
    """The event loop: hands requests to idle workers, watches their time, replaces those that failed."""

    def __init__(self, function: RewardFunction, *, concurrency: int, timeout_s: float, replies_fd: int) -> None:
        self._function = function
        self._concurrency = concurrency
        self._timeout_s = timeout_s
        self._replies_fd = replies_fd
        self._requests = Lines(0)
        self._queue: deque[Mapping[str, Any]] = deque()
        self._workers: list[Worker] = []

    def serve(self) -> None:
        """Until the owner closes the input; no worker is left afterwards."""
        try:
            while self._turn():
                pass
        finally:
            for worker in list(self._workers):
                self._end(worker)

    def _turn(self) -> bool:
        self._hand_out()
        with selectors.DefaultSelector() as selector:
            selector.register(self._requests.fd, selectors.EVENT_READ, None)
            for worker in self._workers:
                selector.register(worker.results.fd, selectors.EVENT_READ, worker)
            next_deadline_s = min((w.deadline_s for w in self._workers), default=math.inf)
            wait_s = None if next_deadline_s == math.inf else max(next_deadline_s - time.monotonic(), 0.0)
            ready = [key.data for key, _ in selector.select(wait_s)]
        for worker in ready:
            if worker is None:
                lines = self._requests.read()
                if lines is None:
                    return False
                self._queue.extend(json.loads(line) for line in lines)
            else:
                self._collect(worker)
        now_s = time.monotonic()
        for worker in [w for w in self._workers if w.deadline_s <= now_s]:
            self._reply(worker, {"timeout": True})
            self._end(worker)
        return True

    def _hand_out(self) -> None:
        while self._queue:
            worker = next((w for w in self._workers if w.request_id is None), None)
            if worker is None:
                if len(self._workers) == self._concurrency:
                    return
                inherited = {0, self._replies_fd}.union(*(w.fds for w in self._workers))
                worker = Worker(self._function, inherited)
                self._workers.append(worker)
            try:
                worker.give(self._queue.popleft(), time.monotonic() + self._timeout_s)
            except BrokenPipeError:
                self._collect(worker)

    def _collect(self, worker: Worker) -> None:
        lines = worker.results.read()
        if lines is None:
            status = self._end(worker)
            ending = f"died of signal {-status}" if status < 0 else f"left its process with status {status}"
            self._reply(worker, {"error": ending})
            return
        for line in lines:
            self._reply(worker, json.loads(line))

    def _reply(self, worker: Worker, outcome: Mapping[str, Any]) -> None:
        if worker.request_id is not None:
            write_line(self._replies_fd, {"id": worker.request_id, **outcome})
        worker.request_id, worker.deadline_s = None, math.inf

    def _end(self, worker: Worker) -> int:
        self._workers.remove(worker)
        return worker.end()


def main() -> None:
    """Serve the function that the first argument describes: function, reads, concurrency, timeout_s."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the owner's to handle
    spec = json.loads(sys.argv[1])
    replies_fd = os.dup(1)
    os.dup2(2, 1)
    try:
        function = load_object(spec["function"])
        if not callable(function):
            raise TypeError(f"{spec['function']!r} is not a function")
        reads = spec["reads"] if spec["reads"] != "auto" else "ids" if reads_ids(function) else "text"
    except Exception as error:  # noqa: BLE001 - an import can raise anything; the owner reports it
        write_line(replies_fd, {"failed": "".join(traceback.format_exception_only(error)).strip()})
        return
    write_line(replies_fd, {"ready": True, "reads": reads})
    server = Server(function, concurrency=spec["concurrency"], timeout_s=spec["timeout_s"], replies_fd=replies_fd)
    try:
        server.serve()
    except BrokenPipeError:
        sys.exit(0)  # the owner is gone; serve() has ended the workers


if __name__ == "__main__":
    main()
