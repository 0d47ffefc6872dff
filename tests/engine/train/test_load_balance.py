"""The load-balancing loss of a minibatch: the same for every cut into micro-batches, and it balances."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from realrl.algo.api import ForwardOutput, LossOutput, MicroBatching, TrainResult
from realrl.config.schema import OptimizerConfig
from realrl.data.sample import SequenceSample
from realrl.engine.decoder_engine import DecoderEngine
from realrl.model.decoder import Decoder
from realrl.model.init import random_model
from realrl.shape import DecoderConfig, MoEConfig
from tests.helpers.training import VOCAB_SIZE, make_batch, masked_nll, n_masked

MOE = MoEConfig(n_experts=6, top_k=2, intermediate_size=10, aux_loss_coef=0.5)
CONFIG = DecoderConfig(VOCAB_SIZE, 16, 2, 4, 2, 4, 24, moe=MOE)
OPTIMIZER = OptimizerConfig(lr=1e-2, schedule="constant", weight_decay=0.0, clip_grad_norm=1e9)


def make_decoder(coefficient: float = MOE.aux_loss_coef) -> Decoder:
    """Its routers prefer some experts clearly."""
    decoder = random_model(replace(CONFIG, moe=replace(MOE, aux_loss_coef=coefficient)), seed=1)
    with torch.no_grad():
        for name, p in decoder.named_parameters():
            p.mul_(20.0 if "router" in name else 3.0 if "norm" not in name else 1.0)
    return decoder


def train(decoder: Decoder, micro_batching: MicroBatching) -> tuple[TrainResult, dict[str, torch.Tensor]]:
    """One minibatch of two sequences a sample, and its gradients."""
    engine = DecoderEngine(decoder, role="actor", optimizer=OPTIMIZER)
    gradients: dict[str, torch.Tensor] = {}

    def keep(_: object) -> bool:
        assert engine._optimizer is not None
        gradients.update({name: g.clone() for name, g in engine._optimizer.gradients().items()})
        return True

    batch = make_batch(7, sequences_per_sample=2)
    result = engine.train_batch(
        batch, masked_nll, normaliser=n_masked(batch), micro_batching=micro_batching, skip_step=keep
    )
    return result, gradients


def nothing(out: ForwardOutput, batch: SequenceSample) -> LossOutput:
    return LossOutput(0.0 * out.logprobs().sum())


def test_statistics_and_gradients_do_not_depend_on_micro_batches() -> None:
    expected, gradients = train(make_decoder(), MicroBatching(n_mbs=1))
    assert expected.stats["aux_loss"] > 1.05 * MOE.top_k
    assert 1.0 < expected.stats["expert_load_max"] <= MOE.n_experts / MOE.top_k
    for micro_batching in (MicroBatching(n_mbs=3), MicroBatching(n_mbs=7), MicroBatching(max_tokens_per_mb=50)):
        result, others = train(make_decoder(), micro_batching)
        assert result.stats == pytest.approx(expected.stats, rel=1e-5)
        for name, gradient in others.items():
            torch.testing.assert_close(gradient, gradients[name], atol=1e-5, rtol=1e-4, msg=name)


def test_a_coefficient_of_zero_leaves_the_gradient_alone_and_is_still_measured() -> None:
    with_loss, gradients = train(make_decoder(), MicroBatching())
    without, others = train(make_decoder(0.0), MicroBatching())
    assert without.stats == with_loss.stats
    name = "blocks.1.mlp.router.weight"
    assert not torch.allclose(gradients[name], others[name], rtol=0.05)
    halved, between = train(make_decoder(MOE.aux_loss_coef / 2), MicroBatching())
    assert halved.stats == without.stats
    torch.testing.assert_close(between[name], (gradients[name] + others[name]) / 2, atol=1e-6, rtol=1e-4)


def test_training_on_it_alone_balances_the_experts() -> None:
    engine = DecoderEngine(make_decoder(), role="actor", optimizer=OPTIMIZER)
    batch = make_batch(6)
    losses = []
    for _ in range(25):
        result = engine.train_batch(batch, nothing, normaliser=1.0, micro_batching=MicroBatching(n_mbs=2))
        losses.append(result.stats["aux_loss"])
    assert losses[0] > 1.05 * MOE.top_k
    assert losses[-1] - MOE.top_k < 0.5 * (losses[0] - MOE.top_k)


def test_a_dense_model_has_no_such_statistics() -> None:
    result, _ = train(random_model(replace(CONFIG, moe=None), seed=1), MicroBatching())
    assert not {"aux_loss", "expert_load_max"} & result.stats.keys()
