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
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import IntEnum
from functools import cache
from itertools import chain, repeat

from realrl.errors import InvalidTransitionError
from realrl.plan.samples.cursor import SampleRef
from realrl.plan.samples.placements import Placement, PlacementColumn
from realrl.plan.samples.transfer import Arrival
from realrl.sched.calls import ScheduledCall
from realrl.sched.messages import SampleMeta
from realrl.sched.samples.call_queue import CallQueue, RoundQueue
from realrl.sched.samples.columns import Columns, Slots, add, fill, is_everywhere, of, put, side_by_side, where
from realrl.sched.samples.rows import Rows, on_rank


class SamplePhase(IntEnum):
    """Progress of one sample through one call, from each to the next."""

    WAITING = 0  # some input does not exist yet
    READY = 1  # the sample's last missing input arrived
    TAKEN = 2  # the call was dispatched with it
    DONE = 3  # every rank of the call's mesh is done


class SampleBuffer:
    """All living samples.

    Args:
        calls: the calls; other methods name a call by its position here.
        step_size: samples of one step.
        n_total: samples of the whole run, where the last step may be smaller than the others; None: whole steps.
    """

    def __init__(self, calls: Sequence[ScheduledCall], step_size: int, n_total: int | None = None) -> None:
        self._calls = tuple(calls)
        self._step_size = step_size
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
        self._columns = columns = Columns(step_size)
        self._slot_of = columns.slot_of
        self._is_loaded, self._is_dropped = columns.bytes(), columns.bytes()
        self._n_taken, self._n_unread = columns.bytes(), columns.bytes()  # calls that have a sample; are not done
        self._places: list[int | None] = columns.values(None)
        self._phases = [columns.bytes() for _ in self._calls]
        # Inputs of each call that do not exist yet, and calls that may still drop the sample.
        self._n_missing = [columns.bytes() for _ in self._calls]
        # Of the parameters that each call which produced a key read.
        self._versions: list[list[int | None]] = [columns.values(None) for _ in self._calls]
        self._id_at: dict[int, str] = {}  # by place; only where samples are dropped
        self._rows = Rows(columns)
        self._waits_for_all = [self._is_read_at_once(call) for call in self._calls]
        self._held_back: dict[int, list[tuple[int, SampleMeta]]] = {}  # call -> outputs that are not taken in
        self._n_held_back = [0] * len(self._calls)  # samples
        self.n_loaded = 0  # samples ever asked for, which is the number of the next one
        self.grew_ready = False  # whether a batch may have become complete since this was last set to False

    def __len__(self) -> int:
        """Return the number of living samples, those being loaded included."""
        return len(self._slot_of)

    # ------------------------------------------------------------ samples come and go

    def expect(self, refs: Sequence[SampleRef]) -> None:
        """Make room for samples that are being loaded; they are numbered in this order, and make one round.

        Raises:
            InvalidTransitionError: a sample of that id lives already.
        """
        ids = [ref.id for ref in refs]
        for sample_id in ids:
            if sample_id in self._slot_of:
                raise InvalidTransitionError(f"sample '{sample_id}' is loaded a second time while it lives")
        self._columns.add(self.n_loaded, ids)
        slots = self._columns.slots(ids)
        fill(self._n_unread, slots, len(self._calls))
        for n_missing, n_inputs in zip(self._n_missing, self._n_inputs):
            fill(n_missing, slots, n_inputs)
        if not self._drops:
            put(self._places, slots, range(self.n_loaded, self.n_loaded + len(ids)))
        self.n_loaded += len(ids)
        for queue in self._round_queues.values():
            queue.open(len(refs))

    def add_loaded(self, rank: int, meta: SampleMeta) -> None:
        """Note that the samples of `meta` were loaded on `rank`."""
        slots = self._columns.slots(meta.ids)
        fill(self._is_loaded, slots, True)
        for position, n_missing in enumerate(self._n_missing):
            self._become_ready(where(n_missing, slots, 0), position)
        self.add_rows(rank, meta)

    def add_output(self, position: int, rank: int, meta: SampleMeta, n_samples: int) -> None:
        """Note rows that `rank` produced for a call, whose batch has `n_samples`.

        Where nobody can start before all of the batch is there, they are taken in together, at the latest by `take_in`.
        """
        if not self._waits_for_all[position] or len(meta.ids) == n_samples:
            self.add_rows(rank, meta)
            return
        outputs = self._held_back.setdefault(position, [])
        outputs.append((rank, meta))
        self._n_held_back[position] += len(meta.ids)
        if self._n_held_back[position] >= n_samples:
            self.take_in(position)

    def take_in(self, position: int) -> None:
        """Note all that was produced for a call by now, if it is not noted yet."""
        outputs = self._held_back.pop(position, None)
        if outputs is None:
            return
        self._n_held_back[position] = 0
        metas = [meta for _, meta in outputs]
        given = [self._slot_of[sample_id] for meta in metas for sample_id in meta.ids]
        keys = self._calls[position].mfc.output_keys
        if self._rows.are_known(keys, given) or len(set(given)) < len(given):
            for rank, meta in outputs:
                self.add_rows(rank, meta)
            return
        slots, arranged = side_by_side(given)
        lie = arranged([*chain.from_iterable([repeat(on_rank(rank), len(meta.ids)) for rank, meta in outputs])])
        for key in keys:
            lengths = arranged([*chain.from_iterable([meta.seqlens[key] for meta in metas])])
            self._rows.add(key, metas[-1].schemas[key], slots, lie, lengths)
        self._add_inputs(slots, keys)

    def add_rows(self, rank: int, meta: SampleMeta) -> None:
        """Note rows that `rank` loaded or produced. Several ranks may report the same rows."""
        slots, fresh = self._columns.slots(meta.ids), [on_rank(rank)] * len(meta.ids)
        new_keys: list[str] = []
        for key, seqlens in meta.seqlens.items():
            if self._rows.are_known((key,), slots):
                self._add_known_rows(rank, meta, key)
                continue
            self._rows.add(key, meta.schemas[key], slots, fresh, seqlens)
            new_keys.append(key)
        self._add_inputs(slots, new_keys)

    def _add_known_rows(self, rank: int, meta: SampleMeta, key: str) -> None:
        """Note rows of a key that another rank has reported for some samples."""
        column = self._rows.placements[key]
        for sample_id, lengths in zip(meta.ids, meta.seqlens[key], strict=True):
            slot = self._slot_of[sample_id]
            old = column[slot]
            if old is not None:
                column[slot] = Placement(old.held | {rank}, old.incoming - {rank})
                continue
            self._rows.add(key, meta.schemas[key], [slot], [on_rank(rank)], [lengths])
            self._add_inputs([slot], [key])

    def _add_inputs(self, slots: Slots, keys: Sequence[str]) -> None:
        """Note that keys of samples exist from now on."""
        for position, n in self._n_inputs_of(tuple(keys)).items():
            self._fill(slots, position, n)

    def free(self, ids: Iterable[str]) -> dict[int, tuple[str, ...]]:
        """Forget samples that no call needs any more; return rank -> the samples of which it holds rows.

        Raises:
            InvalidTransitionError: some call still needs a sample.
        """
        ids = tuple(ids)
        slots = self._columns.slots(ids)
        for slot in self._needed(slots):
            calls = [c.name for c, p in zip(self._calls, self._phases) if p[slot] != SamplePhase.DONE]
            sample_id = self._columns.ids[slot]
            raise InvalidTransitionError(f"sample '{sample_id}' is freed, but {', '.join(calls)} must read it")
        for place in of(self._places, slots) if self._id_at else ():
            if place is not None:
                del self._id_at[place]
        freed: dict[int, list[str]] = {}
        for ranks, members in self._rows.lying_on(ids, slots):
            for rank in ranks:
                freed.setdefault(rank, []).extend(members)
        self._columns.remove(slots)
        return {rank: tuple(freed[rank]) for rank in sorted(freed)}

    def _needed(self, slots: Slots) -> list[int]:
        """Return the slots of samples that some call still needs; dropped ones only by calls that have them."""
        if is_everywhere(self._n_unread, slots, 0):
            return []
        return [s for s in slots if (self._n_taken if self._is_dropped[s] else self._n_unread)[s]]

    def _is_read_at_once(self, call: ScheduledCall) -> bool:
        """Return True if no call that reads outputs of this one can start before the whole batch has them.

        Each batch of such a reader takes in whole batches of the call: windows of samples lie side by side.
        """
        size = call.mfc.n_seqs if call.mfc.min_n_seqs is None else self._step_size
        readers = [self._calls[i].mfc for key in call.mfc.output_keys for i in self._readers.get(key, ())]
        return not self._drops and all(mfc.min_n_seqs is None and mfc.n_seqs % size == 0 for mfc in readers)

    # ------------------------------------------------------------ calls read samples

    def take(self, position: int) -> tuple[int, tuple[str, ...]]:
        """Take the next batch of a call whose queue has one.

        Returns:
            The number of steps before the batch's, and the ids, oldest first.
        """
        n_steps = self.queues[position].steps_taken
        slots = self._slots_at(position, self.queues[position].take())
        self._move(slots, position, SamplePhase.TAKEN)
        add(self._n_taken, slots, 1)
        return n_steps, tuple(of(self._columns.ids, slots))

    def peek(self, position: int) -> tuple[str, ...]:
        """Return the ids that `take` would return."""
        return tuple(of(self._columns.ids, self._slots_at(position, self.queues[position].peek())))

    def _slots_at(self, position: int, indices: Sequence[int]) -> Slots:
        """Return the slots of samples that a call knows by these indices, which ascend: numbers, or places."""
        if self._drops and position not in self._round_queues:
            return [self._slot_of[self._id_at[place]] for place in indices]
        return self._columns.at(indices)

    def finish(self, position: int, ids: Sequence[str], dropped: Collection[str] = ()) -> list[str]:
        """Note that a call is done with its batch and dropped some of it; return samples that no call needs now."""
        slots = self._columns.slots(ids)
        self._move(slots, position, SamplePhase.DONE)
        add(self._n_taken, slots, -1)
        add(self._n_unread, slots, -1)
        for sample_id, slot in zip(ids, slots) if dropped or self._gated[position] else ():
            if sample_id in dropped:
                self._drop(slot)
            elif not self._is_dropped[slot]:
                self._open_gates(slot, self._gated[position])
        self.queues[position].finish(len(ids))
        if not self._drops:
            return [*of(self._columns.ids, where(self._n_unread, slots, 0))]
        needed = {*self._needed(slots)}
        return [sample_id for sample_id, slot in zip(ids, slots) if slot not in needed]

    def places(self, ids: Sequence[str]) -> dict[str, int]:
        """Return living sample -> its place, counted over all steps, for those that have one."""
        found = zip(ids, of(self._places, self._columns.slots(ids)), strict=True)
        return {sample_id: place for sample_id, place in found if place is not None}

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
        coming = self._living_at(queue.candidates())
        phases, ids = self._phases[position], self._columns.ids
        lacking = [slot for slot in coming if self._is_loaded[slot] and phases[slot] == SamplePhase.WAITING]
        for key in self._calls[position].mfc.input_keys:
            column, of_key = self._rows.placements.get(key), promised.get(key, ())
            lacking = [s for s in lacking if (column is not None and column[s] is not None) or ids[s] in of_key]
        return len(lacking) > 0 and queue.batch_size(len(lacking)) > 0

    def _living_at(self, numbers: range) -> list[int]:
        """Return the slots of those samples that live."""
        found = self._columns.at(numbers)
        return [slot for slot, n in zip(found, numbers) if self._columns.ids[slot] and self._columns.numbers[slot] == n]

    # ------------------------------------------------------------ samples are dropped, or not

    def is_living(self, sample_id: str) -> bool:
        """Return True if a sample is loaded, or being loaded, and neither dropped nor freed."""
        return sample_id in self._slot_of and not self._is_dropped[self._slot_of[sample_id]]

    def numbers(self, ids: Sequence[str]) -> list[int]:
        """Return the numbers of living samples."""
        return [*of(self._columns.numbers, self._columns.slots(ids))]

    def ids_of(self, numbers: Iterable[int]) -> list[str]:
        """Return the living samples with these numbers."""
        return [self._columns.ids[slot] for number in numbers for slot in self._living_at(range(number, number + 1))]

    def undropped(self, ids: Sequence[str]) -> Sequence[str]:
        """Return the living samples among these that were not dropped."""
        if not self._drops:
            return ids
        return [sample_id for sample_id in ids if not self._is_dropped[self._slot_of[sample_id]]]

    def drop(self, numbers: Iterable[int]) -> list[str]:
        """Let samples go to no further call; return those that no call has now."""
        unneeded = []
        for sample_id in self.ids_of(numbers):
            slot = self._slot_of[sample_id]
            if self._n_unread[slot] and not self._is_dropped[slot]:  # else it went through every call
                self._drop(slot)
                if not self._n_taken[slot]:
                    unneeded.append(sample_id)
        return unneeded

    def give_places(self, places: Mapping[int, int]) -> None:
        """Give samples (number -> place) that no call will drop to the calls after the dropping ones."""
        for number, place in places.items():
            for sample_id in self.ids_of((number,)):  # none if no call comes after the dropping ones: it is freed
                slot = self._slot_of[sample_id]
                self._places[slot] = place
                self._id_at[place] = sample_id
                self._open_gates(slot, self._late)

    def close_step(self) -> None:
        """Note that the step gets no further round."""
        for queue in self._round_queues.values():
            queue.close_step()

    def _open_gates(self, slot: int, positions: Iterable[int]) -> None:
        for position in positions:
            self._fill([slot], position, 1)

    def _drop(self, slot: int) -> None:
        self._is_dropped[slot] = True
        for position, queue in self._round_queues.items():
            if self._phases[position][slot] == SamplePhase.WAITING:
                self.grew_ready |= queue.add_dropped(self._columns.numbers[slot])

    # ------------------------------------------------------------ versions

    def set_version(self, position: int, ids: Sequence[str], version: int) -> None:
        """Note the version of its role that a call with outputs reads for these samples."""
        put(self._versions[position], self._columns.slots(ids), [version] * len(ids))

    def versions(self, sample_id: str) -> dict[str, int]:
        """Return call that produced a key of the sample -> the version of the role that it read."""
        read = [(call.name, column[self._slot_of[sample_id]]) for call, column in zip(self._calls, self._versions)]
        return {name: version for name, version in read if version is not None}

    def n_behind(self, role: str, ids: Sequence[str], version: int) -> list[int]:
        """Return how far each sample is behind `version`, once for each call that generated it by `role`."""
        slots = self._columns.slots(ids)
        generating = [i for i, call in enumerate(self._calls) if call.is_generate and call.mfc.role == role]
        read = zip(*[of(self._versions[position], slots) for position in generating])
        return [version - one for of_sample in read for one in of_sample if one is not None]

    def restore_version(self, sample_id: str, call: str, version: int) -> None:
        """Note the version that a call with outputs read for a sample before the run was resumed."""
        position = next(position for position, other in enumerate(self._calls) if other.name == call)
        self.set_version(position, (sample_id,), version)

    # ------------------------------------------------------------ outputs of calls

    def unproduced(self, position: int, ids: Sequence[str]) -> frozenset[str]:
        """Return the samples whose output of the call lies on no rank."""
        column = self._rows.placements.get(self._calls[position].mfc.output_keys[0])
        lie = repeat(None) if column is None else of(column, self._columns.slots(ids))
        return frozenset(sample_id for sample_id, placement in zip(ids, lie) if placement is None)

    def missing_output(self, position: int, ids: Sequence[str]) -> tuple[str, str] | None:
        """Return some (sample id, key) that the call should have produced and no rank holds, or None."""
        slots = self._columns.slots(ids)
        for key in self._calls[position].mfc.output_keys:
            column = self._rows.placements.get(key)
            lie = [None] * len(ids) if column is None else of(column, slots)
            if not all(lie):
                return ids[lie.index(None)], key
        return None

    # ------------------------------------------------------------ locations

    def placements(self, keys: Iterable[str]) -> Mapping[str, PlacementColumn]:
        """Return key -> sample id -> placement."""
        return {key: PlacementColumn(self._slot_of, self._rows.placements[key]) for key in keys}

    def token_counts(self, ids: Sequence[str], keys: Iterable[str] | None = None) -> list[int]:
        """Return tokens of each sample: of the longest of `keys` (default: all) that has a row per token, at least 1.

        Keys of bytes (uint8) hold text, not tokens, and do not count.
        """
        return self._rows.token_counts(self._columns.slots(ids), keys)

    def number_keys(self) -> list[str]:
        """Return the keys with one number per sequence or per sample, as far as any sample had them."""
        return self._rows.number_keys()

    def holders(self, key: str, sample_id: str) -> frozenset[int]:
        """Return the ranks that hold a key's rows of a living sample."""
        return self._rows.holders(key, self._slot_of[sample_id])

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
        self._rows.replace(arrivals, lambda old, targets: Placement(old.held, old.incoming | targets))

    def finish_arrivals(self, arrivals: Iterable[Arrival]) -> None:
        """Note that the call is done, so its rows were fetched and may be fetched onwards."""
        self._rows.replace(arrivals, lambda old, targets: Placement(old.held | targets, old.incoming - targets))

    # ------------------------------------------------------------ transitions

    def _count_inputs(self, keys: tuple[str, ...]) -> Counter[int]:
        """Return call that reads some of these keys -> how many."""
        return Counter(position for key in keys for position in self._readers.get(key, ()))

    def _fill(self, slots: Slots, position: int, n_inputs: int) -> None:
        """Note that a call lacks `n_inputs` less of samples; those of which it lacks nothing become ready."""
        n_missing = self._n_missing[position]
        add(n_missing, slots, -n_inputs)
        self._become_ready(where(n_missing, slots, 0), position)

    def _become_ready(self, slots: Slots, position: int) -> None:
        if not slots:
            return
        self._move(slots, position, SamplePhase.READY)
        is_by_number = position in self._round_queues
        indices = of(self._columns.numbers, slots) if is_by_number else of(self._places, slots)
        self.grew_ready |= self.queues[position].add_ready(*indices)  # type: ignore[arg-type]

    def _move(self, slots: Slots, position: int, to: SamplePhase) -> None:
        phases, before = self._phases[position], to - 1
        if not is_everywhere(phases, slots, before):
            slot = next(slot for slot in slots if phases[slot] != before)
            raise InvalidTransitionError(
                f"sample '{self._columns.ids[slot]}' cannot go from {SamplePhase(phases[slot]).name.lower()} to "
                f"{to.name.lower()} for call '{self._calls[position].name}'"
            )
        fill(phases, slots, to)

    def validate(self) -> None:
        """Check that counts, phases and locations agree; time in proportion to all living samples.

        Raises:
            InvalidTransitionError: they do not.
        """
        for sample_id, slot in self._slot_of.items():
            phases = [column[slot] for column in self._phases]
            for position, call in enumerate(self._calls):
                n_missing = sum(not self._rows.are_known((key,), [slot]) for key in call.mfc.input_keys)
                n_missing += self._n_closed_gates(slot, call)
                is_waiting = phases[position] == SamplePhase.WAITING
                if self._is_dropped[slot]:
                    continue
                is_blocked = n_missing > 0 or not self._is_loaded[slot]
                if self._n_missing[position][slot] != n_missing or is_waiting != is_blocked:
                    raise InvalidTransitionError(f"sample '{sample_id}' miscounts what call '{call.name}' waits for")
            n_taken = phases.count(SamplePhase.TAKEN)
            n_unread = len(phases) - phases.count(SamplePhase.DONE)
            is_counted = (self._n_unread[slot], self._n_taken[slot]) == (n_unread, n_taken)
            if not is_counted or not (n_taken if self._is_dropped[slot] else n_unread):
                raise InvalidTransitionError(f"sample '{sample_id}' miscounts its readers")
        living = set(self._slot_of.values())
        for key, column in self._rows.placements.items():
            for slot, placement in enumerate(column):
                if placement is None:
                    continue
                if slot not in living:
                    raise InvalidTransitionError(f"key '{key}' of a freed sample still has a location")
                if not placement.held or placement.held & placement.incoming:
                    sample_id = self._columns.ids[slot]
                    raise InvalidTransitionError(f"key '{key}' of sample '{sample_id}' is nowhere, or comes twice")

    def _n_closed_gates(self, slot: int, call: ScheduledCall) -> int:
        if not call.feeds_drop:
            return int(self._places[slot] is None)
        gates = [phases[slot] for gate, phases in zip(self._calls, self._phases) if gate.name in call.gates]
        return sum(phase != SamplePhase.DONE for phase in gates)
