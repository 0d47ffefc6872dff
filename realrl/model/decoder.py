"""A plain llama-style decoder over packed tokens, or one rank's shard of it.

Shapes: T tokens of all sequences back to back, H hidden, N heads, K KV heads, D head size, V vocabulary. No token is
padded here; what a token may attend to is the business of the injected `AttentionOp`, and parallelism is applied from
outside: `ModelShard` says which blocks and which slices of their parameters are built, `TensorParallel` where ranks
must exchange activations. In a tensor-parallel group N, K and V are those of this rank; with sequence parallelism, the
[T, H] between blocks is [rows, H], this rank's rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, Protocol

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from realrl.model.config import DecoderConfig
from realrl.model.heads import LMHead, ScalarHead
from realrl.model.linear import Linear, linear
from realrl.model.parallel import UNSHARDED, TensorParallel
from realrl.model.rope import inverse_frequencies, rope_table, rotate
from realrl.plan.layout import ModelShard, ParameterSpec, parameter_specs, slice_of, whole_shard

PartialKind = Literal["kv", "sp"]
"""Why a rank's gradient is only a part: ranks share a KV head, or each sees some rows only."""


class AttentionOp(Protocol):
    """Knows which tokens see which: packed sequences in training, a KV cache in generation."""

    def attend(self, layer_index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Scaled dot-product attention of q [T, N, D] over k, v [T, K, D] (positions applied); returns [T, N, D]."""


class _Builder:
    """Knows the parameters of one shard, and makes layers of their sizes."""

    def __init__(self, config: DecoderConfig, shard: ModelShard, device: torch.device | None) -> None:
        self.config = config
        self.shard = shard
        self.device = device
        self.specs = {spec.name: spec for spec in parameter_specs(config) if any(map(shard.has, spec.layers))}

    def place(self, name: str) -> tuple[tuple[int, int], ...]:
        """(start, stop) in each dim of the whole parameter."""
        return slice_of(self.specs[name], self.shard.tp_rank, self.shard.tp_size)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.place(name))

    def parameter(self, name: str) -> nn.Parameter:
        return nn.Parameter(torch.empty(self.shape(name), dtype=self.config.dtype, device=self.device))

    def linear(self, name: str) -> Linear:
        out_size, in_size = self.shape(f"{name}.weight")
        has_bias = f"{name}.bias" in self.specs
        # by way of "meta", since a layer made on a real device fills itself with random numbers
        layer = Linear(in_size, out_size, bias=has_bias, dtype=self.config.dtype, device=torch.device("meta"))
        return layer.to_empty(device=self.device or torch.get_default_device())

    def norm(self) -> RMSNorm:
        return RMSNorm(self.config, self.device)


class Embedding(nn.Module):
    """Hidden states [rows, H] of tokens [T]; in a group, each rank looks up its part of the vocabulary.

    Args:
        weight: [V, H].
        vocab_start: the token of the first row.
    """

    def __init__(self, weight: nn.Parameter, vocab_start: int, parallel: TensorParallel) -> None:
        super().__init__()
        self.weight = weight
        self.vocab_start = vocab_start
        self._parallel = parallel

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        if self._parallel.tp_size == 1:
            return F.embedding(input_ids, self.weight)
        rows = input_ids - self.vocab_start
        is_elsewhere = (rows < 0) | (rows >= self.weight.shape[0])
        x = F.embedding(rows.masked_fill_(is_elsewhere, 0), self.weight)
        return self._parallel.leave(x.masked_fill(is_elsewhere[:, None], 0.0))


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

    def __init__(self, build: _Builder, name: str, parallel: TensorParallel) -> None:
        super().__init__()
        self.head_dim = build.config.head_dim
        self.q, self.k, self.v, self.o = (build.linear(f"{name}.{letter}") for letter in "qkvo")
        self._parallel = parallel

    def forward(
        self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], attention: AttentionOp, layer_index: int
    ) -> torch.Tensor:
        x = self._parallel.enter(x, len(rope[0]))
        q = rotate(self.q(x).unflatten(-1, (-1, self.head_dim)), *rope)
        k = rotate(self.k(x).unflatten(-1, (-1, self.head_dim)), *rope)
        v = self.v(x).unflatten(-1, (-1, self.head_dim))
        return _leave(self.o, attention.attend(layer_index, q, k, v).flatten(-2), self._parallel)


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020): down(silu(gate(x)) * up(x))."""

    def __init__(self, build: _Builder, name: str, parallel: TensorParallel) -> None:
        super().__init__()
        self.gate, self.up, self.down = (build.linear(f"{name}.{word}") for word in ("gate", "up", "down"))
        self._parallel = parallel

    def forward(self, x: torch.Tensor, n_rows: int) -> torch.Tensor:
        x = self._parallel.enter(x, n_rows)
        return _leave(self.down, F.silu(self.gate(x)) * self.up(x), self._parallel)


def _leave(layer: Linear, x: torch.Tensor, parallel: TensorParallel) -> torch.Tensor:
    """A layer cut by columns; its bias is whole on every rank, and added once."""
    if parallel.tp_size == 1:
        return layer(x)
    y = parallel.leave(linear(x, layer.weight))
    return y if layer.bias is None else y + layer.bias


class Block(nn.Module):
    """Pre-norm attention and MLP with residuals."""

    def __init__(self, build: _Builder, layer_index: int, parallel: TensorParallel) -> None:
        super().__init__()
        self.layer_index = layer_index
        self.attention_norm = build.norm()
        self.attention = Attention(build, f"blocks.{layer_index}.attention", parallel)
        self.mlp_norm = build.norm()
        self.mlp = MLP(build, f"blocks.{layer_index}.mlp", parallel)

    def forward(self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], attention: AttentionOp) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), rope, attention, self.layer_index)
        return x + self.mlp(self.mlp_norm(x), len(rope[0]))


