"""Dtypes as a `DecoderConfig` names them, and as torch does."""

from __future__ import annotations

import torch

from realrl.shape import DType

_BY_NAME: dict[DType, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_NAMES = {dtype: name for name, dtype in _BY_NAME.items()}


def torch_dtype(name: DType) -> torch.dtype:
    """The dtype of a name."""
    return _BY_NAME[name]


def dtype_name(dtype: torch.dtype) -> DType:
    """The name of a dtype.

    Raises:
        KeyError: no model is of that dtype.
    """
    return _NAMES[dtype]
