from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from realrl.algo.packed import Actions
from realrl.algo.policy.kl import adapted_coef, sequence_kl, shape_scores, token_rewards
from tests.algo.batches import Sequence1, pack, sequences


@pytest.mark.parametrize(("kl", "error"), [(9.0, 0.2), (6.6, 0.1), (6.0, 0.0), (5.4, -0.1), (-3.0, -0.2)])
def test_kl_above_target_raises_the_weight(kl: float, error: float) -> None:
    assert adapted_coef(0.1, kl, 500, target=6.0, horizon=10_000) == pytest.approx(0.1 * (1 + error * 500 / 10_000))


@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.integers(0, 10**9)), max_size=20))
def test_the_weight_stays_positive(batches: list[tuple[float, int]]) -> None:
    coef = 0.1
    for kl, n in batches:
        coef = adapted_coef(coef, kl, n, target=6.0, horizon=100)
        assert coef > 0


@given(st.lists(sequences(), min_size=1, max_size=5), st.floats(0, 1))
def test_token_rewards_hold_the_penalty_and_the_score_on_the_last_action(
    parts: list[Sequence1], kl_coef: float
) -> None:
    p = pack(parts, junk=math.nan)
    actions = Actions.find(p.mask, p.cu_seqlens)
    old, scores = p.rewards, torch.arange(1.0, len(parts) + 1)
    ref = 0.5 * old
    rewards = token_rewards(old, ref, scores, actions, kl_coef)
    wanted: list[float] = []
    for i, s in enumerate(parts):
        own = [-kl_coef * 0.5 * r for r in s.rewards]
        if own:
            own[-1] += i + 1.0
        wanted += [0.0] * (s.n_prompt - 1) + own
    torch.testing.assert_close(rewards, torch.tensor(wanted), rtol=1e-5, atol=1e-5)
    kl = sequence_kl(old, ref, actions)
    assert kl.tolist() == pytest.approx([0.5 * math.fsum(s.rewards) for s in parts], abs=1e-4)


def test_scores_are_shifted_scaled_and_clipped_in_this_order() -> None:
    scores = shape_scores(torch.tensor([3.0, 30.0, -30.0]), torch.tensor([False] * 3), 2.0, 1.0, 20.0, True)
    assert scores.tolist() == [4.0, 20.0, -20.0]


@pytest.mark.parametrize(("score_truncated", "wanted"), [(True, [3.0, 4.0]), (False, [3.0, 0.0])])
def test_a_truncated_response_gets_its_score_by_option(score_truncated: bool, wanted: list[float]) -> None:
    truncated = torch.tensor([False, True])
    assert shape_scores(torch.tensor([3.0, 4.0]), truncated, 1.0, 0.0, 20.0, score_truncated).tolist() == wanted
