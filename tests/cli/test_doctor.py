"""``realrl doctor`` on the command line: tables, JSON, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from realrl import cli
from realrl.cpu.loader import why_not


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    why_not()  # the kernels are loaded, or known not to be there, before the cache is an empty one
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REALRL_CACHE", str(tmp_path / "cache"))
    return tmp_path


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["doctor", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_healthy_run(capsys: pytest.CaptureFixture[str], workplace: Path) -> None:
    code, out, err = call(capsys, "ppo", "preset=tiny", "launcher=inline", "--json", "report.json")
    assert (code, err) == (0, "")
    titles = ("Memory of each role, per device", "Peak of each device", "Dataset", "Checks")
    assert [title for title in titles if f"\n{title}\n" in f"\n{out}"] == list(titles)
    assert out.endswith("\nEverything is as it should be.\n")
    assert not any(line != line.rstrip() for line in out.splitlines())
    assert [path.name for path in workplace.iterdir()] == ["report.json"]
    report = json.loads((workplace / "report.json").read_text())
    assert report["ok"]
    assert {check["status"] for check in report["checks"]} == {"ok"}
    calls = report["memory"]["calls"]
    peak = report["memory"]["peaks"]["0"]
    assert peak["total"] == max(call["devices"]["0"]["total"] for call in calls.values())
    assert calls[peak["call"]]["devices"]["0"]["total"] == peak["total"]


def test_two_devices_and_too_little_memory(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("cluster.n_devices_per_node=2", "allocation=split", "--device-memory", "0.01", "--no-models")
    code, out, _ = call(capsys, "dpo", "preset=tiny", *arguments)
    assert code == 2
    assert "What would need less" in out
    assert "\nproblem: memory: " in out
    assert out.endswith("\n1 problem.\n")


@pytest.mark.parametrize(("device", "is_told"), [("cuda", True), ("cpu", False)])
def test_what_cuda_takes_for_itself(device: str, is_told: bool, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (f"cluster.device={device}", "cluster.n_devices_per_node=2", "--device-memory", "80", "--no-models")
    _, out, _ = call(capsys, "sft", "preset=tiny", *arguments)
    assert ("CUDA's context and NCCL's connections take 838.9 MB on 0-1" in out) is is_told
    assert "CUDA, NCCL" in out


def test_missing_assets(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "ppo", "preset=quickstart")
    assert (code, err) == (2, "")
    assert "there is no such folder" in out
    assert "problem: files: run: python scripts/fetch_assets.py" in out
    assert "not checked  needs what has a problem: files" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "realrl doctor needs an experiment"),
        (["pppo"], "there is no experiment 'pppo'. Did you mean 'ppo'"),
        (["ppo", "sede=1"], "Did you mean 'seed'?"),
        (["rw", "generation.top_k=1"], "has no effect: 'rw' has no generate call"),
        (["ppo", "preset=tiny", "--device-memory", "-1"], "--device-memory -1 is no size"),
        (["ppo", "preset=tiny", "--jsn", "x"], "unknown option --jsn. Did you mean '--json'"),
        (["sft", "preset=tiny", "--json", "/nowhere/x"], "--json /nowhere/x cannot be written"),
        (["ppo", "preset=tiny", "--nodes"], "--nodes asks the machines that join a run, and with launcher=local none"),
    ],
)
def test_wrong_input(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    code, _, err = call(capsys, *arguments)
    assert code == 2
    assert message in err
    assert "Traceback" not in err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "--help")
    assert code == 0
    assert "--device-memory GB" in out
    assert "exit codes: 0 nothing stands in the way" in out
