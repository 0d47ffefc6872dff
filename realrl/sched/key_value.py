"""The key-value store through which the ranks of a run meet: requests and the machine that answers them.

    client ──request──► KeyValues.handle ──► (client, answer), ...
    clock  ────────────► KeyValues.expire ─► (client, refusal), ...

Invariants:

- Every request gets one answer. A `WaitFor` is parked until all of its keys exist or its time is up; the request that
  makes the last key releases all that wait for it.
- Keys, values and waits together never take more than `Limits.total_bytes`. A request beyond a limit changes nothing
  and is refused with a message that names the limit.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import msgspec

Client = TypeVar("Client", bound=Hashable)


class SetKeys(msgspec.Struct, frozen=True, tag=True):
    """Give the i-th key the i-th value."""

    keys: tuple[str, ...]
    values: tuple[bytes, ...]


class WaitFor(msgspec.Struct, frozen=True, tag=True):
    """Wait until all keys exist, for at most `timeout_s` seconds; answered with their values if `with_values`."""

    keys: tuple[str, ...]
    timeout_s: float
    with_values: bool = False


class AddTo(msgspec.Struct, frozen=True, tag=True):
    """Add to the whole number under a key, 0 if it is new; answered with the sum, which is stored as decimal text."""

    key: str
    amount: int


class AppendTo(msgspec.Struct, frozen=True, tag=True):
    """Put bytes behind the value of a key, which is empty if the key is new."""

    key: str
    value: bytes


class CompareSet(msgspec.Struct, frozen=True, tag=True):
    """Set a key to `desired` if it holds `expected`, or if it is new and `expected` is empty.

    Answered with the value that the key holds then, or with `expected` if there is still no such key.
    """

    key: str
    expected: bytes
    desired: bytes


class CountKeys(msgspec.Struct, frozen=True, tag=True):
    """Count the keys that exist: those of `keys`, or all of the store if it is None."""

    keys: tuple[str, ...] | None = None


class DeleteKey(msgspec.Struct, frozen=True, tag=True):
    """Remove a key; answered with 1, or 0 if there was none."""

    key: str


KeyValueRequest = SetKeys | WaitFor | AddTo | AppendTo | CompareSet | CountKeys | DeleteKey


class KeyValueAnswer(msgspec.Struct, frozen=True, tag=True):
    """Answer to one request: values or a number, or else why it was refused."""

    values: tuple[bytes, ...] = ()
    number: int = 0
    refusal: str = ""


class KeyValueClient(Protocol):
    """A rank's access to the key-value store of its run, safe from any thread."""

    @property
    def is_local(self) -> bool:
        """True if all ranks are on this machine."""

    def ask(self, request: KeyValueRequest) -> KeyValueAnswer:
        """Wait for the answer to a request. Raises `TransportError` if it was refused, or none came in time."""


@dataclass(frozen=True)
class Limits:
    """Sizes in bytes: one key, one value, and everything that the store holds."""

    key_bytes: int = 4 << 10
    value_bytes: int = 64 << 20  # what a rank of a group of n tells of itself under gloo: about 150 n bytes
    total_bytes: int = 1 << 30


_OVERHEAD_BYTES = 256  # of one key, there or waited for: about what Python's objects take
_SHOWN_KEYS = 3


@dataclass
class _Wait:
    """A parked request, and how many of its keys are still missing."""

    request: WaitFor
    deadline_s: float
    n_missing: int


class _Refused(Exception):
    """A request cannot be answered as asked."""


