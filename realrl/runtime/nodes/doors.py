"""Free ports that machines open for each other, to show who reaches whom: a word is said to whoever connects."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Sequence

from realrl.runtime.nodes.addresses import parse_place
from realrl.sched.nodes.messages import Door, DoorOpened, Knocked

PATIENCE_S = 3.0  # less than a lease: an agent that knocks does not beat
_MOST_WAITING = 1024
_WORD_BYTES = 32
_IN_PROGRESS = errno.EINPROGRESS
_OTHER_WORD = "another program answers there"


class OpenPort:
    """A port of one address of this machine; a thread of its own says the word.

    Raises:
        OSError: it cannot listen there.
    """

    def __init__(self, address: str) -> None:
        self._listener = socket.create_server((address, 0), backlog=_MOST_WAITING)
        self.door = Door(f"{address}:{self._listener.getsockname()[1]}", secrets.token_hex(_WORD_BYTES // 2))
        self._thread = threading.Thread(target=self._serve, name="door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close the port, and wait for the thread."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._listener.close()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            try:
                visitor, _ = self._listener.accept()
            except OSError:  # closed, or out of descriptors: then nobody is answered any more
                return
            with visitor, contextlib.suppress(OSError):
                visitor.send(self.door.word.encode())  # the buffer of a new connection has room for it


def open_door(address: str) -> tuple[OpenPort | None, DoorOpened]:
    """Open a port; returns it, and what there is to tell."""
    try:
        port = OpenPort(address)
    except OSError as error:
        return None, DoorOpened(None, f"cannot listen on {address}: {os.strerror(error.errno or 0)}")
    return port, DoorOpened(port.door)


def knock(doors: Sequence[Door], *, patience_s: float = PATIENCE_S) -> Knocked:
    """Connect to all doors at once, and listen for their words."""
    seconds, problems = dict[str, float](), dict[str, str]()
    begin_s = time.monotonic()
    with contextlib.ExitStack() as stack, selectors.DefaultSelector() as waiting:
        for door in doors:
            visitor = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            visitor.setblocking(False)
            code = visitor.connect_ex(parse_place(door.place))
            if code not in (0, _IN_PROGRESS):
                problems[door.place] = os.strerror(code)
                continue
            waiting.register(visitor, selectors.EVENT_READ, door)
        while waiting.get_map() and (left_s := begin_s + patience_s - time.monotonic()) > 0:
            for key, _ in waiting.select(left_s):
                assert isinstance(key.fileobj, socket.socket)
                waiting.unregister(key.fileobj)
                problem = _listen(key.fileobj, key.data)
                if problem:
                    problems[key.data.place] = problem
                else:
                    seconds[key.data.place] = time.monotonic() - begin_s
        silent = [key.data.place for key in waiting.get_map().values()]
    return Knocked(seconds, problems | dict.fromkeys(silent, f"no answer within {patience_s:g} s"))


def _listen(visitor: socket.socket, door: Door) -> str:
    """Return what is wrong with a connection on which something came, or which failed; "" if nothing is."""
    try:
        word = visitor.recv(_WORD_BYTES)
    except OSError as error:
        return error.strerror or str(error)
    return "" if word == door.word.encode() else _OTHER_WORD
