"""Calls of pieces: errors name the piece, and its line where it is a user's."""

from __future__ import annotations

import re
from typing import Any

import torch

from realrl.algo.api import GenerationResult
from realrl.algo.policy.piece_results import checked_advantage, checked_choice, checked_generation, checked_loss
from realrl.algo.policy.policy_losses import ActionBatch, PolicyLoss
from realrl.algo.policy.rollout import Rollout
from realrl.data.checks import SampleError
from realrl.data.sample import SequenceSample
from realrl.errors import CallError
from realrl.experiment.pieces import Piece


def call_piece(piece: Piece, name: str, *arguments: Any) -> Any:
    """Call a piece; `name` is that of the configuration.

    Raises:
        CallError: it reads a key that it does not declare; says how to.
    """
    try:
        return piece.load()(*arguments)
    except SampleError as error:
        missing = re.search(r"no key '(\w+)'", str(error))
        if missing is None:
            raise
        declared = (
            "declares no key that it reads, and so gets none"
            if not piece.reads
            else f"declares no other key than {', '.join(piece.reads)}"
        )
        reads = tuple(dict.fromkeys((*piece.reads, missing[1])))
        raise CallError(
            f"{piece.called(name)} {declared}: {error.message}",
            remedy=f"Decorate the function: @realrl.register_piece('{piece.kind}', 'NAME', reads={reads}).",
        ) from error


def advantages_of(piece: Piece, name: str, rollout: Rollout) -> torch.Tensor:
    """Return what an advantage made of a rollout, float32 [T - S].

    Raises:
        CallError: no tensor of this shape.
    """
    return checked_advantage(piece.called(name), call_piece(piece, name, rollout), rollout)


def loss_of(piece: Piece, name: str, actions: ActionBatch, options: Any) -> PolicyLoss:
    """Return the loss of each action of a micro-batch.

    Raises:
        CallError: no `PolicyLoss`, or its losses or statistics are not one number for each action.
    """
    return checked_loss(piece.called(name), call_piece(piece, name, actions, options), actions)


def decisions_of(piece: Piece, name: str, batch: SequenceSample, options: Any) -> list[bool]:
    """Return for each sample whether a filter keeps it.

    Raises:
        CallError: it did not say yes or no to each sample.
    """
    return checked_choice(piece.called(name), call_piece(piece, name, batch, options), len(batch))


def responses_of(piece: Piece, name: str, model: Any, prompts: SequenceSample, ctx: Any) -> GenerationResult:
    """Return the responses that a sampler made.

    Raises:
        CallError: no `GenerationResult`, another number of responses for some prompts, or fields that do not fit.
    """
    return checked_generation(piece.called(name), call_piece(piece, name, model, prompts, ctx), len(prompts))
