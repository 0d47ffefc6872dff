"""Evaluation of the quickstart: reward model on held-out human pairs, actor before and after on held-out prompts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from quickstart_pace import PROMPTS_AT_A_TIME
from rich.console import Console
from rich.table import Table

from realrl.algo.api import MicroBatching
from realrl.algo.supervised.rw import with_end
from realrl.config.schema import GenerationConfig
from realrl.data.assets.fetch import MODEL_FOLDER, REVIEWS_FOLDER
from realrl.data.sample import SequenceSample
from realrl.data.tokenizer import load_tokenizer
from realrl.engine.decoder_engine import DecoderEngine
from realrl.experiment.models import DTYPES
from realrl.files import cache_dir
from realrl.model.dtypes import torch_dtype
from realrl.model.files.hf import load_model
from realrl.sched.messages import KeySchema, Per
from realrl.shape import HeadKind

SEED = 20_141
BATCHES = MicroBatching(max_tokens_per_mb=4096)
TOKENS = KeySchema("int64", Per.TOKEN)


@dataclass(frozen=True)
class Estimate:
    """A mean with its standard error."""

    mean: float
    error: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        n = len(values)
        mean = math.fsum(values) / n
        variance = math.fsum((v - mean) ** 2 for v in values) / max(1, n - 1)
        return cls(mean, math.sqrt(variance / n))

    def __str__(self) -> str:
        return f"{self.mean:.3f} ± {self.error:.3f}"


@dataclass(frozen=True)
class Continuations:
    """One actor's answers to the held-out prompts, one entry per prompt."""

    texts: list[str]
    rewards: list[float]
    vader: list[float]
    kl: list[float]


