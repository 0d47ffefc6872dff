"""The sockets of agents: what they learn of a master that is gone."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from realrl.runtime.transport.nodes import NodeClient

KEY = bytes(range(32))


def becomes(condition: Callable[[], bool]) -> bool:
    end_s = time.monotonic() + 5.0
    while not condition() and time.monotonic() < end_s:
        time.sleep(0.01)
    return condition()


def test_a_port_is_closed_when_the_last_process_that_listens_is_gone() -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=8)  # as `realrl run` holds it, while no master answers
    host, port = listener.getsockname()
    client = NodeClient(KEY, f"{host}:{port}")
    try:
        assert not client.is_closed()
        listener.close()
        assert becomes(client.is_closed)
        listener = socket.create_server((host, port), backlog=8)
        assert becomes(lambda: not client.is_closed())
    finally:
        client.close()
        listener.close()
