"""Mistakes of a user, through the command line: one screen, the right exit code, nothing started or left."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from realrl import cli
from tests.helpers.assets import MISBEHAVING, edit_json, make_model_folder, write_rows
from tests.helpers.runs import SMALL, read_metrics, realrl

PPO = ("run", "ppo", *SMALL, "steps=2")
INLINE = "launcher=inline"
PROMPTS = [{"prompt": f"hello {i}"} for i in range(24)]

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_model_folder(folder / "lm")
    make_model_folder(folder / "reward", "reward")
    return folder


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("REALRL_CACHE", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def call(workplace: Path, capfd: pytest.CaptureFixture[str]) -> Call:
    """The command line in this process, which inline runs and refused ones do not leave."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code = cli.main(list(arguments))
        out, err = capfd.readouterr()
        return code, out, err

    return run


def assert_refused(outcome: tuple[int, str, str], *messages: str) -> None:
    """Exit code 2, the messages on one screen, and no traceback."""
    code, out, err = outcome
    assert (code, out) == (2, "")
    for message in messages:
        assert message in err
    assert "Traceback" not in err
    assert len(err.splitlines()) <= 12


# ---------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("overrides", "messages"),
    [
        (("n_seqs=7",), ("n_seqs=7: must be a multiple of algorithm.n_minibatches=2",)),
        (("steps=-1", "generation.temperature=nan"), ("2 things are wrong", "steps=-1: must be a whole number >= 1")),
        (
            ("seed=9223372036854775808",),
            ("seed=9223372036854775808: must be a whole number >= 0 and < 9223372036854775808",),
        ),
        (("generation.temperature=0",), ("a policy cannot learn from responses that never vary",)),
        (("n_seqs=2", "cluster.n_devices_per_node=2"), ("fewer than its 2 data-parallel ranks", "n_seqs=4")),
        (("cluster.n_nodes=2",), ("cluster.n_nodes=2, but launcher=local starts workers on one machine only",)),
        (
            ("cluster.n_devices_per_node=8", "allocation=p8"),
            ("pp=8 does not fit a model of 4 layers", "allocation.calls.actor_gen=d2t1p4@0:0-7"),
        ),
        (("cluster.n_devices_per_node=2", "allocation=t3"), ("d1t3p1 needs 3 devices", "d1t2p1")),
        (
            ("cluster.n_devices_per_node=2", "allocation.calls.actor_gen=d1@0:5"),
            ("allocation.calls.actor_gen: mesh '0:5' lies outside the cluster", "The nearest mesh is '0:1'"),
        ),
        (("calls.actr_gen.n_mbs=2",), ("calls.actr_gen: there is no call 'actr_gen'", "Did you mean 'actor_gen'")),
        (
            ("calls.actor_gen.n_mbs=0", "calls.ref_inf.protocol=3"),
            ("calls.actor_gen.n_mbs=0: must be a whole number >= 1 or null",),
        ),
        (("calls.ref_inf.min_n_seqs=9",), ("calls.ref_inf.min_n_seqs=9: is more than the n_seqs=8 of the call",)),
        (("calls.actor_train.max_staleness=1",), ("calls.actor_train.max_staleness=1: has no effect: a train_step",)),
        (("cluster.n_devices_per_node=2", "allocation.offload=[act]"), ("no role 'act'", "Did you mean 'actor'?")),
        (("resume=auto",), ("resume=auto: continues the run in run_dir: give it with run_dir=PATH",)),
        (("algorithm.reward_function=rewardz.py:f",), ("there is no file 'rewardz.py'",)),
        (("run_dir=/tmp/" + "x" * 300,), ("is no usable path: File name too long",)),
        (("run_dir=" + "x" * 5000,), ("argument 9 has 5,008 characters: run_dir=xxx", "The most is 4,096")),
        (("run_dir=a\udcff",), ("is no text in UTF-8",)),
        (("steps=" + "9" * 4000,), ("a whole number of so many digits is impossible",)),
        (("steps=" + "[" * 900,), ("a bracket is not closed",)),
        (("generation.max_new_tokens=1024",), ("leaves no place for a prompt in the 1024 positions",)),
        (("generation.max_new_tokens=1020", INLINE), ("new ones make 1029 tokens", "role 'actor' has 1024 positions")),
    ],
)
def test_impossible_values(call: Call, workplace: Path, overrides: tuple[str, ...], messages: tuple[str, ...]) -> None:
    assert_refused(call(*PPO, *overrides), *messages)
    assert list(workplace.iterdir()) == []


