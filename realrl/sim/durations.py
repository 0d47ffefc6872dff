"""Durations of everything that ranks and master do in a simulated run, as the cluster asks for them.

A duration counts from the moment when all ranks that must meet for the work have come to it. All are in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, cast

from realrl.sched.calls import ScheduledCall
from realrl.sched.messages import HookTime, MoveRows, RunCall


@dataclass(frozen=True)
class SampleSizes:
    """Tokens of one sample.

    Attributes:
        prompt_tokens: one entry per sequence; before generation, one.
        response_tokens: one entry per sequence; () until they are generated, or where a sequence has no prompt.
    """

    prompt_tokens: tuple[int, ...]
    response_tokens: tuple[int, ...] = ()

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        """Tokens of each sequence: prompt and response."""
        if not self.response_tokens:
            return self.prompt_tokens
        return tuple([p + r for p, r in zip(self.prompt_tokens, self.response_tokens, strict=True)])


class Durations(Protocol):
    """Seconds of each part of a run; a mapping is from global ranks."""

    def call(
        self, call: ScheduledCall, requests: Mapping[int, RunCall], sizes: Mapping[str, SampleSizes]
    ) -> Mapping[int, float]:
        """Return the seconds of one dispatch on each rank of the mesh.

        Args:
            requests: rank -> its request.
            sizes: sample -> its tokens, for all samples of the dispatch; those that it generates included.
        """

    def meets(self, call: ScheduledCall) -> tuple[tuple[int, ...], ...]:
        """Return the groups of ranks that begin the computation of a call together; each rank is in one."""

    def hooks(self, call: ScheduledCall, when: HookTime, ranks: Collection[int]) -> Mapping[int, float]:
        """Return the seconds of the hooks on one side of a call, of parameters that are on the device.

        Ahead of a call, they are those until the rank goes on. What it began takes those of the hooks before the call.
        """

    def onload(self, role: str, ranks: Collection[int]) -> Mapping[int, float]:
        """Return the seconds until parameters of a role are back from host memory."""

    def received_bytes(self, call: ScheduledCall, when: HookTime, rank: int) -> int:
        """Return the bytes of parameters that hooks bring to a rank from others."""

    def rows(self, requests: Mapping[int, MoveRows | RunCall], sizes: Mapping[str, SampleSizes]) -> Mapping[int, float]:
        """Return the seconds in which ranks get the rows that they lack, in a part of its own or before a call."""

    def load(self, n_samples: int) -> float:
        """Return the seconds of loading samples of the dataset."""

    def read(self, n_samples: int) -> float:
        """Return the seconds of reading texts and numbers out."""

    def free(self) -> float:
        """Return the seconds of freeing samples."""

    def save(self, rank: int) -> float:
        """Return the seconds in which a rank copies its share of a checkpoint, and does nothing else."""

    def write(self, rank: int) -> float:
        """Return the seconds in which the copy is then written, beside the requests that follow."""

    def start(self) -> float:
        """Return the seconds in which a worker builds groups, models and dataset."""

    def handling(self, n_events: int) -> float:
        """Return the seconds in which the master handles events."""

    def latency(self, rank: int) -> float:
        """Return the seconds of one message between master and worker."""


def meeting_ranks(call: ScheduledCall) -> tuple[tuple[int, ...], ...]:
    """Return the groups of `Durations.meets`.

    They are all ranks of a train_step, each data-parallel replica of another call, and for a role without parameters
    each rank alone.
    """
    if call.hooks.home is None:
        return tuple([(rank,) for rank in call.ranks])
    if call.mfc.is_train:
        return (call.ranks,)
    return tuple([call.allocation.dp_group_members(i) for i in range(call.allocation.strategy.dp)])


def as_slowest(
    seconds: Mapping[int, float], groups: Iterable[Collection[int]], factor: Callable[[int], float]
) -> dict[int, float]:
    """Return the seconds of a call times the largest factor of the ranks that each rank computes with.

    Args:
        groups: ranks that begin together; each is in one.
    """
    found: dict[int, float] = {}
    for group in groups:
        largest = max(map(factor, group))
        found.update({rank: seconds[rank] * largest for rank in group if rank in seconds})
    return found


ChangeOfCalls = Callable[[ScheduledCall, Mapping[int, float]], Mapping[int, float]]
"""``change(call, seconds)`` -> other seconds of a dispatch on each rank."""


class ChangedCalls:
    """Durations with other seconds of calls; everything else is as it was."""

    def __init__(self, durations: Durations, change: ChangeOfCalls) -> None:
        self._durations = durations
        self._change = change

    def __getattr__(self, name: str) -> object:
        return getattr(self._durations, name)

    def call(
        self, call: ScheduledCall, requests: Mapping[int, RunCall], sizes: Mapping[str, SampleSizes]
    ) -> Mapping[int, float]:
        return self._change(call, self._durations.call(call, requests, sizes))


def slowed(durations: Durations, factors: Mapping[int, float]) -> Durations:
    """Return the durations of a cluster on which some ranks compute and copy more slowly.

    Args:
        durations: of the cluster without these ranks.
        factors: rank -> how many times as long it takes. Ranks that compute in one group wait for its slowest.
    """
    return cast(Durations, _Slowed(durations, factors))


class _Slowed(ChangedCalls):
    """Durations with the changes of `slowed`; everything else is as it was."""

    def __init__(self, durations: Durations, factors: Mapping[int, float]) -> None:
        super().__init__(durations, lambda call, seconds: as_slowest(seconds, durations.meets(call), self._factor))
        self._factors = factors

    def rows(self, requests: Mapping[int, MoveRows | RunCall], sizes: Mapping[str, SampleSizes]) -> Mapping[int, float]:
        return self._each(self._durations.rows(requests, sizes))

    def hooks(self, call: ScheduledCall, when: HookTime, ranks: Collection[int]) -> Mapping[int, float]:
        return self._each(self._durations.hooks(call, when, ranks))

    def onload(self, role: str, ranks: Collection[int]) -> Mapping[int, float]:
        return self._each(self._durations.onload(role, ranks))

    def save(self, rank: int) -> float:
        return self._durations.save(rank) * self._factor(rank)

    def _factor(self, rank: int) -> float:
        return self._factors.get(rank, 1.0)

    def _each(self, seconds: Mapping[int, float]) -> dict[int, float]:
        return {rank: s * self._factor(rank) for rank, s in seconds.items()}
