"""The socket transport: ZeroMQ with CURVE encryption and authentication, on one node and on several.

    master: ROUTER, identity -> worker      a gate thread admits only clients that hold the run's worker key
    worker: DEALER "3" for requests and the replies of the main thread,
            DEALER "3/beside" for messages of other threads (heartbeats)
    samples: ROUTER in a thread of the producer, one DEALER per producer at the puller

Keys are made for one run. The master's public key proves the master to a worker, the worker key proves a worker to the
master and to other workers. Without the keys a process can neither send, nor read, nor pose as the master.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import zmq
from zmq.utils import z85

from realrl.errors import TransportError, UsageError
from realrl.runtime.transport.base import FetchRows, describe_ids
from realrl.runtime.transport.codec import (
    PullFailed,
    PullRows,
    decode_pull,
    decode_pull_failure,
    decode_reply,
    decode_request,
    encode,
)
from realrl.sched.messages import Reply, Request

LOOPBACK = "127.0.0.1"
Context = zmq.Context[zmq.Socket[bytes]]

_MASTER_PUBLIC = "REALRL_MASTER_PUBLIC_KEY"
_WORKER_PUBLIC = "REALRL_WORKER_PUBLIC_KEY"
_WORKER_SECRET = "REALRL_WORKER_SECRET_KEY"
_DOMAIN = b"realrl"
_BESIDE = b"/beside"
_OK, _FAILED = b"\x00", b"\x01"
_LINGER_MS = 1000  # long enough for a last reply on a live connection; the bound on every close()
_SLICE_S = 1.0  # of a long wait: if all processes are stopped in it, no more is lost

_log = logging.getLogger(__name__)


def new_context() -> Context:
    """A new context; end it with ``term()`` when all its sockets are closed."""
    return zmq.Context()


@dataclass(frozen=True)
class WorkerKeys:
    """Keys of a worker: the master's public key and the key pair that all workers of the run share (Z85 text)."""

    master_public: bytes
    worker_public: bytes
    worker_secret: bytes

    def environment(self) -> dict[str, str]:
        """Environment variables that hand these keys to a worker process."""
        return {
            _MASTER_PUBLIC: self.master_public.decode(),
            _WORKER_PUBLIC: self.worker_public.decode(),
            _WORKER_SECRET: self.worker_secret.decode(),
        }

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> WorkerKeys:
        """Read the keys back. Raises `UsageError` naming the variable that is missing."""
        for name in (_MASTER_PUBLIC, _WORKER_PUBLIC, _WORKER_SECRET):
            if not environment.get(name):
                raise UsageError(
                    f"the environment variable {name} is not set, so this worker cannot talk to its master",
                    remedy="Workers are started by the launcher; start a run with `realrl run`.",
                )
        return cls(*(environment[name].encode() for name in (_MASTER_PUBLIC, _WORKER_PUBLIC, _WORKER_SECRET)))


@dataclass(frozen=True)
class RunKeys:
    """All keys of one run; stays in the master."""

    master_secret: bytes
    for_workers: WorkerKeys

    @classmethod
    def new(cls) -> RunKeys:
        master_public, master_secret = zmq.curve_keypair()
        return cls(master_secret, WorkerKeys(master_public, *zmq.curve_keypair()))


class ZmqMaster:
    """The master's end of the socket transport.

    Args:
        keys: the run's keys.
        host: interface to bind to; loopback unless the cluster has several nodes.
        port: 0 takes a free one.

    Raises:
        UsageError: the port is taken, or `host` is not an address of this machine.
    """

    def __init__(self, keys: RunKeys, *, host: str = LOOPBACK, port: int = 0) -> None:
        public = keys.for_workers.master_public
        self._server = _GuardedRouter(public, keys.master_secret, keys.for_workers.worker_public, host, port)
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
        self._beside: zmq.Socket[bytes] | None = None
        self._beside_lock = threading.Lock()
        self._is_closed = False
        self._timeout_ms = -1

    def receive(self, timeout_s: float) -> Request | None:
        self._timeout_ms = _set_timeout(self._main, timeout_s, self._timeout_ms)
        try:
            return decode_request(self._main.recv())
        except zmq.Again:
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
                self._beside.close(linger=0)
        self._main.close(linger=_LINGER_MS)
        if self._owns_context:
            self._context.term()

    def _connect(self, identity: bytes) -> zmq.Socket[bytes]:
        address, _, keys = self._connection
        return _dealer(self._context, keys, keys.master_public, address, identity)


