"""Commands in jobs: who leads, who joins, who has nothing to do, and what SLURM is handed."""

from __future__ import annotations

import os
import re
import shlex
import stat
from pathlib import Path

import pytest

from realrl.cli import main
from tests.sched.nodes.test_jobs import BATCH, MPIRUN, STEP, TORCHRUN

RUN = ("run", "ppo", "preset=tiny")
KEY = {"REALRL_KEY": "ab" * 32}
MARKS = re.compile(r"(SLURM|TORCHELASTIC|OMPI|PMI|REALRL_KEY|JOB_COMPLETION)")


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if MARKS.match(name):
            monkeypatch.delenv(name)
    monkeypatch.setenv("REALRL_CACHE", str(tmp_path / "cache"))


def said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], *words: str
) -> tuple[int, str, str]:
    """Exit code, output and errors of a command in a job."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    code = main([*RUN, *words] if "=" in words[0] else list(words))
    output, errors = capsys.readouterr()
    return code, output, errors


def test_outside_an_allocation_the_line_for_sbatch_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("launcher=slurm", "cluster.n_nodes=2", "run_dir=runs/a", "generation.stop_ids=[2,3]")
    code, output, errors = said(capsys, monkeypatch, {}, *words)
    line = shlex.split(output)
    assert (code, line[0]) == (2, "sbatch")
    assert {"--nodes=2", "--requeue"} < set(line)
    command = shlex.split(line[-1].removeprefix("--wrap=exec "))
    assert command[-8:] == ["run", "ppo", "preset=tiny", *words, "resume=auto"]
    assert "this is in no allocation of SLURM: the line above submits the run" in errors
    assert "--sbatch FILE" in errors


def test_a_script_is_written_for_its_user_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "run.sbatch"
    words = ("launcher=slurm", "cluster.n_nodes=2", "run_dir=runs/a", "resume=never", "--sbatch", str(file))
    code, output, _ = said(capsys, monkeypatch, {}, *words)
    assert (code, output) == (0, f"wrote {file}; submit it with: sbatch {file}\n")
    assert stat.S_IMODE(file.stat().st_mode) == 0o700
    text = file.read_text()
    assert "run ppo preset=tiny launcher=slurm cluster.n_nodes=2 run_dir=runs/a resume=never &" in text
    assert f"cd {os.getcwd()} " in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("launcher=slurm",), "launcher=slurm needs a folder in which a job that is queued again goes on"),
        (("steps=3", "--sbatch", "x"), "--sbatch writes a script for SLURM"),
        (("launcher=slurm", "run_dir=a", "--sbatch", "/proc/none/x"), "--sbatch /proc/none/x cannot be written"),
    ],
)
def test_what_slurm_cannot_be_handed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], message: str
) -> None:
    code, _, errors = said(capsys, monkeypatch, {}, *words)
    assert code == 2
    assert message in errors


@pytest.mark.parametrize(
    ("environment", "launcher", "n_nodes"),
    [(BATCH, "slurm", 3), (STEP, "external", 2), (TORCHRUN, "external", 4), (TORCHRUN, "local", 1)],
)
def test_a_run_takes_all_machines_of_its_job(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    launcher: str,
    n_nodes: int,
) -> None:
    words = ("config", "ppo", "preset=tiny", f"launcher={launcher}")
    code, output, _ = said(capsys, monkeypatch, environment, *words)
    assert code == 0
    assert re.search(rf"cluster\.n_nodes\W+{n_nodes}\W", output)
    _, output, _ = said(capsys, monkeypatch, environment, *words, "cluster.n_nodes=7")
    assert re.search(r"cluster\.n_nodes\W+7\W", output)


@pytest.mark.parametrize("words", [("launcher=external", "run_dir=a"), ("node", "10.0.0.1:1")])
def test_one_process_on_each_machine_is_enough(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    code, _, errors = said(capsys, monkeypatch, {**TORCHRUN, **KEY, "LOCAL_RANK": "3"}, *words)
    assert code == 0
    assert "process 3 of torchrun on this machine has nothing to do: process 0 starts all workers here" in errors


@pytest.mark.parametrize(
    ("environment", "words", "message"),
    [
        ({**TORCHRUN, **KEY}, (), "machine 1 of torchrun does not know the port of machine 0"),
        ({**MPIRUN, **KEY}, (), "machine 2 of mpirun does not know the address of machine 0"),
        ({**TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}, (), "does not know how to join: the job has no name of its own"),
        ({**TORCHRUN, "GROUP_RANK": "-"}, (), "the environment variable GROUP_RANK='-' is no number of a job"),
        ({**STEP, "SLURM_LOCALID": "0", **TORCHRUN}, ("cluster.start_timeout_s=1",), "and not those of SLURM"),
        ({**STEP, "SLURM_LOCALID": "0"}, ("cluster.start_timeout_s=1",), "machine 0 of SLURM has written no"),
        (
            {**TORCHRUN, **KEY, "MASTER_ADDR": "no.such.host.invalid"},
            ("cluster.start_timeout_s=1", "cluster.master_port=1"),
            "has no address: there is no host no.such.host.invalid, after 1 s",
        ),
    ],
)
def test_a_machine_that_cannot_join_says_why(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    words: tuple[str, ...],
    message: str,
) -> None:
    code, _, errors = said(capsys, monkeypatch, environment, "launcher=external", *words)
    assert code == (75 if "start_timeout_s=1" in str(words) else 2)
    assert message in errors
