"""What a piece returns is checked; errors name the piece and the line that defines it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from realrl.algo.api import GenerationResult
from realrl.algo.policy.piece_calls import advantages_of, decisions_of, loss_of, responses_of
from realrl.algo.policy.policy_losses import ActionBatch, PolicyLoss
from realrl.errors import CallError
from realrl.experiment.pieces import Piece
from tests.helpers.policies import rollout_batch

BATCH = rollout_batch(3, vocab_size=8)
ACTIONS = ActionBatch(BATCH, torch.zeros(5), torch.zeros(5), torch.zeros(5))
ROLLOUT = SimpleNamespace(mask=torch.ones(7, dtype=torch.bool))


def responses(n: int, **changes: object) -> GenerationResult:
    tokens, logprobs = [torch.arange(2)] * n, [torch.zeros(2)] * n
    return GenerationResult(**{"responses": tokens, "logprobs": logprobs, "policy_logprobs": logprobs,
                               "truncated": [False] * n, **changes})  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "returned", "told"),
    [
        ("advantage", torch.zeros(3), r"returned a tensor of shape \(3,\), not one number for each of the 7 trans"),
        ("advantage", [0.0] * 7, "returned list, not one number for each of the 7 transitions"),
        ("policy_loss", torch.zeros(5), r"returned a tensor of shape \(5,\), not a PolicyLoss"),
        ("policy_loss", PolicyLoss(torch.zeros(())), r"returned losses of a tensor of shape \(\), not one number"),
        ("policy_loss", PolicyLoss(torch.zeros(5), {"bad": 1.0}), r"returned stats\['bad'\] of float, not one number"),
        ("filter", [True], "returned 1 decision for 3 samples"),
        ("filter", None, "returned NoneType for 3 samples"),
        ("sampler", None, "returned NoneType, not a GenerationResult"),
        ("sampler", responses(4), "returned 4 responses to 3 prompts"),
        ("sampler", responses(3, truncated=[True]), "returned 3 responses, and 1 truncated"),
        ("sampler", responses(3, logprobs=[torch.zeros(1)] * 3), "response 0 with 2 tokens, and 1 logprobs for it"),
    ],
)
def test_what_is_wrong_is_told_of_the_piece(kind: str, returned: object, told: str) -> None:
    def mine(*given: object) -> object:
        return returned

    piece = Piece(kind, "mine", mine)
    calls = {
        "advantage": lambda: advantages_of(piece, "mine", ROLLOUT),
        "policy_loss": lambda: loss_of(piece, "mine", ACTIONS, None),
        "filter": lambda: decisions_of(piece, "mine", BATCH, None),
        "sampler": lambda: responses_of(piece, "mine", None, BATCH, None),
    }
    line = mine.__code__.co_firstlineno
    with pytest.raises(CallError, match=rf"^algorithm.{kind}=mine \(\S+test_piece_calls.py:{line}\) .*{told}"):
        calls[kind]()


def test_what_is_right_passes() -> None:
    assert decisions_of(Piece("filter", "f", lambda *_: torch.tensor([1, 0, 1])), "f", BATCH, None) == [
        True,
        False,
        True,
    ]
    right = PolicyLoss(torch.ones(5), {"bad": torch.ones(5)})
    assert loss_of(Piece("policy_loss", "f", lambda *_: right), "f", ACTIONS, None) is right
    assert len(responses_of(Piece("sampler", "f", lambda *_: responses(6)), "f", None, BATCH, None).responses) == 6
