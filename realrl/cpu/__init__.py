"""Kernels of generation on CPUs with AVX2, AVX-512 or a matrix unit (AMX). Everywhere else torch's own are used.

*.cpp, *.h ──► loader: compiled once per machine, loaded ──► operations: on tensors ──► engine/generate
"""

from realrl.cpu.loader import UnavailableError, describe, why_not
from realrl.cpu.operations import (
    HEAD_MULTIPLE,
    LayerParts,
    NewTokens,
    RMSNorm,
    TiledLayers,
    TiledLinear,
    attend,
    can_attend,
    can_use,
    rms_norm,
    sample,
)

__all__ = [
    "HEAD_MULTIPLE",
    "LayerParts",
    "NewTokens",
    "RMSNorm",
    "TiledLayers",
    "TiledLinear",
    "UnavailableError",
    "attend",
    "can_attend",
    "can_use",
    "describe",
    "rms_norm",
    "sample",
    "why_not",
]
