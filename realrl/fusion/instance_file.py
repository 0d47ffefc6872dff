"""Files of instances: YAML with the numbers of each model.

    devices: 8                     # left out: the smallest block that whole copies of every model fill
    models:
      actor: {stages: 8, micro_batches: 8, forward: 5, backward: 10, activation: 1.95}
      critic: {stages: 4, micro_batches: 4, forward: 4, backward: 8, activation: 2, reversed: true}
    memory_cap: 20                 # of every device, or a list; left out: no limit
    transport: overtaking          # or in_order

Times and activations are one number, or a list with one for each stage. `width` is the number of devices of a stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from realrl.config.choices import load_yaml
from realrl.errors import UsageError
from realrl.plan.fusion.instance import Instance, Model, on_block

_FIELDS = ("devices", "models", "memory_cap", "transport")
_NUMBERS = ("forward", "backward", "activation")
_COUNTS = ("stages", "micro_batches")
_MODEL_FIELDS = (*_COUNTS, *_NUMBERS, "width", "reversed")
_EXAMPLE = "docs/fusion.md describes such files, and configs/fusion has one."


def read_instance(path: str) -> Instance:
    """Read an instance.

    Raises:
        UsageError: the file cannot be read, or describes none.
    """
    return instance_from(load_yaml(Path(path), path), path)


def instance_from(content: object, where: str) -> Instance:
    """Return the instance that the content of a file describes.

    Raises:
        UsageError: it describes none; the message names the file and the field.
    """
    fields = _mapping(content, where, _FIELDS)
    models = fields.get("models")
    if not isinstance(models, Mapping) or not models:
        raise UsageError(f"{where}: models is no mapping of names to their numbers", remedy=_EXAMPLE)
    devices = None if fields.get("devices") is None else _count(fields["devices"], f"{where}: devices")
    transport = fields.get("transport", "overtaking")
    found = [_model(str(name), numbers, where) for name, numbers in models.items()]
    try:
        instance = on_block(found, devices, transport=transport)  # type: ignore[arg-type]  # it is checked there
        cap = fields.get("memory_cap")
        return instance if cap is None else instance.with_caps(_numbers(cap, f"{where}: memory_cap"))
    except UsageError as error:
        raise UsageError(f"{where}: {error.message}", remedy=error.remedy) from error


def _model(name: str, content: object, where: str) -> Model:
    at = f"{where}: models.{name}"
    fields = _mapping(content, at, _MODEL_FIELDS)
    for field in (*_COUNTS, *_NUMBERS):
        if field not in fields:
            raise UsageError(f"{at} has no {field}", remedy=_EXAMPLE)
    is_reversed = fields.get("reversed", False)
    if not isinstance(is_reversed, bool):
        raise UsageError(f"{at}.reversed is {is_reversed!r}", remedy="Write true or false.")
    n_stages, n_micro_batches = (_count(fields[field], f"{at}.{field}") for field in _COUNTS)
    forward, backward, activation = (_numbers(fields[field], f"{at}.{field}") for field in _NUMBERS)
    width = _count(fields.get("width", 1), f"{at}.width")
    return Model(name, n_stages, n_micro_batches, forward, backward, activation, width, is_reversed)


def _mapping(content: object, where: str, known: tuple[str, ...]) -> Mapping[str, object]:
    if not isinstance(content, Mapping):
        raise UsageError(f"{where} is no mapping", remedy=_EXAMPLE)
    for field in content:
        if field not in known:
            raise UsageError(f"{where} has a field {str(field)[:40]!r}", remedy=f"The fields are {', '.join(known)}.")
    return content


def _count(value: object, where: str) -> int:
    if type(value) is not int or not 1 <= value <= 1 << 20:
        raise UsageError(f"{where} is {str(value)[:40]}", remedy="Give a whole number from 1 on.")
    return value


def _numbers(value: object, where: str) -> float | list[float]:
    values: list[Any] = value if isinstance(value, list) else [value]
    if not values or any(type(one) not in (int, float) for one in values):
        raise UsageError(f"{where} is {str(value)[:40]}", remedy="Give a number, or a list of them.")
    try:
        numbers = [float(one) for one in values]
    except OverflowError as error:
        raise UsageError(f"{where} is too large", remedy="Give a smaller number.") from error
    return numbers if isinstance(value, list) else numbers[0]
