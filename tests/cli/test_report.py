"""`realrl report` and `realrl watch`: files, messages, bad input."""

from pathlib import Path

import pytest

from realrl import cli
from tests.report.folders import sample, steps, write_run


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        write_run(tmp_path / "runs" / name, steps(3, reward__mean=float), [sample(1)])
    return tmp_path


def test_pages_of_one_run_and_of_several(workplace, capsys):
    assert cli.main(["report", "runs/a"]) == 0
    assert capsys.readouterr().out.startswith("wrote runs/a/report.html (")
    assert "<title>ppo: a</title>" in Path("runs/a/report.html").read_text()
    assert cli.main(["report", "runs/a", "runs/b"]) == 0
    assert "<title>2 runs of ppo</title>" in Path("report.html").read_text()
    assert cli.main(["report", "runs", "--out", "both.html"]) == 0
    assert Path("both.html").read_text().count("runs of ppo</title>") == 1


def test_what_is_damaged_is_told(workplace, capsys):
    with open("runs/a/metrics.jsonl", "a") as file:
        file.write("nothing\n")
    assert cli.main(["report", "runs/a"]) == 0
    assert "runs/a: metrics.jsonl: 1 damaged line left out." in capsys.readouterr().out


@pytest.mark.slow
def test_a_simulated_run(workplace, capsys):
    command = ["simulate", "ppo", "preset=tiny", "cluster.n_devices_per_node=2", "allocation=split", "--steps", "3"]
    assert cli.main([*command, "--out", "predicted"]) == 0
    assert cli.main(["report", "predicted"]) == 0
    assert "config.json: there is no such file." in capsys.readouterr().out
    page = Path("predicted/report.html").read_text()
    assert '"steps":[1,3]' in page
    assert "critic_train" in page


@pytest.mark.parametrize("command", ["report", "watch"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "needs a run folder"),
        (["none"], "none is no run folder: it does not exist"),
        (["runs/a/metrics.jsonl"], "it is a file"),
        (["runs/a", "--nothing"], "unknown option --nothing"),
    ],
)
def test_wrong_input(workplace, capsys, command, arguments, message):
    assert cli.main([command, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_wrong_files_and_ports(workplace, capsys):
    assert cli.main(["report", "runs/a", "--out", "none/page.html"]) == 2
    assert "none/page.html cannot be written: No such file or directory" in capsys.readouterr().err
    assert cli.main(["report", "runs/a", "--out", "runs"]) == 2
    assert "runs cannot be written: it is a folder" in capsys.readouterr().err
    assert cli.main(["watch", "runs/a", "--port", "70000"]) == 2
    assert "--port 70000 is no port" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["report", "watch"])
def test_help(capsys, command):
    assert cli.main([command, "--help"]) == 0
    assert f"usage: realrl {command} RUN [RUN ...]" in capsys.readouterr().out
