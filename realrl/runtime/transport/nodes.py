"""The sockets between the master and the agents of its machines: a ROUTER at the master, a DEALER at each agent.

Both ends derive their keys from the key of the run, so an agent needs an address and that key, and nothing else.
Agents connect again as long as they live: a master that is started again listens on the same TCP socket.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import time

import zmq
from zmq.utils.monitor import parse_monitor_message

from realrl.errors import TransportError
from realrl.runtime.transport.codec import decode_from_agent, decode_to_agent, encode
from realrl.runtime.transport.sockets import Context, GuardedRouter, WorkerKeys, dealer, derived_pair, new_context
from realrl.sched.nodes.messages import FromAgent, ToAgent

_MASTER, _AGENTS = "master, for agents", "agents"
_LINGER_MS = 300  # for a last word
_REFUSALS = 3  # broken handshakes in a row that prove another key
_AT_ONCE_S = 5.0  # a handshake that takes longer was not refused: nobody answered
_LOG_AGAIN_S = 60.0
_LOOK_AGAIN_S = 0.1  # for strangers
_PROBE_S = 0.3  # a machine that is there refuses at once
_FAILED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_EVENTS = _FAILED | zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED

_log = logging.getLogger(__name__)


class NodeServer:
    """The master's end. Used by one thread.

    Args:
        key: key of the run.
        endpoint: where agents find it, ``tcp://HOST:PORT``.
        listening: descriptor of the socket that listens there.
    """

    def __init__(self, key: bytes, endpoint: str, listening: int) -> None:
        agents_public, _ = derived_pair(key, _AGENTS)
        self._server = GuardedRouter(*derived_pair(key, _MASTER), agents_public, endpoint, listening=listening)
        self._monitor = self._server.socket.get_monitor_socket(_FAILED)
        self._endpoint = endpoint
        self._logged_s = -_LOG_AGAIN_S
        self._looked_s = 0.0

    def receive(self, timeout_s: float) -> tuple[bytes, FromAgent] | None:
        """Return the next message and its agent, or None when none arrives in time; what is malformed is logged."""
        if time.monotonic() - self._looked_s >= _LOOK_AGAIN_S:
            self._looked_s = time.monotonic()
            self._log_strangers()
        if not self._server.socket.poll(round(timeout_s * 1000)):
            return None
        agent, *frames = self._server.socket.recv_multipart()
        try:
            return agent, decode_from_agent(frames[-1])
        except TransportError as error:
            _log.warning("ignored a message to %s: %s", self._endpoint, error)
            return None

    def send(self, agent: bytes, message: ToAgent) -> None:
        """Send to an agent; one that has left needs no answer."""
        self._server.answer(agent, encode(message))

    def close(self) -> None:
        """Release everything within about a second. The listening socket stays with whoever made it."""
        self._server.socket.disable_monitor()
        self._monitor.close(linger=0)
        self._server.close()

    def _log_strangers(self) -> None:
        """Log that a connection failed for want of the key: one line a minute, for it may try again all the time."""
        is_new = False
        while self._monitor.poll(0):
            self._monitor.recv_multipart()
            is_new = True
        if is_new and time.monotonic() - self._logged_s >= _LOG_AGAIN_S:
            self._logged_s = time.monotonic()
            _log.warning("refused a connection to %s: its other end does not hold this run's key", self._endpoint)


class NodeClient:
    """An agent's end. Used by one thread.

    Args:
        key: key of the run.
        place: ``HOST:PORT`` of the master.
        context: share this context (see `new_context`), so that one process can play many agents; it stays open.
    """

    def __init__(self, key: bytes, place: str, *, context: Context | None = None) -> None:
        self._owns_context = context is None
        self._context = context or new_context()
        keys = WorkerKeys(derived_pair(key, _MASTER)[0], *derived_pair(key, _AGENTS))
        identity = secrets.token_hex(8).encode()
        # What nobody takes now is dropped: it would be out of date.
        options: dict[int, int] = {zmq.IMMEDIATE: 1}
        self._socket = dealer(self._context, keys, keys.master_public, identity, options=options)
        self._monitor = self._socket.get_monitor_socket(_EVENTS)
        self._socket.connect(f"tcp://{place}")
        self._host, _, self._port = place.rpartition(":")
        self._n_refusals = 0
        self._connected_s: float | None = None
        self._is_connected = False

    def receive(self, timeout_s: float) -> ToAgent | None:
        """Return the next message, or None when none arrives in time. Raises `TransportError` on garbage."""
        if not self._socket.poll(round(timeout_s * 1000)):
            return None
        return decode_to_agent(self._socket.recv())

    def send(self, message: FromAgent) -> None:
        """Send to the master; without a connection the message is dropped."""
        with contextlib.suppress(zmq.Again):
            self._socket.send(encode(message), zmq.NOBLOCK)

    def is_refused(self) -> bool:
        """True if the other end does not accept the key."""
        self._take_events()
        return self._n_refusals >= _REFUSALS

    def is_closed(self) -> bool:
        """True if the master's machine says that nobody listens at its port: not even a `realrl run` without a master.

        Without a connection only: the one that this opens, and closes at once, would be a stranger to a master.
        """
        self._take_events()
        if self._is_connected:
            return False
        try:
            socket.create_connection((self._host, int(self._port)), _PROBE_S).close()
        except OSError as error:
            return isinstance(error, ConnectionRefusedError)
        return False

    def _take_events(self) -> None:
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())["event"]
            self._is_connected = event in (zmq.EVENT_CONNECTED, zmq.EVENT_HANDSHAKE_SUCCEEDED)
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._n_refusals, self._connected_s = 0, None
            elif event == zmq.EVENT_CONNECTED:
                self._connected_s = time.monotonic()
            elif self._connected_s is not None:
                is_at_once = time.monotonic() - self._connected_s < _AT_ONCE_S
                self._n_refusals = self._n_refusals + 1 if is_at_once else 0
                self._connected_s = None

    def close(self) -> None:
        """Release everything; a last word has a moment to go out."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=_LINGER_MS)
        if self._owns_context:
            self._context.term()
