import pytest
import torch
from torch import nn
from torch.nn import functional as F

from realrl.cpu import fused_linear as linear_module
from realrl.cpu.fused_linear import can_pack, fuse_gated, fuse_linears, fuse_weight, packing_pays

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n_rows", [1, 7, 32])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_and_plain_kernels_agree(dtype, n_rows, bias):
    if not can_pack(CPU, dtype):
        pytest.skip("this machine has no packed kernels")
    torch.manual_seed(0)
    linears = [nn.Linear(48, size, bias=bias, dtype=dtype) for size in (16, 24, 8)]
    x, residual = torch.randn(n_rows, 48, dtype=dtype), torch.randn(n_rows, 48, dtype=dtype)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    with torch.inference_mode():
        plain, packed = (fuse_linears(linears, dtype=dtype, pack=pack) for pack in (False, True))
        expected = torch.cat([layer(x) for layer in linears], dim=-1)
        torch.testing.assert_close(plain(x, None), expected, **tolerance)
        torch.testing.assert_close(packed(x, None), expected, **tolerance)
        torch.testing.assert_close(packed(x, residual), plain(x, residual), **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_gated_layers_are_silu_of_one_times_the_other(dtype, pack, bias):
    if pack and not can_pack(CPU, dtype):
        pytest.skip("this machine has no packed kernels")
    torch.manual_seed(0)
    gate, up = (nn.Linear(48, 40, bias=bias, dtype=dtype) for _ in range(2))
    x = torch.randn(7, 48, dtype=dtype)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 3e-2, "atol": 3e-2}
    with torch.inference_mode():
        torch.testing.assert_close(
            fuse_gated(gate, up, dtype=dtype, pack=pack)(x), F.silu(gate(x)) * up(x), **tolerance
        )


def test_the_plain_kernel_neither_copies_a_single_weight_nor_changes_the_residual():
    weight, x, residual = torch.randn(4, 4), torch.randn(2, 4), torch.randn(2, 4)
    kept = residual.clone()
    operation = fuse_weight(weight, None, pack=False)
    before = operation(x, residual)
    weight.zero_()
    assert torch.equal(operation(x, residual), kept)
    assert torch.equal(residual, kept)
    assert not torch.equal(before, kept)


def test_only_cpus_pack():
    assert not can_pack(torch.device("cuda"), torch.float32)
    assert not can_pack(CPU, torch.float64)


@pytest.mark.parametrize(("has_avx512", "most_rows"), [(True, 10**6), (False, 24)])
def test_without_avx512_packing_pays_for_few_rows_only(has_avx512, most_rows, monkeypatch):
    monkeypatch.setattr(linear_module, "HAS_AVX512", has_avx512)
    monkeypatch.setattr(linear_module, "can_use", lambda device, dtype: False)
    monkeypatch.setattr(linear_module, "can_pack", lambda device, dtype: True)
    assert packing_pays(CPU, torch.float32, most_rows)
    assert packing_pays(CPU, torch.float32, most_rows + 1) == has_avx512
    monkeypatch.setattr(linear_module, "can_pack", lambda device, dtype: False)
    assert not packing_pays(CPU, torch.float32, 1)
