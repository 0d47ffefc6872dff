"""Reasons for a call's place: what its time is made of, the room that it has, and what other places would change."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import cast

from realrl.errors import AllocationError, UsageError, did_you_mean
from realrl.graph.build import call as call_of
from realrl.mesh.device_mesh import Allocation, Cluster, DeviceMesh, ParallelStrategy, nearest_strategy
from realrl.plan.backends import BACKENDS, zero_stage_of
from realrl.plan.memory.plan import show_bytes
from realrl.planner.evaluate import Evaluated, evaluate
from realrl.planner.request import Request
from realrl.planner.settings import PlanSettings
from realrl.planner.times import CallTimes, Rhythm, call_times, rhythm_of, slack_of
from realrl.planner.words import Block, Table, change_text, seconds_text, share_text
from realrl.sched.calls import ScheduledCall
from realrl.sched.messages import RunCall
from realrl.search.space import mesh_sizes, strategies_of
from realrl.sim.costs.calls import CostModel
from realrl.sim.costs.parts import parts_of
from realrl.sim.durations import Durations, SampleSizes

_OTHER_STRATEGIES = 4
_STEP = 2  # whose dispatches tell what a call is made of


@dataclass(frozen=True)
class Explanation:
    """One call of a plan.

    Attributes:
        times: its seconds of a step.
        parts: what `times.run` is made of -> seconds of a step.
        bound_s: seconds of a step in which it bounds the period.
        slack_s: seconds that it could take longer before a step did.
        without_s: seconds of a step if it took none.
    """

    call: str
    times: CallTimes
    parts: Mapping[str, float]
    bound_s: float
    slack_s: float
    without_s: float


def explain(request: Request, found: Evaluated) -> list[Block]:
    """Return what every call's time is made of, and the room that it has."""
    told = explanations(request, found)
    rows = []
    for one in told:
        largest = sorted(one.parts.items(), key=lambda item: -item[1])[:3]
        made_of = ", ".join(f"{name} {share_text(s / one.times.run)}" for name, s in largest) if one.times.run else "-"
        allocation = placed_text(found, one.call)
        rows.append((one.call, allocation, seconds_text(one.times.run), made_of, _room(one, found)))
    columns = ("call", "place", "time", "made of", "room")
    return [
        f"A step takes {seconds_text(found.period_s)}. Calls on the chain that bounds it have no room: "
        "if they took longer, a step would.",
        Table(columns, tuple(rows), title="Why these places", folding=("made of", "room")),
    ]


def explain_call(request: Request, found: Evaluated, call: str) -> list[Block]:
    """Return what a call's time is made of, the room that it has, and what is nearest to it.

    Raises:
        UsageError: there is no such call.
    """
    check_call(found, call)
    one = next(one for one in explanations(request, found, only=call))
    mfc, times, period_s = call_of(found.plan.graph, call), one.times, found.period_s
    ranks = found.plan.allocations[call].mesh.ranks
    where = f"devices {ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else f"device {ranks[0]}"
    blocks: list[Block] = [
        f"{call} ({mfc.interface_type.value} of {mfc.role}) has {placed_text(found, call)}, {where}. "
        f"It takes {seconds_text(times.run)} of a step of {seconds_text(period_s)}.",
        _about_room(one, found),
        Table(("part", "time", "share"), tuple(_part_rows(one)), title="What its time is made of"),
    ]
    rows = []
    for what, change, settings in neighbours(found, request, call):
        try:
            other = evaluate(request, settings, name=change)
        except UsageError as error:
            rows.append((what, change, "-", "-", "-", error.message))
            continue
        seconds = change_text(other.period_s, period_s), change_text(call_times(other.run)[call].run, times.run)
        rows.append((what, change, *seconds, show_bytes(other.fullest[2]), "" if other.fits else lacking_text(other)))
    columns = ("instead", "change", "a step", "the call", "fullest device", "remark")
    if rows:
        blocks.append(Table(columns, tuple(rows), title="What is nearest to it", folding=("remark",)))
        blocks.append(f"Now the fullest device needs {show_bytes(found.fullest[2])} of {show_bytes(found.capacity)}.")
    return blocks


