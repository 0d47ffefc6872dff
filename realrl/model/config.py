"""The shape of a decoder, independent of any checkpoint format."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

HeadKind = Literal["lm", "value", "reward"]


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched for contexts longer than those trained on.

    Attributes:
        kind: "linear" divides all frequencies by `factor`; "llama3" divides the low ones, keeps the high ones and
            interpolates between (Llama 3.1 model card).
        low_freq_factor, high_freq_factor, original_max_positions: llama3 only.
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True)
class DecoderConfig:
    """A llama-style decoder: RMSNorm, rotary positions, grouped KV heads, SwiGLU.

    Attributes:
        head: "lm" gives logits over the vocabulary; "value" and "reward" give one number per token.
        tied_embeddings: the language-model head shares the embedding's weight; ignored by the other heads.
        bos_token_id, eos_token_ids, pad_token_id: carried from and to checkpoints; not used here.
        dtype: of parameters and activations.
    """

    vocab_size: int
    hidden_size: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    intermediate_size: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tied_embeddings: bool = False
    max_positions: int = 2048
    attention_bias: bool = False
    mlp_bias: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    head: HeadKind = "lm"
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        sizes = (self.vocab_size, self.hidden_size, self.n_layers, self.n_heads, self.n_kv_heads, self.head_dim)
        if min(*sizes, self.intermediate_size) < 1:
            raise ValueError("every size must be at least 1")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"{self.n_heads} attention heads cannot share {self.n_kv_heads} KV heads evenly")
        if self.head_dim % 2:
            raise ValueError(f"rotary positions need an even head_dim, not {self.head_dim}")

    @property
    def is_scalar(self) -> bool:
        """Whether the head gives one number per token instead of logits."""
        return self.head != "lm"


def tiny_config(vocab_size: int, *, head: HeadKind = "lm", dtype: torch.dtype = torch.float32) -> DecoderConfig:
    """A decoder of about half a million parameters for tests and the toy task (with a byte-level vocabulary)."""
    return DecoderConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        n_layers=4,
        n_heads=4,
        n_kv_heads=2,
        head_dim=32,
        intermediate_size=192,
        tied_embeddings=True,
        max_positions=1024,
        head=head,
        dtype=dtype,
    )
