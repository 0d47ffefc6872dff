"""An `Engine` in one process and a few lines: a bigram model, plain SGD, threads as data-parallel ranks."""

from __future__ import annotations

import itertools
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn

from realrl.algo.api import CallContext, GenerationResult, LossFn, MicroBatching, Model, TrainResult
from realrl.config.schema import GenerationConfig
from realrl.data.sample import SequenceSample
from realrl.graph.mfc import ModelName

AllReduce = Callable[[torch.Tensor, str], torch.Tensor]
Result = TypeVar("Result")


class Bigram(nn.Module):
    """The next token's logits, and the score, depend on the current token alone."""

    def __init__(self, n_tokens: int, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.logits = nn.Parameter(0.3 * torch.randn(n_tokens, n_tokens, generator=generator))
        self.scores = nn.Parameter(0.3 * torch.randn(n_tokens, generator=generator))


@dataclass
class FakeOutput:
    """A `ForwardOutput` over one micro-batch."""

    module: Bigram
    batch: SequenceSample

    def logprobs(self, temperature: float = 1.0, mask: torch.Tensor | None = None) -> torch.Tensor:
        return self.logprobs_and_entropy(temperature, mask)[0]

    def logprobs_and_entropy(
        self, temperature: float = 1.0, mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ids, cu = self.batch["input_ids"], self.batch.cu_seqlens("input_ids").long()
        is_first = torch.zeros_like(ids, dtype=torch.bool)
        is_last = torch.zeros_like(ids, dtype=torch.bool)
        is_first[cu[:-1]] = True
        is_last[cu[1:] - 1] = True
        table = torch.log_softmax(self.module.logits[ids[~is_last]] / temperature, -1)
        logprobs = table.gather(1, ids[~is_first][:, None]).squeeze(1)
        entropy = -(table.exp() * table).sum(-1)
        if mask is not None:
            logprobs, entropy = torch.where(mask, logprobs, 0.0), torch.where(mask, entropy, 0.0)
        return logprobs, entropy

    def scores(self) -> torch.Tensor:
        return self.module.scores[self.batch["input_ids"]]


class FakeEngine:
    """Implements `realrl.algo.api.Engine`.

    Args:
        module: model that SGD trains in place.
        lr: learning rate.
        all_reduce: reduction over the data-parallel ranks; by default there is one rank.
    """

    def __init__(self, module: Bigram, lr: float = 0.1, all_reduce: AllReduce = lambda t, op: t.clone()) -> None:
        self.module = module
        self.lr = lr
        self._all_reduce = all_reduce
        self.normalisers: list[float] = []
        self.adapters_asked_for: list[bool] = []

    @property
    def device(self) -> torch.device:
        return self.module.scores.device

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        return self._all_reduce(tensor, op)

    def train_batch(
        self,
        minibatch: SequenceSample,
        loss_fn: LossFn,
        *,
        normaliser: float,
        micro_batching: MicroBatching,
        skip_step: Callable[[Mapping[str, float]], bool] | None = None,
    ) -> TrainResult:
        self.normalisers.append(normaliser)
        self.module.zero_grad()
        sums: dict[str, torch.Tensor] = {}
        for micro_batch in _micro_batches(minibatch, micro_batching):
            result = loss_fn(FakeOutput(self.module, micro_batch), micro_batch)
            (result.loss / normaliser).backward()
            for name, value in result.stats.items():
                sums[name] = sums.get(name, torch.zeros((), dtype=torch.float64)) + value.double()
        stats = {n: float(self.all_reduce(v)) / normaliser for n, v in sums.items()}
        grads = [self.all_reduce(torch.zeros_like(p) if p.grad is None else p.grad) for p in self.module.parameters()]
        grad_norm = float(torch.stack([g.square().sum() for g in grads]).sum().sqrt())
        stepped = skip_step is None or not skip_step(stats)
        if stepped:
            with torch.no_grad():
                for parameter, grad in zip(self.module.parameters(), grads, strict=True):
                    parameter -= self.lr * grad
        return TrainResult(stats=stats, grad_norm=grad_norm, lr=self.lr, stepped=stepped)

    @torch.no_grad()
    def forward(
        self,
        batch: SequenceSample,
        post_fn: Callable[[Any, SequenceSample], torch.Tensor],
        *,
        micro_batching: MicroBatching,
        adapter: bool = True,
    ) -> torch.Tensor:
        self.adapters_asked_for.append(adapter)
        parts = [post_fn(FakeOutput(self.module, mb), mb) for mb in _micro_batches(batch, micro_batching)]
        return torch.cat(parts)

    @torch.no_grad()
    def generate(
        self, prompts: SequenceSample, generation: GenerationConfig, *, seed: int, step: int, eos_id: int
    ) -> GenerationResult:
        result = GenerationResult([], [], [], [])
        for sample_id, prompt in zip(prompts.ids, prompts.samples("prompt_ids"), strict=True):
            for n in range(generation.n_responses):
                key = f"{seed}/{step}/{sample_id}/{n}".encode()
                self._respond(int(prompt[-1]), generation, zlib.crc32(key), eos_id, result)
        return result

    def _respond(self, token: int, generation: GenerationConfig, seed: int, eos_id: int, out: GenerationResult) -> None:
        generator = torch.Generator().manual_seed(seed)
        tokens, logprobs = [], []
        while len(tokens) < generation.max_new_tokens and eos_id not in tokens:
            policy = torch.log_softmax(self.module.logits[token] / generation.temperature, -1)
            token = int(torch.multinomial(policy.exp(), 1, generator=generator))
            tokens.append(token)
            logprobs.append(policy[token])
        out.responses.append(torch.tensor(tokens))
        out.logprobs.append(torch.stack(logprobs) + 1.0)  # as if a filter had raised them
        out.policy_logprobs.append(torch.stack(logprobs))
        out.truncated.append(tokens[-1] != eos_id)


def _micro_batches(batch: SequenceSample, micro_batching: MicroBatching) -> list[SequenceSample]:
    n_mbs = max(min(micro_batching.n_mbs or 1, len(batch)), 1)
    bounds = [len(batch) * i // n_mbs for i in range(n_mbs + 1)]
    return batch.split([range(a, b) for a, b in itertools.pairwise(bounds)])


class ThreadGroup:
    """Data-parallel ranks that are threads of this process."""

    def __init__(self, n_ranks: int) -> None:
        self._barrier = threading.Barrier(n_ranks, timeout=10.0)
        self._slots: list[torch.Tensor] = [torch.empty(0)] * n_ranks

    def all_reduce(self, rank: int) -> AllReduce:
        """Make the collective for one rank."""

        def reduce(tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
            self._slots[rank] = tensor
            self._barrier.wait()
            stacked = torch.stack(list(self._slots))
            self._barrier.wait()
            return stacked.sum(0) if op == "sum" else stacked.max(0).values

        return reduce

    def run(self, work: Sequence[Callable[[], Result]]) -> list[Result]:
        """Call each rank's function in its own thread; returns their results, or raises the first error."""

        def guarded(function: Callable[[], Result]) -> Result:
            try:
                return function()
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(len(work)) as pool:
            futures = [pool.submit(guarded, function) for function in work]
            errors = [error for error in (f.exception() for f in futures) if error is not None]
            if errors:
                raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
            return [f.result() for f in futures]


@dataclass(frozen=True)
class FakeTokenizer:
    """A tokenizer in which token i is the character chr(97 + i) and the last token is the end."""

    eos_token_id: int

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(97 + i) for i in ids if not (skip_special_tokens and i == self.eos_token_id))


def fake_model(role: str, engine: FakeEngine) -> Model:
    """Make a role whose last token is the end of a response."""
    n_tokens = engine.module.scores.shape[0]
    return Model(ModelName(role), engine, FakeTokenizer(n_tokens - 1))


def fake_context(
    call: str,
    minibatches: Sequence[Sequence[str]],
    *,
    algorithm: Any = None,
    generation: GenerationConfig | None = None,
    step: int = 1,
    n_mbs: int | None = None,
    n_passes: int = 1,
) -> CallContext:
    """Make a context with defaults for most fields."""
    return CallContext(
        call=call,
        step=step,
        seed=1,
        micro_batching=MicroBatching(n_mbs=n_mbs),
        minibatches=tuple(tuple(ids) for ids in minibatches),
        n_passes=n_passes,
        generation=generation or GenerationConfig(),
        algorithm=algorithm,
    )
