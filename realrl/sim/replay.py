"""Durations of a recorded run, read from its trace, so that only the order of events is simulated.

A recorded bar of a call begins when its rank is ready, and so includes the time in which it waits for the others of its
group. Its duration here counts from the moment when the last of them was ready. What the recording lacks, such as a
step beyond its last one, takes the median of the steps after the first.
"""

from __future__ import annotations

import bisect
import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import median

from realrl.errors import ConfigError
from realrl.sched.calls import ScheduledCall
from realrl.sched.events import RankSpan
from realrl.sched.master.master_plan import MasterPlan
from realrl.sched.messages import HookTime, MoveRows, RunCall, Span
from realrl.sched.story import ranks_text
from realrl.sim.durations import SampleSizes, meeting_ranks
from realrl.sim.samples import tracks_of

_MASTER_AND_ABOVE = 1_000_000  # numbers of tracks that are no worker's own
_US = 1e-6
_INSIDE = {"phase", "reward"}  # of calls, which last as long as they did

_Key = tuple[str, int]  # call, step


def read_trace(text: str) -> tuple[RankSpan, ...]:
    """Return what workers did in a ``trace.json``, also in one that a killed run left unfinished."""
    found = []
    for line in text.splitlines():
        if not line.startswith("{"):
            continue
        try:
            event = json.loads(line.removesuffix(","))
        except json.JSONDecodeError:  # the last line of a killed run
            break
        if event.get("ph") == "X" and event["tid"] < _MASTER_AND_ABOVE and event["cat"] not in _INSIDE:
            begin_s = event["ts"] * _US
            span = Span(event["name"], event["cat"], begin_s, begin_s + event["dur"] * _US, event.get("args", {}))
            found.append(RankSpan(event["tid"], span))
    return tuple(found)


def check_recording(plan: MasterPlan, spans: Iterable[RankSpan], source: str) -> None:
    """Refuse a recording of another run.

    Raises:
        ConfigError: it has no calls, or others, or they ran on other ranks, or it lacks the numbers of dispatches.
    """
    ranks: dict[str, set[int]] = defaultdict(set)
    for item in spans:
        if item.span.kind == "call":
            ranks[item.span.name].add(item.rank)
            if "dispatch" not in item.span.args:
                raise ConfigError(
                    f"{source} is of an older version of realrl: its calls have no dispatch",
                    remedy="Record the run again.",
                )
    if not ranks:
        raise ConfigError(f"{source} has no calls", remedy="Give the folder of a run that did a step.")
    planned = {call.name: set(call.ranks) for call in plan.main.calls}
    evaluating = {call.name for track in tracks_of(plan)[1:] for call in track.calls}
    if ranks.keys() - evaluating != planned.keys():
        raise ConfigError(
            f"{source} is of another graph: it has the calls {', '.join(sorted(ranks.keys() - evaluating))}, and this "
            f"one {', '.join(sorted(planned))}",
            remedy="Give the same experiment and the same settings as for the run.",
        )
    for name, there in ranks.items():
        if name in planned and there != planned[name]:
            raise ConfigError(
                f"{source} is of another plan: '{name}' ran on devices {ranks_text(there)}, and here it runs on "
                f"{ranks_text(planned[name])}",
                remedy="Give the same cluster and the same allocation as for the run.",
            )


