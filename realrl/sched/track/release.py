"""The end of samples: their contents are read, where wanted, and they are freed."""

from __future__ import annotations

from collections.abc import Sequence

from realrl.sched.events import Instruction
from realrl.sched.messages import FreeSamples, ReadSamples
from realrl.sched.outbox import Outbox
from realrl.sched.samples.buffer import SampleBuffer
from realrl.sched.track.readout import SampleReader, plan_reads
from realrl.sched.track.step_log import StepLog
from realrl.sched.track.track_plan import TrackPlan


class SampleRelease:
    """Reads, counts and frees samples that no call needs any more."""

    def __init__(
        self, plan: TrackPlan, *, buffer: SampleBuffer, log: StepLog, reader: SampleReader, outbox: Outbox
    ) -> None:
        self._plan = plan
        self._buffer = buffer
        self._log = log
        self._reader = reader
        self._outbox = outbox

    def release(self, step: int, ids: Sequence[str]) -> list[Instruction]:
        """Read and free samples of `step` that the last call is done with, or that are dropped."""
        if not ids:
            return []
        trained = [sample_id for sample_id in ids if not self._buffer.is_dropped(sample_id)]
        self._log.add_samples(step, self._buffer.token_counts(trained))
        reads = self._read(trained)
        frees = [
            self._outbox.send(rank, FreeSamples(self._outbox.next_seq(rank), freed), self._plan.owner)
            for rank, freed in self._buffer.free(ids).items()
        ]
        return [*reads, *frees]

    def _read(self, ids: Sequence[str]) -> list[Instruction]:
        """Request the contents of the samples that the reader selects."""
        reader, size = self._reader, self._plan.step_size
        instructions: list[Instruction] = []
        places = {i: divmod(place, size) for i, place in self._buffer.places(ids).items()}
        for step, wanted in reader.select(places, self._plan.first_step).items():
            versions = {sample_id: self._buffer.versions(sample_id) for sample_id in wanted}
            reader.expect(step, wanted, versions)
            for rank, (texts, keys) in plan_reads(self._buffer, reader.readout, list(wanted)).items():
                seq = self._outbox.next_seq(rank)
                roles = {prefix: reader.readout.roles[prefix] for prefix in texts}
                reader.asked(step, rank, seq)
                request = ReadSamples(seq, step, texts, roles, keys)
                instructions.append(self._outbox.send(rank, request, self._plan.owner))
        return instructions