# ---------------------------------------------------------------- models and tokenizers


def cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1_000_000])


def write_header(header: bytes) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 5000)

    return write


BROKEN_MODELS = {
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "has neither model.safetensors nor"),
    "cut off": (cut, "model.safetensors is truncated: 1000000 of 2107824 bytes"),
    "empty": (lambda f: (f / "model.safetensors").write_bytes(b""), "is truncated: 0 of 8 bytes"),
    "header is a list": (write_header(b"[1, 2]"), "is damaged: its header does not say where tensors end"),
    "header without offsets": (write_header(b'{"a": {"b": 1}}'), "is damaged: its header does not say where"),
    "config is not JSON": (lambda f: (f / "config.json").write_text("{"), "config.json cannot be read as JSON"),
    "unknown architecture": (
        lambda f: edit_json(f / "config.json", architectures=["MambaForCausalLM"], model_type="mamba"),
        "architecture 'MambaForCausalLM' is not supported",
    ),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "holds no tokenizer: expected tokenizer.json"),
    "tokenizer cut off": (lambda f: (f / "tokenizer.json").write_text('{"ver'), "the tokenizer in"),
    "no EOS": (lambda f: edit_json(f / "tokenizer_config.json", eos_token=None), "has no end-of-sequence token"),
    "too few tokens": (lambda f: edit_json(f / "config.json", vocab_size=50), "knows 50 tokens, but the tokenizer"),
}


@pytest.mark.parametrize("case", BROKEN_MODELS)
@pytest.mark.parametrize("role", ["actor", "critic"])
def test_a_broken_model_folder(call: Call, workplace: Path, models: Path, role: str, case: str) -> None:
    spoil, message = BROKEN_MODELS[case]
    folder = workplace / "broken"
    shutil.copytree(models / "lm", folder)
    spoil(folder)
    assert_refused(call(*PPO, f"models.{role}.path={folder}"), message, str(folder), f"models.{role}.path")
    assert not (workplace / "runs").exists()


def test_a_reward_model_cannot_be_the_actor(call: Call, models: Path) -> None:
    assert_refused(call(*PPO, f"models.actor.path={models / 'reward'}"), "cannot predict tokens")


# ---------------------------------------------------------------- dataset


def without_prompt() -> list[dict[str, object]]:
    return [*PROMPTS[:5], {"promt": "x"}, *PROMPTS[6:]]


BAD_DATA = {
    "empty": ("", "is empty"),
    "line 17": ("\n".join([*(json.dumps(row) for row in PROMPTS[:16]), "{oops"]), "line 17 is not JSON"),
    "no prompt": (without_prompt(), "line 6 has no \"prompt\"; its fields are 'promt'"),
    "duplicate ids": ([{**row, "id": i % 20} for i, row in enumerate(PROMPTS)], "line 21 has the id '0', which"),
    "all too long": ([{"prompt": "x" * 99}] * 9, "all 9 prompts of"),
    "too few": (PROMPTS[:3], "epochs=1 of them do not fill one step of n_seqs=8"),
}


@pytest.mark.parametrize("case", BAD_DATA)
def test_an_unusable_dataset(call: Call, workplace: Path, case: str) -> None:
    content, message = BAD_DATA[case]
    file = workplace / "data.jsonl"
    if isinstance(content, str):
        file.write_text(content)
    else:
        write_rows(file, content)
    assert_refused(call(*PPO, f"dataset.path={file}", "epochs=1"), message)
    assert not (workplace / "runs").exists()


def test_long_prompts_are_dropped_and_counted_and_epochs_end_the_run(call: Call, workplace: Path) -> None:
    file = write_rows(workplace / "data.jsonl", [*PROMPTS, {"prompt": "x" * 99}])
    code, out, _ = call(*PPO, INLINE, f"dataset.path={file}", "epochs=1", "steps=50")
    assert code == 0
    assert "realrl: note: 1 of 25 prompts longer than 32 tokens was dropped" in out
    assert "steps: 3 of 50, where epochs=1 ended" in out


# ---------------------------------------------------------------- interfaces and rewards

