"""A thread beside the computation that reports the worker's activity to the master at a fixed interval."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from realrl.sched.messages import Heartbeat, Reply

HEARTBEAT_INTERVAL_S = 1.0
_MOST_PER_S = 100.0  # heartbeats of all workers together, each of which costs the master some 40 µs
_PER_LIMIT = 5  # heartbeats within the silence after which a worker counts as lost


def heartbeat_interval_s(n_workers: int, silence_limit_s: float) -> float:
    """Return the seconds between two heartbeats of a worker: 1, and more where many workers beat to one master.

    Args:
        silence_limit_s: seconds of silence after which a worker counts as lost.
    """
    return max(HEARTBEAT_INTERVAL_S, min(n_workers / _MOST_PER_S, silence_limit_s / _PER_LIMIT))


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
