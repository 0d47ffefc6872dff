"""The caller's side of a run in a process of its own: its start, its output, the caller's signals."""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, TextIO

import msgspec

from realrl.errors import RunError
from realrl.python.child import Ended, Opened
from realrl.runtime.processes.lifeline import framed

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_DEFAULTS = (signal.SIG_DFL, signal.default_int_handler)
_LOOK_S = 0.2
_message = msgspec.json.Decoder(Opened | Ended)


class Watcher:
    """Starts a run and waits for its end.

    Output goes straight to the terminal where `sys.stdout` and `sys.stderr` are those of the process. Where something
    else stands in their places, as in a notebook, it is read and written there.

    Args:
        quiet: show no output.
    """

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._received: int | None = None  # the first signal but for Ctrl-C

    def run(self, reference: str, settings: Mapping[str, object] | Sequence[str]) -> Ended:
        """Return how the run ended.

        On the main thread, Ctrl-C, SIGTERM and SIGHUP are passed on to the run, unless the caller handles them. After
        SIGTERM and SIGHUP this process ends too, when the run has.

        Raises:
            RunError: its process cannot be started, or died without a word.
        """
        job = json.dumps([reference, settings]).encode()
        mine, its = socket.socketpair()
        with mine, its:
            process = self._start(its)
            its.close()
            with self._passing_on(process):
                try:
                    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # wait() tells
                        mine.sendall(framed(job))
                    ended, run_dir = self._listen(process, mine)
                finally:
                    if process.poll() is None and sys.exc_info()[0] is not None:
                        process.terminate()  # the run ends in order
                        process.wait()
            exit_code = process.wait()
        if self._received is not None:
            os.kill(os.getpid(), self._received)
        return ended or Ended(exit_code if exit_code >= 0 else 128 - exit_code, run_dir)

    def _start(self, stdin: socket.socket) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", "realrl.python.child"]
        sinks = [self._sink(stream, original) for stream, original in _streams()]
        try:
            return subprocess.Popen(command, stdin=stdin.fileno(), stdout=sinks[0], stderr=sinks[1])
        except OSError as error:
            raise RunError(f"cannot start the process of the run: {error}") from error

    def _sink(self, stream: TextIO | None, original: TextIO | None) -> int | None:
        """Return where output goes, as `subprocess` has it; None inherits."""
        if self._quiet or stream is None:
            return subprocess.DEVNULL
        if stream is original:
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
                stream.fileno()
                return None
        return subprocess.PIPE

    def _listen(self, process: subprocess.Popen[bytes], parent: socket.socket) -> tuple[Ended | None, str]:
        """Show output and take messages, until the process has ended and what it wrote is read."""
        lines = _Lines()
        with selectors.DefaultSelector() as selector:
            selector.register(parent, selectors.EVENT_READ, lines.feed)
            for pipe, name in ((process.stdout, "stdout"), (process.stderr, "stderr")):
                if pipe is not None:
                    selector.register(pipe, selectors.EVENT_READ, _writer(name))
            while selector.get_map():
                is_over = process.poll() is not None
                ready = selector.select(_LOOK_S)
                for key, _ in ready:
                    content = _read(key.fileobj)
                    key.data(content)
                    if not content:
                        selector.unregister(key.fileobj)
                if is_over and not ready:  # a process that user code left behind holds the pipe
                    break
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        return lines.ended, lines.run_dir

    @contextlib.contextmanager
    def _passing_on(self, process: subprocess.Popen[bytes]) -> Iterator[None]:
        """Pass signals on to the run; a terminal that has signalled it too makes no difference."""

        def pass_on(signum: int, frame: FrameType | None) -> None:
            if signum != signal.SIGINT:
                self._received = self._received or signum
            process.send_signal(signum)

        is_main = threading.current_thread() is threading.main_thread()
        handled = [signum for signum in _SIGNALS if is_main and signal.getsignal(signum) in _DEFAULTS]
        before = {signum: signal.signal(signum, pass_on) for signum in handled}
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)


class _Lines:
    """Messages of the run's process, a line each."""

    def __init__(self) -> None:
        self.ended: Ended | None = None
        self.run_dir = ""
        self._rest = b""

    def feed(self, content: bytes) -> None:
        *lines, self._rest = (self._rest + content).split(b"\n")
        for line in lines:
            message = _message.decode(line)
            self.run_dir = message.run_dir or self.run_dir
            if isinstance(message, Ended):
                self.ended = message


def _streams() -> tuple[tuple[TextIO | None, TextIO | None], ...]:
    return (sys.stdout, sys.__stdout__), (sys.stderr, sys.__stderr__)


def _writer(name: str) -> Callable[[bytes], None]:
    """Return a function that writes bytes, as they come, to the stream that `sys` has under a name."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(content: bytes) -> None:
        stream = getattr(sys, name)
        stream.write(decoder.decode(content, final=not content))
        stream.flush()

    return write


def _read(source: Any) -> bytes:
    """Return what is there, or nothing at the end."""
    with contextlib.suppress(ConnectionResetError):  # the process died before it read all
        return os.read(source.fileno(), 65_536)
    return b""
