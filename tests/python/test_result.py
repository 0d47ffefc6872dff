"""Results: what they read of a run folder, with and without pandas, and how they look."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

import realrl
from realrl.errors import AssetError, ConfigError, UsageError


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run folder as a run of three steps leaves it."""
    folder = tmp_path / "run"
    for step in (2, 10):
        actor = folder / f"checkpoints/step_{step}/actor"
        actor.mkdir(parents=True)
        (actor / "config.json").write_text("{}")
    rows = [{"step": i, "epoch": 1, "reward/mean": i / 4, "kl/mean": float("nan")} for i in (1, 2, 3)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "generations.jsonl").write_text('{"step": 1, "prompt": "a", "response": "b", "rewards": 0.5}\n')
    (folder / "config.json").write_text(json.dumps({"experiment": "/home/me/<mine>.py", "steps": 3, "seed": 1}))
    return folder


def test_what_a_result_reads(run_dir: Path) -> None:
    result = realrl.load(str(run_dir))
    assert result.run_dir == run_dir
    assert result.exit_code is None
    assert result.experiment == "<mine>"
    assert result.state == "complete, 3 steps"
    assert result.config["seed"] == 1
    assert result.metrics[0] == {"step": 1, "epoch": 1, "reward/mean": 0.25}
    assert result.generations == [{"step": 1, "prompt": "a", "response": "b", "rewards": 0.5}]
    assert result.notes == []
    assert list(result.checkpoints) == [2, 10]
    assert result.model_path() == run_dir / "checkpoints/step_10/actor"
    assert result.model_path("actor", 2) == run_dir / "checkpoints/step_2/actor"


def test_what_a_result_lacks(run_dir: Path, tmp_path: Path) -> None:
    result = realrl.load(run_dir)
    with pytest.raises(AssetError, match="lacks a checkpoint of step 3: it has those of steps 2, 10"):
        result.model_path(step=3)
    with pytest.raises(AssetError, match=r"step_10 holds no role 'critic'\n  It has: actor."):
        result.model_path("critic")
    with pytest.raises(ConfigError, match="it does not exist"):
        realrl.load(tmp_path / "nothing")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(UsageError, match="holds 2 runs\n  Load one of them: "):
        realrl.load(tmp_path)
    with pytest.raises(AssetError, match="lacks a checkpoint: it has none"):
        realrl.load(tmp_path / "other").model_path()


def test_tables_of_pandas(run_dir: Path) -> None:
    pytest.importorskip("pandas")
    result = realrl.load(run_dir)
    assert result.metrics_frame()["reward/mean"].to_dict() == {1: 0.25, 2: 0.5, 3: 0.75}
    assert list(result.generations_frame()["response"]) == ["b"]


def test_tables_without_pandas(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pandas" else found(name))
    with pytest.raises(UsageError, match=r"a table needs pandas, which is not installed\n.*or take .metrics"):
        realrl.load(run_dir).metrics_frame()


def test_how_a_result_looks(run_dir: Path) -> None:
    result = realrl.load(run_dir)
    assert repr(result) == f"<run of <mine> in {run_dir}: complete, 3 steps; reward/mean 0.25 to 0.75>"
    html = result._repr_html_()
    assert "&lt;mine&gt;" in html
    assert "<mine>" not in html
    assert 'aria-label="reward/mean by step"' in html
    assert 'points="4.0,56.0 110.0,30.0 216.0,4.0"' in html


def test_a_long_run_has_a_short_curve(run_dir: Path) -> None:
    rows = "".join(json.dumps({"step": i, "reward/mean": i % 7}) + "\n" for i in range(1, 20_001))
    (run_dir / "metrics.jsonl").write_text(rows)
    assert len(realrl.load(run_dir)._repr_html_()) < 5000


def test_a_run_without_metrics_yet(run_dir: Path) -> None:
    (run_dir / "metrics.jsonl").write_text("")
    result = realrl.load(run_dir)
    assert result.metrics == []
    assert "ended after step 0 of 3" in repr(result)
    assert "<svg" not in result._repr_html_()


def test_the_page(run_dir: Path, tmp_path: Path) -> None:
    result = realrl.load(run_dir)
    assert result.report() == run_dir / "report.html"
    assert result.report(tmp_path / "page.html").read_text().startswith("<!doctype html>")
    with pytest.raises(ConfigError, match="cannot be written"):
        result.report(tmp_path / "no" / "page.html")
