"""The pretraining loss adds the dataset's answers to a policy's loss, and changes nothing else."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from realrl.algo.api import Model
from realrl.algo.policy.actor import PolicyActor
from realrl.config.policy_options import PolicyOptions
from realrl.data.sample import SequenceSample
from realrl.errors import CallError
from realrl.graph.mfc import ModelName
from tests.algo.batches import metadata
from tests.helpers.fake_engine import Bigram, FakeEngine, FakeTokenizer, ThreadGroup, fake_context
from tests.helpers.policies import CASES, GENERATION, rollout_batch

N_TOKENS = 5
TEXTS = ["ab", "d", "cba", "aabb"]
COEF = 0.7


class LetterTokenizer(FakeTokenizer):
    """Encodes what `FakeTokenizer` decodes."""

    name_or_path = "letters"

    def __call__(self, texts: Sequence[str], **_: Any) -> dict[str, list[list[int]]]:
        return {"input_ids": [[ord(letter) - 97 for letter in text] for text in texts]}


def batch_of(texts: Sequence[str] = TEXTS) -> SequenceSample:
    batch = rollout_batch(len(texts), vocab_size=N_TOKENS)
    return batch.update(metadata(batch.ids, [{"answer": text} for text in texts]))


def train(
    batch: SequenceSample, options: PolicyOptions, *, n_mbs: int = 1, module: Bigram | None = None, **engine: Any
) -> tuple[dict[str, float], Bigram]:
    module = module or Bigram(N_TOKENS)
    model = Model(ModelName("actor"), FakeEngine(module, lr=0.1, **engine), LetterTokenizer(N_TOKENS - 1))
    ctx = fake_context("actor_train", [batch.ids], algorithm=options, generation=GENERATION, n_mbs=n_mbs)
    return PolicyActor().train_step(model, batch, ctx), module


def answer_pairs(batch: SequenceSample) -> list[tuple[int, int]]:
    """(token, next token) of every token of the answers, their ends included."""
    pairs = []
    for tokens, masks, text in zip(batch.sequences("input_ids"), batch.sequences("prompt_mask"), TEXTS, strict=True):
        whole = [int(tokens[0][masks[0]][-1]), *(ord(letter) - 97 for letter in text), N_TOKENS - 1]
        pairs += itertools.pairwise(whole)
    return pairs


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "gspo", "lagrangian"])
def test_the_loss_is_the_mean_over_answer_tokens_and_leaves_the_others_alone(name: str) -> None:
    batch, options = batch_of(), CASES[name]
    plain, without = train(batch, options)
    found, module = train(batch, options.model_copy(update={"ptx_coef": COEF}), n_mbs=3)
    pairs = answer_pairs(batch)
    p = torch.softmax(Bigram(N_TOKENS).logits.detach().double(), -1).numpy()
    assert found["actor/ptx_loss"] == pytest.approx(np.mean([-math.log(p[x, y]) for x, y in pairs]), rel=1e-5)
    for key, value in plain.items():
        if key != "actor/grad_norm":
            assert found[key] == pytest.approx(value, rel=1e-4, abs=1e-6), key
    grad = np.zeros_like(p)
    for x, y in pairs:
        grad[x] += (p[x] - np.eye(N_TOKENS)[y]) / len(pairs)
    moved = (module.logits - without.logits).detach().numpy()
    np.testing.assert_allclose(moved, -0.1 * COEF * grad, rtol=1e-4, atol=1e-6)


def test_two_ranks_are_as_one() -> None:
    batch, options = batch_of(), CASES["grpo"].model_copy(update={"ptx_coef": COEF})
    wanted, alone = train(batch, options)
    group, modules = ThreadGroup(2), [Bigram(N_TOKENS), Bigram(N_TOKENS)]
    shares = [batch.select(batch.ids[:1]), batch.select(batch.ids[1:])]
    work = [
        lambda r=r: train(shares[r], options, module=modules[r], all_reduce=group.all_reduce(r))[0] for r in range(2)
    ]
    for metrics, module in zip(group.run(work), modules, strict=True):
        assert metrics == pytest.approx(wanted, rel=1e-4, abs=1e-6)
        torch.testing.assert_close(module.logits, alone.logits)


def test_a_row_without_answer_is_named() -> None:
    batch = batch_of()
    rows = [{"answer": "a"}, {"response": "b"}, {"solution": "c"}, {"answer": "d"}]
    batch = batch.update(metadata(batch.ids, rows))
    with pytest.raises(
        CallError, match=r"the row of sample '1/2' has no answer, and algorithm\.ptx_coef=0\.7"
    ) as error:
        train(batch, PolicyOptions(ptx_coef=COEF))
    assert error.value.sample_ids == ("1/2",)
