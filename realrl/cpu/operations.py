"""The compiled kernels on tensors: on the CPU, without gradient, in float32 or bfloat16.

The result of a row is the same whatever other rows there are, and however many threads.

Shapes: T rows, B rows of a decode step, N query heads, K KV heads, D head size, C capacity of the cache, V vocabulary.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from realrl.cpu import loader
from realrl.cpu.cache import NewTokens
from realrl.cpu.loader import load, why_not
from realrl.cpu.reference import Rope
from realrl.shape import Activation

HEAD_MULTIPLE = 32
"""`attend` takes heads whose size is a multiple of this."""
_ALIGNMENT = 64  # bytes
_MOST_TOKENS_AT_ONCE = 256  # with more tokens a call is one layer: a process answers signals between its calls
_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
_ACTIVATIONS: dict[Activation | None, int] = {None: 0, "silu": 1, "gelu_tanh": 2}


def can_use(device: torch.device, dtype: torch.dtype) -> bool:
    """True if there are compiled kernels for this device and dtype."""
    return device.type == "cpu" and dtype in _NAMES and why_not() is None


@dataclass(frozen=True)
class RMSNorm:
    """The norm x / rms(x) * weight.

    Attributes:
        weight: float32 [size].
        eps: added to the mean square.
    """

    weight: torch.Tensor
    eps: float


class TiledLinear:
    """The layer activation(x W^T + bias) with its own copy of the weight.

    Sums are in float32.

    Args:
        weight: [out, in].
        bias: [out] or None.
        norm: norm of x before the product.
        activation: None for the identity.
        gate: another weight [out, in]: the result is activation(x G^T + bias) * (x W^T + bias), computed in one pass
            over both. The bias is then [2 * out], first the gate's part.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        norm: RMSNorm | None = None,
        *,
        activation: Activation | None = None,
        gate: torch.Tensor | None = None,
    ) -> None:
        first, second = (weight, None) if gate is None else (gate, weight.detach().contiguous())
        first, bias = first.detach().contiguous(), None if bias is None else bias.detach().contiguous()
        self.n_outputs, self.n_inputs = weight.shape
        self.dtype = weight.dtype
        is_gated = gate is not None
        n_packed = _kernel("packed_size", weight.dtype)(self.n_outputs, self.n_inputs, is_gated)
        packed = _aligned(n_packed, weight.dtype)
        _kernel("pack", weight.dtype)(
            first.data_ptr(), _address(second), first.stride(0), self.n_outputs, self.n_inputs,
            packed.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        self._kept = packed, bias, norm  # their addresses are in the product
        norm_weight, eps = (None, 0.0) if norm is None else (norm.weight.data_ptr(), norm.eps)
        self.product = loader.Product(
            norm_weight, packed.data_ptr(), _address(bias), self.n_inputs, self.n_outputs, eps,
            _ACTIVATIONS[activation], is_gated,
        )  # fmt: skip
        self._address = ctypes.addressof(self.product)
        self._multiply = _kernel("multiply", weight.dtype)

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Map x [T, in] to [T, out], and add the residual [T, out], which gated layers do not take."""
        if x.stride(1) != 1:
            x = x.contiguous()
        if residual is not None and residual.stride(1) != 1:
            residual = residual.contiguous()
        n_rows = x.shape[0]
        out = x.new_empty(n_rows, self.n_outputs)
        self._multiply(
            self._address, x.data_ptr(), x.stride(0), n_rows, _address(residual),
            0 if residual is None else residual.stride(0), out.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return out


def rms_norm(x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
    """Apply the norm to x [T, size]."""
    x, out = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    _kernel("rms_norm", x.dtype)(
        x.data_ptr(), *x.shape, norm.weight.data_ptr(), norm.eps, out.data_ptr(), torch.get_num_threads()
    )
    return out


def attend(
    qkv: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tokens: NewTokens,
    *,
    rope: Rope,
    window: int | None,
    scale: float,
) -> torch.Tensor:
    """Causal attention of new tokens, whose keys and values are put into the cache first.

    Args:
        qkv: [T, (N + 2 K) D].
        keys: keys of this layer [rows, K, C, D], contiguous; written to.
        values: values, like `keys`.
        tokens: places of the T tokens.
        rope: rotation of queries and keys, contiguous.
        window: number of tokens, itself included, that a token sees; None for all.
        scale: factor of the scores.

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
        qkv.data_ptr(), qkv.stride(0), keys.data_ptr(), values.data_ptr(), capacity, _address(tokens.rows),
        tokens.positions.data_ptr(), n_tokens, size // head_dim, n_kv_heads, head_dim, window or 0, _address(cos),
        _address(sin), scale, out.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return out


def tiled_layers(
    layers: Sequence[Sequence[TiledLinear]], windows: Sequence[int | None], *, n_kv_heads: int, head_dim: int
) -> Callable[..., torch.Tensor]:
    """Join layers of a decoder, each attention and MLP with the norm before it and the residual after it.

    A step of few tokens is one call: between two calls the interpreter needs some 45 us, its code out of the caches.

    Args:
        layers: the products qkv, o, inner and down of each layer, as in `LayerOps`; all of the same type.
        windows: number of tokens, itself included, that a token sees in each layer; None for all.
        n_kv_heads: K.
        head_dim: D, a multiple of `HEAD_MULTIPLE`.

    Returns:
        A function of x [T, H], keys and values of each layer, as in `attend`, tokens and rope, which gives [T, H].
    """
    described = (loader.Layer * len(layers))(
        *(
            loader.Layer(
                *(part.product for part in parts),
                parts[1].n_inputs // head_dim, n_kv_heads, head_dim, window or 0, head_dim**-0.5,
            )
            for parts, window in zip(layers, windows, strict=True)
        )
    )  # fmt: skip
    width = max(qkv.n_outputs + o.n_inputs + o.n_outputs + inner.n_outputs for qkv, o, inner, _ in layers)
    run = _kernel("run_layers", layers[0][0].dtype)

    def compute(
        x: torch.Tensor, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], tokens: NewTokens, rope: Rope
    ) -> torch.Tensor:
        x = x.contiguous()
        n_tokens, n_layers = len(x), len(layers)  # which own the memory that their products point to
        out, memory = torch.empty_like(x), x.new_empty(n_tokens, width)
        cos, sin = (None, None) if rope is None else rope
        n_at_once = n_layers if n_tokens <= _MOST_TOKENS_AT_ONCE else 1
        for first in range(0, n_layers, n_at_once):
            some = slice(first, first + n_at_once)
            run(
                ctypes.byref(described, first * ctypes.sizeof(loader.Layer)), n_at_once,
                (out if first else x).data_ptr(), _addresses(keys[some]), _addresses(values[some]), keys[0].shape[2],
                _address(tokens.rows), tokens.positions.data_ptr(), n_tokens, _address(cos), _address(sin),
                memory.data_ptr(), out.data_ptr(), torch.get_num_threads(),
            )  # fmt: skip
        return out

    return compute


def sample(
    logits: torch.Tensor,
    uniforms: torch.Tensor,
    *,
    temperature: float,
    is_early: torch.Tensor,
    stop_ids: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw one token per row from softmax(logits / temperature), by inverse CDF in vocabulary order.

    Temperature 0 takes the largest logit.

    Args:
        logits: [B, V].
        uniforms: float64 [B] in [0, 1).
        temperature: not negative.
        is_early: bool [B], True for rows that cannot take one of `stop_ids`.
        stop_ids: distinct tokens.

    Returns:
        Tokens int64 [B], -1 for a row with NaN, infinity or nothing but minus infinity to choose from. Their float32
        log-probabilities [B] under the distribution that was sampled from, 0 with temperature 0. Those under
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


def _addresses(tensors: Sequence[torch.Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*(x.data_ptr() for x in tensors))


def _aligned(n: int, dtype: torch.dtype) -> torch.Tensor:
    block = torch.empty(n + _ALIGNMENT // dtype.itemsize, dtype=dtype)
    start = -block.data_ptr() % _ALIGNMENT // dtype.itemsize
    return block[start : start + n]