def explanations(request: Request, found: Evaluated, only: str | None = None) -> Iterator[Explanation]:
    """Yield the explanation of every call, or of one."""
    heard = _Heard()
    evaluate(request, found.settings, listen=heard.listen)
    times = call_times(found.run)
    rhythm = rhythm_of(found.plan, times)
    for name in rhythm.flow.names:
        if only in (None, name):
            parts = heard.parts(name, times[name].run)
            yield Explanation(name, times[name], parts, bound_of(found, name), *_rooms(rhythm, name, found.period_s))


def bound_of(found: Evaluated, call: str) -> float:
    """Return the seconds of a step in which a call, its hooks or its rows bound the period."""
    names = (call, f"rows for {call}", f"rows and parameters for {call}")
    hooks = tuple(f"hooks {when} {call}" for when in ("ahead of", "before", "after"))
    return sum(found.figures.bounds.get(name, 0.0) for name in (*names, *hooks))


def _rooms(rhythm: Rhythm, name: str, period_s: float) -> tuple[float, float]:
    without = rhythm.period(rhythm.with_run(name, 0.0)) / rhythm.period()
    return slack_of(rhythm, name), without * period_s


class _Heard:
    """Durations of a model, which remember what calls they were asked about."""

    def __init__(self) -> None:
        self._calls: dict[str, list[tuple[ScheduledCall, Mapping[int, RunCall], Mapping[str, SampleSizes]]]] = (
            defaultdict(list)
        )

    def listen(self, model: CostModel) -> Durations:
        """Stand in for a model."""
        self._model = model
        return cast(Durations, self)

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)

    def call(
        self, call: ScheduledCall, requests: Mapping[int, RunCall], sizes: Mapping[str, SampleSizes]
    ) -> Mapping[int, float]:
        self._calls[call.name].append((call, requests, sizes))
        return self._model.call(call, requests, sizes)

    def parts(self, name: str, seconds: float) -> dict[str, float]:
        """Return what the seconds of a call are made of, in the proportions of its second step."""
        found: dict[str, float] = defaultdict(float)
        for call, requests, sizes in self._calls[name]:
            if next(iter(requests.values())).step == _STEP:
                for part, s in parts_of(self._model, call, requests, sizes).items():
                    found[part] += s
        whole = sum(found.values())
        return {part: s / whole * seconds for part, s in found.items()} if whole else {}


# ---------------------------------------------------------------- other places


def neighbours(found: Evaluated, request: Request, call: str) -> Iterator[tuple[str, str, PlanSettings]]:
    """Yield plans that differ in one call: what kind of change it is, the change, and all settings."""
    for what, place in _places(found, request, call):
        yield what, str(place), with_place(found.settings, call, str(place))
    mfc, settings = call_of(found.plan.graph, call), found.settings
    role, space, section = mfc.role, request.spaces[mfc.role], found.plan.config.models[mfc.role]
    if mfc.is_train:
        stages = space.zero_stages or BACKENDS[space.backend].stages
        stage = zero_stage_of(section.backend, section.optimizer.zero_stage)
        for other in (one for one in (stage - 1, stage + 1) if one in stages):
            yield "another setting", f"ZeRO {other}", replace(settings, zero_stage={**settings.zero_stage, role: other})
        is_on, is_away = section.activation_checkpointing, section.optimizer.offload
        if (not is_on) in space.checkpoints:
            others = replace(settings, checkpointing={**settings.checkpointing, role: not is_on})
            yield "another setting", f"{'no' if is_on else 'with'} checkpointing", others
        if (not is_away) in space.offloads and BACKENDS[space.backend].offloads:
            others = replace(settings, offload_optimizer={**settings.offload_optimizer, role: not is_away})
            yield "another setting", f"optimizer on the {'device' if is_away else 'host'}", others


