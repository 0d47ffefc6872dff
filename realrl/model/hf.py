"""Models on disk in Hugging Face format: `config.json` and (sharded) safetensors that `transformers` reads too."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from realrl.errors import AssetError, did_you_mean
from realrl.model import hf_llama
from realrl.model.config import DecoderConfig, HeadKind
from realrl.model.decoder import Decoder
from realrl.model.init import init_parameter

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
        _check_complete(file)


def load_model(
    folder: str | Path,
    *,
    head: HeadKind = "lm",
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    seed: int = 0,
) -> Decoder:
    """Load a decoder; tensors go from the mapped file into place, converted to `dtype`.

    A value or reward head comes from the checkpoint when it has one; a language-model checkpoint gets a small random
    head that depends on `seed` only.

    Raises:
        AssetError: something in `folder` is missing, truncated, unsupported or of the wrong shape.
    """
    folder = Path(folder)
    stored, family = _read_config(folder)
    _check_head(folder, stored, head)
    config = replace(stored, head=head, dtype=dtype)
    decoder = Decoder(config, device=device)
    parameters = dict(decoder.named_parameters())
    missing = {theirs: ours for ours, theirs in family.tensor_names(config).items()}
    with torch.no_grad():
        if config.is_scalar and not stored.is_scalar:
            name = "head.weight"
            init_parameter(name, parameters[name], config=config, seed=seed)
            missing.pop(family.tensor_names(config)[name])
        for file in _tensor_files(folder):
            for theirs, tensor in _read_tensors(file):
                ours = missing.pop(theirs, None)
                if ours is not None:
                    _copy_into(parameters[ours], tensor, where=f"{file}: tensor {theirs!r}")
                elif not family.is_ignorable(theirs):
                    raise AssetError(f"{file} holds the tensor {theirs!r}, which config.json does not call for")
    if missing:
        raise AssetError(
            f"{folder} lacks {len(missing)} tensors, the first is {min(missing)!r}",
            remedy="The folder is incomplete, or config.json belongs to another model.",
        )
    return decoder


def save_model(decoder: Decoder, folder: str | Path, *, max_shard_bytes: int = _MAX_SHARD_BYTES) -> None:
    """Write `config.json` and safetensors (with an index when there are several) into `folder`.

    Every file is written under a temporary name and then renamed; tokenizer files are the caller's.

    Raises:
        OSError: the disk is full or the folder cannot be written; no partly written file keeps its final name.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = decoder.config
    family = FAMILIES[hf_llama.LM_ARCHITECTURE]
    names = family.tensor_names(config)
    tensors = {names[ours]: p.detach().cpu().contiguous() for ours, p in decoder.named_parameters()}
    shards = _shard(tensors, max_shard_bytes)
    files = (
        [_SINGLE_FILE]
        if len(shards) == 1
        else [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    )
    for file, shard in zip(files, shards, strict=True):
        with _renamed(folder / file) as temporary:
            _save_file(shard, temporary)
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(t.nbytes for t in tensors.values())},
            "weight_map": {name: file for file, shard in zip(files, shards, strict=True) for name in shard},
        }
        with _renamed(folder / _INDEX_FILE) as temporary:
            temporary.write_text(json.dumps(index, indent=2))
    with _renamed(folder / "config.json") as temporary:
        temporary.write_text(json.dumps(family.config_to_hf(config), indent=2))


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


def _read_tensors(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of a safetensors file, mapped, not copied."""
    _check_complete(file)
    try:
        with safe_open(str(file), framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (the handle is no mapping)
                yield name, opened.get_tensor(name)
    except SafetensorError as error:
        raise AssetError(f"{file} is damaged: {error}") from None


def _check_complete(file: Path) -> None:
    """Compare the file's size with the one its header promises (format: u64 header size, JSON header, data)."""
    if not file.is_file():
        raise AssetError(f"{file} is missing", remedy="Download or convert the model again.")
    size_bytes = file.stat().st_size
    with file.open("rb") as opened:
        header_bytes = int.from_bytes(opened.read(8), "little")
        try:
            header = json.loads(opened.read(header_bytes)) if 8 + header_bytes <= size_bytes else {}
        except ValueError:
            raise AssetError(f"{file} is damaged: its header is not JSON") from None
    try:
        ends = [int(entry["data_offsets"][1]) for name, entry in header.items() if name != "__metadata__"]
    except (AttributeError, KeyError, IndexError, TypeError, ValueError):
        raise AssetError(f"{file} is damaged: its header does not say where tensors end") from None
    expected_bytes = 8 + header_bytes + max(ends, default=0)
    if size_bytes < expected_bytes:
        raise AssetError(
            f"{file} is truncated: {size_bytes} of {expected_bytes} bytes",
            remedy="Download or convert the model again.",
        )


def _copy_into(parameter: torch.Tensor, tensor: torch.Tensor, *, where: str) -> None:
    if parameter.shape != tensor.shape:
        raise AssetError(f"{where} has shape {list(tensor.shape)}, config.json asks for {list(parameter.shape)}")
    if not tensor.is_floating_point():
        raise AssetError(f"{where} has dtype {tensor.dtype}, not a floating-point one")
    parameter.copy_(tensor)


def _shard(tensors: Mapping[str, torch.Tensor], max_shard_bytes: int) -> list[dict[str, torch.Tensor]]:
    shards: list[dict[str, torch.Tensor]] = [{}]
    filled_bytes = 0
    for name, tensor in tensors.items():
        if shards[-1] and filled_bytes + tensor.nbytes > max_shard_bytes:
            shards.append({})
            filled_bytes = 0
        shards[-1][name] = tensor
        filled_bytes += tensor.nbytes
    return shards


@contextmanager
def _renamed(path: Path) -> Iterator[Path]:
    """Give a temporary name to write to; rename it to `path` on success, remove it on failure."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()


def _save_file(tensors: dict[str, torch.Tensor], path: Path) -> None:
    try:
        save_file(tensors, str(path), metadata={"format": "pt"})
    except SafetensorError as error:  # its I/O errors carry the errno in their text only
        match = re.search(r"os error (\d+)", str(error))
        if match is None:
            raise
        raise OSError(int(match[1]), os.strerror(int(match[1])), str(path)) from error
