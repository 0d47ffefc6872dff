"""The script that shows that every online algorithm learns: its judgement, its picture, and one algorithm for real."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("learning_curves", ROOT / "scripts" / "learning_curves.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def write_run(folder: Path, metrics: dict[str, list[float]], **algorithm: float) -> None:
    """A run folder with these numbers, step by step."""
    folder.mkdir(parents=True)
    config = {"n_seqs": 8, "generation": {"n_responses": 8}, "algorithm": algorithm}
    (folder / "config.json").write_text(json.dumps(config))
    n_steps = len(next(iter(metrics.values())))
    rows = [{"time_s/step": 1.0, **{name: values[i] for name, values in metrics.items()}} for i in range(n_steps)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


UP, FLAT = [i / 20 for i in range(20)], [0.1] * 20
NOISE = {"reward/std": [0.2] * 20}


@pytest.mark.parametrize(
    ("name", "metrics", "algorithm", "n_failures"),
    [
        ("grpo", {"reward/mean": UP, **NOISE}, {}, 0),
        ("grpo", {"reward/mean": FLAT, **NOISE}, {}, 1),
        ("grpo", {"reward/mean": UP, "reward/std": [2.0] * 20}, {}, 1),
        ("self_play", {"reward/mean": UP, "opponent_reward/mean": UP, **NOISE}, {}, 0),
        ("self_play", {"reward/mean": UP, "opponent_reward/mean": FLAT, **NOISE}, {}, 1),
        ("safe_rlhf", {"reward/mean": UP, "cost/mean": [0.3] * 10 + FLAT[:10], **NOISE}, {"cost_limit": 0.2}, 0),
        ("safe_rlhf", {"reward/mean": UP, "cost/mean": UP, **NOISE}, {"cost_limit": 0.2}, 1),
        ("safe_rlhf", {"reward/mean": UP, "cost/mean": FLAT, **NOISE}, {"cost_limit": 0.2}, 1),
        ("distill", {"distill/reverse_kl": [1.0 - x for x in UP]}, {}, 0),
        ("distill", {"distill/reverse_kl": FLAT}, {}, 1),
    ],
)
def test_judgement(
    script: ModuleType,
    tmp_path: Path,
    name: str,
    metrics: dict[str, list[float]],
    algorithm: dict[str, float],
    n_failures: int,
) -> None:
    write_run(tmp_path / name, metrics, **algorithm)
    result = script.judge(name, tmp_path / name)
    assert len(result.failures) == n_failures
    assert script.as_json(result)["learned"] == (n_failures == 0)


def test_start_and_end_have_standard_errors(script: ModuleType, tmp_path: Path) -> None:
    write_run(tmp_path / "grpo", {"reward/mean": UP, **NOISE})
    [curve] = script.judge("grpo", tmp_path / "grpo").curves
    assert curve.start.mean == 0.0
    assert curve.start.error == pytest.approx(0.2 / 8)  # 64 responses a step
    assert curve.end.mean == pytest.approx(0.85)  # of the last five steps
    assert curve.end.error == pytest.approx(0.2 / 8 / 5**0.5)


def test_what_is_complete_is_only_judged_and_drawn(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    write_run(tmp_path / "grpo", {"reward/mean": UP, **NOISE})
    write_run(tmp_path / "rloo", {"reward/mean": FLAT, **NOISE})
    arguments = ["--steps", "20", "--out", str(tmp_path)]
    assert script.main(["--only", "grpo", *arguments]) == 0
    assert script.main(["--only", "grpo", "rloo", *arguments]) == 1
    shown = capsys.readouterr().out
    assert "rloo: reward/mean went from 0.100 ± 0.025 to 0.100 ± 0.011 only" in shown
    results = json.loads((tmp_path / "results.json").read_text())
    assert [(r["algorithm"], r["learned"]) for r in results] == [("grpo", True), ("rloo", False)]
    assert b"<svg" in (tmp_path / "learning_curves.svg").read_bytes()
    assert (tmp_path / "learning_curves.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_grpo_learns_on_the_tiny_preset(script: ModuleType, tmp_path: Path) -> None:
    assert script.main(["--only", "grpo", "--out", str(tmp_path)]) == 0
