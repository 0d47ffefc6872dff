"""A plain decoder over packed tokens, or one rank's shard of it.

Shapes: T tokens of all sequences back to back, H hidden, N heads, K KV heads, D head size, V vocabulary. No token is
padded here. The injected `AttentionOp` decides which tokens see which. Parallelism is applied from outside:
`ModelShard` says which blocks and which slices of their parameters are built, `TensorParallel` exchanges activations
between ranks. In a tensor-parallel group N, K and V count this rank's part; with sequence parallelism, the [T, H]
between blocks is [rows, H], this rank's rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, Protocol

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from realrl.cpu import Rope, ScoreTerms, activate, rotate
from realrl.model.build import Builder, leave
from realrl.model.dtypes import torch_dtype
from realrl.model.layers.heads import LMHead, ScalarHead
from realrl.model.layers.linear import insert_adapters
from realrl.model.layers.moe import LoadBalance, MoE
from realrl.model.layers.norm import Norm, QKNorm
from realrl.model.layers.rope import make_ropes
from realrl.model.parallel import UNSHARDED, TensorParallel
from realrl.plan.parameters.shards import ModelShard, whole_shard
from realrl.plan.parameters.specs import ParameterSpec, slice_of
from realrl.shape import DecoderConfig

PartialKind = Literal["kv", "tp", "sp"]
"""The reason why a rank's gradient is only a part: ranks share a KV head, or each uses the parameter for its own slice
of the activations, or each sees some rows only."""


class AttentionOp(Protocol):
    """Attention over the tokens that each token may see: packed sequences in training, a KV cache in generation."""

    def attend(
        self,
        layer_index: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        window: int | None = None,
        terms: ScoreTerms | None = None,
    ) -> torch.Tensor:
        """Scaled dot-product attention of q [T, N, D] over k, v [T, K, D] (positions applied); returns [T, N, D].

        Args:
            window: number of tokens, itself included, that each one sees; None for all earlier ones.
            terms: treatment of the scores; None for plain ones.
        """


class Embedding(nn.Module):
    """Rows [T, H] of a table by number; in a group, each rank has some rows of the table and gives zeros for others.

    Args:
        weight: [V, H], or this rank's rows of it.
        first_row: number of this rank's first row.
        is_whole: True if this rank has all rows.
    """

    def __init__(self, weight: nn.Parameter, first_row: int, *, is_whole: bool) -> None:
        super().__init__()
        self.weight = weight
        self.first_row = first_row
        self._is_whole = is_whole

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        """This rank's summand of the rows [T, H]."""
        if self._is_whole:
            return F.embedding(numbers, self.weight)
        rows = numbers - self.first_row
        is_elsewhere = (rows < 0) | (rows >= self.weight.shape[0])
        return F.embedding(rows.masked_fill_(is_elsewhere, 0), self.weight).masked_fill(is_elsewhere[:, None], 0.0)


