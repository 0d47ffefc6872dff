"""Checks of a `SequenceSample`'s constructors, and the error that they raise."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import torch

from realrl.errors import RunError, did_you_mean
from realrl.sched.messages import KeySchema, Per

SeqLens = tuple[tuple[int, ...], ...]

DTYPES: Mapping[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        *("bool", "uint8", "int8", "int16", "int32", "int64"),
        *("float16", "bfloat16", "float32", "float64"),
    )
}


class SampleError(RunError, ValueError):
    """A batch that contradicts itself or its schema, or a key or id that it does not hold.

    Attributes:
        sample_ids: the sample ids concerned, as far as they are known.
    """

    def __init__(self, message: str, *, remedy: str | None = None, sample_ids: Iterable[str] = ()) -> None:
        super().__init__(message, remedy=remedy)
        self.sample_ids = tuple(sample_ids)


def check_ids(ids: tuple[str, ...]) -> None:
    """Refuse an id that occurs twice."""
    if len(set(ids)) != len(ids):
        seen: set[str] = set()
        twice = next(i for i in ids if i in seen or seen.add(i))  # type: ignore[func-returns-value]
        raise SampleError(f"sample id {twice!r} occurs twice in one batch", sample_ids=(twice,))


def check_pairs(values: Mapping[str, object], what: str) -> None:
    """Refuse values of a constructor that are no pairs of a schema and `what`, "tensor" or "lists"."""
    for key, pair in values.items():
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], KeySchema)):
            raise SampleError(
                f"key {key!r} is given as a {type(pair).__name__}, not as a pair of schema and {what}: "
                f"(KeySchema('float32', Per.SEQUENCE), {what})"
            )
        if not isinstance(pair[0].per, Per):
            names = ", ".join(f"Per.{per.name}" for per in Per)
            raise SampleError(f"the schema of key {key!r} says per={pair[0].per!r}, which must be one of {names}")


def check_seqlens(key: str, schema: KeySchema, ids: tuple[str, ...], seqlens: SeqLens) -> None:
    """Refuse an unknown dtype, lengths for other samples than `ids`, and lengths that the granularity excludes."""
    if schema.dtype not in DTYPES:
        raise SampleError(f"key {key!r} has the unknown dtype {schema.dtype!r}.{did_you_mean(schema.dtype, DTYPES)}")
    if len(seqlens) != len(ids):
        raise SampleError(
            f"key {key!r} has lengths for {len(seqlens)} samples, but there are {len(ids)} ids", sample_ids=ids
        )
    fixed = {Per.SEQUENCE: "sequence", Per.SAMPLE: "sample"}.get(schema.per)
    least, most = (end(chain.from_iterable(seqlens), default=1) for end in (min, max))
    if (least >= 0 if fixed is None else least == most == 1) and (
        schema.per is not Per.SAMPLE or all(len(lens) == 1 for lens in seqlens)
    ):
        return
    for sample_id, lens in zip(ids, seqlens, strict=True):
        if any(n < 0 for n in lens):
            raise SampleError(
                f"key {key!r} of sample {sample_id!r} has a negative length: {short(lens)}", sample_ids=(sample_id,)
            )
        if fixed is not None and (any(n != 1 for n in lens) or (schema.per is Per.SAMPLE and len(lens) != 1)):
            raise SampleError(
                f"key {key!r} of sample {sample_id!r} needs one row per {fixed}, but its lengths are {short(lens)}",
                sample_ids=(sample_id,),
            )


def check_row(key: str, schema: KeySchema, tensor: torch.Tensor, sample_id: str) -> None:
    """Refuse one sequence's tensor by dtype or row shape, naming the sample."""
    if not isinstance(tensor, torch.Tensor):
        raise SampleError(
            f"key {key!r} of sample {sample_id!r} has {tensor!r:.40}, which is no tensor of {schema.dtype}",
            sample_ids=(sample_id,),
        )
    if tensor.dtype != DTYPES.get(schema.dtype):
        raise SampleError(
            f"key {key!r} of sample {sample_id!r} has dtype {_name(tensor.dtype)}, its schema says {schema.dtype}",
            sample_ids=(sample_id,),
        )
    is_single = tuple(tensor.shape) == schema.trailing and schema.per in (Per.SEQUENCE, Per.SAMPLE)
    if not is_single and (tensor.dim() == 0 or tuple(tensor.shape[1:]) != schema.trailing):
        wanted = ", ".join(("rows", *map(str, schema.trailing)))
        raise SampleError(
            f"key {key!r} of sample {sample_id!r} has shape {list(tensor.shape)}, its schema says [{wanted}]",
            sample_ids=(sample_id,),
        )


def check_tensor(key: str, schema: KeySchema, tensor: torch.Tensor, n_rows: int, ids: tuple[str, ...]) -> None:
    """Refuse a packed tensor whose dtype, row shape or number of rows is not what schema and lengths say."""
    if not isinstance(tensor, torch.Tensor):
        raise SampleError(f"key {key!r} has a {type(tensor).__name__} in the place of a tensor", sample_ids=ids)
    if tensor.dtype != DTYPES[schema.dtype]:
        raise SampleError(
            f"key {key!r} has dtype {_name(tensor.dtype)}, its schema says {schema.dtype}", sample_ids=ids
        )
    if tuple(tensor.shape) != (n_rows, *schema.trailing):
        raise SampleError(
            f"key {key!r} has shape {list(tensor.shape)}, but the lengths of samples {short(ids)} "
            f"ask for {[n_rows, *schema.trailing]}",
            sample_ids=ids,
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def short(items: Sequence[object]) -> str:
    """At most four items, for a message."""
    shown = ", ".join(map(repr, items[:4]))
    return f"({shown}, ... {len(items)} in all)" if len(items) > 4 else f"({shown})"
