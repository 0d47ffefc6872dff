from __future__ import annotations

import contextlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realrl.errors import TransportError
from realrl.runtime.transport.codec import (
    PullFailed,
    PullRows,
    decode_pull,
    decode_pull_failure,
    decode_reply,
    decode_request,
    encode,
)
from realrl.sched.messages import (
    PROTOCOL_VERSION,
    CallDone,
    CheckpointSaved,
    FreeSamples,
    Goodbye,
    Heartbeat,
    Hello,
    HooksDone,
    Initialize,
    KeySchema,
    LoadSamples,
    MoveRows,
    Per,
    ReadSamples,
    Ready,
    Reply,
    Request,
    RowsMoved,
    RowTransfer,
    RunCall,
    RunHooks,
    SampleMeta,
    SamplesFreed,
    SamplesLoaded,
    SamplesRead,
    SaveCheckpoint,
    Shutdown,
    Span,
    WorkerFailed,
)

META = SampleMeta(("0/1", "0/2"), {"x": KeySchema("int64", Per.TOKEN, (3,))}, {"x": ((4, 5), (6, 7))})
SPAN = Span("actor_gen", "call", 1.5, 2.5, {"tokens": 3, "share": 0.5, "note": "ü"})

REQUESTS: list[Request] = [
    Initialize(0, b"\x00\xff", ("tcp://127.0.0.1:1", ""), "/checkpoints/step_3"),
    LoadSamples(1, ("0/1",), (7,)),
    RunCall(2, 9, "actor_gen", 1, (("0/1",), ("0/2",)), (RowTransfer(0, 1, "rewards", ("0/1",)),)),
    ReadSamples(3, 1, {"": ("0/1",)}, {"": "actor"}, {"rewards": ("0/1",)}),
    FreeSamples(3, ("0/1",)),
    MoveRows(
        2, 9, "actor_gen", 1, (RowTransfer(1, 2, "rewards", ("0/1",)),), (RowTransfer(0, 1, "rewards", ("0/1",)),)
    ),
    RunHooks(2, 9, "actor_gen", 1, "after"),
    SaveCheckpoint(4, 2, "/checkpoints/.step_2"),
    Shutdown(5),
]
REPLIES: list[Reply] = [
    Hello(1, 4321, "tcp://127.0.0.1:5"),
    Ready(1, 0, ("a", "b"), 2, ("2 dropped",), (SPAN,)),
    SamplesLoaded(1, 1, META),
    CallDone(1, 2, 9, "actor_gen", 1, META, {"loss": 0.25}, (SPAN,), 12, 0.5, {"x": (1.5, 3.0)}, {"y": 2.0}),
    RowsMoved(1, 2, 9, "actor_gen", 1, (SPAN,), 12),
    HooksDone(1, 2, 9, "actor_gen", 1, "before", (SPAN,), 12, 0.5),
    SamplesRead(1, 3, 1, {"response": {"0/1": ("ü", "")}, "rewards": {"0/1": (0.5, -2.0)}, "x": {"0/1": (True,)}}),
    SamplesFreed(1, 3),
    CheckpointSaved(1, 4, 2, (SPAN,)),
    Goodbye(1, 5),
    WorkerFailed(1, 2, "actor_gen", 1, "ValueError", "bad", "Traceback ...", 1, ("0/1",)),
    Heartbeat(1, -1, "idle", 0.0),
]


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda r: type(r).__name__)
def test_requests_survive_the_wire(request_: Request) -> None:
    assert decode_request(encode(request_)) == request_


@pytest.mark.parametrize("reply", REPLIES, ids=lambda r: type(r).__name__)
def test_replies_survive_the_wire(reply: Reply) -> None:
    assert decode_reply(encode(reply)) == reply


def test_the_tables_above_are_complete() -> None:
    assert {type(r) for r in REQUESTS} == set(Request.__args__)
    assert {type(r) for r in REPLIES} == set(Reply.__args__)


def test_pulls_survive_the_wire() -> None:
    assert decode_pull(encode(PullRows(("rewards", "values"), ("a",)))) == PullRows(("rewards", "values"), ("a",))
    assert decode_pull_failure(encode(PullFailed("KeyError", "no"))) == PullFailed("KeyError", "no")


def test_nan_and_infinity_survive_the_wire() -> None:
    done = decode_reply(encode(CallDone(0, 0, 0, "c", 1, None, {"nan": math.nan, "inf": -math.inf}, ())))
    assert isinstance(done, CallDone)
    assert math.isnan(done.metrics["nan"])
    assert done.metrics["inf"] == -math.inf


def test_another_version_is_named() -> None:
    data = bytearray(encode(Shutdown(1)))
    data[2:4] = (PROTOCOL_VERSION + 6).to_bytes(2, "big")
    expected = f"version {PROTOCOL_VERSION + 6}, this process speaks version {PROTOCOL_VERSION}"
    with pytest.raises(TransportError, match=expected):
        decode_request(bytes(data))


@given(st.binary(max_size=64))
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(TransportError, match=f"protocol version {PROTOCOL_VERSION}|speaks version {PROTOCOL_VERSION}"):
        decode_reply(data)


@given(st.data())
def test_a_damaged_message_is_refused_or_still_a_message(data: st.DataObject) -> None:
    message = bytearray(encode(data.draw(st.sampled_from(REQUESTS))))
    message[data.draw(st.integers(0, len(message) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with contextlib.suppress(TransportError):
        assert isinstance(decode_request(bytes(message)), Request)


def test_a_reply_is_not_a_request() -> None:
    with pytest.raises(TransportError, match="not a valid message"):
        decode_request(encode(Goodbye(0, 0)))


def test_what_cannot_travel_is_named() -> None:
    with pytest.raises(TransportError, match=r"a CallDone message cannot be encoded.*object"):
        encode(CallDone(0, 0, 0, "c", 1, None, {"x": object()}, ()))
