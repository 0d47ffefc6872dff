"""Adapters on disk in the format of PEFT: `adapter_config.json` and `adapter_model.safetensors`.

`peft.PeftModel.from_pretrained(base, folder)` reads them. Layout and key names are those that PEFT 0.21 writes:
``base_model.model.`` + the module's name in the Hugging Face model + ``.lora_A.weight`` [rank, in] or
``.lora_B.weight`` [out, rank]; a head that was trained in full is a "module to save".
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from realrl.model.families import FAMILIES
from realrl.model.families.format import StoredTensor
from realrl.model.files.tensor_file import renamed, write_tensors
from realrl.plan.parameters.adapters import LORA_A, LORA_B
from realrl.shape import DecoderConfig

_PREFIX = "base_model.model."
_PARTS = {LORA_A: ".lora_A.weight", LORA_B: ".lora_B.weight"}


def save_adapters(config: DecoderConfig, folder: Path, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Write the adapters of a model, and its head if that was trained.

    A family whose checkpoints join layers that are separate here (GPT-2's q, k and v) has no place for separate
    adapters: nothing is written.

    Args:
        config: the whole model with its adapters.
        folder: target folder; made if it does not exist.
        tensors: all trained parameters, whole and in float32, by global name.

    Returns:
        True if the adapters were written.

    Raises:
        OSError: the disk is full or the folder cannot be written; no partly written file keeps its final name.
    """
    modules = _modules(config, tensors)
    if modules is None:
        return False
    folder.mkdir(parents=True, exist_ok=True)
    names = [_name_of(name, modules) for name in tensors]
    shapes = {name: tuple(tensor.shape) for name, tensor in zip(names, tensors.values(), strict=True)}
    write_tensors(folder / "adapter_model.safetensors", shapes, torch.float32, tensors.values())
    with renamed(folder / "adapter_config.json") as temporary:
        temporary.write_text(json.dumps(_config(config, modules), indent=2))
    return True


def _modules(config: DecoderConfig, tensors: Mapping[str, torch.Tensor]) -> dict[str, StoredTensor] | None:
    """Our layer -> its module's weight in the Hugging Face model; None if a layer is no module of its own there."""
    known = {t.parts[0].name: t for t in _stored(config) if len(t.parts) == 1 and t.parts[0].index is None}
    layers = dict.fromkeys(_layer_of(name) for name in tensors)
    if any(f"{layer}.weight" not in known for layer in layers):
        return None
    return {layer: known[f"{layer}.weight"] for layer in layers}


def _stored(config: DecoderConfig) -> Sequence[StoredTensor]:
    return FAMILIES[config.family].stored_tensors(config)


def _layer_of(name: str) -> str:
    return name.rpartition(".")[0]


def _module(weight: StoredTensor) -> str:
    return weight.name.removesuffix(".weight")


def _name_of(name: str, modules: Mapping[str, StoredTensor]) -> str:
    part = _PARTS.get("." + name.rpartition(".")[2], ".weight")
    return _PREFIX + _module(modules[_layer_of(name)]) + part


def _config(config: DecoderConfig, modules: Mapping[str, StoredTensor]) -> dict[str, Any]:
    lora = config.lora
    assert lora is not None
    is_whole = float(lora.alpha).is_integer()
    adapted = [weight for layer, weight in modules.items() if layer != "head"]
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if config.is_scalar else "CAUSAL_LM",
        "base_model_name_or_path": lora.base or None,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if is_whole else lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": any(weight.is_transposed for weight in adapted),
        "inference_mode": True,
        "target_modules": _targets(config, [_module(weight) for weight in adapted]),
        "modules_to_save": [_module(modules["head"])] if "head" in modules else None,
    }


def _targets(config: DecoderConfig, modules: list[str]) -> list[str]:
    """The modules by the last part of their names, or by full names if other modules have these parts too."""
    short = dict.fromkeys(module.rpartition(".")[2] for module in modules)
    meant = {_module(weight) for weight in _stored(config)}
    meant = {module for module in meant if module.rpartition(".")[2] in short}
    return list(short) if meant == set(modules) else modules
