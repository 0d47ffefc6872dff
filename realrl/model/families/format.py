"""How a family's checkpoint is laid out: which of our parameters each stored tensor is made of."""

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
        name: in the file.
        parts: joined along `dim`, in order.
        dim: of a part.
        is_transposed: the last two dims of what is joined are stored the other way round.
    """

    name: str
    parts: tuple[Part, ...]
    dim: int = 0
    is_transposed: bool = False


@dataclass(frozen=True)
class Family:
    """A translation between one kind of Hugging Face model and `realrl.model.decoder.Decoder`.

    Attributes:
        model_type: as in `config.json`; also `DecoderConfig.family`.
        lm_architecture, scalar_architecture: names of the language model and of the sequence classifier.
        config_from_hf: from a parsed `config.json` and the file's path, for messages; head "reward" for a classifier.
            Raises AssetError for what is missing, mistyped or lacking here.
        config_to_hf: what `config_from_hf` and `transformers` read back.
        stored_tensors: what is written, and read unless `other_forms` have it.
        is_ignorable: whether a tensor of a checkpoint may be left unread.
        canonical_name: of a tensor that some checkpoints name otherwise.
        other_forms: like `stored_tensors`, further ways in which the same parameters are found in files.
    """

    model_type: str
    lm_architecture: str
    scalar_architecture: str
    config_from_hf: Callable[[Mapping[str, Any], str], DecoderConfig]
    config_to_hf: Callable[[DecoderConfig], dict[str, Any]]
    stored_tensors: Callable[[DecoderConfig], Sequence[StoredTensor]]
    is_ignorable: Callable[[str], bool]
    canonical_name: Callable[[str], str] = str
    other_forms: tuple[Callable[[DecoderConfig], Sequence[StoredTensor]], ...] = ()


def renamed(names: Mapping[str, str]) -> list[StoredTensor]:
    """Stored tensors that are our parameters under other names: ours -> theirs."""
    return [StoredTensor(theirs, (Part(ours),)) for ours, theirs in names.items()]