class KeyValues(Generic[Client]):
    """Holds the keys and the parked waits of one run; a client has one request under way at a time.

    Args:
        limits: sizes beyond which requests are refused.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._data: dict[str, bytes] = {}
        self._parked: dict[Client, _Wait] = {}
        self._waiting: dict[str, dict[Client, None]] = {}  # key -> clients that wait for it, in the order they came
        self._used_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Size of everything held, which `Limits.total_bytes` bounds."""
        return self._used_bytes

    @property
    def next_deadline_s(self) -> float | None:
        """Time at which `expire` has something to do; None while nobody waits."""
        return min((wait.deadline_s for wait in self._parked.values()), default=None)

    def handle(self, client: Client, request: KeyValueRequest, *, now_s: float) -> list[tuple[Client, KeyValueAnswer]]:
        """Perform a request; returns the answers that are due now: to it, to waits that it releases, or none."""
        try:
            if isinstance(request, WaitFor):
                return self._wait(client, request, now_s)
            answer, made = self._perform(request)
        except _Refused as refused:
            return [(client, KeyValueAnswer(refusal=str(refused)))]
        return [(client, answer), *self._release(made)]

    def expire(self, now_s: float) -> list[tuple[Client, KeyValueAnswer]]:
        """Refuse the waits whose time is up."""
        late = [client for client, wait in self._parked.items() if wait.deadline_s <= now_s]
        return [(client, KeyValueAnswer(refusal=self._too_late(self._unpark(client)))) for client in late]

    def _perform(self, request: SetKeys | AddTo | AppendTo | CompareSet | CountKeys | DeleteKey) -> _Performed:
        match request:
            case SetKeys(keys, values):
                if len(keys) != len(values):
                    raise _Refused(f"{len(keys)} keys cannot be set to {len(values)} values")
                return KeyValueAnswer(), self._put(dict(zip(keys, values, strict=True)))
            case AddTo(key, amount):
                total = self._number(key) + amount
                return KeyValueAnswer(number=total), self._put({key: b"%d" % total})
            case AppendTo(key, value):
                return KeyValueAnswer(), self._put({key: self._data.get(key, b"") + value})
            case CompareSet(key, expected, desired):
                if expected == self._data.get(key, b""):
                    return KeyValueAnswer((desired,)), self._put({key: desired})
                return KeyValueAnswer((self._data.get(key, expected),)), ()
            case CountKeys(keys):
                return KeyValueAnswer(
                    number=len(self._data) if keys is None else sum(map(self._data.__contains__, keys))
                ), ()
            case DeleteKey(key):
                return KeyValueAnswer(number=int(self._delete(key))), ()

    def _delete(self, key: str) -> bool:
        if key not in self._data:
            return False
        self._used_bytes -= _size(key, self._data.pop(key))
        for client in self._waiting.get(key, ()):
            self._parked[client].n_missing += 1
        return True

    def _put(self, items: dict[str, bytes]) -> Iterable[str]:
        """Store values; returns the keys that are new.

        Raises:
            _Refused: a key, a value or the whole would be too large; nothing is stored.
        """
        limits = self._limits
        for key, value in items.items():
            self._check_key(key)
            if len(value) > limits.value_bytes:
                raise _Refused(f"the value of {_shown(key)} has {len(value)} bytes, the limit is {limits.value_bytes}")
        made = [key for key in items if key not in self._data]
        more = sum(_size(key, value) for key, value in items.items())
        less = sum(_size(key, self._data[key]) for key in items if key in self._data)
        self._take(more - less, f"the value of {_shown(next(iter(items), ''))}")
        self._data.update(items)
        return made

    def _wait(self, client: Client, request: WaitFor, now_s: float) -> list[tuple[Client, KeyValueAnswer]]:
        keys = set(request.keys)
        n_missing = sum(key not in self._data for key in keys)
        if n_missing == 0:
            return [(client, self._values_of(request))]
        for key in keys:
            self._check_key(key)
        if client in self._parked:
            raise _Refused("a client that waits has sent another wait")
        self._take(_wait_size(request), f"a wait for {_shown(*request.keys)}")
        self._parked[client] = _Wait(request, now_s + request.timeout_s, n_missing)
        for key in keys:
            self._waiting.setdefault(key, {})[client] = None
        return []

    def _release(self, made: Iterable[str]) -> list[tuple[Client, KeyValueAnswer]]:
        answers = []
        for key in made:
            for client in list(self._waiting.get(key, ())):
                wait = self._parked[client]
                wait.n_missing -= 1
                if wait.n_missing == 0:
                    answers.append((client, self._values_of(self._unpark(client))))
        return answers

    def _unpark(self, client: Client) -> WaitFor:
        request = self._parked.pop(client).request
        self._used_bytes -= _wait_size(request)
        for key in set(request.keys):
            del self._waiting[key][client]
            if not self._waiting[key]:
                del self._waiting[key]
        return request

    def _values_of(self, request: WaitFor) -> KeyValueAnswer:
        return KeyValueAnswer(tuple(self._data[key] for key in request.keys) if request.with_values else ())

    def _number(self, key: str) -> int:
        text = self._data.get(key, b"0")
        try:
            return int(text)
        except ValueError:
            raise _Refused(f"{_shown(key)} holds {text[:40]!r}, and nothing can be added to it") from None

    def _check_key(self, key: str) -> None:
        if len(key.encode()) > self._limits.key_bytes:
            raise _Refused(f"the key {_shown(key)} is longer than {self._limits.key_bytes} bytes")

    def _take(self, size_bytes: int, what: str) -> None:
        if size_bytes > 0 and self._used_bytes + size_bytes > self._limits.total_bytes:
            raise _Refused(f"{what} does not fit: the store holds {self._limits.total_bytes} bytes at most")
        self._used_bytes += size_bytes

    def _too_late(self, request: WaitFor) -> str:
        missing = [key for key in request.keys if key not in self._data]
        return f"no other worker has set {_shown(*missing)} within {request.timeout_s:g} s"


_Performed = tuple[KeyValueAnswer, Iterable[str]]


def _size(key: str, value: bytes) -> int:
    return len(key) + len(value) + _OVERHEAD_BYTES


def _wait_size(request: WaitFor) -> int:
    return sum(len(key) + _OVERHEAD_BYTES for key in request.keys)


def _shown(*keys: str) -> str:
    shown = ", ".join(repr(key if len(key) <= 80 else f"{key[:80]}...") for key in keys[:_SHOWN_KEYS])
    return shown if len(keys) <= _SHOWN_KEYS else f"{shown} and {len(keys) - _SHOWN_KEYS} more keys"
