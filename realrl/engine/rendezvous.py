"""The meeting of the ranks: torch.distributed's store over the run's own key-value store, and proofs of membership."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from realrl.errors import TransportError
from realrl.sched.key_value import (
    AddTo,
    AppendTo,
    CompareSet,
    CountKeys,
    DeleteKey,
    KeyValueAnswer,
    KeyValueClient,
    KeyValueRequest,
    SetKeys,
    WaitFor,
)


class RunStore(dist.Store):
    """A `torch.distributed.Store` over a client of the run's key-value store.

    Collective libraries call it from threads of their own, by the names below, which torch's C++ looks up.
    The process groups made with it hold only its C++ half: whoever makes them keeps this object as long as they live.

    Args:
        client: access to the store.
        timeout_s: limit of every wait; a shorter one that torch asks for holds.

    Raises:
        torch.distributed.DistStoreError: in all methods, if the request was refused or not answered in time.
    """

    def __init__(self, client: KeyValueClient, *, timeout_s: float) -> None:
        super().__init__()
        self._client = client
        self._timeout_s = timeout_s
        self.set_timeout(timedelta(seconds=timeout_s))

    def clone(self) -> RunStore:
        return self  # the client may be used from all threads at once

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(SetKeys((key,), (_encoded(value),)))

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self._ask(SetKeys(tuple(keys), tuple(map(_encoded, values))))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return list(self._ask(WaitFor(tuple(keys), self._limit_s(None), with_values=True)).values)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._ask(WaitFor(tuple(keys), self._limit_s(timeout)))

    def check(self, keys: Sequence[str]) -> bool:
        return self._ask(CountKeys(tuple(keys))).number == len(keys)

    def add(self, key: str, value: int) -> int:
        return self._ask(AddTo(key, value)).number

    def append(self, key: str, value: str | bytes) -> None:
        self._ask(AppendTo(key, _encoded(value)))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self._ask(CompareSet(key, _encoded(expected), _encoded(desired))).values[0]

    def delete_key(self, key: str) -> bool:
        return self._ask(DeleteKey(key)).number == 1

    def num_keys(self) -> int:
        return self._ask(CountKeys()).number

    deleteKey, getNumKeys = delete_key, num_keys  # the names that torch's C++ looks up

    def has_extended_api(self) -> bool:
        return True

    def _limit_s(self, timeout: timedelta | None) -> float:
        """The given limit or else torch's current one of this store, and never more than the run's; 0 means none."""
        asked_s = (self.timeout if timeout is None else timeout).total_seconds()
        return min(asked_s, self._timeout_s) if asked_s > 0 else self._timeout_s

    def _ask(self, request: KeyValueRequest) -> KeyValueAnswer:
        try:
            return self._client.ask(request)
        except TransportError as error:  # torch catches its own kind in some places
            raise dist.DistStoreError(str(error)) from error


def prove_connections(handles: Mapping[frozenset[int], dist.ProcessGroup], *, store: dist.Store, rank: int) -> None:
    """Exchange a proof over every connection of the groups that its other end is the rank that it should be.

    The sockets of groups on CPUs ask for no key: a process that connects to one early enough takes the place of a rank.
    Each rank sends to each other one an HMAC-SHA256 of group, sender and receiver, under a secret that only members of
    the run find in the store. A proof received from one rank is of no use towards another.

    Args:
        handles: members -> group, whose tensors are on the CPU.
        store: the run's store.
        rank: this global rank.

    Raises:
        TransportError: a proof is wrong.
        RuntimeError: a proof did not come within the group's timeout.
    """
    secret = store.compare_set("realrl/secret", "", secrets.token_hex(32))
    for members, handle in handles.items():
        if rank not in members:
            continue
        ranks = sorted(members)
        sent = torch.stack([_proof(secret, ranks, rank, peer) for peer in ranks])
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=handle)
        for peer, proof in zip(ranks, received, strict=True):
            if not torch.equal(proof, _proof(secret, ranks, peer, rank)):
                raise TransportError(
                    f"the connection of worker {rank} to worker {peer} leads to no member of this run",
                    remedy="Another user of this machine may interfere: see the section on security in "
                    "docs/architecture.md.",
                    worker=rank,
                )


def _proof(secret: bytes, ranks: Sequence[int], sender: int, receiver: int) -> torch.Tensor:
    """32 bytes that `sender` can make, and show to `receiver` only."""
    digest = hmac.digest(secret, f"{ranks} {sender} {receiver}".encode(), "sha256")
    return torch.frombuffer(bytearray(digest), dtype=torch.uint8)


def _encoded(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
