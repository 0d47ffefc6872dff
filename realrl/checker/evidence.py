"""Tests of single explanations on two recordings; each is a relation that holds exactly if the explanation is right."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from realrl.checker.compare import Kind, minibatches_of, relative_difference
from realrl.checker.recording import CallSeen, PartSeen, Recording

_CLOSE = 1e-3
_COUNTS = ("response tokens", "transitions", "tokens", "sequences", "samples")
_LEAST = 1e-6  # sums below it are rounding
_RATIO = 0.25  # relative error of a ratio of gradients that still counts as a number of micro-batches


def mean_over(base: Recording, other: Recording, step: int, call: str, name: str) -> str:
    """Return what a loss or statistic was divided by in each micro-batch; empty if it was no mean.

    If each part j gives m_j, the mean of n_j values, then the sum of n_j m_j is that of the whole minibatch, N m.
    """
    for ours, theirs in zip(minibatches_of(base.of(step, call)), minibatches_of(other.of(step, call))):
        whole = [part for share in ours for part in share.parts]
        parts = [part for share in theirs for part in share.parts]
        if len(whole) != 1 or len(parts) < 2:
            continue
        for count in _COUNTS:
            if count not in whole[0].counts:
                continue
            wanted = whole[0].counts[count] * _value(whole[0], name)
            got = [part.counts[count] * _value(part, name) for part in parts]
            if abs(wanted) > _LEAST and _is_close(math.fsum(got), wanted, got):
                return count
    return ""


def grows_with_parts(base: Recording, other: Recording, step: int, call: str) -> bool:
    """True if the gradient of the first minibatch is as many times larger as there are micro-batches in all."""
    ours, theirs = minibatches_of(base.of(step, call)), minibatches_of(other.of(step, call))
    if not ours or not theirs or ours[0][0].grad_norm <= _LEAST:
        return False
    n_parts = sum(len(share.parts) for share in theirs[0])
    ratio = theirs[0][0].grad_norm / ours[0][0].grad_norm
    return n_parts > 1 and abs(ratio - n_parts) <= _RATIO * n_parts


def goes_by_position(base: Recording, other: Recording, step: int, call: str, key: str) -> bool:
    """True if an output has the baseline's numbers at each place of the batch, or its total, with other samples."""
    ours, theirs = base.of(step, call), other.of(step, call)
    if len(ours) != 1 or len(theirs) != 1:
        return False
    a, b = (_packed(one, key) for one in (ours[0], theirs[0]))
    if not a or len(a) != len(b):
        return False
    if all(relative_difference(x, y) <= _CLOSE for x, y in zip(a, b, strict=True)):
        return True
    is_exact = next(iter(ours[0].outputs[key].values())).is_exact
    return not is_exact and _is_close(math.fsum(a), math.fsum(b), a)


def is_scaled_by_rank(base: Recording, other: Recording, step: int, call: str, key: str) -> bool:
    """True if each rank's numbers are those of the baseline, scaled and shifted by two numbers of that rank."""
    ours = base.rows(step, call, key)
    is_any = False
    for seen in other.of(step, call):
        pairs = [
            pair
            for sample_id, rows in seen.outputs.get(key, {}).items()
            if sample_id in ours
            for pair in zip(ours[sample_id][1].values, rows.values)
        ]
        if not _is_affine(pairs):
            return False
        is_any = is_any or len({x for x, _ in pairs}) > 2
    return is_any


def ranks_that_differ(base: Recording, other: Recording, step: int, call: str, key: str) -> tuple[int, ...]:
    """Return the ranks on which some number of an output is not the baseline's."""
    ours, found = base.rows(step, call, key), set[int]()
    for sample_id, (rank, rows) in other.rows(step, call, key).items():
        if sample_id not in ours or not _same(ours[sample_id][1].values, rows.values):
            found.add(rank)
    return tuple(sorted(found))


