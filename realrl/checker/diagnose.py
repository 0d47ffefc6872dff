"""From differences to causes: in which variants a result differs, and what measured relations hold there.

A result is explained variant by variant. Each rule looks at the variants that are not explained yet, in this order, and
takes those that its cause accounts for:

    again                     not repeatable, or a generator of the process
    any, in a call that draws from a generator of the process
    any, of an input that was changed in place
    junk                      a mask that was dropped
    resumed                   state that is not saved
    first in a later step     state between steps
    micro-batches alone       a mean instead of a sum, or something of the micro-batch as a whole
    reversed order            the place in the batch, or the order
    shuffled order alone      data of another call that is no key
    two workers               a rank's own samples, metric, count, or rank
    tensor, pipeline          what ran on one stage only
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from realrl.checker import causes, evidence
from realrl.checker.causes import Cause
from realrl.checker.compare import Comparison, Difference, Kind, roots
from realrl.checker.recording import Recording
from realrl.checker.variants import (
    AGAIN,
    DATA,
    IN_MICRO_BATCHES,
    IN_ORDERS,
    ON_ENGINES,
    RESUMED,
    REVERSED,
    SHUFFLED,
    SPOILT,
)
from realrl.graph.mfc import MFCDef

_GROUP_OF = {
    Kind.OUTPUT: "output",
    Kind.NORMALISER: "normaliser",
    Kind.LOSS: "training",
    Kind.GRADIENT: "training",
    Kind.WEIGHTS: "training",
    Kind.STATISTIC: "statistics",
}
_MOST_STATE = 3  # attributes that a finding names


@dataclass(frozen=True)
class Finding:
    """A cause, and what shows it.

    Attributes:
        call: the call in which numbers differ first; empty for metrics of the step.
        step: the first step with a difference.
        names: what differs: keys, "loss", statistics, parameters, metrics.
        by_variant: variant -> the largest difference.
        evidence: relations that were measured.
        attributes: (call, attribute of its interface) that a resumed run does not have.
    """

    cause: Cause
    call: str
    step: int
    names: tuple[str, ...]
    by_variant: Mapping[str, Difference]
    evidence: tuple[str, ...] = ()
    attributes: tuple[tuple[str, str], ...] = ()

    @property
    def kind(self) -> Kind | None:
        """The kind of what differs; None for a run that failed."""
        return next(iter(self.by_variant.values())).kind if self.by_variant else None


@dataclass
class _Group:
    """Differences of one kind in one call, by variant, as far as nothing explains them yet."""

    call: str
    name: str
    found: dict[str, list[Difference]] = field(default_factory=dict)


class Diagnosis:
    """The findings of one check.

    Args:
        base: recording of the baseline.
        others: variant -> its recording and comparison.
        mfcs: calls, in the order of the graph.
    """

    def __init__(
        self, base: Recording, others: Mapping[str, tuple[Recording, Comparison]], mfcs: Sequence[MFCDef]
    ) -> None:
        self._base = base
        self._recordings = {name: recording for name, (recording, _) in others.items()}
        self._mfcs = {mfc.name: mfc for mfc in mfcs}
        self._groups: dict[tuple[str, str], _Group] = {}
        for variant, (_, comparison) in others.items():
            for one in roots(comparison.differences, mfcs):
                self._add(variant, one)

    def findings(self) -> list[Finding]:
        """Return what explains all differences, in the order of the graph; equal causes in one call are one finding."""
        order = [*self._mfcs, ""]
        found = [one for group in self._groups.values() for one in self._explain(group)]
        found = _without_followers(_merged(found))
        return sorted(found, key=lambda one: (one.step, order.index(one.call)))

    def _add(self, variant: str, one: Difference) -> None:
        name = _GROUP_OF.get(one.kind, f"metric {one.name}")
        groups = self._groups
        if name == "statistics" and variant in groups.get((one.call, "training"), _Group("", "")).found:
            name = "training"  # both come from one function
        groups.setdefault((one.call, name), _Group(one.call, name)).found.setdefault(variant, []).append(one)

    def _explain(self, group: _Group) -> Iterator[Finding]:
        left = dict(group.found)
        for rule in (
            self._unrepeatable,
            self._drawn,
            self._changed,
            self._masked,
            self._forgotten,
            self._state,
            self._cut,
            self._ordered,
            self._shuffled,
            self._divided,
        ):
            explained = rule(group, left)
            if explained is None:
                continue
            finding, variants = explained
            yield finding
            left = {name: found for name, found in left.items() if name not in variants}
        if left:
            yield self._finding(causes.ONE_STAGE, left)

    def _finding(self, cause: Cause, found: Mapping[str, Sequence[Difference]], *shown: str) -> Finding:
        worst = {variant: max(some, key=lambda one: (-one.step, one.relative)) for variant, some in found.items()}
        names = tuple(dict.fromkeys(one.name for some in found.values() for one in some))
        first = min((one for some in found.values() for one in some), key=lambda one: one.step)
        return Finding(cause, first.call, first.step, names, worst, tuple(line for line in shown if line))

    # ------------------------------------------------------------ rules

    def _unrepeatable(self, group: _Group, left: Mapping[str, list[Difference]]) -> _Explained:
        if AGAIN.name not in left:
            return None
        drawn = evidence.draws_from(self._base, group.call)
        told = f"it draws from {_generators(drawn)}" if drawn else ""
        return self._finding(causes.UNREPEATABLE, left, told), set(left)

    def _drawn(self, group: _Group, left: Mapping[str, list[Difference]]) -> _Explained:
        drawn = evidence.draws_from(self._base, group.call)
        if not left or not drawn:
            return None
        return self._finding(causes.GENERATOR, left, f"it draws from {_generators(drawn)}"), set(left)

    def _changed(self, group: _Group, left: Mapping[str, list[Difference]]) -> _Explained:
        if not left or group.call not in self._mfcs:
            return None
        read, told = set(self._mfcs[group.call].input_keys), []
        for (step, call), seen in self._base.calls.items():
            changed = {key for one in seen for key in one.changed_inputs}
            if step == 1 and (call == group.call or not changed.isdisjoint(read)):
                told += [f"'{call}' changes its input '{key}'" for key in sorted(changed)]
        return (self._finding(causes.CHANGED_INPUT, left, *told), set(left)) if told else None

    def _masked(self, group: _Group, left: Mapping[str, list[Difference]]) -> _Explained:
        found = _part(left, [SPOILT.name])
        return (self._finding(causes.MASK, found), {SPOILT.name}) if found else None

    def _forgotten(self, group: _Group, left: Mapping[str, list[Difference]]) -> _Explained:
        found = _part(left, [RESUMED.name])
        if not found:
            return None
        step, other = found[RESUMED.name][0].step, self._recordings[RESUMED.name]
        forgotten = [
            (call, name, f"attribute {name!r} of '{call}' begins step {step} with {a:.6g}, and with {b:.6g} if resumed")
            for call in self._mfcs
            for name, a, b in evidence.forgotten_state(self._base, other, step, call)
        ][:_MOST_STATE]
        told = [text for *_, text in forgotten] or [
            "no attribute of an interface tells: it is kept in a module or class"
        ]
        finding = self._finding(causes.NOT_SAVED, found, *told)
        attributes = tuple((call, name) for call, name, _ in forgotten)
        return replace(finding, attributes=attributes), {RESUMED.name}

    def _state(self, group: _Group, left: Mapping[str, list[Difference]]) -> _Explained:
        found = {name: some for name, some in left.items() if min(one.step for one in some) > 1}
        if not found or len(found) < len(left):
            return None
        told = []
        for name, (variant, values) in self._states(found).items():
            shown = ", ".join(f"{value:.6g}" for value in values)
            told.append(f"attribute {name!r} after step 1, in the baseline and on each worker of {variant}: {shown}")
        return self._finding(causes.STATE, found, *told[:_MOST_STATE]), set(found)

    def _states(self, variants: Iterable[str]) -> dict[str, tuple[str, tuple[float, ...]]]:
        """Return attribute -> variant in which it differs after the first step, and its values."""
        found: dict[str, tuple[str, tuple[float, ...]]] = {}
        for variant in variants:
            for call in self._mfcs:
                for name, values in evidence.unequal_state(self._base, self._recordings[variant], 1, call):
                    found.setdefault(name, (variant, values))
        return found

    def _cut(self, group: _Group, left: Mapping[str, list[Difference]]) -> _Explained:
        found = _part(left, IN_MICRO_BATCHES)
        if not found or any(name in left for name in IN_ORDERS):
            return None
        rest = {name for name in left if name in (DATA.name, *IN_MICRO_BATCHES, *ON_ENGINES)}
        every = {name: left[name] for name in left if name in rest}
        if group.name.startswith("metric "):
            return self._finding(causes.BY_BATCHES, every), rest
        if group.name in ("training", "statistics"):
            cause, told = self._mean_or_not(group, found)
            return self._finding(cause, every, told), rest
        return self._finding(causes.PER_MICRO_BATCH, every), rest

    def _mean_or_not(self, group: _Group, found: Mapping[str, Sequence[Difference]]) -> tuple[Cause, str]:
        cause = causes.MEAN_LOSS if group.name == "training" else causes.MEAN_STATISTIC
        grown = group.name == "training"
        for variant, some in found.items():
            other = self._recordings[variant]
            for one in sorted(some, key=lambda one: one.kind):
                count = evidence.mean_over(self._base, other, one.step, one.call, one.name)
                if count and (one.kind is Kind.LOSS or group.name == "statistics"):
                    return cause, (
                        f"{variant}: weighted by their numbers of {count}, the micro-batches' values of '{one.name}' "
                        "add up to that of the whole minibatch: they are means"
                    )
            grown = grown and evidence.grows_with_parts(self._base, other, some[0].step, group.call)
        if grown:
            return cause, "the norm of the gradient grows in proportion to the number of micro-batches"
        return causes.PER_MICRO_BATCH, ""

    def _ordered(self, group: _Group, left: Mapping[str, list[Difference]]) -> _Explained:
        if REVERSED.name not in left:
            return None
        rest = {name for name in left if name in (*IN_ORDERS, *IN_MICRO_BATCHES, DATA.name)}
        every = {name: left[name] for name in left if name in rest}
        one, other = left[REVERSED.name][0], self._recordings[REVERSED.name]
        if one.kind is Kind.OUTPUT and evidence.goes_by_position(self._base, other, one.step, one.call, one.name):
            told = f"reversed: '{one.name}' has the baseline's numbers, or their total, with other samples"
            return self._finding(causes.BY_POSITION, every, told), rest
        return self._finding(causes.BY_ORDER, every), rest

    def _shuffled(self, group: _Group, left: Mapping[str, list[Difference]]) -> _Explained:
        if SHUFFLED.name not in left:
            return None
        every = _part(left, [SHUFFLED.name, DATA.name])
        told = "nothing differs as long as all calls get their samples in one and the same other order"
        return self._finding(causes.SIDE_CHANNEL, every, told), set(every)

    def _divided(self, group: _Group, left: Mapping[str, list[Difference]]) -> _Explained:
        found = _part(left, [DATA.name])
        if not found:
            return None
        some = sorted(found[DATA.name], key=lambda one: -one.relative)
        told_of_each = [self._cause_of_ranks(one) for one in some]
        cause, told = next((each for each in told_of_each if each[0] is causes.PER_RANK), told_of_each[0])
        return self._finding(cause, found, told), {DATA.name}

    def _cause_of_ranks(self, one: Difference) -> tuple[Cause, str]:
        where = (self._base, self._recordings[DATA.name], one.step, one.call, one.name)
        told: str | float | None
        if one.kind is Kind.NORMALISER:
            return causes.LOCAL_NORMALISER, ""
        if one.kind is Kind.RANKS:
            values = f"the workers return {one.ours:.6g} and {one.theirs:.6g}"
            count = evidence.is_mean_of_rank(*where)
            over = f", the means over their own {count}" if count else ""
            return causes.LOCAL_METRIC, values + over
        if one.kind is Kind.METRIC:
            a = evidence.counts_recorded(self._base, one.step, one.call, one.name)
            b = evidence.counts_recorded(where[1], one.step, one.call, one.name)
            told = f"it was recorded with a count of {a:g}, and of {b:g} on two workers" if a and b and a != b else ""
            return causes.MEAN_OF_MEANS, told
        if one.kind is not Kind.OUTPUT:
            n = max((seen.n_reductions for seen in self._base.of(one.step, one.call)), default=0)
            return causes.PER_RANK, f"the call reduces over workers {n} times"
        if evidence.is_scaled_by_rank(*where):
            return (
                causes.PER_RANK,
                f"on each worker, '{one.name}' is the baseline's, scaled and shifted by its own numbers",
            )
        told = f"'{one.name}' differs on {_ranks(evidence.ranks_that_differ(*where))}"
        is_noted = one.call in self._mfcs and self._mfcs[one.call].is_train  # advantages, whose samples share a worker
        return causes.PER_RANK if is_noted else causes.BY_RANK, told


_Explained = tuple[Finding, set[str]] | None


def _part(found: Mapping[str, list[Difference]], names: Iterable[str]) -> dict[str, list[Difference]]:
    return {name: found[name] for name in names if name in found}


def _merged(findings: Iterable[Finding]) -> list[Finding]:
    """Join findings with one cause in one call."""
    joined: dict[tuple[str, str], Finding] = {}
    for one in findings:
        known = joined.get((one.cause.name, one.call))
        if known is not None:
            one = replace(
                known,
                step=min(known.step, one.step),
                names=tuple(dict.fromkeys((*known.names, *one.names))),
                by_variant={**one.by_variant, **known.by_variant},
                evidence=tuple(dict.fromkeys((*known.evidence, *one.evidence))),
            )
        joined[one.cause.name, one.call] = one
    return list(joined.values())


def _without_followers(findings: Sequence[Finding]) -> list[Finding]:
    """Leave out metrics of a call that another finding of that call accounts for in the same variants."""
    kept = []
    for one in findings:
        is_metric = one.kind in (Kind.METRIC, Kind.RANKS) and one.cause in (causes.STATE, causes.MEAN_OF_MEANS)
        others = [other for other in findings if other is not one and other.call == one.call]
        covers = any(other.by_variant.keys() >= one.by_variant.keys() and other.step <= one.step for other in others)
        if not (is_metric and covers):
            kept.append(one)
    return kept


def _generators(names: Sequence[str]) -> str:
    told = {"torch": "torch's default generator", "random": "the module random", "numpy": "numpy.random"}
    return " and ".join(told[name] for name in names)


def _ranks(ranks: Sequence[int]) -> str:
    return "worker " + " and ".join(map(str, ranks)) + (" only" if len(ranks) == 1 else "")
