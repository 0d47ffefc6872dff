"""Answers of workers that end a run: undeclared outputs, unrequested samples, too few samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from realrl.sched.events import Failure, FailureKind
from realrl.sched.messages import CallDone, LoadSamples, SamplesLoaded
from realrl.sched.track.dispatch import Dispatch


class Fatal(Exception):
    """Unwinds the handling of an event that ends the run; never leaves the state machine."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def check_output(dispatch: Dispatch, reply: CallDone) -> None:
    """Refuse an output with keys or samples that this rank was not asked for."""
    output = reply.output
    assert output is not None
    keys, expected = output.seqlens.keys(), dispatch.call.output_keys
    for key in sorted(keys ^ expected) if keys != expected else ():
        problem = f"did not produce '{key}'" if key in expected else f"returned '{key}', which it does not declare"
        raise Fatal(bad_output(dispatch, f"{problem} on worker {reply.rank}", rank=reply.rank))
    kept = dispatch.work[reply.rank].keeps
    for sample_id in output.ids if output.ids != kept else ():
        if sample_id not in kept:
            problem = f"returned sample '{sample_id}', which worker {reply.rank} was not to keep"
            raise Fatal(bad_output(dispatch, problem, rank=reply.rank, sample_id=sample_id))
    for key, seqlens in output.seqlens.items():
        if len(seqlens) != len(output.ids):
            problem = f"returned '{key}' with {len(seqlens)} lengths for {len(output.ids)} samples"
            raise Fatal(bad_output(dispatch, f"{problem} on worker {reply.rank}", rank=reply.rank))


def check_all_produced(dispatch: Dispatch, missing: tuple[str, str] | None) -> None:
    """Refuse a call that left out some (sample id, key)."""
    if missing is not None:
        sample_id, key = missing
        raise Fatal(bad_output(dispatch, f"did not produce '{key}' of sample '{sample_id}'", sample_id=sample_id))


def bad_output(dispatch: Dispatch, problem: str, *, rank: int | None = None, sample_id: str | None = None) -> Failure:
    """Return the failure of a call whose output does not match its declaration."""
    return Failure(
        kind=FailureKind.BAD_OUTPUT,
        message=f"call '{dispatch.call.name}' of step {dispatch.step} {problem}",
        remedy="its interface must return every output key of the call, for every sample, and nothing else",
        rank=rank,
        call=dispatch.call.name,
        step=dispatch.step,
        sample_ids=() if sample_id is None else (sample_id,),
    )


def too_many_dropped(step: int, n_vacant: int, n_loaded: int, n_refills: int, n_dropped: Mapping[str, int]) -> Failure:
    """Return the failure of a step that cannot be filled, though samples were replaced as often as allowed."""
    told = " and ".join(f"call '{call}' dropped {n}" for call, n in n_dropped.items())
    tries = f"after {n_refills} round{'' if n_refills == 1 else 's'} of replacements " if n_refills else ""
    return Failure(
        kind=FailureKind.DROPPED,
        message=f"step {step} still lacks {n_vacant} samples {tries}({told} of {n_loaded} samples)",
        remedy="Look at why so few samples stay (data too easy or too hard, too few responses per prompt, a failing "
        "reward), or raise max_refill_rounds.",
        call=max(n_dropped, key=lambda call: n_dropped[call]),
        step=step,
    )


def bad_load(reply: SamplesLoaded, request: LoadSamples, missing: Sequence[str]) -> Failure:
    """Return the failure of a dataset that did not give the requested samples."""
    if missing:
        problem = f"without key '{missing[0]}'"
    else:
        problem = f"that are not the {len(request.ids)} asked for"
    return Failure(
        kind=FailureKind.BAD_OUTPUT,
        message=f"worker {reply.rank} loaded samples {problem}",
        remedy="the dataset must give every sample all keys of its kind",
        rank=reply.rank,
        sample_ids=reply.meta.ids[:4],
    )