def is_mean_of_rank(base: Recording, other: Recording, step: int, call: str, metric: str) -> str:
    """Return what the metric of each rank is a mean over, of that rank's own samples; empty if it is none.

    Those of all ranks, weighted by their counts, are then the metric of the baseline.
    """
    ours, theirs = base.of(step, call), other.of(step, call)
    if len(ours) != 1 or len(theirs) < 2:
        return ""
    for count in _COUNTS:
        if count in ours[0].counts and all(count in one.counts and metric in one.metrics for one in theirs):
            got = [one.counts[count] * one.metrics[metric] for one in theirs]
            wanted = ours[0].counts[count] * ours[0].metrics.get(metric, math.nan)
            if _is_close(math.fsum(got), wanted, got):
                return count
    return ""


def counts_recorded(recording: Recording, step: int, call: str, metric: str) -> float | None:
    """Return the count of a metric that was added to `ctx.metrics`, over all ranks; None if it was not."""
    counts = [one.sums[metric][1] for one in recording.of(step, call) if metric in one.sums]
    return math.fsum(counts) if counts else None


def unequal_state(base: Recording, other: Recording, step: int, call: str) -> list[tuple[str, tuple[float, ...]]]:
    """Return (attribute, its first number on each rank) where ranks disagree, or differ from the baseline."""
    ours, theirs = base.of(step, call), other.of(step, call)
    found = []
    for name in dict.fromkeys(name for one in (*ours, *theirs) for name in one.state):
        values = [one.state.get(name, ()) for one in (ours[-1:] + theirs)]
        if any(not _same(values[0], value) for value in values[1:]):
            found.append((name, tuple(map(_first_of, values))))
    return found


def forgotten_state(base: Recording, other: Recording, step: int, call: str) -> list[tuple[str, float, float]]:
    """Return (attribute, its first number in the baseline, in the other run) where a call begins with another state.

    An attribute that one run does not have is not a number there.
    """
    ours, theirs = base.of(step, call), other.of(step, call)
    if not (ours and theirs):
        return []
    before, after = ours[0].state_before, theirs[0].state_before
    pairs = [(name, before.get(name, ()), after.get(name, ())) for name in dict.fromkeys((*before, *after))]
    return [(name, _first_of(a), _first_of(b)) for name, a, b in pairs if not _same(a, b)]


def draws_from(base: Recording, call: str) -> tuple[str, ...]:
    """Return the generators of its process that a call drew from in the baseline."""
    drawn = (name for (_, at), seen in base.calls.items() if at == call for one in seen for name in one.drawn_from)
    return tuple(dict.fromkeys(drawn))


def is_training(kind: Kind) -> bool:
    """True for what a minibatch gives."""
    return Kind.NORMALISER <= kind <= Kind.WEIGHTS


def _first_of(numbers: tuple[float, ...]) -> float:
    return numbers[0] if numbers else math.nan


def _value(part: PartSeen, name: str) -> float:
    return part.loss if name == "loss" else part.stats.get(name, 0.0)


def _packed(seen: CallSeen, key: str) -> list[float]:
    rows = seen.outputs.get(key, {})
    return [value for sample_id in seen.ids if sample_id in rows for value in rows[sample_id].values]


def _is_close(a: float, b: float, terms: Iterable[float]) -> bool:
    scale = math.fsum(abs(term) for term in terms)
    return abs(a - b) <= _CLOSE * scale if scale > _LEAST else False


def _same(a: Sequence[float], b: Sequence[float]) -> bool:
    return len(a) == len(b) and all(relative_difference(x, y) <= _CLOSE for x, y in zip(a, b, strict=True))


def _is_affine(pairs: Sequence[tuple[float, float]]) -> bool:
    """True if y = a x + b for all pairs, up to a thousandth of y's spread."""
    n = len(pairs)
    if n == 0:
        return True
    mean_x, mean_y = (math.fsum(column) / n for column in zip(*pairs, strict=True))
    var_x = math.fsum((x - mean_x) ** 2 for x, _ in pairs)
    slope = math.fsum((x - mean_x) * (y - mean_y) for x, y in pairs) / var_x if var_x > 0 else 0.0
    off = max(abs(y - mean_y - slope * (x - mean_x)) for x, y in pairs)
    spread = max(max(abs(y) for _, y in pairs), _LEAST)
    return off <= _CLOSE * spread
