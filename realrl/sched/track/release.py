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


def release(
    step: int,
    ids: Sequence[str],
    *,
    plan: TrackPlan,
    buffer: SampleBuffer,
    log: StepLog,
    reader: SampleReader,
    outbox: Outbox,
) -> list[Instruction]:
    """Read, count and free samples of `step` that the last call is done with, or that are dropped."""
    if not ids:
        return []
    trained = buffer.undropped(ids)
    log.add_samples(step, dict(zip(buffer.numbers(trained), buffer.token_counts(trained), strict=True)))
    instructions: list[Instruction] = []
    places = {i: divmod(place, plan.step_size) for i, place in buffer.places(trained).items()}
    for read_step, wanted in reader.select(places, plan.first_step).items():
        reader.expect(read_step, wanted, {sample_id: buffer.versions(sample_id) for sample_id in wanted})
        for rank, (texts, keys, rows) in plan_reads(buffer, reader.readout, list(wanted)).items():
            seq = outbox.next_seq(rank)
            roles = {prefix: reader.readout.roles[prefix] for prefix in texts}
            reader.asked(read_step, rank, seq)
            instructions.append(outbox.send(rank, ReadSamples(seq, read_step, texts, roles, keys, rows), plan.owner))
    reader.forget(ids)
    for rank, freed in buffer.free(ids).items():
        instructions.append(outbox.send(rank, FreeSamples(outbox.next_seq(rank), freed), plan.owner))
    return instructions
