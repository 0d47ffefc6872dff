"""The algorithm in README.md is short, and learns."""

from __future__ import annotations

from pathlib import Path

from tests.docs.markdown import ROOT, blocks
from tests.helpers.runs import read_metrics, run_here


def test_the_example_trains(tmp_path: Path) -> None:
    [example] = blocks(ROOT / "README.md", "python")
    assert len(example.splitlines()) <= 43
    file, run_dir = tmp_path / "my_algorithm.py", tmp_path / "run"
    file.write_text(example)
    run_here("run", str(file), "preset=tiny", "launcher=inline", "steps=10", "n_seqs=32", f"run_dir={run_dir}")
    rewards = [row["reward/mean"] for row in read_metrics(run_dir)]
    assert len(rewards) == 10
    assert sum(rewards[-3:]) > 1.3 * sum(rewards[:3])
    assert all(row["actor/grad_norm"] > 0 for row in read_metrics(run_dir))
