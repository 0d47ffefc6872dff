"""Lines of scripts/gpu_check.py, and what makes a check hold or not."""

from __future__ import annotations

import json
import math

import pytest
import torch

from scripts import gpu_check
from scripts.gpu_check import CHECKS, Check, main, outcome, outcome_apart
from scripts.gpu_checks.common import DoesNotHoldError
from scripts.gpu_checks.engines import TINY, train_flops
from scripts.gpu_checks.hardware import operations
from scripts.gpu_checks.runs import largest_difference
from tests.helpers.ranks import run_ranks
from tests.ranks.test_data_parallel import join, plan

ALONE = ("collectives_of_one_rank", "logprobs_of_generation", "fragmentation", "train_step", "head_chunks")


def fail() -> dict[str, int]:
    raise DoesNotHoldError("too large", {"size": 3})


def crash() -> dict[str, int]:
    raise RuntimeError("broken")


def test_outcomes() -> None:
    assert outcome("a", lambda: {"size": 1}) == {"name": "a", "holds": "yes", "figures": {"size": 1}}
    assert outcome("a", fail) == {"name": "a", "holds": "no", "reason": "too large", "figures": {"size": 3}}
    assert outcome("a", crash) == {"name": "a", "holds": "no", "reason": "RuntimeError: broken", "figures": {}}


def test_here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["--here", *ALONE, "saving", "offload_overlap"]) == 0
    lines = {line["name"]: line for line in map(json.loads, capsys.readouterr().out.splitlines())}
    assert {line["holds"] for line in lines.values()} == {"yes"}
    assert all(line["limit_s"] == CHECKS[name].limit_s > line["seconds"] >= 0 for name, line in lines.items())
    figures = {name: line["figures"] for name, line in lines.items()}
    assert 0 < figures["logprobs_of_generation"]["bfloat16"]["mean"] < 2e-2
    assert figures["train_step"]["mfu"] == "skipped: the peak of a CPU is not known"
    assert figures["fragmentation"]["n_growths"] == 100
    chunks = [figure["peak_bytes"] for name, figure in figures["head_chunks"].items() if name.startswith("2^")]
    assert chunks == sorted(chunks)
    assert figures["saving"]["copied_bytes"] > 0 == figures["saving"]["left_bytes"]
    assert figures["saving"]["frozen_bytes"].startswith("skipped: ")
    monkeypatch.setitem(gpu_check.CHECKS, "versions", Check(fail, 60))  # type: ignore[arg-type]
    assert main(["--here", "versions"]) == 1


def test_a_process_of_its_own() -> None:
    assert outcome_apart("versions", CHECKS["versions"].limit_s)["holds"] == "yes"


def test_a_check_that_takes_too_long_is_ended() -> None:
    found = outcome_apart("two_equal_runs", limit_s=0.5)
    assert found == {"name": "two_equal_runs", "holds": "no", "reason": "it took longer than 0.5 s", "figures": {}}


def _operations(rank: int, world_size: int, meeting, breaks: str) -> list[str]:
    """Do all operations, of which one gives zeros."""
    groups = join(rank, world_size, meeting)
    group = groups[plan(world_size)[1][0]]
    if breaks:
        right = getattr(group, breaks)
        object.__setattr__(group, breaks, lambda *args: right(*args).mul_(0))
    wrong = operations(group, torch.device("cpu"))
    groups.destroy()
    return wrong


@pytest.mark.parametrize(
    ("breaks", "wrong"),
    [("", []), ("all_reduce_", ["sum", "max"]), ("all_gather", ["all_gather"]), ("reduce_scatter", ["reduce_scatter"])],
)
def test_operations_of_two_ranks(breaks: str, wrong: list[str]) -> None:
    assert run_ranks(2, _operations, breaks, joined=False) == [wrong] * 2


def test_flops_of_a_train_step() -> None:
    # 4 blocks of 128 x (128 + 64 + 64 + 128 + 3 x 192), and a head of 128 x 256; scores of 10 tokens, half of them
    forward = 2 * (4 * 128 * 960 + 128 * 256) + 4 * (2 * 2 * 128 * 10) / 2
    assert train_flops(TINY, 3, 10) == 3 * 3 * 10 * forward


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
