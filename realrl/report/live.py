"""A server for one reader on this machine: the page of runs that go on, with newer figures while it is open.

It listens on loopback, and answers only who knows its key and asks for its own name, so that neither other users nor
pages of other sites (DNS rebinding) read anything. It writes nothing.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import sys
import threading
import time
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from realrl.errors import Error, UsageError
from realrl.report.page import Budget, data_text, render_report, report_data
from realrl.report.run_files import CONFIG, GENERATIONS, METRICS, TRACE, find_runs, read_run

ADDRESS = "127.0.0.1"
LIVE = Budget(numbers=60_000, sample_bytes=300_000, samples=120, bars=6_000, trace_bytes=4_000_000)
_MOST_SHARE = 0.05  # of one core's time that goes to reading
_TIMEOUT_S = 15.0
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Figures:
    """The figures of runs, read anew when their files have changed, and not too often."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths
        self._lock = threading.Lock()
        self._seen: object = None
        self._text = ""
        self._next_s = 0.0

    def page(self) -> str:
        """Return the page. Raises `UsageError` if a run cannot be read."""
        with self._lock:
            return render_report([read_run(path) for path in find_runs(self._paths)], live=True)

    def text(self) -> str:
        """Return the figures as JSON. Raises `UsageError` if a run cannot be read."""
        with self._lock:
            now_s = time.monotonic()
            if self._text and now_s < self._next_s:
                return self._text
            folders = find_runs(self._paths)
            seen = [_state_of(folder) for folder in folders]
            if seen != self._seen:
                begin_s = time.process_time()
                self._text = data_text(report_data([read_run(folder) for folder in folders], LIVE))
                self._seen, self._next_s = seen, now_s + (time.process_time() - begin_s) / _MOST_SHARE
            return self._text


def open_server(paths: Sequence[str], port: int) -> tuple[ThreadingHTTPServer, str]:
    """Return a server of the page about runs, and the page's address.

    Args:
        port: 0 for any.

    Raises:
        UsageError: the port cannot be had.
    """
    key = secrets.token_urlsafe(16)
    figures = Figures(paths)

    class Handler(_Handler):
        def answer(self) -> tuple[HTTPStatus, str, str]:
            own_port = int(server.server_port)
            return _answer(self.path, self.headers.get("Host", ""), own_port, key, figures)

    try:
        server = _Server((ADDRESS, port), Handler)
    except (OSError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"--port {port} cannot be had: {reason}", remedy="Leave it out to take a free one.") from error
    return server, f"http://{ADDRESS}:{server.server_port}/{key}/"


# ---------------------------------------------------------------- parts


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request: socket.socket | tuple[bytes, socket.socket], client_address: object) -> None:
        """Print an error, unless the reader hung up."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    timeout = _TIMEOUT_S
    server_version = "realrl"
    sys_version = ""

    def answer(self) -> tuple[HTTPStatus, str, str]:
        """Return status, type and body of the answer to the request."""
        raise NotImplementedError

    def do_GET(self) -> None:
        self._send(with_body=True)

    def do_HEAD(self) -> None:
        self._send(with_body=False)

    def _send(self, *, with_body: bool) -> None:
        status, kind, text = self.answer()
        body = text.encode(errors="replace")
        self.send_response(status)
        for name, value in {**_HEADERS, "Content-Type": f"{kind}; charset=utf-8", "Content-Length": len(body)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing for a request."""


def _answer(path: str, host: str, port: int, key: str, figures: Figures) -> tuple[HTTPStatus, str, str]:
    if host not in (f"{ADDRESS}:{port}", f"localhost:{port}"):
        return HTTPStatus.FORBIDDEN, "text/plain", "This is another host.\n"
    given, _, name = path.removeprefix("/").partition("/")
    if not hmac.compare_digest(given.encode(), key.encode()) or name not in ("", "data.json"):
        return HTTPStatus.NOT_FOUND, "text/plain", "There is nothing here.\n"
    try:
        if name:
            return HTTPStatus.OK, "application/json", figures.text()
        return HTTPStatus.OK, "text/html", figures.page()
    except Error as error:
        return HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", f"{error.message}\n"


def _state_of(folder: Path) -> list[tuple[str, int, int]]:
    """Return name, size and time of change of the files that figures come from."""
    found = []
    for name in (CONFIG, METRICS, GENERATIONS, TRACE, ".lock"):
        try:
            state = (folder / name).stat()
        except OSError:
            continue
        found.append((f"{folder}/{name}", state.st_size, state.st_mtime_ns))
    return found
