"""Engines on a device that refuses tensors in host memory: all of a model comes along, also what is no parameter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest
import torch

from realrl.algo.api import MicroBatching
from realrl.config.schema import GenerationConfig
from realrl.data.sample import SequenceSample
from realrl.engine.decoder_engine import DecoderEngine
from realrl.engine.groups import Communicator
from realrl.engine.parallel import Parallel
from realrl.engine.weightless import WeightlessEngine
from realrl.mesh.device_mesh import ParallelStrategy
from realrl.model.init import random_model
from realrl.model.layers import attention
from realrl.sched.messages import KeySchema, Per
from realrl.shape import DecoderConfig, LoRA
from tests.helpers.fake_device import DEVICE, FakeDevice, OnDevice
from tests.helpers.families import CASES, decoder_config
from tests.helpers.training import CONFIG, OPTIMIZER, make_batch, masked_nll
from tests.ranks.test_engine_3d import score_loss

MODELS = {name: decoder_config(name) for name in CASES}
MODELS |= {"value": replace(CONFIG, head="value"), "adapters": replace(CONFIG, lora=LoRA(2, 4.0, ("q", "up")))}


def some_of(names: Iterable[str]) -> list[object]:
    """Every third one, and those with experts or values; the others in the full sweep."""
    kept = ("value", "adapters", "mixtral", "gemma")
    return [
        name if i % 3 == 0 or name in kept else pytest.param(name, marks=pytest.mark.slow)
        for i, name in enumerate(names)
    ]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    monkeypatch.setattr(attention, "_has_varlen_kernel", lambda q: False)  # torch has no module of the device to ask
    with FakeDevice():
        yield DEVICE


def engine_of(config: DecoderConfig, device: torch.device, *, is_trained: bool) -> DecoderEngine:
    return DecoderEngine(
        random_model(config, seed=1, device=device),
        role="actor",
        optimizer=OPTIMIZER if is_trained else None,
        total_optimizer_steps=3,
    )


@pytest.mark.parametrize("name", some_of(MODELS))
def test_training(name: str, device: torch.device) -> None:
    config = MODELS[name]
    engine = engine_of(config, device, is_trained=True)
    assert all(isinstance(p.data, OnDevice) for p in engine.decoder.parameters())
    loss = score_loss if config.is_scalar else masked_nll
    found = [engine.train_batch(make_batch(), loss, normaliser=9.0, micro_batching=MicroBatching(n_mbs=2))]
    expected = engine_of(config, torch.device("cpu"), is_trained=True)
    found.append(expected.train_batch(make_batch(), loss, normaliser=9.0, micro_batching=MicroBatching(n_mbs=2)))
    assert found[0].grad_norm == pytest.approx(found[1].grad_norm, rel=1e-4)


@pytest.mark.parametrize("name", some_of(name for name, config in MODELS.items() if not config.is_scalar))
def test_generation(name: str, device: torch.device) -> None:
    engine = engine_of(MODELS[name], device, is_trained=False)
    rows = [[torch.arange(3, 3 + n)] for n in (4, 9)]
    asked = SequenceSample.from_lists(["1/0", "1/1"], {"prompt_ids": (KeySchema("int64", Per.TOKEN), rows)})
    settings = GenerationConfig(max_new_tokens=8, min_new_tokens=8, n_responses=2)
    ours = engine.generate(asked, settings, seed=1, step=1, eos_id=2)
    here = engine_of(MODELS[name], torch.device("cpu"), is_trained=False)
    expected = here.generate(asked, settings, seed=1, step=1, eos_id=2)
    assert [r.tolist() for r in ours.responses] == [r.tolist() for r in expected.responses]


class _OnDeviceOnly(Communicator):
    """A group of two equal members that takes tensors of the device only, as NCCL does."""

    def all_reduce_(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        if not isinstance(tensor, OnDevice):
            raise RuntimeError("no backend for tensors in host memory")
        return tensor.mul_(2) if op == "sum" else tensor


def test_a_role_without_weights_sums_on_its_device(device: torch.device) -> None:
    parallel = Parallel(dp=_OnDeviceOnly(n_ranks=2), strategy=ParallelStrategy(dp=2))
    mine = torch.tensor([3.0])
    found = WeightlessEngine("reward", device, parallel).all_reduce(mine)
    assert isinstance(found, OnDevice)
    assert (found.inner.tolist(), mine.tolist()) == ([6.0], [3.0])