@dataclass
class Report:
    """Final numbers and texts of the quickstart."""

    accuracy_before: float
    accuracy_after: float
    n_pairs: int
    prompts: list[str]
    before: Continuations
    after: Continuations
    gains: dict[str, Estimate] = field(default_factory=dict)
    paths: dict[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def evaluate(out: Path, *, n_prompts: Callable[[int | None], int], n_pairs: int) -> Report:
    """Score the reward model and both actors, which compute in the precision that they were trained in.

    Args:
        out: folder of the quickstart, with `rw/` and `ppo/`.
        n_prompts: prompts that are done, or None before the pairs -> held-out prompts to end with, fewer if there are
            fewer.
        n_pairs: held-out pairs, fewer if there are fewer.
    """
    n_prompts(None)
    base = cache_dir() / MODEL_FOLDER
    reviews = cache_dir() / REVIEWS_FOLDER
    reward_model, actor = out / "rw/checkpoints/latest/reward", out / "ppo/checkpoints/latest/actor"
    tokenizer = load_tokenizer(str(base))
    pairs = _read(reviews / "reviews_pairs_heldout.jsonl")[:n_pairs]
    print(f"reward model, before and after, on {len(pairs)} pairs", flush=True)
    config = json.loads((out / "ppo/config.json").read_text())
    dtype = torch_dtype(DTYPES[config["precision"]])
    accuracy_before = pair_accuracy(_engine(base, "reward", dtype), pairs, tokenizer)
    judge = _engine(reward_model, "reward", dtype)
    accuracy_after = pair_accuracy(judge, pairs, tokenizer)
    reference, trained = _engine(base, "lm", dtype), _engine(actor, "lm", dtype)
    generation = GenerationConfig(**config["generation"])
    prompts = [row["prompt"] for row in _read(reviews / "reviews_prompts_heldout.jsonl")]
    n, parts = 0, list[tuple[Continuations, Continuations]]()
    while n < (n_all := min(n_prompts(n), len(prompts))):
        if not parts:
            print(f"actor, before and after, on {n_all} prompts", flush=True)
        batch = {i: prompts[i] for i in range(n, min(n + PROMPTS_AT_A_TIME, n_all))}
        before, after = (
            continue_prompts(engine, reference, judge, batch, tokenizer, generation) for engine in (reference, trained)
        )
        parts.append((before, after))
        n += len(batch)
    before, after = (_joined(side) for side in zip(*parts, strict=True))
    _check_with_transformers(actor)
    gains = {
        name: Estimate.of([b - a for a, b in zip(getattr(before, name), getattr(after, name), strict=True)])
        for name in ("rewards", "vader", "kl")
    }
    paths = {
        "metrics": str(out / "ppo/metrics.jsonl"),
        "trace": str(out / "ppo/trace.json"),
        "checkpoint": str(actor.parent.resolve()),
        "reward model": str(reward_model.parent.resolve()),
    }
    return Report(accuracy_before, accuracy_after, len(pairs), prompts[:n], before, after, gains, paths)


def pair_accuracy(engine: DecoderEngine, pairs: Sequence[dict[str, Any]], tokenizer: Any) -> float:
    """Share of pairs whose better rated text gets the higher reward."""
    chosen, rejected = (
        rewards_of(engine, [_encode(tokenizer, pair[which]) for pair in pairs], tokenizer.eos_token_id)
        for which in ("chosen", "rejected")
    )
    return sum(c > r for c, r in zip(chosen, rejected, strict=True)) / len(pairs)


def rewards_of(engine: DecoderEngine, sequences: Sequence[torch.Tensor], eos_id: int) -> list[float]:
    """The reward model's score at the end of each sequence."""
    batch = with_end(_batch("input_ids", sequences), eos_id)
    scores = engine.forward(batch, lambda out, _: out.scores(), micro_batching=BATCHES)
    ends = batch.cu_seqlens("input_ids")[1:].long() - 1
    return scores[ends].tolist()


def continue_prompts(
    actor: DecoderEngine,
    reference: DecoderEngine,
    judge: DecoderEngine,
    prompts: Mapping[int, str],
    tokenizer: Any,
    generation: GenerationConfig,
) -> Continuations:
    """Sample one continuation per numbered prompt, which depends on number and prompt alone.

    KL is the sum over a response of log p_actor - log p_reference.
    """
    from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

    prompt_ids = [_encode(tokenizer, p) for p in prompts.values()]
    one = generation.model_copy(update={"n_responses": 1})
    rows = _batch("prompt_ids", prompt_ids, ids=[str(number) for number in prompts])
    result = actor.generate(rows, one, seed=SEED, step=0, eos_id=tokenizer.eos_token_id)
    sequences = [torch.cat([p, r]) for p, r in zip(prompt_ids, result.responses, strict=True)]
    kl = [0.0] * len(sequences)
    if reference is not actor:
        batch = _batch("input_ids", sequences)
        theirs = _logprobs(reference, batch, generation.temperature)
        ends = batch.cu_seqlens("input_ids").tolist()[1:]  # one entry fewer per sequence in `theirs`
        kl = [
            float((ours - theirs[end - i - len(ours) : end - i]).sum())
            for i, (end, ours) in enumerate(zip(ends, result.policy_logprobs, strict=True), start=1)
        ]
    texts = [tokenizer.decode(r, skip_special_tokens=True) for r in result.responses]
    analyzer = SentimentIntensityAnalyzer()
    whole = [p + t for p, t in zip(prompts.values(), texts, strict=True)]
    return Continuations(
        texts=texts,
        rewards=rewards_of(judge, sequences, tokenizer.eos_token_id),
        vader=[float(analyzer.polarity_scores(text)["compound"]) for text in whole],
        kl=kl,
    )


def print_report(report: Report, *, n_shown: int) -> None:
    """Print the table, the sample continuations and the paths."""
    console = Console(width=None if Console().is_terminal else 118)
    n = len(report.prompts)
    table = Table(title=f"\nheld-out: {report.n_pairs} human pairs rated 1.5 apart, {n} prompts", title_justify="left")
    for column, justify in (("", "left"), ("before", "right"), ("after", "right"), ("gain", "right")):
        table.add_column(column, justify=justify)
    accuracy = (report.accuracy_before, report.accuracy_after)
    errors = [math.sqrt(a * (1 - a) / report.n_pairs) for a in accuracy]
    table.add_row(
        "reward model accuracy",
        *(f"{a:.3f} ± {e:.3f}" for a, e in zip(accuracy, errors, strict=True)),
        f"{accuracy[1] - accuracy[0]:+.3f}",
    )
    for name, title in (("rewards", "mean reward"), ("vader", "VADER score"), ("kl", "KL to the reference")):
        gain = report.gains[name]
        before, after = Estimate.of(getattr(report.before, name)), Estimate.of(getattr(report.after, name))
        sigmas = f" ({gain.mean / gain.error:.1f} standard errors)" if gain.error and name != "kl" else ""
        table.add_row(title, str(before), str(after), f"{gain.mean:+.3f} ± {gain.error:.3f}{sigmas}")
    console.print(table)
    console.print("\ncontinuations of held-out prompts")
    step = max(1, n // n_shown)
    for i in range(0, step * n_shown, step):
        console.print(f"\n  {report.prompts[i]} ...", style="bold", markup=False)
        console.print(f"    before: {_one_line(report.before.texts[i])}", markup=False)
        console.print(f"    after:  {_one_line(report.after.texts[i])}", markup=False)
    console.print()
    for name, path in report.paths.items():
        console.print(f"{name:<12} {path}", markup=False, soft_wrap=True)


def _check_with_transformers(folder: Path) -> None:
    """The saved actor must load in `transformers` and give our numbers."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ours = _engine(folder, "lm", torch.float32)
    ids = torch.arange(5, 25)
    with torch.no_grad():
        expected = theirs(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    difference = float((_logprobs(ours, _batch("input_ids", [ids]), 1.0) - expected).abs().max())
    if difference > 1e-3:
        raise SystemExit(
            f"transformers reads other numbers from {folder}: log-probabilities differ by {difference:.2e}"
        )
    print(f"transformers loads the saved actor; log-probabilities agree within {difference:.1e}")


def _engine(folder: Path, head: HeadKind, dtype: torch.dtype) -> DecoderEngine:
    return DecoderEngine(load_model(folder, head=head, dtype=dtype), role=head)


def _joined(parts: Sequence[Continuations]) -> Continuations:
    columns = [[getattr(part, column.name) for part in parts] for column in fields(Continuations)]
    return Continuations(*(list(chain.from_iterable(column)) for column in columns))


def _logprobs(engine: DecoderEngine, batch: SequenceSample, temperature: float) -> torch.Tensor:
    return engine.forward(batch, lambda out, _: out.logprobs(temperature), micro_batching=BATCHES)


def _batch(key: str, sequences: Sequence[torch.Tensor], ids: Sequence[str] | None = None) -> SequenceSample:
    ids = [str(i) for i in range(len(sequences))] if ids is None else ids
    return SequenceSample.from_lists(ids, {key: (TOKENS, [[s] for s in sequences])})


def _encode(tokenizer: Any, text: str) -> torch.Tensor:
    return torch.tensor(tokenizer.encode(text, add_special_tokens=False))


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _one_line(text: str) -> str:
    return " ".join(text.split())
