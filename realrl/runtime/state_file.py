"""Nested state (dicts, lists, numbers, strings, tensors) in one safetensors file or message: no pickle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save, save_file

from realrl.errors import AssetError, TransportError

_TENSOR = "__tensor__"


def save_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write `state`; tensors are copied to the host.

    Raises:
        TypeError: a value is neither dict, list, tuple, tensor, number, string, bool nor None.
        OSError: the file cannot be written.
    """
    tensors: dict[str, torch.Tensor] = {}
    tree = _strip(state, "", tensors, set())
    try:
        save_file(tensors, path, metadata={"tree": json.dumps(tree)})
    except SafetensorError as err:  # the library hides the operating system's error in a text
        raise OSError(None, str(err), str(path)) from err


def load_state(path: Path) -> dict[str, Any]:
    """Read what `save_state` wrote; tensors on the CPU.

    Raises:
        AssetError: the file is missing or damaged.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        tree = json.loads(metadata["tree"])
    except (OSError, SafetensorError, KeyError, json.JSONDecodeError) as err:
        raise AssetError(f"the state file {path} cannot be read: {err}") from err
    restored: dict[str, Any] = _restore(tree, tensors)
    return restored


def encode_state(state: Mapping[str, Any]) -> bytes:
    """The same as `save_state` writes, for another process.

    Raises:
        TypeError: a value is neither dict, list, tuple, tensor, number, string, bool nor None.
    """
    tensors: dict[str, torch.Tensor] = {}
    tree = json.dumps(_strip(state, "", tensors, set())).encode()
    return len(tree).to_bytes(8, "little") + tree + save(tensors)


def decode_state(message: bytes) -> dict[str, Any]:
    """What `encode_state` was given; tensors on the CPU.

    Raises:
        TransportError: the message is cut off or is something else.
    """
    end = 8 + int.from_bytes(message[:8], "little")
    try:
        restored: dict[str, Any] = _restore(json.loads(message[8:end]), load(message[end:]))
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
    """The tensor itself where it owns all of its memory, else a copy: optimizer state is too large to exist twice."""
    tensor = tensor.detach().to("cpu").contiguous()
    storage = tensor.untyped_storage()
    if storage.nbytes() != tensor.nbytes or storage.data_ptr() in taken:
        return tensor.clone()
    taken.add(storage.data_ptr())
    return tensor


def _restore(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, dict):
        if set(value) == {_TENSOR}:
            return tensors[value[_TENSOR]]
        return {k: _restore(v, tensors) for k, v in value.items()}
    if isinstance(value, list):
        return [_restore(v, tensors) for v in value]
    return value
