"""Checkpoint folders appear whole or not at all."""

import dataclasses
import errno
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec
import pytest

from realrl.errors import AssetError, CheckpointError, ConfigError
from realrl.plan.samples.cursor import CursorState
from realrl.runtime.checkpoints.roles import RoleCopy, role_file
from realrl.runtime.checkpoints.store import (
    CheckpointStore,
    Resume,
    find_resume,
    load_manifest,
    read_manifest,
    sample_file,
    seal,
)
from realrl.sched.events import CheckpointFailed, CommitCheckpoint, FailureKind
from realrl.sched.messages import CheckpointSaved, Reply, Request, SavedFile, SavedRole
from realrl.sched.samples.in_flight import CallRecord, InFlight
from tests.sched.simulator import Simulation
from tests.sched.test_orders import split_ppo

CURSOR = CursorState(rows_consumed=12, seed=1, shuffle=1, fingerprint=7)
IN_FLIGHT = InFlight(
    (CallRecord("gen", 4, ("1/a",), 2, 0.1, {"x": 1 / 3}, ({"y": (0.1, 2.0)},), {"z": 1e-300}, {0: 0.5}, 7),),
    {"1/b": "filter", "1/c": ""},
)


# version 3, as it was first written
EARLIER = (
    '{"experiment": "ppo", "step": 2, "cursor": {"rows_consumed": 128, "seed": 1, "shuffle": 1, "fingerprint": '
    '165793938804371}, "versions": {"actor": 2}, "n_seqs": 64, "roles": {"actor": {"dp": 1, "tp": 1, "pp": 1, '
    '"model": "7ed233599b64d6b7", "given": ""}}, "in_flight": {"calls": [{"call": "gen", "step": 3, "ids": '
    '["3/a"], "version": 2, "seconds": 0.5, "metrics": {"x": 0.25}, "sums": [{"y": [0.5, 2.0]}], "maxima": {}, '
    '"memory_gb": {"0": 0.5}, "bytes_received": 7}], "dropped": {}}, "is_last": false, "score": null, "files": '
    '{"actor/config.json": {"size_bytes": 611, "sha256": "08620aad"}}, "manifest_version": 3, "digest": '
    '"9052fae08e94c4e3e101e3b1187c94e17aa7c4f035e8e958df8825af4572f327"}'
)


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints", keep=2, experiment="ppo", n_seqs=4, n_threads=3)


def saved(store: CheckpointStore, step: int, text: str = "weights") -> CommitCheckpoint:
    """A folder that a worker filled, and what the master knows of it; the tokenizer's file was not told."""
    folder = store.open_partial(step)
    (folder / "actor").mkdir()
    (folder / "actor" / "model.safetensors").write_text(text)
    (folder / "actor" / "tokenizer.json").write_text("{}")
    files = {"actor/model.safetensors": seal(folder / "actor" / "model.safetensors")}
    roles = {"actor": SavedRole(2, 1, 1, "abc")}
    return CommitCheckpoint(step, str(folder), CURSOR, {"actor": step}, IN_FLIGHT, {1: files}, roles)


def write(store: CheckpointStore, step: int, text: str = "weights", score: float | None = None) -> Path:
    return store.commit(saved(store, step, text), score)


def test_a_committed_checkpoint_reads_back(store: CheckpointStore) -> None:
    folder = write(store, 3, score=0.1 + 0.2)
    manifest = read_manifest(folder, "ppo")
    assert manifest.step == 3
    assert manifest.cursor == CURSOR
    assert manifest.versions == {"actor": 3}
    assert manifest.in_flight == IN_FLIGHT
    assert manifest.roles == {"actor": SavedRole(2, 1, 1, "abc")}
    assert (manifest.n_seqs, manifest.n_threads, manifest.score) == (4, 3, 0.1 + 0.2)
    weights = hashlib.sha256(b"weights").hexdigest()
    assert manifest.files["actor/model.safetensors"] == SavedFile(7, weights)
    assert manifest.files.keys() == {"actor/model.safetensors", "actor/tokenizer.json"}
    assert os.readlink(store.root / "latest") == "step_3"


