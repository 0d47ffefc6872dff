"""Models on disk in Hugging Face format: `config.json` and (sharded) safetensors that `transformers` reads too."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import torch

from realrl.errors import AssetError
from realrl.model.decoder import Decoder
from realrl.model.dtypes import dtype_name, torch_dtype
from realrl.model.families.format import Family, StoredTensor
from realrl.model.files.assembly import Assembly
from realrl.model.files.config_file import check_head, config_to_hf, family_of, read_stored
from realrl.model.files.tensor_file import read_tensors, renamed, stored_names, write_tensors
from realrl.model.files.weight_files import INDEX_FILE, SINGLE_FILE, tensor_files
from realrl.model.init import init_parameter
from realrl.model.lora import merged_shards
from realrl.model.parallel import UNSHARDED, TensorParallel
from realrl.plan.parameters.shards import ModelShard
from realrl.plan.parameters.stages import Stages, stage_layers, stage_of_layers
from realrl.shape import DecoderConfig, HeadKind

_N_PIECES, _PIECE_BYTES = 256, 1 << 12
_MAX_SHARD_BYTES = 5_000_000_000


_log = logging.getLogger(__name__)


def check_model(folder: str | Path, *, head: HeadKind = "lm", makes_head: bool = False) -> None:
    """Refuse, from headers alone and in milliseconds, a folder that `load_model` would refuse.

    Args:
        makes_head: True if a value or reward head that the checkpoint lacks may start from random numbers.

    Raises:
        AssetError: the configuration or a tensor file is missing, truncated or unsupported, a tensor is missing or of
            the wrong shape, or the head does not fit.
    """
    folder = Path(folder)
    stored, family = read_stored(folder)
    check_head(folder, stored, head)
    if head != "lm" and not stored.is_scalar and not makes_head:
        raise AssetError(
            f"{folder} holds a language model, which has no {head} head",
            remedy="A role that is not trained needs a finished one: give the folder of a sequence classifier.",
        )
    assembly = _assembly(replace(stored, head=head), stored, family)
    for file, wanted in _matched(folder, assembly, family):
        for name, tensor in read_tensors(file, wanted):
            _check_tensor(tensor, assembly.shape_of(wanted[name]), where=f"{file}: tensor {name!r}")


def weights_digest(folder: str | Path) -> str:
    """Hash the size and some pieces of every file: tells models of one architecture apart without reading them all.

    Raises:
        AssetError: the folder holds no weights.
    """
    digest = hashlib.sha256()
    for path in tensor_files(Path(folder)):
        size_bytes = path.stat().st_size
        digest.update(f"{path.name} {size_bytes}\n".encode())
        with path.open("rb") as file:
            for piece in range(_N_PIECES):
                file.seek(piece * size_bytes // _N_PIECES)
                digest.update(file.read(_PIECE_BYTES))
    return digest.hexdigest()[:16]


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
        shard: layers and slices to build, see `Decoder`; only these are read.
        parallel: see `Decoder`.

    Raises:
        AssetError: something in `folder` is missing, truncated, unsupported or of the wrong shape.
    """
    folder = Path(folder)
    stored, family = read_stored(folder)
    check_head(folder, stored, head)
    config = replace(stored, head=head, dtype=dtype_name(dtype))
    decoder = Decoder(config, shard=shard, parallel=parallel, device=device)
    parameters = dict(decoder.named_shards())
    makes_head = config.is_scalar and not stored.is_scalar
    assembly = _assembly(config, stored, family)
    if makes_head and "head.weight" in parameters:
        _log.warning("%s holds a language model: its %s head starts from small random numbers", folder, head)
        init_parameter(decoder, "head.weight", parameters["head.weight"], seed=seed)
    for file, wanted in _matched(folder, assembly, family):
        needed = {name: t for name, t in wanted.items() if any(part.name in parameters for part in t.parts)}
        for name, tensor in read_tensors(file, needed):
            _check_tensor(tensor, assembly.shape_of(needed[name]), where=f"{file}: tensor {name!r}")
            assembly.copy(needed[name], tensor, decoder, parameters)
    return decoder


def _assembly(config: DecoderConfig, stored: DecoderConfig, family: Family) -> Assembly:
    """Return the checkpoint of a model: without a head that a language model lacks."""
    return Assembly(family, config, without={"head.weight"} if config.is_scalar and not stored.is_scalar else ())


def _matched(folder: Path, assembly: Assembly, family: Family) -> Iterator[tuple[Path, dict[str, StoredTensor]]]:
    """Yield each tensor file with the model's tensors in it, by the names that they have there.

    Raises:
        AssetError: a file is damaged or holds another model's tensors; or, at the end, tensors are missing.
    """
    found: list[StoredTensor] = []
    for file in tensor_files(folder):
        wanted: dict[str, StoredTensor] = {}
        for name in stored_names(file):
            stored_tensor = assembly.find(name)
            if stored_tensor is not None:
                wanted[name] = stored_tensor
            elif not family.is_ignorable(name):
                raise AssetError(
                    f"{file} holds the tensor {name!r}, which config.json does not call for",
                    remedy=f"config.json, which says {family.model_type!r}, belongs to another model.",
                )
        found += wanted.values()
        yield file, wanted
    lacking = assembly.lacking(found)
    if lacking:
        raise AssetError(
            f"{folder} lacks {len(lacking)} tensors, the first is {min(lacking)!r}",
            remedy=f"The folder is incomplete, or config.json, which says {family.model_type!r}, belongs to another "
            "model.",
        )


