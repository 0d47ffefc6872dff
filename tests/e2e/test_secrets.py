"""A run keeps secrets and its folder to itself, and imports no module that lies in the working directory by chance."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from realrl import cli
from tests.helpers.runs import SMALL, realrl

SECRET = "sk-not-for-others"
REWARD = """
import os
import sys
from pathlib import Path


def score(prompt, response, *, api_key, say):
    seen = Path(os.environ["SEEN"])
    here = os.getpid()
    while here > 1:  # every process above this one, up to the command line
        arguments = Path(f"/proc/{here}/cmdline").read_bytes().decode()
        with seen.open("a") as out:
            out.write(arguments.replace(chr(0), " ") + chr(10))
        here = int(Path(f"/proc/{here}/stat").read_text().rpartition(")")[2].split()[1])
    assert sys.stdin.read() == ""
    if say:
        raise ValueError(f"the service refused {api_key}")
    return float(len(response))
"""


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    monkeypatch.setenv("JUDGE_KEY", SECRET)
    (folder / "judge.py").write_text(REWARD)
    return folder


def run_judged(*more: str) -> tuple[int, str]:
    done = realrl(
        *("run", "ppo", *SMALL, "steps=1", "run_dir=run", "algorithm.reward_function=null"),
        *("algorithm.rewards.judge.function=judge.py:score", "algorithm.rewards.judge.options.say=false"),
        "algorithm.rewards.judge.options.api_key=${oc.env:JUDGE_KEY}",
        *more,
    )
    return done.returncode, done.stdout + done.stderr


def contents(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in folder.rglob("*") if file.is_file())


def test_a_secret_reaches_its_function_and_no_file_or_argument(workplace: Path, tmp_path: Path) -> None:
    code, said = run_judged()
    assert code == 0, said
    written = json.loads((workplace / "run" / "config.json").read_text())
    assert written["algorithm"]["rewards"]["judge"]["options"] == {"say": False, "api_key": "***"}
    arguments = (tmp_path / "seen").read_text()
    assert "realrl.rewards.server" in arguments
    assert SECRET not in said + arguments
    assert SECRET.encode() not in contents(workplace / "run")
    assert (workplace / "run").stat().st_mode & 0o777 == 0o700


def test_a_failing_function_tells_no_secret(workplace: Path) -> None:
    code, said = run_judged("algorithm.rewards.judge.options.say=true")
    assert code == 2
    assert "the service refused ***" in said
    assert SECRET not in said
    assert SECRET.encode() not in contents(workplace / "run")


def test_pictures_and_tables_show_no_secret(workplace: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = ("algorithm.rewards.judge.function=judge.py:score", "algorithm.rewards.judge.options.say=false")
    key = f"algorithm.rewards.judge.options.api_key={SECRET}"
    for command in (("graph", "ppo", "--out", "ppo.html"), ("config", "ppo"), ("run", "ppo", "--dry-run")):
        assert cli.main([*command, "preset=tiny", *options, key]) == 0
        assert SECRET not in "".join(capfd.readouterr())
    assert SECRET.encode() not in contents(workplace)


@pytest.mark.parametrize(
    "arguments",
    [
        ("algorithm.rewards.judge={{function: x, api_key: {}}}",),
        ("algorithm.rewards.judge.api_key={}",),  # an unknown key
        ("models.actor.api_key={}", "cluster.token={}", "api_key={}"),
        ("cluster={{api_key: {}}}", "steps={{api_key: {}}}"),
        ("algorithm.rewards.judge.options={{api_key: {}",),  # which cannot be parsed
        ("algorithm.rewards.judge.options.api_key={}[",),
        ("api_key={}" + "x" * 5000,),
        ("algorithm.rewards.judge.options.api_key={}\udcff",),
        ("preset=own.yaml",),
    ],
    ids=lambda arguments: arguments[0][:60],
)
def test_a_refusal_shows_no_secret(
    workplace: Path, arguments: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    tree = {"models": {"*": {"api_key": SECRET}, "actor": {"password": SECRET}}, "steps": {"token": SECRET}}
    (workplace / "own.yaml").write_text(json.dumps(tree))
    assert cli.main(["run", "ppo", "--dry-run", *(argument.format(SECRET, SECRET) for argument in arguments)]) == 2
    told = capfd.readouterr().err
    assert "***" in told
    assert SECRET not in told


@pytest.mark.slow
def test_modules_in_the_working_directory_take_no_other_ones_place(workplace: Path) -> None:
    for name in ("random", "msgspec", "zmq", "json", "torch", "realrl"):
        (workplace / f"{name}.py").write_text(f"raise SystemExit('{name}.py of the working directory was imported')\n")
    (workplace / "helper.py").write_text("def value():\n    return 0.5\n")
    (workplace / "own.py").write_text("import helper\n\ndef score(prompt, response):\n    return helper.value()\n")
    command = [sys.executable, "-P", "-m", "realrl", "run", "ppo", *SMALL, "steps=1", "run_dir=run"]
    command.append("algorithm.reward_function=own.py:score")
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = json.loads((workplace / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert metrics["reward/mean"] == 0.5


@pytest.mark.slow
def test_the_umask_can_only_close_a_run_folder_further(workplace: Path) -> None:
    before = os.umask(0o277)
    try:
        done = realrl("run", "ppo", *SMALL, "steps=1", "run_dir=run", "launcher=inline")
    finally:
        os.umask(before)
    assert (workplace / "run").stat().st_mode & 0o777 == 0o500
    assert done.returncode in (0, 2)  # root writes there anyway
