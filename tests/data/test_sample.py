"""`SequenceSample`: the identities of its docstring, and every refusal."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from realrl.data.sample import SampleError, SequenceSample
from realrl.sched.messages import KeySchema, Per
from tests.data import samples as make

TOKEN = KeySchema("int64", Per.TOKEN)
SEQUENCE = KeySchema("float32", Per.SEQUENCE)


def as_dict(sample: SequenceSample) -> dict[str, dict[str, list[list[list[object]]]]]:
    """Sample id -> key -> per sequence -> rows, to compare batches without their order."""
    columns = {key: sample.sequences(key) for key in sample.keys}
    return {i: {k: [t.tolist() for t in columns[k][at]] for k in columns} for at, i in enumerate(sample.ids)}


@given(st.data())
def test_gather_undoes_a_contiguous_split(data: st.DataObject) -> None:
    x = data.draw(make.batches)
    assert SequenceSample.gather(x.split(data.draw(make.contiguous(len(x))))) == x


@given(st.data())
def test_split_keeps_samples_whole_and_loses_no_row(data: st.DataObject) -> None:
    x = data.draw(make.batches)
    parts = x.split(data.draw(make.scattered(len(x))))
    for key in x.keys:
        assert sum(part.n_rows(key) for part in parts) == x.n_rows(key)
    merged: dict[str, object] = {}
    for part in parts:
        merged.update(as_dict(part))
    assert merged == as_dict(x)
    assert as_dict(SequenceSample.gather(parts)) == as_dict(x)


@given(st.data())
def test_select_has_these_ids_in_this_order(data: st.DataObject) -> None:
    x = data.draw(make.batches)
    order = data.draw(st.permutations(x.ids))
    ids = order[: data.draw(st.integers(0, len(order)))]
    keys = data.draw(st.lists(st.sampled_from(x.keys), unique=True, min_size=1))
    picked = x.select(ids, keys)
    assert picked.ids == tuple(ids)
    assert picked.keys == tuple(keys)
    whole = as_dict(x)
    assert as_dict(picked) == {i: {k: whole[i][k] for k in keys} for i in ids}


@given(make.batches)
def test_remap_and_its_inverse_change_nothing(x: SequenceSample) -> None:
    names = {"input_ids": "tokens", "rewards": "scores", "old_logprobs": "prompt_mask", "prompt_mask": "old_logprobs"}
    there = x.remap(names)
    assert set(there.keys) == {names.get(key, key) for key in x.keys}
    assert torch.equal(there["tokens"], x["input_ids"])
    assert there.remap({new: old for old, new in names.items()}) == x


@given(make.batches)
def test_metadata_has_the_wire_form_of_its_batch(x: SequenceSample) -> None:
    assert x.meta() != x
    assert x.meta().describe() == x.describe()


@given(make.lengths)
def test_from_lists_packs_what_sequences_unpacks(lengths: list[list[int]]) -> None:
    x = make.make_sample(lengths)
    values = {key: (x.schemas[key], x.sequences(key)) for key in x.keys}
    assert SequenceSample.from_lists(x.ids, values) == x


@given(make.batches)
def test_cu_seqlens_are_the_offsets_of_all_sequences(x: SequenceSample) -> None:
    offsets = x.cu_seqlens("input_ids")
    assert offsets.dtype == torch.int32
    assert offsets[0] == 0
    assert tuple(offsets.diff().tolist()) == x.flat_seqlens("input_ids")
    assert offsets[-1] == x.n_rows("input_ids") == len(x["input_ids"])


@given(make.batches)
def test_derive_follows_the_granularity(x: SequenceSample) -> None:
    keys = ("prompt_mask", "old_logprobs", "rewards", "weight")
    derived = x.derive("input_ids", {key: (x.schemas[key], x[key]) for key in keys})
    assert derived == x.select(x.ids, keys)


@given(st.data())
def test_update_adds_keys(data: st.DataObject) -> None:
    x = data.draw(make.batches)
    left = x.select(x.ids, ("input_ids", "rewards"))
    right = x.select(x.ids, [key for key in x.keys if key != "input_ids"])
    assert left.update(right) == x


def test_update_takes_shared_keys_from_the_other() -> None:
    x = make.make_sample([[2], [3]], keys=("rewards",))
    other = SequenceSample(x.ids, x.schemas, x.seqlens, {"rewards": x["rewards"] + 1})
    assert torch.equal(x.update(other)["rewards"], x["rewards"] + 1)


def test_contiguous_parts_share_memory_with_the_batch() -> None:
    x = make.make_sample([[4], [2], [3]])
    part = x.split([[0], [1, 2]])[1]
    assert part["input_ids"].untyped_storage().data_ptr() == x["input_ids"].untyped_storage().data_ptr()


def test_metadata_can_be_rearranged_too() -> None:
    x = make.make_sample([[4, 1], [2], [3]])
    meta = x.meta()
    assert SequenceSample.gather(meta.split([[0], [1, 2]])) == meta
    assert meta.select(["s2", "s0"]) == x.select(["s2", "s0"]).meta()
    assert meta.cu_seqlens("input_ids").tolist() == [0, 4, 5, 7, 10]


def test_empty_parts_keep_their_keys() -> None:
    x = make.make_sample([[4], [2]])
    empty, full = x.split([[], [0, 1]])
    assert (len(empty), empty.keys, empty["hidden"].shape) == (0, x.keys, (0, 2, 3))
    assert SequenceSample.gather([empty, full]) == x


def test_gather_can_keep_some_keys_of_batches_that_differ() -> None:
    a = make.make_sample([[2]], "a")
    b = make.make_sample([[3]], "b", keys=("input_ids",))
    both = SequenceSample.gather([a, b], ["input_ids"])
    assert (both.ids, both.keys, both.n_rows("input_ids")) == (("a0", "b0"), ("input_ids",), 5)


def test_to_moves_every_tensor() -> None:
    moved = make.make_sample([[2]]).to(torch.device("meta"))
    assert {moved[key].device.type for key in moved.keys} == {"meta"}


def test_equality_looks_at_numbers() -> None:
    x = make.make_sample([[2], [3]])
    changed = {key: x[key].clone() for key in x.keys}
    changed["rewards"][1] += 1
    assert x == SequenceSample(x.ids, x.schemas, x.seqlens, {key: x[key].clone() for key in x.keys})
    assert x != SequenceSample(x.ids, x.schemas, x.seqlens, changed)
    assert x != 3


# ---------------------------------------------------------------- refusals


def ids_of(*lens: int, dtype: torch.dtype = torch.int64) -> list[list[torch.Tensor]]:
    return [[torch.zeros(n, dtype=dtype)] for n in lens]


@pytest.mark.parametrize(
    ("build", "message", "blamed"),
    [
        (lambda: SequenceSample.from_lists(["a", "b", "a"], {}), "sample id 'a' occurs twice", ("a",)),
        (
            lambda: SequenceSample.from_lists(["a", "b"], {"ids": (TOKEN, ids_of(1))}),
            "key 'ids' has values for 1 samples, but there are 2 ids",
            ("a", "b"),
        ),
        (
            lambda: SequenceSample.from_lists(["a"], {"ids": (TOKEN, ids_of(2, dtype=torch.int32))}),
            "key 'ids' of sample 'a' has dtype int32, its schema says int64",
            ("a",),
        ),
        (
            lambda: SequenceSample.from_lists(["a"], {"ids": (TOKEN, [[0.5]])}),  # type: ignore[list-item]
            "key 'ids' of sample 'a' has 0.5, which is no tensor",
            ("a",),
        ),
        (
            lambda: SequenceSample.from_lists(["a"], {"ids": (TOKEN, [[torch.zeros(2, 2, dtype=torch.int64)]])}),
            r"key 'ids' of sample 'a' has shape \[2, 2\], its schema says \[rows\]",
            ("a",),
        ),
        (
            lambda: SequenceSample.from_lists(["a"], {"ids": (TOKEN, [[torch.tensor(1)]])}),
            r"key 'ids' of sample 'a' has shape \[\], its schema says \[rows\]",
            ("a",),
        ),
        (
            lambda: SequenceSample.from_lists(["a", "b"], {"r": (SEQUENCE, [[torch.tensor(1.0)], [torch.zeros(2)]])}),
            r"key 'r' of sample 'b' needs one row per sequence, but its lengths are \(2\)",
            ("b",),
        ),
        (
            lambda: SequenceSample(("a",), {"w": KeySchema("bool", Per.SAMPLE)}, {"w": ((1, 1),)}, {"w": None}),
            r"key 'w' of sample 'a' needs one row per sample, but its lengths are \(1, 1\)",
            ("a",),
        ),
        (
            lambda: SequenceSample(("a", "b"), {"ids": TOKEN}, {"ids": ((1,), (-2,))}, {"ids": None}),
            r"key 'ids' of sample 'b' has a negative length: \(-2\)",
            ("b",),
        ),
        (
            lambda: SequenceSample(("a",), {"ids": TOKEN}, {"ids": ((1,), (2,))}, {"ids": None}),
            "key 'ids' has lengths for 2 samples, but there are 1 ids",
            ("a",),
        ),
        (
            lambda: SequenceSample(("a",), {"ids": TOKEN}, {"ids": ((3,),)}, {"ids": torch.zeros(2).long()}),
            r"key 'ids' has shape \[2\], but the lengths of samples \('a'\) ask for \[3\]",
            ("a",),
        ),
        (
            lambda: SequenceSample(("a",), {"ids": TOKEN}, {"ids": ((2,),)}, {"ids": torch.zeros(2)}),
            "key 'ids' has dtype float32, its schema says int64",
            ("a",),
        ),
        (
            lambda: SequenceSample(("a",), {"ids": KeySchema("int46", Per.TOKEN)}, {"ids": ((2,),)}, {"ids": None}),
            "key 'ids' has the unknown dtype 'int46'. Did you mean 'int64'",
            (),
        ),
        (
            lambda: SequenceSample(("a",), {"ids": TOKEN}, {}, {"ids": None}),
            "key 'ids' of a SequenceSample is in schemas but not in seqlens",
            ("a",),
        ),
        (
            lambda: SequenceSample(("a",), {}, {}, {"ids": None}),
            "key 'ids' of a SequenceSample is in data but not in schemas",
            ("a",),
        ),
    ],
)
def test_construction_refuses(build: object, message: str, blamed: tuple[str, ...]) -> None:
    with pytest.raises(SampleError, match=message) as caught:
        build()  # type: ignore[operator]
    assert caught.value.sample_ids == blamed


def gather_mixed() -> SequenceSample:
    return SequenceSample.gather([make.make_sample([[1]], "a"), make.make_sample([[2]], "b").meta()])


def gather_conflict() -> SequenceSample:
    other = SequenceSample(
        ("b0",), {"rewards": KeySchema("int64", Per.SEQUENCE)}, {"rewards": ((1,),)}, {"rewards": None}
    )
    return SequenceSample.gather([make.make_sample([[1]], "a"), other], ["rewards"])


X = make.make_sample([[2], [3], [1]])


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: X["input_idz"], "no key 'input_idz' in this batch; .* Did you mean 'input_ids'"),
        (lambda: X.meta()["rewards"], "key 'rewards' holds metadata only"),
        (lambda: X.select(["s0", "nobody"]), "sample 'nobody' is not in this batch of 3 samples"),
        (lambda: X.select(["s0", "s0"]), "sample id 's0' occurs twice"),
        (lambda: X.select(["s0"], ["nothing"]), "no key 'nothing'"),
        (lambda: X.split([[0], [2]]), "must name each index below 3 exactly once"),
        (lambda: X.split([[0, 1], [1, 2]]), "must name each index below 3 exactly once"),
        (lambda: X.split([[0, 1, 2, 3]]), "must name each index below 3 exactly once"),
        (lambda: X.remap({"nothing": "x"}), "no key 'nothing'"),
        (lambda: X.remap({"rewards": "weight"}), "two keys would both be called 'weight'"),
        (lambda: X.update(X.select(["s0", "s2", "s1"])), "batches differ at sample 1: 's1' in one, 's2' in the other"),
        (lambda: X.update(X.select(["s0"])), "batches differ at sample 1: 's1' in one, nothing in the other"),
        (lambda: X.derive("rewards", {}), "key 'rewards' is not per token"),
        (lambda: X.derive("input_ids", {"r": (SEQUENCE, torch.zeros(2))}), r"key 'r' has shape \[2\]"),
        (
            lambda: X.derive("input_ids", {"r": torch.zeros(2)}),  # type: ignore[dict-item]
            r"'r' is given as a Tensor, not as a pair of schema and tensor: \(KeySchema\('float32', Per.SEQUENCE\), ",
        ),
        (
            lambda: X.derive("input_ids", {"r": (KeySchema("int64", "token"), torch.zeros(2))}),  # type: ignore[arg-type]
            r"the schema of key 'r' says per='token', which must be one of Per.TOKEN, ",
        ),
        (
            lambda: X.derive("input_ids", {"r": (SEQUENCE, [0.0, 1.0])}),  # type: ignore[dict-item]
            "key 'r' has a list in the place of a tensor",
        ),
        (lambda: SequenceSample.from_lists(("a",), {"r": [[0]]}), "not as a pair of schema and lists"),  # type: ignore[dict-item]
        (lambda: SequenceSample.gather([]), "cannot gather an empty list"),
        (lambda: SequenceSample.gather([X, X]), "sample id 's0' occurs twice"),
        (lambda: SequenceSample.gather([X.select(["s0"], ["rewards"]), X]), "is in one batch but not in another"),
        (gather_mixed, r"tensor in some batches, but only metadata in the one with samples \('b0'\)"),
        (gather_conflict, "key 'rewards' is .*int64.* in one batch and .*float32.* in another"),
    ],
)
def test_use_refuses(act: object, message: str) -> None:
    with pytest.raises(SampleError, match=message):
        act()  # type: ignore[operator]
