"""Parameters that come early or stay change times, and nothing else."""

import json
from pathlib import Path

from tests.helpers.runs import NOISE, run_ppo

PLAN = (
    "cluster.n_devices_per_node=2", "cluster.device=cpu", "allocation.calls.actor_gen=t2@0:0-1",
    "allocation.calls.critic_inf=t2@0:0-1", "allocation.offload_frozen=true", "calls.critic_inf.min_n_seqs=4",
)  # fmt: skip


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
