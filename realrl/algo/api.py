"""The contract between algorithms and engines: `Engine` and `Model`, and the `ModelInterface` of an algorithm.

Nothing here knows meshes, ranks or layouts. An interface receives its rank's share of the samples; sums over the whole
batch go through `Engine.all_reduce`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from realrl.algo.phases import Phases
from realrl.config.schema import GenerationConfig
from realrl.data.sample import SequenceSample
from realrl.graph.mfc import ModelName


class ForwardOutput(Protocol):
    """Lazy result of one forward pass over a packed micro-batch of T tokens in S sequences.

    Transitions are the T - S pairs (t, t + 1) inside a sequence, packed in order. A `mask` (bool [T - S]) selects the
    transitions that matter: the logits of the others need not be computed, and their results are 0 without gradient.
    A temperature of 0 (greedy sampling) counts as 1.
    """

    def logprobs(self, temperature: float = 1.0, mask: torch.Tensor | None = None) -> torch.Tensor:
        """float32 [T - S]: log-probability of each next token under softmax(logits / temperature)."""

    def logprobs_and_entropy(
        self, temperature: float = 1.0, mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and entropies (nats), float32 [T - S] each, both with gradient."""

    def logprobs_of(self, tokens: torch.Tensor, temperature: float, mask: torch.Tensor) -> torch.Tensor:
        """float32 [N, K]: log-probabilities of `tokens` (int64 [N, K]) in the N selected transitions, with gradient."""

    def top_logprobs(self, k: int, temperature: float, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The k likeliest next tokens (int64 [N, k]) of the N selected transitions, and their log-probabilities.

        No gradient; k is cut to the size of the vocabulary.
        """

    def scores(self) -> torch.Tensor:
        """float32 [T]: output of a value or reward head."""


@dataclass(frozen=True)
class LossOutput:
    """Sums, not means, over the micro-batch: the engine divides by the normaliser of the whole minibatch.

    Attributes:
        loss: scalar with gradient.
        stats: detached scalar sums; reduced over micro-batches and ranks, then divided by the same normaliser.
        maxima: detached scalars that are reduced by maximum instead.
    """

    loss: torch.Tensor
    stats: Mapping[str, torch.Tensor] = field(default_factory=dict)
    maxima: Mapping[str, torch.Tensor] = field(default_factory=dict)


LossFn = Callable[[ForwardOutput, SequenceSample], LossOutput]


@dataclass(frozen=True)
class TrainResult:
    """Outcome of one minibatch.

    Attributes:
        stats: reduced over micro-batches and ranks.
        grad_norm: global norm before clipping.
        lr: learning rate used.
        stepped: False if the optimizer step was left out.
    """

    stats: Mapping[str, float]
    grad_norm: float
    lr: float
    stepped: bool


@dataclass(frozen=True)
class MicroBatching:
    """A count of micro-batches, or a token budget for each; both None means one, or enough to keep a pipeline busy."""

    n_mbs: int | None = None
    max_tokens_per_mb: int | None = None


class Engine(Protocol):
    """Runs one role's module, wherever its shards are."""

    @property
    def device(self) -> torch.device: ...

    def train_batch(
        self,
        minibatch: SequenceSample,
        loss_fn: LossFn,
        *,
        normaliser: float,
        micro_batching: MicroBatching,
        skip_step: Callable[[Mapping[str, float]], bool] | None = None,
    ) -> TrainResult:
        """Forward, backward and one optimizer step over this rank's share of a minibatch.

        Args:
            minibatch: must hold `input_ids`; passed to `loss_fn` micro-batch by micro-batch.
            normaliser: tokens or sequences of the whole minibatch over all ranks; the loss is sum / normaliser.
            skip_step: given the reduced stats, returns True to leave this minibatch's optimizer step out.
        """

    def forward(
        self,
        batch: SequenceSample,
        post_fn: Callable[[ForwardOutput, SequenceSample], torch.Tensor],
        *,
        micro_batching: MicroBatching,
        adapter: bool = True,
    ) -> torch.Tensor:
        """Inference without gradient; concatenates `post_fn`'s results (dim 0) in the order of `batch`.

        Args:
            adapter: False computes with the role's base model, as if its low-rank adapters did not exist.
        """

    def generate(
        self,
        prompts: SequenceSample,
        generation: GenerationConfig,
        *,
        seed: int,
        step: int,
        eos_id: int,
    ) -> GenerationResult:
        """Sample `generation.n_responses` responses for each sample's `prompt_ids`."""

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Reduce by "sum" or "max" over the ranks that hold different samples; returns a new tensor."""


@dataclass(frozen=True)
class GenerationResult:
    """Responses, `n_responses` consecutive entries per sample, in sample order.

    Attributes:
        responses: int64 tokens of each response, the stop token included when there is one.
        logprobs: float32, of the distribution that was sampled from (temperature, top-k, top-p, minimum length).
        policy_logprobs: float32, of softmax(logits / temperature) alone, as training recomputes them.
        truncated: True where a response ended without a stop token.
        given: bool per token of each response, True for tokens that were not generated but put in, such as the answer
            of a tool: they are part of the prompt to what follows, nothing is learned of them, and their
            log-probabilities are ignored. None if all tokens were generated.
    """

    responses: list[torch.Tensor]
    logprobs: list[torch.Tensor]
    policy_logprobs: list[torch.Tensor]
    truncated: list[bool]
    given: list[torch.Tensor] | None = None


@dataclass
class Model:
    """One role on this worker: its engine, tokenizer (a `transformers` fast tokenizer) and version."""

    name: ModelName
    engine: Engine
    tokenizer: Any
    version: int = 0


class MetricSums:
    """Sums for the log from one call on one rank; any method of an interface may add to them.

    The log shows total / count per name and step, over all calls, their batches, and all ranks that hold different
    samples. Ranks that hold the same samples must add the same values, which count once.

    Attributes:
        sums: name -> (total, count).
        maxima: name -> largest value.
    """

    def __init__(self) -> None:
        self.sums: dict[str, tuple[float, float]] = {}
        self.maxima: dict[str, float] = {}

    def add(self, name: str, total: float, count: float) -> None:
        """Add a sum of `count` values (or of values whose weights sum to `count`)."""
        old_total, old_count = self.sums.get(name, (0.0, 0.0))
        self.sums[name] = (old_total + float(total), old_count + float(count))

    def add_values(self, name: str, values: Iterable[float]) -> None:
        """Add single values; the log shows ``<name>/mean`` and the standard deviation ``<name>/std``."""
        values = list(values)
        self.add(f"{name}/mean", sum(values), len(values))
        self.add(f"{name}/mean_square", sum(value * value for value in values), len(values))

    def add_max(self, name: str, value: float) -> None:
        """Log the largest of all values given under this name in a step."""
        self.maxima[name] = max(float(value), self.maxima.get(name, float(value)))


class SampleNotes:
    """Numbers of single responses for ``generations.jsonl``, where no key of the graph holds them.

    Attributes:
        values: name -> sample -> one number per sequence.
    """

    def __init__(self) -> None:
        self.values: dict[str, dict[str, tuple[float, ...]]] = {}

    def add(self, name: str, batch: SequenceSample, values: Iterable[float]) -> None:
        """Note one number for each sequence of a batch; "a/b" becomes field b of the object a."""
        noted, numbers = self.values.setdefault(name, {}), iter(values)
        for sample_id, lengths in zip(batch.ids, batch.seqlens["input_ids"], strict=True):
            noted[sample_id] = tuple([float(next(numbers)) for _ in lengths])


@dataclass(frozen=True)
class CallContext:
    """The call that an interface serves.

    Attributes:
        minibatches: this rank's sample ids per minibatch, pass after pass; a single tuple unless the call trains.
        algorithm: the configuration's ``algorithm`` section.
        metrics: the interface adds sums for the log to it.
        notes: the interface may add numbers of single responses to it.
        n_passes: passes over the batch that `minibatches` make; each holds every sample of this rank once.
        phases: the interface may tell the trace what it spends its time on: ``with ctx.phases.phase("search"): ...``.
    """

    call: str
    step: int
    seed: int
    micro_batching: MicroBatching
    minibatches: tuple[tuple[str, ...], ...]
    generation: GenerationConfig
    algorithm: Any
    metrics: MetricSums = field(default_factory=MetricSums)
    n_passes: int = 1
    notes: SampleNotes = field(default_factory=SampleNotes)
    phases: Phases = field(default_factory=Phases)

    @property
    def single_passes(self) -> tuple[CallContext, ...]:
        """The context of each pass over the batch, with its minibatches alone."""
        n = len(self.minibatches) // self.n_passes
        starts = range(0, n * self.n_passes, n)
        return tuple(replace(self, minibatches=self.minibatches[i : i + n], n_passes=1) for i in starts)


class ModelInterface:
    """The algorithm's side of a call. Instances live as long as the run and may keep state between calls.

    `generate` and `inference` return a `SequenceSample` with the ids of `batch` and the call's output keys;
    `train_step` returns metrics that are equal on all ranks.

    A call may run on other devices than those where its role's parameters live. The interface's state is then sent
    along with the parameters before the call. Changes that the call makes to it are not sent back.
    """

    def generate(self, model: Model, batch: SequenceSample, ctx: CallContext) -> SequenceSample:
        raise NotImplementedError(f"{type(self).__name__} cannot generate")

    def inference(self, model: Model, batch: SequenceSample, ctx: CallContext) -> SequenceSample:
        raise NotImplementedError(f"{type(self).__name__} has no inference")

    def train_step(self, model: Model, batch: SequenceSample, ctx: CallContext) -> dict[str, float]:
        raise NotImplementedError(f"{type(self).__name__} cannot train")

    def evaluate(self, model: Model, batch: SequenceSample, ctx: CallContext) -> SequenceSample:
        """Evaluate held-out samples; returns float32 per sample: ``weight`` and the experiment's `eval_metrics`.

        A metric of the evaluation is sum(weight * metric) / sum(weight) over all samples.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot evaluate")

    def optimizer_steps_per_call(self, n_minibatches: int, algorithm: Any) -> int:
        """Number of optimizer steps in one train_step call; learning-rate schedules count these.

        Args:
            n_minibatches: of all passes that the call declares (`MFCDef.n_passes`).
            algorithm: the configuration's ``algorithm`` section.
        """
        return n_minibatches

    def state_dict(self) -> dict[str, Any]:
        """State that an exact continuation needs (value statistics, KL controller); tensors and numbers only."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            raise ValueError(f"{type(self).__name__} keeps no state, but a checkpoint holds {sorted(state)}")
