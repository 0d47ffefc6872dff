"""The wire format: a four-byte head (magic, protocol version), then msgpack of a tagged message.

Everything that crosses a process boundary is one of the typed messages below; nothing on the wire can execute code.
Decoding checks every field's type, so a message that decodes is a message that the schema allows.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from realrl.errors import TransportError
from realrl.sched.key_value import KeyValueAnswer, KeyValueRequest
from realrl.sched.messages import PROTOCOL_VERSION, Reply, Request
from realrl.sched.nodes.messages import FromAgent, ToAgent

_MAGIC = b"RL"
_HEAD = struct.Struct(">2sH")
_PREFIX = _HEAD.pack(_MAGIC, PROTOCOL_VERSION)


class PullRows(msgspec.Struct, frozen=True, tag=True):
    """Ask a producer for the rows of some keys, in the order of `ids`; with `waits`, answered when it has them all."""

    keys: tuple[str, ...]
    ids: tuple[str, ...]
    waits: bool = False


class PullFailed(msgspec.Struct, frozen=True, tag=True):
    """The producer could not serve a `PullRows`."""

    error: str  # class name of the exception
    message: str


_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Reply)
_pulls: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(PullRows)
_key_value_requests: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(KeyValueRequest)
_key_value_answers: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(KeyValueAnswer)
_from_agents: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(FromAgent)
_to_agents: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToAgent)
_pull_failures: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(PullFailed)


Message = Request | Reply | PullRows | PullFailed | KeyValueRequest | KeyValueAnswer | FromAgent | ToAgent


def encode(message: Message) -> bytes:
    """Serialise one message.

    Raises:
        TransportError: a field holds a value that no message may carry, a tensor for example.
    """
    try:
        return _PREFIX + _encoder.encode(message)
    except (TypeError, ValueError, OverflowError) as error:
        raise TransportError(
            f"a {type(message).__name__} message cannot be encoded: {error}",
            remedy="Messages carry plain numbers, text, bytes and tuples only; convert tensors and arrays first.",
        ) from error


def decode_request(data: bytes) -> Request:
    """Parse a request. Raises `TransportError` for another protocol version or for anything malformed."""
    request: Request = _decode(data, _requests, "request")
    return request


def decode_reply(data: bytes) -> Reply:
    """Parse a reply. Raises `TransportError` for another protocol version or for anything malformed."""
    reply: Reply = _decode(data, _replies, "reply")
    return reply


def decode_pull(data: bytes) -> PullRows:
    """Parse a request for rows. Raises `TransportError` like `decode_request`."""
    pull: PullRows = _decode(data, _pulls, "request for sample rows")
    return pull


def decode_pull_failure(data: bytes) -> PullFailed:
    """Parse a producer's refusal. Raises `TransportError` like `decode_request`."""
    failure: PullFailed = _decode(data, _pull_failures, "answer about sample rows")
    return failure


def decode_key_value_request(data: bytes) -> KeyValueRequest:
    """Parse a request to the key-value store. Raises `TransportError` like `decode_request`."""
    request: KeyValueRequest = _decode(data, _key_value_requests, "request to the key-value store")
    return request


def decode_key_value_answer(data: bytes) -> KeyValueAnswer:
    """Parse the key-value store's answer. Raises `TransportError` like `decode_request`."""
    answer: KeyValueAnswer = _decode(data, _key_value_answers, "answer of the key-value store")
    return answer


def decode_from_agent(data: bytes) -> FromAgent:
    """Parse a message of an agent. Raises `TransportError` like `decode_request`."""
    message: FromAgent = _decode(data, _from_agents, "message of an agent")
    return message


def decode_to_agent(data: bytes) -> ToAgent:
    """Parse a message to an agent. Raises `TransportError` like `decode_request`."""
    message: ToAgent = _decode(data, _to_agents, "message to an agent")
    return message


def _decode(data: bytes, decoder: msgspec.msgpack.Decoder[Any], what: str) -> Any:
    if data[: _HEAD.size] != _PREFIX:
        raise _wrong_head(data, what)
    try:
        return decoder.decode(memoryview(data)[_HEAD.size :])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # ValueError: text that is not UTF-8
        raise TransportError(
            f"a {what} of {len(data)} bytes is not a valid message of protocol version {PROTOCOL_VERSION}: {error}",
            remedy="Run the same release of realrl on every node.",
        ) from error


def _wrong_head(data: bytes, what: str) -> TransportError:
    if len(data) < _HEAD.size or data[:2] != _MAGIC:
        return TransportError(
            f"received {len(data)} bytes that are not a realrl {what} (starting {data[:8]!r}); "
            f"this process speaks protocol version {PROTOCOL_VERSION}",
            remedy="Something other than realrl is talking to this port; let realrl choose a free one.",
        )
    version = _HEAD.unpack_from(data)[1]
    return TransportError(
        f"received a {what} of protocol version {version}, this process speaks version {PROTOCOL_VERSION}",
        remedy="Run the same release of realrl on every node.",
    )
