"""Files and folders that runs name, good and bad; runs that are not refused end as soon as they would start."""

from __future__ import annotations

import fcntl
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from realrl.runtime.processes import start
from tests.helpers.assets import edit_json, make_model_folder, write_rows

REWARDS = """
def good(prompt, response):
    return 1.0


def with_row(prompt, responses, row):
    return [float(len(row.get("prompt", ""))) for _ in responses]


def raises(prompt, response):
    raise KeyError("judge")


def nan(prompt, response):
    return float("nan")


def text(prompt, response):
    return "good"
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("models") / "whole")


@pytest.fixture
def workplace(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Files that troubles speak of, a lock on the folder `busy`, and runs that end as soon as they would start."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REALRL_CACHE", str(tmp_path / "cache"))
    for name in ("whole", "mamba", "torn", "bare", "mute", "wide"):
        shutil.copytree(whole, name)
    edit_json(Path("mamba/config.json"), architectures=["MambaForCausalLM"], model_type="mamba")
    edit_json(Path("wide/config.json"), intermediate_size=96)
    Path("torn/model.safetensors").write_bytes(Path("whole/model.safetensors").read_bytes()[:99_999])
    Path("bare/model.safetensors").unlink()
    for file in ("tokenizer.json", "tokenizer_config.json"):
        Path("mute", file).unlink()
    Path("rewards.py").write_text(REWARDS)
    for name, line in (("breaks", "1 / 0"), ("needs", "import nothing_at_all"), ("exits", "import os; os._exit(3)")):
        Path(f"{name}.py").write_text(f"{line}\n{REWARDS}")
    write_rows(Path("four.jsonl"), [{"prompt": f"hello {i}"} for i in range(4)])
    write_rows(Path("answers.jsonl"), [{"answer": "hello"}])
    write_rows(Path("long.jsonl"), [{"prompt": "x" * 99}] * 9)
    Path("torn.jsonl").write_text('{"prompt": "a"}\n{oops')
    for folder in ("earlier", "busy", "blocked"):
        Path(folder).mkdir()
    Path("earlier/metrics.jsonl").write_text('{"step": 1}\n')
    Path("blocked/checkpoints").write_text("")
    monkeypatch.setattr(start, "run_inline", lambda *_, **__: 0)
    monkeypatch.setattr(start, "run_supervised", lambda *_, **__: 0)
    with Path("busy/.lock").open("w") as lock:
        lock.write("4242\n")
        lock.flush()
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield tmp_path


@pytest.fixture
def port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield taken.getsockname()[1]
