"""Tokenizers: `transformers` fast tokenizers from a local folder, or the built-in byte-level one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from realrl.config.schema import BUILT_IN
from realrl.data.tiny import tiny_tokenizer
from realrl.errors import AssetError, did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# A folder needs one of these files: the first is read directly, the others are converted.
_FAST_FILE = "tokenizer.json"
_MOST_BYTES = 1 << 28
_OTHER_FILES = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def load_tokenizer(path: str) -> PreTrainedTokenizerFast:
    """Load the tokenizer of a Hugging Face folder without network; ``"tiny"`` gives the built-in byte-level one.

    The end-of-sequence token takes the place of a missing padding token.

    Args:
        path: folder with ``tokenizer.json`` (or files that `transformers` converts to it), or ``"tiny"``.

    Raises:
        AssetError: the folder or its tokenizer files are missing or broken, or there is no end-of-sequence token.
    """
    if path == BUILT_IN:
        return tiny_tokenizer()
    folder = Path(path).expanduser()
    _check_folder(folder)
    tokenizer = _read(folder)
    if not isinstance(tokenizer.eos_token_id, int):
        raise AssetError(
            f"the tokenizer in {folder} has no end-of-sequence token, so no response could ever end",
            remedy='Name one in its tokenizer_config.json, e.g. "eos_token": "</s>".',
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def encode_batch(tokenizer: Any, texts: Sequence[str], *, with_start: bool) -> list[list[int]]:
    """Token ids of each text, without a closing end-of-sequence token.

    Args:
        tokenizer: a `transformers` fast tokenizer.
        texts: any strings, possibly empty.
        with_start: prepend the start token if the tokenizer does so by default.

    Raises:
        AssetError: the tokenizer fails.
    """
    if not texts:
        return []
    with _guarded(f"the tokenizer {tokenizer.name_or_path!r} cannot encode a text"):
        encoded: list[list[int]] = tokenizer(
            list(texts), add_special_tokens=with_start, return_attention_mask=False, verbose=False
        )["input_ids"]
        closing = tokenizer("", add_special_tokens=True)["input_ids"][-1:] if with_start else []
    if closing == [tokenizer.eos_token_id] and closing != [tokenizer.bos_token_id]:
        return [ids[:-1] for ids in encoded]
    return encoded


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        near = [p.name for p in folder.parent.iterdir()] if folder.parent.is_dir() else []
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        raise AssetError(
            f"the tokenizer folder {folder} {what}.{did_you_mean(folder.name, near)}",
            remedy="Give a Hugging Face folder on this machine; nothing is downloaded by name.",
        )
    if not any((folder / name).is_file() for name in (_FAST_FILE, *_OTHER_FILES)):
        found = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) or "nothing"
        raise AssetError(
            f"the folder {folder} holds no tokenizer: expected {_FAST_FILE}, found {found}",
            remedy="Copy the tokenizer files beside the model's config.json.",
        )


def _read(folder: Path) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    with _guarded(f"the tokenizer in {folder} cannot be read"):
        if (folder / _FAST_FILE).is_file():
            if (folder / _FAST_FILE).stat().st_size > _MOST_BYTES:
                raise ValueError(f"{_FAST_FILE} is larger than {_MOST_BYTES:,} bytes")
            json.loads((folder / _FAST_FILE).read_text(encoding="utf-8"))
            fast: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
            return fast
        from transformers import AutoTokenizer

        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if not tokenizer.is_fast:
        raise AssetError(
            f"the tokenizer in {folder} has no fast version",
            remedy=f"Convert it to {_FAST_FILE} once with the tokenizers library.",
        )
    converted: PreTrainedTokenizerFast = tokenizer
    return converted


@contextmanager
def _guarded(what: str) -> Iterator[None]:
    """Turn the errors of the libraries into `AssetError`: bare Exceptions, and panics, which are none."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split())
        raise AssetError(
            f"{what}: {reason[:300]}", remedy="Fetch its files again; one of them is cut off or was changed."
        ) from error
