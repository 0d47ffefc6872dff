"""Recordings of runs are equal to the last digit, or the first difference is told."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from scripts.compare_numbers import VARIANTS, Comparison, cases_of, compare_rows, main, select

ROW = {"step": 1, "reward/mean": 0.1, "time_s/step": 2.0, "bytes/data": 8}


def write(folder: Path, name: str, rows: Sequence[Mapping[str, Any]], file: str = "metrics.jsonl") -> None:
    (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / name / file).write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"time_s/step": 3.0}, ""),
        ({"reward/mean": 0.1 + 2e-17}, "reward/mean, step 1: 0.1 / 0.10000000000000002"),
        ({"bytes/data": 8.0}, "bytes/data, step 1: 8 / 8.0"),
        ({"reward/mean": None}, "reward/mean, step 1: 0.1 / null"),
        ({"reward/std": 0.5}, "reward/std, step 1: only in B"),
        ({"memory_gb/0": 0.5}, ""),
    ],
)
def test_the_first_difference(change: dict[str, Any], difference: str) -> None:
    assert compare_rows([ROW], [{**ROW, **change}]).difference == difference


def test_what_is_measured_no_longer_is_told() -> None:
    assert compare_rows([{**ROW, "memory_gb/0": 0.5}], [ROW]).difference == "memory_gb/0, step 1: only in A"


def test_responses_may_have_more_fields_and_fewer_digits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b, row = tmp_path / "a", tmp_path / "b", {"step": 1, "text": "x", "reward": 0.1557973325252533}
    for folder, responses in ((a, row), (b, {**row, "reward": 0.155797, "row": 7})):
        write(folder, "ppo", [ROW])
        write(folder, "ppo", [responses], "generations.jsonl")
    assert main(["compare", str(a), str(b)]) == 0
    write(b, "ppo", [{**row, "text": "y"}], "generations.jsonl")
    assert main(["compare", str(a), str(b)]) == 1
    assert 'generations.jsonl: text, step 1: "x" / "y"' in capsys.readouterr().out


def test_lengths_count() -> None:
    assert compare_rows([ROW], [ROW]) == Comparison(n_steps=1, n_metrics=3)
    assert compare_rows([ROW, {**ROW, "step": 2}], [ROW]).difference == "number of lines: 2 / 1"


def test_what_timing_decides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    for name in ("plan-eight-all", "plan-eight"):
        write(a, name, [ROW])
        write(b, name, [{**ROW, "bytes/data": 9, "reward/mean": 0.1 + (1e-7 if name == "plan-eight-all" else 0)}])
    assert main(["compare", str(a), str(b)]) == 0
    out = capsys.readouterr().out
    assert "equal, without bytes/data" in out
    assert "equal but for rounding, without bytes/data" in out
    for name in ("plan-eight-all", "plan-eight"):
        write(b, name, [{**ROW, "reward/mean": 0.1 + 1e-5}])
    assert main(["compare", str(a), str(b)]) == 1
    assert "0 runs are equal, 2 are not" in capsys.readouterr().out


def test_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    for folder in (a, b):
        write(folder, "ppo", [ROW])
        write(folder, "ppo", [{"step": 1, "text": "x"}], "generations.jsonl")
    assert main(["compare", str(a), str(b)]) == 0
    assert "1 runs are equal, 0 are not" in capsys.readouterr().out
    write(b, "ppo", [{"step": 1, "text": "y"}], "generations.jsonl")
    write(b, "sft", [ROW])
    assert main(["compare", str(a), str(b)]) == 1
    out = capsys.readouterr().out
    assert 'generations.jsonl: text, step 1: "x" / "y"' in out
    assert "only in B" in out
    with pytest.raises(SystemExit):
        main(["compare", str(a), str(tmp_path / "none")])


def test_cases() -> None:
    cases = cases_of(["sft", "ppo"], {"split": ("allocation=split",)}, ("n_seqs=16",))
    names = [case.name for case in cases]
    assert names == ["sft", "ppo", *(case.name for case in VARIANTS), "plan-single", "plan-split", "quickstart-rw"]
    assert select(cases, ["ppo", "plan-*"]) == [cases[1], *cases[-3:-1]]
    with pytest.raises(ValueError, match="no run is called 'pp'"):
        select(cases, ["pp"])
