"""Results of pieces are checked before anything is trained on it; on two ranks, which are threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from realrl.algo.api import GenerationResult
from realrl.algo.policy.actor import mixed_advantages
from realrl.algo.policy.piece_results import checked_choice, checked_generation, checked_loss
from realrl.algo.policy.policy_losses import ActionBatch, PolicyLoss
from realrl.algo.policy.rollout import Rollout
from realrl.config.policy_options import PolicyOptions
from realrl.errors import CallError
from realrl.experiment.pieces import register_piece
from tests.helpers.fake_engine import ThreadGroup
from tests.helpers.policies import rollout_batch, rollout_of

BATCH = rollout_batch(5, vocab_size=5)
SHARES = {"uneven": (BATCH.ids[:2], BATCH.ids[2:]), "one has none": (BATCH.ids, ())}
TWO_SHARES = pytest.mark.parametrize("shares", SHARES.values(), ids=SHARES)


def piece(function: Callable[[Rollout], Any], name: str = "written") -> str:
    register_piece("advantage", name, reads=("rewards",))(function)
    return name


def on_ranks(name: str | dict[str, float], shares: tuple[tuple[str, ...], ...]) -> list[Rollout]:
    """Work out the advantages of each rank's share, all ranks at the same time."""
    group, options = ThreadGroup(len(shares)), PolicyOptions(advantage=name)
    rollouts = [
        replace(rollout_of(BATCH.select(ids), options), all_reduce=group.all_reduce(rank))
        for rank, ids in enumerate(shares)
    ]
    group.run([lambda own=own: mixed_advantages(own) for own in rollouts])
    return rollouts


@TWO_SHARES
def test_the_maximum_is_that_of_all_ranks(shares: tuple[tuple[str, ...], ...]) -> None:
    def largest(rollout: Rollout) -> torch.Tensor:
        rollout.state["largest"] = rollout.maximum(rollout.scores)
        rollout.metrics["mean"] = rollout.moments(rollout.scores).mean
        return rollout.per_transition(rollout.scores)

    wanted = float(rollout_of(BATCH, PolicyOptions()).scores.max())
    for rollout in on_ranks(piece(largest), shares):
        assert rollout.state["largest"] == pytest.approx(wanted, abs=0)


def test_the_maximum_of_negative_values_and_of_none() -> None:
    rollout = rollout_of(BATCH, PolicyOptions())
    assert rollout.maximum(torch.tensor([-3.0, -2.0])) == -2.0
    assert rollout.maximum(torch.empty(0)) == 0.0


@TWO_SHARES
@pytest.mark.parametrize("place", ["state", "metrics"])
def test_a_maximum_of_the_own_rank_is_refused(place: str, shares: tuple[tuple[str, ...], ...]) -> None:
    def running_max(rollout: Rollout) -> torch.Tensor:
        getattr(rollout, place)["running_max/largest"] = float(max([-2.0, *rollout.scores.tolist()]))
        return rollout.per_transition(rollout.scores)

    told = r"=written \(\S+\) wrote running_max/largest: -?[\d.]+ on one worker and -?[\d.]+ on another\n  Take it"
    with pytest.raises(CallError, match=told) as error:
        on_ranks(piece(running_max), shares)
    assert "rollout.moments(x), rollout.maximum(x)" in str(error.value)


def test_what_a_rank_without_samples_did_not_write_is_named() -> None:
    def only_with_samples(rollout: Rollout) -> torch.Tensor:
        rollout.metrics["shared"] = 1.0
        if len(rollout.batch):
            rollout.state["seen"] = 1.0
        return rollout.per_transition(rollout.scores)

    with pytest.raises(CallError, match=r"=written \(\S+\) wrote seen on one worker and not on another"):
        on_ranks(piece(only_with_samples), SHARES["one has none"])


def test_of_two_advantages_the_one_that_wrote_it_is_named() -> None:
    def local(rollout: Rollout) -> torch.Tensor:
        rollout.metrics["n"] = float(len(rollout.batch))
        return rollout.per_transition(rollout.scores)

    def right(rollout: Rollout) -> torch.Tensor:
        rollout.metrics["mean"] = rollout.moments(rollout.scores).mean
        return rollout.per_transition(rollout.scores)

    names = {piece(right, "right"): 0.5, piece(local, "local"): 0.25, "dr_grpo": 0.25}
    with pytest.raises(CallError, match=r"advantage=local \(\S+\) wrote n: 2 on one worker and 3 on another"):
        on_ranks(names, SHARES["uneven"])


def test_a_value_that_is_no_number_is_refused() -> None:
    def wordy(rollout: Rollout) -> torch.Tensor:
        rollout.state["best"] = "a response"  # type: ignore[assignment]
        return rollout.per_transition(rollout.scores)

    with pytest.raises(CallError, match=r"advantage=written \(\S+\) wrote best: a str, not a number"):
        mixed_advantages(rollout_of(BATCH, PolicyOptions(advantage=piece(wordy))))


