"""Runs whose calls drop samples, run ahead of training, and record metrics of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from realrl.cli import main
from tests.helpers.runs import assert_same_numbers, read_metrics, run_here

EXPERIMENT = str(Path(__file__).parent / "rejection_sampling.py")
SMALL = ("preset=tiny", "steps=4", "n_seqs=6", "generation.max_new_tokens=4", "models.actor.optimizer.lr=0.01")
TWO_MESHES = (
    "cluster.n_devices_per_node=2",
    "allocation.mode=manual",
    "allocation.calls.actor_gen=d1@0:1",
    "allocation.calls.judge=d1@0:1",
    "allocation.calls.actor_train=d1@0:0",
)


def run(run_dir: Path, *overrides: str) -> list[dict[str, Any]]:
    """A run in this process that must succeed."""
    run_here("run", EXPERIMENT, *SMALL, "launcher=inline", *overrides, f"run_dir={run_dir}")
    return read_metrics(run_dir)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run(tmp_path_factory.mktemp("reference") / "run", "algorithm.keep=128")


def test_every_step_trains_on_its_number_of_samples(reference: list[dict[str, Any]]) -> None:
    assert len(reference) == 4
    assert sum(row["dropped/judge"] for row in reference) > 0
    for row in reference:
        assert row["n_samples"] == 6
        assert 0 < row["judge/max"] < 256
        assert 0 < row["judge/sum"] < row["judge/max"]
        assert 1 <= row["response_length/mean"] <= 4
        assert "staleness/mean" not in row


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(
            ("launcher=local", "cluster.n_devices_per_node=2", "n_mbs=2"), marks=pytest.mark.slow, id="two slices"
        ),
        pytest.param(
            ("launcher=local", *TWO_MESHES, "min_n_seqs=1"), marks=pytest.mark.slow, id="two meshes, streaming"
        ),
    ],
)
def test_plans_agree(reference: list[dict[str, Any]], overrides: tuple[str, ...], tmp_path: Path) -> None:
    run_here("run", EXPERIMENT, *SMALL, "algorithm.keep=128", *overrides, f"run_dir={tmp_path / 'run'}")
    assert_same_numbers(reference, read_metrics(tmp_path / "run"), rel=1e-4, floor=1e-6)


def test_a_resumed_run_goes_on_with_the_next_samples(reference: list[dict[str, Any]], tmp_path: Path) -> None:
    run(tmp_path / "run", "algorithm.keep=128", "steps=2", "models.actor.optimizer.schedule=constant")
    run(tmp_path / "run", "algorithm.keep=128", "resume=auto", "models.actor.optimizer.schedule=constant")
    whole = run(tmp_path / "whole", "algorithm.keep=128", "models.actor.optimizer.schedule=constant")
    assert_same_numbers(whole, read_metrics(tmp_path / "run"), rel=1e-4, floor=1e-6)


def test_too_many_dropped_samples_end_the_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    overrides = ["algorithm.keep=0", "max_refill_rounds=2", "launcher=inline", f"run_dir={tmp_path / 'run'}"]
    assert main(["run", EXPERIMENT, *SMALL, *overrides]) == 1
    told = "".join(capfd.readouterr())
    message = "step 1 still lacks 6 samples after 2 rounds of replacements (call 'judge' dropped 18 of 18 samples)"
    assert message in " ".join(told.split())


@pytest.mark.parametrize("keep", [pytest.param(256, marks=pytest.mark.slow), 128])
def test_generation_runs_ahead(keep: int, tmp_path: Path) -> None:
    ours = run(tmp_path / "shared", f"algorithm.keep={keep}", "max_staleness=1")
    assert ours[0]["staleness/mean"] == 0.0
    assert all(0.0 <= row["staleness/mean"] <= row["staleness/max"] <= 1.0 for row in ours)
    if keep == 256:  # no replacements: it is known which parameters generate what
        assert [row["staleness/max"] for row in ours] == [0.0, 1.0, 1.0, 1.0]
        assert [row["staleness/mean"] for row in ours] == [0.0, 1.0, 1.0, 1.0]
        arguments = ("max_staleness=1", "algorithm.keep=256", *TWO_MESHES, f"run_dir={tmp_path / 'meshes'}")
        run_here("run", EXPERIMENT, *SMALL, *arguments)
        assert_same_numbers(ours, read_metrics(tmp_path / "meshes"), rel=1e-4, floor=1e-6)


def test_staleness_that_no_call_allows_is_refused(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["run", "sft", "preset=tiny", "launcher=inline", "max_staleness=1", f"run_dir={tmp_path}"]) == 2
    assert "max_staleness=1" in "".join(capfd.readouterr())
