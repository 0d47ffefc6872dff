"""``trace.json``: timeline of all workers, for https://ui.perfetto.dev or chrome://tracing.

The Trace Event Format (JSON array form) may stay without its closing bracket, so the file of a killed run still loads;
`close` makes it valid JSON. One process (of the format: a group of tracks), one track per worker (tid = rank), above
them the steps and the master, below a worker parameters that travel meanwhile, and each of its reward processes. With
several machines each is a process, below that of the master. Phases lie inside of their call's bar.
Times are microseconds since the start of the run, on the master's clock.
"""

from __future__ import annotations

import io
import json
import logging
import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

from realrl.files import open_output
from realrl.sched.messages import Span

FILE_NAME = "trace.json"
MASTER_TID = 1_000_000
STEPS_TID = 1_500_000  # the master's too: its other bars may begin in one step and end in the next
TRAVEL_TID = 2_000_000  # plus the worker's rank: parameters that travel while the worker computes
REWARD_TID = 3_000_000  # plus the rank, plus as much as `MASTER_TID` times the number of the worker's reward process
_PID = 0  # of the master, and of everything on one machine

_log = logging.getLogger(__name__)

# Reserved colour names of the format: the same kind of work looks the same everywhere.
_COLOURS = {
    "wait": "grey",
    "transfer": "thread_state_iowait",
    "load": "thread_state_runnable",
    "save": "terrible",
    "init": "startup",
}


class TraceWriter:
    """Appends events as they come; a full disk ends the trace, never the run.

    Args:
        path: file to write; an earlier trace there is kept under the next free name, ``trace-1.json``, ...
        start_s: seconds since the epoch that count as zero; now when None.
    """

    def __init__(self, path: Path, *, start_s: float | None = None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _keep_old(path)
        self._start_s = time.time() if start_s is None else start_s
        self._pids: dict[int, int] = {}  # of tracks that have names
        self._machines: dict[str, int] = {}  # name -> process
        self._is_first = True
        self._file: TextIO | None = io.TextIOWrapper(io.BufferedWriter(open_output(path)), encoding="utf-8")
        self._write([_metadata("process_name", _PID, 0, {"name": "realrl"})])

    def spans(self, rank: int | None, spans: Iterable[Span], *, machine: str = "", shift_s: float = 0.0) -> None:
        """Add spans of worker `rank`, or of the master for None.

        Args:
            machine: name of the worker's machine, if it is not the master's process's own.
            shift_s: seconds by which the master's clock is ahead of that of these spans.
        """
        events: list[dict[str, Any]] = []
        for span in spans:
            tid = MASTER_TID if rank is None else rank
            if span.kind == "step":
                tid = STEPS_TID
            elif span.kind == "travel":
                tid += TRAVEL_TID
            elif span.kind == "reward":
                tid += REWARD_TID + MASTER_TID * int(span.args.get("process", 0))
            events += self._track_name(tid, machine)
            event = {
                "name": span.name,
                "cat": span.kind,
                "ph": "X",
                "pid": self._pids[tid],
                "tid": tid,
                "ts": self._us(span.start_s + shift_s),
                "dur": max(0, round((span.end_s - span.start_s) * 1e6)),
                "args": _json_args(span.args),
            }
            if span.kind in _COLOURS:
                event["cname"] = _COLOURS[span.kind]
            events.append(event)
        self._write(events)

    def counter(self, name: str, values: Mapping[str, float], *, at_s: float | None = None) -> None:
        """Add one point of a counter track, such as ``counter("samples", {"alive": 32})``; now when `at_s` is None."""
        at = self._us(time.time() if at_s is None else at_s)
        self._write([{"name": name, "ph": "C", "pid": _PID, "tid": 0, "ts": at, "args": _json_args(values)}])

    def close(self) -> None:
        """End the array. May be called twice."""
        if self._file is not None:
            self._put("\n]\n")
        if self._file is not None:
            self._file.close()
            self._file = None

    def _us(self, at_s: float) -> int:
        return round((at_s - self._start_s) * 1e6)

    def _track_name(self, tid: int, machine: str) -> list[dict[str, Any]]:
        if tid in self._pids:
            return []
        number, rank = divmod(tid, MASTER_TID)
        named = []
        if machine and machine not in self._machines:
            self._machines[machine] = _PID + 1 + len(self._machines)
            named = _process_name(self._machines[machine], machine, order=1 + rank)
        pid = self._pids[tid] = self._machines[machine] if machine else _PID
        name, order = f"worker {rank}", rank
        if tid in (MASTER_TID, STEPS_TID):
            name, order = ("master", -1) if tid == MASTER_TID else ("steps", -2)
        elif tid >= REWARD_TID:
            name += f", rewards {number - REWARD_TID // MASTER_TID}"
        elif tid >= TRAVEL_TID:
            name += ", parameters"
        return [
            *named,
            _metadata("thread_name", pid, tid, {"name": name}),
            _metadata("thread_sort_index", pid, tid, {"sort_index": order}),
        ]

    def _write(self, events: list[dict[str, Any]]) -> None:
        if not events:
            return
        text = ",\n".join(json.dumps(event, separators=(",", ":")) for event in events)
        self._put(("[\n" if self._is_first else ",\n") + text)
        self._is_first = False

    def _put(self, text: str) -> None:
        if self._file is None:
            return
        try:
            self._file.write(text)
            self._file.flush()
        except OSError as error:
            _log.warning("the trace ends here: %s", error)
            file, self._file = self._file, None
            _close_quietly(file)


def _process_name(pid: int, machine: str, *, order: int) -> list[dict[str, Any]]:
    return [
        _metadata("process_name", pid, 0, {"name": f"machine {machine}"}),
        _metadata("process_sort_index", pid, 0, {"sort_index": order}),
    ]


def _metadata(name: str, pid: int, tid: int, args: Mapping[str, str | int]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": pid, "tid": tid, "args": dict(args)}


def _json_args(args: Mapping[str, str | int | float]) -> dict[str, str | int | float]:
    """Write NaN and infinities, which JSON lacks, as text that viewers show."""
    return {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in args.items()}


def _close_quietly(file: TextIO) -> None:
    """Close the file, although flushing may fail again on a full disk."""
    try:
        file.close()
    except OSError as error:
        _log.debug("while closing the trace: %s", error)


def _keep_old(path: Path) -> None:
    if not path.exists():
        return
    number = 1
    while (kept := path.with_name(f"{path.stem}-{number}{path.suffix}")).exists():
        number += 1
    path.rename(kept)
