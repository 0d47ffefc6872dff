"""Lines of scripts/gpu_check.py, and what makes a check hold or not."""

from __future__ import annotations

import json
import math
import os

import pytest
import torch

from scripts import gpu_check
from scripts.gpu_check import DoesNotHoldError, NotCheckedError, largest_difference, main, outcome, outcome_apart


def fail() -> dict[str, int]:
    raise DoesNotHoldError("too large", {"size": 3})


def skip() -> dict[str, int]:
    raise NotCheckedError("nothing is there")


def crash() -> dict[str, int]:
    raise RuntimeError("broken")


def test_outcomes() -> None:
    assert outcome("a", lambda: {"size": 1}) == {"name": "a", "holds": "yes", "figures": {"size": 1}}
    assert outcome("a", fail) == {"name": "a", "holds": "no", "reason": "too large", "figures": {"size": 3}}
    assert outcome("a", skip) == {"name": "a", "holds": "not checked", "reason": "nothing is there", "figures": {}}
    assert outcome("a", crash) == {"name": "a", "holds": "no", "reason": "RuntimeError: broken", "figures": {}}


def test_here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["--here", "collectives_of_one_rank", "logprobs_of_generation", "attention", "decode_step"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["holds"] for line in lines] == ["yes", "yes", "not checked", "not checked"]
    assert 0 < lines[1]["figures"]["bfloat16"]["mean"] < 2e-2
    monkeypatch.setitem(gpu_check.CHECKS, "versions", fail)  # type: ignore[arg-type]
    assert main(["--here", "versions"]) == 1


def test_a_process_of_its_own() -> None:
    found = outcome_apart("attention")
    assert found["holds"] == ("yes" if os.environ["CUDA_VISIBLE_DEVICES"] else "not checked")


def test_a_check_that_takes_too_long_is_ended() -> None:
    found = outcome_apart("two_equal_runs", limit_s=0.5)
    assert found == {"name": "two_equal_runs", "holds": "no", "reason": "it took longer than 0.5 s", "figures": {}}


def test_differences_of_metrics() -> None:
    ours = [{"loss": 0.5, "tokens": 100.0, "time_s/step": 1.0}]
    assert largest_difference(ours, [{"loss": 0.5, "tokens": 100.0, "time_s/step": 2.0}]) == 0.0
    assert largest_difference(ours, [{"loss": 0.25, "tokens": 110.0, "time_s/step": 2.0}]) == 0.25
    assert largest_difference(ours, [{"loss": 0.5, "time_s/step": 2.0}]) == math.inf
    assert largest_difference(ours, []) == math.inf


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["attentoin"])
    assert "no such check: attentoin" in capsys.readouterr().err