FAULTS = {
    "raise": ("judge of role 'critic' at step 2: interface 'misbehaving:Judge' raised RuntimeError: the judge is out",),
    "none": ("judge of role 'critic' at step 1: interface 'misbehaving:Judge' returned NoneType",),
    "key": (
        "judge of role 'critic' at step 1",
        "did not return 'rewards', but 'reward'. Did you mean 'reward', or output_key_remap=",
    ),
    "length": ("judge of role 'critic' at step 1", "key 'rewards' has shape [7]", "samples", "'1/"),
    "nan": ("judge of role 'critic' at step 1", "returned 'rewards' = nan in row 0 of sample '1/"),
    "sample": ("judge of role 'critic' at step 1", "returned nothing for sample '1/"),
    "metric": ("learn of role 'actor' at step 1", "returned the metric 'loss' = nan"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_interface_that_misbehaves(call: Call, workplace: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    (workplace / "misbehaving.py").write_text(MISBEHAVING)
    monkeypatch.setenv("MISBEHAVE", fault)
    monkeypatch.delitem(sys.modules, "misbehaving", raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    code, _, err = call("run", "./misbehaving.py", "preset=tiny", "n_seqs=8", "steps=2", INLINE)
    assert code == 1
    for message in FAULTS[fault]:
        assert message in " ".join(err.split())
    assert len(err.splitlines()) <= 24
    # The line that raised, or the method.
    assert re.search(r"Look at \S+misbehaving.py:\d+\.", " ".join(err.split()))
    assert "worker/loop.py" not in err


def test_numbers_that_explode_name_role_and_step(call: Call) -> None:
    code, _, err = call(*PPO, INLINE, "models.actor.optimizer.lr=1e30")
    assert code == 1
    assert "actor_train at step 1: the gradient of role 'actor' is not finite" in err
    assert "Try a smaller models.actor.optimizer.lr." in err
    assert "Traceback" not in err


def test_a_reward_function_that_raises_shows_its_line(call: Call, workplace: Path) -> None:
    raises = "raise ValueError('no reward today')"
    (workplace / "rewards.py").write_text(f"def f(prompt, response):\n    {raises}\n")
    outcome = call(*PPO, INLINE, "algorithm.reward_function=rewards.py:f")
    assert_refused(outcome, "with placeholder responses, rew_inf", "no reward today", 'rewards.py", line 2, in f')
    tolerates = f"def f(prompt, response):\n    if response.startswith('This'): return 0.0\n    {raises}\n"
    (workplace / "others.py").write_text(tolerates)
    code, _, err = call(*PPO, INLINE, "algorithm.reward_function=others.py:f")
    assert code == 1
    assert "rew_inf of role 'reward' at step 1, sample '1/" in err
    assert "ValueError: no reward today" in err
    assert 'others.py", line 3, in f' in err


@pytest.mark.parametrize("more", ["--dry-run", INLINE])
def test_a_reward_function_that_is_not_there(call: Call, workplace: Path, more: str) -> None:
    (workplace / "rewards.py").write_text("1 / 0\n\ndef score(prompt):\n    return 1.0\n")
    outcome = call(*PPO, more, "algorithm.reward_function=rewards.py:scor")
    assert_refused(outcome, "'rewards.py' has no 'scor'", "Did you mean 'score'?")
    outcome = call(*PPO, more, "algorithm.reward_function=rewards.py:score")
    assert_refused(outcome, "must take (prompt, response), and perhaps row and messages, not (prompt)")


OWN_CALL = """
from realrl import InterfaceType, MFCDef, ModelInterface, register_interface
from realrl_experiments.grpo import EXPERIMENT as GRPO

@register_interface("token_entropy")
class TokenEntropy(ModelInterface):
    def inference(self, model, batch):
        return batch

def calls(config):
    more = MFCDef("entropy_inf", "ref", InterfaceType.INFERENCE, "token_entropy", ("input_ids",), ("entropy",))
    return [*GRPO.mfcs(config), more]

EXPERIMENT = GRPO.variant("own_call", "with a call of its own", mfcs=calls)
"""


@pytest.mark.parametrize("command", [("run", "--dry-run"), ("run", INLINE), ("doctor",)], ids=" ".join)
def test_parameters_of_pieces_and_methods(call: Call, workplace: Path, command: tuple[str, ...]) -> None:
    name, *more = command
    (workplace / "bad.py").write_text("def two_args(batch, options):\n    return 1.0\n")
    outcome = call(name, "grpo", "preset=tiny", "algorithm.advantage=bad.py:two_args", *more)
    assert_refused(outcome, "algorithm.advantage=bad.py:two_args must take (rollout), not (batch, options)")
    (workplace / "own_call.py").write_text(OWN_CALL)
    code, out, err = call(name, "./own_call.py", "preset=tiny", *more)
    assert code == 2
    assert "TokenEntropy.inference must take (model, batch, ctx), not (model, batch)" in out + err


def test_an_experiment_cannot_choose_the_exit_code(call: Call, workplace: Path) -> None:
    source = MISBEHAVING.replace("    n = config.n_seqs\n", "    n = config.n_seqs\n    {}\n")
    for number, line in enumerate(("raise SystemExit(0)", "os._exit(0)", "raise BaseException('no')", "1 / 0")):
        (workplace / f"mine_{number}.py").write_text(source.replace("{}", line, 1))
        outcome = call("run", f"./mine_{number}.py", "preset=tiny", "--dry-run")
        assert_refused(outcome, f"mine_{number}.py:", line)


def test_a_cost_needs_a_function(call: Call) -> None:
    outcome = call("run", "safe_rlhf", "preset=tiny", "algorithm.cost_function=overlong", "--dry-run")
    assert_refused(outcome, "cost_function=overlong: 'overlong' is no function", "leave it out for the cost model")


@pytest.mark.slow
def test_a_reward_function_that_hangs(call: Call, workplace: Path) -> None:
    waits = "time.sleep(1000 * (not response.startswith('This')))"
    (workplace / "rewards.py").write_text(f"import time\n\ndef f(prompt, response):\n    {waits}\n    return 0.0\n")
    code, _, err = call(*PPO, "algorithm.reward_function=rewards.py:f", "algorithm.reward_timeout_s=0.5")
    assert code == 1
    assert "sample '1/" in err
    assert "did not answer within 0.5 s" in " ".join(err.split())
    assert "Traceback" not in err


# ---------------------------------------------------------------- run folder, port, disk


def test_a_taken_port_and_the_same_folder_again(call: Call, workplace: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused = realrl(*PPO, f"cluster.master_port={port}", "run_dir=a")
    assert refused.returncode == 2
    assert f"port {port} on 127.0.0.1 is taken by another program" in refused.stderr
    assert call(*PPO, INLINE, "run_dir=a", "steps=1")[0] == 0  # what failed before its first step is no earlier run
    assert_refused(call(*PPO, INLINE, "run_dir=a"), "holds the results of an earlier run", "resume=auto")


def test_a_folder_belongs_to_one_run_at_a_time(call: Call, workplace: Path) -> None:
    (workplace / "a").mkdir()
    lock = workplace / "a" / ".lock"
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write("4242\n")
        file.flush()
        told = "another run is going on in run_dir=", "/a: process 4242", "Wait for its end"
        for overrides in ((), ("resume=auto",)):
            assert_refused(call(*PPO, INLINE, "run_dir=a", *overrides), *told)
    lock.unlink()
    lock.symlink_to(workplace / "elsewhere")
    told = "cannot be locked against other runs: Too many levels of symbolic links", "Choose another folder"
    assert_refused(call(*PPO, INLINE, "run_dir=a"), *told)
    assert not (workplace / "elsewhere").exists()


def test_a_refused_run_leaves_no_folder(call: Call, workplace: Path) -> None:
    overrides = ("models.actor.path=tiny", "dataset.path=data.jsonl", "run_dir=new/a")
    (workplace / "data.jsonl").write_text("nonsense")
    assert call(*PPO, INLINE, *overrides)[0] == 2
    assert not (workplace / "new").exists()


def test_a_full_disk_leaves_the_previous_checkpoint_to_continue_from(call: Call, workplace: Path) -> None:
    assert call(*PPO, INLINE, "run_dir=a", "steps=1")[0] == 0
    # A limit on the size of files stands in for a disk that gets full while the weights are written.
    limited = f'ulimit -f 1000; exec {sys.executable} -m realrl "$@"'
    command = ["bash", "-c", limited, "x", *PPO, INLINE, "run_dir=a", "resume=auto"]
    full = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert full.returncode == 1
    assert "the checkpoint of step 2 could not be written: File too large" in full.stderr
    assert "checkpoints/step_1 is whole" in " ".join(full.stderr.split())
    assert "Traceback" not in full.stderr
    assert sorted(os.listdir("a/checkpoints")) == ["latest", "step_1"]
    assert call(*PPO, INLINE, "run_dir=a", "resume=auto")[0] == 0
    assert [row["step"] for row in read_metrics(workplace / "a")] == [1, 2]


def test_the_best_by_a_metric_that_does_not_exist(call: Call, workplace: Path) -> None:
    assert_refused(call(*PPO, "save.keep_best=eval/reward"), "save.keep_best=eval/reward: the run is not evaluated")
    code, out, _ = call(*PPO, INLINE, "run_dir=a", "save.keep_best=rewrad/mean", "save.every_steps=1", "save.keep=1")
    assert code == 0
    assert out.count("save.keep_best=rewrad/mean: step 1 has no such metric. Did you mean 'reward/mean'") == 1
    assert sorted(os.listdir("a/checkpoints")) == ["latest", "step_2"]


# ---------------------------------------------------------------- resume


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert cli.main([*PPO, INLINE, f"run_dir={folder}", "steps=1"]) == 0
    return folder


def tear(checkpoint: Path) -> None:
    (checkpoint / "actor" / "model.safetensors").write_bytes(b"torn")


@pytest.mark.parametrize(
    ("spoil", "overrides", "messages"),
    [
        (None, ("steps=1",), ("the checkpoint is at step 1 and steps=1: no step is left to do", "steps=2")),
        (tear, (), ("is 4 bytes long; the manifest says", "Remove")),
        (lambda c: (c / "critic/config.json").unlink(), (), ("critic/config.json is missing",)),
        (lambda c: (c / "state/manifest.json").write_text("{"), (), ("manifest.json is damaged",)),
    ],
    ids=["no step left", "torn", "missing", "manifest"],
)
def test_a_checkpoint_that_cannot_be_continued(
    call: Call,
    workplace: Path,
    finished: Path,
    spoil: Callable[[Path], object] | None,
    overrides: tuple[str, ...],
    messages: tuple[str, ...],
) -> None:
    shutil.copytree(finished, workplace / "a", symlinks=True)
    if spoil is not None:
        spoil(workplace / "a" / "checkpoints" / "step_1")
    assert_refused(call(*PPO, INLINE, "run_dir=a", "resume=auto", *overrides), *messages)


def test_a_folder_that_is_no_checkpoint_or_another_experiments(call: Call, finished: Path) -> None:
    assert_refused(call(*PPO, f"resume={finished}"), "is not a checkpoint", "Give the folder of one step")
    latest = finished / "checkpoints" / "latest"
    assert_refused(call("run", "sft", "preset=tiny", f"resume={latest}"), "was written by experiment 'ppo', not 'sft'")


def test_another_seed_cannot_continue_and_changes_nothing(call: Call, workplace: Path) -> None:
    assert call(*PPO, INLINE, "run_dir=a", "save.every_steps=1")[0] == 0
    before = sorted(os.listdir("a/checkpoints"))
    for override in ("seed=5", "dataset.shuffle=false"):
        outcome = call(*PPO, INLINE, "resume=a/checkpoints/step_1", "run_dir=a", override)
        assert_refused(outcome, "the checkpoint was made with", f"this run has {override}")
    assert sorted(os.listdir("a/checkpoints")) == before
    assert [row["step"] for row in read_metrics(workplace / "a")] == [1, 2]


def test_rows_that_were_changed_cannot_continue(call: Call, workplace: Path) -> None:
    write_rows(workplace / "data.jsonl", PROMPTS)
    data = (*PPO, INLINE, "run_dir=a", "dataset.path=data.jsonl")
    assert call(*data, "steps=1")[0] == 0
    write_rows(workplace / "data.jsonl", [{"prompt": f"howdy {i}"} for i in range(len(PROMPTS))])
    assert_refused(call(*data, "resume=auto"), "the checkpoint was made with another dataset: the rows differ")
    write_rows(workplace / "data.jsonl", PROMPTS)
    assert call(*data, "resume=auto")[0] == 0


@pytest.mark.parametrize("adapters", [(), ("models.actor.lora.rank=2",)], ids=["frozen", "below adapters"])
def test_other_weights_of_what_is_not_trained_cannot_continue(
    call: Call, workplace: Path, models: Path, adapters: tuple[str, ...]
) -> None:
    """A reference, or the model that adapters belong to, is not in the checkpoint, and of the same shapes."""
    toy = "algorithm.reward_function=realrl.data.tiny:toy_reward"
    shutil.copytree(models / "lm", workplace / "model")
    run = (*PPO, INLINE, "run_dir=a", "models.actor.path=model", toy, *adapters)
    assert call(*run, "steps=1")[0] == 0
    weights = workplace / "model" / "model.safetensors"
    trained = workplace / "a/checkpoints/step_1/actor/model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(trained.read_bytes())
    role = "actor" if adapters else "ref"
    assert_refused(call(*run, "resume=auto"), "written with other weights", f"of role '{role}'")
    weights.write_bytes(whole)
    if adapters:
        assert_refused(call(*run, "resume=auto", "models.actor.lora.alpha=3"), "adapters of another alpha")
    assert call(*run, "resume=auto")[0] == 0


def test_samples_that_other_calls_produced_cannot_continue(call: Call, workplace: Path) -> None:
    """Generation that runs ahead gives log-probabilities too: see what PPO declares."""
    run = (*PPO, INLINE, "run_dir=a", "save.every_steps=1", "save.keep=9", "steps=3")
    assert call(*run, "max_staleness=1")[0] == 0
    before = sorted(os.listdir("a/checkpoints"))
    at = "resume=a/checkpoints/step_1"
    assert_refused(call(*run, at), "holds samples of step 2 without '", "Resume with the max_staleness")
    assert sorted(os.listdir("a/checkpoints")) == before
    code, out, _ = call(*run, at, "max_staleness=1")
    assert code == 0
    assert "steps: 3 (1 before, 2 to 3 now)\n" in out
    assert re.search(r"\ntime: [0-9.]+ s until workers and models were ready, then [0-9.]+ s for the steps\n", out)


def test_checkpoints_that_could_not_be_written_are_noticed_at_the_start(call: Call, workplace: Path) -> None:
    (workplace / "a").mkdir()
    (workplace / "a" / "checkpoints").write_text("")
    assert_refused(call(*PPO, INLINE, "run_dir=a"), "a/checkpoints cannot hold checkpoints: File exists")
    (workplace / "a" / "checkpoints").unlink()
    (workplace / "a" / "checkpoints").symlink_to("/nowhere/at/all")
    assert_refused(call(*PPO, INLINE, "run_dir=a"), "a/checkpoints cannot hold checkpoints: File exists")


# ---------------------------------------------------------------- surroundings


@pytest.mark.slow
def test_relative_paths_mean_the_same_to_every_process(workplace: Path, models: Path) -> None:
    write_rows(workplace / "data.jsonl", PROMPTS)
    shutil.copytree(models / "lm", workplace / "model")
    (workplace / "rewards.py").write_text("def f(prompt, response):\n    return 0.5\n")
    (workplace / "mine.py").write_text(
        "from realrl.experiment.discovery import load_experiment\n\nEXPERIMENT = load_experiment('ppo')\n"
    )
    done = realrl(
        *("run", "mine.py", *SMALL, "steps=1", "cluster.n_devices_per_node=2", "allocation=split", "run_dir=out/a"),
        *("dataset.path=data.jsonl", "models.actor.path=model", "algorithm.reward_function=rewards.py:f"),
    )
    assert done.returncode == 0, done.stderr
    assert read_metrics(workplace / "out" / "a")[-1]["reward/mean"] == 0.5


@pytest.mark.parametrize(
    ("shell", "exit_code"),
    [
        ("{} run ppo preset=tiny --dry-run >&-", 0),
        ("{} run ppo steps=-1 2>&-", 2),
        ("{} run ppo preset=tiny --dry-run <&-", 0),
        ("{} list | true; exit ${{PIPESTATUS[0]}}", 1),
        ("env -u HOME -u REALRL_CACHE {} run ppo preset=tiny --dry-run", 0),
        ("LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 {} run ppo preset=tiny --dry-run", 0),
        ("COLUMNS=30 {} run ppo preset=tiny --dry-run", 0),
        ("mkdir gone && cd gone && rmdir ../gone && {} run ppo preset=tiny --dry-run", 2),
    ],
)
def test_odd_surroundings(workplace: Path, shell: str, exit_code: int) -> None:
    command = shell.format(f"{sys.executable} -m realrl")
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == exit_code, done.stderr
    assert "Traceback" not in done.stderr


def test_a_reader_that_leaves_early_does_not_stop_the_run(workplace: Path) -> None:
    command = f"{sys.executable} -m realrl {' '.join(PPO)} launcher=inline run_dir=a | head -1"
    decided = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}  # else a note of other work on the machine may come first
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=100, check=False, env=decided
    )
    assert (done.stdout, done.stderr) == ("starting 1 worker\n", "")
    assert len(read_metrics(workplace / "a")) == 2
