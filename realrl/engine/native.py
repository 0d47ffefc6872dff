"""The native engine: one role's decoder on this rank, trained data-parallel with plain torch.

    train_batch:  minibatch ──split──► micro-batches ──► forward, loss sum / normaliser, backward ──► gradients (+=)
                  ──► stats and gradients summed over data-parallel ranks ──► skip? ──► clip, AdamW, schedule

Nothing here depends on how a minibatch is cut: losses and stats are sums, divided by one normaliser.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from realrl.algo.api import ForwardOutput, GenerationResult, LossFn, LossOutput, MicroBatching, TrainResult
from realrl.config.schema import GenerationConfig, OptimizerConfig
from realrl.data.sample import SequenceSample
from realrl.engine.generate import Generator
from realrl.engine.groups import ALONE, Communicator
from realrl.engine.microbatch import TOKENS, split_balanced, split_in_order
from realrl.engine.optimizer import Optimizer
from realrl.engine.outputs import DecoderOutput
from realrl.engine.precision import MasterParameters
from realrl.errors import CallError
from realrl.model.attention import PackedAttention
from realrl.model.decoder import Decoder
from realrl.model.heads import LMHead
from realrl.model.hf import save_model


class NativeEngine:
    """`realrl.algo.api.Engine` for a decoder that fits on one device.

    Args:
        decoder: taken over; a trained one is converted to `compute_dtype`, a frozen one computes in its own dtype.
        role: for messages.
        dp: the ranks that hold different samples of this role's batches.
        optimizer: None for a frozen role.
        total_optimizer_steps: where the learning-rate schedule ends; see `set_total_optimizer_steps`.
        compute_dtype: of a trained decoder; masters and gradients are float32 either way.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        role: str,
        dp: Communicator = ALONE,
        optimizer: OptimizerConfig | None = None,
        total_optimizer_steps: int = 0,
        compute_dtype: torch.dtype = torch.float32,
    ) -> None:
        self.decoder = decoder
        self.role = role
        self._dp = dp
        self._optimizer: Optimizer | None = None
        if optimizer is None:
            decoder.requires_grad_(False)
        else:
            masters = MasterParameters(decoder, compute_dtype)
            self._optimizer = Optimizer(masters, optimizer, total_optimizer_steps)

    @property
    def device(self) -> torch.device:
        return self.decoder.embedding.weight.device

    @property
    def is_trainable(self) -> bool:
        """Whether there is an optimizer."""
        return self._optimizer is not None

    def set_total_optimizer_steps(self, n_total: int) -> None:
        """Say where the learning-rate schedule ends, once the length of the run is known."""
        self._require_optimizer().n_total = n_total

    # ------------------------------------------------------------ calls

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

        A skipped step leaves parameters and moments alone but advances the learning-rate schedule.

        Args:
            minibatch: must hold `input_ids`, and at least one sample.
            loss_fn: called micro-batch by micro-batch; returns sums.
            normaliser: tokens or sequences of the whole minibatch over all ranks.
            skip_step: decides from the reduced stats whether the optimizer step is left out.

        Raises:
            CallError: the role is frozen, the share is empty, or the loss or the gradient is not finite.
        """
        optimizer = self._require_optimizer()
        if len(minibatch) == 0:
            raise CallError(
                f"role {self.role!r} has no sample of a minibatch on this rank",
                remedy="Use larger minibatches or fewer data-parallel ranks.",
            )
        if not normaliser > 0:
            raise CallError(f"role {self.role!r} trains with normaliser {normaliser}, which must be positive")
        losses = []
        for micro_batch in split_balanced(minibatch.to(self.device), micro_batching):
            result = loss_fn(self._forward(micro_batch), micro_batch)
            if result.loss.requires_grad:
                (result.loss / normaliser).backward()
            losses.append(result)
        stats = self._reduce_stats(losses, normaliser)
        grad_norm = optimizer.reduce_gradients(self._dp)
        if not math.isfinite(grad_norm):
            raise CallError(
                f"the gradient of role {self.role!r} is not finite: its norm is {grad_norm}",
                remedy=f"Try a smaller models.{self.role}.optimizer.lr.",
            )
        lr = optimizer.lr
        stepped = skip_step is None or not skip_step(stats)
        if stepped:
            optimizer.step(grad_norm)
        else:
            optimizer.skip()
        return TrainResult(stats=stats, grad_norm=grad_norm, lr=lr, stepped=stepped)

    @torch.no_grad()
    def forward(
        self,
        batch: SequenceSample,
        post_fn: Callable[[ForwardOutput, SequenceSample], torch.Tensor],
        *,
        micro_batching: MicroBatching,
    ) -> torch.Tensor:
        """Inference without gradient; concatenates `post_fn`'s results (dim 0) in the order of `batch`."""
        micro_batches = split_in_order(batch.to(self.device), micro_batching)
        return torch.cat([post_fn(self._forward(micro_batch), micro_batch) for micro_batch in micro_batches])

    def generate(
        self, prompts: SequenceSample, generation: GenerationConfig, *, seed: int, step: int, eos_id: int
    ) -> GenerationResult:
        """Sample `generation.n_responses` responses for each sample's `prompt_ids`.

        Raises:
            CallError: the role has no language-model head.
        """
        if not isinstance(self.decoder.head, LMHead):
            raise CallError(f"role {self.role!r} gives scores and cannot generate", remedy='Declare it with head="lm".')
        generator = Generator(self.decoder, self.decoder.head, device=self.device)
        return generator.generate(
            prompts.samples("prompt_ids"), prompts.ids, generation, seed=seed, step=step, eos_id=eos_id
        )

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Reduce ("sum" or "max") over the ranks that hold different samples; returns a new tensor."""
        return self._dp.all_reduce_(tensor.detach().to(self.device, copy=True), op)

    # ------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """What an exact continuation needs beside the saved model; empty for a frozen role.

        Moments, counters and, unless the decoder itself is float32, master weights.
        """
        return {} if self._optimizer is None else self._optimizer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where `state_dict` was taken, with the decoder that `save_hf` wrote at that point."""
        if self._optimizer is not None:
            self._optimizer.load_state_dict(state)
        elif state:
            raise ValueError(f"role {self.role!r} is frozen, but the state holds {sorted(state)}")

    def save_hf(self, folder: str | Path) -> None:
        """Write the model in Hugging Face format; every data-parallel rank holds all of it, so one of them calls this.

        Raises:
            OSError: the disk is full or the folder cannot be written.
        """
        save_model(self.decoder, folder)

    # ------------------------------------------------------------ internals

    def _require_optimizer(self) -> Optimizer:
        if self._optimizer is None:
            raise CallError(f"role {self.role!r} is frozen and cannot be trained")
        return self._optimizer

    def _forward(self, micro_batch: SequenceSample) -> DecoderOutput:
        input_ids = micro_batch[TOKENS]
        seqlens = micro_batch.flat_seqlens(TOKENS)
        hidden = self.decoder(input_ids, packed_positions(seqlens, self.device), PackedAttention(seqlens))
        return DecoderOutput(self.decoder, hidden, input_ids, seqlens, role=self.role)

    def _reduce_stats(self, losses: Sequence[LossOutput], normaliser: float) -> dict[str, float]:
        """Sum and maximise over micro-batches and ranks; the loss itself rides along to be checked everywhere alike."""
        names, max_names = list(losses[0].stats), list(losses[0].maxima)
        sums = torch.stack([_to_row([r.loss, *(r.stats[name] for name in names)]) for r in losses]).sum(0)
        loss, *means = (self._dp.all_reduce_(sums) / normaliser).tolist()
        if not math.isfinite(loss):
            raise CallError(
                f"the loss of role {self.role!r} is {loss}", remedy=f"Try a smaller models.{self.role}.optimizer.lr."
            )
        stats = dict(zip(names, means, strict=True))
        if max_names:
            tops = torch.stack([_to_row([r.maxima[name] for name in max_names]) for r in losses]).amax(0)
            stats |= zip(max_names, self._dp.all_reduce_(tops, "max").tolist(), strict=True)
        return stats


def packed_positions(seqlens: Sequence[int], device: torch.device) -> torch.Tensor:
    """int64 [T]: each token's position in its own sequence."""
    lengths = torch.tensor(seqlens, dtype=torch.int64)
    starts = lengths.cumsum(0) - lengths
    positions = torch.arange(int(lengths.sum())) - torch.repeat_interleave(starts, lengths)
    return positions.to(device, non_blocking=True)


def _to_row(scalars: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([s.detach().to(torch.float64).reshape(()) for s in scalars])
