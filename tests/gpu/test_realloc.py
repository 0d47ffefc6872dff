"""Parameters between layouts of one CUDA device, and between the device and pinned host memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from realrl.engine.device import memory_gb, resolve_device
from realrl.engine.groups import ALONE
from realrl.engine.parameters.offload import Offloader
from realrl.engine.parameters.realloc import Reallocator
from realrl.mesh.device_mesh import ParallelStrategy
from realrl.plan.parameters.decoder_specs import parameter_specs
from realrl.plan.parameters.layout import parameter_layout
from realrl.plan.parameters.realloc import plan_realloc
from realrl.shape import tiny_config

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def make_parameters(device: torch.device, n_megabytes: int) -> dict[str, torch.Tensor]:
    """A large matrix, and two views of one memory."""
    generator = torch.Generator(device).manual_seed(0)
    whole = torch.randn(64, 96, device=device, generator=generator)
    large = torch.randn(n_megabytes, 1 << 18, device=device, generator=generator)
    return {"large": nn.Parameter(large), "rows": nn.Parameter(whole[3:9]), "columns": nn.Parameter(whole[:, 90:])}


@pytest.mark.parametrize("keeps_host_copy", [False, True])
def test_offloaded_memory_is_free_and_comes_back_bit_for_bit(keeps_host_copy: bool) -> None:
    device = resolve_device("cuda")
    parameters = make_parameters(device, 256)
    expected = {name: p.detach().cpu() for name, p in parameters.items()}
    offloader = Offloader(parameters, device, keeps_host_copy=keeps_host_copy)
    for _ in range(3):
        before = memory_gb(device)
        offloader.offload()
        torch.cuda.synchronize(device)
        scratch = torch.zeros(1 << 20, device=device)  # the allocator looks at pending frees when it allocates
        assert before - memory_gb(device) > 0.25
        del scratch
        offloader.prefetch()
        busy = torch.randn(1024, 1024, device=device)
        for _ in range(10):
            busy = busy @ busy / 32.0
        offloader.wait()
        sums = {name: p.detach().double().sum() for name, p in parameters.items()}  # queued right behind the copy
        for name, p in parameters.items():
            assert torch.equal(p.detach().cpu(), expected[name])
            assert float(sums[name]) == pytest.approx(float(expected[name].double().sum()))
    with torch.no_grad():
        parameters["rows"].zero_()
    assert not parameters["columns"][3:9].any()


def test_what_is_computed_just_before_leaves_with_it() -> None:
    """The copy to the host waits for the kernels that still write, and the next user of the memory for the copy."""
    device = resolve_device("cuda")
    parameter = nn.Parameter(torch.zeros(64, 1 << 18, device=device))
    offloader = Offloader({"w": parameter}, device)
    with torch.no_grad():
        for _ in range(50):
            parameter.add_(1.0)
    offloader.offload()
    taken = [torch.full((64, 1 << 18), -1.0, device=device) for _ in range(3)]
    offloader.wait()
    assert (parameter == 50.0).all()
    assert all((t == -1.0).all() for t in taken)


def test_one_device_aliases_copies_and_averages() -> None:
    device = resolve_device("cuda")
    specs = parameter_specs(tiny_config(64, dtype="bfloat16"))
    only = parameter_layout(specs, ParallelStrategy(), (0,))
    realloc = Reallocator(plan_realloc(only, only), ALONE, 0, device)
    source = {s.name: torch.randn(s.shape, device=device, dtype=torch.bfloat16) for s in specs}
    target = {s.name: torch.randn(s.shape, device=device, dtype=torch.bfloat16) for s in specs}
    expected = {name: (0.25 * source[name].float() + 0.75 * target[name].float()).bfloat16() for name in source}
    aliased, copied = realloc.run(source), realloc.run(source, alias=False)
    averaged = realloc.run(source, target=target, eta=0.25)
    for name, tensor in source.items():
        assert aliased.parameters[name].data_ptr() == tensor.data_ptr() != copied.parameters[name].data_ptr()
        assert torch.equal(copied.parameters[name], tensor)
        assert averaged.parameters[name].data_ptr() == target[name].data_ptr()
        torch.testing.assert_close(target[name], expected[name])
