"""Keys of a model folder that say two things, where `transformers` 5 takes one: what it takes, in a sentence each.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from realrl.model.families.rope import rope_of
from realrl.shape import DecoderConfig

_TWO_NAMES = (("dtype", "torch_dtype"), ("num_experts", "num_local_experts"))  # the first one counts
_NESTED = ("full_attention", "sliding_attention")


def contradictions(raw: Mapping[str, Any], config: DecoderConfig) -> Iterator[str]:
    """Yield a sentence for each pair of keys of `config.json` that disagree.

    Args:
        raw: the parsed file.
        config: what was read of it.
    """
    old, new = raw.get("rope_scaling") or {}, raw.get("rope_parameters") or {}
    is_nested = any(kind in new for kind in _NESTED)
    if not is_nested and not config.learned_positions:
        if old and new and _scaling(old) != _scaling(new):
            yield "rope_scaling and rope_parameters differ: rope_scaling is read"
        places = {"rope_scaling": old, "rope_parameters": new, "config.json": raw}
        thetas = {place: float(keys["rope_theta"]) for place, keys in places.items() if keys.get("rope_theta")}
        if any(theta != config.rope_theta for theta in thetas.values()):
            shown = " and ".join(f"{theta:g} in {place}" for place, theta in thetas.items())
            yield f"rope_theta is {shown}: {config.rope_theta:g} is read"
    rope = rope_of(raw)
    if {"rope_type", "type"} <= rope.keys() and rope["rope_type"] != rope["type"]:
        yield f"a rope has the rope_type {rope['rope_type']!r} and the type {rope['type']!r}: rope_type is read"
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "yarn":
        ratio = config.max_positions / scaling.original_max_positions
        if ratio not in (1.0, scaling.factor):
            yield (
                f"YaRN's factor is {scaling.factor:g}, but max_position_embeddings is {ratio:g} times "
                "original_max_position_embeddings: the factor is read"
            )
    for first, second in _TWO_NAMES:
        if first in raw and second in raw and _plain(raw[first]) != _plain(raw[second]):
            yield f"{first} is {raw[first]!r} and {second} is {raw[second]!r}: {first} is read"


def _scaling(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters without the base, and with the kind under its present name."""
    kind = rope.get("rope_type") or rope.get("type")
    rest = {key: value for key, value in rope.items() if key not in ("rope_theta", "rope_type", "type")}
    return {"rope_type": kind, **rest}


def _plain(value: object) -> object:
    return value.removeprefix("torch.") if isinstance(value, str) else value
