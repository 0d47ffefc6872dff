from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

from realrl.errors import ConfigError, RunError
from realrl.runtime.output.json_lines import last_step
from realrl.runtime.output.metrics import JsonlSink, open_sinks


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_one_object_a_step_is_there_at_once(tmp_path: Path) -> None:
    sink = open_sinks(tmp_path)
    sink.write(1, 0, {"reward/mean": 0.5, "step": 99.0})
    assert rows(tmp_path / "metrics.jsonl") == [{"step": 1, "epoch": 0, "reward/mean": 0.5}]
    sink.close()


def test_nan_and_infinity_are_null(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write(1, 0, {"a": math.nan, "b": math.inf, "c": 1.0})
    sink.close()
    assert rows(tmp_path / "metrics.jsonl") == [{"step": 1, "epoch": 0, "a": None, "b": None, "c": 1.0}]


def test_a_resumed_run_has_every_step_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for steps, value in (((0, 1, 2, 3), 0.0), ((2, 3), 1.0)):
        sink = JsonlSink(path)
        sink.begin_after(steps[0] - 1)
        for step in steps:
            sink.write(step, 0, {"x": value})
        sink.close()
    assert [(row["step"], row["x"]) for row in rows(path)] == [(0, 0.0), (1, 0.0), (2, 1.0), (3, 1.0)]
    assert last_step(path) == 3
    sink = open_sinks(tmp_path)
    sink.begin_after(-1)
    sink.close()
    assert rows(path) == []
    assert last_step(path) == 0


def test_a_row_cut_short_by_a_crash_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "epoch": 0}\n{"step": 2, "epo')
    assert last_step(path) == 1
    sink = JsonlSink(path)
    sink.begin_after(2)
    sink.write(2, 0, {})
    sink.close()
    assert rows(path) == [{"step": 1, "epoch": 0}, {"step": 2, "epoch": 0}]


@pytest.mark.parametrize("line", ["my notes", '{"step": "2"}', '{"step": null}', "[2]"])
def test_rows_that_no_run_wrote_stay(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n')
    sink = JsonlSink(path)
    with pytest.raises(RunError, match=r"metrics.jsonl holds something that no run wrote: b'"):
        sink.begin_after(1)
    sink.close()
    assert path.read_text() == f'{{"step": 1}}\n{line}\n'


def test_a_folder_in_its_place_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"cannot write .*: it is a folder, not a file"):
        JsonlSink(tmp_path)


def test_a_full_disk_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("realrl.files._why_not", lambda mode: "")  # the device that is always full is no file
    sink = JsonlSink(Path("/dev/full"))
    with pytest.raises(RunError, match=r"cannot write /dev/full: No space left on device\n.*Free some space"):
        sink.write(1, 0, {})
    sink.close()


def test_tensorboard_gets_every_metric_and_no_torch(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    sink = open_sinks(tmp_path, ["tensorboard"])
    sink.write(3, 1, {"reward/mean": 0.25})
    sink.close()
    (path,) = (tmp_path / "tensorboard").iterdir()
    found = {
        (event.step, value.tag): value.tensor.float_val[0] if value.HasField("tensor") else value.simple_value
        for event in EventFileLoader(str(path)).Load()
        for value in event.summary.value
    }
    assert found == {(3, "reward/mean"): 0.25, (3, "epoch"): 1.0}


def test_a_missing_tracker_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"track=wandb needs the package wandb.*\n.*realrl\[track\]"):
        open_sinks(tmp_path, ["wandb"])


FAKE_WANDB = """
import json, pathlib
class Run:
    def __init__(self, options): self.options, self.rows = options, []
    def log(self, row, step): self.rows.append([step, row])
    def finish(self):
        path = pathlib.Path(self.options["dir"]) / "wandb.json"
        path.write_text(json.dumps([self.options, self.rows]))
def init(**options): return Run(options)
"""


@pytest.mark.parametrize(("mode", "expected"), [(None, "offline"), ("online", "online")])
def test_wandb_is_offline_unless_the_environment_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str | None, expected: str
) -> None:
    (tmp_path / "wandb.py").write_text(FAKE_WANDB)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    if mode is not None:
        monkeypatch.setenv("WANDB_MODE", mode)
    run_dir = tmp_path / "ppo" / "trial"
    sink = open_sinks(run_dir, ["wandb"])
    sink.write(1, 0, {"kl/mean": 0.1})
    sink.close()
    monkeypatch.delitem(sys.modules, "wandb")
    options, logged = json.loads((run_dir / "wandb.json").read_text())
    assert (options["mode"], options["name"]) == (expected, "ppo/trial")
    assert logged == [[1, {"epoch": 0, "kl/mean": 0.1}]]
