"""Nested state (dicts, lists, numbers, strings, tensors) in one safetensors file or message: no pickle."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save

from realrl.errors import TransportError
from realrl.runtime.checkpoints.state_header import explained, tree_of

_TENSOR = "__tensor__"
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def save_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write `state`; tensors are copied to the host. Other threads go on while the bytes are written.

    Raises:
        TypeError: a value is neither dict, list, tuple, tensor, number, string, bool nor None.
        OSError: the file cannot be written.
    """
    tensors: dict[str, torch.Tensor] = {}
    tree = _strip(state, "", tensors, set())
    header: dict[str, Any] = {"__metadata__": {"tree": json.dumps(tree)}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    try:
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for tensor in tensors.values():
                file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
    except OSError as err:
        raise OSError(err.errno, err.strerror, str(path)) from err


def load_state(path: Path) -> dict[str, Any]:
    """Read a file of `save_state`; tensors are on the CPU.

    Raises:
        AssetError: the file is missing or damaged.
    """
    with StateFile(path) as file:
        restored: dict[str, Any] = file.restore()
    return restored


class StateFile:
    """An open, memory-mapped file of `save_state`: only tensors that are used are read from disk.

    Raises:
        AssetError: the file is missing or damaged; by all methods.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with explained(self._path):
            self._file = cast("Any", safe_open(path, framework="pt"))
            self._tree = tree_of(self._file)

    def __enter__(self) -> StateFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.__exit__(None, None, None)

    def restore(self, *keys: str) -> Any:
        """The state below these keys, or all of it if there are none."""
        value = self._tree
        with explained(self._path):
            for key in keys:
                value = value[key]
            return _restore(value, self._file.get_tensor)

    def without(self, key: str) -> dict[str, Any]:
        """The state but what is below a key."""
        with explained(self._path):
            return {k: _restore(v, self._file.get_tensor) for k, v in self._tree.items() if k != key}

    def entries(self, *keys: str) -> Mapping[str, Any]:
        """Names below these keys -> True for a tensor, else the value."""
        value = self._tree
        with explained(self._path):
            for key in keys:
                value = value[key]
            return {k: True if isinstance(v, dict) and set(v) == {_TENSOR} else v for k, v in value.items()}

    def read(self, keys: Sequence[str], box: Sequence[tuple[int, int]]) -> torch.Tensor:
        """A part of a tensor, (start, stop) for each of its dims, of which there must be one."""
        with explained(self._path):
            part: torch.Tensor = self._file.get_slice("/".join(keys))[tuple(slice(*edge) for edge in box)]
            return part


def encode_state(state: Mapping[str, Any]) -> bytes:
    """Serialise a state for another process, as `save_state` does for a file.

    Raises:
        TypeError: a value is neither dict, list, tuple, tensor, number, string, bool nor None.
    """
    tensors: dict[str, torch.Tensor] = {}
    tree = json.dumps(_strip(state, "", tensors, set())).encode()
    return len(tree).to_bytes(8, "little") + tree + save(tensors)


def decode_state(message: bytes) -> dict[str, Any]:
    """Inverse of `encode_state`; tensors are on the CPU.

    Raises:
        TransportError: the message is cut off or is something else.
    """
    end = 8 + int.from_bytes(message[:8], "little")
    try:
        restored: dict[str, Any] = _restore(json.loads(message[8:end]), load(message[end:]).__getitem__)
    except (SafetensorError, KeyError, ValueError) as err:
        raise TransportError(f"a message of {len(message)} bytes was expected to hold state: {err}") from err
    return restored


def _strip(value: Any, name: str, tensors: dict[str, torch.Tensor], taken: set[int]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors[name] = _own(value, taken)
        return {_TENSOR: name}
    if isinstance(value, Mapping):
        return {str(k): _strip(v, f"{name}/{k}" if name else str(k), tensors, taken) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_strip(v, f"{name}/{i}", tensors, taken) for i, v in enumerate(value)]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"state '{name}' holds a {type(value).__name__}, which a state file cannot keep")


def _own(tensor: torch.Tensor, taken: set[int]) -> torch.Tensor:
    """The tensor itself if it owns all of its memory, else a copy: optimizer state is too large to exist twice."""
    tensor = tensor.detach().to("cpu").contiguous()
    storage = tensor.untyped_storage()
    if storage.nbytes() != tensor.nbytes or storage.data_ptr() in taken:
        return tensor.clone()
    taken.add(storage.data_ptr())
    return tensor


def _restore(value: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    if isinstance(value, dict):
        if set(value) == {_TENSOR}:
            return tensor(value[_TENSOR])
        return {k: _restore(v, tensor) for k, v in value.items()}
    if isinstance(value, list):
        return [_restore(v, tensor) for v in value]
    return value
