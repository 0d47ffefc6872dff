"""SFT, reward model, DPO and KTO as cases of one test: an interface, its options, and a batch to train on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from realrl.algo.api import LossFn, MicroBatching, Model, ModelInterface, TrainResult
from realrl.algo.supervised.dpo import DPO
from realrl.algo.supervised.kto import KTO
from realrl.algo.supervised.rw import RewardModel
from realrl.algo.supervised.sft import SFT
from realrl.config.algorithms import DPOOptions, KTOOptions
from realrl.data.sample import SequenceSample
from realrl.engine.decoder_engine import DecoderEngine
from realrl.graph.mfc import ModelName
from realrl.sched.messages import KeySchema, Per
from realrl.shape import HeadKind
from tests.helpers.fake_engine import FakeTokenizer, fake_context
from tests.helpers.training import VOCAB_SIZE

JUNK = float("nan")


@dataclass(frozen=True)
class Case:
    """An interface with its options, and the head that it trains."""

    interface: Callable[[], ModelInterface]
    options: Any = None
    head: HeadKind = "lm"


CASES: Mapping[str, Case] = {
    "sft": Case(SFT),
    "rw": Case(RewardModel, head="reward"),
    "dpo": Case(DPO, DPOOptions(label_smoothing=0.1, sft_coef=0.5)),
    "dpo_hinge": Case(DPO, DPOOptions(loss="hinge")),
    "dpo_ipo": Case(DPO, DPOOptions(loss="ipo")),
    "kto": Case(KTO, KTOOptions(beta=0.3, desirable_weight=1.3)),
}


def answers_batch(n_samples: int, *, seed: int = 0, junk: float = 0.0) -> SequenceSample:
    """Make random pairs of answers with every key that some case reads.

    Args:
        n_samples: number of samples, each a prompt of 1 to 6 tokens with two answers of 1 to 9.
        seed: seed of all random numbers.
        junk: value of `ref_logprobs` on prompts.
    """
    generator = torch.Generator().manual_seed(seed)

    def length(high: int) -> int:
        return int(torch.randint(1, high, (), generator=generator))

    rows: dict[str, list[list[torch.Tensor]]] = {"input_ids": [], "prompt_mask": [], "ref_logprobs": [], "label": []}
    for i in range(n_samples):
        prompt = torch.randint(0, VOCAB_SIZE, (length(7),), generator=generator)
        answers = [torch.randint(0, VOCAB_SIZE, (length(10),), generator=generator) for _ in range(2)]
        before = torch.full((len(prompt) - 1,), junk)
        rows["input_ids"].append([torch.cat([prompt, answer]) for answer in answers])
        rows["prompt_mask"].append([torch.arange(len(prompt) + len(a)) < len(prompt) for a in answers])
        rows["ref_logprobs"].append(
            [torch.cat([before, -4.1 - torch.rand(len(a), generator=generator)]) for a in answers]
        )
        rows["label"].append([torch.tensor([i % 3 != 0])])
    schemas = {
        "input_ids": KeySchema("int64", Per.TOKEN),
        "prompt_mask": KeySchema("bool", Per.TOKEN),
        "ref_logprobs": KeySchema("float32", Per.TRANSITION),
        "label": KeySchema("bool", Per.SAMPLE),
    }
    return SequenceSample.from_lists(
        [f"1/{i}" for i in range(n_samples)], {key: (schemas[key], rows[key]) for key in rows}
    )


class GradientEngine:
    """A `DecoderEngine` that keeps its gradient instead of stepping."""

    def __init__(self, engine: DecoderEngine) -> None:
        self.inner = engine
        self.gradients: dict[str, torch.Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def train_batch(self, minibatch: SequenceSample, loss_fn: LossFn, **options: Any) -> TrainResult:
        def keep(_: Mapping[str, float]) -> bool:
            parameters = self.inner.decoder.named_parameters()
            self.gradients = {name: p.grad.clone() for name, p in parameters if p.grad is not None}
            return True

        return self.inner.train_batch(minibatch, loss_fn, **{**options, "skip_step": keep})


def loss_and_gradient(
    case: Case, engine: DecoderEngine, batch: SequenceSample, micro_batching: MicroBatching | None = None
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Train on one minibatch of all samples, for metrics and gradient; the engine keeps its parameters."""
    recorder = GradientEngine(engine)
    model = Model(ModelName("actor"), recorder, FakeTokenizer(2))
    ctx = fake_context("actor_train", [batch.ids], algorithm=case.options)
    if micro_batching is not None:
        ctx = type(ctx)(**{**vars(ctx), "micro_batching": micro_batching})
    metrics = case.interface().train_step(model, batch, ctx)
    return metrics, recorder.gradients
