"""The time of workers, from a run's trace: what it went to, and what every worker did in the last steps.

Of a long trace, the end alone is read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, product
from pathlib import Path
from typing import Any, NamedTuple

from realrl.errors import UsageError
from realrl.experiment.evaluation import PREFIX
from realrl.files import open_input
from realrl.report.run_files import TRACE, decoded, finite

TICKS = 100_000
ABOVE_WORKERS = 1_000_000  # numbers of tracks that are no worker's own
_LABELS = {
    "transfer": "rows of samples",
    "realloc": "parameters",
    "offload": "parameters",
    "load": "dataset",
    "read": "responses for files",
    "save": "checkpoint",
}
_PHASE = "phase_s/"  # before the name of a phase, in the arguments of a call
_NOT_DRAWN = {"init", "step"}
_WAITING = "waiting"
_HEAD_BYTES = 1_000_000
_MOST_STEPS, _MOST_TRACKS, _MOST_ATTEMPTS = 3, 64, 32


class Bar(NamedTuple):
    """A stretch of a track; seconds since the trace began."""

    track: int
    name: str
    kind: str
    begin_s: float
    end_s: float
    args: Mapping[str, Any]


@dataclass(frozen=True)
class Trace:
    """Bars of a trace in the order of their beginnings, the names of its tracks, and True if all of it was read."""

    bars: Sequence[Bar]
    tracks: Mapping[int, str]
    is_whole: bool


def read_trace(folder: Path, most_bytes: int) -> Trace:
    """Read the end of a run's trace; lines that cannot be read are left out.

    Raises:
        UsageError: it is there, and cannot be read.
    """
    path = folder / TRACE
    try:
        with open_input(path) as file:
            head = file.read(_HEAD_BYTES)
            size = file.seek(0, 2)
            is_whole = size <= most_bytes
            file.seek(0 if is_whole else size - most_bytes)
            content = file.read()
    except FileNotFoundError:
        return Trace((), {}, True)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
    lines = content.split(b"\n")[0 if is_whole else 1 :]
    tracks = dict(_track_names([*head.split(b"\n"), *lines] if not is_whole else lines))
    return Trace(sorted(_bars(lines), key=lambda bar: (bar.begin_s, -bar.end_s)), tracks, is_whole)


def attempts_of(folder: Path) -> list[int]:
    """Return the first step of each attempt of a run but the first, which began anew or went on from a checkpoint."""
    traces = [folder / TRACE]
    for number in count(1):
        kept = folder / f"trace-{number}.json"
        if number > _MOST_ATTEMPTS or not kept.is_file():
            break
        traces.insert(-1, kept)
    found = []
    for path in traces[1:]:
        try:
            with open_input(path) as file:
                lines = file.read(_HEAD_BYTES).split(b"\n")
        except OSError:
            continue
        steps = [step for bar in _bars(lines) if (step := _step(bar)) is not None]
        if steps:
            found.append(min(steps))
    return found


def time_use(trace: Trace) -> dict[str, Any] | None:
    """Return what the time of each worker went to, from the beginning of the first call to the end of the last one.

    A worker waits when it does nothing else.

    Returns:
        ``seconds`` (of the window), ``steps`` (the first and the last one), ``keys`` (what), ``is_call`` (of each key),
        ``workers`` (name and seconds of each key), ``phases`` (call -> what happens in it -> seconds); None if there is
        no call.
    """
    calls = [bar for bar in trace.bars if bar.kind == "call" and bar.track < ABOVE_WORKERS]
    if not calls:
        return None
    begin_s, end_s = calls[0].begin_s, max(bar.end_s for bar in calls)
    if end_s <= begin_s:
        return None
    spent: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for bar in trace.bars:
        if bar.track >= ABOVE_WORKERS or not (bar.kind == "call" or bar.kind in _LABELS):
            continue
        seconds = min(bar.end_s, end_s) - max(bar.begin_s, begin_s)
        if seconds > 0:
            spent[bar.track][bar.name if bar.kind == "call" else _LABELS[bar.kind]] += seconds
    for used in spent.values():
        used[_WAITING] = max(0.0, end_s - begin_s - sum(used.values()))
    names = list(dict.fromkeys(bar.name for bar in calls))
    keys = [
        key for key in dict.fromkeys([*names, *_LABELS.values(), _WAITING]) if any(used[key] for used in spent.values())
    ]
    steps = [step for bar in calls if (step := _step(bar)) is not None]
    return {
        "seconds": end_s - begin_s,
        "steps": [min(steps), max(steps)] if steps else [],
        "keys": keys,
        "is_call": [key in names for key in keys],
        "workers": [
            [trace.tracks.get(track, f"worker {track}"), [round(spent[track][key], 6) for key in keys]]
            for track in sorted(spent)
        ],
        "phases": _phases(calls),
    }


def last_steps(trace: Trace, most_bars: int) -> dict[str, Any] | None:
    """Return what each track did in the last steps, at most three and so many that not too many bars are needed.

    Phases of calls are left out where there are too many in a single step.

    Returns:
        ``seconds``, ``steps``, ``works`` (name, kind and role of each activity), ``tracks`` (name, and flat triples of
        a work, its begin and its end in ticks), ``left_out`` (tracks); None if there is no call.
    """
    begins: dict[int, float] = {}
    ends: dict[int, float] = {}
    for bar in trace.bars:
        step = _step(bar)
        if bar.kind == "call" and step is not None:
            begins[step] = min(begins.get(step, bar.begin_s), bar.begin_s)
            ends[step] = max(ends.get(step, bar.end_s), bar.end_s)
    if not begins:
        return None
    for left_out, n in product((_NOT_DRAWN, {*_NOT_DRAWN, "phase"}), range(_MOST_STEPS, 0, -1)):
        steps = sorted(begins)[-n:]
        begin_s, end_s = min(begins[step] for step in steps), max(ends[step] for step in steps)
        bars = [bar for bar in trace.bars if bar.end_s > begin_s and bar.begin_s < end_s and bar.kind not in left_out]
        if len(bars) <= most_bars:
            break
    if end_s <= begin_s:
        return None
    tracks = sorted({bar.track for bar in bars}, key=_track_order)
    works: dict[tuple[str, str, str], int] = {}
    flat: dict[int, list[int]] = {track: [] for track in tracks[:_MOST_TRACKS]}
    per_tick = TICKS / (end_s - begin_s)
    for bar in bars[:most_bars]:
        if bar.track in flat:
            work = works.setdefault((bar.name, bar.kind, str(bar.args.get("role", ""))), len(works))
            begin, end = (round((min(max(s, begin_s), end_s) - begin_s) * per_tick) for s in (bar.begin_s, bar.end_s))
            flat[bar.track] += [work, begin, end]
    return {
        "seconds": end_s - begin_s,
        "steps": [steps[0], steps[-1]],
        "works": [list(work) for work in works],
        "tracks": [[trace.tracks.get(track, f"worker {track}"), bars] for track, bars in flat.items()],
        "left_out": max(0, len(tracks) - _MOST_TRACKS),
    }


# ---------------------------------------------------------------- parts


def _bars(lines: Iterable[bytes]) -> Iterator[Bar]:
    for line in lines:
        if b'"X"' not in line:
            continue
        event = decoded(line.rstrip(b", \r"))
        if not isinstance(event, dict) or event.get("ph") != "X":
            continue
        begin, length, track = finite(event.get("ts")), finite(event.get("dur")), event.get("tid")
        if begin is None or length is None or not isinstance(track, int):
            continue
        args = event.get("args")
        name, kind = str(event.get("name", "")), str(event.get("cat", ""))
        begin_s = begin * 1e-6
        yield Bar(track, name, kind, begin_s, begin_s + length * 1e-6, args if isinstance(args, dict) else {})


def _track_names(lines: Iterable[bytes]) -> Iterator[tuple[int, str]]:
    for line in lines:
        if b'"thread_name"' in line:
            event = decoded(line.rstrip(b", \r"))
            if isinstance(event, dict) and isinstance(event.get("args"), dict) and isinstance(event.get("tid"), int):
                yield event["tid"], str(event["args"].get("name", ""))


def _track_order(track: int) -> tuple[bool, int, int]:
    """Workers come first, each with its other tracks below it; then everything else."""
    is_master = ABOVE_WORKERS <= track < 2 * ABOVE_WORKERS
    return is_master, track % ABOVE_WORKERS, track


def _step(bar: Bar) -> int | None:
    """Return the step of a call; evaluations count steps of their own, and have none."""
    if bar.name.startswith(PREFIX):
        return None
    step = bar.args.get("step")
    return step if isinstance(step, int) and not isinstance(step, bool) else None


def _phases(calls: Iterable[Bar]) -> dict[str, dict[str, float]]:
    """Return call -> phase inside of it -> seconds on all workers; what is in no phase is "other"."""
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for call in calls:
        named = {key.removeprefix(_PHASE): finite(s) or 0.0 for key, s in call.args.items() if key.startswith(_PHASE)}
        for name, seconds in named.items():
            found[call.name][name] += seconds
        if named:
            found[call.name]["other"] += max(0.0, call.end_s - call.begin_s - sum(named.values()))
    return {call: {name: round(s, 6) for name, s in phases.items()} for call, phases in found.items()}
