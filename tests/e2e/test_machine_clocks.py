"""The trace of a run over machines whose clocks disagree: each is a process of its own, and times are the master's."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from tests.e2e.test_machines import team
from tests.helpers.machines import needs_machines
from tests.helpers.traces import load_trace

pytestmark = [pytest.mark.netns, pytest.mark.timeout(900), needs_machines]
# Python imports it at the start of every process. (libfaketime, which would falsify the clock of everything, lets
# waits of threads hang.)
WRONG = """
import time

true = time.time
time.time = lambda: true() + {ahead_s}
"""
MARKED = """
import socket
import time
from dataclasses import replace
from pathlib import Path

from realrl import register_interface
from realrl.algo.policy.actor import PolicyActor
from realrl_experiments.ppo import EXPERIMENT as PPO


@register_interface("marked")
class Marked(PolicyActor):
    def train_step(self, model, batch, ctx):
        true_s = []
        for _ in range(9):
            with ctx.phases.phase("mark"):
                true_s.append(time.monotonic())  # this clock is the same on all machines of this computer
            time.sleep(0.002)
        with Path({folder!r}, "marks-" + socket.gethostname()).open("a") as file:
            file.write("".join(f"{{s}}\\n" for s in true_s))
        return super().train_step(model, batch, ctx)


def mfcs(config):
    calls = PPO.mfcs(config)
    return [replace(call, interface_impl="marked") if call.name == "actor_train" else call for call in calls]


EXPERIMENT = PPO.variant("marked", "tells the time while it trains", mfcs=mfcs)
"""


@pytest.mark.parametrize("ahead_s", [5, -5])
def test_spans_of_a_machine_whose_clock_is_off_are_aligned(tmp_path: Path, ahead_s: int) -> None:
    (tmp_path / "wrong").mkdir()
    (tmp_path / "wrong" / "sitecustomize.py").write_text(WRONG.format(ahead_s=ahead_s))
    mine = tmp_path / "marked.py"
    mine.write_text(MARKED.format(folder=str(tmp_path)))
    with team(tmp_path, "steps=8", experiment=str(mine)) as run:
        alpha, beta = run.site.machines
        run.join(alpha)
        run.join(beta, PYTHONPATH=str(tmp_path / "wrong"))
        assert run.end() == {"master": 0, "alpha": 0, "beta": 0}, run.all_said()
    events = load_trace(run.run_dir / "trace.json")
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert sorted(names.values()) == ["machine alpha", "machine beta", "realrl"]
    starts_s: dict[str, float] = {}  # of the trace, by the true clock
    for machine in ("alpha", "beta"):
        true_s = [float(line) for line in (tmp_path / f"marks-{machine}").read_text().splitlines()]
        marks = [event for event in events if event["name"] == "mark" and names[event["pid"]] == f"machine {machine}"]
        assert len(marks) == len(true_s) == 8 * 9
        starts_s[machine] = statistics.median(true - mark["ts"] * 1e-6 for true, mark in zip(true_s, marks))
    apart_s = starts_s["beta"] - starts_s["alpha"]
    print(f"a clock that is {ahead_s:+} s off: spans {apart_s * 1e3:+.2f} ms apart")
    assert abs(apart_s) < 0.005
