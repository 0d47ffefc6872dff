"""Preference losses on whole answers: functions of the log-ratio, log pi(answer) - log ref(answer).

As in `realrl.algo.losses`, losses and statistics are sums over a micro-batch, in float32; the caller divides by the
pairs or answers of the whole minibatch.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch.nn import functional

from realrl.algo.api import LossOutput
from realrl.algo.packed import Actions, response_mask
from realrl.data.sample import SequenceSample

PairLoss = Literal["sigmoid", "hinge", "ipo"]
TIE = 1e-3
"""Nats: answers whose log-ratios are closer are equally likely.

Where the policy still is the reference, orders of summation make differences of up to a tenth of it."""


def answer_sums(values: torch.Tensor, batch: SequenceSample) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums over each sequence's answer tokens.

    Args:
        values: [T - S], per transition; not read off the answers.
        batch: holds `input_ids` and `prompt_mask`.

    Returns:
        float32 [S] sums, 0 for a sequence without answer, and int64 [S] answer tokens.
    """
    actions = Actions.find(response_mask(batch), batch.cu_seqlens("input_ids"))
    return actions.sums(values[actions.transition].float()), actions.counts


def dpo_loss(
    logratios: torch.Tensor, counts: torch.Tensor, *, kind: PairLoss, beta: float, label_smoothing: float = 0.0
) -> LossOutput:
    """sum over pairs of f(margin), where margin = log-ratio of the chosen answer - that of the rejected one.

    - sigmoid: -log sigmoid(beta margin), Rafailov et al. 2023, "Direct preference optimization", equation 7; with
      label smoothing e: -(1 - e) log sigmoid(beta margin) - e log sigmoid(-beta margin), Mitchell 2023, "A note on DPO
      with noisy preferences & relationship to IPO", equation 3.
    - hinge: max(0, 1 - beta margin), Zhao et al. 2023, "SLiC-HF: sequence likelihood calibration with human feedback",
      with the log-ratio in the place of the likelihood.
    - ipo: (margin - 1 / (2 beta))^2, Azar et al. 2023, "A general theoretical paradigm to understand learning from
      human preferences", equation 17, where log-ratios are means per answer token: sums would square the length.

    Args:
        logratios: [2 P], chosen, rejected, chosen, rejected, ...
        counts: [2 P], answer tokens.
        kind: name of f.
        beta: see above; ipo's tau.
        label_smoothing: e; sigmoid only.

    Stats: loss, accuracy (the chosen answer's log-ratio is higher by more than `TIE`), margin, chosen_reward and
    rejected_reward, which are beta times log-ratios (sums for every kind).
    """
    answers = logratios.detach().view(-1, 2)
    rewards = beta * answers
    terms = logratios / counts.clamp(min=1) if kind == "ipo" else logratios
    chosen, rejected = terms.view(-1, 2).unbind(1)
    margins = chosen - rejected
    if kind == "ipo":
        losses = (margins - 1.0 / (2.0 * beta)).square()
    elif kind == "hinge":
        losses = functional.relu(1.0 - beta * margins)
    else:
        right, wrong = functional.logsigmoid(beta * margins), functional.logsigmoid(-beta * margins)
        losses = -(1.0 - label_smoothing) * right - label_smoothing * wrong
    loss = losses.sum()
    stats = {
        "loss": loss.detach(),
        "accuracy": (answers[:, 0] - answers[:, 1] > TIE).float().sum(),
        "margin": (rewards[:, 0] - rewards[:, 1]).sum(),
        "chosen_reward": rewards[:, 0].sum(),
        "rejected_reward": rewards[:, 1].sum(),
    }
    return LossOutput(loss, stats)


def kto_loss(
    logratios: torch.Tensor,
    is_good: torch.Tensor,
    kl: float,
    *,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
) -> LossOutput:
    """sum over answers of w (1 - v): Ethayarajh et al. 2024, "KTO: model alignment as prospect theoretic optimization",
    equation 7.

    v = sigmoid(beta (log-ratio - kl)) and w = desirable_weight for a good answer; for a bad one
    v = sigmoid(beta (kl - log-ratio)) and w = undesirable_weight.

    Args:
        logratios: [S].
        is_good: bool [S].
        kl: the reference point, at least 0; a constant.

    Stats: loss; good and bad, the numbers of answers; good_reward and bad_reward, sums of beta times log-ratio over
    these.
    """
    sign = torch.where(is_good, 1.0, -1.0)
    weights = torch.where(is_good, desirable_weight, undesirable_weight)
    loss = (weights * (1.0 - torch.sigmoid(beta * sign * (logratios - kl)))).sum()
    rewards = beta * logratios.detach()
    stats = {
        "loss": loss.detach(),
        "good": is_good.float().sum(),
        "bad": (~is_good).float().sum(),
        "good_reward": rewards[is_good].sum(),
        "bad_reward": rewards[~is_good].sum(),
    }
    return LossOutput(loss, stats)
