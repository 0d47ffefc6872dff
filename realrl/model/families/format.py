"""Layout of a family's checkpoint: the parameters that each stored tensor is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from realrl.shape import DecoderConfig


@dataclass(frozen=True)
class Part:
    """One of our parameters, or one of the slices along its dim 0, as a part of a stored tensor."""

    name: str
    index: int | None = None


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a checkpoint.

    Attributes:
        name: name in the file.
        parts: parameters that are joined along `dim`, in order.
        dim: dim of a part.
        is_transposed: True if the last two dims of the joined tensor are stored the other way round.
        is_interleaved: True if the parts take turns along `dim`, one index each.
    """

    name: str
    parts: tuple[Part, ...]
    dim: int = 0
    is_transposed: bool = False
    is_interleaved: bool = False


def is_ignorable(name: str) -> bool:
    """True for derived values, and for a language-model head that is not needed."""
    return name.endswith("rotary_emb.inv_freq") or name == "lm_head.weight"


@dataclass(frozen=True)
class Family:
    """A translation between one kind of Hugging Face model and `realrl.model.decoder.Decoder`.

    Attributes:
        model_type: name in `config.json`; also `DecoderConfig.family`.
        lm_architecture, scalar_architecture: names of the language model and of the sequence classifier.
        config_from_hf: translates a parsed `config.json`, given the file's path for messages; head "reward" for a
            classifier. Raises AssetError for missing, mistyped and unsupported values.
        config_to_hf: makes the `config.json` that `config_from_hf` and `transformers` read back.
        stored_tensors: the tensors of a checkpoint that we write; reading knows them too.
        is_ignorable: tells if a tensor of a checkpoint may be left unread.
        canonical_name: maps other names that checkpoints use for a tensor to its name in `stored_tensors`.
        other_forms: like `stored_tensors`, further forms in which files hold the same parameters.
    """

    model_type: str
    lm_architecture: str
    scalar_architecture: str
    config_from_hf: Callable[[Mapping[str, Any], str], DecoderConfig]
    config_to_hf: Callable[[DecoderConfig], dict[str, Any]]
    stored_tensors: Callable[[DecoderConfig], Sequence[StoredTensor]]
    is_ignorable: Callable[[str], bool] = is_ignorable
    canonical_name: Callable[[str], str] = str
    other_forms: tuple[Callable[[DecoderConfig], Sequence[StoredTensor]], ...] = ()


def renamed(names: Mapping[str, str]) -> list[StoredTensor]:
    """Make stored tensors that are our parameters under other names: ours -> theirs."""
    return [StoredTensor(theirs, (Part(ours),)) for ours, theirs in names.items()]
