"""``realrl simulate``: replays of real runs, what-ifs, the files that it writes, and what it refuses."""

import json

import pytest

from realrl import cli
from realrl.sim.replay import read_trace
from tests.helpers.runs import run_ppo

LONGER = ("steps=4", "n_seqs=32")


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """Folder of a real run with one worker."""
    folder = tmp_path_factory.mktemp("one")
    run_ppo(folder, *LONGER, "launcher=inline")
    return folder


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Folder of a real run with two workers."""
    folder = tmp_path_factory.mktemp("two")
    run_ppo(folder, *LONGER, "cluster.n_devices_per_node=2", "allocation=split")
    return folder


def simulate(*arguments):
    return cli.main(["simulate", *map(str, arguments)])


def refused(capsys, *arguments):
    """The message of a refusal."""
    assert simulate(*arguments) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("name", ["one", "two"])
def test_a_replay_is_close_to_its_run(name, request, capsys, tmp_path):
    run = request.getfixturevalue(name)
    assert simulate("ppo", "--against", run, "--out", tmp_path / "out") == 0
    printed = capsys.readouterr().out
    error = next(line.split()[6] for line in printed.splitlines() if line.startswith("a step"))
    assert abs(float(error.removesuffix("%"))) < 30  # a busy machine takes time between calls, too
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    recorded = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [row["step"] for row in recorded]
    for key in ("n_samples", "version/actor", "bytes/params"):
        assert [row[key] for row in rows] == [row[key] for row in recorded]
    assert rows[0].keys() <= recorded[0].keys()
    ours = {(s.rank, s.span.name) for s in read_trace((tmp_path / "out" / "trace.json").read_text())}
    theirs = {(s.rank, s.span.name) for s in read_trace((run / "trace.json").read_text())}
    assert {one for one in ours if one[1] != "wait"} == {one for one in theirs if one[1] != "wait"}


def test_bars_of_calls_tell_their_tokens(two):
    spans = [item.span for item in read_trace((two / "trace.json").read_text())]
    metrics = [json.loads(line) for line in (two / "metrics.jsonl").read_text().splitlines()]
    for row in metrics:
        bars = [s for s in spans if s.kind == "call" and s.args["step"] == row["step"]]
        of = {name: [s.args for s in bars if s.name == name] for name in ("actor_gen", "actor_train", "rew_inf")}
        assert sum(args["tokens"] for args in of["actor_gen"]) == row["n_tokens"]
        assert sum(args["responses"] for args in of["actor_gen"]) == 32
        assert 32 <= sum(args["new_tokens"] for args in of["actor_gen"]) <= 32 * 6
        assert sum(args["tokens"] for args in of["actor_train"]) == row["n_tokens"]
        assert len({args["dispatch"] for args in of["rew_inf"]}) == 1
    assert {"samples"} <= next(s.args for s in spans if s.kind == "load").keys()
    assert {"samples", "step"} <= next(s.args for s in spans if s.kind == "read").keys()


def test_what_if(two, capsys):
    assert simulate("ppo", "--against", two, "--slow", "0=100", "--slow", "1=100", "--steps", "3") == 0
    slow = capsys.readouterr().out
    assert "Against the run" not in slow
    assert simulate("ppo", "--against", two, "--kill", "1@1000000") == 0
    assert "the run goes on" not in capsys.readouterr().out
    assert simulate("ppo", "--against", two, "--kill", "1@0.001") == 0
    killed = capsys.readouterr().out
    assert "worker 1 ended (killed by SIGKILL) while it was starting up" in killed
    assert "the run goes on from the beginning" in killed


def test_what_is_refused(two, capsys, tmp_path):
    against = ("ppo", "--against", two)
    assert "is of another plan: 'rew_inf' ran on devices 1, and here it runs on 0" in refused(
        capsys, *against, "preset=tiny", "n_seqs=32"
    )
    told = refused(capsys, *against, "preset=tiny", *LONGER, "eval.every_steps=2")
    assert "was run with eval.every_steps=0, and this is eval.every_steps=2" in told
    split = ("cluster.n_devices_per_node=2", "allocation=split")
    told = refused(capsys, *against, "preset=tiny", "n_seqs=16", *split)
    assert "was run with algorithm.n_minibatches=2, and this is algorithm.n_minibatches=" in told
    assert f"'realrl simulate ppo --against {two}'" in told
    told = refused(capsys, *against, "preset=tiny", *LONGER, "generation.max_new_tokens=6", "algorithm.n_minibatches=2",
                   "cluster.n_devices_per_node=2", "allocation.mode=split", "allocation.offload=[ref]")  # fmt: skip
    assert "and this is allocation.offload=['ref']" in told
    told = refused(capsys, "grpo", "--against", two, "preset=tiny")
    assert "is a run of 'ppo', not of 'grpo'" in told
    assert f"'realrl simulate ppo --against {two}'" in told
    assert "config.json cannot be read" in refused(capsys, "ppo", "--against", tmp_path)
    assert "--steps 0: at least one step" in refused(capsys, *against, "--steps", "0")
    assert "--slow 1:2 is not understood" in refused(capsys, *against, "--slow", "1:2")
    assert "--slow 1=-1 is not understood" in refused(capsys, *against, "--slow", "1=-1")
    assert "--slow 2=2: the run has the ranks 0 to 1" in refused(capsys, *against, "--slow", "2=2")
    assert "--kill now is not understood" in refused(capsys, *against, "--kill", "now")
    assert "--lengths has no effect with --against" in refused(capsys, *against, "--lengths", "x.jsonl")
    (tmp_path / "metrics.jsonl").write_text("")
    assert "holds metrics.jsonl already" in refused(capsys, *against, "--out", tmp_path)
    (tmp_path / "config.json").write_bytes((two / "config.json").read_bytes())
    (tmp_path / "trace.json").write_bytes((two / "trace.json").read_bytes())
    assert "no step of it was completed" in refused(capsys, "ppo", "--against", tmp_path)
    (tmp_path / "metrics.jsonl").write_text("{")
    assert "config.json, metrics.jsonl or trace.json is damaged" in refused(capsys, "ppo", "--against", tmp_path)
    assert "unknown option --kil" in refused(capsys, *against, "--kil", "1@1")


def test_modelled_machines(capsys, tmp_path):
    assert simulate("ppo", "preset=tiny", "--out", tmp_path / "out") == 0
    printed = capsys.readouterr().out
    assert "on two cores" in printed
    assert "the longest that the configuration allows" in printed
    assert len((tmp_path / "out" / "metrics.jsonl").read_text().splitlines()) == 5
    periods = {}
    for tokens in (4, 16):
        lengths = f"prompt=fixed:8 response=fixed:{tokens}"
        nodes = ("cluster.n_nodes=2", "cluster.n_devices_per_node=8")
        assert simulate("ppo", "preset=tiny", *nodes, "--hardware", "h100", "--lengths", lengths) == 0
        printed = capsys.readouterr().out
        assert "16 workers" in printed
        periods[tokens] = float(next(line for line in printed.splitlines() if line.startswith("period")).split()[1])
    assert periods[4] < periods[16]


@pytest.mark.parametrize("experiment", ["sft", "dpo", "kto", "grpo", "remax"])
def test_modelled_experiments(experiment, capsys):
    assert simulate(experiment, "preset=tiny", "--steps", "2") == 0
    assert "period" in capsys.readouterr().out


def test_the_machine_is_one_with_as_many_workers(capsys):
    tiny = ("ppo", "preset=tiny", "--steps", "2")
    assert simulate(*tiny) == 0
    assert "one worker on both\n" in capsys.readouterr().out
    assert simulate(*tiny, "cluster.n_devices_per_node=2") == 0
    assert "a worker on each\n" in capsys.readouterr().out
    assert simulate(*tiny, "--hardware", "two_cores") == 0
    assert "a worker on each, measured with 2 at a time, and a node of the plan has 1\n" in capsys.readouterr().out


def test_a_prediction_is_compared_with_its_run(two, capsys, tmp_path):
    assert simulate("ppo", "--against", two, "--hardware", "two_cores") == 0
    printed = capsys.readouterr().out
    assert "prompts and responses as long as the run's mean" in printed
    assert "Against the run" in printed
    recorded = ("--lengths", two / "generations.jsonl")
    assert simulate("ppo", "--against", two, "--hardware", "two_cores", *recorded) == 0
    assert "as the run's mean" not in capsys.readouterr().out


def test_refused_machines_and_lengths(capsys, tmp_path):
    tiny = ("ppo", "preset=tiny")
    assert "there is no such hardware. Did you mean 'h100'" in refused(capsys, *tiny, "--hardware", "h10")
    assert "x.yaml: the file cannot be read" in refused(capsys, *tiny, "--hardware", tmp_path / "x.yaml")
    assert "the file cannot be read: it is a device" in refused(capsys, *tiny, "--lengths", "/dev/zero")
    (tmp_path / "a.yaml").write_text("a: [")
    assert "the file is no YAML" in refused(capsys, *tiny, "--hardware", tmp_path / "a.yaml")
    told = refused(capsys, *tiny, "cluster.device=cpu", "--hardware", "h100")
    assert "devices of kind cuda, and the plan is for cluster.device=cpu" in told
    assert "the machine is not known" in refused(capsys, *tiny, "cluster.device=cuda")
    assert "exceed generation.max_new_tokens=16" in refused(
        capsys, *tiny, "--lengths", "prompt=fixed:8 response=fixed:99"
    )


def test_help(capsys):
    assert simulate("--help") == 0
    assert "realrl simulate ppo --against runs/a" in capsys.readouterr().out
