"""`realrl check` names the mistake of each wrong algorithm, and no other."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.checker.wrong import RIGHT, WRONG
from tests.helpers.runs import realrl

OTHER_PROCESSES = ("again", "resumed", "data-2", "tensor-2", "pipeline-2")
FAST = tuple(word for name in OTHER_PROCESSES for word in ("--without", name))


def check(text: str, folder: Path, *options: str):
    path = folder / "wrong.py"
    path.write_text(text)
    done = realrl("check", str(path), "preset=tiny", "--json", str(folder / "report.json"), *options, timeout_s=900.0)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done, json.loads((folder / "report.json").read_text())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_right_one_passes(tmp_path: Path) -> None:
    done, report = check(RIGHT, tmp_path)
    assert (done.returncode, report["findings"]) == (0, [])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", WRONG)
def test_the_cause_is_named(name: str, tmp_path: Path) -> None:
    wrong = WRONG[name]
    done, report = check(wrong.text, tmp_path, "--without", "tensor-2", "--without", "pipeline-2")
    assert done.returncode == 1
    assert [(one["cause"], one["call"]) for one in report["findings"]] == [(wrong.cause, wrong.call)]
    place, _, number = report["findings"][0]["place"].rpartition(":")
    assert Path(place) == tmp_path / "wrong.py"
    assert wrong.at in wrong.text.splitlines()[int(number) - 1]


def test_a_mean_loss_is_found_without_further_processes(tmp_path: Path) -> None:
    done, report = check(WRONG["mean_loss"].text, tmp_path, *FAST)
    assert done.returncode == 1
    assert [one["cause"] for one in report["findings"]] == ["mean-loss"]
    number = int(report["findings"][0]["place"].rpartition(":")[2])
    assert WRONG["mean_loss"].text.splitlines()[number - 1].strip().startswith("def loss")
    first, baseline, in_s, *_ = done.stdout.splitlines()
    assert first.startswith("6 runs of 2 steps each, one after the other; all together take ")
    assert baseline.startswith("baseline ")
    assert re.fullmatch(r" +in \d+ s, so about \d+ s for the others", in_s)


def test_an_unknown_run_is_refused() -> None:
    done = realrl("check", "ppo", "preset=tiny", "--without", "data-3")
    assert done.returncode == 2
    assert "--without data-3: there is no such run" in done.stderr
