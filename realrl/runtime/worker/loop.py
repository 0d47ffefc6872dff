"""The loop of a worker around its host, for any transport: execute requests, report failures, describe the activity.

    request ──► WorkerLoop.execute ──► host.handle ──► replies
                     ▲                                   Goodbye ends the loop
    heartbeat thread ┘ reads the current request

The host is made on the first request, inside the same protection as the request itself: the failure to import a host
becomes a `WorkerFailed` that the user reads, not a process that vanished.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Protocol

from realrl.engine.peers import lost_peer, needs_peers
from realrl.errors import CallError, Error, TransportError
from realrl.experiment.loading import traceback_of
from realrl.runtime.transport.base import SampleClient
from realrl.sched.messages import (
    Goodbye,
    Heartbeat,
    MoveRows,
    Reply,
    Request,
    RunCall,
    RunHooks,
    SaveCheckpoint,
    Shutdown,
    WorkerFailed,
)
from realrl.sched.worker_state import WorkerPhase, WorkerState, describe

_log = logging.getLogger(__name__)


class Host(Protocol):
    """Content of a worker: executes requests in order and serves rows of its store to other workers."""

    def handle(self, request: Request) -> Sequence[Reply | Future[Reply]]:
        """Execute one request; a reply may come later, while other requests are executed."""

    def fetch(self, keys: Sequence[str], ids: Sequence[str]) -> bytes:
        """Encode rows of `keys`; called from another thread."""


HostFactory = Callable[[int, SampleClient], Host]
"""Factory of a host, called with the worker's rank and the client of its peers' samples."""


class WorkerLoop:
    """Executes one worker's requests; `execute` belongs to one thread, the rest is safe from any.

    Args:
        rank: global rank.
        client: client of the host.
        make_host: function that imports and returns the factory of the host.
        post: thread-safe send of a reply that comes later; None lets `execute` wait for such replies.
    """

    def __init__(
        self,
        rank: int,
        client: SampleClient,
        make_host: Callable[[], HostFactory],
        *,
        post: Callable[[Reply], None] | None = None,
    ) -> None:
        self.rank = rank
        self._post = post
        self._state = WorkerState(rank)
        self._client = client
        self._make_host = make_host
        self._host: Host | None = None

    @property
    def finished(self) -> bool:
        """True if a Goodbye was returned: nothing more will be executed."""
        return self._state.phase is WorkerPhase.CLOSED

    def execute(self, request: Request) -> list[Reply]:
        """Execute one request and return the replies; an exception of the host becomes a `WorkerFailed`.

        Raises:
            InvalidTransitionError: the request is out of sequence.
        """
        begin_s = time.monotonic()
        if not self._state.begin(request, now_s=begin_s):
            return []
        try:
            replies = self._handle(request)
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - user code may raise anything
            _log.exception("request %d (%s) failed", request.seq, describe(request))
            replies = [self._farewell(request) if isinstance(request, Shutdown) else self.failure(request, error)]
        if any(isinstance(reply, WorkerFailed) for reply in replies):
            self._state.fail(now_s=time.monotonic())
        else:
            self._state.finish(now_s=time.monotonic())
        _log.debug("request %d (%s) took %.3f s", request.seq, describe(request), time.monotonic() - begin_s)
        return replies

    def fetch(self, keys: Sequence[str], ids: Sequence[str]) -> bytes:
        """Encoded rows of the host's store. Raises `TransportError` while there is no host yet."""
        if self._host is None:
            raise TransportError(f"worker {self.rank} holds no samples yet", worker=self.rank)
        return self._host.fetch(keys, ids)

    def heartbeat(self) -> Heartbeat:
        """Describe the worker's current activity."""
        return self._state.heartbeat(time.monotonic())

    def failure(self, request: Request, error: BaseException) -> WorkerFailed:
        """Make the message that tells the master why `request` failed.

        A deliberate error explains itself: the message has the traceback of its cause, if any.
        """
        cause = error.__cause__ if isinstance(error, Error) else error
        part = request if isinstance(request, RunCall | RunHooks | MoveRows) else None
        named = error.call if isinstance(error, Error) and isinstance(request, RunCall) else None  # of a pair
        asked = request if isinstance(request, SaveCheckpoint) else part
        return WorkerFailed(
            rank=self.rank,
            seq=request.seq,
            call=named or (None if part is None else part.call),
            step=None if asked is None else asked.step,
            error=type(error).__name__,
            message=_printable(str(error)),
            traceback="" if cause is None else _printable(traceback_of(cause)),
            exit_code=error.exit_code if isinstance(error, Error) else 1,
            sample_ids=error.sample_ids if isinstance(error, CallError) else (),
            needs_peers=needs_peers(error),
            lost_peer=lost_peer(error),
        )

    def _handle(self, request: Request) -> list[Reply]:
        if self._host is None:
            if isinstance(request, Shutdown):
                return [self._farewell(request)]
            self._host = self._make_host()(self.rank, self._client)
        replies: list[Reply] = []
        for reply in self._host.handle(request):
            if not isinstance(reply, Future):
                replies.append(reply)
            elif self._post is None:
                replies.append(reply.result())
            else:
                reply.add_done_callback(partial(self._post_later, request, self._post))
        return replies

    def _post_later(self, request: Request, post: Callable[[Reply], None], reply: Future[Reply]) -> None:
        """Send the late reply to a request, or its failure."""
        error = reply.exception()
        if error is None:
            post(reply.result())
            return
        _log.error("request %d (%s) failed", request.seq, describe(request), exc_info=error)
        post(self.failure(request, error))

    def _farewell(self, request: Shutdown) -> Goodbye:
        return Goodbye(self.rank, request.seq)


def _printable(text: str) -> str:
    """Replace lone surrogates, which no message could carry, by escapes."""
    return text.encode(errors="backslashreplace").decode()
