"""Rows between workers: their bytes on a socket, and the store that keeps them on the worker that produced them.

Wire format: ``magic | header size (uint32, little endian) | header | tensors``. The header is msgpack; each key's
packed tensor follows as raw little-endian bytes, in the order of the header's keys, padded to 16 bytes.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple

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
_HOST = torch.device("cpu")


class RowsHeader(msgspec.Struct, frozen=True):
    """Contents of a message: the batch without tensors, and the bytes of each key's tensor."""

    meta: SampleMeta
    keys: tuple[str, ...]
    sizes_bytes: tuple[int, ...]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(RowsHeader)


def encode_start(sample: SequenceSample) -> bytes:
    """The wire form of `sample` up to its first tensor.

    Raises:
        SampleError: a key holds metadata only.
    """
    sizes = tuple(sample[key].nbytes for key in sample.keys)
    header = _encoder.encode(RowsHeader(sample.describe(), sample.keys, sizes))
    start = _PREFIX.pack(_MAGIC, len(header)) + header
    return start + _padding(len(start))


def byte_view(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, uint8 [nbytes], without a copy if it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def encode_rows(sample: SequenceSample) -> bytes:
    """The wire form of `sample`.

    Raises:
        SampleError: a key holds metadata only.
    """
    frames: list[Buffer] = [encode_start(sample)]
    for key in sample.keys:
        view = byte_view(sample[key]).cpu().numpy().data.cast("B")
        frames += (view, _padding(len(view)))
    return b"".join(frames)


def decode_rows(message: Buffer) -> SequenceSample:
    """The batch that `encode_rows` wrote. A writable buffer is used in place; others are copied once.

    Raises:
        TransportError: the message is cut off or is something else.
    """
    view = memoryview(message).cast("B")
    header, position = decode_start(view)
    body = view[position:]
    if len(body) == 0:
        return decode_tensors(header, torch.empty(0, dtype=torch.uint8))
    if body.readonly:
        copy = torch.empty(len(body), dtype=torch.uint8)
        copy.numpy().data[:] = body
        return decode_tensors(header, copy)
    return decode_tensors(header, torch.frombuffer(body, dtype=torch.uint8))


def decode_start(message: Buffer) -> tuple[RowsHeader, int]:
    """The header that `encode_start` wrote at the beginning of a message, and where the first tensor begins.

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
    return header, position + len(_padding(position))


def decode_tensors(header: RowsHeader, body: torch.Tensor) -> SequenceSample:
    """The batch of a header, whose tensors are views of `body`: uint8, on any device, aligned and padded to 16 bytes.

    Raises:
        TransportError: the body is cut off.
    """
    position = 0
    data: dict[str, torch.Tensor | None] = {}
    for key, size_bytes in zip(header.keys, header.sizes_bytes, strict=True):
        if position + size_bytes > len(body):
            raise TransportError(
                f"the tensors of a sample row message end after {len(body)} bytes, in the middle of key {key!r}"
            )
        schema = header.meta.schemas[key]
        shape = (-1, *schema.trailing) if size_bytes else (0, *schema.trailing)
        data[key] = body[position : position + size_bytes].view(DTYPES[schema.dtype]).view(shape)
        position += padded(size_bytes)
    return SequenceSample(header.meta.ids, header.meta.schemas, header.meta.seqlens, data)


def padded(size_bytes: int) -> int:
    """The size of a tensor in a message."""
    return -(-size_bytes // _ALIGN) * _ALIGN


def _padding(size_bytes: int) -> bytes:
    return bytes(-size_bytes % _ALIGN)


class _Rows(NamedTuple):
    schema: KeySchema
    seqlens: tuple[int, ...]
    tensor: torch.Tensor


class SampleStore:
    """The rows that one worker holds, by (sample id, key), each on the device that it came from.

    Rows are copied in, because views would keep the memory of their whole batch alive after `free`. Safe to use from
    several threads: a server thread may read while the main thread writes.

    Attributes:
        device_limit_bytes: rows on accelerators take no more than that; the oldest of them go to host memory.
    """

    def __init__(self, *, device_limit_bytes: int = 0) -> None:
        self.device_limit_bytes = device_limit_bytes
        self._lock = threading.Lock()
        self._rows: dict[str, dict[str, _Rows]] = {}
        self._size_bytes = 0
        self._on_device: dict[tuple[str, str], int] = {}  # rows on an accelerator, oldest first -> their bytes
        self._device_bytes = 0

    def put(self, sample: SequenceSample) -> None:
        """Keep a copy of all rows of `sample`; rows that are here already under the same id and key are replaced.

        Raises:
            SampleError: a key holds metadata only.
        """
        with torch.no_grad():
            fresh = {key: [rows.clone() for rows in sample.samples(key)] for key in sample.keys if len(sample) > 0}
        with self._lock:
            for key, tensors in fresh.items():
                schema = sample.schemas[key]
                for sample_id, lens, tensor in zip(sample.ids, sample.seqlens[key], tensors, strict=True):
                    held = self._rows.setdefault(sample_id, {})
                    if key in held:
                        self._forget(sample_id, key, held[key])
                    held[key] = _Rows(schema, lens, tensor)
                    self._size_bytes += tensor.nbytes
                    if tensor.device.type != "cpu":
                        self._on_device[sample_id, key] = tensor.nbytes
                        self._device_bytes += tensor.nbytes
            while self._device_bytes > self.device_limit_bytes:
                self._spill(*next(iter(self._on_device)))

    def get(self, ids: Sequence[str], keys: Sequence[str], *, device: torch.device = _HOST) -> SequenceSample:
        """A new batch of these samples, in this order, with these keys, on `device`.

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
            {key: _join([row.tensor for row in rows], device) for key, rows in columns.items()},
        )

    def missing(self, ids: Iterable[str], keys: Sequence[str]) -> list[tuple[str, str]]:
        """The (sample id, key) pairs that are not here."""
        with self._lock:
            return [(i, key) for i in ids for key in keys if key not in self._rows.get(i, {})]

    def free(self, ids: Iterable[str]) -> None:
        """Drop every row of these samples; ids that are not here are ignored, as a worker may never have held them."""
        with self._lock:
            for sample_id in ids:
                for key, rows in self._rows.pop(sample_id, {}).items():
                    self._forget(sample_id, key, rows)

    @property
    def size_bytes(self) -> int:
        """Bytes of all rows."""
        with self._lock:
            return self._size_bytes

    @property
    def device_bytes(self) -> int:
        """Bytes of the rows on accelerators."""
        with self._lock:
            return self._device_bytes

    @property
    def ids(self) -> tuple[str, ...]:
        """Ids of the samples with at least one row here, oldest first."""
        with self._lock:
            return tuple(self._rows)

    def __len__(self) -> int:
        with self._lock:
            return len(self._rows)

    def _forget(self, sample_id: str, key: str, rows: _Rows) -> None:
        self._size_bytes -= rows.tensor.nbytes
        self._device_bytes -= self._on_device.pop((sample_id, key), 0)

    def _spill(self, sample_id: str, key: str) -> None:
        """Move rows to host memory."""
        rows = self._rows[sample_id][key]
        self._rows[sample_id][key] = rows._replace(tensor=rows.tensor.to(_HOST))
        self._device_bytes -= self._on_device.pop((sample_id, key))

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


def _join(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Concatenate rows on `device`; those of one other device cross over in one piece."""
    if len({tensor.device for tensor in tensors}) > 1:
        tensors = [tensor.to(device) for tensor in tensors]
    return torch.cat(list(tensors)).to(device)
