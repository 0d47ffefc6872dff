"""SFT, reward model, DPO and KTO give TRL's losses for the same weights and rows."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.parity.trl_models import Text, Twin, assert_parity, bare_trainer, packed, padded, texts, trl, twin  # isort: skip

from realrl.algo.policy.actor import PolicyActor
from realrl.algo.supervised.dpo import DPO
from realrl.algo.supervised.kto import KTO
from realrl.algo.supervised.rw import RewardModel
from realrl.algo.supervised.sft import SFT
from realrl.config.algorithms import DPOOptions, KTOOptions
from realrl.data.sample import SequenceSample
from realrl.sched.messages import KeySchema, Per
from tests.helpers.fake_engine import fake_context

FUSED = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
PAIRS = texts(5)


@pytest.fixture(scope="module")
def actor(tmp_path_factory: pytest.TempPathFactory) -> Twin:
    return twin(tmp_path_factory.mktemp("actor"), seed=1, outputs=FUSED)


@pytest.fixture(scope="module")
def ref(tmp_path_factory: pytest.TempPathFactory) -> Twin:
    return twin(tmp_path_factory.mktemp("ref"), seed=2, outputs=FUSED)


@pytest.mark.filterwarnings("ignore")
def test_sft(actor: Twin) -> None:
    rows = [sample[:1] for sample in PAIRS]
    batch = packed(rows)
    ours = SFT().train_step(actor.model, batch, fake_context("actor_train", [batch.ids]))
    inputs = padded([row for [row] in rows])
    labels = inputs["input_ids"].masked_fill(inputs.pop("completion_mask") == 0, -100)
    trainer = bare_trainer(
        trl.SFTTrainer,
        actor.hf,
        compute_loss_func=None,
        label_smoother=None,
        args=SimpleNamespace(loss_type="nll", average_tokens_across_devices=False),
    )
    theirs = trainer.compute_loss(actor.hf, {**inputs, "labels": labels})
    assert_parity("actor/loss", ours, actor.engine, theirs, actor.hf)


@pytest.mark.filterwarnings("ignore")
def test_reward_model(tmp_path: Path) -> None:
    reward = twin(tmp_path, seed=3, head="reward")
    batch = packed(PAIRS)
    ours = RewardModel().train_step(reward.model, batch, fake_context("reward_train", [batch.ids]))
    inputs = padded(chosen_then_rejected(PAIRS))
    del inputs["completion_mask"]
    trainer = bare_trainer(trl.RewardTrainer, reward.hf, args=SimpleNamespace(center_rewards_coefficient=None))
    theirs = trainer.compute_loss(reward.hf, inputs)
    assert_parity("actor/loss", ours, reward.engine, theirs, reward.hf)
    assert ours["actor/accuracy"] == pytest.approx(trainer._metrics["train"]["accuracy"][0])


def chosen_then_rejected(pairs: list[list[Text]]) -> list[Text]:
    return [pair[0] for pair in pairs] + [pair[1] for pair in pairs]


def with_reference(batch: SequenceSample, ref: Twin) -> SequenceSample:
    ref_inf = PolicyActor().inference(ref.model, batch, fake_context("ref_inf", [batch.ids]))
    return batch.update(ref_inf.remap({"logprobs": "ref_logprobs"}))


def trl_dpo(
    actor: Twin, ref: Twin, pairs: list[list[Text]], losses: list[str], weights: list[float], **attributes: Any
):
    trainer = bare_trainer(
        trl.DPOTrainer,
        actor.hf,
        ref_model=ref.hf,
        precompute_ref_logps=False,
        ld_alpha=None,
        f_divergence_type="reverse_kl",
        use_weighting=False,
        loss_types=losses,
        loss_weights=weights,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        **attributes,
    )
    return trainer.compute_loss(actor.hf, padded(chosen_then_rejected(pairs))), trainer._metrics["train"]


DPO_CASES = {
    "sigmoid": ({}, ["sigmoid"], [1.0], False),
    "hinge": ({"loss": "hinge", "beta": 0.05}, ["hinge"], [1.0], False),
    "ipo": ({"loss": "ipo", "beta": 0.4}, ["ipo"], [1.0], False),
    # Of a single pair, what TRL calls aot is the smoothed sigmoid loss, and its sft the mean over the answer's tokens.
    "label_smoothing": ({"label_smoothing": 0.2}, ["aot"], [1.0], True),
    "sft": ({"sft_coef": 0.7}, ["sigmoid", "sft"], [1.0, 0.7], True),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", DPO_CASES)
def test_dpo(actor: Twin, ref: Twin, case: str) -> None:
    changes, losses, weights, pair_by_pair = DPO_CASES[case]
    options = DPOOptions.model_validate(changes)
    batch = with_reference(packed(PAIRS), ref)
    ours = DPO().train_step(actor.model, batch, fake_context("actor_train", [batch.ids], algorithm=options))
    attributes = {"beta": options.beta, "label_smoothing": options.label_smoothing}
    parts = [[pair] for pair in PAIRS] if pair_by_pair else [PAIRS]
    found = [trl_dpo(actor, ref, part, losses, weights, **attributes) for part in parts]
    theirs = torch.stack([loss for loss, _ in found]).mean()
    assert_parity("actor/loss", ours, actor.engine, theirs, actor.hf)
    if not pair_by_pair:
        [(_, metrics)] = found
        for name, key in (
            ("accuracy", "rewards/accuracies"),
            ("margin", "rewards/margins"),
            ("chosen_reward", "rewards/chosen"),
            ("rejected_reward", "rewards/rejected"),
        ):
            assert ours[f"actor/{name}"] == pytest.approx(metrics[key][0], rel=1e-4), name


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("swap", [False, True])
def test_kto(actor: Twin, ref: Twin, swap: bool) -> None:
    """With the models swapped, the reference point has the other sign: once it counts, once it is 0."""
    policy, reference = (ref, actor) if swap else (actor, ref)
    labels = [True, False, False, True, False]
    schema = KeySchema("bool", Per.SAMPLE)
    batch = packed(PAIRS)
    label = SequenceSample.from_lists(batch.ids, {"label": (schema, [[torch.tensor([one])] for one in labels])})
    batch = with_reference(batch, reference).update(label)
    options = KTOOptions(beta=0.2, desirable_weight=1.5, undesirable_weight=0.6)
    ours = KTO().train_step(policy.model, batch, fake_context("actor_train", [batch.ids], algorithm=options))
    trainer = bare_trainer(
        trl.KTOTrainer,
        policy.hf,
        ref_model=reference.hf,
        calculate_KL=True,
        precompute_ref_logps=False,
        loss_type="kto",
        beta=options.beta,
        desirable_weight=options.desirable_weight,
        undesirable_weight=options.undesirable_weight,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
    )
    inputs = padded([own for own, _ in PAIRS]) | padded([other for _, other in PAIRS], prefix="KL_")
    theirs = trainer.compute_loss(policy.hf, {**inputs, "label": torch.tensor(labels)})
    assert_parity("actor/loss", ours, policy.engine, theirs, policy.hf)
    metrics = trainer._metrics["train"]
    assert ours["actor/kl"] == pytest.approx(metrics["kl"][0], rel=1e-4, abs=1e-5)
    assert ours["actor/good_reward"] == pytest.approx(metrics["rewards/chosen"][0], rel=1e-4)
    assert ours["actor/bad_reward"] == pytest.approx(metrics["rewards/rejected"][0], rel=1e-4)
