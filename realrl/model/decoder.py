"""A plain llama-style decoder over packed tokens.

Shapes: T tokens of all sequences back to back, H hidden, N heads, K KV heads, D head size, V vocabulary. No token is
padded here; what a token may attend to is the business of the injected `AttentionOp`, and parallelism is applied from
outside.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from realrl.model.config import DecoderConfig
from realrl.model.heads import LMHead, ScalarHead
from realrl.model.linear import Linear
from realrl.model.rope import inverse_frequencies, rope_table, rotate


class AttentionOp(Protocol):
    """Knows which tokens see which: packed sequences in training, a KV cache in generation."""

    def attend(self, layer_index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Scaled dot-product attention of q [T, N, D] over k, v [T, K, D] (positions applied); returns [T, N, D]."""


class RMSNorm(nn.Module):
    """x / rms(x) * weight (Zhang and Sennrich 2019), the mean square in float32."""

    def __init__(self, config: DecoderConfig, device: torch.device | None = None) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.weight = nn.Parameter(torch.ones(config.hidden_size, dtype=config.dtype, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class Attention(nn.Module):
    """Projections around the injected attention operation; separate q, k, v so that each can be sharded by heads."""

    def __init__(self, config: DecoderConfig, device: torch.device | None = None) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        size, bias = config.hidden_size, config.attention_bias
        q_size, kv_size = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
        self.q = Linear(size, q_size, bias=bias, dtype=config.dtype, device=device)
        self.k = Linear(size, kv_size, bias=bias, dtype=config.dtype, device=device)
        self.v = Linear(size, kv_size, bias=bias, dtype=config.dtype, device=device)
        self.o = Linear(q_size, size, bias=bias, dtype=config.dtype, device=device)

    def forward(
        self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], attention: AttentionOp, layer_index: int
    ) -> torch.Tensor:
        q = rotate(self.q(x).unflatten(-1, (-1, self.head_dim)), *rope)
        k = rotate(self.k(x).unflatten(-1, (-1, self.head_dim)), *rope)
        v = self.v(x).unflatten(-1, (-1, self.head_dim))
        return self.o(attention.attend(layer_index, q, k, v).flatten(-2))


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020): down(silu(gate(x)) * up(x))."""

    def __init__(self, config: DecoderConfig, device: torch.device | None = None) -> None:
        super().__init__()
        size, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate = Linear(size, inner, bias=bias, dtype=config.dtype, device=device)
        self.up = Linear(size, inner, bias=bias, dtype=config.dtype, device=device)
        self.down = Linear(inner, size, bias=bias, dtype=config.dtype, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Pre-norm attention and MLP with residuals."""

    def __init__(self, config: DecoderConfig, layer_index: int, device: torch.device | None = None) -> None:
        super().__init__()
        self.layer_index = layer_index
        self.attention_norm = RMSNorm(config, device)
        self.attention = Attention(config, device)
        self.mlp_norm = RMSNorm(config, device)
        self.mlp = MLP(config, device)

    def forward(self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], attention: AttentionOp) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), rope, attention, self.layer_index)
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    """Embedding, blocks, final norm and the head (`lm`, `value` or `reward`).

    Parameters are uninitialised: load a checkpoint (`realrl.model.hf`) or call `realrl.model.init.random_model`.
    Parameter names: ``embedding.weight``, ``blocks.{i}.attention_norm.weight``,
    ``blocks.{i}.attention.{q,k,v,o}.{weight,bias}``, ``blocks.{i}.mlp_norm.weight``,
    ``blocks.{i}.mlp.{gate,up,down}.{weight,bias}``, ``norm.weight`` and, unless tied, ``head.weight``.

    Args:
        config: shapes and head.
        activation_checkpointing: keep only each block's input for the backward pass and recompute the rest.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        device: torch.device | None = None,
        activation_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        self.activation_checkpointing = activation_checkpointing
        self.embedding = nn.Embedding(
            config.vocab_size,
            config.hidden_size,
            _weight=torch.empty(config.vocab_size, config.hidden_size, dtype=config.dtype, device=device),
        )
        self.blocks = nn.ModuleList(Block(config, i, device) for i in range(config.n_layers))
        self.norm = RMSNorm(config, device)
        self.head = self._make_head(device)

    def _make_head(self, device: torch.device | None) -> LMHead | ScalarHead:
        config = self.config
        if config.is_scalar:
            return ScalarHead(config.hidden_size, dtype=config.dtype, device=device)
        if config.tied_embeddings:
            return LMHead(self.embedding.weight)
        shape = (config.vocab_size, config.hidden_size)
        return LMHead(nn.Parameter(torch.empty(shape, dtype=config.dtype, device=device)))

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionOp) -> torch.Tensor:
        """Return final hidden states [T, H], the last norm applied; `head` turns chosen rows into logits or scores.

        Args:
            input_ids: int64 [T].
            positions: integers [T], each token's position in its own sequence.
            attention: which tokens see which.
        """
        x = self.embedding(input_ids)
        rope = rope_table(inverse_frequencies(self.config, x.device), positions, x.dtype)
        recompute = self.activation_checkpointing and torch.is_grad_enabled()
        for block in self.blocks:
            if recompute:
                x = checkpoint(block, x, rope, attention, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, rope, attention)
        return self.norm(x)
