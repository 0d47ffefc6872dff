"""Output of ``realrl plan``: progress, the plan, what it needs and what bounds it, and the plans beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

from realrl.cli.console import print_table

if TYPE_CHECKING:
    from realrl.planner.evaluate import Evaluated
    from realrl.planner.planner import Planned, Progress

_PHASES = {
    "prices": "pricing the choices of every call",
    "methods": "placing the plans of other systems",
    "search": "searching",
    "scheduler": "simulating the best plans",
}
_SHOWN_BOUNDS = 6


class Line:
    """One line of a terminal that changes; elsewhere nothing is shown."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._is_shown, self._width = stream, stream.isatty(), 0

    def show(self, progress: Progress) -> None:
        text = _PHASES[progress.phase]
        if progress.period_s < float("inf"):
            text += f": {seconds(progress.period_s)} a step"
        if progress.bound_s and progress.phase == "search":
            text += f", at most {progress.period_s / progress.bound_s - 1:.1%} above the best possible"
        self._write(text)

    def clear(self) -> None:
        """Remove the line."""
        self._write("")

    def _write(self, text: str) -> None:
        if self._is_shown:
            self._stream.write("\r" + text.ljust(self._width) + ("" if text else "\r"))
            self._stream.flush()
            self._width = len(text)


def print_found(planned: Planned) -> None:
    """Print the plan and all that is known about it."""
    best, request = planned.best, planned.request
    print(f"{request.experiment.name}: a plan for {request.cluster}, {request.hardware.name}")
    for note in request.drawn[1]:
        print(note)
    print()
    for line in _verdict(planned):
        print(line)
    print()
    _print_calls(best)
    _print_memory(best)
    _print_bounds(best)
    _print_others(planned)


def print_short(planned: Planned) -> None:
    """Print the plan in a few lines."""
    best = planned.best
    print(f"allocation=auto: {seconds(best.period_s)} a step expected, on {planned.request.hardware.name}")
    rows = [(mfc.name, best.settings.allocations[mfc.name], _settings_text(best, mfc.name)) for mfc in best.plan.mfcs]
    print_table(("call", "where", "settings"), rows, folding=("settings",))


def head_of_file(planned: Planned) -> tuple[str, ...]:
    """Return the comment of a plan's file."""
    request = planned.request
    name = request.experiment.name
    return (
        f"A plan for realrl run {name}: where each call runs, and with which settings.",
        f"Made for {request.cluster}, {request.hardware.name}.",
        *_verdict(planned),
        "Use it with plan=FILE, for run, doctor, simulate and graph. It may be changed; what it holds for is checked.",
        "",
    )


def seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 100 else f"{value:.3g} s"


# ---------------------------------------------------------------- parts


def _verdict(planned: Planned) -> list[str]:
    from realrl.planner.planner import LEAST

    best = planned.best
    both = f"{seconds(best.period_s)} by the real scheduler (steps 2 to 4), {seconds(best.fast_s)} by the fast model"
    lines = [f"period {both}"]
    if planned.bound_s:
        how = "the search has looked at all plans" if planned.is_done else f"a gap of {planned.gap:.1%} at most"
        lines.append(f"no plan under the fast model is faster than {seconds(planned.bound_s)}: {how}")
    elif best.name != LEAST:
        lines.append("its gap to the best plan is not known: there was no search")
    if best.name == LEAST:
        lines.append(
            "the search has found none that fits: this is the plan that takes the least memory, and may be slow"
        )
    if planned.rank_correlation is not None:
        n = len(planned.candidates)
        lines.append(f"rank correlation of fast model and scheduler over {n} plans: {planned.rank_correlation:.2f}")
    return lines


def _settings_text(found: Evaluated, call: str) -> str:
    """Return the settings of a call, and of its role if it lives there."""
    settings, mfc = found.settings, next(mfc for mfc in found.plan.mfcs if mfc.name == call)
    role, words = mfc.role, list[str]()
    if mfc.is_train:
        stage = settings.zero_stage.get(role, 0)
        words += [f"ZeRO {stage}"] if stage else []
        words += ["checkpointing"] if settings.checkpointing.get(role) else []
        words += ["optimizer on the host"] if settings.offload_optimizer.get(role) else []
    elif role in settings.offload:
        words.append("on the host between calls")
    if found.plan.hooks[call].before:
        words.append("parameters come for it")
    return ", ".join(words)


