"""Calls of pieces, and checks of what they returned: errors name the piece, and its line where it is a user's."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from realrl.algo.api import GenerationResult
from realrl.algo.policy.policy_losses import ActionBatch, PolicyLoss
from realrl.data.checks import SampleError
from realrl.data.sample import SequenceSample
from realrl.errors import CallError, counted
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
            f"{piece.called(name)} {declared}: {error}",
            remedy=f"Decorate the function: @realrl.register_piece('{piece.kind}', 'NAME', reads={reads}).",
        ) from error


def advantages_of(piece: Piece, name: str, rollout: Any) -> torch.Tensor:
    """Return what an advantage made of a `Rollout`, [T - S].

    Raises:
        CallError: no tensor of this length.
    """
    found = call_piece(piece, name, rollout)
    if not isinstance(found, torch.Tensor) or found.shape != rollout.mask.shape:
        raise CallError(
            f"{piece.called(name)} returned {_shape(found)}, not one number for each of the {len(rollout.mask)} "
            "transitions",
            remedy="rollout.per_transition(x) makes them from one number for each response.",
        )
    return found


def loss_of(piece: Piece, name: str, actions: ActionBatch, options: Any) -> PolicyLoss:
    """Return the loss of each action of a micro-batch.

    Raises:
        CallError: no `PolicyLoss`, or its losses or statistics are not one number for each action.
    """
    found = call_piece(piece, name, actions, options)
    if not isinstance(found, PolicyLoss):
        raise CallError(
            f"{piece.called(name)} returned {_shape(found)}, not a PolicyLoss",
            remedy="Return realrl.PolicyLoss(losses, stats), with one number for each action.",
        )
    n = len(actions.logprobs)
    for what, values in (("losses", found.losses), *((f"stats[{name!r}]", found.stats[name]) for name in found.stats)):
        if not isinstance(values, torch.Tensor) or values.shape != (n,):
            raise CallError(
                f"{piece.called(name)} returned {what} of {_shape(values)}, not one number for each of the {n} actions",
                remedy="Leave sums and means to realrl, which takes them over all workers.",
            )
    return found


def decisions_of(piece: Piece, name: str, batch: SequenceSample, options: Any) -> list[bool]:
    """Return for each sample whether a filter keeps it.

    Raises:
        CallError: it did not say yes or no to each sample.
    """
    found = call_piece(piece, name, batch, options)
    is_list = isinstance(found, Iterable) and not isinstance(found, str | Mapping) and getattr(found, "ndim", 1)
    decisions = list(found) if is_list else None
    if decisions is None or len(decisions) != len(batch):
        got = _shape(found) if decisions is None else counted(len(decisions), "decision")
        raise CallError(
            f"{piece.called(name)} returned {got} for {len(batch)} samples",
            remedy="Return a list with a bool for each sample of the batch.",
        )
    return [bool(decision) for decision in decisions]


def responses_of(piece: Piece, name: str, model: Any, prompts: SequenceSample, ctx: Any) -> GenerationResult:
    """Return the responses that a sampler made.

    Raises:
        CallError: no `GenerationResult`, another number of responses for some prompts, or fields that do not fit.
    """
    found = piece.load()(model, prompts, ctx)
    if not isinstance(found, GenerationResult):
        raise CallError(f"{piece.called(name)} returned {_shape(found)}, not a GenerationResult")
    n = len(found.responses)
    if n % len(prompts) or not n:
        raise CallError(
            f"{piece.called(name)} returned {n} responses to {len(prompts)} prompts",
            remedy="Every prompt needs as many responses as the others, one after the other.",
        )
    per_token = {"logprobs": found.logprobs, "policy_logprobs": found.policy_logprobs, "given": found.given}
    for what, values in {**per_token, "truncated": found.truncated}.items():
        if values is not None and len(values) != n:
            raise CallError(f"{piece.called(name)} returned {n} responses, and {len(values)} {what}")
    for what, rows in per_token.items():
        for number, (tokens, own) in enumerate(zip(found.responses, rows or (), strict=False)):
            if len(own) != len(tokens):
                raise CallError(
                    f"{piece.called(name)} returned response {number} with {len(tokens)} tokens, and {len(own)} {what} "
                    "for it",
                    remedy="Tokens that were put in have a log-probability, too: 0.",
                )
    return found


def _shape(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
