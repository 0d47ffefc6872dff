"""Checks of what an interface returned, before any other call reads it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from itertools import accumulate
from typing import Any, NoReturn

import torch

from realrl.algo.api import CallContext, LossOutput
from realrl.data.checks import SampleError
from realrl.data.sample import SequenceSample
from realrl.errors import CallError, Error, did_you_mean
from realrl.experiment.loading import place_of_user_function, place_that_raised
from realrl.graph.mfc import InterfaceType, MFCDef
from realrl.sched.messages import KeySchema, Per

NO_GRADIENT = (
    "Compute the loss from the model's output, without .detach(), .item(), .tolist() or torch.no_grad() on the way; "
    "only statistics are detached."
)


def check_output(ctx: CallContext, mfc: MFCDef, batch: SequenceSample, result: Any) -> SequenceSample:
    """The call's output in the graph's names, with `mfc.output_keys` and nothing else.

    Args:
        batch: input of the interface.
        result: return value of its `generate` or `inference`, with the interface's own key names. Keys that the graph
            does not ask for are dropped.

    Raises:
        CallError: not a `SequenceSample`, other ids than `batch` (fewer are right where the call may drop samples, if
            they are in order), a missing key, a key without tensor, lengths that do not fit the tokens, NaN or
            infinity. Names role, call, step and, where one can be blamed, the sample id.
    """
    if not isinstance(result, SequenceSample):
        _fail(ctx, mfc, f"returned {type(result).__name__}, not a SequenceSample", remedy=_as_sample(mfc, batch))
    _check_keys(ctx, mfc, result)
    _check_ids(ctx, mfc, batch, result)
    output = result.remap({old: new for old, new in mfc.output_key_remap.items() if old in result.keys})
    output = output.select(output.ids, mfc.output_keys)
    tokens = _token_lengths(batch if result.ids == batch.ids else batch.select(result.ids), result)
    for key in mfc.output_keys:
        if output.data[key] is None:
            _fail(ctx, mfc, f"returned {key!r} without its tensor")
        if tokens is not None:
            _check_lengths(ctx, mfc, output, key, tokens)
        _check_finite(ctx, mfc, output, key)
    return output


def check_metrics(ctx: CallContext, mfc: MFCDef, metrics: Any) -> dict[str, float]:
    """Convert the metrics that `train_step` returned to floats.

    Raises:
        CallError: not a mapping from names to numbers, or a number that is NaN or infinite.
    """
    if not isinstance(metrics, Mapping):
        remedy = "Return names and numbers, such as {'loss': 0.5}, or {} where there is nothing to log."
        _fail(ctx, mfc, f"returned {type(metrics).__name__}, not a dict of metrics", remedy=remedy)
    checked = {}
    for name, value in metrics.items():
        try:
            checked[str(name)] = float(value)
        except (TypeError, ValueError, RuntimeError):
            _fail(ctx, mfc, f"returned the metric {name!r} = {value!r}, which is not a number")
        if not math.isfinite(checked[name]):
            _fail(ctx, mfc, f"returned the metric {name!r} = {checked[name]}")
    return checked


def check_loss(role: str, result: Any) -> LossOutput:
    """The return value of a loss function for one micro-batch.

    Raises:
        CallError: no `LossOutput`, or a loss, statistic or maximum that is not one number in a tensor.
    """
    if not isinstance(result, LossOutput):
        raise CallError(
            f"the loss function of role {role!r} returned {type(result).__name__}, not a LossOutput",
            remedy="Return LossOutput(loss, {'name': statistic}), with sums over the micro-batch.",
        )
    named = {"loss": result.loss, **{f"statistic {name!r}": value for name, value in result.stats.items()}}
    named |= {f"maximum {name!r}": value for name, value in result.maxima.items()}
    for name, value in named.items():
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            is_tensor = isinstance(value, torch.Tensor)
            found = f"of shape {list(value.shape)}" if is_tensor else f"a {type(value).__name__}"
            raise CallError(
                f"the {name} that the loss function of role {role!r} returned is {found}, not a tensor of one number",
                remedy=f"Return its {'maximum' if name.startswith('max') else 'sum'} over the micro-batch.",
            )
    return result


def check_gradient(role: str, loss_fn: Callable[..., Any], n_trained: int) -> None:
    """Check that a minibatch trains anything.

    Args:
        n_trained: losses of micro-batches that have a gradient, or are 0, over all ranks.

    Raises:
        CallError: there is none; names the loss function and its line.
    """
    if n_trained:
        return
    place = place_of_user_function(loss_fn)
    name = getattr(loss_fn, "__qualname__", type(loss_fn).__name__).rpartition("<locals>.")[2]
    raise CallError(
        f"the loss that the loss function {name!r} of role {role!r} returned has no gradient: it would train nothing",
        remedy=_looking_at(place, NO_GRADIENT),
    )


def check_recorded(ctx: CallContext, mfc: MFCDef) -> None:
    """Check the sums and maxima in `ctx.metrics`.

    Raises:
        CallError: a total, count or maximum is NaN or infinite, or a count is negative.
    """
    for name, (total, count) in ctx.metrics.sums.items():
        if not (math.isfinite(total) and math.isfinite(count)) or count < 0:
            _fail(ctx, mfc, f"recorded the metric {name!r} as a total of {total} over a count of {count}")
    for name, value in ctx.metrics.maxima.items():
        if not math.isfinite(value):
            _fail(ctx, mfc, f"recorded the metric {name!r} with a maximum of {value}")


def explain(ctx: CallContext, mfc: MFCDef, batch: SequenceSample, error: Exception, place: str = "") -> Error:
    """Turn an exception from an interface into the error to raise, which has the call and step.

    An `Error` keeps its kind. A `SampleError`, and any foreign exception, becomes a `CallError` with the original as
    its cause and the sample ids concerned, all of `batch` if they are not known. The remedy of a `CallError` names the
    line of a user's file that the exception came through, or else `place`.

    Args:
        place: ``file:line`` of the interface's method, if it is a user's.
    """
    place = place_that_raised(error) or place
    if isinstance(error, CallError):
        is_named = error.call is not None  # an engine or a piece knows its role only
        located = CallError(
            error.message if is_named else f"{mfc.name} at step {ctx.step}: {error.message}",
            remedy=_looking_at(place, error.remedy),
            call=error.call or mfc.name,
            step=error.step or ctx.step,
        )
        located.sample_ids, located.__cause__ = error.sample_ids, error.__cause__
        return located.with_traceback(error.__traceback__)
    if isinstance(error, Error) and not isinstance(error, SampleError):
        error.call, error.step = error.call or mfc.name, error.step or ctx.step
        return error
    message, remedy = (error.message, error.remedy) if isinstance(error, Error) else (str(error), None)
    failure = CallError(
        f"{_where(ctx, mfc)} raised {type(error).__name__}: {message}",
        remedy=_looking_at(place, remedy),
        call=mfc.name,
        step=ctx.step,
    )
    failure.sample_ids = getattr(error, "sample_ids", ()) or batch.ids
    failure.__cause__ = error
    return failure


def _as_sample(mfc: MFCDef, batch: SequenceSample) -> str | None:
    """Return what an inference writes to return its keys; None for a generation."""
    if mfc.interface_type is not InterfaceType.INFERENCE:
        return None
    like = next((key for key in batch.keys if batch.schemas[key].per is Per.TOKEN), None)
    start, value = (
        ("SequenceSample.from_lists(batch.ids", "lists") if like is None else (f"batch.derive({like!r}", "tensor")
    )
    given = ", ".join(
        f"{mfc.own_name(key)!r}: (KeySchema('float32', Per.SEQUENCE), {value})" for key in mfc.output_keys
    )
    return f"Return {start}, {{{given}}}), with Per.TOKEN or Per.TRANSITION for a key of tokens or transitions."


def _looking_at(place: str, remedy: str | None = None) -> str | None:
    return " ".join(text for text in (f"Look at {place}." if place else "", remedy) if text) or None


def _check_keys(ctx: CallContext, mfc: MFCDef, result: SequenceSample) -> None:
    for key in mfc.output_keys:
        wanted = mfc.own_name(key)
        if wanted not in result.keys:
            has = ", ".join(map(repr, result.keys)) or "nothing"
            alias = f" (for {key!r})" if wanted != key else ""
            hint = did_you_mean(wanted, result.keys)
            unclaimed = [name for name in result.keys if name not in (*mfc.output_keys, *mfc.output_key_remap)]
            if wanted == key and (meant := get_close_matches(key, unclaimed, n=1, cutoff=0.5) or unclaimed[:1]):
                start = f"{hint.removesuffix('?')}, or" if hint else " Did you mean"
                hint = f"{start} output_key_remap={{{meant[0]!r}: {key!r}}} in its MFCDef?"
            _fail(ctx, mfc, f"did not return {wanted!r}{alias}, but {has}.{hint}")


def _check_ids(ctx: CallContext, mfc: MFCDef, batch: SequenceSample, result: SequenceSample) -> None:
    if result.ids == batch.ids:
        return
    given, returned = set(batch.ids), set(result.ids)
    expected = tuple(i for i in batch.ids if i in returned) if mfc.may_drop else batch.ids
    missing = next((i for i in expected if i not in returned), None)
    extra = next((i for i in result.ids if i not in given), None)
    if missing is not None:
        _fail(ctx, mfc, f"returned nothing for sample {missing!r}", missing)
    if extra is not None:
        _fail(ctx, mfc, f"returned sample {extra!r}, which it was not given", extra)
    moved = next((got for got, wanted in zip(result.ids, expected, strict=True) if got != wanted), None)
    if moved is None:
        return
    _fail(ctx, mfc, f"returned its samples in another order than it was given: {moved!r} is out of place", moved)


def _token_lengths(batch: SequenceSample, result: SequenceSample) -> Sequence[Sequence[int]] | None:
    """Tokens per sequence that the output must match; None if neither batch has `input_ids`."""
    for sample in (result, batch):
        if "input_ids" in sample.keys:
            return sample.seqlens["input_ids"]
    return None


def _check_lengths(
    ctx: CallContext, mfc: MFCDef, output: SequenceSample, key: str, tokens: Sequence[Sequence[int]]
) -> None:
    schema = output.schemas[key]
    for sample_id, lengths, token_lengths in zip(output.ids, output.seqlens[key], tokens, strict=True):
        wanted = _expected(schema, token_lengths)
        if tuple(lengths) != wanted:
            _fail(
                ctx,
                mfc,
                f"returned {key!r} with {list(lengths)} rows for sample {sample_id!r}, whose sequences have "
                f"{list(token_lengths)} tokens: a key per {schema.per.value} needs {list(wanted)}",
                sample_id,
                _other_sequences(mfc, key) if len(lengths) != len(wanted) else None,
            )


def _other_sequences(mfc: MFCDef, key: str) -> str:
    """Return how a call gives other sequences than it got."""
    renames = {old: new for old, new in mfc.output_key_remap.items() if old == "input_ids"} or {"input_ids": key}
    return (
        f"Other sequences than it got are returned as 'input_ids', renamed by output_key_remap={renames} in its MFCDef."
    )


def _expected(schema: KeySchema, token_lengths: Sequence[int]) -> tuple[int, ...]:
    match schema.per:
        case Per.TOKEN:
            return tuple(token_lengths)
        case Per.TRANSITION:
            return tuple(n - 1 for n in token_lengths)
        case Per.SEQUENCE:
            return (1,) * len(token_lengths)
        case Per.SAMPLE:
            return (1,)


def _check_finite(ctx: CallContext, mfc: MFCDef, output: SequenceSample, key: str) -> None:
    tensor = output[key]
    if not tensor.is_floating_point():
        return
    finite = torch.isfinite(tensor)
    if bool(finite.all()):
        return
    row = int((~finite).flatten(1).any(1).nonzero()[0]) if tensor.dim() > 1 else int((~finite).nonzero()[0])
    ends = list(accumulate(sum(lengths) for lengths in output.seqlens[key]))
    index = next(i for i, end in enumerate(ends) if row < end)
    inside = row - (ends[index - 1] if index else 0)
    value = next(v for v in tensor[row].reshape(-1).tolist() if not math.isfinite(v))
    n_bad = sum(not bool(torch.isfinite(rows).all()) for rows in output.samples(key))
    sample_id = output.ids[index]
    others = f" ({n_bad} samples have such values)" if n_bad > 1 else ""
    _fail(ctx, mfc, f"returned {key!r} = {value} in row {inside} of sample {sample_id!r}{others}", sample_id)


def _fail(
    ctx: CallContext, mfc: MFCDef, what: str, sample_id: str | None = None, remedy: str | None = None
) -> NoReturn:
    error = CallError(
        f"{_where(ctx, mfc)} {what}",
        remedy=remedy or f"Look at its {mfc.interface_type.value} method and at the sample's inputs.",
        call=mfc.name,
        step=ctx.step,
    )
    error.sample_ids = (sample_id,) if sample_id is not None else ()
    raise error


def _where(ctx: CallContext, mfc: MFCDef) -> str:
    return f"{mfc.name} of role {mfc.role!r} at step {ctx.step}: interface {mfc.interface.name!r}"
