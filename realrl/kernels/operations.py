"""The kernels on tensors: on the CPU, without gradient, in float32 or bfloat16.

The result of a row is the same whatever other rows there are, and however many threads.

Shapes: T rows, B rows of a decode step, N query heads, K KV heads, D head size, C capacity of the cache, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from realrl.kernels.loader import load, why_not
from realrl.model.config import Activation

_ALIGNMENT = 64  # bytes
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
_ACTIVATIONS: dict[Activation | None, int] = {None: 0, "silu": 1, "gelu_tanh": 2}


def can_use(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there are kernels for this device and dtype."""
    return device.type == "cpu" and dtype in _NAMES and why_not() is None


@dataclass(frozen=True)
class RMSNorm:
    """x / rms(x) * weight.

    Attributes:
        weight: float32 [size].
        eps: added to the mean square.
    """

    weight: torch.Tensor
    eps: float


class TiledLinear:
    """x W^T + bias with its own copy of the weight.

    Sums are in float32.

    Args:
        weight: [out, in].
        bias: [out] or None.
        norm: applied to x first.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, norm: RMSNorm | None = None) -> None:
        self._tiles = _Tiles(weight, None, bias, norm)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """[T, out] from x [T, in]; plus the residual [T, out]."""
        return self._tiles.multiply(x, residual=residual)

    def activated(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        """activation(x W^T + bias)."""
        return self._tiles.multiply(x, activation=activation)


class TiledGated:
    """activation(x G^T + bias) * (x U^T + bias) in one pass over both weights.

    Args:
        gate: [out, in].
        up: [out, in].
        bias: [2 * out], of the gate and then of the other, or None.
        activation: of the gate.
        norm: applied to x first.
    """

    def __init__(
        self,
        gate: torch.Tensor,
        up: torch.Tensor,
        bias: torch.Tensor | None,
        activation: Activation,
        norm: RMSNorm | None = None,
    ) -> None:
        self._tiles = _Tiles(gate, up, bias, norm)
        self._activation: Activation = activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, out] from x [T, in]."""
        return self._tiles.multiply(x, activation=self._activation)


