"""The files in docs/write-your-own.md and docs/python.md run, with the commands that stand below them."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from realrl.cli import main
from tests.docs.markdown import ROOT, commands, files
from tests.helpers.runs import read_metrics

OWN, PYTHON = ROOT / "docs/write-your-own.md", ROOT / "docs/python.md"
SMALL = ("launcher=inline", "steps=2", "n_seqs=8", "run_dir=run")
RUNS = [words for words in commands(OWN, "realrl") if words[0] == "run" and "--dry-run" not in words]
IN_ONE_PROCESS = [words for words in RUNS if not any(word.startswith("cluster.") for word in words)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with all files of both documents."""
    for name, text in [*files(OWN).items(), *files(PYTHON).items()]:
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def words_of(arguments: list[str]) -> str:
    return " ".join(arguments[1:])


@pytest.mark.parametrize("arguments", IN_ONE_PROCESS, ids=words_of)
def test_the_runs_train(arguments: list[str], folder: Path) -> None:
    short = () if any("max_new_tokens" in word for word in arguments) else ("generation.max_new_tokens=6",)
    short = () if "my_sft" in arguments[1] else short
    assert main([*arguments, *SMALL, *short]) == 0
    rows = read_metrics(folder / "run")
    assert len(rows) == 2
    assert all(row["actor/grad_norm"] > 0 for row in rows)


def test_every_file_with_an_experiment_is_run(folder: Path) -> None:
    run = {arguments[1].removeprefix("./") for arguments in IN_ONE_PROCESS}
    with_experiment = {name for name, text in files(OWN).items() if "\nEXPERIMENT = " in text}
    assert len(with_experiment) >= 7
    assert with_experiment <= run


def test_lines_fit(folder: Path) -> None:
    for name, text in [*files(OWN).items(), *files(PYTHON).items()]:
        assert max(map(len, text.splitlines())) <= 120, name


@pytest.mark.parametrize("name", ["samples.py", "cell.py"])
def test_scripts_run(name: str, folder: Path) -> None:
    runpy.run_path(str(folder / name), run_name="__main__")


@pytest.mark.slow
def test_the_script_of_several_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(folder / "sweep.py"), run_name="__main__")
    assert "<run of grpo in" in capsys.readouterr().out


def test_a_bad_combination_is_refused_before_the_start(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "./best_of_n.py", "preset=tiny", "algorithm.keep=9", *SMALL]) == 2
    assert "algorithm.keep=9 of 8 responses cannot be kept\n  Set generation.n_responses" in capsys.readouterr().err
    assert not (folder / "run").exists()


def test_where_no_prompt_stays_the_run_ends(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "./best_of_n.py", "preset=tiny", "algorithm.least_reward=10", *SMALL]) == 1
    assert "step 1 still lacks 8 samples after 10 rounds of replacements" in capsys.readouterr().err