def _print_calls(found: Evaluated) -> None:
    figures, rows = found.figures, []
    for mfc in found.plan.mfcs:
        allocation, call = found.plan.allocations[mfc.name], figures.calls[mfc.name]
        n_mbs = found.settings.n_mbs.get(mfc.name)
        rows.append(
            (
                mfc.name,
                str(allocation.mesh),
                str(allocation.strategy),
                "" if n_mbs is None else str(n_mbs),
                seconds(call.seconds),
                f"{call.device_share:.1%}",
                f"{call.bound_s / figures.period_s:.1%}" if figures.period_s else "",
                _settings_text(found, mfc.name),
            )
        )
    columns = ("call", "mesh", "strategy", "micro-batches", "time", "of all devices", "of the period", "settings")
    print_table(columns, rows, title="Calls", folding=("settings",))


def _print_memory(found: Evaluated) -> None:
    from realrl.plan.memory.plan import show_bytes
    from realrl.sched.story import ranks_text

    alike: dict[tuple[str, str], list[int]] = {}
    for rank in found.memory.ranks:
        call, usage = found.memory.peak(rank)
        needs = usage.total + (usage.host if found.on_cpu else 0)
        alike.setdefault((call, f"{show_bytes(needs)}, {needs / found.capacity:.0%}"), []).append(rank)
    rows = [(ranks_text(ranks), call, needs) for (call, needs), ranks in alike.items()]
    columns = ("devices", "fullest in", f"needs, of {show_bytes(found.capacity)} that a plan may use")
    print_table(columns, rows, title="Memory of each device")


def _print_bounds(found: Evaluated) -> None:
    figures = found.figures
    bounds = list(figures.bounds.items())[:_SHOWN_BOUNDS]
    rows = [(name, seconds(took), f"{took / figures.period_s:.1%}") for name, took in bounds]
    print_table(("what bounds the period", "time", "share"), rows)


def _print_others(planned: Planned) -> None:
    best, rows = planned.best, list[tuple[str, ...]]()
    for one in planned.candidates[1:]:
        more = f"{one.period_s / best.period_s - 1:+.1%}"
        differs = differences(best, one)
        rows.append((one.name, seconds(one.period_s), more, seconds(one.fast_s), differs))
    columns = ("plan", "period", "than the best", "fast model", "what differs")
    if rows:
        print_table(columns, rows, title="Other plans", folding=("plan", "what differs"))
    if planned.refused:
        refused = [(name, reason) for name, reason in planned.refused.items()]
        print_table(("plan", "why it is none"), refused, folding=("why it is none",))


def differences(first: Evaluated, second: Evaluated) -> str:
    """Return what the second of two plans has that the first has not."""
    from realrl.planner.compare import micro_batches

    a, b = first.settings, second.settings
    words = [f"{call} {place}" for call, place in b.allocations.items() if a.allocations[call] != place]
    for name in {**a.n_mbs, **b.n_mbs}:
        ours, theirs = (micro_batches(one, name) for one in (first, second))
        words += [f"{name} n_mbs={theirs}"] if ours != theirs else []
    pairs = (
        ("zero_stage", a.zero_stage, b.zero_stage),
        ("checkpointing", a.checkpointing, b.checkpointing),
        ("optimizer.offload", a.offload_optimizer, b.offload_optimizer),
    )
    for key, of_first, of_second in pairs:
        for name in {**of_first, **of_second}:
            if of_first.get(name) != of_second.get(name):  # type: ignore[attr-defined]
                words.append(f"{name} {key}={of_second.get(name, 'default')}")  # type: ignore[attr-defined]
    if set(a.offload) != set(b.offload):
        words.append(f"offload={','.join(b.offload) or 'none'}")
    return ", ".join(words) or "nothing"
