"""Rows on the wire and in the store."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from realrl.data.rows import SampleStore, byte_view, decode_rows, encode_rows
from realrl.data.sample import SampleError, SequenceSample
from realrl.errors import TransportError
from realrl.sched.messages import KeySchema, Per
from tests.data import samples as make


@given(make.batches, st.sampled_from([bytes, bytearray, memoryview]))
def test_rows_survive_the_wire(x: SequenceSample, buffer: type) -> None:
    y = decode_rows(buffer(encode_rows(x)))
    assert y == x
    assert y.keys == x.keys


def test_rows_without_tokens_survive() -> None:
    x = make.make_sample([[1], [1]])
    assert x.n_rows("old_logprobs") == 0
    assert decode_rows(encode_rows(x)) == x
    nobody = x.select([])
    assert decode_rows(encode_rows(nobody)) == nobody


def test_every_dtype_survives_bit_by_bit() -> None:
    values = {
        "float16": torch.tensor([1.5, float("inf")], dtype=torch.float16),
        "bfloat16": torch.tensor([1e30, -2.0], dtype=torch.bfloat16),
        "float64": torch.tensor([1e-300, 2.0], dtype=torch.float64),
        "uint8": torch.tensor([0, 255], dtype=torch.uint8),
        "int8": torch.tensor([-128, 127], dtype=torch.int8),
        "int16": torch.tensor([-1, 300], dtype=torch.int16),
        "int32": torch.tensor([-1, 70000], dtype=torch.int32),
        "bool": torch.tensor([True, False]),
    }
    x = SequenceSample.from_lists(["a"], {k: (KeySchema(k, Per.TOKEN), [[v]]) for k, v in values.items()})
    assert decode_rows(encode_rows(x)) == x


def test_sending_copies_no_tensor_and_a_writable_buffer_is_used_in_place() -> None:
    x = make.make_sample([[4]], keys=("input_ids",))
    view = byte_view(x["input_ids"])
    x["input_ids"][0] = 77
    assert view[:8].numpy().tobytes() == (77).to_bytes(8, "little")
    message = bytearray(encode_rows(x))
    y = decode_rows(message)
    y["input_ids"][0] = 78
    assert decode_rows(message)["input_ids"][0] == 78


def test_metadata_cannot_be_sent() -> None:
    with pytest.raises(SampleError, match="metadata only"):
        encode_rows(make.make_sample([[2]]).meta())


@given(st.integers(0, 10_000))
def test_a_cut_message_is_refused(cut: int) -> None:
    message = encode_rows(make.make_sample([[4], [2]], keys=("input_ids", "weight")))
    with pytest.raises(TransportError):
        decode_rows(message[: cut % len(message)])


def test_another_message_is_refused() -> None:
    with pytest.raises(TransportError, match="expected to hold sample rows"):
        decode_rows(b"hello, this is something else")
    with pytest.raises(TransportError, match="header of a sample row message cannot be read"):
        decode_rows(b"RRL1\x02\x00\x00\x00{}")


# ---------------------------------------------------------------- the store


@given(st.data())
def test_the_store_gives_what_was_put(data: st.DataObject) -> None:
    x = data.draw(make.batches)
    store = SampleStore()
    for part in x.split(data.draw(make.scattered(len(x)))):
        keys = data.draw(st.permutations(part.keys))
        cut = data.draw(st.integers(0, len(keys)))
        store.put(part.select(part.ids, keys[:cut]))
        store.put(part.select(part.ids, keys[cut:]))
    ids = data.draw(st.permutations(x.ids))
    assert store.get(ids, x.keys) == x.select(ids)
    assert store.size_bytes == sum(x[key].nbytes for key in x.keys)
    assert set(store.ids) == set(x.ids)
    freed, kept = ids[: len(ids) // 2], ids[len(ids) // 2 :]
    store.free(freed)
    assert store.size_bytes == sum(x.select(kept)[key].nbytes for key in x.keys)
    assert store.get(kept, x.keys) == x.select(kept)
    store.free(x.ids)
    assert (store.size_bytes, len(store)) == (0, 0)


def test_putting_again_replaces() -> None:
    store = SampleStore()
    x = make.make_sample([[2], [3]], keys=("rewards",))
    store.put(x)
    store.put(SequenceSample(x.ids, x.schemas, x.seqlens, {"rewards": x["rewards"] + 5}))
    assert torch.equal(store.get(["s1"], ["rewards"])["rewards"], x["rewards"][1:] + 5)
    assert store.size_bytes == 8


def test_later_changes_to_a_batch_do_not_reach_the_store() -> None:
    store = SampleStore()
    x = make.make_sample([[2]], keys=("rewards",))
    before = x["rewards"].clone()
    store.put(x)
    x["rewards"].zero_().sub_(9)
    assert torch.equal(store.get(["s0"], ["rewards"])["rewards"], before)


def test_a_missing_row_is_named() -> None:
    store = SampleStore()
    store.put(make.make_sample([[2]], keys=("rewards",)))
    assert store.missing(["s0", "s1"], ["rewards", "values"]) == [("s0", "values"), ("s1", "rewards"), ("s1", "values")]
    with pytest.raises(SampleError, match="sample 's0' has no key 'values' on this worker, only \\('rewards'\\)"):
        store.get(["s0"], ["values"])
    with pytest.raises(SampleError, match="sample 's7' is not on this worker, which holds 1 samples") as caught:
        store.get(["s7"], ["rewards"])
    assert caught.value.sample_ids == ("s7",)
    with pytest.raises(SampleError, match="without sample ids"):
        store.get([], ["rewards"])
    store.free(["s7"])


def test_a_thread_reads_while_another_writes() -> None:
    store = SampleStore()
    keep = make.make_sample([[5], [3]], "keep")
    store.put(keep)
    stop = threading.Event()

    def read() -> int:
        n_reads = 0
        while n_reads == 0 or not stop.is_set():
            assert store.get(keep.ids, keep.keys) == keep
            assert store.size_bytes >= sum(keep[key].nbytes for key in keep.keys)
            n_reads += 1
        return n_reads

    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(read)
        for i in range(50):
            batch = make.make_sample([[2], [3]], f"{i}/")
            store.put(batch)
            store.free(batch.ids)
        stop.set()
        assert reader.result() > 0
    assert set(store.ids) == set(keep.ids)