def test_built_in_advantages_meet_no_more_often_than_they_did() -> None:
    n_met = 0

    def all_reduce(tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        nonlocal n_met
        n_met += 1
        return tensor.clone()

    mixed_advantages(replace(rollout_of(BATCH, PolicyOptions(advantage="grpo")), all_reduce=all_reduce))
    assert n_met == 0


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (0.5, "returned a float, not a tensor"),
        (None, "returned None, not a tensor"),
        ([1.0], "returned a list, not a tensor"),
        (torch.tensor(1.0), r"returned a tensor of shape \[\], not one number for each of the \d+ transitions"),
        (rollout_of(BATCH, PolicyOptions()).mask, "returned bool, not float32"),
    ],
)
def test_an_advantage_that_is_no_tensor_of_transitions(given: object, told: str) -> None:
    name = piece(lambda rollout: given)
    with pytest.raises(
        CallError, match=rf"algorithm.advantage=written \(\S+test_piece_results.py:\d+\) {told}"
    ) as error:
        mixed_advantages(rollout_of(BATCH, PolicyOptions(advantage=name)))
    assert "rollout.per_transition makes one from a number for each response" in str(error.value)


ROW = torch.zeros(3)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (ROW, "returned a Tensor, not a PolicyLoss"),
        (None, "returned None, not a PolicyLoss"),
        (PolicyLoss(0.0), "returned losses as a float, not a tensor"),  # type: ignore[arg-type]
        (PolicyLoss(ROW.mean()), r"returned losses of shape \[\], not \[3\]"),
        (PolicyLoss(ROW, {"bad": 0.5}), "returned the statistic 'bad' as a float, not a tensor"),  # type: ignore[dict-item]
        (PolicyLoss(ROW, {"bad": ROW.mean()}), r"returned the statistic 'bad' of shape \[\], not \[3\]"),
        (PolicyLoss(ROW, [ROW]), "returned statistics that are a list, not a dict"),  # type: ignore[arg-type]
    ],
)
def test_a_policy_loss_that_is_none(given: object, told: str) -> None:
    actions = ActionBatch(BATCH, ROW, ROW, ROW)
    with pytest.raises(CallError, match=f"algorithm.policy_loss=mine {told}"):
        checked_loss("algorithm.policy_loss=mine", given, actions)
    right = PolicyLoss(ROW, {"bad": ROW})
    assert checked_loss("algorithm.policy_loss=mine", right, actions) is right


def test_losses_without_gradient_are_named() -> None:
    logprobs = torch.zeros(3, requires_grad=True)
    actions = ActionBatch(BATCH, logprobs, ROW, ROW, lambda tokens: ROW)
    with pytest.raises(CallError, match=r"^algorithm.policy_loss=mine returned losses without a gradient") as caught:
        checked_loss("algorithm.policy_loss=mine", PolicyLoss(torch.ones(3)), actions)
    assert ".detach()" in str(caught.value.remedy)
    for right in (PolicyLoss(-logprobs), PolicyLoss(torch.zeros(3))):
        assert checked_loss("algorithm.policy_loss=mine", right, actions) is right


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (None, "returned None, not a list"),
        (True, "returned a bool, not a list"),
        (torch.tensor(True), "returned a Tensor, not a list"),
        ("yes", "returned a str, not a list"),
        ([True], "decided on 1 of 2 samples"),
        ([True, None], "answered None for a sample"),
        ([True, 0.5], "answered 0.5 for a sample"),
        (["no", "no"], "answered 'no' for a sample"),
        (torch.rand(2), "answered a Tensor for a sample"),
    ],
)
def test_a_filter_that_does_not_say_yes_or_no(given: object, told: str) -> None:
    with pytest.raises(CallError, match=f"algorithm.filter=mine {told}"):
        checked_choice("algorithm.filter=mine", given, 2)


@pytest.mark.parametrize("given", [(True, 0), np.array([True, False]), torch.tensor([True, False]), iter([1, False])])
def test_a_filter_that_does(given: Any) -> None:
    assert checked_choice("algorithm.filter=mine", given, 2) == [True, False]


def test_a_sampler_that_gives_no_responses() -> None:
    one, two = torch.zeros(2), torch.zeros(2, dtype=torch.int64)
    right = GenerationResult([two, two], [one, one], [one, one], [False, True])
    assert checked_generation("algorithm.sampler=mine", right, 2) is right
    for given, told in (
        ({}, "returned a dict, not a GenerationResult"),
        (replace(right, responses=[two]), "returned 1 responses to 2 prompts, not equally many"),
        (replace(right, logprobs=[one]), "returned 2 responses and 1 logprobs"),
        (replace(right, truncated=None), "returned something else than lists"),
        (replace(right, policy_logprobs=[one, one[:1]]), "returned 1 policy_logprobs for the 2 tokens of response 1"),
        (replace(right, responses=[two, [1, 2]]), "returned a list among the responses, not a tensor"),
    ):
        with pytest.raises(CallError, match=f"algorithm.sampler=mine {told}"):
            checked_generation("algorithm.sampler=mine", given, 2)
