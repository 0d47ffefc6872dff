"""The in-process transport: master and workers take turns in one thread.

A request is executed inside `InprocMaster.receive`, on the caller's stack, so a breakpoint in a reward function stops
there. Messages still pass through the codec, so that encoding fails here as it does over sockets, and no mutable object
is shared.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from realrl.errors import TransportError
from realrl.runtime.transport.base import FetchRows, accepted, describe_rows
from realrl.runtime.transport.codec import decode_reply, decode_request, encode
from realrl.sched.key_value import KeyValueAnswer, KeyValueRequest, KeyValues
from realrl.sched.messages import Reply, Request

Handler = Callable[[Request], Sequence[Reply]]


class InprocMaster:
    """A `MasterTransport` that drives its workers itself, oldest request first."""

    def __init__(self) -> None:
        self._handlers: dict[int, Handler] = {}
        self._requests: deque[tuple[int, bytes]] = deque()
        self._replies: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def attach(self, rank: int, handler: Handler) -> None:
        """Let `handler` execute the requests of worker `rank`."""
        self._handlers[rank] = handler

    def deliver(self, reply: Reply) -> None:
        """Queue a reply that answers no request, such as `Hello`; safe from any thread."""
        self._replies.put(encode(reply))

    def send(self, rank: int, request: Request) -> None:
        if rank not in self._handlers:
            raise _not_connected(rank)
        self._requests.append((rank, encode(request)))

    def receive(self, timeout_s: float) -> Reply | None:
        while self._replies.empty() and self._requests:
            rank, data = self._requests.popleft()
            for reply in self._handlers[rank](decode_request(data)):
                self.deliver(reply)
        try:
            return decode_reply(self._replies.get(timeout=timeout_s) if timeout_s > 0 else self._replies.get_nowait())
        except queue.Empty:
            return None

    def close(self) -> None:
        self._handlers.clear()
        self._requests.clear()


class InprocSamples:
    """Sample servers and clients of one process; addresses are valid inside this object only."""

    def __init__(self) -> None:
        self._fetchers: dict[str, FetchRows] = {}
        self._numbers = itertools.count()

    def serve(self, fetch: FetchRows) -> InprocSampleServer:
        """Offer `fetch` under a new address."""
        address = f"inproc://samples-{next(self._numbers)}"
        self._fetchers[address] = fetch
        return InprocSampleServer(address, self._fetchers)

    def client(self) -> InprocSampleClient:
        """A client that reaches every server of this object."""
        return InprocSampleClient(self._fetchers)


class InprocSampleServer:
    """A `SampleServer`: an entry in a table."""

    def __init__(self, address: str, fetchers: dict[str, FetchRows]) -> None:
        self.address = address
        self._fetchers = fetchers

    def close(self) -> None:
        self._fetchers.pop(self.address, None)


class InprocSampleClient:
    """A `SampleClient` that calls the producer's fetch directly; nobody else could fetch rows while it waited."""

    def __init__(self, fetchers: dict[str, FetchRows]) -> None:
        self._fetchers = fetchers

    def pull(self, address: str, keys: Sequence[str], ids: Sequence[str], *, waits: bool = False) -> bytes:
        what = f"{describe_rows(keys, ids)} from {address}"
        fetch = self._fetchers.get(address)
        if fetch is None:
            raise TransportError(f"cannot pull {what}: nobody serves that address")
        try:
            return fetch(tuple(keys), tuple(ids))
        except Exception as error:
            raise TransportError(f"cannot pull {what}: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        return None


class InprocKeyValues:
    """The key-value store of one process, and its client for any number of threads."""

    is_local = True

    def __init__(self) -> None:
        self._state = KeyValues[int]()
        self._answers: dict[int, KeyValueAnswer] = {}  # number of the request -> answer not fetched yet
        self._numbers = itertools.count()
        self._changed = threading.Condition()

    def ask(self, request: KeyValueRequest) -> KeyValueAnswer:
        with self._changed:
            number = next(self._numbers)
            self._answers.update(self._state.handle(number, request, now_s=time.monotonic()))
            self._changed.notify_all()
            while number not in self._answers:
                deadline_s = self._state.next_deadline_s
                self._changed.wait(None if deadline_s is None else max(0.0, deadline_s - time.monotonic()))
                self._answers.update(self._state.expire(time.monotonic()))
            return accepted(self._answers.pop(number))


def _not_connected(rank: int) -> TransportError:
    return TransportError(f"worker {rank} is not connected", worker=rank)
