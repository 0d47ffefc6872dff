"""The socket transport: ZeroMQ with CURVE encryption and authentication, on one node and on several.

    master: ROUTER, identity -> worker      a gate thread admits only clients that hold the run's worker key
    worker: DEALER "3" for requests and the replies of the main thread,
            DEALER "3/beside" for messages of other threads (heartbeats)
    samples: ROUTER in a thread of the producer, one DEALER per producer at the puller
    keys and values: ROUTER in a thread of the master, a DEALER for each request under way at a worker

On one machine the sockets are files in a folder of the run that other users cannot enter (``ipc://``).
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Sequence

import zmq

from realrl.errors import RunError, TransportError
from realrl.runtime.transport.base import FetchRows, accepted, describe_rows
from realrl.runtime.transport.codec import (
    PullFailed,
    PullRows,
    decode_key_value_answer,
    decode_key_value_request,
    decode_pull,
    decode_pull_failure,
    decode_reply,
    decode_request,
    encode,
)
from realrl.runtime.transport.sockets import (
    LINGER_MS,
    LOOPBACK,
    Connection,
    ConnectionBrokenError,
    Context,
    GuardedRouter,
    RunKeys,
    WorkerKeys,
    new_context,
)
from realrl.sched.key_value import KeyValueAnswer, KeyValueRequest, KeyValues, Limits, WaitFor
from realrl.sched.messages import Reply, Request

_BESIDE = b"/beside"
_OK, _FAILED = b"\x00", b"\x01"
_LOOK_AGAIN_MS = 5  # for rows that a worker is still fetching itself
_PATIENCE = 30  # times the limit of an answer, for such rows: the worker may be busy with an earlier call
_SLICE_S = 1.0  # of a long wait: if all processes are stopped in it, no more is lost

_log = logging.getLogger(__name__)


class ZmqMaster:
    """The master's end of the socket transport.

    Args:
        keys: the run's keys.
        endpoint: where to listen: ``ipc://PATH``, or ``tcp://HOST:PORT`` with ``*`` for a free port.

    Raises:
        UsageError: the port is taken, or the host is not an address of this machine.
    """

    def __init__(self, keys: RunKeys, *, endpoint: str = LOOPBACK) -> None:
        self._server = GuardedRouter.of_master(keys, endpoint)
        self.address = self._server.address
        self._timeout_ms = -1

    def send(self, rank: int, request: Request) -> None:
        try:
            self._server.socket.send_multipart((b"%d" % rank, encode(request)))
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise TransportError(f"cannot send to worker {rank}: {error}", worker=rank) from error
            raise TransportError(f"worker {rank} is not connected", worker=rank) from error

    def receive(self, timeout_s: float) -> Reply | None:
        self._timeout_ms = _set_timeout(self._server.socket, timeout_s, self._timeout_ms)
        try:
            frames = self._server.socket.recv_multipart()
        except zmq.Again:
            return None
        identity, data = frames[0], frames[-1]
        reply = decode_reply(data)
        if len(frames) != 2 or identity.removesuffix(_BESIDE) != b"%d" % reply.rank:
            raise TransportError(f"a {type(reply).__name__} of worker {reply.rank} came from connection {identity!r}")
        return reply

    def close(self) -> None:
        self._server.close()


class ZmqWorker:
    """A worker's end of the socket transport; the thread that makes it is the one that calls `receive`.

    Args:
        address: where the master listens.
        rank: global rank of the worker.
        context: share this context (see `new_context`), so that one process can play many workers; it stays open.
    """

    def __init__(self, address: str, rank: int, keys: WorkerKeys, *, context: Context | None = None) -> None:
        self._owns_context = context is None
        self._context = context or new_context()
        self._main_thread = threading.get_ident()
        self._connection = (address, rank, keys)
        self._main = self._connect(b"%d" % rank)
        self._beside: Connection | None = None
        self._beside_lock = threading.Lock()
        self._is_closed = False
        self._timeout_ms = -1

    def receive(self, timeout_s: float) -> Request | None:
        self._timeout_ms = _set_timeout(self._main.socket, timeout_s, self._timeout_ms)
        try:
            return decode_request(self._main.socket.recv())
        except zmq.Again:
            if self._main.is_broken() or (self._beside is not None and self._beside.is_broken()):
                rank = self._connection[1]
                raise ConnectionBrokenError(
                    f"the connection of worker {rank} to its master broke", worker=rank
                ) from None
            return None

    def send(self, reply: Reply) -> None:
        data = encode(reply)
        if threading.get_ident() == self._main_thread:
            self._main.send(data)
            return
        with self._beside_lock:  # a socket may change threads, but never be in two at once
            if self._is_closed:
                return
            if self._beside is None:
                self._beside = self._connect(b"%d%s" % (self._connection[1], _BESIDE))
            self._beside.send(data)

    def close(self) -> None:
        with self._beside_lock:
            self._is_closed = True
            if self._beside is not None:
                self._beside.close(0)
        self._main.close(LINGER_MS)
        if self._owns_context:
            self._context.term()

    def _connect(self, identity: bytes) -> Connection:
        address, _, keys = self._connection
        return Connection(self._context, keys, keys.master_public, address, identity)


class ZmqSampleServer:
    """Serves `fetch` to the run's other workers, in its own thread. Pulls that wait for rows hold up no others."""

    def __init__(self, fetch: FetchRows, keys: WorkerKeys, *, endpoint: str = LOOPBACK) -> None:
        public, secret = keys.worker_public, keys.worker_secret
        self._server = GuardedRouter(public, secret, public, endpoint)
        self.address = self._server.address
        self._fetch = fetch
        self._thread = threading.Thread(target=self._serve, name="samples", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.close(socket_owner=self._thread)

    def _serve(self) -> None:
        socket = self._server.socket
        waiting: list[tuple[bytes, bytes]] = []  # pulls of rows that are not here yet
        try:
            while True:
                pulls, waiting = waiting, []
                if socket.poll(_LOOK_AGAIN_MS if pulls else None):
                    identity, *frames = socket.recv_multipart()
                    pulls.append((identity, frames[-1]))
                for identity, request in pulls:
                    answer = self._answer(request)
                    if answer is None:
                        waiting.append((identity, request))
                    else:
                        self._server.answer(identity, *answer)
        except zmq.ContextTerminated:
            _log.debug("sample server at %s stopped", self.address)
        finally:
            socket.close(linger=0)

    def _answer(self, data: bytes) -> tuple[bytes, bytes] | None:
        waits = False
        try:
            pull = decode_pull(data)
            waits = pull.waits
            return _OK, self._fetch(pull.keys, pull.ids)
        except Exception as error:  # noqa: BLE001 - the puller must hear of it, or it would wait in vain
            if waits and isinstance(error, RunError) and not isinstance(error, TransportError):
                return None
            _log.warning("cannot serve rows", exc_info=True)
            return _FAILED, encode(PullFailed(type(error).__name__, str(error)))


class ZmqSampleClient:
    """Pulls rows from sample servers; one connection per address, kept open. Safe from any thread."""

    def __init__(self, keys: WorkerKeys, *, timeout_s: float = 60.0) -> None:
        self._context = new_context()
        self._keys = keys
        self._timeout_s = timeout_s
        self._connections: dict[str, Connection] = {}
        self._lock = threading.Lock()

    def pull(self, address: str, keys: Sequence[str], ids: Sequence[str], *, waits: bool = False) -> bytes:
        what = f"{describe_rows(keys, ids)} from {address}"
        request = encode(PullRows(tuple(keys), tuple(ids), waits))
        limit_s = self._timeout_s * (_PATIENCE if waits else 1)
        with self._lock:
            connection = self._connections.get(address)
            if connection is not None and connection.is_broken():  # while nothing was under way
                self._connections.pop(address).close(0)
                connection = None
            if connection is None:
                connection = Connection(self._context, self._keys, self._keys.worker_public, address, None)
                self._connections[address] = connection
            try:
                status, payload = _asked(connection, request, limit_s)
            except TransportError as error:
                self._connections.pop(address).close(0)  # a late answer must not be taken for the next one's
                raise TransportError(
                    f"cannot pull {what}: {error.message}",
                    remedy="The worker that holds them may have died; its log tells.",
                ) from error
        if status == _OK:
            return payload
        failure = decode_pull_failure(payload)
        raise TransportError(f"cannot pull {what}: {failure.error}: {failure.message}")

    def close(self) -> None:
        with self._lock:
            for connection in self._connections.values():
                connection.close(0)
            self._connections.clear()
            self._context.term()


class ZmqKeyValueServer:
    """The run's key-value store, in a thread of the master: a wait is parked there and answered once.

    Args:
        limits: sizes beyond which requests are refused.
    """

    def __init__(self, keys: RunKeys, *, endpoint: str = LOOPBACK, limits: Limits | None = None) -> None:
        self._server = GuardedRouter.of_master(keys, endpoint)
        self.address = self._server.address
        self._state = KeyValues[bytes](limits)
        self._thread = threading.Thread(target=self._serve, name="key-values", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.close(socket_owner=self._thread)

    def _serve(self) -> None:
        socket, state = self._server.socket, self._state
        try:
            while True:
                deadline_s = state.next_deadline_s
                left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
                is_asked = socket.poll(None if left_s is None else math.ceil(left_s * 1000))
                answers = self._handle(*socket.recv_multipart()) if is_asked else []
                for client, answer in (*answers, *state.expire(time.monotonic())):
                    self._server.answer(client, encode(answer))
        except zmq.ContextTerminated:
            _log.debug("key-value store at %s stopped", self.address)
        finally:
            socket.close(linger=0)

    def _handle(self, client: bytes, *frames: bytes) -> list[tuple[bytes, KeyValueAnswer]]:
        try:
            request = decode_key_value_request(frames[-1])
        except TransportError as error:
            return [(client, KeyValueAnswer(refusal=str(error)))]
        return self._state.handle(client, request, now_s=time.monotonic())


class ZmqKeyValueClient:
    """Asks the run's key-value store. Safe from any thread: each request under way has a connection to itself.

    Args:
        address: where the store listens; the first request connects.
        timeout_s: limit of an answer, beyond the time that the request itself may wait at the store.
    """

    def __init__(self, address: str, keys: WorkerKeys, *, timeout_s: float = 60.0) -> None:
        self._address = address
        self._keys = keys
        self._timeout_s = timeout_s
        self._context = new_context()
        self._idle: list[Connection] = []  # a socket may change threads, but never be in two at once
        self._lock = threading.Lock()
        self._is_closed = False

    @property
    def is_local(self) -> bool:
        return self._address.startswith(("ipc://", "tcp://127."))

    def ask(self, request: KeyValueRequest) -> KeyValueAnswer:
        limit_s = self._timeout_s + (request.timeout_s if isinstance(request, WaitFor) else 0.0)
        connection = self._take()
        try:
            answer = decode_key_value_answer(_asked(connection, encode(request), limit_s)[0])
        except (TransportError, zmq.ZMQError) as error:
            connection.close(0)  # a late answer must not be taken for the next one's
            why = f" is closed ({error})" if isinstance(error, zmq.ZMQError) else f": {error.message}"
            raise TransportError(f"the run's key-value store at {self._address}{why}") from error
        except BaseException:
            connection.close(0)
            raise
        self._put_back(connection)
        return accepted(answer)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            for connection in self._idle:
                connection.close(0)
            self._idle.clear()
        self._context.term()  # ends the requests under way

    def _take(self) -> Connection:
        with self._lock:
            if self._is_closed:
                raise TransportError(f"the connection to the run's key-value store at {self._address} is closed")
            while self._idle:
                connection = self._idle.pop()
                if not connection.is_broken():
                    return connection
                connection.close(0)
            return Connection(self._context, self._keys, self._keys.master_public, self._address, None)

    def _put_back(self, connection: Connection) -> None:
        with self._lock:
            if self._is_closed:
                connection.close(0)
            else:
                self._idle.append(connection)


def _asked(connection: Connection, request: bytes, limit_s: float) -> list[bytes]:
    """Send a request and return the frames of its answer.

    Raises:
        TransportError: the connection broke, or the time is over.
    """
    connection.send(request)
    left_s = limit_s
    while not connection.socket.poll(round(min(left_s, _SLICE_S) * 1000)):
        left_s -= _SLICE_S
        if connection.is_broken():
            raise ConnectionBrokenError("the connection broke")
        if left_s <= 0:
            raise TransportError(f"no answer within {limit_s:g} s")
    return connection.socket.recv_multipart()


def _set_timeout(socket: zmq.Socket[bytes], timeout_s: float, current_ms: int) -> int:
    timeout_ms = max(0, round(timeout_s * 1000))
    if timeout_ms != current_ms:
        socket.rcvtimeo = timeout_ms
    return timeout_ms
