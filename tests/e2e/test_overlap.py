"""Parameters that come early or stay change times, and nothing else."""

import json
import math
from itertools import groupby
from pathlib import Path

import pytest
import torch

from realrl.engine.device import CopyLane
from realrl.engine.parameters import offload
from realrl.runtime.worker.call_runner import CallRunner
from tests.helpers.runs import NOISE, run_ppo

PLAN = (
    "cluster.n_devices_per_node=2", "cluster.device=cpu", "allocation.calls.actor_gen=t2@0:0-1",
    "allocation.calls.critic_inf=t2@0:0-1", "allocation.offload_frozen=true", "calls.critic_inf.min_n_seqs=4",
)  # fmt: skip


@pytest.mark.slow
def test_a_run_with_overlap_is_equal_bit_for_bit(tmp_path: Path) -> None:
    found = {}
    for name in ("true", "false"):
        rows = run_ppo(tmp_path / name, *PLAN, f"allocation.overlap={name}")
        found[name] = [{k: v for k, v in row.items() if not k.startswith(NOISE)} for row in rows]
        assert all(row["time_s/realloc_wait"] > 0 for row in rows)
    assert found["true"] == found["false"]
    spans = {name: json.loads((tmp_path / name / "trace.json").read_text()) for name in found}
    travels = [span for span in spans["true"] if span.get("cat") == "travel"]
    assert {span["name"] for span in travels} >= {"actor to actor_gen"}
    calls = [s for s in spans["true"] if s.get("cat") == "call"]
    assert any(
        c["tid"] == t["tid"] % 1_000_000 and t["ts"] < c["ts"] < t["ts"] + t["dur"] for t in travels for c in calls
    )
    assert not [span for span in spans["false"] if span.get("cat") == "travel"]


class LateLane(CopyLane):
    """Copies that reach the device when they are waited for, as on a stream of their own; until then it holds NaN."""

    story: list[str]

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._late: list[tuple[torch.Tensor, torch.Tensor]] = []

    def to_device(self, host: torch.Tensor) -> torch.Tensor:
        self._late.append((torch.full_like(host, math.nan), host))
        self.story.append("sets out")
        return self._late[-1][0]

    def join(self) -> None:
        for place, host in self._late:
            place.copy_(host)
            self.story.append("is there")
        self._late.clear()


@pytest.mark.parametrize("is_on", [True, False])
def test_an_offloaded_role_comes_back_while_another_call_computes(
    is_on: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ("launcher=inline", "allocation.offload=[ref]", "steps=2")
    expected = run_ppo(tmp_path / "plain", *settings, "allocation.overlap=false")
    story: list[str] = []
    monkeypatch.setattr(LateLane, "story", story, raising=False)
    monkeypatch.setattr(offload, "CopyLane", LateLane)
    run = CallRunner.run
    monkeypatch.setattr(CallRunner, "run", lambda runner, call: story.append(call.call) or run(runner, call))
    found = run_ppo(tmp_path / "late", *settings, f"allocation.overlap={str(is_on).lower()}")
    for ours, theirs in zip(expected, found, strict=True):
        assert {k: v for k, v in ours.items() if not k.startswith(NOISE)}.items() <= theirs.items()
    second = [what for what, _ in groupby(story[story.index("critic_train") :])]
    assert ("sets out" in second[: second.index("actor_gen")]) is is_on
    assert second[second.index("ref_inf") + 1] == ("is there" if is_on else "sets out")
