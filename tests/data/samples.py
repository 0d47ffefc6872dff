"""Hypothesis strategies for `SequenceSample`."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import strategies as st

from realrl.data.sample import SequenceSample
from realrl.sched.messages import KeySchema, Per

SCHEMAS = {
    "prompt_ids": KeySchema("int64", Per.TOKEN),
    "input_ids": KeySchema("int64", Per.TOKEN),
    "prompt_mask": KeySchema("bool", Per.TOKEN),
    "old_logprobs": KeySchema("float32", Per.TRANSITION),
    "hidden": KeySchema("bfloat16", Per.TOKEN, (2, 3)),
    "rewards": KeySchema("float32", Per.SEQUENCE),
    "weight": KeySchema("float64", Per.SAMPLE),
}


def rows_for(schema: KeySchema, n_tokens: int) -> int:
    return {Per.TOKEN: n_tokens, Per.TRANSITION: n_tokens - 1}.get(schema.per, 1)


def make_sample(lengths: list[list[int]], prefix: str = "s", keys: tuple[str, ...] = tuple(SCHEMAS)) -> SequenceSample:
    """A batch whose numbers all differ; `lengths` is tokens per sample, per sequence."""
    ids = tuple(f"{prefix}{i}" for i in range(len(lengths)))
    seqlens, data = {}, {}
    for at, key in enumerate(keys):
        schema = SCHEMAS[key]
        per_sample = [[1]] * len(lengths) if schema.per is Per.SAMPLE else lengths
        seqlens[key] = tuple(tuple(rows_for(schema, n) for n in lens) for lens in per_sample)
        n_rows = sum(map(sum, seqlens[key]))
        shape = (n_rows, *schema.trailing)
        count = torch.arange(torch.Size(shape).numel()).reshape(shape)
        data[key] = count % 3 == 0 if schema.dtype == "bool" else (count + 1000 * at).to(getattr(torch, schema.dtype))
    return SequenceSample(ids, {key: SCHEMAS[key] for key in keys}, seqlens, data)


lengths = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=1, max_size=8)
batches = lengths.map(make_sample)


@st.composite
def contiguous(draw: st.DrawFn, n: int) -> list[list[int]]:
    """A partition of range(n) into contiguous parts, some possibly empty."""
    cuts = sorted(draw(st.lists(st.integers(0, n), max_size=4)))
    bounds = [0, *cuts, n]
    return [list(range(a, b)) for a, b in pairwise(bounds)]


@st.composite
def scattered(draw: st.DrawFn, n: int) -> list[list[int]]:
    """Any partition of range(n)."""
    order = draw(st.permutations(range(n)))
    return [[order[i] for i in part] for part in draw(contiguous(n))]
