"""Errors of what a piece returned name the piece and the line that defines it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from realrl.algo.policy.piece_calls import advantages_of, decisions_of, loss_of, responses_of
from realrl.algo.policy.policy_losses import ActionBatch, PolicyLoss
from realrl.errors import CallError
from realrl.experiment.pieces import Piece
from tests.helpers.policies import rollout_batch

BATCH = rollout_batch(3, vocab_size=8)
ACTIONS = ActionBatch(BATCH, torch.zeros(5), torch.zeros(5), torch.zeros(5))
ROLLOUT = SimpleNamespace(mask=torch.ones(7, dtype=torch.bool))


@pytest.mark.parametrize(
    ("kind", "returned", "told"),
    [
        ("advantage", torch.zeros(3), r"returned a tensor of shape \[3\], not one number for each of the 7 trans"),
        ("policy_loss", PolicyLoss(torch.zeros(())), r"returned losses of shape \[\], not \[5\]"),
        ("filter", [True], "decided on 1 of 3 samples"),
        ("sampler", None, "returned None, not a GenerationResult"),
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
