from __future__ import annotations

import pytest
import torch

from realrl.algo.api import LossOutput, ModelInterface
from realrl.algo.supervised.sft import SFT
from realrl.algo.training import TrainSummary, train_minibatches
from realrl.errors import CallError
from tests.algo.batches import token_batch
from tests.helpers.fake_engine import Bigram, FakeEngine, ThreadGroup, fake_context, fake_model

BATCH = token_batch([[([0, 1], [2, 3])], [([1], [1, 2, 3])], [([3, 3], [0])], [([2], [2])]])


def train(module: Bigram, *, n_mbs: int | None = None, minibatches: tuple[tuple[str, ...], ...] | None = None):
    engine = FakeEngine(module, lr=0.5)
    ctx = fake_context("actor_train", minibatches or (("0/0", "0/1"), ("0/2", "0/3")), n_mbs=n_mbs)
    return SFT().train_step(fake_model("actor", engine), BATCH, ctx), engine


def test_sft_loss_is_the_token_mean_over_answer_tokens() -> None:
    module = Bigram(4)
    table = torch.log_softmax(module.logits.detach(), -1)
    pairs = [(1, 2), (2, 3), (1, 1), (1, 2), (2, 3), (3, 0), (2, 2)]
    wanted = -sum(float(table[a, b]) for a, b in pairs) / len(pairs)
    metrics, engine = train(module, minibatches=(BATCH.ids,))
    assert metrics["actor/loss"] == pytest.approx(wanted, rel=1e-5)
    assert metrics["actor/ppl"] == pytest.approx(torch.tensor(wanted).exp().item(), rel=1e-5)
    assert metrics["actor/n_tokens"] == 7.0
    assert metrics["actor/lr"] == 0.5
    assert engine.normalisers == [7.0]


def test_sft_learns() -> None:
    module = Bigram(4)
    losses = [train(module)[0]["actor/loss"] for _ in range(20)]
    assert losses[-1] < 0.7 * losses[0]


def test_micro_batches_change_nothing() -> None:
    one, two = Bigram(4), Bigram(4)
    first, second = train(one)[0], train(two, n_mbs=2)[0]
    assert first == pytest.approx(second, rel=1e-5)
    torch.testing.assert_close(one.logits, two.logits)


def test_two_ranks_are_as_one() -> None:
    alone = Bigram(4)
    wanted = train(alone)[0]
    group, modules = ThreadGroup(2), [Bigram(4), Bigram(4)]
    shares = [(("0/0",), ("0/2", "0/3")), (("0/1",), ())]

    def rank(r: int) -> dict[str, float]:
        engine = FakeEngine(modules[r], lr=0.5, all_reduce=group.all_reduce(r))
        batch = BATCH.select([i for ids in shares[r] for i in ids])
        return SFT().train_step(fake_model("actor", engine), batch, fake_context("actor_train", shares[r]))

    for metrics, module in zip(group.run([lambda: rank(0), lambda: rank(1)]), modules, strict=True):
        assert metrics == pytest.approx(wanted, rel=1e-5)
        torch.testing.assert_close(module.logits, alone.logits)


def test_statistics_are_over_all_passes_and_units_of_one() -> None:
    module = Bigram(4)
    passes = (("0/0", "0/1"), ("0/2", "0/3"), ("0/0", "0/3"), ("0/1", "0/2"))
    engine = FakeEngine(module, lr=0.0)
    ctx = fake_context("actor_train", passes, n_passes=2)
    metrics = SFT().train_step(fake_model("actor", engine), BATCH, ctx)
    whole = train(Bigram(4), minibatches=(BATCH.ids,))[0]
    assert metrics["actor/loss"] == pytest.approx(whole["actor/loss"], rel=1e-5)
    assert metrics["actor/n_tokens"] == whole["actor/n_tokens"] == 7.0
    assert len(engine.normalisers) == 4
    assert [one.minibatches for one in ctx.single_passes] == [passes[:2], passes[2:]]


@pytest.mark.parametrize("repeats", [1, 3])
def test_an_interface_may_repeat_its_minibatches(repeats: int) -> None:
    engine = FakeEngine(Bigram(4), lr=0.5)

    def loss(out, mb):
        total = -out.logprobs().sum()
        return LossOutput(total, {"loss": total.detach()})

    ctx = fake_context("actor_train", (BATCH.ids[:2], BATCH.ids[2:]))
    summary = train_minibatches(fake_model("actor", engine), BATCH, ctx, loss, count=len, passes=repeats)
    assert engine.normalisers == [2.0] * 2 * repeats
    assert summary.n_units == 4.0


def test_a_minibatch_without_answers_does_no_harm() -> None:
    batch = token_batch([[([0, 1], [])]])
    module = Bigram(4)
    before = module.logits.detach().clone()
    metrics = SFT().train_step(fake_model("actor", FakeEngine(module)), batch, fake_context("t", [batch.ids]))
    assert metrics["actor/n_tokens"] == 0.0
    assert torch.equal(module.logits, before)


def test_a_loss_that_is_not_finite_is_named_and_changes_no_weight() -> None:
    module = Bigram(4)
    before = module.logits.detach().clone()

    def loss(out, mb):
        bad = out.logprobs().sum() * float("nan")
        return LossOutput(bad, {"loss": bad.detach()})

    model = fake_model("actor", FakeEngine(module))
    with pytest.raises(CallError, match=r"actor_train of role 'actor' at step 7 got loss = nan .*0/0") as error:
        train_minibatches(model, BATCH, fake_context("actor_train", [BATCH.ids], step=7), loss, count=len)
    assert "models.actor.optimizer.lr" in str(error.value)
    assert (error.value.call, error.value.step) == ("actor_train", 7)
    assert torch.equal(module.logits, before)


def test_an_interface_says_what_it_cannot_do() -> None:
    with pytest.raises(NotImplementedError, match="SFT cannot generate"):
        SFT().generate(None, BATCH, None)  # type: ignore[arg-type]
    assert ModelInterface().state_dict() == {}


def test_a_summary_as_metrics_of_a_role() -> None:
    summary = TrainSummary(stats={"loss": 2.0}, grad_norm=1.5, lr=0.1, n_skipped=0, n_units=3.0)
    assert summary.metrics("actor") == {"actor/loss": 2.0, "actor/grad_norm": 1.5, "actor/lr": 0.1}
