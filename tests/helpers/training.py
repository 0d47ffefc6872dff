"""Small batches and losses for tests of engines."""

from __future__ import annotations

from dataclasses import replace

import torch

from realrl.algo.api import ForwardOutput, LossOutput
from realrl.config.schema import OptimizerConfig
from realrl.data.sample import SequenceSample
from realrl.engine.decoder_engine import DecoderEngine
from realrl.engine.groups import ALONE, Communicator
from realrl.engine.parallel import Parallel
from realrl.mesh.device_mesh import ParallelStrategy
from realrl.model.init import random_model
from realrl.sched.messages import KeySchema, Per
from realrl.shape import DecoderConfig, HeadKind

VOCAB_SIZE = 61
OPTIMIZER = OptimizerConfig(lr=1e-2, schedule="linear", warmup_fraction=0.2, clip_grad_norm=0.5, weight_decay=0.1)
CONFIG = DecoderConfig(VOCAB_SIZE, 32, 2, 4, 2, 8, 48, attention_bias=True, o_bias=True)


def make_batch(
    n_samples: int = 10, *, seed: int = 0, sequences_per_sample: int = 1, n_shared: int = 0
) -> SequenceSample:
    """Make random sequences of 2 to 19 tokens, and a bool per transition, "mask".

    The sequences of a sample begin with `n_shared` further tokens in common.
    """
    generator = torch.Generator().manual_seed(seed)

    def tokens() -> torch.Tensor:
        length = int(torch.randint(2, 20, (), generator=generator))
        return torch.randint(0, VOCAB_SIZE, (length,), generator=generator)

    samples = [[tokens() for _ in range(sequences_per_sample)] for _ in range(n_samples)]
    if n_shared:
        prefixes = torch.randint(0, VOCAB_SIZE, (n_samples, n_shared), generator=generator)
        samples = [[torch.cat([prefix, t]) for t in s] for prefix, s in zip(prefixes, samples, strict=True)]
    masks = [[torch.rand(len(t) - 1, generator=generator) < 0.6 for t in sample] for sample in samples]
    return SequenceSample.from_lists(
        [f"1/{i}" for i in range(n_samples)],
        {
            "input_ids": (KeySchema("int64", Per.TOKEN), samples),
            "mask": (KeySchema("bool", Per.TRANSITION), masks),
        },
    )


def make_engine(
    *,
    head: HeadKind = "lm",
    dp: Communicator = ALONE,
    optimizer: OptimizerConfig | None = OPTIMIZER,
    compute_dtype: torch.dtype = torch.float32,
    n_steps: int = 10,
) -> DecoderEngine:
    """Make a trainable engine (frozen with ``optimizer=None``) over a random decoder of seed 1."""
    decoder = random_model(replace(CONFIG, head=head), seed=1)
    return DecoderEngine(
        decoder,
        role="actor",
        parallel=Parallel(dp=dp, strategy=ParallelStrategy(dp=dp.n_ranks)),
        optimizer=optimizer,
        total_optimizer_steps=n_steps,
        compute_dtype=compute_dtype,
    )


def masked_nll(out: ForwardOutput, batch: SequenceSample) -> LossOutput:
    """Negative log-likelihood plus an entropy bonus over the masked transitions."""
    logprobs, entropy = out.logprobs_and_entropy(0.8, batch["mask"])
    loss = -logprobs.sum() - 0.01 * entropy.sum()
    stats = {"nll": -logprobs.detach().sum(), "entropy": entropy.detach().sum()}
    return LossOutput(loss, stats, {"worst": -logprobs.detach().min()})


def n_masked(batch: SequenceSample) -> float:
    """The normaliser of `masked_nll`."""
    return float(batch["mask"].sum())
