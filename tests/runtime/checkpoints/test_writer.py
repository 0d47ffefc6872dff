"""A checkpoint holds what was there when it was asked for, although training goes on while it is written."""

from __future__ import annotations

import errno
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from realrl.config.compose import compose
from realrl.config.serialize import dump_config
from realrl.errors import CheckpointError
from realrl.experiment.discovery import config_dir, load_experiment
from realrl.runtime.checkpoints import writer as checkpoint_writer
from realrl.runtime.checkpoints.store import seal
from realrl.runtime.worker.model_worker import ModelWorker
from realrl.sched.messages import (
    CheckpointSaved,
    Initialize,
    LoadSamples,
    Ready,
    Reply,
    Request,
    RunCall,
    SaveCheckpoint,
    Shutdown,
)


class Driver:
    """A worker that trains a tiny model, asked by hand."""

    def __init__(self) -> None:
        overrides = ["preset=tiny", "n_seqs=2", "models.actor.optimizer.lr=0.01"]
        config = compose(load_experiment("sft"), overrides, config_dir=config_dir())
        self.worker = ModelWorker(0)
        self._seq = 0
        (ready,) = self.ask(Initialize, dump_config(config), ("",), "")
        assert isinstance(ready, Ready)

    def ask(self, kind: type[Request], *arguments: object) -> list[Reply | Future[Reply]]:
        self._seq += 1
        return self.worker.handle(kind(self._seq - 1, *arguments))

    def train(self, step: int) -> None:
        ids = (f"{step}/a", f"{step}/b")
        self.ask(LoadSamples, ids, (2 * step, 2 * step + 1))
        self.ask(RunCall, step, "actor_train", step, (ids,), (), 100)

    def save(self, step: int, folder: Path, rows: dict[str, tuple[str, ...]] | None = None) -> Future[Reply]:
        folder.mkdir()
        (answer,) = self.ask(SaveCheckpoint, step, str(folder), rows or {})
        assert isinstance(answer, Future)
        return answer

    def weights(self) -> dict[str, torch.Tensor]:
        engine = self.worker._roles["actor"].home_engine
        assert engine is not None
        return {name: p.detach().clone() for name, p in engine.decoder.named_shards()}


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Nothing is written before this is set."""
    opened = threading.Event()
    write = checkpoint_writer.RoleCopy.write

    def wait_and_write(self: checkpoint_writer.RoleCopy, folder: Path) -> list[Path]:
        assert opened.wait(60)
        return write(self, folder)

    monkeypatch.setattr(checkpoint_writer.RoleCopy, "write", wait_and_write)
    return opened


def test_training_goes_on_and_changes_nothing(tmp_path: Path, gate: threading.Event) -> None:
    driver = Driver()
    driver.train(1)
    before = driver.weights()
    answer = driver.save(1, tmp_path / "save", {"input_ids": ("1/a",)})
    driver.train(2)
    assert not answer.done()
    after = driver.weights()
    gate.set()
    reply = answer.result(60)
    assert isinstance(reply, CheckpointSaved)
    saved = load_file(tmp_path / "save/actor/model.safetensors")
    embedding = saved["model.embed_tokens.weight"]
    assert torch.equal(embedding, before["embedding.weight"])
    assert not torch.equal(embedding, after["embedding.weight"])
    assert set(reply.files) == {
        "actor/model.safetensors", "state/actor.safetensors", "state/actor-optimizer-pp0-tp0.safetensors",
        "state/samples-0.safetensors",
    }  # fmt: skip
    assert reply.files["actor/model.safetensors"] == seal(tmp_path / "save/actor/model.safetensors")
    assert reply.roles.keys() == {"actor"}
    assert reply.spans[0].args["bytes"] >= 3 * sum(t.nbytes for t in before.values())


def test_a_second_checkpoint_waits_for_the_first(tmp_path: Path, gate: threading.Event) -> None:
    driver = Driver()
    driver.train(1)
    first = driver.save(1, tmp_path / "first")
    threading.Timer(0.3, gate.set).start()
    second = driver.save(2, tmp_path / "second")  # returns only when the first is written
    assert first.done()
    assert isinstance(second.result(60), CheckpointSaved)


def test_a_worker_leaves_when_its_checkpoint_is_written(tmp_path: Path, gate: threading.Event) -> None:
    driver = Driver()
    answer = driver.save(0, tmp_path / "save")
    threading.Timer(0.3, gate.set).start()
    driver.ask(Shutdown)
    assert answer.done()


def test_a_full_disk_is_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: checkpoint_writer.RoleCopy, folder: Path) -> list[Path]:
        raise OSError(errno.ENOSPC, "No space left on device", "model.safetensors")

    monkeypatch.setattr(checkpoint_writer.RoleCopy, "write", full)
    with pytest.raises(CheckpointError, match=r"step 0 could not be written: No space left on device \(model"):
        Driver().save(0, tmp_path / "save").result(60)
