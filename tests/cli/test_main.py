"""The command line: what it prints, and its exit codes."""

from __future__ import annotations

import io
import json
import operator
import os
import re
import resource
import struct
import subprocess
import sys
import types
from pathlib import Path

import pytest

from realrl import cli
from realrl.cli import plan_view
from realrl.cli.console import print_table
from realrl.errors import RunError, UsageError
from realrl.model.families.llama import config_to_hf
from realrl.shape import tiny_config

USER_FILE = """
from realrl import DatasetKind, Experiment, InterfaceType, MFCDef, Role


def mfcs(config):
    n = config.n_seqs
    return [
        MFCDef("gen", "actor", InterfaceType.GENERATE, "ppo_actor", ("prompt_ids",), ("input_ids",), n_seqs=n),
        MFCDef("train", "actor", InterfaceType.TRAIN_STEP, "sft", ("input_ids",), n_seqs=n, max_staleness=0),
    ]


EXPERIMENT = Experiment(
    name="mine",
    description="an algorithm of one's own",
    roles={"actor": Role(trainable=True)},
    dataset=DatasetKind.PROMPT,
    mfcs=mfcs,
)
"""


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REALRL_CACHE", str(tmp_path / "cache"))
    return tmp_path


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"]])
def test_help(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    code, out, err = call(capsys, *arguments)
    assert (code, err) == (0, "")
    assert out.startswith("usage: realrl COMMAND")
    assert all(f"\n  {name} " in out for name in (*cli.COMMANDS, "version"))
    assert "examples:" in out


@pytest.mark.parametrize("argument", ["version", "--version"])
def test_version(capsys: pytest.CaptureFixture[str], argument: str) -> None:
    assert call(capsys, argument) == (0, "realrl 0.1.0\n", "")


@pytest.mark.parametrize("command", ["run", "graph", "config", "list"])
def test_help_of_a_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    try:
        code, out, _ = call(capsys, command, "--help")
    except SystemExit as done:  # list has no arguments, so argparse answers by itself
        code, out = int(done.code or 0), capsys.readouterr().out
    assert code == 0
    assert out.startswith(f"usage: realrl {command}")


def test_help_of_an_experiment_lists_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "run", "ppo", "--help")
    assert code == 0
    for key in ("steps", "models.<role>.optimizer.lr", "generation.top_p", "algorithm.kl_coef", "Rarely changed"):
        assert f"\n{key}" in out
    assert "--dry-run" in out
    assert call(capsys, "run", "nmae", "--help")[0] == 2


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "list")
    assert code == 0
    ppo = next(line for line in out.splitlines() if line.startswith("ppo "))
    assert "actor, critic, ref, reward" in ppo
    assert "actor_gen, rew_inf, ref_inf, critic_inf, actor_train, critic_train" in ppo


def test_dry_run_prints_the_plan(capsys: pytest.CaptureFixture[str], workplace: Path) -> None:
    code, out, err = call(
        capsys, "run", "ppo", "preset=tiny", "--dry-run", "cluster.n_devices_per_node=2", "n_mbs=2", "allocation=split"
    )
    assert (code, err) == (0, "")
    lines = {line.split("  ")[0]: line for line in reversed(out.splitlines())}
    assert "40 steps of 64 samples, seed 1, fp32, preset tiny" in out
    assert "2 workers: 1 node of 2 devices, cpu, launcher local" in out
    assert lines["actor_gen"].split()[1:7] == ["actor", "generate", "ppo_actor", "64", "0", "d1t1p1"]
    assert re.search(r"\nactor_gen +prompt_ids +input_ids, prompt_mask, old_logprobs, truncated\n", out)
    assert "4 minibatches of 2 micro-batches" in lines["critic_train"]
    assert "\nrewards from realrl.data.tiny:toy_reward\n" in out
    out = call(capsys, "run", "ppo", "preset=tiny", "--dry-run", "n_mbs=2", "algorithm.ppo_epochs=3")[1]
    assert "3 passes of 4 minibatches of 2 micro-batches" in out
    assert "native, lr 0.002 constant" in lines["critic"]
    assert "frozen" in lines["ref"]
    assert "no weights" in lines["reward"]
    assert lines["global"].split("  ")[-1] == "[0, 1]"
    assert "Nothing was started" in out
    assert list(workplace.iterdir()) == []


