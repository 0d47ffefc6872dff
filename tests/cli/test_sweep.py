"""Sweeps: points from overrides, refusals before anything starts, runs that fail, are left alone, or continue."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from realrl.cli import main
from realrl.cli.sweep import command
from realrl.cli.sweep.jobs import Job, JobEnded
from realrl.cli.sweep.points import MAX_POINTS, multiply
from realrl.config.overrides import several_values
from realrl.errors import UsageError
from tests.helpers.live import wait_until
from tests.helpers.runs import read_metrics

SFT = ("preset=tiny", "n_seqs=4", "launcher=inline", "steps=1")


def test_the_last_key_changes_fastest() -> None:
    points = multiply(["steps=3", "lr=1e-5,3e-5", "models.actor.lora.rank=0", "seed=range(1,4)"])
    values = [tuple(point.values.values()) for point in points]
    assert values == [(lr, seed) for lr in ("1e-5", "3e-5") for seed in ("1", "2", "3")]
    assert points[4].overrides == ("steps=3", "lr=3e-5", "models.actor.lora.rank=0", "seed=2")
    assert points[4].name == "lr-3e-5_seed-2"


def test_keys_are_as_short_as_they_are_unambiguous() -> None:
    (point, _) = multiply(["models.actor.optimizer.lr=1e-3", "models.critic.optimizer.lr=1,2", "seed=1"])
    assert point.values == {"lr": "1"}
    keys = ["models.actor.optimizer.lr=1,2", "models.critic.optimizer.lr=1,2", "algorithm.kl_coef=0,1"]
    assert [*multiply(keys)[0].values] == ["actor.optimizer.lr", "critic.optimizer.lr", "kl_coef"]


def test_folders_have_names_of_their_own() -> None:
    points = multiply(["models.actor.path=/models/a,/models/b", "'generation.stop_ids=[1,2],[3]'".strip("'")])
    assert [point.name for point in points] == [
        "path-models-a_stop_ids-1-2", "path-models-a_stop_ids-3", "path-models-b_stop_ids-1-2",
        "path-models-b_stop_ids-3",
    ]  # fmt: skip
    names = [point.name for point in multiply(["dataset.path=/a.jsonl,-/a.jsonl"])]
    assert names == ["001_path-a.jsonl", "002_path-a.jsonl"]
    long = [point.name for point in multiply([f"dataset.path={'x' * 150},{'x' * 150}y"])]
    assert long[0].startswith("001_path-xxx")
    assert max(map(len, long)) < 128


@pytest.mark.parametrize(
    ("override", "values"),
    [
        ("seed=1,2", ["1", "2"]),
        ("lr=1e-5, 3e-5", ["1e-5", "3e-5"]),
        ("seed=range(0,3)", ["0", "1", "2"]),
        ("preset=choice(tiny,quickstart)", ["tiny", "quickstart"]),
        ("models.*.optimizer.lr=1,2", ["1", "2"]),
        ("generation.stop_ids=[1,2]", []),
        ("dataset.path='a,b'", []),
        ("seed=1", []),
        ("~seed", []),
        ("seed", []),
        ("seed=[1", []),
    ],
)
def test_values_of_an_override(override: str, values: list[str]) -> None:
    assert several_values(override, 10) == values


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["seed=1"], "nothing to sweep: no key has several values\n  Give one several: seed=1,2,3"),
        (["seed=1,2,1"], "seed=1 is there twice"),
        (["seed=1,2", "seed=3,4"], "seed is there twice"),
        (["seed=range(0,10000)"], f"a sweep of over 500 points; the most are {MAX_POINTS}"),
        (["seed=range(0,100)", "lr=range(1,101)"], "a sweep of 10,000 points; the most are 500"),
        (["seed=interval(0,1)"], "seed=interval(0,1): no values to sweep\n  Write seed=a,b,c, or seed=range(1,4)."),
        (["seed=glob(*)"], "seed=glob(*): no values to sweep"),
    ],
)
def test_refused_sweeps(arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        multiply(arguments)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sede=1,2", "--sweep"], "point sede=1: sede=1: unknown key. Did you mean 'seed'?"),
        (["lr=1e-3,0", "--sweep"], "point lr=0: models.actor.optimizer.lr=0: must be a number > 0"),
        (["seed=1,2", "--sweep", "resume=runs/a"], "resume=runs/a: a sweep continues its own runs"),
        (["seed=1,2", "--sweep", "run_dir=a,b"], "point seed=1: run_dir=a,b: several values"),
        (["seed=1,2", "--sweep", "--jobs", "0"], "--jobs 0: at least one run goes on at a time"),
        (["seed=1,2", "--sweep", "--hardware", "h100"], "--hardware: a sweep takes the machine that it is on"),
        (["seed=1,2", "--sweep", "launcher=external"], "seed=1: launcher=external: the runs of a sweep"),
        (
            ["seed=1,2", "--sweep", "launcher=local", "cluster.n_nodes=2"],
            "seed=1: cluster.n_nodes=2, but launcher=local starts workers on one",
        ),
        (["seed=1,2"], "seed=1,2: several values, but this is one run; --sweep makes a run of each"),
        (["--jobs", "2"], "--jobs is for sweeps\n  Add --sweep."),
        (["seed=1,2", "--sweep", "run_dir=there"], "holds something else than a sweep"),
        (["seed=1,2", "--sweep", "run_dir=file/below"], "/file' is not a folder"),
        (["seed=1,2", "--sweep", "run_dir=damaged", "resume=auto"], "sweep.json is not what a sweep wrote"),
        (["seed=1,2", "--sweep", "run_dir=damaged"], "holds the results of an earlier sweep"),
    ],
)
def test_nothing_is_started(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("there/model.txt", "damaged/sweep.json", "file"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    assert main(["run", "sft", *SFT, *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_lists_the_points(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "sft", *SFT, "seed=1,2", "lr=1e-3,1e-4", "--sweep", "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert "seed  lr\n1  1     1e-3\n2  1     1e-4\n3  2     1e-3\n4  2     1e-4\n" in told
    assert "4 runs, 1 at a time. Nothing was started" in told


class Scripted:
    """Jobs that end as the test says, without any process; the last is interrupted if a signal came."""

    codes: ClassVar[list[int]] = []
    received: ClassVar[int | None] = None
    started: ClassVar[list[Job]] = []

    def __init__(self, slots: list[dict[str, str]]) -> None:
        self.slots = slots

    def run(self, jobs: list[Job]) -> Iterator[Job | JobEnded]:
        for job, code in zip(jobs, self.codes):
            self.started.append(job)
            yield job
            yield JobEnded(job, code, 1.5)


def test_an_interrupted_sweep_tells_how_to_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "Jobs", Scripted)
    Scripted.codes, Scripted.received, Scripted.started = [0, 130], signal.SIGINT, []
    folder = tmp_path / "it's a sweep"
    words = ["sft", *SFT, "seed=1,2,3", "--sweep", f"run_dir='{str(folder).replace(chr(39), chr(92) + chr(39))}'"]
    assert main(["run", *words]) == 130
    told = capsys.readouterr()
    assert "[2/3] seed=2: interrupted by SIGINT\n" in told.out
    assert "3  3     not run\n" in told.out
    again = told.err.removeprefix("realrl: interrupted by SIGINT; continue with: ")
    Scripted.codes, Scripted.received, Scripted.started = [0, 1], None, []
    assert main(shlex.split(again)[1:]) == 1
    told = capsys.readouterr().out
    assert f"sweep of 3 runs, 1 of them done before, 1 at a time, in {folder}\n" in told
    assert [job.folder for job in Scripted.started] == [folder / "seed-2", folder / "seed-3"]
    assert "[3/3] seed=3: failed with exit code 1: see console.log\n" in told
    known = json.loads((folder / "sweep.json").read_text())["points"]
    assert {name: point["exit_code"] for name, point in known.items()} == {"seed-1": 0, "seed-2": 0, "seed-3": 1}


def test_a_run_that_fails_is_told_and_the_others_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("no json\n")  # of the second point: the first one is checked before anything starts
    words = ["run", "sft", *SFT, f"dataset.path=tiny,{rows}", "--sweep", f"run_dir={tmp_path / 'sweep'}"]
    assert main(words) == 1
    told = capsys.readouterr().out
    assert f"failed with exit code 2: {rows}" in told
    assert "path=tiny: done in" in told
    assert "actor/loss" in told
    rows.write_text(4 * (json.dumps({"prompt": "P:", "answer": "ab"}) + "\n"))
    assert main([*words, "resume=auto"]) == 0
    told = capsys.readouterr().out
    assert "sweep of 2 runs, 1 of them done before, 1 at a time" in told
    assert told.count("done in") == 3  # one of them twice, as it ends and in the table


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ctrl_c_saves_every_run_of_a_sweep(tmp_path: Path) -> None:
    folder, options = tmp_path / "sweep", ("preset=tiny", "n_seqs=4", "steps=100000", "seed=1,2,3")
    command = [sys.executable, "-m", "realrl", "run", "sft", *options, "--sweep", "--jobs", "2", f"run_dir={folder}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, process_group=0
    ) as process:
        try:
            consoles = [folder / f"seed-{seed}" / "console.log" for seed in (1, 2)]
            wait_until(lambda: all(c.exists() and "step 2/" in c.read_text() for c in consoles), "two steps")
            os.killpg(process.pid, signal.SIGINT)
            told, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    for seed in (1, 2):
        last = read_metrics(folder / f"seed-{seed}")[-1]["step"]
        assert (folder / f"seed-{seed}/checkpoints/latest").resolve().name == f"step_{last}"
    assert not (folder / "seed-3").exists()
    assert "interrupted by SIGINT; continue with: realrl run sft" in told
