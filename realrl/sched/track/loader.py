"""Loading of samples: the next step's, replacements of dropped ones, and those still needed after a resume.

    a step's samples ─► LoadSamples ─► calls that may drop some ─► places are vacant: another round (see `rounds`)
                                                               └─► the step is settled; the next one may be loaded

Samples of a whole step are loaded as soon as the capacity allows.
"""

from __future__ import annotations

from collections.abc import Collection

from realrl.plan.samples.cursor import DatasetCursor
from realrl.sched.events import Instruction
from realrl.sched.messages import LoadSamples, SamplesLoaded
from realrl.sched.outbox import Outbox
from realrl.sched.samples.buffer import SampleBuffer
from realrl.sched.samples.in_flight import SURPLUS, FlightLog
from realrl.sched.samples.rounds import Rounds
from realrl.sched.track.faults import Fatal, bad_load, too_many_dropped
from realrl.sched.track.step_log import StepLog
from realrl.sched.track.track_plan import TrackPlan


class SampleLoader:
    """Decides which samples are loaded, and when.

    Args:
        cursor: order of the samples.
        flight: knows the work that was done before the run was resumed.
        log: counts the samples that a step lost.
    """

    def __init__(
        self,
        plan: TrackPlan,
        cursor: DatasetCursor,
        *,
        buffer: SampleBuffer,
        flight: FlightLog,
        log: StepLog,
        outbox: Outbox,
    ) -> None:
        self.last_step = plan.last_step(cursor)
        self.has_dropped = False  # samples were dropped without any call, since this was last set to False
        self._plan = plan
        self._cursor = cursor
        self._buffer = buffer
        self._flight = flight
        self._log = log
        self._outbox = outbox
        self._n_total = plan.n_samples(cursor, self.last_step)
        self._rounds = Rounds(plan.step_size) if plan.drops else None
        self._position = {call.name: position for position, call in enumerate(plan.calls)}
        self._last_dropping = max((i for i, call in enumerate(plan.calls) if call.mfc.may_drop), default=-1)

    def n_consumed(self, step: int) -> int:
        """Return how many samples this run takes from the dataset up to `step`, which must have all of them."""
        n_steps = step - self._plan.first_step + 1
        if self._rounds is not None:
            return self._rounds.loaded_at_end(n_steps)
        n_samples = n_steps * self._plan.step_size
        return n_samples if self._n_total is None else min(n_samples, self._n_total)

    def is_settled(self, step: int) -> bool:
        """Return True if no sample of `step` will be replaced any more."""
        return self._rounds is None or self._settled_step(self._rounds) >= step

    def add_loaded(self, reply: SamplesLoaded, request: LoadSamples) -> None:
        """Take in loaded samples.

        Raises:
            Fatal: they are not those of the request, or lack a key.
        """
        missing = sorted(set(self._plan.dataset_keys) - reply.meta.seqlens.keys())
        if reply.meta.ids != request.ids or missing:
            raise Fatal(bad_load(reply, request, missing))
        self._buffer.add_loaded(reply.rank, reply.meta)
        for meta in reply.restored:
            self._buffer.add_rows(reply.rank, meta)
        for sample_id in reply.meta.ids:
            for call, version in self._flight.done_before(sample_id).items():
                lost = self._buffer.missing_output(self._position[call], (sample_id,))
                if lost is not None:
                    raise Fatal(bad_load(reply, request, [lost[1]]))
                if version is not None:
                    self._buffer.restore_version(sample_id, call, version)

    def load(self) -> list[Instruction]:
        """Request as many samples as there is room for."""
        instructions: list[Instruction] = []
        while n_samples := self._n_loadable():
            instructions += self._load(n_samples)
        return instructions

    def settle(self, position: int, step: int, ids: Collection[str], dropped: Collection[str]) -> list[str]:
        """Note that a dropping call is done with samples; return surplus ones, which can be freed.

        Raises:
            Fatal: samples are still missing, and were replaced as often as they may.
        """
        assert self._rounds is not None
        kept = [sample_id for sample_id in ids if position == self._last_dropping and sample_id not in dropped]
        gone = [sample_id for sample_id in ids if sample_id in dropped]
        if not kept and not gone:  # its hooks may end when calls after it have settled the step
            return []
        return self._decide(self._rounds, step, self._plan.calls[position].name, kept, gone)

    def _n_loadable(self) -> int:
        """Return the number of samples to load now, of the next step or as replacements."""
        rounds, size = self._rounds, self._plan.step_size
        if rounds is not None and rounds.is_open:
            return rounds.n_wanted if len(self._buffer) + rounds.n_wanted <= self._plan.max_living else 0
        n_begun = self._buffer.n_loaded // size if rounds is None else rounds.n_settled
        has_room = len(self._buffer) + size <= self._plan.capacity * size
        size = size if self._n_total is None else min(size, self._n_total - self._buffer.n_loaded)
        return size if has_room and self._plan.first_step + n_begun <= self.last_step else 0

    def _load(self, n_samples: int) -> list[Instruction]:
        refs = self._cursor.take(self._cursor.start + self._buffer.n_loaded, n_samples)
        self._buffer.expect(refs)
        if self._rounds is not None:
            self._rounds.open_round()
            self._drop_again(self._rounds, [ref.id for ref in refs if self._flight.was_dropped(ref.id)])
            refs = [ref for ref in refs if self._buffer.is_living(ref.id)]
        if not refs:
            return []
        rank = self._plan.dataset_rank
        ids, rows = tuple(ref.id for ref in refs), tuple(ref.row for ref in refs)
        request = LoadSamples(self._outbox.next_seq(rank), ids, rows, self._plan.is_held_out)
        return [self._outbox.send(rank, request, self._plan.owner)]

    def _drop_again(self, rounds: Rounds, ids: list[str]) -> None:
        """Drop samples, unloaded, that were dropped before the run was resumed."""
        step = self._settled_step(rounds) + 1
        unneeded = self._buffer.drop(self._buffer.numbers(ids))
        for call, dropped in self._flight.take_drops(ids).items():
            if call == SURPLUS:
                self._decide(rounds, step, self._plan.calls[self._last_dropping].name, dropped, [])
            else:
                self._decide(rounds, step, call, [], dropped)
        self._buffer.free(unneeded)
        self.has_dropped = True

    def _decide(self, rounds: Rounds, step: int, call: str, kept: list[str], gone: list[str]) -> list[str]:
        """Note the fate of some samples; return surplus ones, which can be freed."""
        self._flight.add_dropped(step, call, gone)
        places, surplus = rounds.decide(call, kept=self._buffer.numbers(kept), dropped=self._buffer.numbers(gone))
        self._buffer.give_places(places)
        self._flight.add_dropped(step, SURPLUS, self._buffer.ids_of(surplus))
        unneeded = self._buffer.drop(surplus)
        self._log.add_surplus(step, surplus)
        if not rounds.is_open:
            self._buffer.close_step()
            self._log.add_dropped(step, rounds.n_dropped, rounds.n_surplus)
        elif rounds.n_wanted and rounds.n_refills >= self._plan.config.max_refill_rounds:
            n_loaded, n_refills = rounds.n_loaded_in_step, rounds.n_refills
            raise Fatal(too_many_dropped(step, rounds.n_vacant, n_loaded, n_refills, rounds.n_dropped))
        return unneeded

    def _settled_step(self, rounds: Rounds) -> int:
        """Return the last step that has all its samples."""
        return self._plan.first_step - 1 + rounds.n_settled
