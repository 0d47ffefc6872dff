"""Models on disk in Hugging Face format: `config.json` and (sharded) safetensors that `transformers` reads too."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from realrl.errors import AssetError, did_you_mean
from realrl.model import hf_llama
from realrl.model.config import DecoderConfig, HeadKind
from realrl.model.decoder import Decoder
from realrl.model.init import init_parameter
from realrl.model.parallel import UNSHARDED, TensorParallel
from realrl.model.tensor_file import read_tensors, renamed, stored_names, write_tensors
from realrl.plan.layout import Layer, ModelShard, ParameterSpec, parameter_specs, stage_layers

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_MAX_SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class Family:
    """A translation between one architecture's Hugging Face format and `Decoder`."""

    config_from_hf: Callable[..., DecoderConfig]
    config_to_hf: Callable[[DecoderConfig], dict[str, Any]]
    tensor_names: Callable[[DecoderConfig], dict[str, str]]
    is_ignorable: Callable[[str], bool]


_LLAMA = Family(hf_llama.config_from_hf, hf_llama.config_to_hf, hf_llama.tensor_names, hf_llama.is_ignorable)
FAMILIES: Mapping[str, Family] = dict.fromkeys(hf_llama.ARCHITECTURES, _LLAMA)  # by architecture


def read_config(folder: str | Path) -> DecoderConfig:
    """Return the configuration in `folder`; `head` and `dtype` are those of the checkpoint.

    Raises:
        AssetError: the folder or its config.json is missing, unreadable or of an unsupported architecture.
    """
    return _read_config(Path(folder))[0]


def check_model(folder: str | Path, *, head: HeadKind = "lm") -> None:
    """Refuse from headers alone, in milliseconds, what `load_model` would refuse for its files.

    Raises:
        AssetError: the configuration or a tensor file is missing, truncated or unsupported, or the head does not fit.
    """
    folder = Path(folder)
    stored, _ = _read_config(folder)
    _check_head(folder, stored, head)
    for file in _tensor_files(folder):
        stored_names(file)


def read_model_config(
    folder: str | Path, *, head: HeadKind = "lm", dtype: torch.dtype = torch.float32
) -> DecoderConfig:
    """The configuration of the decoder that `load_model` would return.

    Raises:
        AssetError: as `load_model`, for what config.json alone can say.
    """
    folder = Path(folder)
    stored, _ = _read_config(folder)
    _check_head(folder, stored, head)
    return replace(stored, head=head, dtype=dtype)


def load_model(
    folder: str | Path,
    *,
    head: HeadKind = "lm",
    dtype: torch.dtype = torch.float32,
    shard: ModelShard | None = None,
    parallel: TensorParallel = UNSHARDED,
    device: torch.device | None = None,
    seed: int = 0,
) -> Decoder:
    """Load a decoder; tensors go from the mapped file into place, converted to `dtype`.

    A value or reward head comes from the checkpoint when it has one; a language-model checkpoint gets a small random
    head that depends on `seed` only.

    Args:
        shard: what to build, see `Decoder`; only its slices are read.
        parallel: see `Decoder`.

    Raises:
        AssetError: something in `folder` is missing, truncated, unsupported or of the wrong shape.
    """
    folder = Path(folder)
    stored, family = _read_config(folder)
    _check_head(folder, stored, head)
    config = replace(stored, head=head, dtype=dtype)
    decoder = Decoder(config, shard=shard, parallel=parallel, device=device)
    parameters = dict(decoder.named_shards())
    names = family.tensor_names(config)
    if config.is_scalar and not stored.is_scalar:
        del names["head.weight"]
        if "head.weight" in parameters:
            init_parameter(decoder, "head.weight", parameters["head.weight"], seed=seed)
    missing = {theirs: ours for ours, theirs in names.items()}
    for file in _tensor_files(folder):
        wanted = {}
        for theirs in stored_names(file):
            ours = missing.pop(theirs, None)
            if ours in parameters:
                wanted[theirs] = ours
            elif ours is None and not family.is_ignorable(theirs):
                raise AssetError(f"{file} holds the tensor {theirs!r}, which config.json does not call for")
        for theirs, tensor in read_tensors(file, wanted):
            ours = wanted[theirs]
            _check_tensor(tensor, decoder.specs[ours], where=f"{file}: tensor {theirs!r}")
            parameters[ours].detach().copy_(tensor[decoder.place_of(ours)])
    if missing:
        raise AssetError(
            f"{folder} lacks {len(missing)} tensors, the first is {min(missing)!r}",
            remedy="The folder is incomplete, or config.json belongs to another model.",
        )
    return decoder


# ---------------------------------------------------------------- saving


def save_model(decoder: Decoder, folder: str | Path, *, max_shard_bytes: int = _MAX_SHARD_BYTES) -> None:
    """Write `config.json` and safetensors (with an index when there are several) into `folder`.

    Every file is written under a temporary name and then renamed; tokenizer files are the caller's.

    Args:
        decoder: the whole model.

    Raises:
        OSError: the disk is full or the folder cannot be written; no partly written file keeps its final name.
    """
    save_stage(decoder.config, folder, decoder.named_shards(), max_shard_bytes=max_shard_bytes)
    save_index(decoder.config, folder, max_shard_bytes=max_shard_bytes)


