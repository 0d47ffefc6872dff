"""DPO and KTO against the papers' formulas in float64, with a model of a few parameters."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from realrl.algo.supervised.dpo import DPO
from realrl.algo.supervised.kto import KTO, take_sequence
from realrl.algo.supervised.preference_losses import dpo_loss, kto_loss
from realrl.config.algorithms import DPOOptions, KTOOptions
from realrl.data.sample import SequenceSample
from realrl.errors import CallError
from realrl.sched.messages import KeySchema, Per
from tests.algo.batches import TRANSITION, token_batch
from tests.helpers.fake_engine import Bigram, FakeEngine, ThreadGroup, fake_context, fake_model

TEXTS = [
    [([0, 1], [1, 2]), ([0, 1], [3])],
    [([1], [2]), ([1], [0, 3, 3])],
    [([2, 2], [2, 1]), ([2, 2], [2])],
    [([3], [0]), ([3], [1, 1])],
]
LABELS = [True, False, True, True]
REFERENCE = Bigram(4, seed=6)


def table(module: Bigram) -> np.ndarray:
    logits = module.logits.detach().double().numpy()
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def answer_logprob(module: Bigram, prompt: Sequence[int], answer: Sequence[int]) -> float:
    tokens = [prompt[-1], *answer]
    return float(sum(table(module)[a, b] for a, b in itertools.pairwise(tokens)))


def batch_with_reference(junk: float = 0.0) -> SequenceSample:
    """Pairs with `ref_logprobs`, whose prompt transitions hold `junk`, and a `label`."""
    batch = token_batch(TEXTS)
    rows = []
    for sample in TEXTS:
        rows.append([])
        for prompt, answer in sample:
            tokens = [prompt[-1], *answer]
            values = [table(REFERENCE)[a, b] for a, b in itertools.pairwise(tokens)]
            rows[-1].append(torch.tensor([junk] * (len(prompt) - 1) + values, dtype=torch.float32))
    labels = [[torch.tensor([label])] for label in LABELS]
    more = {"ref_logprobs": (TRANSITION, rows), "label": (KeySchema("bool", Per.SAMPLE), labels)}
    return batch.update(SequenceSample.from_lists(batch.ids, more))


BATCH = batch_with_reference()


def logratios(module: Bigram) -> np.ndarray:
    """[samples, 2]."""
    return np.array(
        [[answer_logprob(module, *part) - answer_logprob(REFERENCE, *part) for part in sample] for sample in TEXTS]
    )


def softplus(x: np.ndarray) -> np.ndarray:
    return np.log1p(np.exp(x))


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-x))


# ---------------------------------------------------------------- DPO


def dpo(module: Bigram, batch: SequenceSample = BATCH, n_mbs: int | None = None, **options: object) -> dict[str, float]:
    ctx = fake_context("actor_train", [batch.ids], algorithm=DPOOptions.model_validate(options), n_mbs=n_mbs)
    return DPO().train_step(fake_model("actor", FakeEngine(module, lr=1.0)), batch, ctx)


def test_dpo_is_the_paper_s_loss() -> None:
    module = Bigram(4)
    ratios = logratios(module)
    margins = ratios[:, 0] - ratios[:, 1]
    metrics = dpo(module, beta=0.5)
    assert metrics["actor/loss"] == pytest.approx(softplus(-0.5 * margins).mean(), rel=1e-5)
    assert metrics["actor/margin"] == pytest.approx(0.5 * margins.mean(), rel=1e-5)
    assert metrics["actor/accuracy"] == pytest.approx((margins > 0).mean())
    assert metrics["actor/chosen_reward"] == pytest.approx(0.5 * ratios[:, 0].mean(), rel=1e-5)
    assert metrics["actor/rejected_reward"] == pytest.approx(0.5 * ratios[:, 1].mean(), rel=1e-5)
    assert metrics["actor/n_pairs"] == 4.0


def test_dpo_variants() -> None:
    ratios = logratios(Bigram(4))
    margins = ratios[:, 0] - ratios[:, 1]
    smoothed = 0.8 * softplus(-2.0 * margins) + 0.2 * softplus(2.0 * margins)
    assert dpo(Bigram(4), beta=2.0, label_smoothing=0.2)["actor/loss"] == pytest.approx(smoothed.mean(), rel=1e-5)
    hinge = np.maximum(0.0, 1.0 - 2.0 * margins)
    assert 0 < (hinge > 0).sum() <= 4
    assert dpo(Bigram(4), beta=2.0, loss="hinge")["actor/loss"] == pytest.approx(hinge.mean(), rel=1e-5)
    counts = np.array([[len(answer) for _, answer in sample] for sample in TEXTS])
    means = ratios / counts
    ipo = (means[:, 0] - means[:, 1] - 1 / (2 * 0.3)) ** 2
    assert dpo(Bigram(4), beta=0.3, loss="ipo")["actor/loss"] == pytest.approx(ipo.mean(), rel=1e-5)


def test_dpo_with_an_sft_term() -> None:
    chosen = [-answer_logprob(Bigram(4), *sample[0]) / len(sample[0][1]) for sample in TEXTS]
    plain, metrics = dpo(Bigram(4)), dpo(Bigram(4), sft_coef=0.7)
    assert metrics["actor/sft_loss"] == pytest.approx(np.mean(chosen), rel=1e-5)
    assert metrics["actor/loss"] == pytest.approx(plain["actor/loss"] + 0.7 * np.mean(chosen), rel=1e-5)
    assert "actor/sft_loss" not in plain


def test_dpo_learns_to_prefer() -> None:
    module = Bigram(4)
    for _ in range(30):
        metrics = dpo(module, beta=0.5)
    assert metrics["actor/accuracy"] == 1.0
    assert metrics["actor/margin"] > 0.5


def test_dpo_of_the_reference_itself_is_log_2() -> None:
    metrics = dpo(Bigram(4, seed=6))
    assert metrics["actor/loss"] == pytest.approx(np.log(2.0), rel=1e-6)
    assert metrics["actor/margin"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["actor/accuracy"] == 0.0


def test_rounding_decides_no_tie() -> None:
    noise = torch.tensor([3e-5, -3e-5, -2e-5, 4e-5, 0.0, 0.0, 0.002, 0.0])  # only the last pair differs in earnest
    for logratios in (noise, noise[[1, 0, 3, 2, 5, 4, 6, 7]]):
        stats = dpo_loss(logratios, torch.ones(8, dtype=torch.int64), kind="sigmoid", beta=0.1).stats
        assert stats["accuracy"] == 1.0


def test_a_sample_that_is_no_pair_is_named() -> None:
    single = take_sequence(BATCH, 0)
    with pytest.raises(CallError, match=r"actor_train of role 'actor' at step 1 needs two sequences .* '0/0' has 1"):
        dpo(Bigram(4), single)


@pytest.mark.parametrize("loss", ["hinge", "ipo"])
def test_an_option_that_the_loss_does_not_read_is_refused(loss: str) -> None:
    with pytest.raises(ValueError, match=f"label_smoothing=0.1 has no effect with loss={loss}; only sigmoid reads it"):
        DPOOptions.model_validate({"loss": loss, "label_smoothing": 0.1})


# ---------------------------------------------------------------- KTO


def kto(
    module: Bigram,
    batch: SequenceSample = BATCH,
    minibatches: Sequence[Sequence[str]] | None = None,
    n_mbs: int | None = None,
    **options: object,
) -> dict[str, float]:
    algorithm = KTOOptions.model_validate(options)
    ctx = fake_context("actor_train", minibatches or [batch.ids], algorithm=algorithm, n_mbs=n_mbs)
    return KTO().train_step(fake_model("actor", FakeEngine(module, lr=1.0)), batch, ctx)


def wanted_kto(ratios: np.ndarray, labels: np.ndarray, *, beta: float, good: float, bad: float) -> tuple[float, float]:
    """Loss and reference point of a minibatch."""
    kl = max(ratios[:, 1].mean(), 0.0)
    own = ratios[:, 0]
    value = np.where(labels, sigmoid(beta * (own - kl)), sigmoid(beta * (kl - own)))
    return float((np.where(labels, good, bad) * (1.0 - value)).mean()), float(kl)


@pytest.mark.parametrize("seed", [0, 1, 2, 3])
def test_kto_is_the_paper_s_loss(seed: int) -> None:
    ratios, labels = logratios(Bigram(4, seed)), np.array(LABELS)
    loss, kl = wanted_kto(ratios, labels, beta=0.5, good=1.5, bad=0.75)
    metrics = kto(Bigram(4, seed), beta=0.5, desirable_weight=1.5, undesirable_weight=0.75)
    assert metrics["actor/loss"] == pytest.approx(loss, rel=1e-5)
    assert metrics["actor/kl"] == pytest.approx(kl, rel=1e-5)
    assert metrics["actor/good_reward"] == pytest.approx(0.5 * ratios[labels, 0].mean(), rel=1e-4)
    assert metrics["actor/bad_reward"] == pytest.approx(0.5 * ratios[~labels, 0].mean(), rel=1e-4)
    assert metrics["actor/margin"] == pytest.approx(metrics["actor/good_reward"] - metrics["actor/bad_reward"])
    assert (metrics["actor/n_good"], metrics["actor/n_bad"]) == (3.0, 1.0)


def test_the_reference_point_is_sometimes_clamped() -> None:
    """So that the test above sees both cases."""
    means = [logratios(Bigram(4, seed))[:, 1].mean() for seed in range(4)]
    assert min(means) < 0 < max(means)


def test_each_minibatch_has_its_reference_point() -> None:
    """Under the parameters that the minibatch starts from: the second one sees the first one's step."""
    halves = [("0/0", "0/1"), ("0/2", "0/3")]
    modules = [Bigram(4), Bigram(4)]
    together = kto(modules[0], minibatches=halves)
    apart = [kto(modules[1], BATCH.select(ids)) for ids in halves]
    torch.testing.assert_close(modules[0].logits, modules[1].logits)
    for name in ("actor/loss", "actor/kl"):
        assert together[name] == pytest.approx((apart[0][name] + apart[1][name]) / 2, rel=1e-5)
    assert together["actor/n_good"] == 3.0


