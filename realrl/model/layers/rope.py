"""Rotary positions (Su et al. 2021, RoFormer), in the half-split layout of the Hugging Face llama family.

Scaled for longer contexts by position interpolation (Chen et al. 2023), as llama 3.1, or by YaRN (Peng et al. 2023).
"""

from __future__ import annotations

import math

import torch

from realrl.cpu import Rope
from realrl.shape import DecoderConfig, RopeScaling

Frequencies = tuple[torch.Tensor, torch.Tensor]
"""Radians per position in most layers, and in those with a base of their own."""


def all_frequencies(config: DecoderConfig, device: torch.device | None = None) -> Frequencies:
    """Return the frequencies of all layers; the second ones are the first where no layer has a base of its own."""
    inv_freq = inverse_frequencies(config, device)
    theta = config.local_rope_theta
    return inv_freq, inv_freq if theta is None else _unscaled(config, theta, device)


def _unscaled(config: DecoderConfig, theta: float, device: torch.device | None) -> torch.Tensor:
    exponents = torch.arange(0, config.rope_dim, 2, dtype=torch.float32, device=device) / config.rope_dim
    return 1.0 / theta**exponents


def inverse_frequencies(config: DecoderConfig, device: torch.device | None = None) -> torch.Tensor:
    """Return float32 [rope_dim / 2]: radians per position of each rotated pair, after scaling."""
    inv_freq = _unscaled(config, config.rope_theta, device)
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
        return config.rope_dim * math.log(radians) / (2 * math.log(config.rope_theta))

    low, high = index_of(scaling.beta_fast), index_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.rope_dim - 1)
    index = torch.arange(len(inv_freq), dtype=torch.float32, device=inv_freq.device)
    return 1 - ((index - low) / max(high - low, 0.001)).clamp(0.0, 1.0)


def rope_table(
    inv_freq: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype, *, amplitude: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (cos, sin), each [T, 1, rope_dim]; sin carries the rotation's sign in its first half.

    Args:
        inv_freq: float32 [rope_dim / 2].
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


def make_ropes(
    config: DecoderConfig, frequencies: Frequencies | None, positions: torch.Tensor, dtype: torch.dtype
) -> tuple[Rope, Rope]:
    """Return the tables for the tokens of one pass: of most layers, and of those with `has_local_rope`.

    Both are None where the model's positions are learned.

    Args:
        frequencies: result of `all_frequencies`; None makes it here.
        positions: integers [T].
    """
    if config.learned_positions:
        return None, None
    usual, local = all_frequencies(config, positions.device) if frequencies is None else frequencies
    amplitude = 1.0 if config.rope_scaling is None else config.rope_scaling.amplitude
    rope = rope_table(usual, positions, dtype, amplitude=amplitude)
    return rope, rope if local is usual else rope_table(local, positions, dtype)
