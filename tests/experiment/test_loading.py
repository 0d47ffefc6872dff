from __future__ import annotations

import functools
import inspect
import math
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from realrl.algo.policy.piece_calls import call_piece
from realrl.errors import ConfigError
from realrl.experiment import loading
from realrl.experiment.discovery import load_experiment
from realrl.experiment.loading import check_reward_signature, load_object, require_function, traceback_of
from realrl.experiment.pieces import Piece


@pytest.mark.parametrize("name", ["math:hypot", "math.hypot"])
def test_both_spellings(name: str) -> None:
    assert load_object(name) is math.hypot


def test_a_file(tmp_path: Path) -> None:
    file = tmp_path / "rewards.py"
    file.write_text("def score(p, r): return 1.0\n")
    assert load_object(f"{file}:score")(1, 2) == 1.0
    assert load_object(f"{file}:score") is load_object(f"{file}:score")


def test_a_module_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards_here.py").write_text("def score(p, r): return 1.0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["/nowhere"])
    require_function("my_rewards_here:score", "algorithm.reward_function")
    assert load_object("my_rewards_here:score")(1, 2) == 1.0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", "'nowhere' names no object"),
        ("scores.py", "'scores.py' is a file and names no object in it.*\\n.*'scores.py:object'"),
        ("no_such_module:f", "there is no module 'no_such_module'"),
        ("realrl.no_such:f", r"there is no module 'realrl\.no_such'"),
        ("/no/such/file.py:f", "there is no file '/no/such/file.py'"),
        ("math:hypott", r"'math' has no 'hypott' .*Did you mean 'hypot'"),
    ],
)
def test_what_is_not_there_is_named(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_object(name)


def test_a_module_that_needs_a_missing_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needs_more.py").write_text("import not_installed_anywhere\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=r"'needs_more' .* needs a module that is missing: .*not_installed_anywhere"):
        load_object("needs_more:f")


def test_a_file_that_raises_is_loaded_anew(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("1 / 0\n")
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            load_object(f"{file}:f")


@pytest.mark.parametrize("name", ["no_such_module:f", "no.such.module:f", "/no/such/file.py:f"])
def test_a_missing_module_is_found_out_without_importing(name: str) -> None:
    with pytest.raises(ConfigError, match=r"^algorithm\.reward_function='.*': there is no (module|file)"):
        require_function(name, "algorithm.reward_function")
    require_function("antigravity:geohash", "algorithm.reward_function")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def scor(a, b): return 1\n", "has no 'score'. Did you mean 'scor'"),
        ("def f():\n    def score(a, b): return 1\n", "has no 'score'"),
        ("x = (\n", "is no Python file"),
        ("\0", "is no Python file"),
        ("(" * 5000, "is no Python file"),
    ],
)
def test_a_function_that_is_not_in_its_file(tmp_path: Path, source: str, message: str) -> None:
    (tmp_path / "rewards.py").write_text(source)
    with pytest.raises(ConfigError, match=message):
        require_function(f"{tmp_path}/rewards.py:score", "algorithm.reward_function")


@pytest.mark.parametrize(
    "source",
    [
        "from math import hypot as score",
        "from math import *",
        "if True:\n    score = len",
        "def __getattr__(name): return len",
        "globals()['score'] = len",
        "try:\n    import score\nexcept ImportError:\n    pass",
    ],
)
def test_a_name_that_a_file_may_bind(tmp_path: Path, source: str) -> None:
    (tmp_path / "rewards.py").write_text(source)
    assert require_function(f"{tmp_path}/rewards.py:score", "algorithm.reward_function") is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("a, b", None), ("a, b, row", None), ("*args", None), ("a, b, c=1, *, d=2, **e", None), ("a, /, b", None),
        ("", "must take"), ("a", "must take"), ("a, b, c, d", "must take"), ("a, b, *, c", "needs the option 'c'"),
        ("response, prompt", "gets the prompt first"), ("a, b, row, messages", None), ("a, b, metadata", None),
        ("a, b, temperature", "takes 'temperature', which nothing gives it: .* it may take row and messages"),
        ("a, b, temperature, row", "takes 'temperature'"),
        ("prompt_ids, response_ids", None), ("prompt_ids, response", "either both get token ids, .* or both get text"),
    ],
)  # fmt: skip
def test_a_signature_is_read_without_running_the_file(tmp_path: Path, arguments: str, message: str | None) -> None:
    (tmp_path / "rewards.py").write_text(f"1 / 0\ndef score({arguments}): return 1\n")
    signature = require_function(f"{tmp_path}/rewards.py:score", "algorithm.reward_function")
    assert signature is not None
    if message is None:
        check_reward_signature(signature, "score")
    else:
        with pytest.raises(TypeError, match=message):
            check_reward_signature(signature, "score")


def test_a_message_about_a_signature_shows_no_defaults() -> None:
    with pytest.raises(TypeError, match=r"not \(prompt, \*, key\)$"):
        check_reward_signature(inspect.signature(functools.partial(lambda prompt, *, key: 1, key="sk-123")), "score")


def test_a_traceback_leaves_out_what_is_not_the_users(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def piece(rollout):\n    return 1 / 0\n")
    called = load_object(f"{tmp_path}/mine.py:piece")
    with pytest.raises(ZeroDivisionError) as error:
        call_piece(Piece("advantage", "mine", called), "mine", None)
    assert f'{tmp_path}/mine.py", line 2, in piece' in traceback_of(error.value)
    assert traceback_of(error.value).endswith("ZeroDivisionError: division by zero\n")
    assert "rollout.py" not in traceback_of(error.value)


@pytest.mark.parametrize("name", ["dozing.py", "dozing"])
def test_a_long_import_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    (tmp_path / "dozing.py").write_text("import time\ntime.sleep(0.5)\nscore = len\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.delitem(sys.modules, "dozing", raising=False)
    monkeypatch.setattr(loading, "SLOW_IMPORT_S", 0.05)
    assert load_object(f"{name}:score") is len
    told = tmp_path / name if name.endswith(".py") else name
    assert capfd.readouterr().err == f"realrl: still importing {told} and what it imports ...\n"
    assert load_experiment("ppo").name == "ppo"
    assert capfd.readouterr().err == ""


FOREVER = """
import sys
from realrl import cli
from realrl.experiment import loading
loading.SLOW_IMPORT_S = 0.05
sys.exit(cli.main(["graph", "./mine.py"]))
"""


def test_an_import_without_end_is_told_and_ctrl_c_names_its_line(tmp_path: Path) -> None:
    told_once = f"realrl: still importing {tmp_path / 'mine.py'} and what it imports ...\n"
    (tmp_path / "mine.py").write_text("while True:\n    try:\n        pass\n    except BaseException:\n        pass\n")
    command = subprocess.Popen([sys.executable, "-c", FOREVER], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    try:
        assert command.stderr is not None
        assert command.stderr.readline() == told_once
        command.send_signal(signal.SIGINT)
        assert command.wait(60) == 130
        told, _, line = command.stderr.read().rpartition(":")
        assert told == f"realrl: interrupted in {tmp_path / 'mine.py'}"
        assert int(line) in range(1, 6)
    finally:
        command.kill()
        command.wait()
        command.stderr.close()