class ZmqSampleServer:
    """Serves `fetch` to the run's other workers, in its own thread."""

    def __init__(self, fetch: FetchRows, keys: WorkerKeys, *, host: str = LOOPBACK) -> None:
        public, secret = keys.worker_public, keys.worker_secret
        self._server = _GuardedRouter(public, secret, public, host, 0)
        self.address = self._server.address
        self._fetch = fetch
        self._thread = threading.Thread(target=self._serve, name="samples", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.close(socket_owner=self._thread)

    def _serve(self) -> None:
        socket = self._server.socket
        try:
            while True:
                identity, *request = socket.recv_multipart()
                socket.send_multipart((identity, *self._answer(request[-1])), copy=False)
        except zmq.ContextTerminated:
            _log.debug("sample server at %s stopped", self.address)
        finally:
            socket.close(linger=0)

    def _answer(self, data: bytes) -> tuple[bytes, bytes]:
        try:
            pull = decode_pull(data)
            return _OK, self._fetch(pull.key, pull.ids)
        except Exception as error:  # noqa: BLE001 - the puller must hear of it, or it would wait in vain
            _log.warning("cannot serve rows", exc_info=True)
            return _FAILED, encode(PullFailed(type(error).__name__, str(error)))


class ZmqSampleClient:
    """Pulls rows from sample servers; one connection per address, kept open. Safe from any thread."""

    def __init__(self, keys: WorkerKeys, *, timeout_s: float = 60.0) -> None:
        self._context = new_context()
        self._keys = keys
        self._timeout_s = timeout_s
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._lock = threading.Lock()

    def pull(self, address: str, key: str, ids: Sequence[str]) -> bytes:
        what = f"rows of {key!r} of samples {describe_ids(ids)} from {address}"
        request = encode(PullRows(key, tuple(ids)))
        with self._lock:
            socket = self._sockets.get(address)
            if socket is None:
                socket = _dealer(self._context, self._keys, self._keys.worker_public, address, None)
                self._sockets[address] = socket
            socket.send(request)
            left_s = self._timeout_s
            while not socket.poll(round(min(left_s, _SLICE_S) * 1000)):
                left_s -= _SLICE_S
                if left_s > 0:
                    continue
                # A late answer must not be taken for the next one's.
                self._sockets.pop(address).close(linger=0)
                raise TransportError(
                    f"cannot pull {what}: no answer within {self._timeout_s:g} s",
                    remedy="The worker that holds them may have died; its log tells.",
                )
            status, payload = socket.recv_multipart()
        if status == _OK:
            return payload
        failure = decode_pull_failure(payload)
        raise TransportError(f"cannot pull {what}: {failure.error}: {failure.message}")

    def close(self) -> None:
        with self._lock:
            for socket in self._sockets.values():
                socket.close(linger=0)
            self._sockets.clear()
            self._context.term()


class _GuardedRouter:
    """A bound ROUTER that admits clients with one public key only; owns its context and the gate's thread."""

    def __init__(self, public: bytes, secret: bytes, allowed: bytes, host: str, port: int) -> None:
        self._context = new_context()
        gate: zmq.Socket[bytes] = self._context.socket(zmq.REP)
        gate.bind("inproc://zeromq.zap.01")  # must be there before the first client shakes hands
        self._gate = threading.Thread(target=_guard, args=(gate, z85.decode(allowed)), name="gate", daemon=True)
        self._gate.start()
        self.socket: zmq.Socket[bytes] = self._context.socket(zmq.ROUTER)
        self.socket.curve_server = True
        self.socket.curve_publickey = public
        self.socket.curve_secretkey = secret
        self.socket.zap_domain = _DOMAIN
        self.socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without a gate no client gets in
        self.socket.router_mandatory = True
        self.socket.router_handover = True  # a worker that reconnects takes its old place
        _prepare(self.socket)
        try:
            self.socket.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            self.close()
            raise _bind_error(host, port, error) from error
        self.address = bytes(self.socket.getsockopt(zmq.LAST_ENDPOINT)).decode().rstrip("\x00")

    def close(self, *, socket_owner: threading.Thread | None = None) -> None:
        """Close; with `socket_owner` that thread closes the socket when the context ends under it."""
        if socket_owner is None:
            self.socket.close(linger=_LINGER_MS)
        self._context.term()
        self._gate.join()
        if socket_owner is not None:
            socket_owner.join()


def _guard(gate: zmq.Socket[bytes], allowed: bytes) -> None:
    """Answer the library's authentication requests (ZeroMQ RFC 27) until the context ends."""
    try:
        while True:
            version, number, _domain, address, _identity, mechanism, *credentials = gate.recv_multipart()
            admitted = mechanism == b"CURVE" and credentials == [allowed]
            if not admitted:
                _log.warning("refused a connection from %s: it does not hold this run's key", address.decode())
            status = (b"200", b"OK") if admitted else (b"400", b"not a member of this run")
            gate.send_multipart((version, number, *status, b"", b""))
    except zmq.ContextTerminated:
        _log.debug("gate closed")
    finally:
        gate.close(linger=0)


def _dealer(
    context: Context, keys: WorkerKeys, server: bytes, address: str, identity: bytes | None
) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.DEALER)
    if identity is not None:
        socket.identity = identity
    socket.curve_serverkey = server
    socket.curve_publickey = keys.worker_public
    socket.curve_secretkey = keys.worker_secret
    _prepare(socket)
    socket.connect(address)
    return socket


def _prepare(socket: zmq.Socket[bytes]) -> None:
    """Set options. Queues are unlimited: the scheduler bounds what is in flight, and a send must never block."""
    socket.sndhwm = 0
    socket.rcvhwm = 0
    socket.tcp_keepalive = 1
    socket.linger = _LINGER_MS


def _set_timeout(socket: zmq.Socket[bytes], timeout_s: float, current_ms: int) -> int:
    timeout_ms = max(0, round(timeout_s * 1000))
    if timeout_ms != current_ms:
        socket.rcvtimeo = timeout_ms
    return timeout_ms


def _bind_error(host: str, port: int, error: zmq.ZMQError) -> UsageError:
    if error.errno == zmq.EADDRINUSE:
        return UsageError(
            f"port {port} on {host} is taken by another program",
            remedy=f"End that program (`ss -ltnp` lists it), choose another port than {port}, or leave the port out: "
            "a free one is found.",
        )
    return UsageError(
        f"cannot listen on {host}{f' port {port}' * (port > 0)}: {error.strerror}",
        remedy="The host must be an address of this machine; without one, loopback is used.",
    )
