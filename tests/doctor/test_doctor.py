"""Checks of ``realrl doctor``, of runs that are well, and of runs in which one thing is wrong."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from realrl.config.compose import compose
from realrl.cpu.loader import why_not
from realrl.cpu.machine import has_bf16_kernels
from realrl.data.tokenizer import load_tokenizer
from realrl.doctor import data_checks, logprob_checks, machine_checks, model_checks, reward_checks
from realrl.doctor import memory as doctor_memory
from realrl.doctor.findings import Check, Finding, Status, run_checks
from realrl.doctor.report import examine
from realrl.doctor.run_under_check import RunUnderCheck
from realrl.engine.decoder_engine import DecoderEngine
from realrl.errors import AssetError, UsageError
from realrl.experiment.discovery import config_dir, load_experiment
from realrl.experiment.planning import plan_run
from realrl.experiment.states import longest_rows
from realrl.plan.memory.connections import CONNECTION, CUDA_CONTEXT, RING_CHANNELS
from realrl.runtime.processes.machine import Accelerators
from realrl.shape import tiny_config
from tests.helpers.assets import edit_json, make_model_folder, write_rows

REWARDS = """
import time


def good(prompt, response):
    return float(len(response))


def wrong(prompt, response):
    raise RuntimeError("no such judge")


def nothing(prompt, response):
    return float("nan")


def slow(prompt, response):
    time.sleep(30)


