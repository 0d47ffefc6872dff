"""Whole GRPO steps of realrl against TRL's GRPOTrainer: tokens per second, peak memory, and equal losses.

Both train the same weights on the same prompts with the same group size, response lengths, rewards, loss (TRL's
default: clipped ratios, mean over the tokens of the batch, no KL), optimizer, dtype, threads and micro-batches; one
update a step. Each side samples its own responses, always of full length, so that both process equally many tokens. TRL
runs without gradient checkpointing, logging and saving, and generates with its KV cache.

Every run is a process of its own, realrl's one started by its command line. Runs are interleaved, so that a neighbour's
load hits all of them; the table shows medians over the pairs, and the ratios those of single pairs. Memory is the sum
over the processes of a run of the most that each has had resident.

Then both take two steps on the same given responses of different lengths: their losses, gradient norms and rewards must
agree.

    pip install -e .[trl] && python scripts/fetch_assets.py
    python scripts/bench_vs_trl.py
    python scripts/bench_vs_trl.py --launchers inline local --pairs 5 --threads 2 --precision bf16
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

REPLAY = "BENCH_VS_TRL_REPLAY"  # environment variable: file of given responses
LR = 1e-6
BETAS, EPS = (0.9, 0.999), 1e-8
TOLERANCE = 1e-4
POLL_S = 0.25


@dataclass(frozen=True)
class Task:
    """Settings of one run.

    Attributes:
        model: Hugging Face folder.
        prompts: JSON lines with the field `prompt`, in the order of training; n_prompts of them.
        replay: file of given responses, instead of sampling; empty for none.
        n_mbs: micro-batches of the update.
        kl: coefficient of the KL to the reference in the loss.
    """

    model: str
    prompts: str
    n_prompts: int
    n_responses: int
    new_tokens: int
    n_steps: int
    n_mbs: int
    precision: str
    kl: float
    replay: str = ""


@dataclass(frozen=True)
class Step:
    """One step of a run as it reports it; seconds are since the end of the step before, and of realrl's calls."""

    seconds: float
    n_tokens: float
    loss: float
    grad_norm: float
    reward: float
    calls_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """All steps, and the peak memory of all processes."""

    steps: tuple[Step, ...]
    memory_gb: float

    @property
    def tokens_per_s(self) -> float:
        """Throughput over the steps after the first, which warms up."""
        timed = self.steps[1:]
        return sum(s.n_tokens for s in timed) / sum(s.seconds for s in timed)


def main() -> None:
    args = parse_args()
    if args.side is not None:
        run_trl(Task(**json.loads(args.side)), args.report)
        return
    with tempfile.TemporaryDirectory() as folder:
        report = bench(args, Path(folder))
    args.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"written to {args.out}")


