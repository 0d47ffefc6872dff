"""Hardware files and lengths from disk: names of configs/hardware, files of the user's own, recorded lengths."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from realrl.config.choices import check_extent
from realrl.errors import ConfigError, did_you_mean
from realrl.experiment.discovery import config_dir
from realrl.files import read_input
from realrl.sim.hardware import Hardware, hardware_from, hardware_mapping
from realrl.sim.lengths import Lengths, lengths_from, recorded_lengths

if TYPE_CHECKING:
    from realrl.config.schema import RunConfig

_ENDINGS = (".yaml", ".yml")
_MOST_HARDWARE, _MOST_LENGTHS = 100_000, 200_000_000  # bytes of a file


def hardware_names() -> list[str]:
    """Return the names of the hardware files that come with realrl."""
    return sorted(path.stem for path in (config_dir() / "hardware").glob("*.yaml"))


def hardware_like(device: str) -> str:
    """Return the name of a device's hardware file, such as "h100" for "NVIDIA H100 80GB HBM3"; "" if there is none."""
    words = set(re.split(r"[^a-z0-9]+", device.lower()))
    return next((name for name in hardware_names() if words.issuperset(name.split("_"))), "")


def named_hardware(reference: str, *, option: str = "--hardware") -> Hardware:
    """Read a hardware file.

    Args:
        reference: a name of `hardware_names`, or the path of a file that ends in .yaml.
        option: for messages.

    Raises:
        ConfigError: there is no such name or file, or it is no hardware.
    """
    names = hardware_names()
    is_name = reference in names
    if not is_name and not reference.endswith(_ENDINGS):
        raise ConfigError(
            f"{option} {reference}: there is no such hardware." + did_you_mean(reference, names),
            remedy=f"Choose from {', '.join(names)}, or give a file that ends in .yaml; `realrl profile` writes one.",
        )
    path = config_dir() / "hardware" / f"{reference}.yaml" if is_name else Path(reference)
    source = f"{option} {reference}"
    remedy = f"Give a file that exists, or one of {', '.join(names)}."
    return hardware_from(_yaml(_text(path, source, _MOST_HARDWARE, remedy), source), source=source)


def lengths_of(
    wanted: str, config: RunConfig, *, option: str = "--lengths", max_new_tokens: int | None = None
) -> Lengths:
    """Read lengths of prompts and responses.

    Args:
        wanted: distributions such as ``prompt=fixed:256 response=lognormal:400,0.6``, or the generations.jsonl of a
            run; where the file lacks prompts, they have the longest length that the configuration allows.
        config: source of the limits and of the seed.
        option: for messages.
        max_new_tokens: limit of responses; None for that of generation.

    Raises:
        ConfigError: the text is no lengths, or the file cannot be used.
    """
    limits = {
        "max_prompt_tokens": config.dataset.max_prompt_tokens,
        "max_new_tokens": max_new_tokens or config.generation.max_new_tokens,
        "seed": config.seed,
    }
    source = f"{option} {wanted}"
    if "=" in wanted and not wanted.endswith(".jsonl"):
        return lengths_from(wanted, **limits, source=option)
    remedy = "Give the generations.jsonl of a run, or distributions such as 'prompt=fixed:256 response=normal:400,50'."
    lines = _text(Path(wanted), source, _MOST_LENGTHS, remedy).splitlines()
    found: dict[str, object] = {**recorded_lengths(lines, source=source)}
    found.setdefault("prompt", f"fixed:{limits['max_prompt_tokens']}")
    return lengths_from(found, **limits, source=source)


def hardware_text(hardware: Hardware, notes: Sequence[str]) -> str:
    """Return the content of a hardware file: notes as a comment, and values in base units."""
    import yaml

    comment = "".join(f"# {note}".rstrip() + "\n" for note in notes)
    text: str = yaml.safe_dump(hardware_mapping(hardware), sort_keys=False, allow_unicode=True, width=120)
    return comment + text


def _text(path: Path, source: str, most: int, remedy: str) -> str:
    try:
        content = read_input(path, most_bytes=most + 1)
        if len(content) > most:
            raise ConfigError(f"{source}: the file has more than {most:,} bytes", remedy=remedy)
        return content.decode()
    except (OSError, ValueError) as error:
        reason = "it is no text in UTF-8" if isinstance(error, ValueError) else getattr(error, "strerror", None)
        raise ConfigError(f"{source}: the file cannot be read: {reason or error}", remedy=remedy) from error


def _yaml(text: str, source: str) -> object:
    import yaml

    try:
        check_extent(text)
        found: object = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        place = "" if mark is None else f" in line {mark.line + 1}"
        reason = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"{source}: the file is no YAML: {reason}{place}", remedy="Correct it.") from error
    return found
