"""Protocols of the transport between master and workers, for any medium.

master                              worker
MasterTransport.send  --request-->  WorkerTransport.receive
MasterTransport.receive <--reply--  WorkerTransport.send
                                    SampleServer  <--pull--  SampleClient (another worker)
key-value store     <--request--    KeyValueClient, see `realrl.sched.key_value`
                    --answer-->
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from realrl.errors import TransportError
from realrl.sched.key_value import KeyValueAnswer
from realrl.sched.messages import Reply, Request

FetchRows = Callable[[Sequence[str], Sequence[str]], bytes]
"""``fetch(keys, ids)``: the rows of `keys` of those samples, encoded by the producer."""


class MasterTransport(Protocol):
    """The master's end. Used by one thread."""

    def send(self, rank: int, request: Request) -> None:
        """Queue `request` for worker `rank`. Raises `TransportError` if that worker is not connected."""

    def receive(self, timeout_s: float) -> Reply | None:
        """The next reply of any worker, or None when none arrives in time. Raises `TransportError` on garbage."""

    def close(self) -> None:
        """Release everything within about a second, delivered or not. May be called twice."""


class WorkerTransport(Protocol):
    """A worker's end. `receive` belongs to one thread; `send` is safe from any."""

    def receive(self, timeout_s: float) -> Request | None:
        """The next request, or None when none arrives in time. Raises `TransportError` on garbage."""

    def send(self, reply: Reply) -> None:
        """Queue `reply` for the master. Raises `TransportError` if it cannot be encoded."""

    def close(self) -> None:
        """Release everything within about a second, delivered or not. May be called twice."""


class SampleServer(Protocol):
    """Serves rows of a producer's store, in a thread beside the computation."""

    @property
    def address(self) -> str:
        """Address for `SampleClient.pull`."""

    def close(self) -> None:
        """Stop serving. May be called twice."""


class SampleClient(Protocol):
    """Pulls rows from other workers' stores."""

    def pull(self, address: str, keys: Sequence[str], ids: Sequence[str], *, waits: bool = False) -> bytes:
        """Encoded rows of `keys` and `ids`, as the producer's fetch returns them.

        Args:
            waits: the other worker may still be fetching the rows itself; it answers when it has them.

        Raises:
            TransportError: the producer does not answer, or its fetch raised; names keys, ids and address.
        """

    def close(self) -> None:
        """Drop all connections. May be called twice."""


def accepted(answer: KeyValueAnswer) -> KeyValueAnswer:
    """Return the answer. Raises `TransportError` if it is a refusal."""
    if answer.refusal:
        raise TransportError(answer.refusal)
    return answer


def describe_ids(ids: Sequence[str], limit: int = 4) -> str:
    """The first `limit` sample ids as text, and how many more there are."""
    shown = ", ".join(ids[:limit])
    return shown if len(ids) <= limit else f"{shown} and {len(ids) - limit} more"


def describe_rows(keys: Sequence[str], ids: Sequence[str]) -> str:
    """Keys and samples of a pull as text."""
    return f"rows of {', '.join(map(repr, keys))} of samples {describe_ids(ids)}"