def test_kto_without_one_kind_of_answers() -> None:
    good = BATCH.select(["0/0", "0/2"])
    metrics = kto(Bigram(4), good)
    assert (metrics["actor/n_good"], metrics["actor/n_bad"]) == (2.0, 0.0)
    assert {"actor/bad_reward", "actor/margin"}.isdisjoint(metrics)


def test_kto_learns() -> None:
    module = Bigram(4)
    first = kto(module, beta=1.0)
    for _ in range(40):
        metrics = kto(module, beta=1.0)
    assert metrics["actor/margin"] > first["actor/margin"] + 0.1
    assert metrics["actor/loss"] < first["actor/loss"]


def test_the_reference_point_has_no_gradient() -> None:
    ratios = torch.tensor([0.5, -0.25], requires_grad=True)
    kto_loss(
        ratios, torch.tensor([True, False]), 0.3, beta=1.0, desirable_weight=1.0, undesirable_weight=2.0
    ).loss.backward()
    s = torch.sigmoid(torch.tensor([0.2, 0.55]))
    torch.testing.assert_close(ratios.grad, torch.tensor([-1.0, 2.0]) * s * (1 - s))


def test_two_ranks_share_one_reference_point() -> None:
    alone = Bigram(4)
    wanted = kto(alone)
    group, modules = ThreadGroup(2), [Bigram(4), Bigram(4)]
    shares = [("0/1",), ("0/0", "0/2", "0/3")]

    def rank(r: int) -> dict[str, float]:
        engine = FakeEngine(modules[r], lr=1.0, all_reduce=group.all_reduce(r))
        ctx = fake_context("actor_train", [shares[r]], algorithm=KTOOptions())
        return KTO().train_step(fake_model("actor", engine), BATCH.select(shares[r]), ctx)

    for metrics, module in zip(group.run([lambda: rank(0), lambda: rank(1)]), modules, strict=True):
        assert metrics == pytest.approx(wanted, rel=1e-4)
        torch.testing.assert_close(module.logits, alone.logits)


