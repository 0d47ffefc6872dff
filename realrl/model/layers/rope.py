"""Rotary positions (Su et al. 2021, RoFormer), in the half-split layout of the Hugging Face llama family.

Scaled for longer contexts by position interpolation (Chen et al. 2023), as llama 3.1, or by YaRN (Peng et al. 2023).
"""

from __future__ import annotations

import math

import torch

from realrl.cpu import Rope
from realrl.shape import DecoderConfig, RopeScaling


def inverse_frequencies(config: DecoderConfig, device: torch.device | None = None) -> torch.Tensor:
    """Return float32 [head_dim / 2]: radians per position of each rotated pair, after scaling."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
    inv_freq = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is None:
        return inv_freq
    if scaling.kind == "linear":
        return inv_freq / scaling.factor
    kept = _kept_by_index(config, scaling, inv_freq) if scaling.kind == "yarn" else _kept_by_turns(inv_freq, scaling)
    return kept * inv_freq + (1 - kept) * inv_freq / scaling.factor


def _kept_by_turns(inv_freq: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    # share of the unscaled frequency: 1 where a wavelength fits often into the original context, 0 where it does not
    n_turns = scaling.original_max_positions * inv_freq / (2 * math.pi)
    kept = (n_turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return kept.clamp(0.0, 1.0)


def _kept_by_index(config: DecoderConfig, scaling: RopeScaling, inv_freq: torch.Tensor) -> torch.Tensor:
    """Share of the unscaled frequency: YaRN, equation 17, with its ramp over the index as in its authors' code."""

    def index_of(n_turns: float) -> float:
        """The index of the frequency that turns `n_turns` times within the original context."""
        radians = scaling.original_max_positions / (n_turns * 2 * math.pi)
        return config.head_dim * math.log(radians) / (2 * math.log(config.rope_theta))

    low, high = index_of(scaling.beta_fast), index_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.head_dim - 1)
    index = torch.arange(len(inv_freq), dtype=torch.float32, device=inv_freq.device)
    return 1 - ((index - low) / max(high - low, 0.001)).clamp(0.0, 1.0)


def rope_table(
    inv_freq: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype, *, amplitude: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (cos, sin), each [T, 1, head_dim]; sin carries the rotation's sign in its first half.

    Args:
        inv_freq: float32 [head_dim / 2].
        positions: integers [T].
        dtype: dtype of the result; angles are computed in float32.
        amplitude: factor of the rotated vectors' length; see `RopeScaling.amplitude`.
    """
    angles = positions.to(torch.float32)[:, None] * inv_freq[None, :]
    cos, sin = angles.cos(), angles.sin()
    if amplitude != 1.0:
        cos, sin = cos * amplitude, sin * amplitude
    return (
        torch.cat((cos, cos), dim=-1)[:, None, :].to(dtype),
        torch.cat((-sin, sin), dim=-1)[:, None, :].to(dtype),
    )


def make_rope(
    config: DecoderConfig, inv_freq: torch.Tensor | None, positions: torch.Tensor, dtype: torch.dtype
) -> Rope:
    """`rope_table` for the tokens of one pass, or None where the model's positions are learned.

    Args:
        inv_freq: result of `inverse_frequencies`; None makes it here.
        positions: integers [T].
    """
    if config.learned_positions:
        return None
    if inv_freq is None:
        inv_freq = inverse_frequencies(config, positions.device)
    amplitude = 1.0 if config.rope_scaling is None else config.rope_scaling.amplitude
    return rope_table(inv_freq, positions, dtype, amplitude=amplitude)
