"""Run folders are found and read, however damaged."""

import os

import pytest

from realrl.errors import ConfigError, UsageError
from realrl.report import run_files
from realrl.report.run_files import find_runs, lines_of, read_run
from tests.report.folders import sample, steps, write_lines, write_run


def test_runs_are_found_in_folders_and_once(tmp_path):
    for name in ("b", "a", "sweep/0", "sweep/1"):
        write_run(tmp_path / name, steps(1, x=1.0))
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    found = find_runs([str(tmp_path / "a"), str(tmp_path), str(tmp_path / "sweep")])
    assert [path.relative_to(tmp_path).as_posix() for path in found] == ["a", "b", "sweep/0", "sweep/1"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [("none", "it does not exist"), ("file", "it is a file"), ("folder", "neither it nor a folder in it has metrics")],
)
def test_what_is_no_run_is_refused(tmp_path, name, reason):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match=rf"{name} is no run folder: {reason}"):
        find_runs([str(tmp_path / name)])


def test_too_many_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(run_files, "MOST_RUNS", 3)
    for i in range(run_files.MOST_RUNS + 1):
        (tmp_path / str(i)).mkdir()
        (tmp_path / str(i) / "metrics.jsonl").write_text("")
    with pytest.raises(ConfigError, match="too many for a page"):
        find_runs([str(tmp_path)])


def test_damaged_lines_are_left_out_and_told(tmp_path):
    folder = write_run(tmp_path / "a", steps(3, x=1.0), [sample(1)])
    with open(folder / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 3, "x": 5, "y": null, "z": "text", "t": true}\n\xff\xfe\n{"step": "four"}\n[1]\n')
        file.write(b"[" * 100_000 + b'\n{"step": 4, "x": 2}\n\n{"step": 5, "x"')
    run = read_run(folder)
    assert [row["step"] for row in run.rows] == [1, 2, 3, 4]
    assert run.rows[2] == {"step": 3, "x": 5}, "the later line of a step holds, and only its numbers"
    assert list(run.notes) == ["metrics.jsonl: 3 damaged lines left out.",
                               "metrics.jsonl: 1 line without a step left out."]  # fmt: skip


def test_an_empty_run_and_one_without_a_configuration(tmp_path):
    empty = read_run(write_run(tmp_path / "a"))
    assert (empty.rows, empty.samples, empty.last_step, empty.experiment) == ([], [], 0, "ppo")
    assert empty.state == "ended after step 0 of 40"
    (tmp_path / "b").mkdir()
    write_lines(tmp_path / "b" / "metrics.jsonl", steps(2, x=1.0))
    (tmp_path / "b" / "config.json").write_text("{")
    damaged = read_run(tmp_path / "b")
    assert damaged.state == "ended after step 2"
    assert list(damaged.notes) == ["config.json: it is damaged."]


def test_states(tmp_path):
    rows = steps(3, x=1.0)
    assert read_run(write_run(tmp_path / "done", rows, steps=3)).state == "complete, 3 steps"
    live = write_run(tmp_path / "live", rows, steps=9)
    (live / ".lock").write_text(f"{os.getpid()}\n")
    assert (read_run(live).state, read_run(live).is_live) == ("going on, step 3 of 9", True)
    (live / ".lock").write_text("99999999\n")
    assert not read_run(live).is_live
    (live / "logs" / "failure.json").write_text('{"kind": "worker_lost", "message": "worker 0 died"}')
    assert read_run(live).state == "failed after step 3 of 9: worker 0 died"


def test_secrets_stay_where_they_are(tmp_path):
    folder = write_run(tmp_path / "a", algorithm={"reward_args": {"api_key": "hunter2"}})
    assert "hunter2" not in str(read_run(folder).settings)


def test_a_long_file_is_read_in_pieces(tmp_path):
    path = tmp_path / "long"
    path.write_text("".join(f"line {i:06d}\n" for i in range(20_000)))
    notes: list[str] = []
    lines = list(lines_of(path, notes, most_bytes=24_000))
    assert 1800 < len(lines) <= 2000
    assert lines[0] == b"line 000000"
    assert lines[-1] == b"line 019999"
    assert all(len(line) == 11 for line in lines), "no line is cut"
    assert lines == sorted(set(lines))
    assert len(notes) == 1


def test_a_file_that_cannot_be_read_is_no_traceback(tmp_path):
    folder = write_run(tmp_path / "a")
    (folder / "generations.jsonl").mkdir()
    with pytest.raises(UsageError, match=r"generations.jsonl cannot be read: it is a folder"):
        read_run(folder)