def test_dry_run_says_what_is_set_of_single_calls(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ("calls.ref_inf.min_n_seqs=8", "calls.ref_inf.balanced_dp=true", "calls.actor_train.n_mbs=4")
    run = ("run", "ppo", "preset=tiny", "--dry-run", "n_mbs=2", "max_staleness=1")
    code, out, err = call(capsys, *run, *settings, "calls.actor_train.protocol=DP_PROTO")
    assert (code, err) == (0, "")
    table = out.partition("Settings of single calls\n")[2].partition("\n\n")[0]
    assert [re.split(" {2,}", line) for line in table.splitlines()] == [
        ["call", "settings"],
        ["ref_inf", "min_n_seqs=8, balanced_dp=true"],
        ["actor_train", "n_mbs=4, protocol=DP_PROTO"],
    ]
    assert "4 minibatches of 4 micro-batches" in next(line for line in out.splitlines() if line.startswith("actor_tr"))
    assert "Settings of single calls" not in call(capsys, *run)[1]


def test_dry_run_says_which_parameters_move(capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ("cluster=eight_workers", "allocation=eight_meshes", "allocation.offload=[ref]")
    code, out, err = call(capsys, "run", "ppo", "preset=tiny", "--dry-run", *overrides)
    assert (code, err) == (0, "")
    rows = {re.split(" {2,}", line)[0]: re.split(" {2,}", line)[1:] for line in out.splitlines()}
    assert rows["before actor_gen"][:3] == ["actor", "d2t1p2@0:0-3", "d4t1p2@0:0-7"]
    assert rows["before critic_inf"][:3] == ["critic", "d2t1p2@0:4-7", "d2t1p1@0:0-1"]
    moved, most = rows["before critic_inf"][3:]
    assert float(moved.removesuffix(" MB")) == pytest.approx(2 * float(most.removesuffix(" MB")))  # two whole models
    assert rows["after ref_inf"][:2] == ["ref to host memory", "d1t1p4@0:4-7"]
    assert "[4, 5, 6, 7]" in rows["pp"][0]


MOVING = (
    "ppo", "preset=tiny", "cluster.n_devices_per_node=2", "cluster.device=cpu", "allocation=split",
    "allocation.calls.critic_inf=d1@0:0", "allocation.calls.actor_gen=d2@0:0-1",
)  # fmt: skip


@pytest.mark.parametrize("is_on", [True, False])
def test_where_parameters_come_early_or_stay_is_told(
    is_on: bool, capsys: pytest.CaptureFixture[str], workplace: Path
) -> None:
    arguments = (*MOVING, "calls.critic_inf.min_n_seqs=16", f"allocation.overlap={str(is_on).lower()}")
    expected = {"actor_gen": "come early", "critic_inf": "come early and stay for the step"} if is_on else {}
    out = call(capsys, "run", *arguments, "--dry-run")[1]
    table = out.partition("Parameters that come early or stay\n")[2].partition("\n\n")[0]
    assert dict(re.split(" {2,}", line) for line in table.splitlines()[1:]) == expected
    assert call(capsys, "graph", *arguments, "--out", "ppo.svg")[0] == 0
    picture = Path("ppo.svg").read_text()
    assert [text for text in expected.values() if f"parameters {text}<" not in picture] == []
    assert ("come early" in picture) is is_on
    code, out, _ = call(capsys, "doctor", *arguments, "--no-models", "--json", "report.json")
    assert (code, f"Parameters that come early or stay{chr(10)}{table}" in out) == (0, is_on)
    assert json.loads(Path("report.json").read_text())["memory"]["overlap"] == expected


def test_of_devices_elsewhere_the_doctor_alone_knows_whether_there_is_room(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    arguments = (*MOVING, "cluster.device=cuda", "allocation.overlap=true")
    for command in (("run", "--dry-run"), ("doctor", "--no-models")):
        assert "come early" not in call(capsys, command[0], *arguments, *command[1:])[1]
    assert "come early" in call(capsys, "doctor", *arguments, "--no-models", "--device-memory", "80")[1]


def test_dry_run_says_when_a_rank_order_saves_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    overrides = ("cluster.n_devices_per_node=4", "allocation=t4", "allocation.calls.actor_gen=d2t2")
    code, out, err = call(capsys, "run", "ppo", "preset=tiny", "--dry-run", *overrides)
    assert (code, err) == (0, "")
    found = re.search(
        r"\nactor_gen takes its devices in the order 0 2 1 3: (\S+) MB move, in plain order (\S+) MB", out
    )
    assert found is not None
    assert float(found[1]) < float(found[2])
    assert "takes its devices" not in call(capsys, "run", "ppo", "preset=tiny", "--dry-run", *overrides[:2])[1]


def test_dry_run_counts_bytes_between_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    overrides = (
        "cluster.n_nodes=2",
        "cluster.n_devices_per_node=2",
        "--hardware=two_cores",
        "allocation=t4",
        "allocation.calls.actor_gen=d4@0-1",
    )
    code, out, err = call(capsys, "run", "ppo", "preset=tiny", "--dry-run", *overrides)
    assert (code, err) == (0, "")
    line = next(line for line in out.splitlines() if line.startswith("before actor_gen"))
    moved, most, between = (float(size) for size in re.findall(r"(\S+) MB", line))
    assert moved == pytest.approx(4 * most, rel=0.05)
    assert between == pytest.approx(moved / 3, rel=0.1)  # each node lacks half a model, each device three quarters


def test_options_may_stand_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--dry-run", "ppo", "preset=tiny"], ["ppo", "--dry-run", "preset=tiny"]):
        code, out, _ = call(capsys, "run", *arguments)
        assert code == 0
        assert "preset tiny" in out


@pytest.mark.parametrize("name", ["ppo", "rw", "sft"])
def test_every_experiment_has_a_tiny_plan(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert call(capsys, "run", name, "preset=tiny", "--dry-run")[0] == 0


@pytest.mark.parametrize("name", ["ppo", "rw"])
def test_quickstart_needs_its_assets_and_says_how_to_get_them(
    capsys: pytest.CaptureFixture[str], workplace: Path, name: str
) -> None:
    code, _, err = call(capsys, "run", name, "preset=quickstart")
    assert code == 2
    assert "smollm2-135m-instruct: there is no such folder\n  run: python scripts/fetch_assets.py" in err
    model, reviews = workplace / "cache/smollm2-135m-instruct", workplace / "cache/reviews"
    reward = workplace / "runs/quickstart/rw/checkpoints/latest/reward"
    for folder in (model, reward):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config_to_hf(tiny_config(259))))
    assert f"dataset.path={reviews}" in call(capsys, "run", name, "preset=quickstart")[2]
    reviews.mkdir()
    for file in ("reviews_pairs_train.jsonl", "reviews_prompts_train.jsonl"):
        (reviews / file).write_text("{}\n")
    code, out, err = call(capsys, "run", name, "preset=quickstart", "--dry-run", "--hardware", "two_cores")
    assert (code, err) == (0, "")
    assert str(model) in out


def test_dry_run_says_how_each_role_is_trained(capsys: pytest.CaptureFixture[str], workplace: Path) -> None:
    settings = ("models.*.optimizer.zero_stage=1", "models.actor.optimizer.offload=true", "models.critic.lora.rank=2")
    out = call(capsys, "run", "ppo", "preset=tiny", "--dry-run", *settings)[1]
    assert re.search(r"\nactor +tiny .* native, lr 0\.001 constant, ZeRO 1, optimizer on the host  ", out)
    assert re.search(r"\ncritic +tiny .* native, lr 0\.002 constant, ZeRO 1, LoRA of rank 2  ", out)


def test_a_users_file(capsys: pytest.CaptureFixture[str], workplace: Path) -> None:
    (workplace / "my_cli_algorithm.py").write_text(USER_FILE)
    code, out, _ = call(capsys, "run", "./my_cli_algorithm.py", "preset=tiny", "--dry-run")
    assert code == 0
    assert "an algorithm of one's own" in out
    assert "lr 0.001 constant" in out


def test_graph_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "graph", "ppo")
    assert code == 0
    assert "dataset\n    -> prompt_ids: actor_gen\n" in out
    assert "\nactor_gen  [actor generate, 32 samples]\n    <- dataset: prompt_ids\n" in out
    assert "    .. waits for actor_train of the step before\n" in out
    assert "    <- actor_gen: input_ids, prompt_mask, old_logprobs, truncated\n" in out
    assert out.index("\nactor_gen") < out.index("\nrew_inf") < out.index("\ncritic_train")


def test_a_pair_is_shown(capsys: pytest.CaptureFixture[str], workplace: Path) -> None:
    pair = ("cluster.n_devices_per_node=2", "allocation=pipeline", "allocation.fuse=[actor_train,critic_train]")
    code, out, _ = call(capsys, "graph", "ppo", *pair)
    assert code == 0
    assert "    .. trains at the same time as critic_train, on the same devices\n" in out
    assert "    .. trains at the same time as actor_train, on the same devices\n" in out
    code, out, _ = call(capsys, "run", "ppo", "preset=tiny", *pair, "--dry-run")
    assert code == 0
    assert "4 minibatches, with critic_train" in out
    call(capsys, "graph", "ppo", *pair, "--out", "pair.svg")
    assert "together with critic_train" in (workplace / "pair.svg").read_text()


def test_pairs_are_not_searched(capsys: pytest.CaptureFixture[str]) -> None:
    pair = ("cluster.n_devices_per_node=2", "allocation.fuse=[actor_train,critic_train]")
    code, _, err = call(capsys, "plan", "ppo", "preset=tiny", *pair)
    assert code == 2
    assert "allocation.fuse=[actor_train,critic_train]: plans are searched with every call by itself" in err


@pytest.mark.parametrize("ending", ["svg", "mmd"])
def test_graph_as_a_picture(capsys: pytest.CaptureFixture[str], workplace: Path, ending: str) -> None:
    code, out, err = call(capsys, "graph", "ppo", "--out", f"ppo.{ending}")
    assert (code, out, err) == (0, f"wrote ppo.{ending}\n", "")
    assert "actor_gen" in (workplace / f"ppo.{ending}").read_text()


def test_config_prints_values(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "config", "ppo", "preset=tiny", "seed=7")
    assert code == 0
    rows = {line.split()[0]: line for line in out.splitlines() if line}
    assert rows["seed"].split()[1] == "7"
    assert rows["steps"].split()[1] == "40"
    assert "actor: 0.001, critic: 0.002" in rows["models.<role>.optimizer.lr"]
    assert "dataset.max_answer_tokens" not in rows
    assert not any(row.startswith("generation") for row in call(capsys, "config", "rw")[1].splitlines())


def test_config_lists_what_holds_for_each_call(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ("calls.actor_gen.max_staleness=1", "calls.actor_train.n_mbs=4", "min_n_seqs=8")
    code, out, _ = call(capsys, "config", "ppo", "preset=tiny", *settings)
    assert code == 0
    listed, _, table = out.partition("What holds for each call: calls.<call>.KEY\n")
    keys = {line.split()[0]: re.split(" {2,}", line)[1:3] for line in listed.splitlines() if line}
    assert keys["calls.<call>.n_mbs"] == ["actor_train: 4", "a whole number >= 1 or null"]
    assert keys["calls.<call>.balanced_dp"] == ["null", "true or false or null"]
    names, *rows = [line.split() for line in table.splitlines() if line]
    assert names == [
        "call",
        "n_mbs",
        "max_tokens_per_mb",
        "min_n_seqs",
        "balanced_dp",
        "protocol",
        "max_staleness",
        "virtual_stages",
    ]
    assert rows == [
        ["actor_gen", "null", "null", "8", "false", "3D_PROTO", "1", "-"],
        ["actor_inf", "null", "null", "8", "false", "3D_PROTO", "0", "-"],
        ["rew_inf", "-", "-", "8", "false", "3D_PROTO", "-", "-"],
        ["ref_inf", "null", "null", "8", "false", "3D_PROTO", "-", "-"],
        ["critic_inf", "null", "null", "8", "false", "3D_PROTO", "0", "-"],
        ["actor_train", "4", "null", "-", "false", "3D_PROTO", "-", "null"],
        ["critic_train", "null", "null", "-", "false", "3D_PROTO", "-", "null"],
    ]


@pytest.mark.parametrize(
    ("arguments", "messages"),
    [
        (["rnu"], ["unknown command 'rnu'. Did you mean 'run'?", "See: realrl --help"]),
        (["ppo"], ["unknown command 'ppo'. Did you mean 'realrl run ppo'?"]),
        (["./mine.py"], ["Did you mean 'realrl run ./mine.py'?"]),
        (["--hlep"], ["unknown option --hlep"]),
        (["run"], ["realrl run needs an experiment", "Choose from"]),
        (["graph"], ["realrl graph needs an experiment"]),
        (["run", "steps=3"], ["the experiment comes before 'steps=3'", "Write: realrl run NAME steps=3"]),
        (["run", "pppo"], ["there is no experiment 'pppo'. Did you mean 'ppo' or", "Choose from"]),
        (["run", "ppo", "--dryrun"], ["unknown option --dryrun. Did you mean '--dry-run'?", "See: realrl run --help"]),
        (["run", "ppo", "--dry"], ["unknown option --dry. Did you mean '--dry-run'?"]),
        (["run", "ppo", "--steps", "3"], ["unknown option --steps. It is a setting, which has no dashes: steps=..."]),
        (["run", "ppo", "--dataset.path=x"], ["which has no dashes: dataset.path=x"]),
        (["list", "all"], ["unrecognized arguments: all", "See: realrl list --help"]),
        (["run", "ppo", "steps"], ["steps: not an override; write it as steps=VALUE"]),
        (
            ["run", "ppo", "preset=tny"],
            ["preset=tny: no such preset; choose from quickstart, reasoning, tiny. Did you mean 'tiny'?"],
        ),
        (["run", "ppo", "cluster=x"], ["cluster=x: no such cluster; choose from eight_workers, gpu_node, two_workers"]),
        (["run", "ppo", "steps=-1", "sede=1"], ["2 things are wrong", "steps=-1: must be", "Did you mean 'seed'?"]),
        (["run", "rw", "generation.top_k=1"], ["generation.top_k=1: has no effect: 'rw' has no generate call"]),
        (["run", "sft", "min_n_seqs=4"], ["min_n_seqs=4: has no effect: all calls of 'sft' train"]),
        (["run", "rw", "max_refill_rounds=3"], ["max_refill_rounds=3: has no effect: no call of 'rw' drops samples"]),
        (["run", "rw", "+generation={top_k: 1}"], ["has no effect: 'rw' has no generate call"]),
        (["run", "grpo", "eval.n_responses=4"], ["eval.n_responses=4: has no effect: eval.every_steps is 0, so that"]),
        (
            ["run", "sft", "models.actor.lora.alpha=8"],
            ["has no effect: models.actor.lora.rank is 0, so that there are"],
        ),
        (["run", "ppo", "dataset.max_answer_tokens=1"], ["has no effect: the dataset of 'ppo' holds prompts"]),
        (["run", "ppo", "allocation=splt"], ["splt", "Did you mean 'split'?"]),
        (["run", "ppo", "allocation.calls.actor_gn=d1"], ["there is no call 'actor_gn'", "Did you mean 'actor_gen'"]),
        (["run", "ppo", "calls.actor_gn.n_mbs=2"], ["there is no call 'actor_gn'", "Did you mean 'actor_gen'"]),
        (["config", "ppo", "calls.actor_gn.n_mbs=2"], ["there is no call 'actor_gn'", "Did you mean 'actor_gen'"]),
        (
            ["eval", "ppo", "preset=tiny", "calls.actor_train.n_mbs=2"],
            ["calls.actor_train.n_mbs=2: has no effect: an evaluation does without call 'actor_train'"],
        ),
        (
            ["eval", "ppo", "preset=tiny", "calls.actor_gen.max_staleness=1"],
            ["calls.actor_gen.max_staleness=1: has no effect: an evaluation trains nothing"],
        ),
        (
            ["eval", "ppo", "preset=tiny", "calls={actor_gen: {max_staleness: 1}, rew_inf: {n_mbs: null}}"],
            ["calls.actor_gen.max_staleness=1: has no effect: an evaluation trains nothing"],
        ),
        (
            ["run", "grpo", "eval={n_responses: 4}"],
            ["eval.n_responses=4: has no effect: eval.every_steps is 0, so that"],
        ),
        (["run", "ppo", "allocation=d2"], ["d2"]),
        (
            ["run", "ppo", "preset=tiny", "--dry-run", "cluster=eight_workers", "allocation=p8"],
            ["pp=8 does not fit a model of 4 layers", "allocation.calls.actor_gen=d2t1p4@0:0-7"],
        ),
        (
            ["run", "ppo", "preset=tiny", "cluster=eight_workers", "allocation=t8"],
            ["tp=8 does not fit", "4 attention heads", "d2t4p1"],
        ),
        (["run", "ppo", "allocation.offload=[reff]"], ["there is no role 'reff'", "Did you mean 'ref'?"]),
        (["run", "ppo", "models.ref.path=/nowhere"], ["models.ref.path=/nowhere: there is no such folder"]),
        (["run", "ppo", "dataset.path=/nowhere.json"], ["dataset.path=/nowhere.json: there is no such file"]),
        (["run", "ppo", "resume=/nowhere"], ["resume=/nowhere: there is no such folder"]),
        (["run", "ppo", "run_dir=/dev/null/x"], ["run_dir=/dev/null/x: '/dev/null' is not a folder"]),
        (["graph", "ppo", "--out", "x.gif"], ["the picture 'x.gif'", "Use one of .svg, "]),
        (["graph", "ppo", "--out", "/nowhere/x.svg"], ["/nowhere/x.svg"]),
    ],
)
def test_wrong_input(
    capsys: pytest.CaptureFixture[str], workplace: Path, arguments: list[str], messages: list[str]
) -> None:
    code, out, err = call(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("realrl: error: ")
    for message in messages:
        assert message in err
    assert "Traceback" not in err
    assert len(err.splitlines()) < 15
    assert list(workplace.iterdir()) == []


def start_with(monkeypatch: pytest.MonkeyPatch, start_run: object) -> None:
    module = types.ModuleType("realrl.runtime.processes.start")
    module.start_run = start_run  # type: ignore[attr-defined]
    module.Watch = lambda *_: None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "realrl.runtime.processes.start", module)


def test_run_hands_over_experiment_and_configuration(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, workplace: Path
) -> None:
    started = []
    start_with(monkeypatch, lambda experiment, config, **_: started.append((experiment, config)) or 7)
    (workplace / "my_cli_start.py").write_text(USER_FILE)
    assert call(capsys, "run", "./my_cli_start.py", "preset=tiny", "steps=3")[0] == 7
    ((experiment, config),) = started
    assert experiment.name == "mine"
    assert config.steps == 3
    assert config.experiment == str(workplace / "my_cli_start.py")


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (UsageError("wrong input", remedy="Correct it."), 2, "realrl: error: wrong input\n  Correct it.\n"),
        (RunError("it broke"), 1, "realrl: error: it broke\n"),
        (KeyboardInterrupt(), 130, "realrl: interrupted\n"),
    ],
)
def test_exit_codes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int, message: str
) -> None:
    def fail(experiment: object, config: object, **_: object) -> int:
        raise error

    start_with(monkeypatch, fail)
    assert call(capsys, "run", "ppo", "preset=tiny") == (code, "", message)


