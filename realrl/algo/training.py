"""The loop that all training interfaces share: normalisers first, then one `Engine.train_batch` per minibatch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from realrl.algo.api import CallContext, LossFn, Model
from realrl.data.sample import SequenceSample
from realrl.errors import CallError

SkipRule = Callable[[Mapping[str, float]], bool]


@dataclass(frozen=True)
class TrainSummary:
    """Summary of all minibatches of one train_step, equal on all ranks.

    Attributes:
        stats: means over the counted units of all minibatches and passes, skipped ones included.
        grad_norm: mean over the minibatches that stepped; 0 if none did.
        lr: learning rate of the last minibatch.
        n_skipped: minibatches whose optimizer step was left out.
        n_units: counted units (tokens, pairs) of one pass over all ranks.
    """

    stats: Mapping[str, float]
    grad_norm: float
    lr: float
    n_skipped: int
    n_units: float

    def metrics(self, role: str) -> dict[str, float]:
        """Metrics for train_step to return: statistics, `grad_norm` and `lr` under ``<role>/<name>``."""
        named = {**self.stats, "grad_norm": self.grad_norm, "lr": self.lr}
        return {f"{role}/{name}": value for name, value in named.items()}


def train_minibatches(
    model: Model,
    batch: SequenceSample | Sequence[SequenceSample],
    ctx: CallContext,
    loss_fn: LossFn,
    *,
    count: Callable[[SequenceSample], float],
    passes: int = 1,
    skip: SkipRule | None = None,
) -> TrainSummary:
    """One optimizer step per minibatch of `ctx`, those of all its passes.

    Args:
        model: its engine's device must hold `batch`.
        batch: this rank's samples with the keys that `loss_fn` reads; or its share of every minibatch, where keys
            depend on the minibatch that a sample is in.
        ctx: names the minibatches; all ranks have equally many, and a rank's share may be empty.
        loss_fn: sums over a micro-batch.
        count: units of a minibatch on this rank; their global sum is its loss normaliser.
        passes: times to repeat the minibatches as they are; `MFCDef.n_passes` draws new ones for every pass.
        skip: given a minibatch's means, returns True to leave its optimizer step out.

    Raises:
        CallError: a loss or statistic is not finite; raised on all ranks before the optimizer steps.
    """
    minibatches = [batch.select(ids) for ids in ctx.minibatches] if isinstance(batch, SequenceSample) else batch
    local = torch.tensor([count(mb) for mb in minibatches], dtype=torch.float64, device=model.engine.device)
    counts = [float(n) for n in model.engine.all_reduce(local).tolist()]
    sums: dict[str, float] = {}
    grad_norms, n_skipped, lr = [], 0, 0.0
    for minibatch, n_units in list(zip(minibatches, counts, strict=True)) * passes:
        result = model.engine.train_batch(
            minibatch,
            loss_fn,
            normaliser=max(n_units, 1.0),
            micro_batching=ctx.micro_batching,
            skip_step=_finite_then(skip, model, ctx, minibatch),
        )
        for name, mean in result.stats.items():
            sums[name] = sums.get(name, 0.0) + mean * max(n_units, 1.0)
        lr = result.lr
        if result.stepped:
            grad_norms.append(result.grad_norm)
        else:
            n_skipped += 1
    total = passes * sum(max(n, 1.0) for n in counts)
    return TrainSummary(
        stats={name: value / total for name, value in sums.items()},
        grad_norm=math.fsum(grad_norms) / len(grad_norms) if grad_norms else 0.0,
        lr=lr,
        n_skipped=n_skipped,
        n_units=sum(counts) / ctx.n_passes,
    )


def _finite_then(skip: SkipRule | None, model: Model, ctx: CallContext, minibatch: SequenceSample) -> SkipRule:
    def rule(stats: Mapping[str, float]) -> bool:
        bad = next((name for name, value in stats.items() if not math.isfinite(value)), None)
        if bad is not None:
            some = ", ".join(minibatch.ids[:3]) or "none on this rank"
            raise CallError(
                f"{ctx.call} of role {model.name.role!r} at step {ctx.step} got {bad} = {stats[bad]} "
                f"(minibatch of samples {some}, ...)",
                remedy=f"Lower models.{model.name.role}.optimizer.lr, or look at these samples. No weight was changed.",
                call=ctx.call,
                step=ctx.step,
            )
        return skip is not None and skip(stats)

    return rule