def test_a_kill_while_an_old_checkpoint_is_deleted(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(folder: Path) -> None:
        (folder / "actor" / "model.safetensors").unlink()
        raise KeyboardInterrupt

    for step in (1, 2):
        write(store, step)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            write(store, 3)
    assert [folder.name for folder in store.all()] == ["step_2", "step_3"]
    assert all(read_manifest(folder, "ppo") for folder in store.all())
    store.discard_unfinished()
    assert sorted(path.name for path in store.root.iterdir()) == ["latest", "step_2", "step_3"]


@pytest.mark.parametrize(("best", "kept"), [("max", 2), ("min", 3), (None, None)])
def test_the_best_is_kept_too(store: CheckpointStore, best: Literal["max", "min"] | None, kept: int | None) -> None:
    store = dataclasses.replace(store, best=best, keep=1)
    for step, score in ((1, 0.5), (2, 0.9), (3, -1.0), (4, None), (5, 0.7)):
        write(store, step, score=score)
    assert sorted(p.name for p in store.root.glob("step_*")) == sorted({"step_5", *([f"step_{kept}"] if kept else [])})
    assert (store.root / "best").exists() == (best is not None)
    if kept is not None:
        assert os.readlink(store.root / "best") == f"step_{kept}"


def test_only_the_newest_are_kept_in_numeric_order(store: CheckpointStore) -> None:
    for step in (8, 9, 10, 11):
        write(store, step)
    assert sorted(p.name for p in store.root.glob("step_*")) == ["step_10", "step_11"]
    assert store.latest() == store.root / "step_11"


def test_an_old_one_that_cannot_be_deleted_ends_no_run(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On NFS, files that somebody reads keep their folder."""

    def busy(path: Path) -> None:
        raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", busy)
        for step in (1, 2, 3):
            write(store, step)
    assert "step_1 cannot be deleted: [Errno 39] Directory not empty" in caplog.text
    assert store.folders() == [store.root / "step_2", store.root / "step_3"]
    store.discard_unfinished()
    assert sorted(os.listdir(store.root)) == ["latest", "step_2", "step_3"]


def test_a_partial_checkpoint_is_never_the_latest(store: CheckpointStore) -> None:
    write(store, 1)
    folder = store.open_partial(2)
    assert store.latest() == store.root / "step_1"
    store.discard_unfinished()
    assert not folder.exists()


def test_a_worker_that_outlives_its_attempt_writes_into_no_later_checkpoint(store: CheckpointStore) -> None:
    late = store.open_partial(2)
    again, third = (CheckpointStore(store.root, keep=2, experiment="ppo") for _ in range(2))
    again.discard_unfinished()
    commit = saved(again, 2, "new")
    share = RoleCopy("actor", states={role_file("actor"): {"version": 1}, role_file("ref"): {"version": 1}})
    share.write(late)
    folder = again.commit(commit)
    share.write(late)
    assert read_manifest(folder, "ppo").files.keys() == {"actor/model.safetensors", "actor/tokenizer.json"}
    assert [path.name for path in (folder / "state").iterdir()] == ["manifest.json"]
    third.discard_unfinished()
    assert sorted(os.listdir(store.root)) == ["latest", "step_2"]


def test_a_full_disk_leaves_the_previous_checkpoint_whole(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = write(store, 1)
    second = saved(store, 2)

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "manifest.json")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match=r"step 2 could not be written: No space left.*\n.*step_1 is whole"):
        store.commit(second)
    assert store.latest() == first
    read_manifest(first, "ppo")


@pytest.mark.parametrize(
    ("left", "state"), [(None, "missing"), ("weigh", "5 bytes long"), ("weights!", "8 bytes long")]
)
def test_what_a_worker_wrote_and_the_master_does_not_see(store: CheckpointStore, left: str | None, state: str) -> None:
    """On a file system that nodes do not share, or that is slow to show what others wrote."""
    first = write(store, 1)
    second = saved(store, 2)
    path = Path(second.directory) / "actor" / "model.safetensors"
    path.unlink() if left is None else path.write_text(left)
    found = sorted(path for path in store.root.rglob("*"))
    expected = rf"step 2 is not whole: worker 1 wrote 7 bytes to actor/model.safetensors, which is {state} where.*\n.*"
    with pytest.raises(CheckpointError, match=expected + "step_1 is whole") as caught:
        store.commit(second)
    assert (caught.value.step, caught.value.worker) == (2, 1)
    assert sorted(path for path in store.root.rglob("*")) == found
    assert os.readlink(store.root / "latest") == "step_1"
    read_manifest(first, "ppo")


class Writing(Simulation):
    """A run in which ranks write a checkpoint's file each, and that of the last rank goes to a disk of its own."""

    def end_request(self, rank: int, request: Request) -> Reply:
        reply: Reply = super().end_request(rank, request)
        if not isinstance(reply, CheckpointSaved):
            return reply
        path = sample_file(rank)
        if rank != self.plan.n_ranks - 1:
            (Path(request.directory) / path).write_text(f"rank {rank}")
        return msgspec.structs.replace(reply, files={path: SavedFile(6, hashlib.sha256(b"rank").hexdigest())})


def test_the_end_of_a_run_names_the_worker_whose_file_is_missing(store: CheckpointStore) -> None:
    store.open_partial(1)
    directory = str(store.partial("{step}"))
    plan = dataclasses.replace(split_ppo(save_every_steps=1), checkpoint_directory=directory)
    simulation = Writing(plan, seed=3, n_rows=10)
    while not simulation.commits:
        simulation.run(stop_after=1)
    with pytest.raises(CheckpointError) as caught:
        store.commit(simulation.checkpoints[1])
    (abort,) = simulation.feed(CheckpointFailed(1, str(caught.value)))
    expected = r"step 1 is not whole: worker 3 wrote 6 bytes to state/samples-3.safetensors, which is missing where .*"
    assert re.fullmatch(
        rf"the checkpoint of {expected}\n  There is no earlier checkpoint. Choose a.*", abort.failure.message
    )
    assert abort.failure.kind is FailureKind.CHECKPOINT
    assert not (store.root / "latest").exists()


def test_the_same_step_can_be_saved_again(store: CheckpointStore) -> None:
    write(store, 1)
    folder = write(store, 1, "new weights")
    assert (folder / "actor" / "model.safetensors").read_text() == "new weights"


def edited(key: str, old: str, new: str) -> Callable[[Path], object]:
    """Changes one value of the manifest, which stays a manifest."""

    def edit(folder: Path) -> None:
        path = folder / "state/manifest.json"
        text = path.read_text()
        assert text.count(f'"{key}": {old},') + text.count(f'"{key}": {old}\n') == 1
        path.write_text(text.replace(f'"{key}": {old}', f'"{key}": {new}'))

    return edit


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "actor/model.safetensors").write_text("torn"), r"model.safetensors is 4 bytes long; .* 7"),
        (lambda f: (f / "actor/model.safetensors").unlink(), r"model.safetensors is missing"),
        (lambda f: (f / "actor/model.safetensors").write_text("Weights"), r"model.safetensors is not what was written"),
        (lambda f: (f / "actor/tokenizer.json").write_text("[]"), r"tokenizer.json is not what was written"),
        (lambda f: (f / "state/manifest.json").write_text("{"), r"manifest .* is damaged"),
        (lambda f: (f / "state/manifest.json").write_text("[]"), r"manifest .* is damaged"),
        (lambda f: (f / "state/manifest.json").write_text("{}"), r"manifest .* is not what was written"),
        (lambda f: (f / "state/manifest.json").write_bytes(b"\xff"), r"manifest .* is damaged"),
        (edited("rows_consumed", "12", "13"), r"manifest .* is not what was written"),
        (edited("step", "1", "2"), r"manifest .* is not what was written"),
        (edited("manifest_version", "3", '"x"'), r"manifest .* is not what was written"),
        (lambda f: (f / "state/manifest.json").unlink(), r"is not a checkpoint"),
        (lambda f: shutil.rmtree(f / "state"), r"step_1/state/manifest.json cannot be read"),
    ],
)
def test_damage_is_named(store: CheckpointStore, damage, message: str) -> None:
    folder = write(store, 1)
    damage(folder)
    with pytest.raises(AssetError, match=message):
        read_manifest(folder, "ppo")