def test_an_unexpected_error_keeps_its_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    start_with(monkeypatch, operator.truediv)
    code, _, err = call(capsys, "run", "ppo", "preset=tiny")
    assert code == 1
    assert "Traceback" in err
    assert "truediv() takes no keyword arguments" in err
    assert "it is a bug in realrl, please report it" in err


def test_tables_are_plain_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("a", "b"), [("long value", "x"), ("y", "")], title="T")
    assert capsys.readouterr().out == "T\na           b\nlong value  x\ny\n\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("no_color", "has_style"), [("", True), ("1", False)])
def test_tables_fit_a_terminal_and_respect_no_color(
    monkeypatch: pytest.MonkeyPatch, no_color: str, has_style: bool
) -> None:
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "40")
    print_table(("key", "meaning"), [("steps", "word " * 30), ("[bold]", "stays")], folding=("meaning",))
    text = sys.stdout.getvalue()  # type: ignore[attr-defined]
    assert "[bold]" in text
    assert max(len(line) for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()) <= 40
    assert ("\x1b[" in text) is has_style


def test_parameters_are_counted_from_the_headers_alone(tmp_path: Path) -> None:
    assert plan_view.count_parameters(tmp_path) is None
    tensors = {"a": {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48]}, "b": {"shape": []}, "__metadata__": {}}
    header = json.dumps(tensors).encode()
    (tmp_path / "model-1.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    (tmp_path / "model-2.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    assert plan_view.count_parameters(tmp_path) == 26
    (tmp_path / "model-3.safetensors").write_bytes(b"cut")
    assert plan_view.count_parameters(tmp_path) is None


def realrl(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).resolve().parents[2]
    settings = {**os.environ, "PYTHONPATH": str(root), **environment}
    command = [sys.executable, "-m", "realrl", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=settings, timeout=60, check=False)


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["list"], ["graph", "ppo"], ["config", "ppo"], ["run", "ppo", "preset=tiny", "--dry-run"]],
)
def test_nothing_heavy_is_imported_before_a_run(arguments: list[str]) -> None:
    script = f"""
import sys
from realrl.cli import main
assert main({arguments!r}) == 0
heavy = ["torch", "zmq", "transformers", "asyncio"]
heavy += ["pydantic", "hydra", "networkx", "rich"] if {arguments!r} == ["--help"] else []
print("heavy:", sorted(set(heavy) & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "heavy: []"


def test_help_is_quick() -> None:
    def seconds() -> float:  # of a processor, whatever else the machine does
        def used() -> float:
            children = resource.getrusage(resource.RUSAGE_CHILDREN)
            return children.ru_utime + children.ru_stime

        start = used()
        assert realrl("--help").returncode == 0
        return used() - start

    assert min(seconds() for _ in range(3)) < 0.5


def test_python_dash_m() -> None:
    done = realrl("version")
    assert (done.returncode, done.stdout, done.stderr) == (0, "realrl 0.1.0\n", "")
    done = realrl("run", "nmae")
    assert done.returncode == 2
    assert done.stderr.startswith("realrl: error: there is no experiment 'nmae'")


def test_a_reader_that_leaves_early_causes_no_noise() -> None:
    root = Path(__file__).resolve().parents[2]
    command = f"{sys.executable} -m realrl config ppo | true"
    settings = {**os.environ, "PYTHONPATH": str(root), "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(command, shell=True, capture_output=True, text=True, env=settings, timeout=60, check=False)
    assert done.stderr == ""


def test_installed_experiments_and_presets_come_before_those_of_the_checkout(workplace: Path) -> None:
    for name in ("realrl_experiments/__init__.py", "realrl_configs/__init__.py"):
        (workplace / name).parent.mkdir()
        (workplace / name).write_text("")
    (workplace / "realrl_experiments/mine.py").write_text(USER_FILE)
    (workplace / "realrl_configs/preset").mkdir()
    (workplace / "realrl_configs/preset/short.yaml").write_text("# @package _global_\nsteps: 3\n")
    root = Path(__file__).resolve().parents[2]
    done = realrl("run", "mine", "preset=short", "--dry-run", PYTHONPATH=os.pathsep.join([str(workplace), str(root)]))
    assert (done.returncode, done.stderr) == (0, "")
    assert "3 steps of 32 samples" in done.stdout
