"""Distillation against float64 softmaxes of the whole vocabulary, through real engines."""

from __future__ import annotations

import math

import pytest
import torch

from realrl.algo.api import MicroBatching, Model
from realrl.algo.packed import response_mask
from realrl.algo.policy.actor import PolicyActor
from realrl.config.policy_options import DistillOptions
from realrl.data.sample import SequenceSample
from realrl.engine.decoder_engine import DecoderEngine
from realrl.graph.mfc import ModelName
from realrl.model.init import random_model
from realrl.model.layers.attention import PackedAttention
from tests.helpers.fake_engine import FakeTokenizer, fake_context
from tests.helpers.policies import GENERATION, gradients_of, rollout_batch
from tests.helpers.training import CONFIG, VOCAB_SIZE, make_engine


def teacher() -> Model:
    return Model(ModelName("teacher"), DecoderEngine(random_model(CONFIG, seed=9), role="teacher"), FakeTokenizer(2))


def whole_logprobs(engine: DecoderEngine, batch: SequenceSample) -> torch.Tensor:
    """float64 [R, V]: of the next token after each action's prefix."""
    rows = []
    for tokens, mask in zip(batch.samples("input_ids"), batch.samples("prompt_mask"), strict=True):
        positions = torch.arange(len(tokens))
        hidden = engine.decoder.forward_stage(tokens, positions, PackedAttention([len(tokens)]))
        logits = engine.decoder.head(hidden).double() / GENERATION.temperature
        rows.append(torch.log_softmax(logits[:-1][~mask[1:]], -1))
    return torch.cat(rows)


def prepared(top_k: int) -> tuple[SequenceSample, torch.Tensor]:
    """A batch with the teacher's likeliest tokens, and the teacher's whole distributions."""
    batch = rollout_batch(4, vocab_size=VOCAB_SIZE, n_responses=1, others=math.log(1 / VOCAB_SIZE))
    left_out = ("teacher_logprobs", "behavior_logprobs")
    batch = batch.select(batch.ids, tuple(key for key in batch.keys if key not in left_out))
    ctx = fake_context("teacher_inf", [batch.ids], generation=GENERATION, n_mbs=2)
    found = PolicyActor(top_k=top_k).inference(teacher(), batch, ctx)
    with torch.no_grad():
        whole = whole_logprobs(teacher().engine, batch)
    return batch.update(found.remap({key: f"teacher_{key}" for key in found.keys})), whole


def test_inference_gives_the_likeliest_tokens() -> None:
    batch, whole = prepared(top_k=5)
    mask = response_mask(batch)
    wanted, tokens = whole.topk(5, dim=1)
    assert torch.equal(batch["teacher_top_tokens"][mask], tokens)
    torch.testing.assert_close(batch["teacher_top_logprobs"][mask].double(), wanted, rtol=1e-5, atol=1e-5)
    assert batch["teacher_top_tokens"][~mask].abs().sum() == 0
    plain = PolicyActor().inference(teacher(), batch, fake_context("inf", [batch.ids], generation=GENERATION))
    torch.testing.assert_close(batch["teacher_logprobs"], plain["logprobs"])


def coarse_kl(logp: torch.Tensor, logq: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """float64 [R]: KL with all but these tokens taken as one."""
    p, q = logp.exp(), logq.exp()
    is_top = torch.zeros_like(p, dtype=torch.bool).scatter(1, tokens, True)
    kl = torch.where(is_top, p * (logp - logq), 0.0).sum(1)
    if tokens.shape[1] == p.shape[1]:
        return kl
    p_rest, q_rest = (torch.where(is_top, 0.0, x).sum(1) for x in (p, q))
    return kl + p_rest * (p_rest.log() - q_rest.log())


@pytest.mark.parametrize("top_k", [1, 4, VOCAB_SIZE, 1000])
def test_the_kl_and_its_gradient(top_k: int) -> None:
    batch, whole = prepared(top_k)
    options = DistillOptions(advantage="reverse_kl", policy_loss="teacher_kl", teacher_top_k=top_k)
    metrics, gradients = gradients_of(make_engine(), batch, options, MicroBatching(n_mbs=2))
    engine = make_engine()
    tokens = batch["teacher_top_tokens"][response_mask(batch)]
    assert tokens.shape[1] == min(top_k, VOCAB_SIZE)
    loss = coarse_kl(whole_logprobs(engine, batch), whole, tokens).mean()
    loss.backward()
    assert metrics["actor/pg_loss"] == pytest.approx(loss.item(), rel=1e-4)
    for name, parameter in engine.decoder.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-3, atol=1e-6)


def test_more_tokens_see_more_of_the_kl() -> None:
    losses = []
    for top_k in (1, 8, VOCAB_SIZE):
        options = DistillOptions(advantage="reverse_kl", policy_loss="teacher_kl", teacher_top_k=top_k)
        losses.append(gradients_of(make_engine(), prepared(top_k)[0], options)[0]["actor/pg_loss"])
    assert 0.0 < losses[0] < losses[1] < losses[2]
