"""The tensor files of a model folder, as far as their names and headers tell. Imports no torch.

`transformers` 5 ties head and embedding only if they are equal where files hold both; `has_other_head` finds others.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

from realrl.errors import AssetError
from realrl.model.families.format import Family
from realrl.shape import DecoderConfig

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_HEAD = "lm_head.weight"
_FILE_NAME = re.compile(r"[\w][\w.+-]{0,200}", re.ASCII)
_MOST_BYTES = 100_000_000  # of a JSON file; the index of a model of many thousand tensors has ten
_BLOCK_BYTES = 1 << 22
_Place = tuple[str, int, str, int, int]  # file, when it changed, dtype, first byte and the one after the last


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        AssetError: the file cannot be read, is larger than any such file, or does not hold an object.
    """
    try:
        if os.path.getsize(path) > _MOST_BYTES:
            raise AssetError(f"{path} has {os.path.getsize(path):,} bytes; the most is {_MOST_BYTES:,}")
        raw = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise AssetError(f"{path} cannot be read as JSON: it has hundreds of levels") from None
    except (ValueError, OSError) as error:
        raise AssetError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(raw, dict):
        raise AssetError(f"{path} is not a JSON object")
    return raw


def tensor_files(folder: Path) -> list[Path]:
    """Find the files that hold a model's tensors.

    Raises:
        AssetError: there are none, or their index is unreadable.
    """
    index = folder / INDEX_FILE
    if not index.is_file():
        if not (folder / SINGLE_FILE).is_file():
            raise AssetError(
                f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}",
                remedy="Only safetensors checkpoints are read; convert other formats first.",
            )
        return [folder / SINGLE_FILE]
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise AssetError(f"{index} has no weight_map")
    for name, file in weight_map.items():
        if not isinstance(file, str) or _FILE_NAME.fullmatch(file) is None:
            raise AssetError(f"{index} puts the tensor {name!r} into {file!r}, which is no file name of this folder")
    return [folder / file for file in sorted(set(weight_map.values()))]


def has_other_head(folder: Path, family: Family, config: DecoderConfig) -> bool:
    """Return True if files hold a head with other values than the embedding; damaged files are left to the loader.

    Args:
        folder: the model folder.
        family: layout of its files.
        config: the model, with a tied head.
    """
    names = {tensor.name for tensor in family.stored_tensors(config) if tensor.parts[0].name == "embedding.weight"}
    try:
        places: dict[str, _Place] = {}
        for file in tensor_files(folder):
            stat = file.stat()
            stored = _places(str(file), stat.st_size, stat.st_mtime_ns)
            places |= {family.canonical_name(name): place for name, place in stored}
        beside = [places[name] for name in names if name in places]
        return bool(beside) and _HEAD in places and _differ(places[_HEAD], beside[0])
    except (AssetError, OSError, ValueError, RecursionError, AttributeError, KeyError, TypeError):
        return False


@lru_cache(maxsize=256)
def _places(file: str, size_bytes: int, changed_ns: int) -> tuple[tuple[str, _Place], ...]:
    """Find the tensors in a file, by the header of its format; see `realrl.model.files.tensor_file`."""
    with open(file, "rb") as opened:
        n_header = int.from_bytes(opened.read(8), "little")
        if n_header > min(size_bytes, _MOST_BYTES):
            raise ValueError(f"a header of {n_header} bytes")
        header: dict[str, Any] = json.loads(opened.read(n_header))
    start = 8 + n_header
    return tuple(
        (name, (file, changed_ns, str(entry["dtype"]), start + int(first), start + int(last)))
        for name, entry in header.items()
        if name != "__metadata__"
        for first, last in [entry["data_offsets"]]
    )


@lru_cache(maxsize=64)
def _differ(one: _Place, other: _Place) -> bool:
    (file, _, dtype, first, last), (other_file, _, other_dtype, other_first, other_last) = one, other
    if (dtype, last - first) != (other_dtype, other_last - other_first):
        return True
    with open(file, "rb") as opened, open(other_file, "rb") as beside:
        blocks = zip(_blocks(opened, first, last), _blocks(beside, other_first, other_last), strict=True)
        return any(block != another for block, another in blocks)


def _blocks(file: BinaryIO, first: int, last: int) -> Iterator[bytes]:
    file.seek(first)
    for start in range(first, last, _BLOCK_BYTES):
        yield file.read(min(_BLOCK_BYTES, last - start))