def _places(found: Evaluated, request: Request, call: str) -> Iterator[tuple[str, Allocation]]:
    """Yield other places of a call: strategies on its mesh, the next smaller and the next larger mesh."""
    now, cluster = found.plan.allocations[call], found.plan.cluster
    role = request.spaces[call_of(found.plan.graph, call).role]
    others = [s for s in strategies_of(now.mesh.n_devices, cluster, role) if s != now.strategy]
    for strategy in sorted(others, key=lambda s: (_distance(now.strategy, s), s.tp, s.pp))[:_OTHER_STRATEGIES]:
        yield "another strategy", Allocation(now.mesh, strategy)
    others_meshes = [place.mesh for name, place in found.plan.allocations.items() if name != call]
    sizes = mesh_sizes(cluster)
    fewer = [n for n in reversed(sizes) if n < now.mesh.n_devices]
    more = [n for n in sizes if n > now.mesh.n_devices]
    for what, numbers in (("fewer devices", fewer), ("more devices", more)):
        meshes = [mesh for n in numbers if (mesh := _mesh_near(cluster, now.mesh.ranks[0], n)) is not None]
        cut = now.strategy.tp * now.strategy.pp
        # the rules of meshes leave the nearest one out more often than not
        nearest = min(
            meshes, key=lambda mesh: (not _nests(mesh, others_meshes), mesh.n_devices % cut > 0), default=None
        )
        if nearest is not None:
            yield what, Allocation(nearest, nearest_strategy(now.strategy, nearest.n_devices))


def _nests(mesh: DeviceMesh, others: Iterable[DeviceMesh]) -> bool:
    return all(not mesh.overlaps(one) or mesh.contains(one) or one.contains(mesh) for one in others)


def _distance(a: ParallelStrategy, b: ParallelStrategy) -> float:
    return abs(math.log2(a.tp / b.tp)) + abs(math.log2(a.pp / b.pp))


def _mesh_near(cluster: Cluster, first: int, n: int) -> DeviceMesh | None:
    """Return the mesh of so many devices that begins at a rank, or closest below."""
    per_node = cluster.n_devices_per_node
    for start in range(first, -1, -1):
        if start + n > cluster.n_devices or start % min(n, per_node):
            continue
        try:
            return DeviceMesh(cluster, tuple(range(start, start + n)))
        except AllocationError:
            continue
    return None


def with_place(settings: PlanSettings, call: str, allocation: str) -> PlanSettings:
    """Return the settings with one call in another place."""
    return replace(settings, allocations={**settings.allocations, call: allocation})


def check_call(found: Evaluated, call: str) -> None:
    """Refuse a name that no call of the plan has.

    Raises:
        UsageError: there is no such call.
    """
    names = list(found.settings.allocations)
    if call not in names:
        raise UsageError(f"there is no call '{call}'", remedy=f"Calls: {', '.join(names)}.{did_you_mean(call, names)}")


# ---------------------------------------------------------------- words


def placed_text(found: Evaluated, call: str) -> str:
    """Return a call's allocation, and its micro-batches where the plan chose them."""
    n_mbs = found.settings.n_mbs.get(call)
    return str(found.plan.allocations[call]) + (f", {n_mbs} micro-batches" if n_mbs else "")


def lacking_text(found: Evaluated) -> str:
    """Return what the fullest device of a plan lacks."""
    rank, call, needs = found.fullest
    return f"device {rank} lacks {show_bytes(needs - found.capacity)} in {call}"


def _part_rows(one: Explanation) -> Iterator[tuple[str, str, str]]:
    whole = one.times.run or 1.0
    for name, seconds in sorted(one.parts.items(), key=lambda item: -item[1]):
        yield name, seconds_text(seconds), share_text(seconds / whole)
    around = {
        "parameters that move before it": one.times.before,
        "rows, and parameters from the host": one.times.rows,
        "parameters that move after it": one.times.after,
        "waiting for ranks that come later": one.times.waiting,
    }
    for name, seconds in around.items():
        if seconds > 0.0:
            yield f"+ {name}", seconds_text(seconds), share_text(seconds / whole)


def _room(one: Explanation, found: Evaluated) -> str:
    if one.slack_s:
        return f"{seconds_text(one.slack_s)} longer would cost nothing"
    return f"none; it bounds {share_text(one.bound_s / found.period_s)} of a step" if one.bound_s else "none"


def _about_room(one: Explanation, found: Evaluated) -> str:
    gain = max(0.0, 1.0 - one.without_s / found.period_s)
    without = f"Without it, a step would take {seconds_text(min(one.without_s, found.period_s))} ({gain:.1%} less)."
    on_chain = f"The chain that bounds a step goes through it for {seconds_text(one.bound_s)}." if one.bound_s else ""
    if one.slack_s:
        room = f"It could take {seconds_text(one.slack_s)} longer before a step did."
    else:
        room = "If it took longer, a step would."
    return " ".join(part for part in (on_chain, room, without) if part)
