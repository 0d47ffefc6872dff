"""The operations of a decoder, by the fastest kernels of this machine: the one place that knows the CPU.

With gradient, `linear` and `matmul` are plain functions. Without, `choose_kernels` gives one object whose methods make
the operations of a step: `linear`, `norm`, `attention`, whole `layers`, a `sampler`. Its three kinds agree to rounding.

    TorchKernels ◄── OneDNNKernels     torch's operations on any device; its products from packed weights
         ▲
         └────────── CompiledKernels   AVX2, AVX-512 or a matrix unit: kernels/*.cpp ──► loader ──► operations
"""

from realrl.cpu.attention import CacheAttention, attend_grouped, has_flash, plain_attention, repeats_heads
from realrl.cpu.cache import MIN_GROWTH, CacheShape, KVCache, NewTokens, SavedRow
from realrl.cpu.choice import choose_kernels
from realrl.cpu.loader import describe
from realrl.cpu.machine import attention_dtype
from realrl.cpu.products import linear, matmul
from realrl.cpu.reference import Rope, ScoreTerms, activate, attend_by_scores, rotate, softcap, window_mask
from realrl.cpu.sampler import InvalidLogitsError, SampledTokens, Sampler, SamplingOp
from realrl.cpu.torch_kernels import LayerOps, LayersOp, LinearWeights, TorchKernels

__all__ = [
    "MIN_GROWTH",
    "CacheAttention",
    "CacheShape",
    "InvalidLogitsError",
    "KVCache",
    "LayerOps",
    "LayersOp",
    "LinearWeights",
    "NewTokens",
    "Rope",
    "SampledTokens",
    "Sampler",
    "SamplingOp",
    "SavedRow",
    "ScoreTerms",
    "TorchKernels",
    "activate",
    "attend_by_scores",
    "attend_grouped",
    "attention_dtype",
    "choose_kernels",
    "describe",
    "has_flash",
    "linear",
    "matmul",
    "plain_attention",
    "repeats_heads",
    "rotate",
    "softcap",
    "window_mask",
]
