"""A thread beside the computation that reports the worker's activity to the master at a fixed interval."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from realrl.sched.messages import Heartbeat, Reply

HEARTBEAT_INTERVAL_S = 1.0


@contextmanager
def heartbeats(
    current: Callable[[], Heartbeat], send: Callable[[Reply], None], *, interval_s: float = HEARTBEAT_INTERVAL_S
) -> Iterator[None]:
    """Send `current()` through `send` within the block, the first heartbeat at once, and none after it.

    Args:
        current: makes the heartbeat; must not block.
        send: thread-safe send of the worker's transport.
        interval_s: seconds between two heartbeats.
    """
    stopped = threading.Event()

    def beat() -> None:
        while not stopped.is_set():
            send(current())
            stopped.wait(interval_s)

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