# ---------------------------------------------------------------- saving


def save_model(decoder: Decoder, folder: str | Path, *, max_shard_bytes: int = _MAX_SHARD_BYTES) -> None:
    """Write `config.json` and safetensors (with an index when there are several) into `folder`.

    Every file is written under a temporary name and then renamed; tokenizer files are the caller's. Adapters are merged
    into the weights.

    Args:
        decoder: the whole model.

    Raises:
        OSError: the disk is full or the folder cannot be written; no partly written file keeps its final name.
    """
    config = replace(decoder.config, lora=None)
    save_stage(config, folder, merged_shards(decoder), max_shard_bytes=max_shard_bytes)
    save_index(config, folder, max_shard_bytes=max_shard_bytes)


def save_stage(
    config: DecoderConfig,
    folder: str | Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    pp_rank: int = 0,
    stages: Stages | None = None,
    max_shard_bytes: int = _MAX_SHARD_BYTES,
) -> list[Path]:
    """Write the tensor files of one pipeline stage, holding one tensor and its parts at a time.

    Stages need not talk to each other: the contents of each file follow from the configuration. Once all are done,
    `save_index` completes the folder.

    Args:
        config: the whole model.
        tensors: (name, whole tensor of ``config.dtype``) of each parameter of the stage, in the order of the model;
            a tied head is the first stage's embedding and comes from there only.
        stages: chunks of each stage; one stage has all blocks by default.

    Returns:
        Paths of the files.

    Raises:
        OSError: the disk is full or the folder cannot be written; no partly written file keeps its final name.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    assembly = Assembly(family_of(config), config)
    files = [file for file in _plan_files(assembly, config, stages, max_shard_bytes) if file.pp_rank == pp_rank]
    assembled = assembly.assemble([tensor for file in files for tensor in file.tensors], iter(tensors))
    for file in files:
        shapes = {tensor.name: assembly.shape_of(tensor) for tensor in file.tensors}
        write_tensors(folder / file.name, shapes, torch_dtype(config.dtype), islice(assembled, len(shapes)))
    return [folder / file.name for file in files]


def save_index(
    config: DecoderConfig,
    folder: str | Path,
    *,
    stages: Stages | None = None,
    max_shard_bytes: int = _MAX_SHARD_BYTES,
) -> None:
    """Write `config.json` and, when there are several tensor files, their index; called once all stages are written.

    Tensor files and an index of an earlier model in the folder are deleted, for they would be read instead.

    Raises:
        OSError: the disk is full or the folder cannot be written; no partly written file keeps its final name.
    """
    folder = Path(folder)
    assembly = Assembly(family_of(config), config)
    files = _plan_files(assembly, config, stages, max_shard_bytes)
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(map(assembly.num_bytes_of, assembly.tensors))},
            "weight_map": {tensor.name: file.name for file in files for tensor in file.tensors},
        }
        with renamed(folder / INDEX_FILE) as temporary:
            temporary.write_text(json.dumps(index, indent=2))
    with renamed(folder / "config.json") as temporary:
        temporary.write_text(json.dumps(config_to_hf(config, str(folder)), indent=2))
    current = {file.name for file in files} | ({INDEX_FILE} if len(files) > 1 else set())
    for pattern in (SINGLE_FILE, INDEX_FILE, "model-*-of-*.safetensors"):
        for stale in folder.glob(pattern):
            if stale.name not in current:
                stale.unlink()


@dataclass(frozen=True)
class _PlannedFile:
    name: str
    pp_rank: int
    tensors: tuple[StoredTensor, ...]


def _plan_files(
    assembly: Assembly, config: DecoderConfig, stages: Stages | None, max_shard_bytes: int
) -> list[_PlannedFile]:
    """Distribute the tensors over files: those of one chunk, in order, until a file is full."""
    stage_of = stage_of_layers(stages or stage_layers(config, 1))
    parts: list[tuple[int, list[StoredTensor]]] = []
    filled_bytes = 0
    for tensor in assembly.tensors:
        pp_rank, num_bytes = stage_of[assembly.layer_of(tensor)], assembly.num_bytes_of(tensor)
        if not parts or parts[-1][0] != pp_rank or filled_bytes + num_bytes > max_shard_bytes:
            parts.append((pp_rank, []))
            filled_bytes = 0
        parts[-1][1].append(tensor)
        filled_bytes += num_bytes
    if len(parts) == 1:
        return [_PlannedFile(SINGLE_FILE, 0, tuple(parts[0][1]))]
    return [
        _PlannedFile(f"model-{i:05d}-of-{len(parts):05d}.safetensors", pp_rank, tuple(tensors))
        for i, (pp_rank, tensors) in enumerate(parts, start=1)
    ]


# ---------------------------------------------------------------- reading


def _check_tensor(tensor: torch.Tensor, shape: tuple[int, ...], *, where: str) -> None:
    if tuple(tensor.shape) != shape:
        raise AssetError(f"{where} has shape {list(tensor.shape)}, config.json asks for {list(shape)}")
    if not tensor.is_floating_point():
        raise AssetError(f"{where} has dtype {tensor.dtype}, not a floating-point one")
