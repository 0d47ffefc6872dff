"""Rotary positions (Su et al. 2021, RoFormer), in the half-split layout of the Hugging Face llama family."""

from __future__ import annotations

import math

import torch

from realrl.model.config import DecoderConfig, RopeScaling


def inverse_frequencies(config: DecoderConfig, device: torch.device | None = None) -> torch.Tensor:
    """Return float32 [head_dim / 2]: radians per position of each rotated pair, after scaling."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
    inv_freq = 1.0 / config.rope_theta**exponents
    return inv_freq if config.rope_scaling is None else _scale(inv_freq, config.rope_scaling)


def _scale(inv_freq: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    if scaling.kind == "linear":
        return inv_freq / scaling.factor
    # share of the unscaled frequency: 1 where a wavelength fits often into the original context, 0 where it does not
    n_turns = scaling.original_max_positions * inv_freq / (2 * math.pi)
    kept = (n_turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return kept * inv_freq + (1 - kept) * inv_freq / scaling.factor


def rope_table(
    inv_freq: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (cos, sin), each [T, 1, head_dim]; sin carries the rotation's sign in its first half.

    Args:
        inv_freq: float32 [head_dim / 2].
        positions: integers [T].
        dtype: of the result; angles are computed in float32.
    """
    angles = positions.to(torch.float32)[:, None] * inv_freq[None, :]
    cos, sin = angles.cos(), angles.sin()
    return (
        torch.cat((cos, cos), dim=-1)[:, None, :].to(dtype),
        torch.cat((-sin, sin), dim=-1)[:, None, :].to(dtype),
    )


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate `x` [T, heads, head_dim] by the table of `rope_table`."""
    half = x.shape[-1] // 2
    return torch.addcmul(x * cos, x.roll(half, dims=-1), sin)
