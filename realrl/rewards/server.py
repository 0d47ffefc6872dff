"""A process that runs reward functions in forked workers: ``python -m realrl.rewards.server``.

    owner --requests--> server --requests--> worker 1..n      (all pipes, one JSON object a line)
          <--replies---        <--results---

The server imports the functions once and forks workers from itself, so that it replaces a hung or dead worker in
milliseconds. After the import it runs no user code: it always notices a time limit, a dead worker and the end of its
owner (end of file on its input), and then kills its workers. User code has an empty standard input.

A worker has one request at a time, or many of async functions. It watches the time of async requests itself. If one of
them keeps the whole process busy, or ends it, all requests of the worker are tried again, each in a worker of its own.
A worker may also die by no fault of its request (the system is out of memory, somebody kills it), or be stopped. So a
request whose worker died, or was found stopped when the time was over, is tried once more before it counts as failed.
Time limits are kept on a clock that a pause of the server, which stops its workers as well, does not advance.

First line: ``{"functions": [{"function", "reads", "options", "timeout_s"}], "concurrency", "async_concurrency",
"search_path"}``, the last one being where the owner finds modules.
Requests: ``{"id", "part", "prompt", "response", "row", "messages"}``; `part` is the function's number. First reply:
``{"ready": true, "functions": [traits]}`` or ``{"failed": text, "remedy", "part"}``; then ``{"id", "rewards"}``,
``{"id", "error", "fault"}`` or ``{"id", "timeout": true}`` for each request, with the ``process`` that ran it and its
begin and end (``work_s``, since the epoch) unless that was lost. The functions' own output goes to stderr.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import selectors
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from realrl.errors import Error
from realrl.experiment.loading import line_that_raised
from realrl.rewards.call import RewardFunction
from realrl.sched.silence import AwakeClock

CHUNK_BYTES = 1 << 16
ASYNC_GRACE_S = 1.0
TURN_S = 0.2  # longest wait for a time limit; a pause costs no more than twice as long
_PR_SET_PDEATHSIG = 1


def time_limit_s(timeout_s: float, request: Mapping[str, Any], *, is_group: bool) -> float:
    """The time limit of a request: `timeout_s` for each of its responses."""
    return timeout_s * (len(request["response"]) if is_group else 1)


def hard_limit_s(limit_s: float, *, is_async: bool) -> float:
    """The server's own time limit: longer for async functions, whose worker should notice `limit_s` itself."""
    return 1.5 * limit_s + ASYNC_GRACE_S if is_async else limit_s


def is_stopped(pid: int) -> bool:
    """True if a child was stopped by a signal, and did not go on."""
    flags = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
    return os.waitid(os.P_PID, pid, flags) is not None


def read_lines(fd: int) -> Iterator[list[bytes]]:
    """Yield what each read from a pipe completes, whole lines or none, until the end of the file."""
    rest = b""
    while chunk := os.read(fd, CHUNK_BYTES):
        *lines, rest = (rest + chunk).split(b"\n")
        yield lines


def write_line(fd: int, message: Mapping[str, Any]) -> None:
    """Write one JSON object, wholly."""
    data = json.dumps(message).encode() + b"\n"
    while data:
        data = data[os.write(fd, data) :]


# ---------------------------------------------------------------- in the worker


