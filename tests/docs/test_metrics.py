"""docs/metrics.md and docs/run-folder.md name what runs really write."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from realrl.cli import main
from tests.docs.markdown import ROOT, first_column

METRICS = ROOT / "docs" / "metrics.md"
SECTIONS = {
    "ppo": "PPO",
    "grpo": "Policies without critic",
    "rw": "Reward model",
    "dpo": "DPO",
    "kto": "KTO",
    "sft": "SFT",
}
TINY = ("preset=tiny", "launcher=inline", "steps=1", "n_seqs=8")


def pattern(name: str) -> re.Pattern[str]:
    """``time_s/<call>`` stands for any call."""
    return re.compile(re.sub("<[a-z]+>", r"\\w+", name))


@pytest.mark.parametrize("experiment", SECTIONS)
def test_a_run_writes_the_metrics_that_are_described(experiment: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    extra = ["generation.max_new_tokens=4"] if experiment in ("ppo", "grpo") else []
    assert main(["run", experiment, *TINY, *extra, f"run_dir={run_dir}"]) == 0
    [line] = (run_dir / "metrics.jsonl").read_text().splitlines()
    described = [*first_column(METRICS, "Every run"), *first_column(METRICS, SECTIONS[experiment])]
    assert len(described) > 10
    for name in json.loads(line):
        assert any(pattern(known).fullmatch(name) for known in described), f"{name} is not described"
    for known in described:
        assert any(pattern(known).fullmatch(name) for name in json.loads(line)), f"{known} was not written"
    _check_run_folder(run_dir)


def _check_run_folder(run_dir: Path) -> None:
    """Every file below the run folder is described."""
    text = (ROOT / "docs" / "run-folder.md").read_text(encoding="utf-8")
    described = re.findall(r"`([^`]+)`", "\n".join(line for line in text.splitlines() if line.startswith("| `")))
    patterns = [re.compile(re.sub("<[a-zN]+>", r"\\w+", path).replace(".", r"\.") + "(.*)") for path in described]
    files = [p.relative_to(run_dir).as_posix() for p in run_dir.rglob("*") if p.is_file()]
    assert {"config.json", "metrics.jsonl", "trace.json", "logs/master.log"} <= set(files)
    for file in files:
        assert any(p.fullmatch(file) for p in patterns), file
