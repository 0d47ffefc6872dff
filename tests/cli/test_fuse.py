"""``realrl fuse``: tables, drawings and files, for files of models and for experiments, and what it refuses."""

import json
import re
import signal

import pytest

from realrl import cli
from realrl.cli.fuse import command
from realrl.plan.fusion.schedule_file import read_schedule
from tests.plan.fusion.checker import check

ROW = "configs/fusion/rlhfuse_row_1.yaml"
MODELS = """
models:
  A: {stages: 2, micro_batches: 2, forward: [1, 2], backward: 2, activation: 1}
  B: {stages: 1, micro_batches: 3, forward: 1, backward: 1, activation: 1, width: 2, reversed: true}
memory_cap: 3
"""


def fuse(*arguments):
    return cli.main(["fuse", *map(str, arguments)])


def refused(capsys, *arguments):
    """The message of a refusal."""
    assert fuse(*arguments) == 2
    return capsys.readouterr().err


def test_a_file_is_compared_drawn_and_written(tmp_path, capsys):
    models, page, picture, out = (tmp_path / name for name in ("m.yaml", "page.html", "picture.svg", "out.json"))
    models.write_text(MODELS)
    assert fuse(models, "--rounds", 1, "--page", page, "--out", out, "--pareto", "--processes", 1) == 0
    said = capsys.readouterr().out
    for row in ("1F1B in series", "fused", "lower bound", "latency against memory"):
        assert row in said
    schedule = read_schedule(out.read_text())
    latency, peaks = check(schedule)
    assert max(peaks) <= 3
    text = page.read_text()
    assert text.count("<title>") == 1 + 2 * sum(map(len, schedule.orders))  # of the page, and of all tasks twice
    assert f"fused: {latency:g}" in text
    assert "http" not in text.replace("http://www.w3.org", "").replace("http-equiv", "")
    assert fuse(models, "--rounds", 1, "--page", picture, "--processes", 1) == 0
    assert picture.read_text().startswith("<svg")


def test_a_search_ends_at_a_peak_that_is_enough(capsys):
    n_rounds = []
    for enough in (1000, "serial"):
        assert fuse(ROW, "--rounds", 4, "--processes", 1, "--enough", enough) == 0
        n_rounds.append(int(re.search(r"ended after (\d+) rounds", capsys.readouterr().out)[1]))
    assert n_rounds[0] < n_rounds[1]


def test_a_search_goes_on_from_a_file(tmp_path, capsys):
    models, out, longer = (tmp_path / name for name in ("m.yaml", "out.json", "longer.yaml"))
    models.write_text(MODELS)
    longer.write_text(MODELS.replace("micro_batches: 2", "micro_batches: 6").replace("batches: 3", "batches: 9"))
    assert fuse(models, "--rounds", 2, "--processes", 1, "--out", out) == 0
    fused = [re.search(r"^fused +(\S+)", capsys.readouterr().out, re.M)[1]]
    assert fuse(models, "--rounds", 0, "--processes", 1, "--start", out) == 0
    fused.append(re.search(r"^fused +(\S+)", capsys.readouterr().out, re.M)[1])
    assert fused[0] == fused[1]
    assert fuse(longer, "--rounds", 0, "--processes", 1, "--start", out, "--out", tmp_path / "longer.json") == 0
    check(read_schedule((tmp_path / "longer.json").read_text()))
    assert f"{out} has 3 micro-batches of 'B', and 'B' has only 1" in refused(
        capsys, write(tmp_path, MODELS.replace("batches: 3", "batches: 1")), "--start", out
    )
    assert "is for 2 devices, and there are 8" in refused(capsys, ROW, "--start", out)
    assert f"{models} is not JSON" in refused(capsys, ROW, "--start", models)
    assert "none.json cannot be read: No such file" in refused(capsys, ROW, "--start", tmp_path / "none.json")


def write(folder, text):
    """A file of models."""
    path = folder / "other.yaml"
    path.write_text(text)
    return path


