"""The shape of a decoder, independent of any checkpoint format. Imports no torch: dtypes are names."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

DType = Literal["float64", "float32", "bfloat16", "float16"]
HeadKind = Literal["lm", "value", "reward"]
NormKind = Literal["rms", "layer"]
NormPlace = Literal["before", "after", "both"]
QKNorm = Literal["head", "all"]
Activation = Literal["silu", "gelu_tanh"]


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of rotary frequencies for contexts longer than those trained on.

    Attributes:
        kind: "linear" divides all frequencies by `factor`; "llama3" divides the low ones, keeps the high ones and
            interpolates between (Llama 3.1 model card); "yarn" interpolates likewise over the index of the frequency
            and makes queries and keys longer (Peng et al. 2023, YaRN).
        original_max_positions: length of the context trained on; llama3 and yarn.
        low_freq_factor, high_freq_factor: llama3 only.
        beta_fast, beta_slow: yarn: turns within the original context above which a frequency is kept, and below which
            it is divided.
        truncate: yarn: the ramp between them begins and ends at whole indices.
        attention_factor: yarn: factor on queries and keys; None for the paper's 0.1 ln(factor) + 1.
    """

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None

    @property
    def amplitude(self) -> float:
        """Factor on rotated queries and keys."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        return 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


@dataclass(frozen=True)
class MoEConfig:
    """Experts in the place of some blocks' MLP; see `realrl.model.layers.moe`.

    Attributes:
        n_experts: number of experts in each layer that has any.
        top_k: experts that compute a token.
        intermediate_size: inner size of one expert.
        normalise_top_k: the weights of a token's experts add up to 1.
        aux_loss_coef: weight of the load-balancing loss in training; 0 leaves it out.
        dense_layers: the layers that have a plain MLP instead, in order.
        biases: router and experts have biases.
        limit: experts compute ``g sigmoid(gain g) (u + 1)`` with their gate g at most this and their up u within plus
            and minus this; None for SwiGLU.
        gain: see `limit`.
    """

    n_experts: int
    top_k: int
    intermediate_size: int
    normalise_top_k: bool = True
    aux_loss_coef: float = 0.0
    dense_layers: tuple[int, ...] = ()
    biases: bool = False
    limit: float | None = None
    gain: float = 1.0

    def __post_init__(self) -> None:
        if min(self.n_experts, self.top_k, self.intermediate_size) < 1:
            raise ValueError("every size of the experts must be at least 1")
        if self.top_k > self.n_experts:
            raise ValueError(f"a token cannot use {self.top_k} of {self.n_experts} experts")
        if self.limit is not None and not self.limit > 0:
            raise ValueError(f"the limit of experts must be above 0, not {self.limit}")
        if not self.aux_loss_coef >= 0:
            raise ValueError(f"the load-balancing loss has the coefficient {self.aux_loss_coef}, it must be 0 or more")

    @property
    def has_terms(self) -> bool:
        """True if experts compute more than SwiGLU of their matrices."""
        return self.biases or self.limit is not None


@dataclass(frozen=True)
class LoRA:
    """Low-rank adapters of one model.

    Attributes:
        rank: inner size.
        alpha: their outputs are scaled by alpha / rank.
        targets: names of the layers that have one, such as ("q", "v").
        base: folder of the frozen model, for readers of a saved adapter; otherwise unused.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    base: str = ""

    @property
    def scale(self) -> float:
        """Factor on B A."""
        return self.alpha / self.rank


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder. The defaults describe a llama: RMSNorm, rotary positions, grouped KV heads, SwiGLU.

    Attributes:
        lora: low-rank adapters beside some layers; None for a model without. No checkpoint format knows it.
        rope_theta, rope_scaling: base and scaling of rotary positions; ignored with `learned_positions`.
        max_positions: the longest sequence; a hard limit only where positions are learned, and in generation.
        attention_bias: q, k and v have biases.
        o_bias: the attention's output projection has one.
        mlp_bias: every matrix of the MLP has one.
        family: model family, which fixes the Hugging Face format of written checkpoints; see `realrl.model.families`.
        norm: "rms" is RMSNorm; "layer" is LayerNorm, with biases.
        norm_offset: norms multiply by 1 + weight.
        activation: activation of the MLP; "gelu_tanh" is GELU's tanh approximation.
        gated_mlp: down(activation(gate(x)) * up(x)); otherwise down(activation(up(x))).
        norm_place: place of a block's norms: before attention and MLP, after them (before their results are added to
            the input), or both.
        qk_norm: queries and keys are normalised before they are rotated, head by head or over all heads together; None
            for no such norm.
        score_size: scores of attention are divided by its square root; None for `head_dim`.
        score_softcap, logit_softcap: bound c of attention scores and of logits x, which become c tanh(x / c); None for
            no bound.
        sinks: each head has a learned score that takes its share of the softmax and adds nothing.
        local_rope_theta: base of rotary positions, not scaled, in layers with a window; None for that of all layers.
        rotary_dim: dims of a head that are rotated, the first ones; None for all.
        embedding_scale: factor on embeddings.
        learned_positions: embeddings of `max_positions` positions are added to those of the tokens; none are rotated.
        sliding_window: tokens that a token sees, itself included; None for all earlier ones.
        windowed_layers: the layers with a window, in order; None for all of them.
        moe: experts in the place of the MLP; None for a dense model. They are gated.
        head: "lm" gives logits over the vocabulary; "value" and "reward" give one number per token.
        tied_embeddings: the language-model head shares the embedding's weight; ignored by the other heads.
        eos_token_ids: tokens that end a response, beside the tokenizer's own.
        bos_token_id, pad_token_id: carried from and to checkpoints; not used here.
        dtype: dtype of parameters and activations.
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
    dtype: DType = "float32"
    family: str = "llama"
    o_bias: bool = False
    norm: NormKind = "rms"
    norm_offset: bool = False
    activation: Activation = "silu"
    gated_mlp: bool = True
    qk_norm: QKNorm | None = None
    embedding_scale: float = 1.0
    learned_positions: bool = False
    sliding_window: int | None = None
    windowed_layers: tuple[int, ...] | None = None
    moe: MoEConfig | None = None
    lora: LoRA | None = None
    norm_place: NormPlace = "before"
    score_size: int | None = None
    score_softcap: float | None = None
    logit_softcap: float | None = None
    local_rope_theta: float | None = None
    rotary_dim: int | None = None
    sinks: bool = False

    def __post_init__(self) -> None:
        sizes = (self.vocab_size, self.hidden_size, self.n_layers, self.n_heads, self.n_kv_heads, self.head_dim)
        if min(*sizes, self.intermediate_size) < 1:
            raise ValueError("every size must be at least 1")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"{self.n_heads} attention heads cannot share {self.n_kv_heads} KV heads evenly")
        if self.rope_dim % 2 and not self.learned_positions:
            raise ValueError(f"rotary positions need an even head_dim, not {self.rope_dim}")
        if not 0 < self.rope_dim <= self.head_dim:
            raise ValueError(f"{self.rope_dim} of the {self.head_dim} dims of a head cannot be rotated")
        if any(value is not None and not value > 0 for value in (self.score_size, self.score_softcap)):
            raise ValueError("score_size and score_softcap must be above 0")
        if self.logit_softcap is not None and not self.logit_softcap > 0:
            raise ValueError(f"logit_softcap must be above 0, not {self.logit_softcap}")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window must be at least 1, not {self.sliding_window}")
        if any(not 0 <= layer < self.n_layers for layer in self.windowed_layers or ()):
            raise ValueError(f"windowed_layers {self.windowed_layers} are not all among {self.n_layers} layers")
        if self.qk_norm and self.norm != "rms":
            raise ValueError("qk_norm needs RMSNorm")
        if self.moe is not None and not set(self.moe.dense_layers) < set(range(self.n_layers)):
            raise ValueError(f"dense_layers {self.moe.dense_layers} must be some of {self.n_layers} layers, not all")
        if self.moe is not None and (self.activation != "silu" or not self.gated_mlp):
            raise ValueError("experts are SwiGLU: activation must be 'silu', and gated_mlp true")

    @property
    def is_scalar(self) -> bool:
        """True if the head gives one number per token instead of logits."""
        return self.head != "lm"

    @property
    def rope_dim(self) -> int:
        """Dims of a head that are rotated."""
        return self.head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def query_factor(self) -> float:
        """Factor on queries whose scores are then divided by the square root of `head_dim`."""
        return 1.0 if self.score_size is None else math.sqrt(self.head_dim / self.score_size)

    @property
    def has_plain_attention(self) -> bool:
        """True if attention is a softmax of scaled products of heads that are rotated as a whole, or not at all."""
        return not self.keeps_scores and self.rope_dim == self.head_dim

    @property
    def keeps_scores(self) -> bool:
        """True if attention has all scores at once: no fused kernel bounds them or knows sinks."""
        return self.score_softcap is not None or self.sinks

    @property
    def norm_bias(self) -> bool:
        """True if norms have biases."""
        return self.norm == "layer"

    def has_adapter(self, name: str) -> bool:
        """Return True if layers of this name, such as "up", have a low-rank adapter."""
        return self.lora is not None and name in self.lora.targets

    def experts_of(self, layer_index: int) -> MoEConfig | None:
        """Return the experts in the place of a layer's MLP; None for a plain one."""
        return None if self.moe is None or layer_index in self.moe.dense_layers else self.moe

    def has_local_rope(self, layer_index: int) -> bool:
        """Return True if a layer's rotary positions have the base `local_rope_theta`."""
        return self.local_rope_theta is not None and self.window_of(layer_index) is not None

    def window_of(self, layer_index: int) -> int | None:
        """Return how many tokens, itself included, a token sees in a layer; None for all earlier ones."""
        is_windowed = self.windowed_layers is None or layer_index in self.windowed_layers
        return self.sliding_window if is_windowed else None


def tiny_config(vocab_size: int, *, head: HeadKind = "lm", dtype: DType = "float32") -> DecoderConfig:
    """Return a decoder of about half a million parameters, with a byte-level vocabulary, for tests and the toy task."""
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
