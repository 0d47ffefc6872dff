"""Cost of workers on two machines: start-up, time of a step, and bytes on the wire against the plan's.

    start-up   from the command to the line that tells the number of steps, in pairs with the same run on one machine
    step       the median step of a run over two machines, by that of the run on one, whose workers use loopback
    bytes      what the interface of a machine counts in a run, by the bytes of parameters and rows that its metrics
               tell: there are no gradients between the machines, and parameters come for every generation

Machines are network namespaces, joined by a link: needs root, `ip`, `unshare`, `nsenter` and `ss`. Nothing else should
run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.helpers.machines import Machine, Site, machines, python  # noqa: E402

PORT = 29500
LIMIT_S = 600.0
SETTINGS = ("run", "ppo", "preset=tiny", "save.every_steps=0")
ON_ONE = ("cluster.n_devices_per_node=2",)
ON_TWO = ("launcher=external", "cluster.n_nodes=2", f"cluster.master_port={PORT}")
MOVING = ("allocation=split", "allocation.calls.actor_gen=d2@0-1")  # the actor's parameters come to the other machine
MOST_START_S, MOST_STEP, MOST_BYTES = 2.0, 1.05, 0.05


@dataclass(frozen=True)
class Timed:
    """Seconds until the run began, and of its median step."""

    start_s: float
    step_s: float


class Run:
    """A run on one machine or on two."""

    def __init__(self, site: Site, folder: Path, settings: Sequence[str], *, is_on_two: bool) -> None:
        folder.mkdir()
        self.site, self.folder, self._key = site, folder, os.urandom(32).hex()
        words = [*SETTINGS, *(ON_TWO if is_on_two else ON_ONE), *settings, f"run_dir={folder / 'run'}"]
        self._begin_s = time.monotonic()
        self.processes = [self._popen(site.machines[0], "run", words)]
        for number, machine in enumerate(site.machines if is_on_two else ()):
            place = f"{site.machines[0].address}:{PORT}"
            self.processes.append(self._popen(machine, machine.name, ["node", place, f"--index={number}"]))

    def _popen(self, machine: Machine, name: str, words: Sequence[str]) -> subprocess.Popen[bytes]:
        log = self.folder / f"{name}.log"
        return machine.popen(python(), "-m", "realrl", *words, log=log, cwd=ROOT, REALRL_KEY=self._key)

    @property
    def said(self) -> str:
        return (self.folder / "run.log").read_text()

    def wait_for(self, pattern: str) -> float:
        """Wait until the run tells something; returns the seconds since its begin."""
        while not re.search(pattern, self.said, re.MULTILINE):
            assert self.processes[0].poll() is None, self.said
            assert time.monotonic() - self._begin_s < LIMIT_S, self.said
            time.sleep(0.005)
        return time.monotonic() - self._begin_s

    def end(self) -> list[dict[str, float]]:
        """Wait for the end; returns the metrics of every step."""
        codes = [process.wait(LIMIT_S) for process in self.processes]
        assert not any(codes), self.said
        return [json.loads(line) for line in (self.folder / "run" / "metrics.jsonl").read_text().splitlines()]


def timed(site: Site, folder: Path, n_steps: int, *, is_on_two: bool) -> Timed:
    """Do a run and time it."""
    run = Run(site, folder, [f"steps={n_steps}"], is_on_two=is_on_two)
    start_s = run.wait_for(r"^ppo preset=tiny: ")
    steps = [row["time_s/step"] for row in run.end()]
    return Timed(start_s, statistics.median(steps[1:]))


def bytes_of_run(site: Site, folder: Path, n_steps: int) -> tuple[int, int]:
    """Return the bytes that crossed the link in a run, and those that its metrics tell."""
    before = wire_bytes(site.machines[1])
    rows = Run(site, folder, [*MOVING, f"steps={n_steps}"], is_on_two=True).end()
    return wire_bytes(site.machines[1]) - before, round(sum(moved_bytes(row) for row in rows))


def moved_bytes(row: dict[str, float]) -> float:
    """Return the bytes that a step moved between workers."""
    return sum(number for name, number in row.items() if name.startswith("bytes/"))


def wire_bytes(machine: Machine) -> int:
    """Return what the interface of a machine has sent and received."""
    [link] = json.loads(machine.run("ip", "-s", "-j", "link", "show", "eth0"))
    return int(link["stats64"]["rx"]["bytes"]) + int(link["stats64"]["tx"]["bytes"])


def main() -> int:
    """Measure and print; exit code 1 if a figure is above its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5, help="pairs of runs")
    parser.add_argument("--steps", type=int, default=40, help="steps of each run")
    options = parser.parse_args()
    pairs: list[tuple[Timed, Timed]] = []
    with tempfile.TemporaryDirectory(prefix="realrl-bench-") as name, machines("alpha", "beta") as site:
        folder = Path(name)
        on_wire, planned = bytes_of_run(site, folder / "bytes", options.steps)
        print(f"bytes on the wire {on_wire:,}, of the plan {planned:,}: {on_wire / planned:.3f}", flush=True)
        for number in range(options.pairs):
            one = timed(site, folder / f"one{number}", options.steps, is_on_two=False)
            two = timed(site, folder / f"two{number}", options.steps, is_on_two=True)
            pairs.append((one, two))
            told = f"start-up {one.start_s:.2f} and {two.start_s:.2f} s, a step {one.step_s:.4f} and {two.step_s:.4f} s"
            print(f"pair {number + 1}: {told}", flush=True)
    is_near = abs(on_wire / planned - 1) <= MOST_BYTES
    if not pairs:
        return 0 if is_near else 1
    more_s = statistics.median(two.start_s - one.start_s for one, two in pairs)
    ratio = statistics.median(two.step_s / one.step_s for one, two in pairs)
    print(f"start-up takes {more_s:+.2f} s more, a step {ratio:.3f} times as long (medians of {len(pairs)} pairs)")
    return 0 if is_near and more_s <= MOST_START_S and ratio <= MOST_STEP else 1


if __name__ == "__main__":
    sys.exit(main())
