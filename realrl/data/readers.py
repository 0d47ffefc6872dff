"""Rows from dataset files: JSON, JSON Lines and parquet.

Every error names the file and the line (JSON Lines) or row (JSON, parquet) that it is about, both from 1.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from realrl.errors import DataError, did_you_mean


@dataclass(frozen=True)
class RawRow:
    """One object of a dataset file, and its place in messages ("train.jsonl, line 17")."""

    fields: Mapping[str, Any]
    where: str


def read_rows(path: str) -> list[RawRow]:
    """All rows of a file.

    Raises:
        DataError: the path does not exist or has an unknown suffix, the file is empty or broken, a row is no object.
    """
    file = Path(path)
    if not os.path.exists(file):
        near = did_you_mean(file.name, [other.name for other in file.parent.glob("*")])
        raise DataError(f"the dataset {file} does not exist.{near}", remedy="Set dataset.path to a file.")
    reader = READERS.get(file.suffix.lower())
    if reader is None:
        known = ", ".join(READERS)
        raise DataError(
            f"the dataset file {file} has the unknown suffix {file.suffix!r}", remedy=f"Known suffixes: {known}."
        )
    rows = list(reader(file))
    if not rows:
        raise DataError(f"the dataset file {file} is empty", remedy="It needs one object per sample.")
    return rows


def _read_jsonl(file: Path) -> Iterator[RawRow]:
    for number, line in enumerate(file.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not line.strip():
            continue
        where = f"{file}, line {number}"
        try:
            value = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise DataError(
                f"{where} is not JSON: {error}", remedy="A .jsonl file holds one JSON object on each line."
            ) from error
        yield _row(value, where)


def _read_json(file: Path) -> Iterator[RawRow]:
    content = file.read_bytes().removeprefix(b"\xef\xbb\xbf")
    if not content.strip():
        return
    try:
        values = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _not_json(file, content, error) from error
    if not isinstance(values, list):
        raise DataError(
            f"{file} holds one JSON {_kind(values)}, not a list of objects",
            remedy="Wrap the samples in [...], or write one object per line into a .jsonl file.",
        )
    for number, value in enumerate(values, start=1):
        yield _row(value, f"{file}, row {number}")


def _not_json(file: Path, content: bytes, error: Exception) -> DataError:
    """Find the line of the error, which msgspec does not report, with a second parser."""
    where, reason = str(file), str(error)
    try:
        json.loads(content)
    except json.JSONDecodeError as detail:
        where, reason = f"{file}, line {detail.lineno}", detail.msg
        if detail.msg == "Extra data":
            return DataError(
                f"{where} follows a complete JSON value", remedy="Call the file .jsonl if it is JSON Lines."
            )
    except (ValueError, RecursionError) as detail:
        reason = str(detail)
    return DataError(f"{where} is not JSON: {reason}", remedy="A .json file holds one list of objects.")


def _read_parquet(file: Path) -> Iterator[RawRow]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise DataError(
            f"reading {file} needs pyarrow, which is not installed", remedy="pip install 'realrl[parquet]'"
        ) from error
    try:
        values = parquet.read_table(file).to_pylist()
    except (ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
        reason = " ".join(str(error).split())
        raise DataError(
            f"{file} is not a readable parquet file: {reason}", remedy="Write or fetch it again."
        ) from error
    for number, value in enumerate(values, start=1):
        # Absent fields are null in a column store.
        yield _row({key: field for key, field in value.items() if field is not None}, f"{file}, row {number}")


def _row(value: object, where: str) -> RawRow:
    if not isinstance(value, dict):
        raise DataError(
            f"{where} is a JSON {_kind(value)}, not an object", remedy='Each sample is an object: {"prompt": ...}.'
        )
    return RawRow(value, where)


def _kind(value: object) -> str:
    kinds = {dict: "object", list: "list", str: "string", bool: "boolean", int: "number", float: "number"}
    return kinds.get(type(value), "null")


READERS: Mapping[str, Callable[[Path], Iterator[RawRow]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".parquet": _read_parquet,
}
