"""Parameters that leave for host memory come back bit for bit, and nothing can use them meanwhile."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
from torch import nn

from realrl.algo.api import MicroBatching
from realrl.engine.parameters.offload import Offloader, Residence
from realrl.errors import InvalidTransitionError
from tests.helpers.training import make_batch, make_engine, masked_nll, n_masked

CPU = torch.device("cpu")


def make_parameters() -> dict[str, torch.Tensor]:
    """Two dtypes, a tied pair, two views of one memory (one of them strided), an empty shard and a plain tensor."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(8, 6, generator=generator)
    tied = nn.Parameter(torch.randn(5, 3, generator=generator))
    return {
        "embedding": tied,
        "rows": nn.Parameter(whole[2:5]),
        "columns": nn.Parameter(whole[:, 4:]),
        "head": tied,
        "half": nn.Parameter(torch.randn(7, generator=generator).bfloat16()),
        "none": nn.Parameter(torch.empty(0, 6)),
        "buffer": torch.arange(10),
    }


def host_bytes(offloader: Offloader) -> int:
    """Bytes of host memory that hold the tensors."""
    return sum(block.memory.nbytes for block in offloader._host)


@pytest.mark.parametrize("keeps_host_copy", [False, True])
def test_there_and_back_is_the_identity(keeps_host_copy: bool) -> None:
    parameters = make_parameters()
    offloader = Offloader(parameters, CPU, keeps_host_copy=keeps_host_copy)
    expected = {name: p.detach().clone() for name, p in parameters.items()}
    objects = dict(parameters)
    strides = {name: p.stride() for name, p in parameters.items()}
    for _ in range(3):
        offloader.offload()
        assert offloader.residence is Residence.OFFLOADED
        assert all(p.numel() == 0 for p in parameters.values())
        assert offloader.num_bytes == 0
        offloader.prefetch()
        assert all(p.numel() == 0 for p in parameters.values())
        offloader.wait()
        assert offloader.residence is Residence.RESIDENT
        for name, p in parameters.items():
            assert p is objects[name]
            assert p.stride() == strides[name]
            assert torch.equal(p, expected[name])
    assert (host_bytes(offloader) > 0) == keeps_host_copy


def test_memory_that_was_shared_is_shared_again() -> None:
    parameters = make_parameters()
    offloader = Offloader(parameters, CPU)
    # rows 0..7, columns 4 and 5 reach from element 4 to element 47 of the whole
    assert offloader.num_bytes == 44 * 4 + 15 * 4 + 7 * 2 + 10 * 8
    offloader.offload()
    assert host_bytes(offloader) == 44 * 4 + 15 * 4 + 7 * 2 + 10 * 8
    offloader.wait()
    with torch.no_grad():
        parameters["rows"].fill_(3.0)
    assert (parameters["columns"][2:5] == 3.0).all()
    assert not (parameters["columns"][:2] == 3.0).any()


def test_the_memory_is_given_back() -> None:
    array = np.ones(1000, dtype=np.float32)
    memory = weakref.ref(array)
    parameter = nn.Parameter(torch.from_numpy(array))
    del array
    offloader = Offloader({"w": parameter}, CPU)
    assert memory() is not None
    offloader.offload()
    assert memory() is None
    offloader.wait()
    assert torch.equal(parameter, torch.ones(1000))


def test_changes_while_resident_are_kept() -> None:
    parameter = nn.Parameter(torch.zeros(4))
    offloader = Offloader({"w": parameter}, CPU)
    for value in (1.0, 2.0):
        with torch.no_grad():
            parameter.fill_(value)
        offloader.offload()
        offloader.wait()
        assert parameter.tolist() == [value] * 4
    parameter.data = torch.ones(2, 2)  # re-pointed, as a reallocation does
    offloader.offload()
    offloader.wait()
    assert parameter.tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_moves_out_of_turn_are_refused() -> None:
    offloader = Offloader({"a.weight": nn.Parameter(torch.zeros(2)), "b": torch.zeros(1)}, CPU)
    with pytest.raises(InvalidTransitionError, match=r"cannot prefetch parameters .* are resident, only offloaded"):
        offloader.prefetch()
    offloader.wait()
    offloader.offload()
    with pytest.raises(InvalidTransitionError, match=r"cannot offload parameters \(a.weight and 1 more\) that are"):
        offloader.offload()
    offloader.prefetch()
    for move in (offloader.offload, offloader.prefetch):
        with pytest.raises(InvalidTransitionError, match="that are returning, only"):
            move()
    offloader.wait()
    assert offloader.residence is Residence.RESIDENT


def test_a_pending_gradient_is_not_left_behind() -> None:
    parameter = nn.Parameter(torch.ones(3))
    parameter.sum().backward()
    offloader = Offloader({"w": parameter}, CPU)
    with pytest.raises(InvalidTransitionError, match="cannot offload 'w': it has a gradient"):
        offloader.offload()
    assert parameter.tolist() == [1.0] * 3


def test_using_what_is_away_fails() -> None:
    layer = nn.Linear(3, 2)
    offloader = Offloader(dict(layer.named_parameters()), CPU)
    offloader.offload()
    with pytest.raises(RuntimeError):
        layer(torch.ones(1, 3))
    offloader.wait()
    assert layer(torch.ones(1, 3)).shape == (1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_goes_on_as_if_nothing_had_moved(dtype: torch.dtype) -> None:
    batch = make_batch(6)
    results = []
    for moves in (False, True):
        engine = make_engine(compute_dtype=dtype)
        offloader = Offloader(dict(engine.decoder.named_parameters()), CPU)
        for _ in range(3):
            engine.train_batch(batch, masked_nll, normaliser=n_masked(batch), micro_batching=MicroBatching(n_mbs=2))
            if moves:
                offloader.offload()
                offloader.wait()
        results.append({name: p.detach().clone() for name, p in engine.decoder.named_parameters()})
    for name, weight in results[0].items():
        assert torch.equal(weight, results[1][name]), name