class _Tiles:
    def __init__(
        self, weight: torch.Tensor, other: torch.Tensor | None, bias: torch.Tensor | None, norm: RMSNorm | None
    ) -> None:
        weight, other = weight.detach().contiguous(), None if other is None else other.detach().contiguous()
        self._n_columns, self._n_inputs = weight.shape
        self._is_gated = other is not None
        n_packed = _kernel("packed_size", weight.dtype)(self._n_columns, self._n_inputs, self._is_gated)
        self._tiles = _aligned(n_packed, weight.dtype)
        self._bias = None if bias is None else bias.detach().contiguous()
        self._norm = norm
        self._multiply = _kernel("linear", weight.dtype)
        _kernel("pack", weight.dtype)(
            weight.data_ptr(), _address(other), weight.stride(0), self._n_columns, self._n_inputs,
            self._tiles.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        self._norm_arguments = (None, 0.0) if norm is None else (norm.weight.data_ptr(), norm.eps)
        self._weight_arguments = self._tiles.data_ptr(), self._n_columns, _address(self._bias)

    def multiply(
        self, x: torch.Tensor, *, residual: torch.Tensor | None = None, activation: Activation | None = None
    ) -> torch.Tensor:
        n_rows = x.shape[0]
        if x.stride(1) != 1:
            x = x.contiguous()
        if residual is not None and residual.stride(1) != 1:
            residual = residual.contiguous()
        out = x.new_empty(n_rows, self._n_columns)
        self._multiply(
            x.data_ptr(), x.stride(0), n_rows, self._n_inputs, *self._norm_arguments, *self._weight_arguments,
            _address(residual), 0 if residual is None else residual.stride(0), _ACTIVATIONS[activation],
            self._is_gated, out.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return out


def rms_norm(x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
    """The norm of x [T, size]."""
    x, out = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    _kernel("rms_norm", x.dtype)(
        x.data_ptr(), len(x), x.shape[1], norm.weight.data_ptr(), norm.eps, out.data_ptr(), torch.get_num_threads()
    )
    return out


def can_attend(head_dim: int) -> bool:
    """Whether `attend` takes heads of this size."""
    return head_dim % 32 == 0


def attend(
    qkv: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    positions: torch.Tensor,
    *,
    rows: torch.Tensor | None = None,
    rope: tuple[torch.Tensor, torch.Tensor] | None,
    window: int | None,
    scale: float,
) -> torch.Tensor:
    """Causal attention of new tokens, whose keys and values are put into the cache first.

    Args:
        qkv: [T, (N + 2 K) D].
        keys: [rows, K, C, D], written to.
        values: the same.
        positions: int64 [T], in the rows; contiguous.
        rows: int64 [T], contiguous, of the cache; None for the first T, one token each.
        rope: (cos, sin) of `rope_table`, contiguous, applied to queries and keys; None if nothing is to be rotated.
        window: how many tokens, itself included, a token sees; None for all.
        scale: of the scores.

    Returns:
        [T, N D].
    """
    if qkv.stride(1) != 1:
        qkv = qkv.contiguous()
    n_tokens, width = qkv.shape
    _, n_kv_heads, capacity, head_dim = keys.shape
    size = width - 2 * n_kv_heads * head_dim
    out = qkv.new_empty(n_tokens, size)
    cos, sin = (None, None) if rope is None else rope
    _kernel("attend", qkv.dtype)(
        qkv.data_ptr(), qkv.stride(0), keys.data_ptr(), values.data_ptr(), capacity, _address(rows),
        positions.data_ptr(), n_tokens, size // head_dim, n_kv_heads, head_dim, window or 0, _address(cos),
        _address(sin), scale, out.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return out


def sample(
    logits: torch.Tensor,
    uniforms: torch.Tensor,
    *,
    temperature: float,
    is_early: torch.Tensor,
    stop_ids: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One token per row from softmax(logits / temperature), by inverse CDF in vocabulary order; the largest if it is 0.

    Args:
        logits: [B, V].
        uniforms: float64 [B] in [0, 1).
        temperature: not negative.
        is_early: bool [B], rows that cannot take one of `stop_ids`.
        stop_ids: distinct tokens.

    Returns:
        Tokens int64 [B], -1 for a row with NaN, infinity or nothing but minus infinity to choose from; float32 [B]
        log-probabilities under the distribution that was sampled from, 0 with temperature 0; and under
        softmax(logits / temperature) of all tokens, with temperature 1 if it is 0.
    """
    logits, uniforms, is_early = logits.contiguous(), uniforms.contiguous(), is_early.contiguous()
    n_rows = len(logits)
    stops = torch.tensor(list(stop_ids), dtype=torch.int64)
    tokens = torch.empty(n_rows, dtype=torch.int64)
    logprobs, policy_logprobs = torch.empty(2, n_rows)
    _kernel("sample", logits.dtype)(
        logits.data_ptr(), n_rows, logits.shape[1], 1.0 / (temperature or 1.0), temperature == 0.0,
        uniforms.data_ptr(), is_early.data_ptr(), stops.data_ptr(), len(stops),
        tokens.data_ptr(), logprobs.data_ptr(), policy_logprobs.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return tokens, logprobs, policy_logprobs


@cache
def _kernel(name: str, dtype: torch.dtype) -> Callable[..., Any]:
    kernel: Callable[..., Any] = getattr(load(), f"{name}_{_NAMES[dtype]}")
    return kernel


def _address(x: torch.Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _aligned(n: int, dtype: torch.dtype) -> torch.Tensor:
    block = torch.empty(n + _ALIGNMENT // dtype.itemsize, dtype=dtype)
    start = -block.data_ptr() % _ALIGNMENT // dtype.itemsize
    return block[start : start + n]