class Blocks(nn.Module):
    """Consecutive blocks, named by their place in the whole model: the first need not be 0."""

    def __init__(self, build: _Builder, parallel: TensorParallel) -> None:
        super().__init__()
        for layer_index in build.shard.layers:
            self.add_module(str(layer_index), Block(build, layer_index, parallel))

    def __iter__(self) -> Iterator[Block]:
        return iter(self._modules.values())  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self._modules)

    def __getitem__(self, layer_index: int) -> Block:
        return self.get_submodule(str(layer_index))  # type: ignore[return-value]


class Decoder(nn.Module):
    """Embedding, blocks, final norm and the head (`lm`, `value` or `reward`), or what one rank holds of them.

    Parameters are uninitialised: load a checkpoint (`realrl.model.hf`) or call `realrl.model.init.random_model`.
    Parameter names: ``embedding.weight``, ``blocks.{i}.attention_norm.weight``,
    ``blocks.{i}.attention.{q,k,v,o}.{weight,bias}``, ``blocks.{i}.mlp_norm.weight``,
    ``blocks.{i}.mlp.{gate,up,down}.{weight,bias}``, ``norm.weight`` and, unless tied, ``head.weight``.

    Args:
        config: shapes and head of the whole model.
        shard: the layers and slices to build; the whole model by default.
        parallel: the ranks that hold the other slices. A shard that is only stored needs none.
        device: "meta" gives shapes without memory, to be filled by `set_parameters`.
        activation_checkpointing: keep only each block's input for the backward pass and recompute the rest.

    Attributes:
        embedding: None where `shard` has none.
        norm, head: None where `shard` has none.
        specs: what the whole model says of each parameter of this shard, by global name.

    Raises:
        ValueError: `parallel` is another place than `shard` is for.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        shard: ModelShard | None = None,
        parallel: TensorParallel = UNSHARDED,
        device: torch.device | None = None,
        activation_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        self.shard = shard = whole_shard(config) if shard is None else shard
        self.parallel = parallel
        if parallel is not UNSHARDED and (parallel.tp_rank, parallel.tp_size) != (shard.tp_rank, shard.tp_size):
            raise ValueError(
                f"the shard is for rank {shard.tp_rank} of {shard.tp_size}, "
                f"this is rank {parallel.tp_rank} of {parallel.tp_size}"
            )
        self.activation_checkpointing = activation_checkpointing
        build = _Builder(config, shard, device)
        self.specs: Mapping[str, ParameterSpec] = build.specs
        self.embedding: Embedding | None = None
        if shard.has_embedding:
            name = "embedding.weight"
            self.embedding = Embedding(build.parameter(name), build.place(name)[0][0], parallel)
        self.blocks = Blocks(build, parallel)
        self.norm: RMSNorm | None = build.norm() if shard.has_head else None
        self.head: LMHead | ScalarHead | None = self._make_head(build) if shard.has_head else None

    def _make_head(self, build: _Builder) -> LMHead | ScalarHead:
        config = self.config
        if config.is_scalar:
            return ScalarHead(config.hidden_size, dtype=config.dtype, device=build.device)
        name = "embedding.weight" if config.tied_embeddings else "head.weight"
        is_shared = config.tied_embeddings and self.embedding is not None
        weight = self.embedding.weight if is_shared and self.embedding is not None else build.parameter(name)
        return LMHead(weight, vocab_start=build.place(name)[0][0])

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(self.parameters()).device

    # ------------------------------------------------------------ computing

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionOp) -> torch.Tensor:
        """Return final hidden states [T, H], the last norm applied; `head` turns chosen rows into logits or scores.

        For a decoder with all layers; see `forward_stage` for the others.

        Args:
            input_ids: int64 [T].
            positions: integers [T], each token's position in its own sequence.
            attention: which tokens see which.
        """
        assert self.shard.has_embedding, "a later pipeline stage takes hidden states"
        assert self.shard.has_head, "an earlier pipeline stage has no final hidden states"
        return self.forward_stage(input_ids, positions, attention)

    def forward_stage(self, x: torch.Tensor, positions: torch.Tensor, attention: AttentionOp) -> torch.Tensor:
        """Compute the layers of this shard.

        Args:
            x: int64 [T], the tokens, where the embedding is; elsewhere what the stage before returned, [rows, H] with
                ``parallel.n_local_rows(T)`` rows.
            positions: integers [T], each token's position in its own sequence.
            attention: which tokens see which.

        Returns:
            [rows, H] for the next stage. Where the head is, final hidden states [T, H] as `forward` returns them, on
            every rank of the group; their gradient may differ from rank to rank.
        """
        assert self.parallel.tp_size == self.shard.tp_size, "a shard computes only with the ranks that hold the others"
        if self.embedding is not None:
            x = self.embedding(x)
        rope = rope_table(inverse_frequencies(self.config, x.device), positions, x.dtype)
        recompute = self.activation_checkpointing and torch.is_grad_enabled()
        for block in self.blocks:
            if recompute:
                x = checkpoint(block, x, rope, attention, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, rope, attention)
        if self.norm is None:
            return x
        x = self.norm(x)
        # each rank has a part of the logits and so of this gradient, but computes a scalar head's gradient in full
        gather = self.parallel.gather_rows if self.config.is_scalar else self.parallel.enter
        return gather(x, len(positions))

    # ------------------------------------------------------------ parameters

    @property
    def has_tied_copy(self) -> bool:
        """Whether the head's weight is a copy of an embedding that another pipeline stage holds."""
        return self.embedding is None and isinstance(self.head, LMHead) and self.config.tied_embeddings

    def named_shards(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Every parameter once with its name in the whole model: a tied copy in the head is ``embedding.weight``."""
        for name, parameter in self.named_parameters():
            yield ("embedding.weight" if name == "head.weight" and self.has_tied_copy else name), parameter

    def place_of(self, name: str) -> tuple[slice, ...]:
        """This rank's part of the whole parameter, by global name."""
        place = slice_of(self.specs[name], self.shard.tp_rank, self.shard.tp_size)
        return tuple(slice(start, stop) for start, stop in place)

    def tp_partial_gradients(self) -> list[tuple[str, nn.Parameter, PartialKind]]:
        """Parameters whose gradient on this rank is a part, to be added up over the group: (global name, it, why).

        "kv": KV heads that several ranks hold; the ranks that hold the same one add up. "sp": each rank saw its rows.
        """
        tp_size = self.shard.tp_size
        partial: list[tuple[str, nn.Parameter, PartialKind]] = []
        for name, parameter in self.named_shards():
            spec = self.specs[name]
            if spec.unit == "kv_head" and spec.n_units < tp_size:
                partial.append((name, parameter, "kv"))
            elif spec.sharded_dim is None and self.parallel.is_sequence_parallel and name != "head.weight":
                partial.append((name, parameter, "sp"))
        return partial

    def set_parameters(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Let the parameters be these tensors themselves, without a copy.

        A parameter stays the same object unless its device changes, as from "meta".

        Args:
            tensors: by global name, of this rank's shapes.

        Raises:
            ValueError: a parameter is missing, or has another shape, or a name is not of this shard.
        """
        if tensors.keys() != self.specs.keys():
            names = sorted(tensors.keys() ^ self.specs.keys())
            raise ValueError(f"{len(names)} parameters are missing or not of this shard, the first is {names[0]!r}")
        for name, tensor in tensors.items():
            shape = [place.stop - place.start for place in self.place_of(name)]
            if list(tensor.shape) != shape:
                raise ValueError(f"parameter {name!r} has shape {list(tensor.shape)}, this shard has {shape}")
        replaced: dict[nn.Parameter, nn.Parameter] = {}
        for name, parameter in self.named_shards():
            tensor = tensors[name].detach()
            if parameter.device.type == tensor.device.type:
                parameter.data = tensor
            else:
                replaced[parameter] = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
        if replaced:
            for module in self.modules():
                for attribute, parameter in list(module.named_parameters(recurse=False)):
                    if parameter in replaced:
                        setattr(module, attribute, replaced[parameter])

    def release_parameters(self) -> None:
        """Free the memory of parameters and gradients; `set_parameters` brings the decoder back."""
        for parameter in self.parameters():
            parameter.grad = None
            parameter.data = parameter.data.new_empty(0)
