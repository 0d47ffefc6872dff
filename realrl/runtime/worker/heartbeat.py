"""A thread beside the computation that reports the worker's activity to the master at a fixed interval."""

from __future__ import annotations

import threading
from collections.abc import Callable

from realrl.sched.messages import Heartbeat, Reply

HEARTBEAT_INTERVAL_S = 1.0


class HeartbeatThread:
    """Sends `current()` through `send` until closed, the first heartbeat at once.

    Args:
        current: makes the heartbeat; must not block.
        send: thread-safe send of the worker's transport.
        interval_s: seconds between two heartbeats.
    """

    def __init__(
        self,
        current: Callable[[], Heartbeat],
        send: Callable[[Reply], None],
        *,
        interval_s: float = HEARTBEAT_INTERVAL_S,
    ) -> None:
        self._current = current
        self._send = send
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread; nothing is sent after this returns."""
        self._stopped.set()
        self._thread.join()

    def _beat(self) -> None:
        while not self._stopped.is_set():
            self._send(self._current())
            self._stopped.wait(self._interval_s)
