import pytest
import torch
from torch import nn
from torch.nn import functional as F

from realrl.cpu import LinearWeights, TorchKernels, choice, choose_kernels, torch_kernels
from realrl.cpu.compiled_kernels import CompiledKernels
from realrl.cpu.loader import why_not
from realrl.cpu.torch_kernels import OneDNNKernels, can_pack
from realrl.model.layers.norm import Norm

CPU = torch.device("cpu")
TOLERANCES = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: {"rtol": 3e-2, "atol": 3e-2}}


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request):
    return request.param


@pytest.fixture(params=[TorchKernels, OneDNNKernels, CompiledKernels], ids=["torch", "onednn", "compiled"])
def kernels(request, dtype):
    """Every set that this machine has."""
    if request.param is OneDNNKernels and not can_pack(CPU, dtype):
        pytest.skip("oneDNN packs nothing here")
    if request.param is CompiledKernels and why_not() is not None:
        pytest.skip(f"no kernels: {why_not()}")
    with torch.inference_mode():
        yield request.param(dtype)


def make_layers(*sizes, dtype, bias):
    torch.manual_seed(0)
    return [nn.Linear(48, size, bias=bias, dtype=dtype) for size in sizes]


def weights(layer):
    return LinearWeights(layer.weight, layer.bias)


@pytest.mark.parametrize("n_rows", [1, 7, 32])
@pytest.mark.parametrize("bias", [False, True])
def test_several_layers_are_one_product(kernels, dtype, n_rows, bias):
    layers = make_layers(16, 24, 8, dtype=dtype, bias=bias)
    x, residual = torch.randn(n_rows, 48, dtype=dtype), torch.randn(n_rows, 48, dtype=dtype)
    product = kernels.linear([weights(layer) for layer in layers])
    expected = torch.cat([layer(x) for layer in layers], dim=-1)
    torch.testing.assert_close(product(x, None), expected, **TOLERANCES[dtype])
    torch.testing.assert_close(product(x, residual), expected + residual, **TOLERANCES[dtype])


@pytest.mark.parametrize("bias", [False, True])
def test_gated_layers_are_silu_of_one_times_the_other(kernels, dtype, bias):
    gate, up = make_layers(40, 40, dtype=dtype, bias=bias)
    x = torch.randn(7, 48, dtype=dtype)
    gated = kernels.gated(weights(gate), weights(up), "silu")
    torch.testing.assert_close(gated(x), F.silu(gate(x)) * up(x), **TOLERANCES[dtype])


@pytest.mark.parametrize(("kind", "has_offset"), [("rms", False), ("rms", True), ("layer", False)])
def test_a_norm_before_an_operation(kernels, dtype, kind, has_offset):
    gate, up = make_layers(40, 40, dtype=dtype, bias=True)
    weight, bias = (nn.Parameter(torch.rand(48).to(dtype)) for _ in range(2))
    norm = Norm(weight, bias if kind == "layer" else None, kind=kind, eps=1e-5, has_offset=has_offset)
    x = 3 * torch.randn(7, 48, dtype=dtype)
    normed = norm(x)
    torch.testing.assert_close(kernels.norm(norm)(x), normed, **TOLERANCES[dtype])
    torch.testing.assert_close(kernels.linear([weights(up)], norm)(x, None), up(normed), **TOLERANCES[dtype])
    activated = kernels.activated(weights(up), "gelu_tanh", norm)
    torch.testing.assert_close(activated(x), F.gelu(up(normed), approximate="tanh"), **TOLERANCES[dtype])
    gated = kernels.gated(weights(gate), weights(up), "silu", norm)
    torch.testing.assert_close(gated(x), F.silu(gate(normed)) * up(normed), **TOLERANCES[dtype])


def test_the_plain_kernel_neither_copies_a_single_weight_nor_changes_the_residual():
    weight, x, residual = torch.randn(4, 4), torch.randn(2, 4), torch.randn(2, 4)
    kept = residual.clone()
    operation = TorchKernels(torch.float32).linear([LinearWeights(weight)])
    before = operation(x, residual)
    weight.zero_()
    assert torch.equal(operation(x, residual), kept)
    assert torch.equal(residual, kept)
    assert not torch.equal(before, kept)


def test_only_cpus_pack():
    assert not can_pack(torch.device("cuda"), torch.float32)
    assert not can_pack(CPU, torch.float64)
    for device, dtype in ((torch.device("cuda"), torch.float32), (CPU, torch.float64)):
        assert type(choose_kernels(device, dtype)) is TorchKernels


@pytest.mark.parametrize(("has_avx512", "most_rows"), [(True, 10**6), (False, 24)])
def test_without_avx512_packing_pays_for_few_rows_only(has_avx512, most_rows, monkeypatch):
    def packs(n_rows):
        return choose_kernels(CPU, torch.float32, n_rows=n_rows).packs_weights

    monkeypatch.setattr(choice, "HAS_AVX512", has_avx512)
    monkeypatch.setattr(choice, "can_use", lambda device, dtype: False)
    monkeypatch.setattr(choice, "can_pack", lambda device, dtype: True)
    assert packs(most_rows)
    assert packs(most_rows + 1) == has_avx512
    monkeypatch.setattr(choice, "can_pack", lambda device, dtype: False)
    assert not packs(1)


def test_kernels_that_were_turned_off_or_are_not_there_leave_torchs(monkeypatch):
    monkeypatch.setattr(choice, "can_use", lambda device, dtype: False)
    monkeypatch.setattr(torch_kernels, "HAS_ONEDNN", False)
    kernels = choose_kernels(CPU, torch.float32)
    assert type(kernels) is TorchKernels
    assert not kernels.attends(64)
