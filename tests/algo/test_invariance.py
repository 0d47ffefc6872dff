"""Losses and gradients of SFT, reward model, DPO and KTO depend on the samples alone, not on how they are cut."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from realrl.algo.api import MicroBatching
from realrl.data.sample import SequenceSample
from realrl.engine.groups import Communicator
from tests.helpers.ranks import run_ranks
from tests.helpers.supervised import CASES, JUNK, answers_batch, loss_and_gradient
from tests.helpers.training import make_engine

N_SAMPLES = 9
CUTS = st.one_of(
    st.builds(MicroBatching, n_mbs=st.integers(1, 12)),
    st.builds(MicroBatching, max_tokens_per_mb=st.integers(5, 80)),
)


def results(name: str, batch: SequenceSample, cut: MicroBatching | None = None, engine=None):
    case = CASES[name]
    return loss_and_gradient(case, engine or make_engine(head=case.head), batch, cut)


def assert_same(found, wanted) -> None:
    metrics, gradients = found
    wanted_metrics, wanted_gradients = wanted
    assert metrics.keys() == wanted_metrics.keys()
    for key, value in wanted_metrics.items():
        assert metrics[key] == pytest.approx(value, rel=2e-5, abs=1e-6), key
    assert gradients.keys() == wanted_gradients.keys()
    for key, gradient in wanted_gradients.items():
        torch.testing.assert_close(torch.as_tensor(gradients[key]), gradient, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=6)
@given(cut=CUTS, order=st.permutations(range(N_SAMPLES)), seed=st.integers(0, 3), data=st.data())
def test_cutting_and_packing_change_nothing(name: str, cut: MicroBatching, order: list[int], seed: int, data) -> None:
    batch = answers_batch(N_SAMPLES, seed=seed)
    wanted = results(name, batch)
    assert any(gradient.abs().max() > 1e-4 for gradient in wanted[1].values())
    junk = data.draw(st.sampled_from([0.0, 1e30, JUNK]), label="junk")
    dirty = answers_batch(N_SAMPLES, seed=seed, junk=junk)
    assert_same(results(name, dirty.select([batch.ids[i] for i in order]), cut), wanted)


SHARES = [[0, 4, 7], [1, 2, 3, 5, 6, 8]]


def _share(rank: int, world_size: int) -> dict:
    dp = Communicator(dist.group.WORLD, world_size, rank)
    batch = answers_batch(N_SAMPLES)
    mine = batch.select([batch.ids[i] for i in SHARES[rank]])
    found = {}
    for name, case in CASES.items():
        metrics, gradients = results(name, mine, MicroBatching(n_mbs=2), make_engine(head=case.head, dp=dp))
        found[name] = metrics, {key: gradient.numpy() for key, gradient in gradients.items()}
    return found


def test_two_data_parallel_ranks_change_nothing() -> None:
    for found in run_ranks(2, _share):
        for name in CASES:
            assert_same(found[name], results(name, answers_batch(N_SAMPLES)))