def dropped_shares(metrics: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return call -> share of the samples that it dropped, from the lines of ``metrics.jsonl``."""
    dropped: dict[str, float] = defaultdict(float)
    loaded = 0.0
    for row in metrics:
        lost = {name.removeprefix("dropped/"): n for name, n in row.items() if name.startswith("dropped/")}
        loaded += row["n_samples"] + sum(lost.values())
        for call, n in lost.items():
            dropped[call] += n
    return {call: n / loaded for call, n in dropped.items() if loaded and call != "surplus"}


class Recorded:
    """`Durations` of a recorded run.

    Args:
        spans: from `read_trace`, of a run that `check_recording` accepts.
    """

    def __init__(self, spans: Sequence[RankSpan]) -> None:
        self._calls = _by_dispatch(spans, "call")  # call, step -> dispatch -> rank -> its bar
        self._moves = _by_dispatch(spans, "transfer", "transfer for ")
        self._spreads = _by_dispatch(spans, "transfer", "spread for ")
        self._hooks = _hook_seconds(spans)
        self._alone = _seconds_alone(spans)
        self._back = _seconds_back(spans)
        self._usual = self._usual_seconds()
        self._turnaround_s = _turnaround_s(spans)
        self._recorded: dict[_Key, dict[int, int]] = defaultdict(dict)  # call, step -> dispatch -> the recorded one
        self._sizes = _mean_sizes(spans)

    # ------------------------------------------------------------ lengths

    def draw(self, sample_id: str) -> SampleSizes:
        """Return the mean lengths of the recording for every sample."""
        return self._sizes

    # ------------------------------------------------------------ calls

    def call(
        self, call: ScheduledCall, requests: Mapping[int, RunCall], sizes: Mapping[str, SampleSizes]
    ) -> Mapping[int, float]:
        some = next(iter(requests.values()))
        recorded = self._calls.get((call.name, some.step), {}).get(self._recorded_of(some))
        if recorded is None:
            return {rank: self._usual[call.name, rank] for rank in requests}
        return _after_meeting(recorded, self.meets(call))

    def meets(self, call: ScheduledCall) -> tuple[tuple[int, ...], ...]:
        return meeting_ranks(call)

    def rows(self, requests: Mapping[int, MoveRows | RunCall], sizes: Mapping[str, SampleSizes]) -> Mapping[int, float]:
        some = next(iter(requests.values()))
        key, number = (some.call, some.step), self._recorded_of(some)
        moves = self._moves.get(key, {}).get(number, {})
        if isinstance(some, MoveRows):
            seconds = _after_meeting(moves, (tuple(requests),)) if requests.keys() <= moves.keys() else {}
            return {rank: seconds.get(rank, 0.0) for rank in requests}
        bars = [self._spreads.get(key, {}).get(number, {})]
        bars += [moves] if any(isinstance(r, RunCall) and r.transfers for r in requests.values()) else []
        return {rank: sum(b[rank].end_s - b[rank].start_s for b in bars if rank in b) for rank in requests}

    def hooks(self, call: ScheduledCall, when: HookTime, ranks: Collection[int]) -> Mapping[int, float]:
        return {rank: self._hooks.get((call.name, when, rank), (0.0, 0))[0] for rank in ranks}

    def received_bytes(self, call: ScheduledCall, when: HookTime, rank: int) -> int:
        return self._hooks.get((call.name, when, rank), (0.0, 0))[1]

    def onload(self, role: str, ranks: Collection[int]) -> Mapping[int, float]:
        return dict.fromkeys(ranks, self._back.get(role, 0.0))

    # ------------------------------------------------------------ everything else

    def load(self, n_samples: int) -> float:
        return self._alone.get("load", 0.0) * n_samples

    def read(self, n_samples: int) -> float:
        return self._alone.get("read", 0.0) * n_samples

    def free(self) -> float:
        return 0.0

    def save(self, rank: int) -> float:
        return self._alone.get("save", 0.0)

    def write(self, rank: int) -> float:
        return 0.0

    def start(self) -> float:
        return self._alone.get("init", 0.0)

    def handling(self, n_events: int) -> float:
        return self._turnaround_s / 3 * n_events

    def latency(self, rank: int) -> float:
        return self._turnaround_s / 3

    # ------------------------------------------------------------ the recording

    def _recorded_of(self, request: RunCall | MoveRows) -> int:
        """Return the recorded dispatch for a simulated one: the n-th of a call in a step is the n-th there."""
        key = (request.call, request.step)
        known = self._recorded[key]
        if request.dispatch_id not in known:
            dispatches = sorted(self._calls.get(key, ()))
            known[request.dispatch_id] = dispatches[len(known)] if len(known) < len(dispatches) else -1
        return known[request.dispatch_id]

    def _usual_seconds(self) -> dict[tuple[str, int], float]:
        """Return (call, rank) -> its median duration, waiting for others left out as far as all ranks allow."""
        first = min((step for _, step in self._calls), default=0)
        late = {key for key in self._calls if key[1] > first}
        found: dict[tuple[str, int], list[float]] = defaultdict(list)
        for key in late or self._calls.keys():
            for bars in self._calls[key].values():
                last_s = max(bar.start_s for bar in bars.values())
                for rank, bar in bars.items():
                    found[key[0], rank].append(bar.end_s - min(last_s, bar.end_s))
        return {key: median(seconds) for key, seconds in found.items()}


def _by_dispatch(spans: Iterable[RankSpan], kind: str, before: str = "") -> dict[_Key, dict[int, dict[int, Span]]]:
    """Return (call, step) -> dispatch -> rank -> its bar of a kind; several bars of one rank become one.

    Args:
        before: text before the name of the call.
    """
    found: dict[_Key, dict[int, dict[int, Span]]] = {}
    bars = ((item.rank, item.span) for item in spans if item.span.kind == kind and item.span.name.startswith(before))
    for rank, span in bars:
        call = span.name.removeprefix(before)
        of_rank = found.setdefault((call, int(span.args["step"])), {}).setdefault(int(span.args["dispatch"]), {})
        known = of_rank.get(rank)
        of_rank[rank] = span if known is None else Span(span.name, kind, known.start_s, span.end_s, span.args)
    return found


def _after_meeting(bars: Mapping[int, Span], groups: Iterable[tuple[int, ...]]) -> dict[int, float]:
    """Return rank -> seconds from the moment when the last of its group was there."""
    seconds = {}
    for group in groups:
        last_s = max(bars[rank].start_s for rank in group)
        seconds.update({rank: max(0.0, bars[rank].end_s - last_s) for rank in group})
    return seconds


def _hook_seconds(spans: Iterable[RankSpan]) -> dict[tuple[str, HookTime, int], tuple[float, int]]:
    """Return (call, side, rank) -> median seconds and bytes of its hooks, from the moment when all ranks were there."""
    parts: dict[tuple[str, HookTime, int], dict[int, list[Span]]] = defaultdict(lambda: defaultdict(list))
    for item in spans:
        args = item.span.args
        if item.span.kind in ("realloc", "offload") and "dispatch" in args:
            when: HookTime = "before" if args["when"] == "before" else "after"
            parts[str(args["for"]), when, int(args["dispatch"])][item.rank].append(item.span)
    found: dict[tuple[str, HookTime, int], list[tuple[float, int]]] = defaultdict(list)
    for (call, when, _), of_rank in parts.items():
        meets = any(span.kind == "realloc" for spans in of_rank.values() for span in spans)
        last_s = max(spans[0].start_s for spans in of_rank.values())
        for rank, own in of_rank.items():
            begin_s = last_s if meets else own[0].start_s
            n_bytes = sum(int(span.args.get("bytes", 0)) for span in own)
            found[call, when, rank].append((max(0.0, own[-1].end_s - begin_s), n_bytes))
    return {key: (median(s for s, _ in told), round(median(n for _, n in told))) for key, told in found.items()}


def _seconds_alone(spans: Iterable[RankSpan]) -> dict[str, float]:
    """Return kind -> median seconds of what a rank does alone; of loading and reading for each sample."""
    found: dict[str, list[float]] = defaultdict(list)
    for span in (item.span for item in spans if item.span.kind in ("load", "read", "save", "init")):
        found[span.kind].append((span.end_s - span.start_s) / int(span.args.get("samples", 1)))
    return {kind: median(seconds) for kind, seconds in found.items()}


def _seconds_back(spans: Iterable[RankSpan]) -> dict[str, float]:
    """Return role -> median seconds in which calls waited for its parameters to be back from host memory."""
    found: dict[str, list[float]] = defaultdict(list)
    for span in (item.span for item in spans if "waited_s" in item.span.args and item.span.kind == "call"):
        found[str(span.args["role"])].append(float(span.args["waited_s"]))
    return {role: median(seconds) for role, seconds in found.items()}


def _turnaround_s(spans: Sequence[RankSpan]) -> float:
    """Return the median time from the end of a bar, on whatever rank, to the end of the waiting that it ended."""
    ends = sorted(item.span.end_s for item in spans if item.span.kind != "wait")
    found = []
    for item in spans:
        if item.span.kind == "wait" and (place := bisect.bisect_right(ends, item.span.end_s + 2 * _US)):
            found.append(max(0.0, item.span.end_s - ends[place - 1]))
    return median(found) if found else 0.0


def _mean_sizes(spans: Iterable[RankSpan]) -> SampleSizes:
    """Return the mean lengths of a sample: of generated ones, or else of all, as one sequence."""
    bars = [item.span.args for item in spans if item.span.kind == "call" and item.span.args.get("samples")]
    generated = [args for args in bars if "responses" in args]
    args = generated or [args for args in bars if "tokens" in args]
    n_samples = sum(int(a["samples"]) for a in args)
    if not n_samples:
        return SampleSizes((1,))
    n_tokens = sum(int(a["tokens"]) for a in args)
    if not generated:
        return SampleSizes((max(1, round(n_tokens / n_samples)),))
    n_responses, n_new = sum(int(a["responses"]) for a in args), sum(int(a["new_tokens"]) for a in args)
    n = max(1, round(n_responses / n_samples))
    prompt = max(1, round((n_tokens - n_new) / n_responses))
    return SampleSizes((prompt,) * n, (max(1, round(n_new / n_responses)),) * n)
