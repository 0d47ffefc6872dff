"""One set of tiny weights as realrl's engine and as a `transformers` model that TRL's trainers take losses of.

Trainers are made without their constructors: these want datasets and write files, and `compute_loss` reads only the few
attributes that each test sets.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from realrl.algo.api import Model
from realrl.config.schema import OptimizerConfig
from realrl.data.sample import SequenceSample
from realrl.engine.decoder_engine import DecoderEngine
from realrl.graph.mfc import ModelName
from realrl.model.files.hf import load_model, save_model
from realrl.model.init import random_model
from realrl.sched.messages import KeySchema, Per
from realrl.shape import DecoderConfig, HeadKind
from tests.helpers.fake_engine import FakeTokenizer
from tests.helpers.supervised import GradientEngine

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    trl = pytest.importorskip("trl", exc_type=ImportError)

VOCAB_SIZE, PAD_ID = 41, 40
CONFIG = DecoderConfig(VOCAB_SIZE, 32, 2, 4, 2, 8, 48, pad_token_id=PAD_ID)
TOLERANCE = 1e-5

Text = tuple[list[int], list[int]]  # prompt, answer


@dataclass(frozen=True)
class Twin:
    """The same weights twice."""

    model: Model
    engine: GradientEngine
    hf: Any


def twin(folder: Path, *, seed: int, head: HeadKind = "lm", outputs: Sequence[str] = ("log_probs", "entropy")) -> Twin:
    """Random weights, large enough for distributions far from uniform."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    decoder = random_model(replace(CONFIG, head=head), seed)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4.0)
    save_model(decoder, folder)
    auto = AutoModelForCausalLM if head == "lm" else AutoModelForSequenceClassification
    hf = auto.from_pretrained(folder, local_files_only=True, attn_implementation="eager").train()
    if head == "lm":
        trl.trainer.utils.add_fused_lm_head(hf, outputs=tuple(outputs))
    engine = GradientEngine(
        DecoderEngine(load_model(folder, head=head), role="actor", optimizer=OptimizerConfig(), total_optimizer_steps=1)
    )
    return Twin(Model(ModelName("actor"), engine, FakeTokenizer(2)), engine, hf)  # type: ignore[arg-type]


def texts(n: int, *, seed: int = 0, n_answers: int = 2, max_answer: int = 9) -> list[list[Text]]:
    """Prompts of 1 to 6 tokens, each with `n_answers` answers of 1 to `max_answer`."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(most: int) -> list[int]:
        n_tokens = int(torch.randint(1, most + 1, (), generator=generator))
        return torch.randint(0, PAD_ID, (n_tokens,), generator=generator).tolist()

    return [[(prompt, tokens(max_answer)) for _ in range(n_answers)] for prompt in (tokens(6) for _ in range(n))]


def packed(samples: Sequence[Sequence[Text]]) -> SequenceSample:
    """Return what realrl's datasets make of them."""
    masks = [[torch.tensor([True] * len(p) + [False] * len(a)) for p, a in sample] for sample in samples]
    return SequenceSample.from_lists(
        [f"1/{i}" for i in range(len(samples))],
        {
            "input_ids": (KeySchema("int64", Per.TOKEN), [[torch.tensor(p + a) for p, a in s] for s in samples]),
            "prompt_mask": (KeySchema("bool", Per.TOKEN), masks),
        },
    )


def padded(parts: Sequence[Text], prefix: str = "") -> dict[str, torch.Tensor]:
    """Return what TRL's collators make of them: padding on the right."""
    length = max(len(p) + len(a) for p, a in parts)

    def pad(rows: Sequence[list[int]], value: int) -> torch.Tensor:
        return torch.tensor([row + [value] * (length - len(row)) for row in rows])

    return {
        f"{prefix}input_ids": pad([p + a for p, a in parts], PAD_ID),
        f"{prefix}attention_mask": pad([[1] * (len(p) + len(a)) for p, a in parts], 0),
        f"{prefix}completion_mask": pad([[0] * len(p) + [1] * len(a) for p, a in parts], 0),
    }


def bare_trainer(cls: type, model: Any, **attributes: Any) -> Any:
    """A trainer with what its losses read, and nothing else."""
    trainer = cls.__new__(cls)
    same: Callable[..., Any] = lambda x, *_, **__: x  # noqa: E731
    trainer.accelerator = SimpleNamespace(
        device=torch.device("cpu"),
        num_processes=1,
        process_index=0,
        is_main_process=True,
        parallelism_config=None,
        autocast=nullcontext,
        sync_gradients=True,
        **dict.fromkeys(("gather", "gather_for_metrics", "reduce", "unwrap_model"), same),
    )
    trainer.model = model
    trainer._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
    trainer._total_train_tokens, trainer._tp_size = 0, 1
    trainer.aux_loss_enabled = False
    trainer.current_gradient_accumulation_steps = 1
    for name, value in attributes.items():
        setattr(trainer, name, value)
    return trainer


def gradient_norm(loss: torch.Tensor, hf: Any) -> float:
    """Of TRL's loss, over all parameters."""
    hf.zero_grad()
    loss.backward()
    return float(torch.stack([p.grad.square().sum() for p in hf.parameters() if p.grad is not None]).sum().sqrt())


def assert_parity(name: str, ours: dict[str, float], engine: GradientEngine, theirs: torch.Tensor, hf: Any) -> None:
    """Equal losses, and equal norms of their gradients."""
    norm = gradient_norm(theirs, hf)
    own = float(torch.stack([g.square().sum() for g in engine.gradients.values()]).sum().sqrt())
    assert norm > 1e-3
    assert ours[name] == pytest.approx(float(theirs), rel=TOLERANCE, abs=TOLERANCE)
    assert own == pytest.approx(norm, rel=1e-4)
