"""`config.json` of Hugging Face model folders, read and written. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec

from realrl.errors import AssetError
from realrl.model.families import FAMILIES, find_family
from realrl.model.families.format import Family
from realrl.model.files.contradictions import contradictions
from realrl.model.files.weight_files import has_other_head, read_json
from realrl.shape import DecoderConfig, DType, HeadKind

_Count = Annotated[int, msgspec.Meta(ge=0, le=4096)]
_Size = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]
_Length = Annotated[int, msgspec.Meta(ge=1, le=1 << 30)]
_Token = Annotated[int, msgspec.Meta(ge=-1, le=1 << 24)]
_Number = Annotated[float, msgspec.Meta(ge=-1e12, le=1e12)]


class _Rope(msgspec.Struct):
    full_attention: _Rope | None = None
    sliding_attention: _Rope | None = None
    rope_type: str | None = None
    type: str | None = None
    rope_theta: _Number | None = None
    partial_rotary_factor: _Number | None = None
    factor: _Number | None = None
    original_max_position_embeddings: _Length | None = None
    low_freq_factor: _Number | None = None
    high_freq_factor: _Number | None = None
    beta_fast: _Number | None = None
    beta_slow: _Number | None = None
    attention_factor: _Number | None = None
    mscale: _Number | None = None
    mscale_all_dim: _Number | None = None
    truncate: bool | None = None


class _Named(msgspec.Struct):
    """Keys of `config.json` that name the family."""

    model_type: str | None = None
    architectures: list[str] | None = None


class _Known(_Named):
    """Types and limits of every key of `config.json` that some family reads; null stands for an absent key."""

    vocab_size: _Size | None = None
    hidden_size: _Size | None = None
    n_embd: _Size | None = None
    intermediate_size: _Size | None = None
    moe_intermediate_size: _Size | None = None
    n_inner: _Size | None = None
    num_hidden_layers: _Count | None = None
    n_layer: _Count | None = None
    max_window_layers: _Count | None = None
    decoder_sparse_step: _Count | None = None
    num_attention_heads: _Size | None = None
    num_key_value_heads: _Size | None = None
    n_head: _Size | None = None
    head_dim: _Size | None = None
    num_experts: _Count | None = None
    num_local_experts: _Count | None = None
    num_experts_per_tok: _Count | None = None
    max_position_embeddings: _Length | None = None
    n_positions: _Length | None = None
    sliding_window: _Length | None = None
    sliding_window_pattern: _Count | None = None
    query_pre_attn_scalar: _Size | None = None
    attn_logit_softcapping: _Number | None = None
    final_logit_softcapping: _Number | None = None
    rope_local_base_freq: _Number | None = None
    rope_parameters: _Rope | None = None
    rope_scaling: _Rope | None = None
    rope_theta: _Number | None = None
    partial_rotary_factor: _Number | None = None
    rms_norm_eps: _Number | None = None
    layer_norm_epsilon: _Number | None = None
    router_aux_loss_coef: _Number | None = None
    router_jitter_noise: _Number | None = None
    swiglu_limit: _Number | None = None
    swiglu_alpha: _Number | None = None
    attention_bias: bool | None = None
    mlp_bias: bool | None = None
    tie_word_embeddings: bool | None = None
    use_sliding_window: bool | None = None
    norm_topk_prob: bool | None = None
    hidden_act: str | None = None
    hidden_activation: str | None = None
    activation_function: str | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    layer_types: list[str] | None = None
    mlp_only_layers: list[_Count] | None = None
    bos_token_id: _Token | None = None
    eos_token_id: _Token | list[_Token] | None = None
    pad_token_id: _Token | None = None


def read_config(folder: str | Path) -> DecoderConfig:
    """Read the configuration in `folder`; `head` and `dtype` are the checkpoint's.

    Raises:
        AssetError: the folder or its config.json is missing, unreadable or of an unsupported architecture.
    """
    return read_stored(Path(folder))[0]


def read_model_config(folder: str | Path, *, head: HeadKind = "lm", dtype: DType = "float32") -> DecoderConfig:
    """Read the configuration of the decoder that `load_model` would return.

    Raises:
        AssetError: `load_model` would refuse config.json.
    """
    folder = Path(folder)
    stored, _ = read_stored(folder)
    check_head(folder, stored, head)
    return replace(stored, head=head, dtype=dtype)


def check_head(folder: Path, stored: DecoderConfig, head: HeadKind) -> None:
    """Refuse a checkpoint whose head cannot become the wanted one.

    Raises:
        AssetError: a language model is wanted, and the folder holds a reward or value model.
    """
    if head == "lm" and stored.is_scalar:
        raise AssetError(
            f"{folder} holds a reward or value model, which cannot predict tokens",
            remedy="Give this role the folder of a language model.",
        )


def read_stored(folder: Path) -> tuple[DecoderConfig, Family]:
    """Like `read_config`, and return the family of the format too.

    The ends of responses are those of config.json and of generation_config.json. A head that differs from the embedding
    is not tied to it, whatever config.json says.

    Raises:
        AssetError: as `read_config`.
    """
    _, config, family = _read(folder)
    return config, family


def read_notes(folder: str | Path) -> list[str]:
    """Return a sentence for each contradiction in the files of a model: what they say, and what is read.

    Raises:
        AssetError: as `read_config`.
    """
    raw, config, family = _read(Path(folder))
    notes = list(contradictions(raw, config))
    if family.config_from_hf(raw, str(folder)).tied_embeddings and not config.tied_embeddings:
        notes.append(
            "tie_word_embeddings is true, but the files hold a head that differs from the embedding: both are read, "
            "and the head is not tied"
        )
    return notes


def _read(folder: Path) -> tuple[dict[str, Any], DecoderConfig, Family]:
    if not folder.is_dir():
        raise AssetError(f"model folder {folder} does not exist", remedy="Check models.<role>.path.")
    path = folder / "config.json"
    if not path.is_file():
        raise AssetError(f"{folder} has no config.json", remedy="It must be a Hugging Face model folder.")
    raw = read_json(path)
    _check_types(raw, _Named, path)
    family = find_family(raw, str(path))
    _check_types(raw, _Known, path)
    if raw.get("auto_map"):
        raise AssetError(
            f"{path} names code of its own (auto_map), which realrl does not run",
            remedy="Use a model folder of a built-in architecture, without auto_map.",
        )
    config = family.config_from_hf(raw, str(path))
    ends = (end for end in _generation_ends(folder) if 0 <= end < config.vocab_size)
    config = replace(config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *ends))))
    if config.tied_embeddings and not config.is_scalar and has_other_head(folder, family, config):
        config = replace(config, tied_embeddings=False)
    return raw, config, family


def _generation_ends(folder: Path) -> Iterator[int]:
    """Yield the ends of responses that generation_config.json names; none if it cannot be read."""
    try:
        found = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))["eos_token_id"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):  # it may hold anything: most of it is not for us
        return
    for end in found if isinstance(found, list) else [found]:
        if isinstance(end, int) and not isinstance(end, bool):
            yield end


def _check_types(raw: dict[str, Any], schema: type[msgspec.Struct], path: Path) -> None:
    try:
        msgspec.convert(raw, schema)
    except (msgspec.ValidationError, ValueError, RecursionError) as error:
        raise AssetError(f"{path} holds an impossible value: {error}") from None


def config_to_hf(config: DecoderConfig, where: str) -> dict[str, Any]:
    """The content of a model's `config.json`.

    Raises:
        ValueError: the family's format cannot express the configuration.
    """
    family = family_of(config)
    raw = family.config_to_hf(config)
    read_back = replace(family.config_from_hf(raw, where), head=config.head, dtype=config.dtype)
    different = [
        field.name for field in fields(config) if getattr(read_back, field.name) != getattr(config, field.name)
    ]
    if different:
        raise ValueError(f"the format of family {config.family!r} cannot express {', '.join(different)} of {config}")
    return raw


def family_of(config: DecoderConfig) -> Family:
    """The family in whose format a model is written.

    Raises:
        ValueError: there is no such family.
    """
    if config.family not in FAMILIES:
        raise ValueError(f"there is no family {config.family!r}; known are {', '.join(FAMILIES)}")
    return FAMILIES[config.family]
