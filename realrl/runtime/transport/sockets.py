"""Sockets of the transport: keys of a run, a bound socket that admits their holders only, connections to one.

Keys are made for one run. The master's public key proves the master to a worker, the worker key proves a worker to the
master and to other workers. Without the keys a process can neither send, nor read, nor pose as the master.
"""

from __future__ import annotations

import hmac
import logging
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq
from zmq.utils import z85

from realrl.errors import TransportError, UsageError

LOOPBACK = "tcp://127.0.0.1:*"
LINGER_MS = 1000  # long enough for a last reply on a live connection; the bound on every close()
Context = zmq.Context[zmq.Socket[bytes]]

_DOMAIN = b"realrl"
_MAX_RECEIVED_BYTES = 1 << 30  # by a server, from a client that it need not know yet

_BROKEN = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

_log = logging.getLogger(__name__)


def new_context() -> Context:
    """A new context; end it with ``term()`` when all its sockets are closed."""
    return zmq.Context()


class WorkerKeys(msgspec.Struct, frozen=True):
    """Keys of a worker: the master's public key and the key pair that all workers of the run share (Z85 text)."""

    master_public: bytes
    worker_public: bytes
    worker_secret: bytes


class Admission(msgspec.Struct, frozen=True):
    """Addresses and keys that admit a worker to its run; its launcher hands it over where no other user can read.

    Attributes:
        master: address of the master.
        key_values: address of the key-value store.
        host: address of the worker's machine, on which it serves other machines; "": it serves beside the master.
        lease_end_s: time on the clock of leases at which the worker ends, unless its lifeline tells a later one; or 0.
        heartbeat_s: seconds between two heartbeats.
    """

    master: str
    key_values: str
    keys: WorkerKeys
    host: str = ""
    lease_end_s: float = 0.0
    heartbeat_s: float = 1.0


@dataclass(frozen=True)
class RunKeys:
    """All keys of one run; stays in the master."""

    master_secret: bytes
    for_workers: WorkerKeys

    @classmethod
    def new(cls) -> RunKeys:
        master_public, master_secret = zmq.curve_keypair()
        return cls(master_secret, WorkerKeys(master_public, *zmq.curve_keypair()))

    @classmethod
    def derived(cls, key: bytes, attempt: str) -> RunKeys:
        """Derive the keys of one attempt from the key of the run: those of another attempt are of no use in it."""
        master_public, master_secret = derived_pair(key, f"master of {attempt}")
        return cls(master_secret, WorkerKeys(master_public, *derived_pair(key, f"workers of {attempt}")))


def derived_pair(key: bytes, purpose: str) -> tuple[bytes, bytes]:
    """Derive a CURVE key pair (public, secret; Z85 text) from a key: HMAC-SHA256 of the purpose is the secret."""
    secret = z85.encode(hmac.digest(key, f"realrl {purpose}".encode(), "sha256"))
    return zmq.curve_public(secret), secret


def host_of(address: str) -> str:
    """Return the host of ``tcp://HOST:PORT``; "" for another medium."""
    medium, _, place = address.partition("://")
    return place.rpartition(":")[0] if medium == "tcp" else ""


def is_between_machines(address: str) -> bool:
    """Return True if a connection to this address may leave the machine."""
    host = host_of(address)
    return bool(host) and not host.startswith("127.")


def endpoint_beside(address: str, name: str) -> str:
    """An endpoint for another server of the machine that listens at `address`: a file there, or a free port."""
    medium, _, place = address.partition("://")
    return f"ipc://{Path(place).parent / name}" if medium == "ipc" else f"tcp://{place.rpartition(':')[0]}:*"


