"""Rows from dataset files: JSON, JSON Lines and parquet.

Every error names the file and the line (JSON Lines) or row (JSON, parquet) that it is about, both from 1.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from realrl.config.paths import find_data_files
from realrl.errors import DataError, did_you_mean


@dataclass(frozen=True)
class RawRow:
    """One object of a dataset file, and its place in messages ("train.jsonl, line 17").

    Attributes:
        names: field that is read -> name that the file has for it, where they differ.
    """

    fields: Mapping[str, Any]
    where: str
    names: Mapping[str, str] = field(default_factory=dict)


def read_rows(path: str, names: Mapping[str, str] | None = None) -> list[RawRow]:
    """All rows of a file, or of the files of a folder or pattern, see `find_data_files`.

    Args:
        names: field that is read -> name that the file has for it; "a.b" is field b of the object a. A row whose field
            of that name is absent or null has none.

    Raises:
        DataError: the path does not exist or has an unknown suffix, a file is empty or broken, a row is no object, or
            no row has a field of `names`.
    """
    rows: list[RawRow] = []
    for file in map(Path, find_data_files(path)):
        found = list(_reader_of(file)(file))
        if not found:
            raise DataError(f"the dataset file {file} is empty", remedy="It needs one object per sample.")
        rows += found
    return with_names(rows, names or {}, path)


def with_names(rows: Sequence[RawRow], names: Mapping[str, str], path: str) -> list[RawRow]:
    """Rows whose fields are called as realrl reads them; see `read_rows`."""
    if not names:
        return list(rows)
    for wanted, name in names.items():
        if all(_value(row.fields, name) is None for row in rows):
            known = list(dict.fromkeys(key for row in rows[:100] for key in row.fields))
            raise DataError(
                f"dataset.fields.{wanted}={name}: no row of {path} has such a field.{did_you_mean(name, known)}",
                remedy=f"Its fields are {', '.join(map(repr, known[:8])) or 'none'}.",
            )
    hidden = {*names, *names.values()}

    def renamed(row: RawRow) -> RawRow:
        found = {wanted: _value(row.fields, name) for wanted, name in names.items()}
        others = {name: value for name, value in row.fields.items() if name not in hidden}
        given = {wanted: value for wanted, value in found.items() if value is not None}
        return RawRow({**others, **given}, row.where, names)

    return [renamed(row) for row in rows]


def _value(fields: Mapping[str, Any], name: str) -> Any:
    if name in fields or "." not in name:
        return fields.get(name)
    above, _, below = name.partition(".")
    inner = fields.get(above)
    return _value(inner, below) if isinstance(inner, Mapping) else None


def _reader_of(file: Path) -> Callable[[Path], Iterator[RawRow]]:
    if not os.path.exists(file):
        near = did_you_mean(file.name, [other.name for other in file.parent.glob("*")])
        raise DataError(f"the dataset {file} does not exist.{near}", remedy="Set dataset.path to a file.")
    reader = READERS.get(file.suffix.lower())
    if reader is None:
        known = ", ".join(READERS)
        raise DataError(
            f"the dataset file {file} has the unknown suffix {file.suffix!r}", remedy=f"Known suffixes: {known}."
        )
    return reader


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
