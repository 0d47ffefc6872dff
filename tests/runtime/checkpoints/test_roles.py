"""The optimizer's state of a role is read in any layout, whatever layout wrote it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from realrl.engine.device import Staging
from realrl.mesh.device_mesh import ParallelStrategy
from realrl.plan.parameters.adapters import is_adapter
from realrl.plan.parameters.decoder_specs import parameter_specs
from realrl.plan.parameters.layout import parameter_layout
from realrl.plan.parameters.restore import coordinates, model_digest
from realrl.runtime.checkpoints.roles import HostCopies, RoleCopy, _OptimizerReader, optimizer_file
from realrl.runtime.checkpoints.state_file import save_state
from realrl.sched.messages import SavedRole
from realrl.shape import DecoderConfig, LoRA, MoEConfig
from tests.helpers.live_memory import LiveMemory

PLAIN = DecoderConfig(11, 8, 5, 4, 2, 2, 9)
MODELS = {
    "grouped KV heads": PLAIN,
    "tied": replace(PLAIN, tied_embeddings=True),
    "experts": replace(PLAIN, moe=MoEConfig(4, 2, 6)),
    "adapters": replace(PLAIN, lora=LoRA(2, 4.0, ("q", "o", "down"))),
}
STRATEGIES = [ParallelStrategy(*sizes) for sizes in ((1, 1, 1), (2, 4, 1), (1, 1, 3), (1, 2, 2))]
STRATEGIES.append(ParallelStrategy(tp=2, pp=2, vpp=2))


def trained(config: DecoderConfig) -> list[Any]:
    specs = parameter_specs(config)
    return [spec for spec in specs if config.lora is None or is_adapter(spec.name)]


def state_of(config: DecoderConfig, strategy: ParallelStrategy, coordinate: tuple[int, int]) -> dict[str, Any]:
    """Return what the engine of one coordinate gives: every element says which parameter and which element it is."""
    layout = parameter_layout(parameter_specs(config), strategy, range(strategy.n_devices))
    slices = layout.slices_of(layout.rank_at(pp_rank=coordinate[0], dp_rank=0, tp_rank=coordinate[1]))
    parameters = {}
    for place, spec in enumerate(trained(config)):
        if spec.name in slices:
            box = tuple(slice(start, stop) for start, stop in slices[spec.name])
            whole = torch.arange(spec.n_elements, dtype=torch.float32).reshape(spec.shape) + 1000 * place
            part = whole[box].contiguous()
            parameters[spec.name] = {"exp_avg": part, "exp_avg_sq": part * 2, "step": 7, "master": part + 0.5}
    return {"n_taken": 8, "n_total": 20, "loss_scale": {"scale": 1024.0, "good": 3}, "parameters": parameters}


@pytest.mark.parametrize("model", MODELS)
def test_every_layout_reads_every_other(model: str, tmp_path: Path) -> None:
    config = MODELS[model]
    for number, saved in enumerate(STRATEGIES):
        folder = tmp_path / str(number)
        (folder / "state").mkdir(parents=True)
        for at in coordinates(saved):
            save_state(folder / optimizer_file("actor", at), state_of(config, saved, at))
        role = SavedRole(saved.dp, saved.tp, saved.pp, model_digest(parameter_specs(config)), vpp=saved.vpp)
        reader = _OptimizerReader(folder, "actor", role, config)
        for target in STRATEGIES:
            for at in coordinates(target):
                assert_same(reader.read(target, at), state_of(config, target, at))


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert {key: value for key, value in ours.items() if key != "parameters"} == {
        key: value for key, value in theirs.items() if key != "parameters"
    }
    assert list(ours["parameters"]) == list(theirs["parameters"])
    for name, expected in theirs["parameters"].items():
        found = ours["parameters"][name]
        assert found.keys() == expected.keys()
        assert found["step"] == 7
        for key in ("exp_avg", "exp_avg_sq", "master"):
            assert torch.equal(found[key], expected[key]), (name, key)


def test_copies_keep_what_was_there_and_use_their_memory_again() -> None:
    copies, tensor = HostCopies(), torch.arange(6.0)
    view = tensor[1:5].view(2, 2)
    first = copies.copy("actor/w", view)
    tensor.zero_()
    assert first.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert copies.copied_bytes == 16
    again = copies.copy("actor/w", view)
    assert again.data_ptr() == first.data_ptr()
    assert again.tolist() == [[0.0, 0.0], [0.0, 0.0]]
    other = copies.copy("actor/w", torch.ones(3))
    assert other.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("n_bytes", [1, 6, 8, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_nothing_stays_pinned_after_ten_checkpoints(n_bytes: int, dtype: torch.dtype) -> None:
    memory = LiveMemory()

    def allocate(n: int) -> torch.Tensor:
        buffer = torch.empty(n, dtype=torch.uint8)
        memory.count(buffer)
        return buffer

    copies = HostCopies(lambda: Staging(n_bytes, allocate), lambda _: True)
    for step in range(10):
        copies.begin(nothing_changes=False)
        tensors = {"scalar": torch.tensor(step), "transposed": torch.arange(step, step + 35).view(5, 7).T}
        for name, tensor in tensors.items():
            assert torch.equal(copies.copy(name, tensor.to(dtype)), tensor.to(dtype))
            assert memory.now == 2 * n_bytes
        copies.end()
        assert memory.now == 0
    assert memory.peak == 2 * n_bytes


def test_a_part_of_a_bucket_is_copied_even_if_nothing_changes() -> None:
    copies, bucket = HostCopies(), torch.arange(6.0)
    copies.begin(nothing_changes=True)
    kept = copies.copy("w", bucket[2:4])
    assert kept.tolist() == [2.0, 3.0]
    assert kept.untyped_storage().nbytes() == kept.nbytes


def test_the_last_checkpoint_needs_no_copies() -> None:
    copies, tensor = HostCopies(), torch.arange(6.0)
    copies.begin(nothing_changes=True)
    assert copies.copy("w", tensor).data_ptr() == tensor.data_ptr()
    assert copies.copied_bytes == 0
    copies.begin(nothing_changes=False)
    assert copies.copy("w", tensor).data_ptr() != tensor.data_ptr()
    assert copies.copied_bytes == 24


def test_a_tokenizer_that_does_not_fit_on_the_disk(tmp_path: Path) -> None:
    class Tokenizer:
        def save_pretrained(self, folder: Path) -> None:  # as the tokenizers library does
            raise Exception("No space left on device (os error 28)")

    with pytest.raises(OSError) as caught:
        RoleCopy("actor", tokenizer=Tokenizer()).write(tmp_path)
    assert caught.value.strerror == "No space left on device (os error 28)"
    assert caught.value.filename == str(tmp_path / "actor" / "tokenizer.json")
