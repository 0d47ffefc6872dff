"""The sample buffer: the living samples, the locations of their keys, and their progress through the calls.

It holds ids, lengths, locations and versions, never data. Every sample goes through every call exactly once, and is
freed when the last call is done with it. A dropped sample goes to no further call, and is freed when the calls that
have it at that moment are done. All operations cost time in proportion to the samples that they change.

Where no call drops samples, the n-th loaded sample has place n. Where one does (see `rounds`), a sample gets its place
when no call can drop it any more. A call that drops samples, or precedes one that does, takes them by number, every
other call by place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum
from functools import cache
from itertools import repeat

from realrl.errors import InvalidTransitionError
from realrl.plan.samples.cursor import SampleRef
from realrl.plan.samples.transfer import Arrival, Placement
from realrl.sched.calls import ScheduledCall
from realrl.sched.messages import KeySchema, Per, SampleMeta
from realrl.sched.samples.call_queue import CallQueue, RoundQueue


class SamplePhase(Enum):
    """Progress of one sample through one call."""

    WAITING = "waiting"  # some input does not exist yet
    READY = "ready"
    TAKEN = "taken"
    DONE = "done"


_PHASE_BEFORE = {
    SamplePhase.READY: SamplePhase.WAITING,  # the sample's last missing input arrived
    SamplePhase.TAKEN: SamplePhase.READY,  # the call was dispatched with it
    SamplePhase.DONE: SamplePhase.TAKEN,  # every rank of the call's mesh is done
}


class _Slot:
    """One living sample."""

    __slots__ = ("id", "is_dropped", "is_loaded", "n_missing", "n_taken", "n_unread", "number", "phases",
                 "place", "versions")  # fmt: skip

    def __init__(self, sample_id: str, number: int, place: int | None, n_missing: list[int]) -> None:
        self.id = sample_id
        self.number = number
        self.place = place
        self.is_loaded = False
        self.is_dropped = False
        self.n_missing = n_missing  # by call: inputs that do not exist yet, and calls that may still drop the sample
        self.n_taken = 0  # calls that have it now
        self.n_unread = len(n_missing)  # calls that are not done with the sample
        self.phases = [SamplePhase.WAITING] * len(n_missing)
        self.versions: dict[int, int] = {}  # by call that produced a key: of the parameters that it read


class SampleBuffer:
    """All living samples.

    Args:
        calls: the calls; other methods name a call by its position here.
        step_size: samples of one step.
        n_total: samples of the whole run, where the last step may be smaller than the others; None: whole steps.
    """

    def __init__(self, calls: Sequence[ScheduledCall], step_size: int, n_total: int | None = None) -> None:
        self._calls = tuple(calls)
        self._drops = any(call.mfc.may_drop for call in self._calls)
        self._round_queues = {
            position: RoundQueue(n_seqs=call.mfc.n_seqs, min_n_seqs=call.mfc.min_n_seqs)
            for position, call in enumerate(self._calls)
            if call.feeds_drop
        }
        self._late = [position for position, call in enumerate(self._calls) if not call.feeds_drop]
        self.queues: list[CallQueue | RoundQueue] = [
            self._round_queues.get(position)
            or CallQueue(n_seqs=call.mfc.n_seqs, min_n_seqs=call.mfc.min_n_seqs, step_size=step_size, n_total=n_total)
            for position, call in enumerate(self._calls)
        ]
        # Besides keys, a call waits for dropping calls before it, or for all of them together.
        n_gates = [len(call.gates) if call.feeds_drop else int(self._drops) for call in self._calls]
        self._n_inputs = [len(call.mfc.input_keys) + n for call, n in zip(self._calls, n_gates)]
        self._gated: list[list[int]] = [
            [position for position, call in enumerate(self._calls) if call.feeds_drop and gate.name in call.gates]
            for gate in self._calls
        ]
        self._readers: dict[str, list[int]] = {}
        for position, call in enumerate(self._calls):
            for key in call.mfc.input_keys:
                self._readers.setdefault(key, []).append(position)
        self._n_inputs_of = cache(self._count_inputs)
        self._slots: dict[str, _Slot] = {}
        self._id_at: dict[int, str] = {}  # by place
        self._id_of: dict[int, str] = {}  # by number; only where samples are dropped
        self._placements: dict[str, dict[str, Placement]] = {}
        self._n_rows: dict[str, dict[str, int]] = {}
        self._schemas: dict[str, KeySchema] = {}
        self._n_loaded = 0
        self.grew_ready = False  # whether a batch may have become complete since this was last set to False

    def __len__(self) -> int:
        """Return the number of living samples, those being loaded included."""
        return len(self._slots)

    @property
    def n_loaded(self) -> int:
        """Number of samples ever asked for, which is the number of the next one."""
        return self._n_loaded

    # ------------------------------------------------------------ samples come and go

    def expect(self, refs: Sequence[SampleRef]) -> None:
        """Make room for samples that are being loaded; they are numbered in this order, and make one round.

        Raises:
            InvalidTransitionError: a sample of that id lives already.
        """
        for ref in refs:
            if ref.id in self._slots:
                raise InvalidTransitionError(f"sample '{ref.id}' is loaded a second time while it lives")
            slot = _Slot(ref.id, self._n_loaded, None if self._drops else self._n_loaded, self._n_inputs.copy())
            self._slots[ref.id] = slot
            (self._id_of if self._drops else self._id_at)[slot.number] = ref.id
            self._n_loaded += 1
        for queue in self._round_queues.values():
            queue.open(len(refs))

    def add_loaded(self, rank: int, meta: SampleMeta) -> None:
        """Note that the samples of `meta` were loaded on `rank`."""
        slots = [self._slots[sample_id] for sample_id in meta.ids]
        for slot in slots:
            slot.is_loaded = True
        for position, _ in enumerate(self._calls):
            self._become_ready([slot for slot in slots if slot.n_missing[position] == 0], position)
        self.add_rows(rank, meta)

    def add_rows(self, rank: int, meta: SampleMeta) -> None:
        """Note rows that `rank` loaded or produced. Several ranks may report the same rows."""
        ids, fresh = meta.ids, Placement(frozenset((rank,)))
        new_keys: list[str] = []
        for key, seqlens in meta.seqlens.items():
            self._schemas[key] = meta.schemas[key]
            placement_of = self._placements.setdefault(key, {})
            if not placement_of.keys().isdisjoint(ids):
                self._add_known_rows(rank, meta, key)
                continue
            placement_of.update(dict.fromkeys(ids, fresh))
            self._n_rows.setdefault(key, {}).update(zip(ids, map(sum, seqlens), strict=True))
            new_keys.append(key)
        self._add_inputs([self._slots[sample_id] for sample_id in ids], new_keys)

    def _add_known_rows(self, rank: int, meta: SampleMeta, key: str) -> None:
        """Note rows of a key that another rank has reported for some samples."""
        placement_of, fresh = self._placements[key], Placement(frozenset((rank,)))
        for sample_id, lengths in zip(meta.ids, meta.seqlens[key], strict=True):
            old = placement_of.get(sample_id)
            if old is not None:
                placement_of[sample_id] = Placement(old.held | {rank}, old.incoming - {rank})
                continue
            placement_of[sample_id] = fresh
            self._n_rows[key][sample_id] = sum(lengths)
            self._add_inputs([self._slots[sample_id]], [key])

    def _add_inputs(self, slots: Sequence[_Slot], keys: Sequence[str]) -> None:
        """Note that keys of samples exist from now on."""
        for position, n in self._n_inputs_of(tuple(keys)).items():
            self._fill(slots, position, n)

    def free(self, ids: Iterable[str]) -> dict[int, tuple[str, ...]]:
        """Forget samples that no call needs any more; return rank -> the samples of which it holds rows.

        Raises:
            InvalidTransitionError: some call still needs a sample.
        """
        ids = tuple(ids)
        for sample_id in ids:
            slot = self._slots.pop(sample_id)
            if slot.n_taken if slot.is_dropped else slot.n_unread:
                waiting = [c.name for c, p in zip(self._calls, slot.phases) if p is not SamplePhase.DONE]
                raise InvalidTransitionError(f"sample '{sample_id}' is freed, but {', '.join(waiting)} must read it")
            if slot.place is not None:
                del self._id_at[slot.place]
            self._id_of.pop(slot.number, None)
        for n_rows_of in self._n_rows.values():
            for sample_id in ids:
                n_rows_of.pop(sample_id, None)
        lay = [[placement_of.pop(i, None) for i in ids] for placement_of in self._placements.values()]
        ids_on: dict[tuple[Placement | None, ...], list[str]] = {}
        for sample_id, placements in zip(ids, zip(*lay)):
            ids_on.setdefault(placements, []).append(sample_id)
        freed: dict[int, list[str]] = {}
        for placements, members in ids_on.items():
            for rank in frozenset[int]().union(*[one.present for one in placements if one is not None]):
                freed.setdefault(rank, []).extend(members)
        return {rank: tuple(freed[rank]) for rank in sorted(freed)}

    # ------------------------------------------------------------ calls read samples

    def take(self, position: int) -> tuple[int, tuple[str, ...]]:
        """Take the next batch of a call whose queue has one.

        Returns:
            The number of steps before the batch's, and the ids, oldest first.
        """
        n_steps = self.queues[position].steps_taken
        id_of = self._id_of if position in self._round_queues else self._id_at
        ids = tuple(id_of[index] for index in self.queues[position].take())
        slots = [self._slots[sample_id] for sample_id in ids]
        self._move(slots, position, SamplePhase.TAKEN)
        for slot in slots:
            slot.n_taken += 1
        return n_steps, ids

    def peek(self, position: int) -> tuple[str, ...]:
        """Return the ids that `take` would return."""
        id_of = self._id_of if position in self._round_queues else self._id_at
        return tuple(id_of[index] for index in self.queues[position].peek())

    def finish(self, position: int, ids: Sequence[str], dropped: Collection[str] = ()) -> list[str]:
        """Note that a call is done with its batch and dropped some of it; return samples that no call needs now."""
        slots = [self._slots[sample_id] for sample_id in ids]
        self._move(slots, position, SamplePhase.DONE)
        for slot in slots:
            slot.n_taken -= 1
            slot.n_unread -= 1
        for slot in slots if dropped or self._gated[position] else ():
            if slot.id in dropped:
                self._drop(slot)
            elif not slot.is_dropped:
                self._open_gates(slot, self._gated[position])
        unneeded = [slot.id for slot in slots if (slot.n_taken if slot.is_dropped else slot.n_unread) == 0]
        self.queues[position].finish(len(ids))
        return unneeded

    def places(self, ids: Iterable[str]) -> dict[str, int]:
        """Return living sample -> its place, counted over all steps, for those that have one."""
        found = {sample_id: self._slots[sample_id].place for sample_id in ids}
        return {sample_id: place for sample_id, place in found.items() if place is not None}

    def will_be_ready(self, position: int, promised: Mapping[str, Collection[str]]) -> bool:
        """Return True if a call has a batch, or gets one from what other calls are making.

        Args:
            promised: key -> samples for which it is being made. Where samples may be dropped, promises do not count.
        """
        queue = self.queues[position]
        if queue.batch_size():
            return True
        if self._drops or isinstance(queue, RoundQueue):
            return False
        coming = (self._slots[self._id_at[place]] for place in queue.candidates() if place in self._id_at)
        keys = self._calls[position].mfc.input_keys
        n_coming = sum(
            slot.is_loaded
            and slot.phases[position] is SamplePhase.WAITING
            and all(slot.id in self._placements.get(key, ()) or slot.id in promised.get(key, ()) for key in keys)
            for slot in coming
        )
        return n_coming > 0 and queue.batch_size(n_coming) > 0

    # ------------------------------------------------------------ samples are dropped, or not

    def is_living(self, sample_id: str) -> bool:
        """Return True if a sample is loaded, or being loaded, and neither dropped nor freed."""
        return sample_id in self._slots and not self._slots[sample_id].is_dropped

    def numbers(self, ids: Iterable[str]) -> list[int]:
        """Return the numbers of living samples."""
        return [self._slots[sample_id].number for sample_id in ids]

    def ids_of(self, numbers: Iterable[int]) -> list[str]:
        """Return the living samples with these numbers; only where samples are dropped."""
        return [self._id_of[number] for number in numbers if number in self._id_of]

    def is_dropped(self, sample_id: str) -> bool:
        """Return True if a living sample goes to no further call."""
        return self._slots[sample_id].is_dropped

    def drop(self, numbers: Iterable[int]) -> list[str]:
        """Let samples go to no further call; return those that no call has now."""
        unneeded = []
        for number in numbers:
            slot = self._slots.get(self._id_of.get(number, ""))
            if (
                slot is not None and slot.n_unread and not slot.is_dropped
            ):  # else it went through every call, or is gone
                self._drop(slot)
                if slot.n_taken == 0:
                    unneeded.append(slot.id)
        return unneeded

    def give_places(self, places: Mapping[int, int]) -> None:
        """Give samples (number -> place) that no call will drop to the calls after the dropping ones."""
        for number, place in places.items():
            if number not in self._id_of:  # no call comes after the dropping ones: it is freed
                continue
            slot = self._slots[self._id_of[number]]
            slot.place = place
            self._id_at[place] = slot.id
            self._open_gates(slot, self._late)

    def close_step(self) -> None:
        """Note that the step gets no further round."""
        for queue in self._round_queues.values():
            queue.close_step()

    def _open_gates(self, slot: _Slot, positions: Iterable[int]) -> None:
        for position in positions:
            self._fill([slot], position, 1)

    def _drop(self, slot: _Slot) -> None:
        slot.is_dropped = True
        for position, queue in self._round_queues.items():
            if slot.phases[position] is SamplePhase.WAITING:
                self.grew_ready |= queue.add_dropped(slot.number)

    # ------------------------------------------------------------ versions

    def set_version(self, position: int, ids: Iterable[str], version: int) -> None:
        """Note the version of its role that a call with outputs reads for these samples."""
        for sample_id in ids:
            self._slots[sample_id].versions[position] = version

    def versions(self, sample_id: str) -> dict[str, int]:
        """Return call that produced a key of the sample -> the version of the role that it read."""
        return {self._calls[position].name: v for position, v in self._slots[sample_id].versions.items()}

    def n_behind(self, role: str, ids: Iterable[str], version: int) -> list[int]:
        """Return how far each sample is behind `version`, once for each call that generated it by `role`."""
        generating = [i for i, call in enumerate(self._calls) if call.is_generate and call.mfc.role == role]
        read = [self._slots[sample_id].versions for sample_id in ids]
        return [version - versions[position] for versions in read for position in generating if position in versions]

    def restore_version(self, sample_id: str, call: str, version: int) -> None:
        """Note the version that a call with outputs read for a sample before the run was resumed."""
        position = next(position for position, other in enumerate(self._calls) if other.name == call)
        self._slots[sample_id].versions[position] = version

    # ------------------------------------------------------------ outputs of calls

    def unproduced(self, position: int, ids: Iterable[str]) -> frozenset[str]:
        """Return the samples whose output of the call lies on no rank."""
        placement_of = self._placements.get(self._calls[position].mfc.output_keys[0], {})
        return frozenset(sample_id for sample_id in ids if sample_id not in placement_of)

    def missing_output(self, position: int, ids: Iterable[str]) -> tuple[str, str] | None:
        """Return some (sample id, key) that the call should have produced and no rank holds, or None."""
        for key in self._calls[position].mfc.output_keys:
            placement_of = self._placements.get(key, {})
            for sample_id in ids:
                if sample_id not in placement_of:
                    return sample_id, key
        return None

    # ------------------------------------------------------------ locations

    def placements(self, keys: Iterable[str]) -> Mapping[str, Mapping[str, Placement]]:
        """Return key -> sample id -> placement."""
        return {key: self._placements[key] for key in keys}

    def token_counts(self, ids: Sequence[str], keys: Iterable[str] | None = None) -> list[int]:
        """Return tokens of each sample: of the longest of `keys` (default: all) that has a row per token, at least 1.

        Keys of bytes (uint8) hold text, not tokens, and do not count.
        """
        tables = [
            self._n_rows[key]
            for key in (self._schemas if keys is None else keys)
            if self._schemas[key].per in (Per.TOKEN, Per.TRANSITION) and self._schemas[key].dtype != "uint8"
        ]
        columns = [[table.get(sample_id, 0) for sample_id in ids] for table in tables]
        return list(map(max, repeat(1, len(ids)), *columns)) if columns else [1] * len(ids)

    def number_keys(self) -> list[str]:
        """Return the keys with one number per sequence or per sample, as far as any sample had them."""
        rows = self._schemas.items()
        return sorted(k for k, schema in rows if schema.per in (Per.SEQUENCE, Per.SAMPLE) and not schema.trailing)

    def holders(self, key: str, sample_id: str) -> frozenset[int]:
        """Return the ranks that hold a key's rows of a living sample."""
        placement = self._placements.get(key, {}).get(sample_id)
        return frozenset() if placement is None else placement.held

    def rows_of(self, batches: Iterable[tuple[int, Iterable[str]]]) -> dict[int, dict[str, tuple[str, ...]]]:
        """Return rank -> key -> living samples: for outputs of calls, one rank that holds each sample's rows."""
        rows: dict[int, dict[str, list[str]]] = {}
        for position, ids in batches:
            for key in self._calls[position].mfc.output_keys:
                for sample_id in filter(self.is_living, ids):
                    rows.setdefault(min(self.holders(key, sample_id)), {}).setdefault(key, []).append(sample_id)
        return {rank: {key: tuple(members) for key, members in keys.items()} for rank, keys in rows.items()}

    def begin_arrivals(self, arrivals: Iterable[Arrival]) -> None:
        """Note that rows will be fetched before a call that is being dispatched."""
        self._replace(arrivals, lambda old, targets: Placement(old.held, old.incoming | targets))

    def finish_arrivals(self, arrivals: Iterable[Arrival]) -> None:
        """Note that the call is done, so its rows were fetched and may be fetched onwards."""
        self._replace(arrivals, lambda old, targets: Placement(old.held | targets, old.incoming - targets))

    def _replace(self, arrivals: Iterable[Arrival], change: Callable[[Placement, frozenset[int]], Placement]) -> None:
        changed: dict[tuple[Placement, tuple[int, ...]], Placement] = {}  # rows that lie alike share one object
        for arrival in arrivals:
            placement_of, targets = self._placements[arrival.key], arrival.targets
            for sample_id in arrival.ids:
                old = placement_of[sample_id]
                new = changed.get((old, targets))
                if new is None:
                    new = changed[old, targets] = change(old, frozenset(targets))
                placement_of[sample_id] = new

    # ------------------------------------------------------------ transitions

    def _count_inputs(self, keys: tuple[str, ...]) -> Counter[int]:
        """Return call that reads some of these keys -> how many."""
        return Counter(position for key in keys for position in self._readers.get(key, ()))

    def _fill(self, slots: Iterable[_Slot], position: int, n_inputs: int) -> None:
        """Note that a call lacks `n_inputs` less of samples; those of which it lacks nothing become ready."""
        ready = []
        for slot in slots:
            n_missing = slot.n_missing
            n_missing[position] -= n_inputs
            if n_missing[position] == 0:
                ready.append(slot)
        self._become_ready(ready, position)

    def _become_ready(self, slots: Sequence[_Slot], position: int) -> None:
        if not slots:
            return
        self._move(slots, position, SamplePhase.READY)
        is_by_number, indices = position in self._round_queues, list[int]()
        for slot in slots:
            index = slot.number if is_by_number else slot.place
            assert index is not None
            indices.append(index)
        self.grew_ready |= self.queues[position].add_ready(*indices)

    def _move(self, slots: Iterable[_Slot], position: int, to: SamplePhase) -> None:
        before = _PHASE_BEFORE[to]
        for slot in slots:
            if slot.phases[position] is not before:
                raise InvalidTransitionError(
                    f"sample '{slot.id}' cannot go from {slot.phases[position].value} to {to.value} "
                    f"for call '{self._calls[position].name}'"
                )
            slot.phases[position] = to

    def validate(self) -> None:
        """Check that counts, phases and locations agree; time in proportion to all living samples.

        Raises:
            InvalidTransitionError: they do not.
        """
        for sample_id, slot in self._slots.items():
            held = [key for key, placement_of in self._placements.items() if sample_id in placement_of]
            for position, call in enumerate(self._calls):
                n_missing = sum(key not in held for key in call.mfc.input_keys) + self._n_closed_gates(slot, call)
                is_waiting = slot.phases[position] is SamplePhase.WAITING
                if slot.is_dropped:
                    continue
                if slot.n_missing[position] != n_missing or is_waiting != (n_missing > 0 or not slot.is_loaded):
                    raise InvalidTransitionError(f"sample '{sample_id}' miscounts what call '{call.name}' waits for")
            n_taken = sum(phase is SamplePhase.TAKEN for phase in slot.phases)
            n_unread = sum(phase is not SamplePhase.DONE for phase in slot.phases)
            if (slot.n_unread, slot.n_taken) != (n_unread, n_taken) or not (n_taken if slot.is_dropped else n_unread):
                raise InvalidTransitionError(f"sample '{sample_id}' miscounts its readers")
        for key, placement_of in self._placements.items():
            if not placement_of.keys() <= self._slots.keys() or placement_of.keys() != self._n_rows[key].keys():
                raise InvalidTransitionError(f"key '{key}' of a freed sample still has a location")
            for sample_id, placement in placement_of.items():
                if not placement.held or placement.held & placement.incoming:
                    raise InvalidTransitionError(f"key '{key}' of sample '{sample_id}' is nowhere, or comes twice")

    def _n_closed_gates(self, slot: _Slot, call: ScheduledCall) -> int:
        if not call.feeds_drop:
            return int(slot.place is None)
        gates = [phase for gate, phase in zip(self._calls, slot.phases) if gate.name in call.gates]
        return sum(phase is not SamplePhase.DONE for phase in gates)
