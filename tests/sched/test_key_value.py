"""The key-value store of a run: what each request does, and the invariants under random ones."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realrl.sched.key_value import (
    AddTo,
    AppendTo,
    CompareSet,
    CountKeys,
    DeleteKey,
    KeyValueAnswer,
    KeyValueRequest,
    KeyValues,
    Limits,
    SetKeys,
    WaitFor,
)

DONE = KeyValueAnswer()


def ask(state: KeyValues[str], request: KeyValueRequest, client: str = "a") -> KeyValueAnswer:
    """The answer of a request that is answered at once, and releases nobody."""
    ((to, answer),) = state.handle(client, request, now_s=0.0)
    assert to == client
    return answer


def after(*requests: KeyValueRequest, limits: Limits | None = None) -> KeyValues[str]:
    state = KeyValues[str](limits)
    for request in requests:
        assert not ask(state, request).refusal
    return state


def value(state: KeyValues[str], key: str) -> bytes:
    return ask(state, WaitFor((key,), 0.0, with_values=True)).values[0]


def set_key(key: str, value: bytes = b"1") -> SetKeys:
    return SetKeys((key,), (value,))


@pytest.mark.parametrize(
    ("requests", "answer", "left"),
    [
        ([SetKeys(("k", "l"), (b"1", b"2"))], DONE, {"k": b"1", "l": b"2"}),
        ([set_key("k"), set_key("k", b"22")], DONE, {"k": b"22"}),
        ([AddTo("k", 3), AddTo("k", -5)], KeyValueAnswer(number=-2), {"k": b"-2"}),
        ([set_key("k", b"7"), AddTo("k", 0)], KeyValueAnswer(number=7), {"k": b"7"}),
        ([AppendTo("k", b"1"), AppendTo("k", b"2")], DONE, {"k": b"12"}),
        ([CompareSet("k", b"", b"1")], KeyValueAnswer((b"1",)), {"k": b"1"}),
        ([CompareSet("k", b"x", b"1")], KeyValueAnswer((b"x",)), {}),
        ([set_key("k"), CompareSet("k", b"1", b"2")], KeyValueAnswer((b"2",)), {"k": b"2"}),
        ([set_key("k"), CompareSet("k", b"3", b"2")], KeyValueAnswer((b"1",)), {"k": b"1"}),
        ([set_key("k"), CompareSet("k", b"", b"2")], KeyValueAnswer((b"1",)), {"k": b"1"}),
        ([set_key("k"), DeleteKey("k")], KeyValueAnswer(number=1), {}),
        ([DeleteKey("k")], KeyValueAnswer(number=0), {}),
        ([set_key("k"), set_key("l"), CountKeys()], KeyValueAnswer(number=2), {"k": b"1", "l": b"1"}),
        ([set_key("k"), CountKeys(("k", "l"))], KeyValueAnswer(number=1), {"k": b"1"}),
    ],
)
def test_what_a_request_does(
    requests: Sequence[KeyValueRequest], answer: KeyValueAnswer, left: dict[str, bytes]
) -> None:
    state = after(*requests[:-1])
    assert ask(state, requests[-1]) == answer
    assert ask(state, CountKeys()).number == len(left)
    assert {key: value(state, key) for key in left} == left


class TestWaits:
    def test_it_is_answered_by_the_last_of_its_keys(self) -> None:
        state = after(set_key("k", b"K"))
        assert state.handle("w", WaitFor(("k", "l", "m"), 9.0, with_values=True), now_s=0.0) == []
        assert state.handle("a", set_key("m", b"M"), now_s=1.0) == [("a", DONE)]
        answers = state.handle("a", set_key("l", b"L"), now_s=1.0)
        assert answers == [("a", DONE), ("w", KeyValueAnswer((b"K", b"L", b"M")))]
        assert state.next_deadline_s is None

    @pytest.mark.parametrize("made", [AddTo("k", 1), AppendTo("k", b"1"), CompareSet("k", b"", b"1"), set_key("k")])
    def test_whatever_makes_the_key_releases_all_that_wait(self, made: KeyValueRequest) -> None:
        state = KeyValues[str]()
        for client in ("first", "second"):
            assert state.handle(client, WaitFor(("k",), 9.0), now_s=0.0) == []
        assert [client for client, _ in state.handle("a", made, now_s=0.0)] == ["a", "first", "second"]

    def test_a_key_that_is_deleted_meanwhile_is_waited_for_again(self) -> None:
        state = KeyValues[str]()
        state.handle("w", WaitFor(("k", "l"), 9.0), now_s=0.0)
        for request in (set_key("k"), DeleteKey("k"), set_key("l")):
            assert not ask(state, request).refusal
        assert [client for client, _ in state.handle("a", set_key("k"), now_s=0.0)] == ["a", "w"]

    def test_it_ends_with_its_time_and_names_the_keys_that_are_missing(self) -> None:
        state = after(set_key("k0"))
        state.handle("w", WaitFor(tuple(f"k{i}" for i in range(6)), 2.5), now_s=1.0)
        assert state.next_deadline_s == 3.5
        assert state.expire(3.4) == []
        ((client, answer),) = state.expire(3.5)
        assert client == "w"
        assert answer.refusal == "no other worker has set 'k1', 'k2', 'k3' and 2 more keys within 2.5 s"
        assert state.handle("a", SetKeys(("k1",), (b"",)), now_s=4.0) == [("a", DONE)]  # and is forgotten

    def test_a_client_waits_once_at_a_time(self) -> None:
        state = KeyValues[str]()
        state.handle("w", WaitFor(("k",), 9.0), now_s=0.0)
        ((_, answer),) = state.handle("w", WaitFor(("l",), 9.0), now_s=0.0)
        assert answer.refusal == "a client that waits has sent another wait"


class TestLimits:
    LIMITS = Limits(key_bytes=8, value_bytes=100, total_bytes=1000)

    @pytest.mark.parametrize(
        ("request_", "refusal"),
        [
            (set_key("k" * 9), "the key 'kkkkkkkkk' is longer than 8 bytes"),
            (set_key("ü" * 5), "the key 'üüüüü' is longer than 8 bytes"),
            (WaitFor(("k" * 9,), 1.0), "the key 'kkkkkkkkk' is longer than 8 bytes"),
            (set_key("k", bytes(101)), "the value of 'k' has 101 bytes, the limit is 100"),
            (AppendTo("there", bytes(100)), "the value of 'there' has 101 bytes, the limit is 100"),
            (CompareSet("k", b"", bytes(101)), "the value of 'k' has 101 bytes, the limit is 100"),
            (AddTo("text", 1), "'text' holds b'abc', and nothing can be added to it"),
            (SetKeys(("k", "l"), (b"",)), "2 keys cannot be set to 1 values"),
            (
                SetKeys(tuple("klmn"), (b"",) * 4),
                "the value of 'k' does not fit: the store holds 1000 bytes at most",
            ),
            (
                WaitFor(tuple("klmn"), 1.0),
                "a wait for 'k', 'l', 'm' and 1 more keys does not fit: the store holds 1000",
            ),
        ],
    )
    def test_a_request_beyond_a_limit_changes_nothing(self, request_: KeyValueRequest, refusal: str) -> None:
        state = after(set_key("there"), set_key("text", b"abc"), limits=self.LIMITS)
        used_bytes = state.used_bytes
        assert ask(state, request_).refusal.startswith(refusal)
        assert (state.used_bytes, ask(state, CountKeys()).number, state.next_deadline_s) == (used_bytes, 2, None)

    def test_what_is_deleted_or_answered_makes_room(self) -> None:
        state = KeyValues[str](self.LIMITS)
        for _ in range(20):
            assert state.handle("w", WaitFor(("k", "l"), 1.0), now_s=0.0) == []
            assert len(state.expire(1.0)) == 1
            for request in (set_key("k", bytes(100)), set_key("k", bytes(90)), DeleteKey("k")):
                assert not ask(state, request).refusal
        assert state.used_bytes == 0


KEYS = st.sampled_from("klmn")
SOME_KEYS = st.lists(KEYS, min_size=1, max_size=3).map(tuple)
VALUES = st.binary(max_size=3)
REQUESTS = st.one_of(
    st.builds(lambda keys: SetKeys(keys, (b"1",) * len(keys)), SOME_KEYS),
    st.builds(WaitFor, SOME_KEYS, st.floats(0.5, 5.0), st.booleans()),
    st.builds(AddTo, KEYS, st.integers(-3, 3)),
    st.builds(AppendTo, KEYS, VALUES),
    st.builds(CompareSet, KEYS, VALUES, VALUES),
    st.builds(CountKeys, st.none() | SOME_KEYS),
    st.builds(DeleteKey, KEYS),
)


@given(st.lists(st.tuples(st.floats(0.0, 2.0), REQUESTS), max_size=40), st.sampled_from([600, 1500, 1 << 20]))
def test_every_request_gets_one_answer_and_the_limit_holds(
    requests: list[tuple[float, KeyValueRequest]], total_bytes: int
) -> None:
    state = KeyValues[int](Limits(total_bytes=total_bytes))
    answered: dict[int, KeyValueAnswer] = {}
    now_s = 0.0

    def note(answers: Sequence[tuple[int, KeyValueAnswer]]) -> None:
        for client, answer in answers:
            assert client not in answered
            answered[client] = answer
        assert 0 <= state.used_bytes <= total_bytes

    for client, (pause_s, request) in enumerate(requests):
        now_s += pause_s
        note(state.expire(now_s))
        note(state.handle(client, request, now_s=now_s))
        assert client in answered or isinstance(request, WaitFor)
        assert (state.next_deadline_s is None) == (len(answered) == client + 1)
    note(state.expire(now_s + 5.0))
    assert len(answered) == len(requests)
    for key in "klmn":
        state.handle(-1, DeleteKey(key), now_s=now_s)
    assert state.used_bytes == 0
