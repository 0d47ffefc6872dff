"""Files beside a model's weights that a trained model keeps: how it is sampled, and its tokenizer in other forms."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

from realrl.files import read_input

GENERATION = "generation_config.json"
_OF_THE_TOKENIZER = (
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)
_MOST_BYTES = 32 << 20

_log = logging.getLogger(__name__)


def read_companions(folders: Iterable[Path], *, generates: bool) -> dict[str, bytes]:
    """Read what is there in the first folder that has it; what cannot be read is left out.

    Args:
        generates: True for a language model, which takes along how it is sampled.
    """
    found: dict[str, bytes] = {}
    names = (GENERATION, *_OF_THE_TOKENIZER) if generates else _OF_THE_TOKENIZER
    for path in (folder / name for folder in folders for name in names):
        if path.name in found or not path.is_file():
            continue
        try:
            content = read_input(path, most_bytes=_MOST_BYTES + 1)
        except OSError as error:
            _log.warning("%s is not kept in checkpoints: %s", path, error.strerror or error)
            continue
        if len(content) <= _MOST_BYTES:
            found[path.name] = content
        else:
            _log.warning("%s is not kept in checkpoints: it has more than %d bytes", path, _MOST_BYTES)
    return found


def write_companions(companions: Mapping[str, bytes], folder: Path) -> None:
    """Write files into a model's folder, but for those that are there.

    Raises:
        OSError: the disk is full or the folder cannot be written.
    """
    for name, content in companions.items():
        if not (folder / name).exists():
            (folder / name).write_bytes(content)
