"""Losses and gradients of every policy gradient depend on the samples alone, not on how they are cut."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from realrl.algo.api import MicroBatching
from realrl.engine.groups import Communicator
from tests.helpers.policies import CASES, gradients_of, rollout_batch
from tests.helpers.ranks import run_ranks
from tests.helpers.training import VOCAB_SIZE, make_engine

N_SAMPLES = 6
CUTS = st.one_of(
    st.builds(MicroBatching, n_mbs=st.integers(1, 7)),
    st.builds(MicroBatching, max_tokens_per_mb=st.integers(5, 80)),
)
NEAR = math.log(1 / VOCAB_SIZE)  # what a random model gives its tokens


def batch_of(seed: int = 0, junk: float = 0.0):
    return rollout_batch(N_SAMPLES, vocab_size=VOCAB_SIZE, seed=seed, junk=junk, others=NEAR)


def assert_same(found, wanted) -> None:
    metrics, gradients = found
    wanted_metrics, wanted_gradients = wanted
    assert metrics.keys() == wanted_metrics.keys()
    for key, value in wanted_metrics.items():
        assert metrics[key] == pytest.approx(value, rel=5e-5, abs=2e-6), key
    assert gradients.keys() == wanted_gradients.keys()
    for key, gradient in wanted_gradients.items():
        torch.testing.assert_close(torch.as_tensor(gradients[key]), gradient, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=3, deadline=None)
@given(
    cut=CUTS,
    order=st.permutations(range(N_SAMPLES)),
    seed=st.integers(0, 3),
    junk=st.sampled_from([0.0, 1e30, math.nan]),
)
def test_cutting_packing_and_junk_change_nothing(
    name: str, cut: MicroBatching, order: list[int], seed: int, junk: float
) -> None:
    batch, options = batch_of(seed), CASES[name]
    wanted = gradients_of(make_engine(), batch, options)
    assert any(gradient.abs().max() > 1e-4 for gradient in wanted[1].values())
    dirty = batch_of(seed, junk).select([batch.ids[i] for i in order])
    assert_same(gradients_of(make_engine(), dirty, options, cut), wanted)


SHARES = [[0, 4], [1, 2, 3, 5]]


def _share(rank: int, world_size: int) -> dict:
    dp = Communicator(dist.group.WORLD, world_size, rank)
    batch = batch_of()
    mine = batch.select([batch.ids[i] for i in SHARES[rank]])
    found = {}
    for name, options in CASES.items():
        metrics, gradients = gradients_of(make_engine(dp=dp), mine, options, MicroBatching(n_mbs=2))
        found[name] = metrics, {key: gradient.numpy() for key, gradient in gradients.items()}
    return found


def test_two_data_parallel_ranks_change_nothing() -> None:
    for found in run_ranks(2, _share):
        for name, options in CASES.items():
            assert_same(found[name], gradients_of(make_engine(), batch_of(), options))
