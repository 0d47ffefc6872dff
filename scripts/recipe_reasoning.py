#!/usr/bin/env python
"""SmolLM2 learns two reasoning-gym tasks with GRPO, and what that changed on held-out questions.

    before     the untrained model's rewards on held-out questions
    train      realrl run grpo preset=reasoning
    after      the trained model on the same questions, with the same random numbers

Held-out questions have another seed than those of training, and none that training has. A stage that is complete is not
run again. Needs the extra rewards, and `scripts/fetch_assets.py` to have run.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

SEED = 20_141
HELD_OUT_SEED = 1_000_003


@dataclass(frozen=True)
class Answers:
    """A model's answers to the held-out questions of one task.

    Attributes:
        rewards: score of each answer by the task's verifier; 1 is right.
        texts: the answers.
    """

    task: str
    rewards: list[float]
    texts: list[str]


def main() -> int:
    """Run all stages; returns the exit code of training if that fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/reasoning"), help="run folder (default: %(default)s)")
    parser.add_argument(
        "--questions", type=int, default=200, help="held-out questions of each task (default: %(default)s)"
    )
    parser.add_argument("--only-before", action="store_true", help="look at the untrained model and stop")
    options, overrides = parser.parse_known_args()
    config = _config(overrides)
    options.out.mkdir(parents=True, exist_ok=True)
    before = _evaluated(config["models"]["actor"]["path"], config, options.out / "before.json", options.questions)
    if options.only_before:
        print_answers(before, before)
        return 0
    run_dir = options.out / "grpo"
    command = ["-m", "realrl", "run", "grpo", "preset=reasoning", f"run_dir={run_dir}", "resume=auto", *overrides]
    if _steps_done(run_dir) < config["steps"]:
        exit_code = subprocess.run([sys.executable, *command], check=False).returncode
        if exit_code:
            return exit_code
    trained = str(run_dir / "checkpoints/latest/actor")
    after = _evaluated(trained, config, options.out / "after.json", options.questions)
    print_answers(before, after)
    return 0


def _config(overrides: Sequence[str]) -> dict[str, Any]:
    """The configuration of the training run."""
    from realrl.config.compose import compose
    from realrl.experiment.discovery import config_dir, load_experiment
    from realrl.files import cache_dir

    given = ["preset=reasoning", *overrides]
    config = compose(load_experiment("grpo"), given, config_dir=config_dir(), cache_dir=cache_dir())
    return config.model_dump(mode="json")


def _steps_done(run_dir: Path) -> int:
    manifest = run_dir / "checkpoints/latest/state/manifest.json"
    return int(json.loads(manifest.read_text(encoding="utf-8"))["step"]) if manifest.exists() else 0


# ---------------------------------------------------------------- evaluation


def _evaluated(model: str, config: dict[str, Any], path: Path, n_questions: int) -> list[Answers]:
    """The model's answers, read from the file if it has them already."""
    if not path.exists():
        print(f"{model} on {n_questions} held-out questions of each task", flush=True)
        answers = evaluate(model, config, n_questions)
        path.write_text(json.dumps([asdict(part) for part in answers], indent=1), encoding="utf-8")
    return [Answers(**part) for part in json.loads(path.read_text(encoding="utf-8"))]


def evaluate(model: str, config: dict[str, Any], n_questions: int) -> list[Answers]:
    """Sample one answer to each held-out question, as training samples them.

    Args:
        model: folder in Hugging Face format.
        config: configuration of the run, with tasks, limits and sampling.
        n_questions: number of questions of each task.
    """
    import torch

    from realrl.config.schema import GenerationConfig
    from realrl.data.sample import SequenceSample
    from realrl.data.tokenizer import load_tokenizer
    from realrl.engine.decoder_engine import DecoderEngine
    from realrl.model.files.hf import load_model
    from realrl.rewards.verify_reasoning import reasoning_gym
    from realrl.sched.messages import KeySchema, Per

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", len(os.sched_getaffinity(0)))))
    tokenizer = load_tokenizer(model)
    engine = DecoderEngine(load_model(Path(model), head="lm"), role="actor")
    generation = GenerationConfig(**{**config["generation"], "n_responses": 1})
    found = []
    for task, rows in held_out(config["dataset"]["path"], n_questions).items():
        prompts = [torch.tensor(tokenizer.encode(row["prompt"], add_special_tokens=False)) for row in rows]
        ids = tuple(str(i) for i in range(len(rows)))
        batch = SequenceSample.from_lists(ids, {"prompt_ids": (KeySchema("int64", Per.TOKEN), [[p] for p in prompts])})
        result = engine.generate(batch, generation, seed=SEED, step=0, eos_id=tokenizer.eos_token_id)
        texts = [tokenizer.decode(response, skip_special_tokens=True) for response in result.responses]
        rewards = [reasoning_gym("", text, row) for text, row in zip(texts, rows, strict=True)]
        found.append(Answers(task, rewards, texts))
    return found


def held_out(path: str, n_questions: int) -> dict[str, list[dict[str, Any]]]:
    """Task -> rows with questions that training does not have.

    Args:
        path: path of the training data, ``reasoning_gym:...``.
        n_questions: number of questions of each task; fewer if there are fewer.
    """
    from realrl.data.reasoning_tasks import task_rows

    base = path.partition("?")
    others = [part for part in base[2].split("&") if part.partition("=")[0] not in ("size", "seed")]
    elsewhere = "&".join([f"size={20 * n_questions}", f"seed={HELD_OUT_SEED}", *others])
    seen = {row.fields["prompt"] for row in task_rows(path)}
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in task_rows(f"{base[0]}?{elsewhere}"):
        task = rows.setdefault(row.fields["reasoning_gym"]["task"], [])
        if row.fields["prompt"] not in seen and len(task) < n_questions:
            seen.add(row.fields["prompt"])
            task.append(dict(row.fields))
    return rows


# ---------------------------------------------------------------- report


def print_answers(before: Sequence[Answers], after: Sequence[Answers]) -> None:
    """Print the table and some answers."""
    console = Console(width=None if Console().is_terminal else 118)
    table = Table(title="\nreward on held-out questions, mean ± standard error", title_justify="left")
    for column in ("task", "questions", "before", "after", "gain", "right before", "right after"):
        table.add_column(column, justify="left" if column == "task" else "right")
    for old, new in zip(before, after, strict=True):
        gains = [b - a for a, b in zip(old.rewards, new.rewards, strict=True)]
        right = [f"{sum(r > 0.99 for r in part.rewards) / len(part.rewards):.0%}" for part in (old, new)]
        numbers = (_mean(old.rewards), _mean(new.rewards), _mean(gains))
        table.add_row(old.task, str(len(old.rewards)), *numbers, *right)
    console.print(table)
    for old, new in zip(before, after, strict=True):
        for i in range(3):
            console.print(f"  {old.task}: before {old.texts[i]!r}, after {new.texts[i]!r}", markup=False)


def _mean(values: Sequence[float]) -> str:
    n = len(values)
    mean = math.fsum(values) / n
    variance = math.fsum((v - mean) ** 2 for v in values) / max(1, n - 1)
    return f"{mean:.3f} ± {math.sqrt(variance / n):.3f}"


if __name__ == "__main__":
    sys.exit(main())