def bench(args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Run all comparisons that the options select, and print their results."""
    model = find_model() if args.model is None else args.model
    prompts, replay = write_prompts(scratch, model, args)
    shapes = (str(model), str(prompts), args.n_prompts, args.n_responses, args.new_tokens)
    timed = Task(*shapes, n_steps=1 + args.steps, n_mbs=args.n_mbs, precision=args.precision, kl=args.kl)
    given = Task(*shapes, n_steps=2, n_mbs=args.n_mbs, precision=args.precision, kl=args.kl, replay=str(replay))
    print(f"{args.n_prompts} prompts x {args.n_responses} responses x {args.new_tokens} tokens, {args.precision}, "
          f"{args.threads} threads, {args.n_mbs} micro-batches; {model.name}", flush=True)  # fmt: skip
    report: dict[str, Any] = {
        **{key: value for key, value in vars(args).items() if isinstance(value, (int, float, str)) and key != "report"},
        "model": model.name,
        "cpu": platform.processor() or platform.machine(),
    }
    if not args.skip_losses:
        report["losses"] = compare_losses(given, scratch, args.threads)
    if args.pairs:
        report["runs"] = compare_speed(timed, scratch, args)
    return report


def compare_speed(task: Task, scratch: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Run both sides in turns; prints a line for each run and a table."""
    names = [f"realrl ({launcher})" for launcher in args.launchers]
    runs: dict[str, list[Run]] = {name: [] for name in ("trl", *names)}
    for pair in range(1, args.pairs + 1):
        for name, launcher in zip(names, args.launchers, strict=True):
            runs[name].append(start_realrl(task, launcher, scratch / f"{launcher}{pair}", args.threads))
            print_run(pair, name, runs[name][-1])
        runs["trl"].append(start_trl(task, scratch / f"trl{pair}.json", args.threads))
        print_run(pair, "trl", runs["trl"][-1])
    table: dict[str, Any] = {}
    print(f"\n{'':<18}{'tokens/s':>10}{'peak GB':>10}{'speed / TRL':>14}{'memory / TRL':>14}")
    for name, mine in runs.items():
        pairs = list(zip(mine, runs["trl"], strict=True))
        row = {
            "tokens_per_s": statistics.median(run.tokens_per_s for run in mine),
            "memory_gb": statistics.median(run.memory_gb for run in mine),
            "speed_ratio": statistics.median(a.tokens_per_s / b.tokens_per_s for a, b in pairs),
            "memory_ratio": statistics.median(a.memory_gb / b.memory_gb for a, b in pairs),
        }
        print(f"{name:<18}{row['tokens_per_s']:>10.1f}{row['memory_gb']:>10.2f}"
              f"{row['speed_ratio']:>13.2f}x{row['memory_ratio']:>13.2f}x", flush=True)  # fmt: skip
        table[name] = {**row, "steps": [[vars(step) for step in run.steps] for run in mine]}
    return table


def print_run(pair: int, name: str, run: Run) -> None:
    steps = ", ".join(f"{step.seconds:.1f}" for step in run.steps)
    print(f"pair {pair}  {name:<18}{run.tokens_per_s:>8.1f} tokens/s {run.memory_gb:>6.2f} GB   steps (s): {steps}",
          flush=True)  # fmt: skip


def compare_losses(task: Task, scratch: Path, threads: int) -> list[dict[str, float]]:
    """Compare two steps on the same responses; the second follows an update, so its policy is not the sampling one.

    Raises:
        SystemExit: they do not agree.
    """
    ours = start_realrl(task, "inline", scratch / "replay", threads)
    theirs = start_trl(task, scratch / "replay.json", threads)
    rows = []
    print(f"{'':<10}{'loss':>14}{'TRL':>14}{'gradient norm':>16}{'TRL':>14}{'reward':>12}{'TRL':>12}")
    for number, (a, b) in enumerate(zip(ours.steps, theirs.steps, strict=True), start=1):
        print(f"step {number:<5}{a.loss:>14.7f}{b.loss:>14.7f}{a.grad_norm:>16.6f}{b.grad_norm:>14.6f}"
              f"{a.reward:>12.6f}{b.reward:>12.6f}", flush=True)  # fmt: skip
        row = {"loss": a.loss, "trl_loss": b.loss, "grad_norm": a.grad_norm, "trl_grad_norm": b.grad_norm}
        rows.append({**row, "reward": a.reward, "trl_reward": b.reward})
    first = rows[0]
    is_close = abs(first["loss"] - first["trl_loss"]) <= TOLERANCE
    if task.precision == "fp32" and not is_close:
        raise SystemExit(f"the losses at step one differ by more than {TOLERANCE}")
    return rows


# ---------------------------------------------------------------- the same input for both


def find_model() -> Path:
    """SmolLM2-135M in the asset cache.

    Raises:
        SystemExit: it is not there.
    """
    cache_dir = Path(os.environ.get("REALRL_CACHE", "~/.cache/realrl")).expanduser()
    for config in sorted(cache_dir.glob("**/config.json")):
        if "smollm2" in str(config.parent).lower():
            return config.parent
    raise SystemExit("there is no SmolLM2 in the asset cache; run python scripts/fetch_assets.py, or give --model")


def write_prompts(scratch: Path, model: Path, args: argparse.Namespace) -> tuple[Path, Path]:
    """Worked additions before one to solve, of about `prompt_tokens` tokens; and responses of different lengths."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    numbers = random.Random(0)
    rows, given = [], []
    for i in range(args.n_prompts):
        text = ""
        while len(tokenizer(text)["input_ids"]) < args.prompt_tokens - 24:
            a, b = numbers.randint(10, 99), numbers.randint(10, 99)
            text += f"Anna has {a} apples and gets {b} more. How many does she have? She has {a + b}.\n"
        text += f"Tom has {numbers.randint(10, 99)} pears and gets {i} more. How many does he have?"
        rows.append({"id": f"p{i}", "prompt": text})
        answers = []
        for k in range(args.n_responses):
            answer = f" He has {numbers.randint(10, 99)} pears, because" + " he counts them again and" * args.new_tokens
            n_tokens = args.new_tokens * (k + 1) // args.n_responses
            answers.append(tokenizer(answer)["input_ids"][: max(1, n_tokens)])
        given.append({"prompt": text, "prompt_ids": tokenizer(text)["input_ids"], "responses": answers})
    prompts, replay = scratch / "prompts.jsonl", scratch / "replay_responses.json"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    replay.write_text(json.dumps(given), encoding="utf-8")
    return prompts, replay


def reward(prompt_ids: Sequence[int], response_ids: Sequence[int]) -> float:
    """The share of tokens that are new."""
    return len(set(response_ids)) / max(1, len(response_ids))


@cache
def given_responses() -> list[dict[str, Any]]:
    """Prompts and their responses, from the file that the environment names."""
    rows: list[dict[str, Any]] = json.loads(Path(os.environ[REPLAY]).read_text(encoding="utf-8"))
    return rows


# ---------------------------------------------------------------- realrl


def start_realrl(task: Task, launcher: str, run_dir: Path, threads: int) -> Run:
    """Run `realrl run grpo` in a process of its own or, with launcher=local, in several."""
    here = Path(__file__).resolve()
    settings: dict[str, Any] = {
        "steps": task.n_steps,
        "n_seqs": task.n_prompts,
        "n_mbs": task.n_mbs,
        "precision": task.precision,
        "launcher": launcher,
        "run_dir": f"'{run_dir}'",
        "save.at_end": "false",
        "cluster.device": "cpu",
        "dataset.path": f"'{task.prompts}'",
        "dataset.shuffle": "false",
        "dataset.max_prompt_tokens": 4096,
        "generation.n_responses": task.n_responses,
        "generation.max_new_tokens": task.new_tokens,
        "generation.min_new_tokens": task.new_tokens,
        "algorithm.reward_function": f"'{here}:reward'",
        "algorithm.loss_normaliser": "tokens",
        "algorithm.kl_loss_coef": task.kl,
        "models.actor.path": f"'{task.model}'",
        "models.actor.optimizer.lr": LR,
        "models.actor.optimizer.schedule": "constant",
        "models.actor.optimizer.warmup_fraction": 0,
        "models.actor.optimizer.weight_decay": 0,
        "models.actor.optimizer.betas": f"[{BETAS[0]},{BETAS[1]}]",
        "models.actor.optimizer.eps": EPS,
    }
    if task.replay:
        settings["algorithm.sampler"] = f"'{here}:replay'"
        settings["generation.min_new_tokens"] = 0
    command = [sys.executable, "-m", "realrl", "run", "grpo", *(f"{key}={value}" for key, value in settings.items())]
    memory_gb = watch(command, threads, {REPLAY: task.replay})
    steps = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return Run(tuple(_as_step(step, task.kl) for step in steps), memory_gb)


def _as_step(metrics: Mapping[str, float], kl: float) -> Step:
    return Step(
        seconds=metrics["time_s/step"],
        n_tokens=metrics["n_tokens"],
        loss=metrics["actor/pg_loss"] + kl * metrics.get("actor/kl_loss", 0.0),
        grad_norm=metrics["actor/grad_norm"],
        reward=metrics["reward/mean"],
        calls_s={name: seconds for name, seconds in metrics.items() if name.startswith("time_s/")},
    )


def replay(model: Any, prompts: Any, ctx: Any) -> Any:
    """Sampler: the given responses, with the log-probabilities that the model gives them."""
    import torch

    from realrl.algo.api import GenerationResult
    from realrl.algo.policy.actor import PolicyActor
    from realrl.data.sample import SequenceSample
    from realrl.sched.messages import KeySchema, Per

    by_prompt = {tuple(row["prompt_ids"]): row["responses"] for row in given_responses()}
    tokens: list[list[torch.Tensor]] = []
    masks: list[list[torch.Tensor]] = []
    responses: list[torch.Tensor] = []
    for prompt in prompts.samples("prompt_ids"):
        mine = [torch.tensor(response) for response in by_prompt[tuple(prompt.tolist())]]
        responses += mine
        tokens.append([torch.cat([prompt, response]) for response in mine])
        masks.append([torch.arange(len(prompt) + len(response)) < len(prompt) for response in mine])
    batch = SequenceSample.from_lists(
        prompts.ids,
        {
            "input_ids": (KeySchema("int64", Per.TOKEN), tokens),
            "prompt_mask": (KeySchema("bool", Per.TOKEN), masks),
        },
    )
    found = PolicyActor().inference(model, batch, ctx)["logprobs"]
    ends = torch.tensor([len(sequence) - 1 for sample in tokens for sequence in sample]).cumsum(0).tolist()
    logprobs = [found[end - len(response) : end] for end, response in zip(ends, responses, strict=True)]
    return GenerationResult(responses, logprobs, logprobs, [True] * len(responses))


# ---------------------------------------------------------------- TRL


def start_trl(task: Task, report: Path, threads: int) -> Run:
    """Run this file again, in a process that imports TRL and nothing of realrl."""
    command = [sys.executable, __file__, "--side", json.dumps(vars(task)), "--report", str(report)]
    memory_gb = watch(command, threads, {REPLAY: task.replay})
    steps = json.loads(report.read_text(encoding="utf-8"))
    return Run(tuple(Step(**step) for step in steps), memory_gb)


def run_trl(task: Task, report: Path) -> None:
    """Run all steps of TRL's trainer in this process."""
    import datasets
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    steps: list[dict[str, float]] = []
    losses: list[float] = []
    norms: list[float] = []

    class Trainer(GRPOTrainer):  # type: ignore[misc]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            losses.append(float(loss.detach()))  # of one micro-batch, over the tokens of the batch
            return loss

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.started_s, self.n_tokens = time.perf_counter(), 0.0

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            now_s, n_tokens = time.perf_counter(), float(state.num_input_tokens_seen)
            steps.append({"seconds": now_s - self.started_s, "n_tokens": n_tokens - self.n_tokens})
            self.started_s, self.n_tokens = now_s, n_tokens

    def score(prompts: Any, completions: Any, completion_ids: Any, **_: Any) -> list[float]:
        return [reward([], ids) for ids in completion_ids]

    rows = [json.loads(line) for line in Path(task.prompts).read_text(encoding="utf-8").splitlines()]
    trainer = Trainer(
        model=task.model,
        reward_funcs=score,
        args=trl_config(task, str(report.with_suffix(""))),
        train_dataset=datasets.Dataset.from_list([{"prompt": row["prompt"]} for row in rows]),
        callbacks=[Clock()],
        rollout_func=given_rollout if task.replay else None,
    )
    clip = trainer.accelerator.clip_grad_norm_
    trainer.accelerator.clip_grad_norm_ = lambda *args, **kwargs: _noted(clip(*args, **kwargs), norms)
    rewards: list[float] = trainer._metrics["train"]["reward"]
    trainer.train()
    per_step = len(losses) // len(steps)
    for i, step in enumerate(steps):
        step["loss"] = sum(losses[i * per_step : (i + 1) * per_step])
        step["grad_norm"], step["reward"] = norms[i], rewards[i]
    report.write_text(json.dumps(steps), encoding="utf-8")


def trl_config(task: Task, folder: str) -> Any:
    """The settings of realrl's run; the others are those that are fastest on a CPU."""
    from trl import GRPOConfig

    n_rows = task.n_prompts * task.n_responses
    return GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=task.precision == "bf16",
        model_init_kwargs={"dtype": "float32"},
        gradient_checkpointing=False,
        per_device_train_batch_size=n_rows // task.n_mbs,
        gradient_accumulation_steps=task.n_mbs,
        num_generations=task.n_responses,
        max_completion_length=task.new_tokens,
        generation_kwargs={"min_new_tokens": task.new_tokens},
        beta=task.kl,
        max_steps=task.n_steps,
        shuffle_dataset=False,
        learning_rate=LR,
        lr_scheduler_type="constant",
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        adam_epsilon=EPS,
        weight_decay=0.0,
        max_grad_norm=1.0,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def given_rollout(prompts: Sequence[str], _: Any) -> Mapping[str, Any]:
    """Rollout function for TRL: a prompt's k-th occurrence gets its k-th given response."""
    rows = {row["prompt"]: row for row in given_responses()}
    n_seen: dict[str, int] = {}
    prompt_ids, completion_ids = [], []
    for prompt in prompts:
        row, k = rows[prompt], n_seen.get(prompt, 0)
        n_seen[prompt] = k + 1
        prompt_ids.append(row["prompt_ids"])
        completion_ids.append(row["responses"][k])
    logprobs = [[0.0] * len(ids) for ids in completion_ids]  # not used: generation and training do not differ
    return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": logprobs}


def _noted(value: Any, values: list[float]) -> Any:
    values.append(float(value))
    return value


# ---------------------------------------------------------------- processes


def watch(command: Sequence[str], threads: int, variables: Mapping[str, str]) -> float:
    """Run a command to its end; returns the peak memory of it and its descendants, in 1e9 bytes.

    Raises:
        SystemExit: it failed; its output is shown.
    """
    environment = {**os.environ, **variables, "OMP_NUM_THREADS": str(threads), "TRL_EXPERIMENTAL_SILENCE": "1"}
    environment = {**environment, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        peaks: dict[int, int] = {}
        done = threading.Event()
        watcher = threading.Thread(target=_watch_memory, args=(process.pid, peaks, done))
        watcher.start()
        code = process.wait()
        done.set()
        watcher.join()
        if code:
            output.seek(0)
            raise SystemExit(f"{' '.join(command)}\nfailed with exit code {code}:\n{output.read()[-8000:]}")
    return sum(peaks.values()) / 1e9


def _watch_memory(root: int, peaks: dict[int, int], done: threading.Event) -> None:
    """Peak resident bytes by process, until `done`."""
    while not done.wait(POLL_S):
        for pid in _with_descendants(root):
            try:
                status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
            except OSError:  # it has ended
                continue
            for line in status.splitlines():
                if line.startswith("VmHWM:"):
                    peaks[pid] = max(peaks.get(pid, 0), int(line.split()[1]) * 1024)


def _with_descendants(root: int) -> list[int]:
    found = [root]
    for pid in found:
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            try:
                found += map(int, children.read_text(encoding="ascii").split())
            except OSError:  # it has ended
                continue
    return found


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="Hugging Face folder; default: SmolLM2-135M of the asset cache")
    parser.add_argument("--n-prompts", type=int, default=4)
    parser.add_argument("--n-responses", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=96, help="of each prompt, about")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--n-mbs", type=int, default=4, help="micro-batches of both")
    parser.add_argument("--steps", type=int, default=2, help="timed steps of a run, after one that warms up")
    parser.add_argument("--pairs", type=int, default=3, help="0: only compare losses")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--kl", type=float, default=0.0, help="coefficient of the KL to a reference in the loss")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--launchers", nargs="+", choices=("inline", "local"), default=["inline"])
    parser.add_argument("--skip-losses", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("bench_vs_trl.json"))
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.n_prompts % args.n_mbs:
        parser.error("--n-mbs must divide --n-prompts: groups stay together")
    return args


if __name__ == "__main__":
    main()
