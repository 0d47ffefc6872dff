"""Two plans side by side: where calls run, what they take, the memory of devices, and what bounds each."""

from __future__ import annotations

from realrl.plan.memory.plan import show_bytes
from realrl.plan.samples.partition import default_n_mbs
from realrl.planner.evaluate import Evaluated
from realrl.planner.explain import lacking_text
from realrl.planner.times import CallTimes, call_times
from realrl.planner.words import Block, Table, seconds_text

_SHOWN_BOUNDS = 6


def compare(first: Evaluated, second: Evaluated) -> list[Block]:
    """Return the differences of two plans of one run."""
    names = (_title(first, second, "the first"), _title(second, first, "the second"))
    rows = [
        ("a step, by the real scheduler", *(seconds_text(one.period_s) for one in (first, second))),
        ("a step, by the fast model", *(seconds_text(one.fast_s) for one in (first, second))),
        ("fullest device", *(_fullest(one) for one in (first, second))),
        ("memory of the devices, in the mean", *(show_bytes(_mean_memory(one)) for one in (first, second))),
    ]
    ratio = second.period_s / first.period_s if first.period_s else 1.0
    if abs(ratio - 1.0) < 1e-4:
        verdict = "Both take the same time."
    else:
        better, worse = (names[0], names[1]) if ratio > 1 else (names[1], names[0])
        verdict = f"{better} is {max(ratio, 1 / ratio):.2f} times as fast as {worse}."
    return [
        verdict,
        Table(("", *names), tuple(rows)),
        *_settings(first, second, names),
        _calls(first, second, names),
        _bounds(first, second, names),
    ]


def _title(one: Evaluated, other: Evaluated, place: str) -> str:
    return one.name if one.name != other.name else f"{one.name} ({place})"


def _fullest(one: Evaluated) -> str:
    rank, call, needs = one.fullest
    return f"{show_bytes(needs)}, device {rank} in {call}" + ("" if one.fits else f"; {lacking_text(one)}")


def _mean_memory(one: Evaluated) -> int:
    """Return the mean, over the devices that work, of the most that each needs."""
    peaks = [one.memory.peak(rank)[1] for rank in one.memory.ranks]
    return sum(usage.total + (usage.host if one.on_cpu else 0) for usage in peaks) // max(1, len(peaks))


def _settings(first: Evaluated, second: Evaluated, names: tuple[str, str]) -> list[Block]:
    rows = [row for row in _flat(first, second) if row[1] != row[2]]
    if not rows:
        return ["Their settings are the same."]
    return [Table(("setting", *names), tuple(rows), title="What differs")]


def _flat(first: Evaluated, second: Evaluated) -> list[tuple[str, ...]]:
    """Return the settings of both, one after the other."""
    found: list[tuple[str, ...]] = [
        (f"allocation.calls.{name}", *(str(one.plan.allocations[name]) for one in (first, second)))
        for name in first.settings.allocations
    ]
    for name in dict.fromkeys((*first.settings.n_mbs, *second.settings.n_mbs)):
        found.append((f"calls.{name}.n_mbs", *(micro_batches(one, name) for one in (first, second))))
    for field, told in (
        ("zero_stage", "models.{}.optimizer.zero_stage"),
        ("checkpointing", "models.{}.activation_checkpointing"),
        ("offload_optimizer", "models.{}.optimizer.offload"),
    ):
        a, b = getattr(first.settings, field), getattr(second.settings, field)
        for key in dict.fromkeys((*a, *b)):
            found.append((told.format(key), *(_shown(one.get(key)) for one in (a, b))))
    return [*found, ("allocation.offload", *(", ".join(one.settings.offload) or "-" for one in (first, second)))]


def micro_batches(found: Evaluated, call: str) -> str:
    """Return the number of micro-batches of a call, for each minibatch and worker: its own, or its strategy's."""
    mfc = next(mfc for mfc in found.plan.mfcs if mfc.name == call)
    if mfc.n_mbs is None and mfc.max_tokens_per_mb is not None:
        return f"as many as {mfc.max_tokens_per_mb} tokens each give"
    return str(mfc.n_mbs or default_n_mbs(found.plan.allocations[call].strategy.pp, is_train=mfc.is_train))


def _shown(value: object) -> str:
    if value is None:
        return "-"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _calls(first: Evaluated, second: Evaluated, names: tuple[str, str]) -> Table:
    """Return the seconds of every call and of what surrounds it, under both plans."""
    times = call_times(first.run), call_times(second.run)
    rows: list[tuple[str, ...]] = []
    for name in first.settings.allocations:
        a, b = (one.get(name, CallTimes()) for one in times)
        rows.append((name, seconds_text(a.run), seconds_text(b.run)))
        for what in ("before", "rows", "after"):
            if max(getattr(a, what), getattr(b, what)) > 0.0:
                words = {"before": "parameters before it", "rows": "its rows", "after": "parameters after it"}[what]
                rows.append((f"  {words}", *(seconds_text(getattr(one, what)) for one in (a, b))))
    return Table(("a step of", *names), tuple(rows), title="Seconds of calls")


def _bounds(first: Evaluated, second: Evaluated, names: tuple[str, str]) -> Table:
    """Return what bounds the period of each."""
    bounds = first.figures.bounds, second.figures.bounds
    shown = dict.fromkeys(name for one in bounds for name in list(one)[:_SHOWN_BOUNDS])
    rows = tuple((name, *(seconds_text(one[name]) if name in one else "-" for one in bounds)) for name in shown)
    return Table(("what bounds the period", *names), rows)