def save_stage(
    config: DecoderConfig,
    folder: str | Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    pp_rank: int = 0,
    pp_size: int = 1,
    max_shard_bytes: int = _MAX_SHARD_BYTES,
) -> None:
    """Write the tensor files of one pipeline stage, holding one tensor at a time.

    Stages need not talk to each other: which file holds what follows from the configuration. Once all are done,
    `save_index` completes the folder.

    Args:
        config: of the whole model.
        tensors: (name, whole tensor of ``config.dtype``) of each parameter of the stage, in the order of the model;
            a tied head is the first stage's embedding and comes from there only.

    Raises:
        OSError: the disk is full or the folder cannot be written; no partly written file keeps its final name.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    names = FAMILIES[hf_llama.LM_ARCHITECTURE].tensor_names(config)
    remaining = iter(tensors)
    for file in _plan_files(config, pp_size, max_shard_bytes):
        if file.pp_rank == pp_rank:
            shapes = {names[spec.name]: spec.shape for spec in file.specs}
            write_tensors(folder / file.name, shapes, config.dtype, _in_order(file.specs, remaining))


def save_index(
    config: DecoderConfig, folder: str | Path, *, pp_size: int = 1, max_shard_bytes: int = _MAX_SHARD_BYTES
) -> None:
    """Write `config.json` and, when there are several tensor files, their index; called once all stages are written.

    Raises:
        OSError: the disk is full or the folder cannot be written; no partly written file keeps its final name.
    """
    folder = Path(folder)
    family = FAMILIES[hf_llama.LM_ARCHITECTURE]
    names = family.tensor_names(config)
    files = _plan_files(config, pp_size, max_shard_bytes)
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(spec.num_bytes for file in files for spec in file.specs)},
            "weight_map": {names[spec.name]: file.name for file in files for spec in file.specs},
        }
        with renamed(folder / _INDEX_FILE) as temporary:
            temporary.write_text(json.dumps(index, indent=2))
    with renamed(folder / "config.json") as temporary:
        temporary.write_text(json.dumps(family.config_to_hf(config), indent=2))


@dataclass(frozen=True)
class _PlannedFile:
    name: str
    pp_rank: int
    specs: tuple[ParameterSpec, ...]


def _plan_files(config: DecoderConfig, pp_size: int, max_shard_bytes: int) -> list[_PlannedFile]:
    """Which file holds which parameters: those of one stage, in order, until a file is full."""
    stage_of: dict[Layer, int] = {"embedding": 0, "head": pp_size - 1}
    for rank, layers in enumerate(stage_layers(config, pp_size)):
        stage_of |= dict.fromkeys(layers, rank)
    parts: list[tuple[int, list[ParameterSpec]]] = []
    filled_bytes = 0
    for spec in parameter_specs(config):
        pp_rank, num_bytes = stage_of[spec.layer], spec.num_bytes
        if not parts or parts[-1][0] != pp_rank or filled_bytes + num_bytes > max_shard_bytes:
            parts.append((pp_rank, []))
            filled_bytes = 0
        parts[-1][1].append(spec)
        filled_bytes += num_bytes
    if len(parts) == 1:
        return [_PlannedFile(_SINGLE_FILE, 0, tuple(parts[0][1]))]
    return [
        _PlannedFile(f"model-{i:05d}-of-{len(parts):05d}.safetensors", pp_rank, tuple(specs))
        for i, (pp_rank, specs) in enumerate(parts, start=1)
    ]


def _in_order(specs: Sequence[ParameterSpec], tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[torch.Tensor]:
    for spec, (name, tensor) in zip(specs, itertools.islice(tensors, len(specs)), strict=True):
        if name != spec.name:
            raise ValueError(f"parameter {name!r} came to be saved where {spec.name!r} is next")
        yield tensor


# ---------------------------------------------------------------- reading


def _check_head(folder: Path, stored: DecoderConfig, head: HeadKind) -> None:
    if head == "lm" and stored.is_scalar:
        raise AssetError(
            f"{folder} holds a reward or value model, which cannot predict tokens",
            remedy="Give this role the folder of a language model.",
        )


def _read_config(folder: Path) -> tuple[DecoderConfig, Family]:
    if not folder.is_dir():
        raise AssetError(f"model folder {folder} does not exist", remedy="Check models.<role>.path.")
    path = folder / "config.json"
    if not path.is_file():
        raise AssetError(f"{folder} has no config.json", remedy="It must be a Hugging Face model folder.")
    raw = _read_json(path)
    architectures = raw.get("architectures") or ["(none)"]
    family = FAMILIES.get(architectures[0])
    if family is None:
        raise AssetError(
            f"{path}: architecture {architectures[0]!r} is not supported.{did_you_mean(architectures[0], FAMILIES)}",
            remedy=f"Supported: {', '.join(sorted(FAMILIES))}.",
        )
    return family.config_from_hf(raw, where=str(path)), family


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise AssetError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(raw, dict):
        raise AssetError(f"{path} is not a JSON object")
    return raw


def _tensor_files(folder: Path) -> list[Path]:
    index = folder / _INDEX_FILE
    if not index.is_file():
        if not (folder / _SINGLE_FILE).is_file():
            raise AssetError(
                f"{folder} has neither {_SINGLE_FILE} nor {_INDEX_FILE}",
                remedy="Only safetensors checkpoints are read; convert other formats first.",
            )
        return [folder / _SINGLE_FILE]
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise AssetError(f"{index} has no weight_map")
    return [folder / file for file in sorted(set(weight_map.values()))]


def _check_tensor(tensor: torch.Tensor, spec: ParameterSpec, *, where: str) -> None:
    if tuple(tensor.shape) != spec.shape:
        raise AssetError(f"{where} has shape {list(tensor.shape)}, config.json asks for {list(spec.shape)}")
    if not tensor.is_floating_point():
        raise AssetError(f"{where} has dtype {tensor.dtype}, not a floating-point one")