def test_an_experiment_is_fused_by_the_model_of_costs(tmp_path, capsys):
    out = tmp_path / "out.json"
    plan = ("ppo", "preset=tiny", "cluster.n_devices_per_node=2", "allocation=pipeline")
    assert fuse(*plan, "--rounds", 1, "--processes", 1, "--out", out) == 0
    said = capsys.readouterr().out
    assert "ppo: actor_train and critic_train: 2 pipelines on 2 devices" in said
    assert "1F1B in series" in said
    content = json.loads(out.read_text())
    first, second = content["pipelines"]
    assert [stage[0] for stage in first["stages"]] == [[0], [1]]
    assert [stage[0] for stage in second["stages"]] == [[1], [0]]
    assert all(backward > forward > 0 and held > 0 for _, forward, backward, held in first["stages"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is no YAML|is no mapping|no mapping"),
        ("models: 3", "models is no mapping"),
        ("models: {A: 3}", "models.A is no mapping"),
        ("other: 3", "has a field 'other'"),
        ("models: {A: {stages: 2}}", "models.A has no micro_batches"),
        (MODELS.replace("stages: 2", "stages: 0"), "models.A.stages is 0"),
        (MODELS.replace("stages: 2", "stages: x"), "models.A.stages is x"),
        (MODELS.replace("[1, 2]", "[1, 2, 3]"), "model 'A' has 3 numbers for forward, and 2 stages"),
        (MODELS.replace("[1, 2]", "[1, x]"), "models.A.forward is"),
        (MODELS.replace("[1, 2]", "-1"), "takes -1"),
        (MODELS.replace("reversed: true", "reversed: 1"), "models.B.reversed is 1"),
        (
            MODELS.replace("memory_cap: 3", "memory_cap: 0.5"),
            "may hold 0.5 of activations, but one micro-batch takes 1",
        ),
        (MODELS.replace("memory_cap: 3", "devices: 3"), "cannot fill a block of 3"),
        (MODELS.replace("memory_cap: 3", "transport: pigeon"), "there is no transport 'pigeon'"),
        (MODELS.replace("micro_batches: 3", "micro_batches: 1000000"), "tasks"),
    ],
)
def test_files_that_describe_nothing_are_refused(tmp_path, capsys, text, said):
    models = tmp_path / "m.yaml"
    models.write_text(text)
    assert re.search(said, refused(capsys, models))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "needs an experiment"),
        (("none.yaml",), "none.yaml: cannot be read"),
        ((ROW, "n_mbs=2"), "a file of models has no settings"),
        ((ROW, "--hardware", "h100"), "--hardware has no effect"),
        ((ROW, "--seconds", "0"), "--seconds 0 is no time"),
        ((ROW, "--rounds", "-1"), "--rounds -1 is too few"),
        ((ROW, "--processes", "0"), "--processes 0 is too few"),
        ((ROW, "--memory-cap", "nan"), "--memory-cap nan is no size"),
        ((ROW, "--memory-cap", "1"), "The least caps with a schedule are 2, 2"),
        ((ROW, "--enough", "half"), "--enough half is no size"),
        ((ROW, "--enough", "serial", "--pareto"), "--enough ends a search"),
        ((ROW, "--page", "x.png"), "a page is HTML"),
        ((ROW, "--out", "/nowhere/x.json"), "its folder does not exist"),
        (("sft", "preset=tiny"), "has 1 train calls to fuse, and fusing takes two"),
        (("ppo", "preset=tiny"), "have one pipeline stage each"),
        (("ppo", "preset=tiny", "--calls", "rew_inf"), "--calls rew_inf: there is no such train call"),
        (("ppo", "preset=tiny", "cluster.n_devices_per_node=2", "allocation=split"), "not on the same devices"),
    ],
)
def test_what_cannot_be_done_is_refused(capsys, arguments, said):
    assert said in refused(capsys, *arguments)


def test_ctrl_c_prints_the_best_so_far(monkeypatch, capsys):
    monkeypatch.setattr(command, "_report", lambda progress: signal.raise_signal(signal.SIGINT))
    assert fuse(ROW, "--memory-cap", 3, "--seconds", 600, "--processes", 1) == 0
    said = capsys.readouterr().out
    assert "the search was stopped after 1 rounds" in said
    assert "lower bound" in said