class GuardedRouter:
    """A bound ROUTER that admits clients with one public key only; owns its context and the gate's thread.

    Args:
        public, secret: the server's key pair.
        allowed: the clients' public key.
        endpoint: where to listen.
        listening: descriptor of a TCP socket that listens there already, of which this takes a copy.
    """

    def __init__(self, public: bytes, secret: bytes, allowed: bytes, endpoint: str, *, listening: int = -1) -> None:
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
        self.socket.maxmsgsize = _MAX_RECEIVED_BYTES
        self.socket.router_mandatory = True
        self.socket.router_handover = True  # a worker that reconnects takes its old place
        _prepare(self.socket)
        if listening >= 0:
            self.socket.setsockopt(zmq.USE_FD, os.dup(listening))
        try:
            self.socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise _bind_error(endpoint, error) from error
        self.address = bytes(self.socket.getsockopt(zmq.LAST_ENDPOINT)).decode().rstrip("\x00")

    @classmethod
    def of_master(cls, keys: RunKeys, endpoint: str) -> GuardedRouter:
        """Make a socket of the master, for all workers."""
        return cls(keys.for_workers.master_public, keys.master_secret, keys.for_workers.worker_public, endpoint)

    def answer(self, client: bytes, *frames: bytes) -> None:
        """Send to a client; one that has left needs no answer."""
        try:
            self.socket.send_multipart((client, *frames), copy=False)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            _log.info("a worker left before %s answered it", self.address)

    def close(self, *, socket_owner: threading.Thread | None = None) -> None:
        """Close; with `socket_owner` that thread closes the socket when the context ends under it."""
        if socket_owner is None:
            self.socket.close(linger=LINGER_MS)
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


def dealer(
    context: Context,
    keys: WorkerKeys,
    server: bytes,
    identity: bytes | None,
    *,
    options: Mapping[int, int] = {},
) -> zmq.Socket[bytes]:
    """Make a socket for a server of the run. The caller connects it, and listens to its events before that if at all.

    Args:
        server: the server's public key.
        identity: name of this connection at the server; None lets the server choose one.
        options: further options of the socket.
    """
    socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    if identity is not None:
        socket.identity = identity
    socket.curve_serverkey = server
    socket.curve_publickey = keys.worker_public
    socket.curve_secretkey = keys.worker_secret
    _prepare(socket)
    for option, value in options.items():
        socket.setsockopt(option, value)
    return socket


class ConnectionBrokenError(TransportError):
    """The connection to another machine broke, with what was under way."""


class Connection:
    """A socket to a server that may be on another machine, and whether its connection has broken.

    Between machines a connection can break while both ends live, and what was under way is lost then. So it is not
    made again: both ends would wait for each other.
    """

    def __init__(self, context: Context, keys: WorkerKeys, server: bytes, address: str, identity: bytes | None) -> None:
        is_far = is_between_machines(address)
        options: dict[int, int] = {zmq.RECONNECT_IVL: -1} if is_far else {}
        self.socket = dealer(context, keys, server, identity, options=options)
        # before it connects: a refusal that comes at once would be missed, and then waited for
        self._monitor = self.socket.get_monitor_socket(_BROKEN) if is_far else None
        self.socket.connect(address)
        self._is_broken = False

    def is_broken(self) -> bool:
        """True if the connection was there and is not any more, or never came to be."""
        if self._monitor is not None and not self._is_broken:
            self._is_broken = bool(self._monitor.poll(0))
        return self._is_broken

    def send(self, data: bytes) -> None:
        """Send; a connection that is gone for good would let the caller wait for ever.

        Raises:
            ConnectionBrokenError: it is.
        """
        try:
            self.socket.send(data, 0 if self._monitor is None else zmq.NOBLOCK)
        except zmq.Again as error:  # queues are unlimited: there is none any more
            self._is_broken = True
            raise ConnectionBrokenError("the connection broke") from error

    def close(self, linger_ms: int) -> None:
        if self._monitor is not None:
            self.socket.disable_monitor()
            self._monitor.close(linger=0)
        self.socket.close(linger=linger_ms)


def _prepare(socket: zmq.Socket[bytes]) -> None:
    """Set options. Queues are unlimited: the scheduler bounds what is in flight, and a send must never block."""
    socket.sndhwm = 0
    socket.rcvhwm = 0
    socket.tcp_keepalive = 1
    socket.linger = LINGER_MS


def _bind_error(endpoint: str, error: zmq.ZMQError) -> UsageError:
    host, _, port = endpoint.partition("://")[2].rpartition(":")
    if error.errno == zmq.EADDRINUSE:
        return UsageError(
            f"port {port} on {host} is taken by another program",
            remedy=f"End that program (`ss -ltnp` lists it), choose another port than {port}, or leave the port out: "
            "a free one is found.",
        )
    return UsageError(
        f"cannot listen on {endpoint}: {error.strerror}",
        remedy="A host must be an address of this machine, and a socket file's folder must exist.",
    )
