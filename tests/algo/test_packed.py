from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from realrl.algo.packed import Actions, action_mask, before_transition, last_token, response_mask, to_transitions
from tests.algo.batches import Sequence1, pack, sequences, token_batch


@given(st.lists(sequences(), min_size=1, max_size=6))
def test_indices_agree_with_lists(parts: list[Sequence1]) -> None:
    p = pack(parts)
    tokens = torch.arange(int(p.cu_seqlens[-1]))
    mask = action_mask(p.prompt_mask, p.cu_seqlens)
    assert torch.equal(mask, p.mask)
    starts = [int(c) for c in p.cu_seqlens[:-1]]
    before = [a + t for a, s in zip(starts, parts, strict=True) for t in range(s.length - 1)]
    assert before_transition(tokens, p.cu_seqlens).tolist() == before
    assert last_token(tokens, p.cu_seqlens).tolist() == [a + s.length - 1 for a, s in zip(starts, parts, strict=True)]

    actions = Actions.find(mask, p.cu_seqlens)
    wanted = [
        (a + s.n_prompt - 1 + k, i, len(s.rewards) - 1 - k)
        for i, (a, s) in enumerate(zip(starts, parts, strict=True))
        for k in range(len(s.rewards))
    ]
    found = zip(actions.token.tolist(), actions.sequence.tolist(), actions.remaining.tolist(), strict=True)
    assert list(found) == wanted
    assert before_transition(tokens, p.cu_seqlens)[actions.transition].tolist() == actions.token.tolist()
    ones = torch.ones(len(wanted))
    assert actions.sums(ones).tolist() == actions.counts.tolist() == [len(s.rewards) for s in parts]
    assert torch.equal(actions.spread(ones, mask.shape[0]), mask.float())


def test_helpers_on_a_batch() -> None:
    batch = token_batch([[([0, 1], [2, 3])], [([1], [1, 2, 3])], [([3, 3], [0])]])
    assert response_mask(batch).tolist() == [False, True, True, True, True, True, False, True]
    assert to_transitions(torch.tensor([5.0, 6.0, 7.0]), batch).tolist() == [5, 5, 5, 6, 6, 6, 7, 7]
