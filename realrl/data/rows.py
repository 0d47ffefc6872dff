"""Rows between workers: their bytes on a socket, and the store that keeps them on the worker that produced them.

Wire format: ``magic | header size (uint32, little endian) | header | tensors``. The header is msgpack; each key's
packed tensor follows as raw little-endian bytes, in the order of the header's keys, padded to 16 bytes.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import torch

from realrl.data.checks import DTYPES, SampleError, short
from realrl.data.sample import SequenceSample
from realrl.errors import TransportError
from realrl.sched.messages import KeySchema, SampleMeta

Buffer = bytes | bytearray | memoryview

_MAGIC = b"RRL1"
_PREFIX = struct.Struct("<4sI")
_ALIGN = 16


class _Header(msgspec.Struct, frozen=True):
    meta: SampleMeta
    keys: tuple[str, ...]
    sizes_bytes: tuple[int, ...]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Header)


def encode_frames(sample: SequenceSample) -> list[Buffer]:
    """The wire form of `sample` as buffers to send one after the other; CPU tensors are not copied.

    Raises:
        SampleError: a key holds metadata only.
    """
    tensors = [sample[key].detach().to("cpu").contiguous() for key in sample.keys]
    views: list[Buffer] = [t.reshape(-1).view(torch.uint8).numpy().data.cast("B") for t in tensors]
    header = _encoder.encode(_Header(sample.describe(), sample.keys, tuple(len(view) for view in views)))
    start = _PREFIX.pack(_MAGIC, len(header)) + header
    frames: list[Buffer] = [start + _padding(len(start))]
    for view in views:
        frames.append(view)
        if padding := _padding(len(view)):
            frames.append(padding)
    return frames


def encode_rows(sample: SequenceSample) -> bytes:
    """The wire form of `sample` in one piece.

    Raises:
        SampleError: a key holds metadata only.
    """
    return b"".join(encode_frames(sample))


def decode_rows(message: Buffer) -> SequenceSample:
    """The batch that `encode_rows` wrote. A writable buffer is used in place; from others, each tensor is copied once.

    Raises:
        TransportError: the message is cut off or is something else.
    """
    view = memoryview(message).cast("B")
    if len(view) < _PREFIX.size or bytes(view[:4]) != _MAGIC:
        raise TransportError(f"a message of {len(view)} bytes was expected to hold sample rows, but does not")
    _, header_size = _PREFIX.unpack_from(view)
    position = _PREFIX.size + header_size
    try:
        header = _decoder.decode(view[_PREFIX.size : position])
    except msgspec.MsgspecError as error:
        raise TransportError(f"the header of a sample row message cannot be read: {error}") from error
    position += len(_padding(position))
    data: dict[str, torch.Tensor | None] = {}
    for key, size_bytes in zip(header.keys, header.sizes_bytes, strict=True):
        if position + size_bytes > len(view):
            raise TransportError(f"a sample row message ends after {len(view)} bytes, in the middle of key {key!r}")
        data[key] = _tensor(view[position : position + size_bytes], header.meta.schemas[key])
        position += size_bytes + len(_padding(size_bytes))
    return SequenceSample(header.meta.ids, header.meta.schemas, header.meta.seqlens, data)


def _padding(size_bytes: int) -> bytes:
    return bytes(-size_bytes % _ALIGN)


def _tensor(view: memoryview, schema: KeySchema) -> torch.Tensor:
    if len(view) == 0:
        flat = torch.empty(0, dtype=torch.uint8)
    elif view.readonly:
        flat = torch.empty(len(view), dtype=torch.uint8)
        flat.numpy().data[:] = view
    else:
        flat = torch.frombuffer(view, dtype=torch.uint8)
    shape = (-1, *schema.trailing) if flat.numel() else (0, *schema.trailing)
    return flat.view(DTYPES[schema.dtype]).view(shape)


@dataclass(frozen=True)
class _Rows:
    schema: KeySchema
    seqlens: tuple[int, ...]
    tensor: torch.Tensor


class SampleStore:
    """The rows that one worker holds, by (sample id, key).

    Rows are copied in, because views would keep the memory of their whole batch alive after `free`. Safe to use from
    several threads: a server thread may read while the main thread writes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: dict[str, dict[str, _Rows]] = {}
        self._size_bytes = 0

    def put(self, sample: SequenceSample) -> None:
        """Keep a copy of all rows of `sample`; rows that are here already under the same id and key are replaced.

        Raises:
            SampleError: a key holds metadata only.
        """
        fresh = {key: [rows.detach().clone() for rows in sample.samples(key)] for key in sample.keys if len(sample) > 0}
        with self._lock:
            for key, tensors in fresh.items():
                schema = sample.schemas[key]
                for sample_id, lens, tensor in zip(sample.ids, sample.seqlens[key], tensors, strict=True):
                    held = self._rows.setdefault(sample_id, {})
                    if key in held:
                        self._size_bytes -= held[key].tensor.nbytes
                    held[key] = _Rows(schema, lens, tensor)
                    self._size_bytes += tensor.nbytes

    def get(self, ids: Sequence[str], keys: Sequence[str]) -> SequenceSample:
        """A new batch of these samples, in this order, with these keys.

        Raises:
            SampleError: no ids, or a row is not here; it names the sample id and the key.
        """
        if not ids:
            raise SampleError("cannot read a batch without sample ids from the store")
        with self._lock:
            columns = {key: [self._find(sample_id, key) for sample_id in ids] for key in keys}
        return SequenceSample(
            tuple(ids),
            {key: rows[0].schema for key, rows in columns.items()},
            {key: tuple(row.seqlens for row in rows) for key, rows in columns.items()},
            {key: torch.cat([row.tensor for row in rows]) for key, rows in columns.items()},
        )

    def missing(self, ids: Iterable[str], keys: Sequence[str]) -> list[tuple[str, str]]:
        """The (sample id, key) pairs that are not here."""
        with self._lock:
            return [(i, key) for i in ids for key in keys if key not in self._rows.get(i, {})]

    def free(self, ids: Iterable[str]) -> None:
        """Drop every row of these samples; ids that are not here are ignored, as a worker may never have held them."""
        with self._lock:
            for sample_id in ids:
                for rows in self._rows.pop(sample_id, {}).values():
                    self._size_bytes -= rows.tensor.nbytes

    @property
    def size_bytes(self) -> int:
        with self._lock:
            return self._size_bytes

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids of the samples with at least one row here, oldest first."""
        with self._lock:
            return tuple(self._rows)

    def __len__(self) -> int:
        with self._lock:
            return len(self._rows)

    def _find(self, sample_id: str, key: str) -> _Rows:
        held = self._rows.get(sample_id)
        if held is None:
            raise SampleError(
                f"sample {sample_id!r} is not on this worker, which holds {len(self._rows)} samples",
                sample_ids=(sample_id,),
            )
        if key not in held:
            raise SampleError(
                f"sample {sample_id!r} has no key {key!r} on this worker, only {short(tuple(held))}",
                sample_ids=(sample_id,),
            )
        return held[key]
