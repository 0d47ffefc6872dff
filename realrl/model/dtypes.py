"""Translation between the dtype names of `DecoderConfig` and torch's dtypes."""

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
    return _BY_NAME[name]


def dtype_name(dtype: torch.dtype) -> DType:
    """The configuration's name of a torch dtype.

    Raises:
        KeyError: models cannot have this dtype.
    """
    return _NAMES[dtype]
