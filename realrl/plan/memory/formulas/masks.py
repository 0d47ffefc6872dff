"""Bytes of attention masks on one rank: those that all blocks share, and those that a block makes for itself."""

from __future__ import annotations

from realrl.plan.memory.buffers import FLOAT32
from realrl.plan.memory.formulas.local import Kernels, LocalShape
from realrl.plan.memory.load import Load


def windows_of(local: LocalShape, longest: int) -> set[int]:
    """Return the windows of this rank's layers that hide something in sequences of this length."""
    windows = {local.model.window_of(layer) for layer in local.layers}
    return {window for window in windows if window is not None and window < longest}


def fork_masks(local: LocalShape, load: Load, n_again: int, kernels: Kernels) -> float:
    """Return the bytes of masks for common prompts, which all blocks share: one for each window and pair of lengths.

    Args:
        n_again: tokens of the largest micro-batch that are not computed.
    """
    if not n_again:
        return 0.0
    wide = FLOAT32 if kernels.float_attention else local.element_bytes
    n_groups = local.n_heads / max(1, local.n_kv_heads)
    n_windows = len({local.model.window_of(layer) for layer in local.layers})
    # sequences of one sample may happen to have more in common than their prompt
    n_pairs = n_windows * (load.n_samples if load.n_padded else min(2, load.n_samples))
    return n_pairs * wide * n_groups * load.n_tail * load.longest_row


def _mask_elements(local: LocalShape, load: Load, kernels: Kernels) -> int:
    """Return the elements of one window's masks in a pass, one for each length of a group; 0 where there are none."""
    model = local.model
    if model.keeps_scores or not kernels.joins_attention(model):  # scores have their own; other kernels take a number
        return 0
    return max(1, load.n_padded // max(1, load.longest_row)) * load.longest_row**2


def window_masks(local: LocalShape, load: Load, kernels: Kernels) -> int:
    """Return the bytes of windows' masks in a pass, which all blocks share."""
    return len(windows_of(local, load.longest_row)) * _mask_elements(local, load, kernels)


def own_mask(local: LocalShape, load: Load, kernels: Kernels) -> int:
    """Return the bytes of the mask that a windowed block adds to its scores; with gradient each block keeps its own."""
    wide = FLOAT32 if kernels.float_attention else local.element_bytes
    return wide * _mask_elements(local, load, kernels) * bool(windows_of(local, load.longest_row))


def n_windowed(local: LocalShape, load: Load) -> int:
    """Return how many of this rank's layers have a window that hides something."""
    windows = windows_of(local, load.longest_row)
    return sum(local.model.window_of(layer) in windows for layer in local.layers)


def prompt_masks(local: LocalShape, load: Load, b: int, kernels: Kernels) -> int:
    """Return the bytes of masks in the prefill of a generation whose kernels do not attend in one pass.

    Args:
        b: bytes of an element in generation.
    """
    model, longest = local.model, load.n_prompt
    if kernels.fuses_attention(model):
        return 0
    windows = windows_of(local, longest)
    if model.keeps_scores:  # all layers have one, which is there as what is seen and as what is hidden
        n_masks = len({longest if w is None else w for w in map(model.window_of, local.layers)})
        return (n_masks + 1) * longest**2
    return longest**2 * (len(windows) + b * bool(windows))
