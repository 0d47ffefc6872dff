"""First differences of a variant's recording from the baseline's: by call, kind of result, key, sample.

Tolerances: two numbers are equal if they differ by at most 1e-4 of the larger of them, or of the root mean square of
all numbers of their key, plus 1e-6. Integers and booleans, such as tokens, must be equal. Losses and statistics are
compared after division by the baseline's normaliser. Gradients and weights are compared parameter by parameter: the
norm of the difference against that of the parameter, but at least 1e-3 of the largest norm. Losses, statistics
and metrics that are at most 1e-5 in both runs are equal: they may be means of differences that are zero in truth.

Invariants of `roots`:
    - a difference that follows from another one of the same run is none: one in a call whose inputs differ, or after a
      step that changed what the next one begins with;
    - every run with a difference has a root.

Notes of a train_step on responses, such as their advantages, are compared where its gradients or losses differ, which
then follow from them. Alone they differ by rounding: an advantage may be the difference of nearly equal rewards.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum

from realrl.checker.recording import CallSeen, MinibatchSeen, Recording, Rows, Sketch
from realrl.graph.mfc import MFCDef

REL = 1e-4
FLOOR = 1e-6
_LEAST_NORM = 1e-3  # of the largest parameter's
_NOISE = 1e-5  # what rounding leaves where terms cancel: of gradients of a student that equals its teacher, of its KL


class Kind(IntEnum):
    """A kind of result, in the order in which a call produces them."""

    OUTPUT = 0
    NORMALISER = 1
    LOSS = 2
    STATISTIC = 3
    GRADIENT = 4
    WEIGHTS = 5
    RANKS = 6  # a metric that ranks return differently
    METRIC = 7


@dataclass(frozen=True)
class Difference:
    """One result of one call that differs.

    Attributes:
        name: key, statistic, parameter or metric.
        sample: the sample that differs most, for outputs.
        ours, theirs: what the baseline has there, and the variant.
        relative: the difference, relative to the scale that its kind is compared on.
        n_differing, n_compared: samples (or parameters) that differ, of all.
    """

    step: int
    call: str
    kind: Kind
    name: str
    ours: float
    theirs: float
    relative: float
    sample: str = ""
    n_differing: int = 1
    n_compared: int = 1


@dataclass(frozen=True)
class Comparison:
    """A variant against the baseline.

    Attributes:
        n_values: numbers of outputs that were compared.
        n_tensors: gradients and weights that were.
        n_metrics: metrics, over all steps.
        largest: the largest relative difference within the tolerance.
    """

    differences: tuple[Difference, ...]
    n_values: int = 0
    n_tensors: int = 0
    n_metrics: int = 0
    largest: float = 0.0

    @property
    def within(self) -> str:
        """The largest deviation, in words where nothing exceeds what always counts as equal."""
        return f"{self.largest:.1e}" if self.largest else "rounding"


@dataclass
class _Tally:
    found: list[Difference] = field(default_factory=list)
    n_values: int = 0
    n_tensors: int = 0
    n_metrics: int = 0
    largest: float = 0.0

    def add(self, difference: Difference) -> None:
        """Keep a difference above the tolerance; note the size of others."""
        if difference.relative > REL:
            self.found.append(difference)
        else:
            self.largest = max(self.largest, difference.relative)


def compare(base: Recording, other: Recording, mfcs: Sequence[MFCDef], *, n_steps: int, whole: bool) -> Comparison:
    """Compare all that two runs produced.

    Args:
        mfcs: calls, in the order of the graph.
        n_steps: steps of both.
        whole: both runs hold whole parameters on each worker, so that their tensors can be compared.
    """
    tally = _Tally()
    for step in range(1, n_steps + 1):
        for mfc in mfcs:
            keys, n_before = mfc.output_keys, len(tally.found)
            if mfc.is_train:
                _compare_training(tally, step, mfc.name, base, other, whole=whole)
                noted = (key for seen in base.of(step, mfc.name) for key in seen.outputs)
                keys = tuple(dict.fromkeys(noted)) if len(tally.found) > n_before else ()
            for key in keys:
                _compare_rows(
                    tally, step, mfc.name, key, base.rows(step, mfc.name, key), other.rows(step, mfc.name, key)
                )
        _compare_metrics(tally, step, base, other)
    return Comparison(tuple(tally.found), tally.n_values, tally.n_tensors, tally.n_metrics, tally.largest)


def roots(differences: Iterable[Difference], mfcs: Sequence[MFCDef]) -> list[Difference]:
    """Return the differences that follow from no other one, in the order of steps and calls."""
    by_place: dict[tuple[int, str], list[Difference]] = {}
    for one in differences:
        by_place.setdefault((one.step, one.call), []).append(one)
    found: list[Difference] = []
    last = max((step for step, _ in by_place), default=0)
    is_clean = True  # so far, but for metrics, which change nothing
    for step in range(1, last + 1):
        tainted: set[str] = set()
        changed = False
        for mfc in mfcs:
            own = by_place.get((step, mfc.name), [])
            follows = not is_clean or not tainted.isdisjoint(mfc.input_keys)
            found += _first(own, follows)
            tainted |= {one.name for one in own if one.kind is Kind.OUTPUT and one.name in mfc.output_keys}
            changed |= any(one.kind < Kind.RANKS for one in own)
        if is_clean and not changed:
            found += by_place.get((step, ""), [])
        is_clean = is_clean and not changed
    return found


def _first(own: Sequence[Difference], follows: bool) -> list[Difference]:
    """Return the roots among the differences of one call in one step."""
    ranks = [one for one in own if one.kind is Kind.RANKS]
    named = {one.name for one in ranks}
    if follows:
        return ranks
    given = [one for one in own if one.kind is Kind.OUTPUT]
    if given:
        return given + ranks
    sums = [one for one in own if one.kind in (Kind.NORMALISER, Kind.LOSS, Kind.STATISTIC)]
    if sums:
        is_count = any(one.kind is Kind.NORMALISER for one in sums)
        return [one for one in sums if not is_count or one.kind is Kind.NORMALISER] + ranks
    for kind in (Kind.GRADIENT, Kind.WEIGHTS):
        worst = max((one for one in own if one.kind is kind), key=lambda one: one.relative, default=None)
        if worst is not None:
            return [worst, *ranks]
    return ranks + [one for one in own if one.kind is Kind.METRIC and one.name not in named]


# ---------------------------------------------------------------- outputs


def _compare_rows(
    tally: _Tally,
    step: int,
    call: str,
    key: str,
    ours: Mapping[str, tuple[int, Rows]],
    theirs: Mapping[str, tuple[int, Rows]],
) -> None:
    size = _rms(value for _, rows in ours.values() for value in rows.values)
    n_differing, worst = 0, Difference(step, call, Kind.OUTPUT, key, 0.0, 0.0, 0.0)
    for sample_id in dict.fromkeys((*ours, *theirs)):
        if sample_id not in ours or sample_id not in theirs:
            one = Difference(step, call, Kind.OUTPUT, key, sample_id in ours, sample_id in theirs, math.inf, sample_id)
        else:
            tally.n_values += len(ours[sample_id][1].values)
            one = _worst_of(ours[sample_id][1], theirs[sample_id][1], size, replace(worst, relative=0.0))
            one = replace(one, sample=sample_id)
        n_differing += one.relative > REL
        worst = max(worst, one, key=lambda d: d.relative)
    tally.add(replace(worst, n_differing=n_differing, n_compared=len(ours)))


def _worst_of(a: Rows, b: Rows, size: float, empty: Difference) -> Difference:
    if a.lengths != b.lengths or len(a.values) != len(b.values):
        return replace(empty, ours=float(len(a.values)), theirs=float(len(b.values)), relative=math.inf)
    worst = empty
    for x, y in zip(a.values, b.values, strict=True):
        relative = (math.inf if x != y else 0.0) if a.is_exact else relative_difference(x, y, size)
        if relative > worst.relative:
            worst = replace(empty, ours=x, theirs=y, relative=relative)
    return worst


def relative_difference(a: float, b: float, size: float = 0.0) -> float:
    """Return the difference, less the floor for rounding, relative to the larger number or to `size`."""
    scale = max(abs(a), abs(b), size)
    return max(0.0, abs(a - b) - FLOOR) / scale if scale else 0.0


def _of_sums(a: float, b: float) -> float:
    """Return the relative difference of two sums, whose terms may cancel; infinite where a run has none (NaN)."""
    if math.isnan(a) or math.isnan(b):
        return math.inf
    return relative_difference(a, b) if max(abs(a), abs(b)) > _NOISE else 0.0


def _rms(values: Iterable[float]) -> float:
    numbers = list(values)
    return math.sqrt(math.fsum(v * v for v in numbers) / len(numbers)) if numbers else 0.0


# ---------------------------------------------------------------- training


def minibatches_of(seen: Sequence[CallSeen]) -> list[list[MinibatchSeen]]:
    """Return the shares of each minibatch, over ranks that hold different samples."""
    n = max((len(one.minibatches) for one in seen), default=0)
    shares: list[list[MinibatchSeen]] = []
    for i in range(n):
        by_ids: dict[tuple[str, ...], MinibatchSeen] = {}
        for one in seen:
            if i < len(one.minibatches) and (one.minibatches[i].parts or one.minibatches[i].ids not in by_ids):
                by_ids[one.minibatches[i].ids] = one.minibatches[i]
        shares.append(list(by_ids.values()))
    return shares


def _compare_training(tally: _Tally, step: int, call: str, base: Recording, other: Recording, *, whole: bool) -> None:
    ours, theirs = base.of(step, call), other.of(step, call)
    for a, b in zip(minibatches_of(ours), minibatches_of(theirs)):
        before = len(tally.found)
        _compare_minibatch(tally, Difference(step, call, Kind.LOSS, "loss", 0.0, 0.0, 0.0), a, b)
        if len(tally.found) > before:  # the next one begins with other weights
            break
    if whole and ours and theirs:
        for kind, mine, yours in (
            (Kind.GRADIENT, ours[0].gradients, theirs[0].gradients),
            (Kind.WEIGHTS, ours[0].weights, theirs[0].weights),
        ):
            _compare_tensors(tally, Difference(step, call, kind, "", 0.0, 0.0, 0.0), mine, yours)
    for name, value in (theirs[0].metrics if theirs else {}).items():
        values = [one.metrics.get(name, value) for one in theirs]
        low, high = min(values), max(values)
        tally.add(Difference(step, call, Kind.RANKS, name, low, high, relative_difference(low, high)))


def _compare_minibatch(
    tally: _Tally, empty: Difference, ours: Sequence[MinibatchSeen], theirs: Sequence[MinibatchSeen]
) -> None:
    normaliser = ours[0].normaliser
    for share in theirs:
        relative = relative_difference(normaliser, share.normaliser)
        tally.add(replace(empty, kind=Kind.NORMALISER, name="normaliser", ours=normaliser, theirs=share.normaliser,
                          relative=relative))  # fmt: skip
    mine, yours = sums_of(ours), sums_of(theirs)
    for name in dict.fromkeys((*mine, *yours)):
        a, b = (sums.get(name, math.nan) / normaliser for sums in (mine, yours))
        kind = Kind.LOSS if name == "loss" else Kind.STATISTIC
        tally.add(replace(empty, kind=kind, name=name, ours=a, theirs=b, relative=_of_sums(a, b)))
    a, b = ours[0].grad_norm, theirs[0].grad_norm
    tally.add(replace(empty, kind=Kind.GRADIENT, name="norm of all", ours=a, theirs=b, relative=_of_sums(a, b)))


def sums_of(shares: Sequence[MinibatchSeen]) -> dict[str, float]:
    """Return the loss and the statistics of a minibatch, added up over micro-batches and ranks; maxima as they are."""
    parts = [part for share in shares for part in share.parts]
    sums = {"loss": math.fsum(part.loss for part in parts)} if parts else {}
    for name in dict.fromkeys(name for part in parts for name in part.stats):
        sums[name] = math.fsum(part.stats.get(name, 0.0) for part in parts)
    for name in dict.fromkeys(name for part in parts for name in part.maxima):
        sums[f"{name} (maximum)"] = max(part.maxima.get(name, -math.inf) for part in parts)
    return sums


def _compare_tensors(
    tally: _Tally, empty: Difference, ours: Mapping[str, Sketch], theirs: Mapping[str, Sketch]
) -> None:
    largest = max((sketch.norm for sketch in ours.values()), default=0.0)
    found = []
    for name, a in ours.items():
        b = theirs[name]
        least = _LEAST_NORM * largest
        off = max(0.0, math.dist(a.numbers, b.numbers) - _NOISE) / max(math.hypot(*a.numbers), least, FLOOR)
        off = max(off, max(0.0, abs(a.norm - b.norm) - _NOISE) / max(a.norm, b.norm, least, FLOOR))
        found.append(replace(empty, name=name, ours=a.norm, theirs=b.norm, relative=off))
    tally.n_tensors += len(found)
    if found:
        n_differing = sum(one.relative > REL for one in found)
        worst = max(found, key=lambda one: one.relative)
        tally.add(replace(worst, n_differing=n_differing, n_compared=len(found)))


# ---------------------------------------------------------------- metrics


def _compare_metrics(tally: _Tally, step: int, base: Recording, other: Recording) -> None:
    if len(base.metrics) < step or len(other.metrics) < step:
        return
    ours, theirs, owners = base.metrics[step - 1], other.metrics[step - 1], dict(_owners(base, step))
    tally.n_metrics += len(ours)
    for name in dict.fromkeys((*ours, *theirs)):
        a, b = ours.get(name, math.nan), theirs.get(name, math.nan)
        tally.add(Difference(step, owners.get(name, ""), Kind.METRIC, name, a, b, _of_sums(a, b)))


def _owners(recording: Recording, step: int) -> Iterator[tuple[str, str]]:
    """Yield (metric, call that gave it)."""
    for (at, call), seen in recording.calls.items():
        for one in seen if at == step else ():
            for name in (*one.sums, *one.maxima, *one.metrics):
                yield name, call
                if name.endswith("/mean_square"):
                    yield f"{name.removesuffix('mean_square')}std", call