no_function = 3
"""


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(_model_folder(), tmp_path / "model"))


@cache
def _model_folder() -> Path:
    import tempfile

    return make_model_folder(Path(tempfile.mkdtemp()) / "model")


def prepared(name: str = "ppo", *overrides: str, **settings: Any) -> RunUnderCheck:
    experiment = load_experiment(name)

    def recompose(more: Sequence[str]):
        return compose(
            experiment,
            ["preset=tiny", *overrides, *more],
            reference=name,
            config_dir=config_dir(),
            cache_dir=Path.cwd() / "cache",
        )

    return RunUnderCheck(plan_run(recompose([]), experiment), recompose, **settings)


def model_keys(folder: Path) -> list[str]:
    return [f"models.{role}.path={folder}" for role in ("actor", "critic", "ref", "reward")]


def only(findings: Sequence[Finding]) -> Finding:
    [finding] = findings
    return finding


# ---------------------------------------------------------------- findings


def test_an_error_is_a_problem_and_what_needs_it_is_not_run() -> None:
    def fail(subject: str) -> list[Finding]:
        raise AssetError(f"{subject} is torn", remedy="Fetch it again.")

    def fine(subject: str) -> list[Finding]:
        return [Finding(Status.OK, subject)]

    checks = (Check("a", fail), Check("b", fine, ("a",)), Check("c", fine), Check("d", fine, ("b",)))
    found = list(run_checks(checks, "it"))
    assert [f.status for f in found] == [Status.PROBLEM, Status.SKIPPED, Status.OK, Status.SKIPPED]
    assert (found[0].message, found[0].remedy) == ("it is torn", "Fetch it again.")
    assert found[3].message == "needs what has a problem: b"


def test_a_healthy_run() -> None:
    report = examine(prepared("ppo", "launcher=inline"))
    assert {f.check for f in report.findings} >= {
        "memory",
        "rewards",
        "log-probabilities",
        "disk",
        "steps",
        "checkpoint",
    }
    assert {f.status for f in report.findings} == {Status.OK}, report.findings
    assert report.memory is not None
    assert not report.has_problem
    assert [h.what for h in report.histograms] == ["prompt tokens"]
    assert sum(n for _, _, n in report.histograms[0].bins) == 512


def test_missing_models_are_named_once(tmp_path: Path) -> None:
    report = examine(prepared("ppo", f"models.actor.path={tmp_path}/nothing"))
    problems = [f for f in report.findings if f.status is Status.PROBLEM]
    assert "there is no such folder" in only(problems).message
    assert report.has_problem
    assert report.memory is None
    assert "port" in {f.check for f in report.findings if f.status is Status.OK}


# ---------------------------------------------------------------- memory


def test_what_does_not_fit_comes_with_what_would() -> None:
    report = examine(prepared("dpo", device_memory_bytes=60_000_000))
    verdict = next(f for f in report.findings if f.check == "memory")
    assert verdict.status is Status.PROBLEM
    best = report.alternatives[0]
    assert best.fits
    assert best.peak_bytes <= 0.9 * 60_000_000
    assert " ".join(best.overrides) in verdict.remedy
    tried = prepared("dpo", *best.overrides)
    rows = data_checks.row_lengths(tried.dataset)
    again = doctor_memory.memory_plan(tried.plan, tried.models, rows, device=tried.device)
    assert doctor_memory.fullest(again, tried.device).needs == best.peak_bytes


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), ["n_mbs=2", "n_mbs=4", "n_mbs=16"]),
        (("cluster.n_devices_per_node=2", "allocation=p2"), ["n_mbs=8", "n_mbs=16", "n_mbs=64"]),
        (("cluster.n_devices_per_node=2", "allocation=p2", "n_mbs=2"), ["n_mbs=4", "n_mbs=8", "n_mbs=32"]),
    ],
)
def test_more_micro_batches_than_there_are_without_saying_so(overrides: tuple[str, ...], expected: list[str]) -> None:
    candidates = doctor_memory._candidates(prepared("dpo", *overrides).plan)
    assert [one for [one, *more] in candidates if one.startswith("n_mbs=") and not more] == expected


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("calls.actor_train.n_mbs=3",), ("calls.actor_train.n_mbs=6",)),
        (("calls.ref_inf.n_mbs=3",), ("n_mbs=2", "calls.ref_inf.n_mbs=6")),
        (("n_mbs=4", "calls.actor_train.n_mbs=4"), ("calls.actor_train.n_mbs=8",)),
        (("calls.actor_train.max_tokens_per_mb=64",), ()),
    ],
)
def test_calls_with_their_own_micro_batches_get_more(overrides: tuple[str, ...], expected: tuple[str, ...]) -> None:
    plan = prepared("dpo", *overrides).plan
    assert doctor_memory._more_micro_batches(plan, 2) == expected
    assert not expected or expected in doctor_memory._candidates(plan)


def test_nothing_helps_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_memory, "_candidates", lambda plan: [("n_mbs=4",), ("n_mbs=0",)])  # the last is refused
    report = examine(prepared("dpo", device_memory_bytes=1_000_000))
    verdict = next(f for f in report.findings if f.check == "memory")
    assert "No single setting is enough" in verdict.remedy
    assert [(one.overrides, one.fits) for one in report.alternatives] == [(("n_mbs=4",), False)]


def test_little_room_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_memory, "_candidates", lambda plan: [])
    tight = prepared("dpo")
    needs = doctor_memory.fullest(_memory(tight), tight.device).needs
    report = examine(replace(tight, device_memory_bytes=int(needs * 1.05)))
    verdict = next(f for f in report.findings if f.check == "memory")
    assert verdict.status is Status.WARNING
    assert "allocators and kernels" in verdict.message


def _memory(subject: RunUnderCheck):
    rows = data_checks.row_lengths(subject.dataset)
    return doctor_memory.memory_plan(subject.plan, subject.models, rows, device=subject.planned_device)


def test_rows_count_on_an_accelerator_up_to_their_limit() -> None:
    subject = prepared("ppo", "cluster.device_rows_gb=0.5")
    assert {usage.rows for by_rank in _memory(subject).calls.values() for usage in by_rank.values()} == {0}
    rows = data_checks.row_lengths(subject.dataset)
    memory = doctor_memory.memory_plan(subject.plan, subject.models, rows, device=torch.device("cuda"))
    assert {usage.rows for by_rank in memory.calls.values() for usage in by_rank.values()} == {500_000_000}


def test_generated_tokens_count_for_whoever_reads_them() -> None:
    loads = _memory(prepared("remax")).loads
    longest = max(prepared().dataset.prompt_lens)
    assert loads["greedy_rew_inf"].n_tokens == loads["rew_inf"].n_tokens == 64 * (longest + 16)
    loads = _memory(prepared("grpo", "n_seqs=4")).loads
    assert loads["actor_train"].n_tokens == 4 * 8 * (longest + 16)
    loads = _memory(prepared("sft", "n_seqs=1")).loads
    assert loads["actor_train"].n_tokens == max(map(max, prepared("sft").dataset.seqlens))


def test_evaluation_is_planned_too() -> None:
    plan = _memory(prepared("ppo", "eval.every_steps=1", "eval.n_responses=2", "eval.temperature=1"))
    assert plan.loads["eval_actor_gen"].n_tokens > plan.loads["actor_gen"].n_tokens


def test_memory_of_a_container_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "limit").write_text("1000000\n")
    monkeypatch.setattr(doctor_memory, "_CGROUP_LIMITS", (str(tmp_path / "limit"), str(tmp_path / "none")))
    assert doctor_memory.machine_memory() == 1_000_000
    assert doctor_memory.free_memory(torch.device("cpu")) == 1_000_000
    two = prepared("ppo", "cluster.n_devices_per_node=2")
    assert doctor_memory.device_capacity(two.config, torch.device("cpu")) == 500_000
    (tmp_path / "limit").write_text("max\n")
    assert doctor_memory.machine_memory() > 1_000_000
    assert doctor_memory.free_memory(torch.device("cuda", 1), lambda device: 10 + device.index) == 11
    monkeypatch.setattr(logprob_checks, "free_memory", lambda device: 1000)
    finding = only(logprob_checks.check_logprobs(two))
    assert finding.status is Status.SKIPPED
    assert "1.0 kB are free" in finding.message


# ---------------------------------------------------------------- tokenizers, templates, data


def test_a_tokenizer_that_changes_text(folder: Path) -> None:
    edit_json(folder / "tokenizer.json", normalizer={"type": "Lowercase"})
    finding = only(data_checks.check_tokenizers(prepared("ppo", *model_keys(folder))))
    assert finding.status is Status.WARNING
    assert "comes back as 'the quick" in finding.message


def test_keys_that_contradict_each_other_are_named(folder: Path) -> None:
    edit_json(folder / "config.json", rope_scaling={"rope_type": "linear", "factor": 2.0})
    fit, *findings = model_checks.check_models(prepared("ppo", *model_keys(folder)))
    assert fit.status is Status.OK
    assert all(finding.status is Status.WARNING for finding in findings)
    assert "rope_scaling and rope_parameters differ: rope_scaling is read" in findings[0].message


def test_stop_tokens_of_tokenizer_and_model(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [256, 258]}))
    finding = only(data_checks.check_stop_tokens(prepared("ppo", *model_keys(folder))))
    assert finding.status is Status.OK
    assert "258 (<|user|>)" in finding.message
    finding = only(data_checks.check_stop_tokens(prepared("ppo", "generation.stop_ids=[300]")))
    assert finding.status is Status.PROBLEM


@pytest.mark.parametrize("text", ["{", "[1]", "null", '{"eos_token_id": "x"}', '{"eos_token_id": [null, 1.5]}'])
def test_a_generation_config_that_names_no_token_is_not_read(folder: Path, text: str) -> None:
    (folder / "generation_config.json").write_text(text)
    assert only(data_checks.check_stop_tokens(prepared("ppo", *model_keys(folder)))).status is Status.OK


def test_a_check_that_breaks_does_not_hide_the_others() -> None:
    def breaks(subject: None) -> list[Finding]:
        raise ZeroDivisionError("by\nnothing")

    def works(subject: None) -> list[Finding]:
        return [Finding(Status.OK, "well")]

    broken, well = run_checks([Check("breaks", breaks), Check("works", works)], None)
    assert (broken.status, broken.message) == (Status.PROBLEM, "ZeroDivisionError: by nothing")
    assert "test_doctor.py:" in broken.remedy
    assert well.status is Status.OK


PROMPTED = "{%% if add_generation_prompt %%}<|assistant|>%s{%% endif %%}"
TURNS = "{%% for m in messages %%}<|{{ m['role'] }}|>{{ m['content'] }}%s{%% endfor %%}" + PROMPTED


@pytest.mark.parametrize(
    ("template", "status", "message"),
    [
        (None, Status.PROBLEM, "the tokenizer has none"),
        (TURNS % ("<|end|>", ""), Status.OK, "begin the"),
        (TURNS % ("~", ""), Status.WARNING, "no stop token"),
        (TURNS % ("<|end|>", "?"), Status.WARNING, "no beginning"),
        ("{{ messages[0]['role'] }}<|end|>", Status.PROBLEM, "loses text: 'What is two and three?' of the user"),
        ("{{ messages[0]['content'] }}<|end|>", Status.WARNING, "loses text: 'Five.' of the assistant"),
        ("{{ raise_exception('only so') }}", Status.PROBLEM, "chat template fails: only so"),
        ("{% for m in %}", Status.PROBLEM, "chat template fails: Expected an expression"),
    ],
)
def test_chat_templates(folder: Path, template: str | None, status: Status, message: str) -> None:
    tokenizer = load_tokenizer(str(folder))
    tokenizer.chat_template = template
    for file in ("chat_template.jinja", "tokenizer_config.json"):
        (folder / file).unlink(missing_ok=True)
    tokenizer.save_pretrained(folder)
    finding = only(data_checks.check_chat_template(prepared("ppo", *model_keys(folder), "dataset.chat_template=true")))
    assert finding.status is status, finding
    assert message in finding.message
    unused = only(data_checks.check_chat_template(prepared("ppo", *model_keys(folder))))
    assert unused.status is Status.OK


def test_messages_use_the_template(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": "hello"}]}]
    path = write_rows(tmp_path / "chat.jsonl", rows)
    finding = only(data_checks.check_chat_template(prepared("ppo", f"dataset.path={path}")))
    assert "not used" not in finding.message


def test_datasets_that_are_too_small_or_mostly_dropped(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": "a" * n} for n in (3, 4, 99, 99, 99)])
    few = prepared("ppo", f"dataset.path={path}", "n_seqs=4")
    finding = only(data_checks.check_dataset(few))
    assert (finding.status, "each row comes up to 2 times in it" in finding.message) == (Status.WARNING, True)
    finding = only(
        data_checks.check_dataset(prepared("ppo", f"dataset.path={path}", "n_seqs=2", "algorithm.n_minibatches=1"))
    )
    assert finding.status is Status.WARNING
    assert "2 rows, 3 dropped; prompts of 3 to 4 tokens" in finding.message
    assert longest_rows(few.config, few.kind).prompts == [32]
    held_out = prepared("ppo", "eval.every_steps=1")
    starts = [finding.message.partition(":")[0] for finding in data_checks.check_dataset(held_out)]
    assert starts == ["dataset.path=tiny", "eval.path=tiny"]


def test_histograms() -> None:
    [prompts, answers] = data_checks.histograms(prepared("rw").dataset)
    assert (prompts.what, answers.what) == ("prompt tokens", "answer tokens")
    assert sum(n for *_, n in answers.bins) == 2 * 512
    assert all(low <= high for low, high, _ in answers.bins)
    assert answers.bins[0][2] > 0 < answers.bins[-1][2]


def test_lengths_beyond_the_positions() -> None:
    finding = data_checks.check_lengths(prepared("ppo", "generation.max_new_tokens=2000"))
    assert {f.status for f in finding} == {Status.PROBLEM, Status.WARNING}
    assert "role 'actor' has 1024 positions" in finding[0].message
    assert "role 'critic' has 1024 positions, beyond which it was not trained" in finding[1].message


def test_vocabularies(folder: Path) -> None:
    keys = [*model_keys(folder), "models.ref.path=tiny"]
    assert only(data_checks.check_vocabulary(prepared("ppo", *keys))).status is Status.OK
    large = prepared("ppo")
    large.models["ref"] = tiny_config(300)
    finding = only(data_checks.check_vocabulary(large))
    assert (finding.status, "actor 260, critic 260, ref 300" in finding.message) == (Status.WARNING, True)


# ---------------------------------------------------------------- rewards and log-probabilities


def with_reward(tmp_path: Path, name: str, *overrides: str) -> RunUnderCheck:
    (tmp_path / "my_rewards.py").write_text(REWARDS)
    return prepared("ppo", f"algorithm.reward_function=my_rewards.py:{name}", *overrides)


def test_rewards_are_called(tmp_path: Path) -> None:
    finding = only(reward_checks.check_rewards(with_reward(tmp_path, "good")))
    assert finding.status is Status.OK
    assert "for 3 placeholder responses" in finding.message


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wrong", "no such judge"),
        ("nothing", "returned nan"),
        ("slow", "did not answer within 0.3 s"),
        ("no_function", "'my_rewards.py:no_function' is not a function"),
    ],
)
def test_rewards_that_fail(tmp_path: Path, name: str, message: str) -> None:
    subject = with_reward(tmp_path, name, "algorithm.reward_timeout_s=0.3")
    finding = only(list(run_checks((Check("rewards", reward_checks.check_rewards),), subject)))
    assert finding.status is Status.PROBLEM
    assert message in finding.message


def test_rewards_that_may_fail(tmp_path: Path) -> None:
    finding = only(reward_checks.check_rewards(with_reward(tmp_path, "wrong", "algorithm.reward_on_failure=zero")))
    assert finding.status is Status.WARNING
    assert "failed for 3 of 3" in finding.message


def test_experiments_without_functions() -> None:
    assert "no call" in only(reward_checks.check_rewards(prepared("dpo"))).message
    assert "no call" in only(reward_checks.check_rewards(prepared("dapo", "algorithm.reward_function=null"))).message
    assert "nothing is generated" in only(logprob_checks.check_logprobs(prepared("dpo"))).message
    assert only(logprob_checks.check_logprobs(prepared(loads_models=False))).status is Status.SKIPPED


def test_generation_and_training_that_disagree(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = DecoderEngine.forward

    def shifted(self: DecoderEngine, *args: Any, **kwargs: Any) -> torch.Tensor:
        return forward(self, *args, **kwargs) + 0.01

    monkeypatch.setattr(DecoderEngine, "forward", shifted)
    finding = only(logprob_checks.check_logprobs(prepared()))
    assert finding.status is Status.WARNING
    assert "at most 0.01 nats" in finding.message
    monkeypatch.setattr(DecoderEngine, "forward", lambda *a, **k: forward(*a, **k) * float("nan"))
    assert only(logprob_checks.check_logprobs(prepared())).status is Status.WARNING


@pytest.mark.parametrize(
    "overrides", [["precision=bf16"], ["generation.temperature=0.5"], ["models.actor.lora.rank=4"]]
)
def test_generation_and_training_agree(overrides: list[str]) -> None:
    assert only(logprob_checks.check_logprobs(prepared("ppo", *overrides))).status is Status.OK


# ---------------------------------------------------------------- the machine


def test_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    assert only(machine_checks.check_port(prepared())).status is Status.OK
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        finding = only(machine_checks.check_port(prepared("ppo", f"cluster.master_port={port}")))
    assert finding.status is Status.PROBLEM
    assert f"cluster.master_port={port}: " in finding.message
    assert only(machine_checks.check_port(prepared("ppo", f"cluster.master_port={port}"))).status is Status.OK


def test_other_work_on_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    assert only(machine_checks.check_load(prepared())).status is Status.OK
    monkeypatch.setattr(machine_checks, "available_cores", lambda: 8)
    monkeypatch.setattr(machine_checks, "cores_of_others", lambda: 3.0)
    finding = only(machine_checks.check_load(prepared()))
    assert (finding.status, finding.message) == (Status.WARNING, "other work takes 3.0 of 8 cores now")
    assert only(machine_checks.check_load(prepared("ppo", "cluster.device=cuda"))).status is Status.OK


def test_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    regular = prepared("ppo", "save.every_steps=1", "save.keep=3")
    assert "4 at most exist at a time" in only(machine_checks.check_disk(regular)).message
    usage = shutil.disk_usage(".")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1_000_000))
    finding = only(machine_checks.check_disk(regular))
    assert finding.status is Status.PROBLEM
    assert "1.0 MB free" in finding.message
    assert only(machine_checks.check_disk(prepared("gen"))).status is Status.OK


def test_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_checks, "_is_installed", lambda module: module == "pyarrow")
    finding = only(machine_checks.check_packages(prepared("ppo", "track=[wandb]", "models.actor.backend=deepspeed")))
    assert finding.status is Status.PROBLEM
    assert finding.message == "not installed, but needed: wandb, deepspeed"
    assert finding.remedy == "pip install 'realrl[track,deepspeed]'"
    assert only(machine_checks.check_packages(prepared("dpo"))).status is Status.OK


def test_devices() -> None:
    assert only(machine_checks.check_devices(prepared("ppo", "cluster.n_devices_per_node=4"))).status is Status.OK
    nodes = only(machine_checks.check_devices(prepared("ppo", "cluster.n_nodes=2")))
    assert (nodes.status, "n_nodes=2, but launcher=local starts" in nodes.message) == (Status.PROBLEM, True)
    many = prepared("ppo", "cluster.n_nodes=2", "launcher=external", "cluster.master_address=10.9.8.7")
    assert only(machine_checks.check_devices(many)).status is Status.OK
    with pytest.raises(UsageError, match=r"cannot listen on 10\.9\.8\.7"):
        list(machine_checks.check_port(many))
    elsewhere = prepared("ppo", "cluster.n_nodes=2", device_memory_bytes=80 * 10**9)
    assert only(machine_checks.check_devices(elsewhere)).status is Status.WARNING
    if not torch.cuda.is_available():
        gpu = prepared("ppo", "cluster.device=cuda")
        finding = only(list(run_checks((Check("devices", machine_checks.check_devices),), gpu)))
        assert (finding.status, "CUDA device" in finding.message) == (Status.PROBLEM, True)


def test_machines_of_a_job(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2"}.items():
        monkeypatch.setenv(name, value)
    three, two = (prepared("ppo", "launcher=slurm", f"cluster.n_nodes={n}") for n in (3, 2))
    with pytest.raises(UsageError, match="the job of SLURM has 2 machines, and the plan needs 3") as refused:
        machine_checks.check_devices(three)
    assert refused.value.remedy == "Ask for 3, or use cluster.n_nodes=2."
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="starts agents by srun, and there is no such program here"):
        machine_checks.check_devices(two)
    (tmp_path / "srun").touch(mode=0o700)
    assert only(machine_checks.check_devices(two)).status is Status.OK
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    with pytest.raises(UsageError, match="launcher=slurm starts agents itself, and SLURM has started this 2 times"):
        machine_checks.check_devices(two)


def test_workers_that_share_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    four = ("cluster.n_devices_per_node=4", "cluster.shares_devices=true")
    finding = only(machine_checks.check_devices(prepared("ppo", *four)))
    assert finding.status is Status.OK
    assert "goes through host memory (cluster.shares_devices, for tests)" in finding.message
    shared = prepared("ppo", *four, "cluster.device=cuda", device_memory_bytes=80 * 10**9)
    shared.__dict__["found"] = Accelerators(1, (9, 0))
    finding = only(machine_checks.check_devices(shared))
    assert finding.message.startswith("4 workers share 1 of type cuda; ")
    cuda, given = torch.device("cuda"), 80 * 10**9
    for n_devices, share in ((0, given // 4), (1, given // 4), (2, given // 2), (3, given // 2), (4, given)):
        monkeypatch.setattr(doctor_memory, "device_count", lambda n=n_devices: n)
        assert doctor_memory.device_capacity(shared.config, cuda, given) == share
        assert doctor_memory.device_capacity(prepared("ppo", four[0]).config, cuda, given) == given


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), CUDA_CONTEXT),
        (("cluster.n_devices_per_node=2",), CUDA_CONTEXT + RING_CHANNELS * CONNECTION),
        (("cluster.n_devices_per_node=2", "cluster.shares_devices=true"), CUDA_CONTEXT),
    ],
)
def test_the_context_and_the_connections_count_on_cuda(overrides: tuple[str, ...], expected: int) -> None:
    subject = prepared("dpo", *overrides)
    rows = data_checks.row_lengths(subject.dataset)
    for device, runtime in (("cuda", expected), ("cpu", 0)):
        memory = doctor_memory.memory_plan(subject.plan, subject.models, rows, device=torch.device(device))
        assert {usage.runtime for by_rank in memory.calls.values() for usage in by_rank.values()} == {runtime}


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without the device")
def test_a_plan_for_devices_that_are_not_here() -> None:
    report = examine(prepared("dpo", "cluster.device=cuda"))
    found = {finding.check: finding for finding in report.findings}
    assert found["devices"].status is Status.PROBLEM
    assert found["memory"].status is Status.SKIPPED
    assert found["memory"].remedy == "Give --device-memory GB."
    planned = prepared("ppo", "launcher=inline", "cluster.device=cuda", device_memory_bytes=80_000_000_000)
    report = examine(planned)
    found = {finding.check: finding for finding in report.findings}
    assert found["devices"].status is Status.WARNING
    assert found["log-probabilities"].status is Status.SKIPPED
    assert found["memory"].status is Status.OK
    assert not report.has_problem
    here = _memory(prepared("ppo", "precision=bf16")).calls["actor_gen"][0]
    there = _memory(prepared("ppo", "precision=bf16", "cluster.device=cuda")).calls["actor_gen"][0]
    cache = here.cache if has_bf16_kernels() else here.cache / 2  # else the CPU generates in float32
    n_layers = 4
    assert there.cache == (cache * (2 * n_layers + 1) / (2 * n_layers) if why_not() is None else cache)


def test_what_a_run_refuses_at_its_start_is_a_problem(tmp_path: Path) -> None:
    report = examine(prepared("sft", f"run_dir={tmp_path}/run", f"resume={tmp_path}", loads_models=False))
    found = next(f for f in report.findings if f.check == "checkpoint")
    assert found.status is Status.PROBLEM


def test_a_checkpoint_that_a_resumed_run_could_not_use_is_told(tmp_path: Path) -> None:
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    (tmp_path / "run/checkpoints/latest").symlink_to("step_9")
    [finding] = model_checks.check_checkpoint(prepared("sft", f"run_dir={tmp_path}/run", "resume=auto"))
    assert finding.status is Status.WARNING
    assert "latest points to step_9, which is not there" in finding.message


def test_placeholders_have_what_a_call_reads() -> None:
    subject = prepared("self_play")
    calls = {mfc.name: mfc for mfc in subject.plan.mfcs}
    made = reward_checks._placeholders(subject, calls["opponent_rew_inf"])
    assert set(made.keys) == {"input_ids", "prompt_mask", "metadata"}
    n_responses = subject.config.generation.n_responses
    assert [len(one) for one in made.seqlens["input_ids"]] == [n_responses]
    assert len(reward_checks._placeholders(prepared("ppo"), calls["rew_inf"])) == 3
