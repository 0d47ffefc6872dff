"""Checkpoint folders appear whole or not at all."""

import errno
import os
from pathlib import Path

import pytest

from realrl.errors import AssetError, CheckpointError, ConfigError
from realrl.plan.cursor import CursorState
from realrl.runtime.checkpoint import CheckpointStore, find_resume, read_manifest

CURSOR = CursorState(rows_consumed=12, seed=1, shuffle=1, fingerprint=7)


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", keep=2, experiment="ppo")


def write(store: CheckpointStore, step: int, text: str = "weights") -> Path:
    folder = store.partial(step)
    (folder / "actor").mkdir()
    (folder / "actor" / "model.safetensors").write_text(text)
    return store.commit(step, CURSOR, {"actor": step})


def test_a_committed_checkpoint_reads_back(store: CheckpointStore) -> None:
    folder = write(store, 3)
    manifest = read_manifest(folder, "ppo")
    assert manifest.step == 3
    assert manifest.cursor == CURSOR
    assert manifest.versions == {"actor": 3}
    assert manifest.files == {"actor/model.safetensors": 7}
    assert os.readlink(store.root / "latest") == "step_3"


def test_only_the_newest_are_kept_in_numeric_order(store: CheckpointStore) -> None:
    for step in (8, 9, 10, 11):
        write(store, step)
    assert sorted(p.name for p in store.root.glob("step_*")) == ["step_10", "step_11"]
    assert store.latest() == store.root / "step_11"


def test_a_partial_checkpoint_is_never_the_latest(store: CheckpointStore) -> None:
    write(store, 1)
    store.partial(2)
    assert store.latest() == store.root / "step_1"
    store.discard_unfinished()
    assert not (store.root / ".step_2.partial").exists()


def test_a_full_disk_leaves_the_previous_checkpoint_whole(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = write(store, 1)
    store.partial(2)

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "manifest.json")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"step 2 could not be written: No space left.*\n.*step_1 is whole"):
        store.commit(2, CURSOR, {})
    assert store.latest() == first
    read_manifest(first, "ppo")


def test_the_same_step_can_be_saved_again(store: CheckpointStore) -> None:
    write(store, 1)
    folder = write(store, 1, "new weights")
    assert (folder / "actor" / "model.safetensors").read_text() == "new weights"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "actor/model.safetensors").write_text("torn"), r"model.safetensors is 4 bytes long; .* 7"),
        (lambda f: (f / "actor/model.safetensors").unlink(), r"model.safetensors is missing"),
        (lambda f: (f / "state/manifest.json").write_text("{"), r"manifest .* is damaged"),
        (lambda f: (f / "state/manifest.json").unlink(), r"is not a checkpoint"),
    ],
)
def test_damage_is_named(store: CheckpointStore, damage, message: str) -> None:
    folder = write(store, 1)
    damage(folder)
    with pytest.raises(AssetError, match=message):
        read_manifest(folder, "ppo")


def test_another_algorithms_checkpoint_is_refused(store: CheckpointStore) -> None:
    with pytest.raises(AssetError, match="written by experiment 'ppo', not 'sft'"):
        read_manifest(write(store, 1), "sft")


def test_resume_never_auto_and_path(store: CheckpointStore) -> None:
    assert find_resume("never", store) is None
    assert find_resume("auto", store) is None
    folder = write(store, 4)
    assert find_resume("auto", store) == folder
    assert find_resume(str(folder), store) == folder
    with pytest.raises(ConfigError, match="is no folder"):
        find_resume("nowhere", store)