# ---------------------------------------------------------------- both


@pytest.mark.parametrize("train", [dpo, kto])
def test_micro_batches_and_junk_on_prompts_change_nothing(train) -> None:
    modules = [Bigram(4), Bigram(4), Bigram(4)]
    wanted = train(modules[0])
    assert train(modules[1], n_mbs=3) == pytest.approx(wanted, rel=1e-4)
    assert train(modules[2], batch_with_reference(junk=float("nan"))) == pytest.approx(wanted, rel=1e-6)
    for module in modules[1:]:
        torch.testing.assert_close(module.logits, modules[0].logits)


def test_an_answer_without_tokens_counts_as_0() -> None:
    zeros = torch.zeros(2, requires_grad=True)
    for kind in ("sigmoid", "hinge", "ipo"):
        loss = dpo_loss(zeros, torch.tensor([3, 0]), kind=kind, beta=0.5).loss
        assert torch.isfinite(loss)
        loss.backward()
    assert torch.isfinite(zeros.grad).all()


def test_take_sequence_keeps_keys_per_sample() -> None:
    second = take_sequence(BATCH, 1)
    assert second.seqlens["input_ids"] == ((3,), (4,), (3,), (3,))
    assert second["input_ids"].tolist()[:3] == [0, 1, 3]
    assert second["label"].tolist() == LABELS
    assert len(take_sequence(BATCH.select([]), 0)) == 0
