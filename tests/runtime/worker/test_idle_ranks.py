"""Reductions over ranks of which some have no sample: refused, not waited for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from realrl.algo.api import Model
from realrl.cli import main
from realrl.errors import CallError
from realrl.graph.mfc import ModelName
from realrl.runtime.worker.idle_ranks import without
from tests.helpers.training import make_engine

EXPERIMENT = str(Path(__file__).parents[2] / "e2e" / "reducing_judge.py")


def test_an_engine_reduces_where_all_ranks_have_samples() -> None:
    model = Model(ModelName("actor"), make_engine(), None)
    assert without((), model, "judge") is model
    some = without((1, 3), model, "judge")
    assert some.engine.device == model.engine.device
    with pytest.raises(CallError, match="too few samples for that: workers without any: 1, 3") as refused:
        some.engine.all_reduce(torch.ones(1))
    assert "allocation.calls.judge=d1@0:0" in str(refused.value)


@pytest.mark.slow
def test_a_call_that_reduces_over_a_replacement_alone_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))  # workers import the experiment's base
    small = ("preset=tiny", "steps=1", "n_seqs=6", "generation.max_new_tokens=4", "algorithm.n_minibatches=1")
    two = ("cluster.n_devices_per_node=2", "algorithm.without=1/334", f"run_dir={tmp_path / 'run'}")
    assert main(["run", EXPERIMENT, *small, *two]) == 1
    told = " ".join("".join(capfd.readouterr()).split())
    assert "judge at step 1: it reduces over all workers, but this batch has too few samples for that" in told