@pytest.mark.parametrize("name", ["step_3_copy", "step_old", "step_", "step_-1", "step_9.tar"])
def test_a_copy_beside_the_checkpoints_is_not_one_of_them(store: CheckpointStore, name: str) -> None:
    folder = write(store, 3)
    shutil.copytree(folder, store.root / name)
    assert find_resume("auto", store) == Resume(folder)
    assert find_resume(str(store.root / name), store).folder == store.root / name
    assert store.set_aside(1) == [store.root / "void_step_3"]
    assert (store.root / name).is_dir()
    write(store, 4)


def test_a_checkpoint_with_the_name_of_another_step_is_refused(store: CheckpointStore) -> None:
    whole, renamed = write(store, 2), store.root / "step_50"
    os.rename(write(store, 3), renamed)
    with pytest.raises(AssetError, match=r"step_50' holds the checkpoint of step 3, not of step 50\n.*name, step_3"):
        find_resume(str(renamed), store)
    found = find_resume("auto", store)
    assert found.folder == whole
    assert any("not of step 50" in note for note in found.notes)


@pytest.mark.parametrize(
    "damage", [lambda f: (f / "state/manifest.json").unlink(), shutil.rmtree], ids=["torn", "gone"]
)
def test_a_newest_checkpoint_that_vanished_is_told(store: CheckpointStore, damage) -> None:
    whole = write(store, 2)
    damage(write(store, 3))
    found = find_resume("auto", store)
    assert found.folder == whole
    assert "step_3" in found.notes[0]
    assert found.notes[-1] == f"continuing from {whole}, the newest whole checkpoint"
    shutil.rmtree(whole)
    if (store.root / "step_3").exists():
        with pytest.raises(AssetError, match=r"step_3' is not a checkpoint.*\n.*Remove .*step_3 to continue"):
            find_resume("auto", store)
    else:
        assert "points to step_3, which is not there" in find_resume("auto", store).notes[0]


