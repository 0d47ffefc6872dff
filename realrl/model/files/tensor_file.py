"""One safetensors file: read memory-mapped, written tensor by tensor.

Format: a u64 with the size of the header, the header in JSON, padded with spaces to a multiple of 8 bytes, then the
tensors back to back. (https://github.com/huggingface/safetensors#format)
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError, safe_open

from realrl.errors import AssetError

_MOST_HEADER_BYTES = 100_000_000  # the format's own limit
_DTYPE_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def stored_names(file: Path) -> list[str]:
    """Read the names of the tensors in a file, and check its header and that it is as long as the header promises.

    Raises:
        AssetError: the file is missing, truncated or damaged.
    """
    if not file.is_file():
        raise AssetError(f"{file} is missing", remedy="Download or convert the model again.")
    size_bytes = file.stat().st_size
    with file.open("rb") as opened:
        header_bytes = int.from_bytes(opened.read(8), "little")
        if 8 + header_bytes <= size_bytes and header_bytes > _MOST_HEADER_BYTES:
            raise AssetError(f"{file} is damaged: its header would have {header_bytes:,} bytes")
        try:
            header = json.loads(opened.read(header_bytes)) if 8 + header_bytes <= size_bytes else {}
        except (ValueError, RecursionError):
            raise AssetError(f"{file} is damaged: its header is not JSON") from None
    try:
        ends = {name: int(entry["data_offsets"][1]) for name, entry in header.items() if name != "__metadata__"}
    except (AttributeError, KeyError, IndexError, TypeError, ValueError, OverflowError):
        raise AssetError(f"{file} is damaged: its header does not say where tensors end") from None
    expected_bytes = 8 + header_bytes + max(ends.values(), default=0)
    if size_bytes < expected_bytes:
        raise AssetError(
            f"{file} is truncated: {size_bytes} of {expected_bytes} bytes",
            remedy="Download or convert the model again.",
        )
    try:
        with safe_open(str(file), framework="pt") as checked:
            return list(checked.keys())
    except SafetensorError as error:
        raise AssetError(f"{file} is damaged: {error}") from None


def read_tensors(file: Path, names: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the named tensors, memory-mapped: only the elements in use are read from disk.

    Raises:
        AssetError: the file is damaged.
    """
    try:
        with safe_open(str(file), framework="pt") as opened:
            for name in names:
                yield name, opened.get_tensor(name)
    except SafetensorError as error:
        raise AssetError(f"{file} is damaged: {error}") from None


def write_tensors(
    file: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, tensors: Iterable[torch.Tensor]
) -> None:
    """Write tensors one by one as they come, under a temporary name until all are there.

    Args:
        shapes: shape of every tensor by name, in the order of `tensors`.
        dtype: dtype of all tensors.
        tensors: as many as there are shapes, on any device.

    Raises:
        OSError: the disk is full or the folder cannot be written; no partly written file keeps its final name.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with renamed(file) as temporary:
        try:
            with temporary.open("wb") as opened:
                opened.write(len(text).to_bytes(8, "little") + text)
                _write_data(opened, shapes, dtype, tensors)
        except OSError as error:
            if error.filename is not None or error.errno is None:
                raise
            raise OSError(error.errno, os.strerror(error.errno), str(file)) from error


def _write_data(
    opened: BinaryIO, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, tensors: Iterable[torch.Tensor]
) -> None:
    for (name, shape), tensor in zip(shapes.items(), tensors, strict=True):
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise ValueError(f"tensor {name!r} is {tensor.dtype} {list(tensor.shape)}, not {dtype} {list(shape)}")
        opened.write(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


@contextmanager
def renamed(path: Path) -> Iterator[Path]:
    """Give a temporary name to write to; rename it to `path` on success, remove it on failure."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()