def _at_death_of_parent(signum: signal.Signals) -> None:
    """Let the system (Linux) send a signal to this process when the one above dies."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signum)


def _work(functions: Sequence[RewardFunction], timeouts_s: Sequence[float], requests_fd: int, results_fd: int) -> None:
    if any(function.traits.is_async for function in functions):
        import asyncio

        asyncio.run(_work_async(functions, timeouts_s, requests_fd, results_fd))
        os._exit(0)
    for lines in read_lines(requests_fd):
        for line in lines:
            request = json.loads(line)
            begin_s = time.time()
            outcome = functions[request["part"]].evaluate(request)
            sys.stdout.flush()
            write_line(results_fd, {"id": request["id"], "work_s": [begin_s, time.time()], **outcome})
    os._exit(0)


async def _work_async(
    functions: Sequence[RewardFunction], timeouts_s: Sequence[float], requests_fd: int, results_fd: int
) -> None:
    import asyncio

    loop = asyncio.get_running_loop()
    is_over = loop.create_future()
    requests, tasks = read_lines(requests_fd), set[asyncio.Task[None]]()

    async def serve(request: Mapping[str, Any]) -> None:
        function, timeout_s = functions[request["part"]], timeouts_s[request["part"]]
        begin_s = time.time()
        if function.traits.is_async:
            limit_s = time_limit_s(timeout_s, request, is_group=function.traits.is_group)
            outcome = await function.evaluate_async(request, limit_s)
        else:
            outcome = function.evaluate(request)
        sys.stdout.flush()
        write_line(results_fd, {"id": request["id"], "work_s": [begin_s, time.time()], **outcome})

    def receive() -> None:
        lines = next(requests, None)
        if lines is None:
            is_over.set_result(None)
        for line in lines or ():
            task = loop.create_task(serve(json.loads(line)))
            tasks.add(task)  # the loop itself keeps weak references only
            task.add_done_callback(tasks.discard)

    loop.add_reader(requests_fd, receive)
    await is_over


# ---------------------------------------------------------------- in the server


@dataclass(frozen=True)
class Job:
    """A request on its way.

    Attributes:
        alone: True if it must not share its worker.
        is_suspect: True if a worker died that had no other job.
    """

    request: Mapping[str, Any]
    is_async: bool
    alone: bool
    limit_s: float
    is_suspect: bool = False
    deadline_s: float = math.inf


class Worker:
    """One forked process and the requests it works on; an ended one leaves its number to the next."""

    def __init__(
        self, number: int, functions: Sequence[RewardFunction], timeouts_s: Sequence[float], inherited: set[int]
    ) -> None:
        self.number = number
        request_read, self.request_fd = os.pipe()
        self.result_fd, result_write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setpgid(0, 0)
                _at_death_of_parent(signal.SIGKILL)  # even if it hangs
                for fd in inherited | {self.request_fd, self.result_fd}:
                    os.close(fd)
                _work(functions, timeouts_s, request_read, result_write)
            finally:
                os._exit(1)  # whatever happens, the fork never returns into the server's code
        os.close(request_read)
        os.close(result_write)
        os.set_blocking(self.request_fd, False)  # a worker that hangs with a full pipe must not hang the server
        self.results = read_lines(self.result_fd)
        self.jobs: dict[int, Job] = {}
        self._unsent = b""

    @property
    def fds(self) -> set[int]:
        """The server's ends of the worker's pipes."""
        return {self.request_fd, self.result_fd}

    @property
    def has_unsent(self) -> bool:
        """True if the pipe was too full for a request."""
        return bool(self._unsent)

    @property
    def deadline_s(self) -> float:
        """The time at which the server gives the worker up; infinity if it is idle."""
        return min((job.deadline_s for job in self.jobs.values()), default=math.inf)

    def can_take(self, job: Job, async_concurrency: int) -> bool:
        """True if the worker is idle, or the job and all of its jobs are async and may share it."""
        if not self.jobs:
            return True
        shares = all(other.is_async and not other.alone for other in (job, *self.jobs.values()))
        return shares and len(self.jobs) < async_concurrency

    def give(self, job: Job, now_s: float) -> None:
        self.jobs[job.request["id"]] = replace(job, deadline_s=now_s + job.limit_s)
        self._unsent += json.dumps(job.request).encode() + b"\n"
        self.send()

    def send(self) -> None:
        """Write as much as the pipe takes; the end of its results will tell that a worker is gone."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            self._unsent = self._unsent[os.write(self.request_fd, self._unsent) :]

    def end(self) -> int:
        """Kill the process and its children; returns its exit status (negative: the signal)."""
        for fd in self.fds:
            os.close(fd)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class Server:
    """The event loop: hands requests to workers, watches their time, replaces failed ones."""

    def __init__(
        self, functions: Sequence[RewardFunction], spec: Mapping[str, Any], requests_fd: int, replies_fd: int
    ) -> None:
        self._functions = functions
        self._timeouts_s = [part["timeout_s"] for part in spec["functions"]]
        self._concurrency: int = spec["concurrency"]
        self._async_concurrency: int = spec["async_concurrency"]
        self._replies_fd = replies_fd
        self._requests_fd = requests_fd
        self._requests = read_lines(requests_fd)
        self._queue: deque[Job] = deque()
        self._workers: list[Worker] = []
        self._clock = AwakeClock(time.monotonic(), 2 * TURN_S)

    def serve(self) -> None:
        """Serve until the owner closes the input; no worker is left afterwards."""
        try:
            while self._turn():
                pass
        finally:
            for worker in list(self._workers):
                self._end(worker)

    def _turn(self) -> bool:
        self._hand_out()
        for worker, events in self._wait():
            if worker is None:
                lines = next(self._requests, None)
                if lines is None:
                    return False
                self._queue.extend(self._job(json.loads(line)) for line in lines)
            elif worker in self._workers:  # an earlier event of this turn may have ended it
                if events & selectors.EVENT_WRITE:
                    worker.send()
                else:
                    self._collect(worker)
        now_s = self._clock.look(time.monotonic())
        for worker in [w for w in self._workers if w.deadline_s <= now_s]:
            is_at_fault = not is_stopped(worker.pid) or all(job.is_suspect for job in worker.jobs.values())
            self._end(worker)
            self._give_up(worker, {"timeout": True}, is_final=is_at_fault)
        return True

    def _wait(self) -> list[tuple[Worker | None, int]]:
        """Wait for an event or a deadline; returns (worker, event mask) of each event, None for the owner."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._requests_fd, selectors.EVENT_READ, None)
            for worker in self._workers:
                selector.register(worker.result_fd, selectors.EVENT_READ, worker)
                if worker.has_unsent:
                    selector.register(worker.request_fd, selectors.EVENT_WRITE, worker)
            next_deadline_s = min((w.deadline_s for w in self._workers), default=math.inf)
            left_s = next_deadline_s - self._clock.look(time.monotonic())
            wait_s = None if left_s == math.inf else min(max(left_s, 0.0), TURN_S)
            return [(key.data, events) for key, events in selector.select(wait_s)]

    def _job(self, request: Mapping[str, Any]) -> Job:
        traits = self._functions[request["part"]].traits
        limit_s = time_limit_s(self._timeouts_s[request["part"]], request, is_group=traits.is_group)
        return Job(request, traits.is_async, False, hard_limit_s(limit_s, is_async=traits.is_async))

    def _hand_out(self) -> None:
        while self._queue:  # in order: nothing overtakes a job that waits for an idle worker
            job = self._queue[0]
            free = [w for w in self._workers if w.can_take(job, self._async_concurrency)]
            worker = min(free, key=lambda w: len(w.jobs), default=None)
            if len(self._workers) < self._concurrency and (worker is None or worker.jobs):
                inherited = {self._requests_fd, self._replies_fd}.union(*(w.fds for w in self._workers))
                number = min(set(range(self._concurrency)) - {w.number for w in self._workers})
                worker = Worker(number, self._functions, self._timeouts_s, inherited)
                self._workers.append(worker)
            if worker is None:
                return
            worker.give(self._queue.popleft(), self._clock.look(time.monotonic()))

    def _collect(self, worker: Worker) -> None:
        lines = next(worker.results, None)
        if lines is None:
            status = self._end(worker)
            ending = f"died of signal {-status}" if status < 0 else f"left its process with status {status}"
            self._give_up(worker, {"error": ending}, is_final=all(job.is_suspect for job in worker.jobs.values()))
            return
        for line in lines:
            result = json.loads(line)
            if worker.jobs.pop(result["id"], None) is not None:
                write_line(self._replies_fd, {**result, "process": worker.number})

    def _give_up(self, worker: Worker, outcome: Mapping[str, Any], *, is_final: bool) -> None:
        """Answer the only job of an ended worker; several jobs, or one to be tried again, queue to run alone."""
        jobs = list(worker.jobs.values())
        if len(jobs) == 1 and is_final:
            write_line(self._replies_fd, {"id": jobs[0].request["id"], **outcome})
            return
        is_suspect = len(jobs) == 1
        again = [replace(job, alone=True, is_suspect=is_suspect, deadline_s=math.inf) for job in jobs]
        self._queue.extendleft(reversed(again))

    def _end(self, worker: Worker) -> int:
        self._workers.remove(worker)
        return worker.end()


def _read_spec(requests_fd: int) -> dict[str, Any]:
    """Return the first line; the owner sends no other before it has the reply."""
    for lines in read_lines(requests_fd):
        for line in lines:
            spec: dict[str, Any] = json.loads(line)
            return spec
    sys.exit(0)  # the owner is gone


def main() -> None:
    """Serve the functions that the first line of the input describes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the owner's to handle
    _at_death_of_parent(signal.SIGCONT)  # a stopped server goes on, meets the end of its input and ends its workers
    requests_fd, replies_fd = os.dup(0), os.dup(1)
    with open(os.devnull, "rb") as null:
        os.dup2(null.fileno(), 0)
    os.dup2(2, 1)
    spec = _read_spec(requests_fd)
    sys.path += [path for path in spec["search_path"] if path not in sys.path]  # last: nothing of theirs hides ours
    functions: list[RewardFunction] = []
    try:
        for part in spec["functions"]:
            functions.append(RewardFunction(part["function"], part["reads"], part["options"]))
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - imports can raise anything
        text = error.message if isinstance(error, Error) else "".join(traceback.format_exception_only(error)).strip()
        remedy = (error.remedy if isinstance(error, Error) else line_that_raised(error)) or ""
        write_line(replies_fd, {"failed": text, "remedy": remedy, "part": len(functions)})
        return
    write_line(replies_fd, {"ready": True, "functions": [asdict(function.traits) for function in functions]})
    try:
        Server(functions, spec, requests_fd, replies_fd).serve()
    except BrokenPipeError:
        sys.exit(0)  # the owner is gone; serve() has ended the workers


if __name__ == "__main__":
    main()