def test_a_file_that_cannot_be_read_is_named(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(store, 1)
    file = folder / "actor" / "model.safetensors"

    def broken(descriptor: int, size: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "read", broken)
    with pytest.raises(AssetError, match=f"checkpoint file {file} cannot be read: Input/output error"):
        read_manifest(folder, "ppo")


def test_metrics_in_flight_may_be_nan(store: CheckpointStore) -> None:
    metrics = {"nan": math.nan, "inf": math.inf, "number": 1, "tiny": 5e-324}
    flight = InFlight((CallRecord("gen", 4, ("1/a",), None, 0.0, metrics, memory_gb={0: -math.inf, 1: 2}),), {})
    folder = store.commit(msgspec.structs.replace(saved(store, 3), in_flight=flight))
    [record] = read_manifest(folder, "ppo").in_flight.calls
    assert str(record.metrics) == str({name: float(value) for name, value in metrics.items()})
    assert record.memory_gb == {0: -math.inf, 1: 2.0}


def test_another_algorithms_checkpoint_is_refused(store: CheckpointStore) -> None:
    with pytest.raises(AssetError, match="written by experiment 'ppo', not 'sft'"):
        read_manifest(write(store, 1), "sft")


def test_checkpoints_of_steps_that_are_done_again_are_set_aside(store: CheckpointStore) -> None:
    store = dataclasses.replace(store, keep=9, best="max")
    for step in (2, 10, 20):
        write(store, step, score=float(step))
    assert store.set_aside(20) == []
    assert store.set_aside(2) == [store.root / "void_step_10", store.root / "void_step_20"]
    assert store.all() == [store.root / "step_2"]
    assert os.readlink(store.root / "latest") == "step_2"
    assert not (store.root / "best").is_symlink()
    write(store, 10)
    assert store.set_aside(0) == [store.root / "void_step_10", store.root / "void_step_2"]
    assert store.latest() is None
    assert not (store.root / "latest").is_symlink()


def test_a_checkpoint_of_another_version_is_refused(store: CheckpointStore) -> None:
    path = write(store, 1) / "state" / "manifest.json"
    path.write_text(path.read_text().replace('"manifest_version": 3', '"manifest_version": 1'))
    with pytest.raises(AssetError, match=r"manifest\.json has manifest version 1; this is version 3"):
        load_manifest(path.parents[1])


def test_a_manifest_from_before_records_had_all_of_todays_fields(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state/manifest.json").write_text(EARLIER)
    manifest = load_manifest(tmp_path)
    assert (manifest.step, manifest.cursor.rows_consumed, manifest.versions) == (2, 128, {"actor": 2})
    assert manifest.roles == {"actor": SavedRole(1, 1, 1, "7ed233599b64d6b7")}
    assert manifest.files == {"actor/config.json": SavedFile(611, "08620aad")}
    sums = ({"y": (0.5, 2.0)},)
    assert manifest.in_flight.calls == (CallRecord("gen", 3, ("3/a",), 2, 0.5, {"x": 0.25}, sums, {}, {0: 0.5}, 7),)


def test_resume_never_auto_and_path(store: CheckpointStore) -> None:
    assert find_resume("never", store) == find_resume("auto", store) == Resume()
    folder = write(store, 4)
    assert find_resume("auto", store) == find_resume(str(folder), store) == Resume(folder)
    with pytest.raises(ConfigError, match="is no folder"):
        find_resume("nowhere", store)


def test_auto_falls_back_to_the_newest_whole_one_and_says_so(store: CheckpointStore) -> None:
    store = dataclasses.replace(store, keep=9)
    folders = [write(store, step) for step in (1, 2, 3)]
    (folders[2] / "actor/model.safetensors").write_text("Weights")
    (folders[1] / "state/manifest.json").write_text("{")
    found = find_resume("auto", store)
    assert found.folder == folders[0]
    assert "step_3/actor/model.safetensors is not what was written" in found.notes[0]
    assert "step_2/state/manifest.json is damaged" in found.notes[1]
    assert found.notes[2] == f"continuing from {folders[0]}, the newest whole checkpoint"
    with pytest.raises(AssetError, match="is not what was written"):
        find_resume(str(folders[2]), store)
    (folders[0] / "actor/model.safetensors").unlink()
    with pytest.raises(AssetError, match=r"step_3/actor/model\.safetensors is not what was written"):
        find_resume("auto", store)


def test_auto_does_not_fall_back_from_another_algorithm(store: CheckpointStore) -> None:
    write(store, 1)
    with pytest.raises(AssetError, match="was written by experiment 'ppo', not 'sft'"):
        find_resume("auto", dataclasses.replace(store, experiment="sft"))


@pytest.mark.parametrize("name", ["../../secret", "/etc/passwd", "a\0b"])
def test_a_manifest_names_files_of_its_folder_only(tmp_path: Path, name: str) -> None:
    tree = {"manifest_version": 3, "experiment": "ppo", "step": 1, "versions": {}, "n_seqs": 4, "roles": {}}
    tree |= {"cursor": {"rows_consumed": 4, "seed": 1, "shuffle": 1, "fingerprint": 0}, "in_flight": {}}
    tree |= {"is_last": True, "score": None, "files": {name: {"size_bytes": 1, "sha256": ""}}}
    digest = hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()
    (tmp_path / "state").mkdir()
    (tmp_path / "state/manifest.json").write_text(json.dumps({**tree, "digest": digest}))
    with pytest.raises(AssetError, match=r"manifest .* is damaged: it names a file outside of the checkpoint"):
        load_manifest(tmp_path)


def test_a_deep_manifest(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state/manifest.json").write_text("[" * 100_000)
    with pytest.raises(AssetError, match=r"manifest .* is damaged"):
        load_manifest(tmp_path)