class Attention(nn.Module):
    """Projections around the injected attention operation; separate q, k, v so that each can be sharded by heads."""

    def __init__(self, build: Builder, name: str, parallel: TensorParallel, *, window: int | None) -> None:
        super().__init__()
        self.head_dim = build.config.head_dim
        self.window = window
        config = build.config
        self._softcap = config.score_softcap
        self.sinks: nn.Parameter | None = build.parameter(f"{name}.sinks") if config.sinks else None
        self.query_factor = config.query_factor
        self.q, self.k, self.v, self.o = (build.linear(f"{name}.{letter}") for letter in "qkvo")
        self.q_norm: QKNorm | None = None if config.qk_norm is None else build.qk_norm(f"{name}.q_norm", parallel)
        self.k_norm: QKNorm | None = None if config.qk_norm is None else build.qk_norm(f"{name}.k_norm", parallel)
        self._parallel = parallel

    @property
    def terms(self) -> ScoreTerms | None:
        """Treatment of the scores; None for plain ones."""
        has_none = self._softcap is None and self.sinks is None
        return None if has_none else ScoreTerms(self._softcap, self.sinks)

    def forward(
        self, x: torch.Tensor, rope: Rope, attention: AttentionOp, layer_index: int, n_rows: int
    ) -> torch.Tensor:
        x = self._parallel.enter(x, n_rows)
        q, k, v = (layer(x).unflatten(-1, (-1, self.head_dim)) for layer in (self.q, self.k, self.v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm.heads(q, n_rows), self.k_norm.heads(k, n_rows)
        if self.query_factor != 1.0:
            q = q * self.query_factor
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        attended = attention.attend(layer_index, q, k, v, window=self.window, terms=self.terms)
        return leave(self.o, attended.flatten(-2), self._parallel)


class MLP(nn.Module):
    """down(activation(gate(x)) * up(x)), as in SwiGLU (Shazeer 2020); without a gate, down(activation(up(x)))."""

    def __init__(self, build: Builder, name: str, parallel: TensorParallel) -> None:
        super().__init__()
        self.activation = build.config.activation
        self.gate: nn.Linear | None = build.linear(f"{name}.gate") if build.config.gated_mlp else None
        self.up, self.down = (build.linear(f"{name}.{word}") for word in ("up", "down"))
        self._parallel = parallel

    def forward(self, x: torch.Tensor, n_rows: int) -> torch.Tensor:
        x = self._parallel.enter(x, n_rows)
        up = self.up(x)
        inner = activate(up, self.activation) if self.gate is None else activate(self.gate(x), self.activation) * up
        return leave(self.down, inner, self._parallel)


def make_mlp(build: Builder, layer_index: int, parallel: TensorParallel) -> MLP | MoE:
    """Make a block's dense MLP, or its mixture of experts where the configuration has one."""
    name, experts = f"blocks.{layer_index}.mlp", build.config.experts_of(layer_index)
    if experts is None:
        return MLP(build, name, parallel)
    return MoE(experts, build.parameter, name, layer_index=layer_index, parallel=parallel)


class Block(nn.Module):
    """Attention and MLP with residuals, and norms before them, after them or both."""

    def __init__(self, build: Builder, layer_index: int, parallel: TensorParallel) -> None:
        super().__init__()
        name, place = f"blocks.{layer_index}", build.config.norm_place
        self.layer_index = layer_index
        self.attention_norm: Norm | None = None if place == "after" else build.norm(f"{name}.attention_norm")
        window = build.config.window_of(layer_index)
        self.attention = Attention(build, f"{name}.attention", parallel, window=window)
        self.attention_post_norm: Norm | None = None if place == "before" else build.norm(f"{name}.attention_post_norm")
        self.mlp_norm: Norm | None = None if place == "after" else build.norm(f"{name}.mlp_norm")
        self.mlp = make_mlp(build, layer_index, parallel)
        self.mlp_post_norm: Norm | None = None if place == "before" else build.norm(f"{name}.mlp_post_norm")

    def forward(
        self,
        x: torch.Tensor,
        rope: Rope,
        attention: AttentionOp,
        n_rows: int,
        balance: LoadBalance | None = None,
    ) -> torch.Tensor:
        """Return the block's output [rows, H]; `n_rows` counts the rows of all ranks, sequence parallelism or not."""
        attended = self.attention(_normed(self.attention_norm, x), rope, attention, self.layer_index, n_rows)
        x = x + _normed(self.attention_post_norm, attended)
        del attended  # lives no longer than the sum
        inner = _normed(self.mlp_norm, x)
        y = self.mlp(inner, n_rows, balance) if isinstance(self.mlp, MoE) else self.mlp(inner, n_rows)
        return x + _normed(self.mlp_post_norm, y)


def _normed(norm: Norm | None, x: torch.Tensor) -> torch.Tensor:
    normed: torch.Tensor = x if norm is None else norm(x)
    return normed


class Blocks(nn.Module):
    """The blocks of a shard, named by their index in the whole model: the first need not be 0."""

    def __init__(self, build: Builder, parallel: TensorParallel) -> None:
        super().__init__()
        for layer_index in build.shard.layers:
            self.add_module(str(layer_index), Block(build, layer_index, parallel))

    def __iter__(self) -> Iterator[Block]:
        return iter(self._modules.values())  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self._modules)

    def of(self, chunk: range) -> list[Block]:
        """Return the blocks of a chunk."""
        return [block for block in self if block.layer_index in chunk]

    def __getitem__(self, layer_index: int) -> Block:
        return self.get_submodule(str(layer_index))  # type: ignore[return-value]


class Decoder(nn.Module):
    """Embedding, blocks, final norm and the head (`lm`, `value` or `reward`), or one rank's shard of them.

    Parameters are uninitialised: load a checkpoint (`realrl.model.files.hf`) or call `realrl.model.init.random_model`.
    Parameter names, as far as the configuration calls for them:
    ``embedding.weight``, ``position_embedding.weight``, ``blocks.{i}.attention_norm.{weight,bias}``,
    ``blocks.{i}.attention.{q,k,v,o}.{weight,bias}``, ``blocks.{i}.attention.{q_norm,k_norm}.weight``,
    ``blocks.{i}.attention.sinks``, ``blocks.{i}.{attention_post_norm,mlp_post_norm}.{weight,bias}``,
    ``blocks.{i}.mlp_norm.{weight,bias}``, ``blocks.{i}.mlp.{gate,up,down}.{weight,bias}`` or, with experts,
    ``blocks.{i}.mlp.router.{weight,bias}``, ``blocks.{i}.mlp.experts.{gate,up,down}`` and
    ``blocks.{i}.mlp.experts.{gate_bias,up_bias,down_bias}``, ``norm.{weight,bias}`` and,
    unless tied, ``head.weight``, and ``{layer}.{lora_a,lora_b}`` of layers with an adapter.

    Args:
        config: shapes and head of the whole model.
        shard: the layers and slices to build; the whole model by default.
        parallel: the ranks that hold the other slices. A shard that is only stored needs none.
        device: "meta" gives shapes without memory, to be filled by `set_parameters`.
        activation_checkpointing: keep only each block's input for the backward pass and recompute the rest.

    Attributes:
        embedding: None where `shard` has none.
        position_embedding: None where `shard` has none, or positions are not learned.
        norm, head: None where `shard` has none.
        specs: the whole model's specification of each parameter of this shard, by global name.

    Raises:
        ValueError: `parallel` and `shard` differ in tensor-parallel rank or size.
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
        build = Builder(config, shard, device)
        self.specs: Mapping[str, ParameterSpec] = build.specs
        self.embedding: Embedding | None = None
        self.position_embedding: Embedding | None = None
        if shard.has_embedding:
            self.embedding = self._make_embedding(build, "embedding.weight")
            if config.learned_positions:
                self.position_embedding = self._make_embedding(build, "position_embedding.weight")
        self.blocks = Blocks(build, parallel)
        self.norm: Norm | None = build.norm("norm") if shard.has_head else None
        self.head: LMHead | ScalarHead | None = self._make_head(build) if shard.has_head else None
        if config.lora is not None:
            insert_adapters(self, self.specs, config.lora)

    def _make_embedding(self, build: Builder, name: str) -> Embedding:
        return Embedding(build.parameter(name), build.place(name)[0][0], is_whole=self.shard.tp_size == 1)

    def _make_head(self, build: Builder) -> LMHead | ScalarHead:
        config = self.config
        if config.is_scalar:
            return ScalarHead(config.hidden_size, dtype=self.dtype, device=build.device)
        name = "embedding.weight" if config.tied_embeddings else "head.weight"
        is_shared = config.tied_embeddings and self.embedding is not None
        weight = self.embedding.weight if is_shared and self.embedding is not None else build.parameter(name)
        return LMHead(weight, vocab_start=build.place(name)[0][0], softcap=config.logit_softcap)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of parameters and activations; adapters are float32."""
        return torch_dtype(self.config.dtype)

    # ------------------------------------------------------------ computing

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionOp) -> torch.Tensor:
        """Return final hidden states [T, H], the last norm applied; `head` turns chosen rows into logits or scores.

        For a decoder with all layers; see `forward_stage` for the others.

        Args:
            input_ids: int64 [T].
            positions: integers [T], each token's position in its own sequence.
            attention: decides which tokens see which.
        """
        assert self.shard.has_embedding, "a later pipeline stage takes hidden states"
        assert self.shard.has_head, "an earlier pipeline stage has no final hidden states"
        assert len(self.shard.chunks) == 1, "between chunks are those of other pipeline stages"
        return self.forward_stage(input_ids, positions, attention)

    def forward_stage(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionOp,
        *,
        balance: LoadBalance | None = None,
        chunk: int = 0,
    ) -> torch.Tensor:
        """Compute the layers of this shard, or of one of its chunks.

        The embedding belongs to the first chunk, final norm and head to the last.

        Args:
            x: int64 [T], the tokens, where the embedding is; elsewhere the result of the chunk before, [rows, H] with
                ``parallel.n_local_rows(T)`` rows.
            positions: integers [T], each token's position in its own sequence.
            attention: decides which tokens see which.
            balance: auxiliary loss of the experts in training; its gradient joins the backward pass in here.
            chunk: place among the chunks of this shard.

        Returns:
            [rows, H] for the next chunk. Where the head is, final hidden states [T, H] as `forward` returns them, on
            every rank of the group; their gradient may differ from rank to rank.
        """
        assert self.parallel.tp_size == self.shard.tp_size, "a shard computes only with the ranks that hold the others"
        n_rows = len(positions)
        if self.embedding is not None and chunk == 0:
            x = self.parallel.leave(self.embed(x, positions))
        ropes = make_ropes(self.config, None, positions, x.dtype)
        recompute = self.activation_checkpointing and torch.is_grad_enabled()
        for block in self.blocks.of(self.shard.chunks[chunk]):
            rope = ropes[self.config.has_local_rope(block.layer_index)]
            if recompute:
                x = checkpoint(
                    block, x, rope, attention, n_rows, balance, use_reentrant=False, preserve_rng_state=False
                )
            else:
                x = block(x, rope, attention, n_rows, balance)
        if self.norm is None or chunk + 1 < len(self.shard.chunks):
            return x
        x = self.norm(x)
        # each rank has a part of the logits and so of this gradient, but computes a scalar head's gradient in full
        gather = self.parallel.gather_rows if self.config.is_scalar else self.parallel.enter
        return gather(x, n_rows)

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Embeddings [T, H] of tokens at their positions, or this rank's summand of them in a group.

        Args:
            tokens, positions: integers [T]; positions that are learned must be below ``config.max_positions``.
        """
        assert self.embedding is not None, "only the first pipeline stage has the embedding"
        x = self.embedding(tokens)
        if self.config.embedding_scale != 1.0:
            x = x * torch.tensor(self.config.embedding_scale, dtype=x.dtype).item()  # rounded like the weights
        return x if self.position_embedding is None else x + self.position_embedding(positions)

    # ------------------------------------------------------------ parameters

    @property
    def has_tied_copy(self) -> bool:
        """True if the head's weight is a copy of an embedding that another pipeline stage holds."""
        return self.embedding is None and isinstance(self.head, LMHead) and self.config.tied_embeddings

    def named_shards(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield each parameter once, by global name: a tied copy in the head is ``embedding.weight``."""
        for name, parameter in self.named_parameters():
            yield ("embedding.weight" if name == "head.weight" and self.has_tied_copy else name), parameter

    def place_of(self, name: str) -> tuple[slice, ...]:
        """This rank's part of the whole parameter, by global name."""
        place = slice_of(self.specs[name], self.shard.tp_rank, self.shard.tp_size)
        return tuple(slice(start, stop) for start, stop in place)

    def tp_partial_gradients(self) -> list[tuple[str, nn.Parameter, PartialKind]]:
        """Trained parameters whose gradient on this rank is a part, to be added up over the group.

        "kv": KV heads that several ranks hold; the ranks that hold the same one add up. "tp": parameters that are whole
        on every rank, and used for that rank's slice of the activations. "sp": each rank saw its rows.

        Returns:
            (global name, parameter, reason) of each.
        """
        tp_size = self.shard.tp_size
        partial: list[tuple[str, nn.Parameter, PartialKind]] = []
        for name, parameter in self.named_shards():
            spec = self.specs[name]
            if not parameter.requires_grad:
                continue
            if spec.unit == "kv_head" and spec.n_units < tp_size:
                partial.append((name, parameter, "kv"))
            elif spec.is_tp_partial and tp_size > 1:
                partial.append((name, parameter, "tp"))
            elif spec.sharded_dim is None and self.parallel.is_sequence_parallel and name != "head.weight":
                partial.append((name, parameter, "sp"))
        return partial

    def set_parameters(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Make the parameters share memory with these tensors.

        A parameter stays the same object unless its device changes, as from "meta".

        Args:
            tensors: tensors of this rank's shapes, by global name.

        Raises:
            ValueError: a parameter is missing or has another shape, or the shard has none of a name.
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
