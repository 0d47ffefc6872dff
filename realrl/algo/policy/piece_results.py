"""Checks of what pieces gave and wrote, before anything is trained on it.

A worker sees its own prompts only. What a piece writes into `Rollout.state` and `Rollout.metrics` must nevertheless be
the same on all of them: `check_agreement` compares it over the ranks, in one collective where all agree.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from realrl.algo.api import GenerationResult
from realrl.algo.checks import NO_GRADIENT
from realrl.algo.policy.policy_losses import ActionBatch, PolicyLoss
from realrl.algo.policy.rollout import Rollout
from realrl.errors import CallError

_REL = 1e-6  # difference of numbers that two kinds of processors may round differently
_N_SLOTS = 4096
_MOST_BYTES = 200  # of a name that a message quotes
_WHOLE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

Writers = dict[str, str]
"""``state NAME`` or ``metrics NAME`` -> what messages call the advantage that wrote it; "" -> all of the user."""


def checked_advantage(who: str, found: Any, rollout: Rollout) -> torch.Tensor:
    """Return what an advantage gave; `who` is what messages call it.

    Raises:
        CallError: no tensor of one number for each transition.
    """
    what = f"{who} returned"
    remedy = "rollout.per_transition makes one from a number for each response."
    if not isinstance(found, torch.Tensor):
        raise CallError(f"{what} {_kind(found)}, not a tensor", remedy=remedy)
    if found.shape != rollout.mask.shape:
        raise CallError(
            f"{what} a tensor of shape {list(found.shape)}, not one number for each of the {len(rollout.mask)} "
            "transitions",
            remedy=remedy,
        )
    if not found.is_floating_point():
        raise CallError(f"{what} {str(found.dtype).removeprefix('torch.')}, not float32", remedy=remedy)
    return found


def checked_loss(who: str, found: Any, actions: ActionBatch) -> PolicyLoss:
    """Return what a policy loss gave.

    Raises:
        CallError: no `PolicyLoss` of one number for each action, or losses without a gradient.
    """
    what, wanted = f"{who} returned", list(actions.advantages.shape)
    remedy = f"Return realrl.PolicyLoss(losses, stats) with tensors of shape {wanted}: a number for each action."
    if not isinstance(found, PolicyLoss):
        raise CallError(f"{what} {_kind(found)}, not a PolicyLoss", remedy=remedy)
    if not isinstance(found.stats, Mapping):
        raise CallError(f"{what} statistics that are {_kind(found.stats)}, not a dict", remedy=remedy)
    parts = {"losses": found.losses} | {f"the statistic {stat!r}": value for stat, value in found.stats.items()}
    for part, value in parts.items():
        if not isinstance(value, torch.Tensor):
            raise CallError(f"{what} {part} as {_kind(value)}, not a tensor", remedy=remedy)
        if list(value.shape) != wanted:
            raise CallError(f"{what} {part} of shape {list(value.shape)}, not {wanted}", remedy=remedy)
    if actions.logprobs.requires_grad and not found.losses.requires_grad and found.losses.any():
        raise CallError(f"{what} losses without a gradient: they would train nothing", remedy=NO_GRADIENT)
    return found


def checked_choice(who: str, found: Any, n_samples: int) -> list[bool]:
    """Return what a filter decided on each sample.

    Raises:
        CallError: it did not say yes or no to each of them.
    """
    remedy = "Return a list with True or False for each sample."
    is_scalar = not hasattr(found, "__iter__") or (isinstance(found, torch.Tensor) and found.dim() == 0)
    if is_scalar or isinstance(found, str | bytes | Mapping):
        raise CallError(f"{who} returned {_kind(found)}, not a list", remedy=remedy)
    answers = list(found)
    if len(answers) != n_samples:
        raise CallError(f"{who} decided on {len(answers)} of {n_samples} samples", remedy=remedy)
    for answer in answers:
        is_one = isinstance(answer, torch.Tensor) and answer.numel() == 1 and answer.dtype in _WHOLE
        if not (is_one or isinstance(answer, int) or type(answer).__name__ in ("bool_", "bool")):
            shown = f"{answer!r:.60}" if isinstance(answer, str | float) else _kind(answer)
            raise CallError(f"{who} answered {shown} for a sample, not True or False", remedy=remedy)
    return [bool(answer) for answer in answers]


def checked_generation(who: str, found: Any, n_prompts: int) -> GenerationResult:
    """Return what a sampler gave.

    Raises:
        CallError: no `GenerationResult`, not equally many responses to each prompt, or lists that do not fit them.
    """
    what = f"{who} returned"
    remedy = "See realrl.GenerationResult: lists with a tensor for each response, those to one prompt side by side."
    if not isinstance(found, GenerationResult):
        raise CallError(f"{what} {_kind(found)}, not a GenerationResult", remedy=remedy)
    columns = {"logprobs": found.logprobs, "policy_logprobs": found.policy_logprobs, "truncated": found.truncated}
    columns |= {} if found.given is None else {"given": found.given}
    try:
        n = len(found.responses)
        counts = {key: len(column) for key, column in columns.items()}
    except TypeError:
        raise CallError(f"{what} something else than lists", remedy=remedy) from None
    if n == 0 or n % n_prompts:
        raise CallError(f"{what} {n} responses to {n_prompts} prompts, not equally many to each", remedy=remedy)
    for key, count in counts.items():
        if count != n:
            raise CallError(f"{what} {n} responses and {count} {key}", remedy=remedy)
    for key, column in {"responses": found.responses, **columns}.items():
        for number, value in enumerate(column if key != "truncated" else ()):
            if not isinstance(value, torch.Tensor) or value.dim() != 1:
                shown = f"a tensor of {value.dim()} axes" if isinstance(value, torch.Tensor) else _kind(value)
                raise CallError(
                    f"{what} {shown} among the {key}, not a tensor of one axis, for response {number}", remedy=remedy
                )
            n_tokens = len(found.responses[number])
            if len(value) != n_tokens:
                raise CallError(
                    f"{what} {len(value)} {key} for the {n_tokens} tokens of response {number}", remedy=remedy
                )
    return found


# ---------------------------------------------------------------- what pieces write


@contextmanager
def noting(writers: Writers, who: str, rollout: Rollout) -> Iterator[None]:
    """Note which numbers an advantage writes in the block."""
    before = _written(rollout)
    yield
    for where, value in _written(rollout).items():
        if where not in before or before[where] is not value:
            writers[where] = who


def check_agreement(rollout: Rollout, writers: Writers) -> None:
    """Compare what pieces wrote over all ranks; every rank calls it, and all of them raise.

    Raises:
        CallError: a value is no number, or not the same on all ranks; names the advantage and the value.
    """
    written = {where: _number(where, value, writers) for where, value in sorted(_written(rollout).items())}
    digests = [_digest(list(written)), _digest(list(written.values()))]
    lows, highs = _extremes(digests, rollout)
    if lows == highs:
        return
    remedy = "Take it over all workers, those without samples too: rollout.moments(x), rollout.maximum(x)."
    if lows[0] != highs[0]:
        where = _of_some(list(written), rollout)
        raise CallError(f"{_who(where, writers)} wrote {_shown(where)} on one worker and not on another", remedy=remedy)
    lows, highs = _extremes(list(written.values()), rollout)
    for where, low, high in zip(written, lows, highs, strict=True):
        if not (math.isclose(low, high, rel_tol=_REL, abs_tol=1e-12) or math.isnan(low + high)):
            raise CallError(
                f"{_who(where, writers)} wrote {_shown(where)}: {low:.6g} on one worker and {high:.6g} on another",
                remedy=remedy,
            )


def _written(rollout: Rollout) -> dict[str, Any]:
    found = {"state": rollout.state, "metrics": rollout.metrics}
    return {f"{place} {name}": value for place, values in found.items() for name, value in values.items()}


def _number(where: str, value: Any, writers: Writers) -> float:
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        place = where.partition(" ")[0]
        raise CallError(
            f"{_who(where, writers)} wrote {_shown(where)}: {_kind(value)}, not a number",
            remedy=f"rollout.{place} holds a number for each name.",
        ) from None


def _who(where: str, writers: Writers) -> str:
    return writers.get(where, writers[""])


def _shown(where: str) -> str:
    return where.partition(" ")[2]


def _digest(values: Sequence[object]) -> float:
    """48 bits, which float64 represents."""
    return float(int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=6).digest()))


def _extremes(numbers: Sequence[float], rollout: Rollout) -> tuple[list[float], list[float]]:
    """Return the smallest and the largest of each number over all ranks, in one collective."""
    own = torch.tensor(numbers, dtype=torch.float64, device=rollout.mask.device)
    found = rollout.all_reduce(torch.cat([-own, own]), "max").view(2, -1)
    return (-found[0]).tolist(), found[1].tolist()


def _of_some(names: Sequence[str], rollout: Rollout) -> str:
    """Return a name that some ranks have and others lack; all ranks return the same.

    Each rank marks the slots of its names. Those that have a name in the first slot that not all have marked spell it.
    """
    slots = {int(_digest([name])) % _N_SLOTS: name for name in names}
    lows, highs = _extremes([float(slot in slots) for slot in range(_N_SLOTS)], rollout)
    odd = next((slot for slot in range(_N_SLOTS) if lows[slot] != highs[slot]), None)
    if odd is None:  # two names in one slot
        return "state some value"
    spelled = slots.get(odd, "").encode()[:_MOST_BYTES]
    _, letters = _extremes([float(byte) for byte in spelled.ljust(_MOST_BYTES, b"\0")], rollout)
    return bytes(int(letter) for letter in letters).rstrip(b"\0").decode(errors="replace")


def _kind(value: object) -> str:
    name = type(value).__name__
    if value is None or isinstance(value, type):
        return "None" if value is None else f"the class {value.__name__}"
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"
