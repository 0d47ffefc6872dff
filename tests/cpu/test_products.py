"""Matrix products on the CPU: the same numbers whichever kernel computes them."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from realrl.cpu import linear, machine, matmul, products
from realrl.cpu.machine import product_dtype
from realrl.model.lm_logprobs import lm_logprobs

CPU = torch.device("cpu")
BF16 = torch.bfloat16


@pytest.fixture(params=[False, True], ids=["float32 products", "bf16 products"])
def has_bf16_kernels(request, monkeypatch):
    """Both kinds of machine, on any machine."""
    monkeypatch.setattr(machine, "has_bf16_kernels", lambda: request.param)
    return request.param


@pytest.fixture(params=[False, True], ids=["default BLAS", "oneDNN"])
def onednn(request, monkeypatch):
    if request.param and not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("this build has no oneDNN")
    monkeypatch.setattr(machine, "TRAINS_WITH_ONEDNN", request.param)
    monkeypatch.setattr(products, "_WORTH_IT", 1)


def test_only_cpus_without_bf16_kernels_multiply_in_another_dtype(has_bf16_kernels):
    assert product_dtype(CPU, BF16) == (BF16 if has_bf16_kernels else torch.float32)
    assert product_dtype(CPU, torch.float32) == torch.float32
    assert product_dtype(CPU, torch.float64) == torch.float64
    assert product_dtype(torch.device("cuda"), BF16) == BF16


def test_the_decision_is_this_machines_own():
    assert machine.has_bf16_kernels() == torch.ops.mkldnn._is_mkldnn_bf16_supported()


@pytest.mark.parametrize("n_rows", [1, 33, 300])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.usefixtures("has_bf16_kernels", "onednn")
def test_a_bf16_layer_rounds_the_float32_result_once(n_rows, with_bias):
    torch.manual_seed(0)
    x, weight, grad = torch.randn(n_rows, 48), torch.randn(40, 48), torch.randn(n_rows, 40)
    bias = torch.randn(40) if with_bias else None
    ours = [None if t is None else t.to(BF16).requires_grad_() for t in (x, weight, bias)]
    exact = [None if t is None else t.detach().double().requires_grad_() for t in ours]
    y = linear(*ours)
    assert y.dtype == BF16
    y.backward(grad.to(BF16))
    expected = F.linear(*exact)
    expected.backward(grad.to(BF16).double())
    torch.testing.assert_close(y.double(), expected, rtol=2**-8, atol=2e-2 if with_bias else 1e-4)
    for a, b in zip(ours, exact, strict=True):
        if a is not None:
            torch.testing.assert_close(a.grad.double(), b.grad, rtol=2**-8, atol=5e-2 if a.dim() == 1 else 1e-4)
    with torch.no_grad():
        torch.testing.assert_close(linear(*ours).double(), expected, rtol=2**-8, atol=2e-2 if with_bias else 1e-4)


@pytest.mark.parametrize("shape", [(2, 3, 50), (2, 50, 3), (50, 2, 3), (17, 17, 17), (0, 4, 3), (1, 1, 1)])
@pytest.mark.parametrize("piece", [7, 64, 1 << 22])
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_in_pieces_equal_the_whole(shape, piece, with_bias, monkeypatch):
    monkeypatch.setattr(machine, "has_bf16_kernels", lambda: False)
    monkeypatch.setattr(products, "PRODUCT_PIECE", piece)
    m, k, n = shape
    torch.manual_seed(0)
    a, weight = torch.randn(m, k).to(BF16), torch.randn(n, k).to(BF16)
    bias = torch.randn(n).to(BF16) if with_bias else None
    y = linear(a, weight, bias)
    assert (y.dtype, y.shape) == (BF16, (m, n))
    exact = F.linear(a.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(y.double(), exact, rtol=2**-8, atol=1e-5)
    torch.testing.assert_close(matmul(a, weight.T).double(), a.double() @ weight.T.double(), rtol=2**-8, atol=1e-5)
    transposed = matmul(weight, a.T)
    torch.testing.assert_close(transposed.double(), weight.double() @ a.T.double(), rtol=2**-8, atol=1e-5)


@pytest.mark.usefixtures("has_bf16_kernels")
def test_log_probabilities_and_their_gradient_from_bf16_states():
    torch.manual_seed(0)
    hidden, weight = torch.randn(20, 32).to(BF16), (0.3 * torch.randn(70, 32)).to(BF16)
    targets = torch.randint(0, 70, (20,))
    ours = [t.clone().requires_grad_() for t in (hidden, weight)]
    exact = [t.double().requires_grad_() for t in (hidden, weight)]
    logprobs, _ = lm_logprobs(*ours, targets)
    wanted = torch.log_softmax(exact[0] @ exact[1].T, -1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), wanted, rtol=1e-2, atol=3e-2)
    weights = torch.randn(20)
    (logprobs * weights).sum().backward()
    (wanted * weights).sum().backward()
    for a, b in zip(ours, exact, strict=True):
        assert a.grad.dtype == BF16
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=3e-2, atol=3e-2)


@pytest.mark.usefixtures("onednn")
def test_float32_products_and_gradients():
    torch.manual_seed(0)
    ours = [torch.randn(300, 24, requires_grad=True), torch.randn(30, 24, requires_grad=True), torch.randn(30)]
    exact = [t.detach().double().requires_grad_() for t in ours]
    y, expected = linear(*ours), F.linear(*exact)
    grad = torch.randn(300, 30)
    y.backward(grad)
    expected.backward(grad.double())
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-4)
    for a, b in zip(ours[:2], exact[:2], strict=True):
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dim", [0, 1])
def test_matrices_with_gaps_do_not_go_to_onednn(dim, monkeypatch):
    """A part of a larger matrix, as a layout has it that is a view of another one."""
    monkeypatch.setattr(machine, "TRAINS_WITH_ONEDNN", True)
    monkeypatch.setattr(products, "_WORTH_IT", 1)
    called = []
    monkeypatch.setattr(products, "_onednn", lambda x, weight, bias: called.append(weight) or F.linear(x, weight, bias))
    whole, x = torch.randn(300, 300), torch.randn(300, 150)
    part = whole.narrow(dim, 100, 150).narrow(1 - dim, 0, 150 if dim else 300)
    weight = part if dim else part.T  # [out, 150]
    expected = x.double() @ weight.double().T
    for dense in (weight.contiguous(), weight):
        own = dense.detach().requires_grad_()
        y = linear(x, own)
        y.sum().backward()
        torch.testing.assert_close(y.double(), expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(own.grad, x.sum(0).expand_as(own), atol=1e-3, rtol=1e-4)
    assert called
    assert all(one.is_contiguous() or one.T.is_contiguous() for one in called)
