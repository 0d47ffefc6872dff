"""Work of calls for steps that are not complete: a checkpoint keeps it, and a resumed run does not repeat it.

A call that runs ahead of training has read parameters that no checkpoint holds any more, so its output cannot be made
again. The checkpoint of step i therefore holds the work of every dispatch of a later step that is complete by then: the
rows in its state folder, and here the calls, versions, reports and dropped samples. It waits for dispatches under way
that read parameters older than those of step i; others run again.

Invariants, for a graph whose calls read the same versions in every run:
    - a resumed run loads the same samples, and no call gets a sample that it was done with before;
    - a sample that was dropped is not loaded again, but counts as dropped;
    - the metrics of every step after i are those of the run that was not interrupted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

SURPLUS = ""
"""Instead of the call that dropped a sample: it survived, and no place was left for it."""


class CallRecord(msgspec.Struct, frozen=True):
    """One complete dispatch, with the reports of its ranks.

    Attributes:
        ids: samples of the batch.
        version: version of the parameters that it read, in train_step calls; None for a role without training.
        seconds: duration on the slowest rank.
        metrics: name -> value returned by the call.
        sums: for each set of ranks that share samples: name -> total and count.
        maxima: name -> maximum over all ranks.
        memory_gb: rank -> peak memory.
        bytes_received: bytes of rows fetched, over all ranks.
        realloc_wait_s: seconds that it waited for parameters, on the rank that waited longest.
    """

    call: str
    step: int
    ids: tuple[str, ...]
    version: int | None = None
    seconds: float = 0.0
    metrics: Mapping[str, float] = {}
    sums: tuple[Mapping[str, tuple[float, float]], ...] = ()
    maxima: Mapping[str, float] = {}
    memory_gb: Mapping[int, float] = {}
    bytes_received: int = 0
    realloc_wait_s: float = 0.0


class InFlight(msgspec.Struct, frozen=True):
    """Part of a checkpoint that belongs to the steps after its own.

    Attributes:
        calls: complete dispatches, in the order in which they were completed.
        dropped: sample -> the call that dropped it, or `SURPLUS`.
    """

    calls: tuple[CallRecord, ...] = ()
    dropped: Mapping[str, str] = {}

    @property
    def steps(self) -> frozenset[int]:
        """Steps of the complete dispatches."""
        return frozenset(record.step for record in self.calls)


class FlightLog:
    """Records the work for incomplete steps, and knows the work that was done before the run was resumed.

    Args:
        restored: contents of the checkpoint that the run continues from.
    """

    def __init__(self, restored: InFlight) -> None:
        self._records: dict[int, list[CallRecord]] = {}
        self._dropped: dict[int, dict[str, str]] = {}
        self._done: dict[str, dict[str, int | None]] = {}  # call -> sample that it need not get again -> version
        self._restored_drops = dict(restored.dropped)
        for record in restored.calls:
            self._done.setdefault(record.call, {}).update(dict.fromkeys(record.ids, record.version))
            self.add_call(record)

    def add_call(self, record: CallRecord) -> None:
        """Add a complete dispatch."""
        self._records.setdefault(record.step, []).append(record)

    def add_dropped(self, step: int, call: str, ids: Iterable[str]) -> None:
        """Note samples of `step` that `call` dropped, or that are `SURPLUS`."""
        self._dropped.setdefault(step, {}).update(dict.fromkeys(ids, call))

    def forget(self, step: int) -> None:
        """Forget a complete step."""
        self._records.pop(step, None)
        self._dropped.pop(step, None)

    def after(self, step: int) -> InFlight:
        """Return the records that a checkpoint of `step` must hold."""
        records = [record for later in sorted(self._records) if later > step for record in self._records[later]]
        dropped = [drops for later, drops in sorted(self._dropped.items()) if later > step]
        return InFlight(tuple(records), {i: call for drops in dropped for i, call in drops.items()})

    # ------------------------------------------------------------ before the run was resumed

    def was_dropped(self, sample_id: str) -> bool:
        """Return True if a sample that is to be loaded was dropped before the run was resumed."""
        return sample_id in self._restored_drops

    def take_drops(self, ids: Iterable[str]) -> dict[str, list[str]]:
        """Return call (or `SURPLUS`) -> samples that it dropped before; each sample is returned once."""
        drops: dict[str, list[str]] = {}
        for sample_id in ids:
            drops.setdefault(self._restored_drops.pop(sample_id), []).append(sample_id)
        return drops

    def done_before(self, sample_id: str) -> dict[str, int | None]:
        """Return call -> version that it read, for calls that were done with a sample before the run was resumed."""
        return {call: done[sample_id] for call, done in self._done.items() if sample_id in done}

    def knows(self, call: str) -> bool:
        """Return True if a call was done with samples that `split` has not returned yet."""
        return bool(self._done.get(call))

    def knows_all(self, call: str, ids: Iterable[str]) -> bool:
        """Return True if a call was done with all these samples."""
        return all(sample_id in self._done[call] for sample_id in ids)

    def split(self, call: str, ids: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the samples that a call must still get, and those that it was done with before, each once."""
        done = self._done.get(call)
        if not done:
            return tuple(ids), ()
        known = {sample_id for sample_id in ids if sample_id in done}
        for sample_id in known:
            del done[sample_id]
        return tuple(i for i in ids if i not in known), tuple(i for i in ids if i in known)
