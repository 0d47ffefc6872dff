"""Datasets: rows of files become samples of token ids. `realrl.data.dataset_rows` says which fields a row has.

A field `id` names the row; rows without one are called by their number from 0. Where several files are named, the name
of the file comes first: ``math/17``. Fields of a prompt's row that do not make the prompt are kept as `metadata`, for
reward functions to read; those of other kinds are ignored.

Chat messages are always rendered with the tokenizer's chat template, strings only under ``dataset.chat_template``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch

from realrl.config.schema import BUILT_IN, REASONING_TASKS, DatasetConfig, DatasetFile
from realrl.data.dataset_rows import Row, RowChecker, name_of_row
from realrl.data.kinds import ANSWER_FIELDS, DatasetKind
from realrl.data.readers import RawRow, read_rows, with_names
from realrl.data.reasoning_tasks import task_rows
from realrl.data.sample import SequenceSample
from realrl.data.tiny import N_ROWS, toy_rows
from realrl.data.tokenizer import encode_batch
from realrl.errors import DataError
from realrl.sched.messages import KeySchema, Per

TINY_HELD_OUT_ROWS = 64
_TINY_SEED, _TINY_HELD_OUT_SEED = 0, 1

_SCHEMAS = {
    "prompt_ids": KeySchema("int64", Per.TOKEN),
    "input_ids": KeySchema("int64", Per.TOKEN),
    "prompt_mask": KeySchema("bool", Per.TOKEN),
    "label": KeySchema("bool", Per.SAMPLE),
    "metadata": KeySchema("uint8", Per.TOKEN),
}


@dataclass(frozen=True)
class TokenRow:
    """A row as tokens.

    Attributes:
        answers: the tokens of each answer, and for each token True if it is given, not learned.
        label: True if the answer of an unpaired row is good, and False for other kinds.
        metadata: JSON object of a prompt's other fields, empty for other kinds.
        messages: JSON list of the messages that made a prompt; empty where none did.
    """

    row_id: str
    prompt: list[int]
    answers: list[tuple[list[int], list[bool]]]
    label: bool = False
    metadata: bytes = b""
    messages: bytes = b""

    @property
    def whole_metadata(self) -> bytes:
        """The metadata with the messages of the prompt, as its field `prompt`."""
        if not self.messages:
            return self.metadata
        others = self.metadata[1:-1]
        return b'{"prompt":' + self.messages + (b"," + others if others else b"") + b"}"


class Dataset:
    """Tokenised rows, packed.

    Attributes:
        row_ids: names of the usable rows.
        prompt_lens: tokens of each row's prompt.
        seqlens: tokens of each row's sequences; a sequence is the prompt with one of its answers, or alone.
        n_dropped: number of rows left out because they are too long.
        notes: messages for the user, e.g. "3 of 512 prompts longer than 128 tokens were dropped".
    """

    def __init__(self, kind: DatasetKind, rows: Sequence[TokenRow], *, n_dropped: int, notes: Sequence[str]) -> None:
        self.kind = kind
        self.row_ids = tuple(row.row_id for row in rows)
        self.n_dropped = n_dropped
        self.notes = tuple(notes)
        tokens: list[int] = []
        is_prompt: list[bool] = []
        self.prompt_lens = tuple(len(row.prompt) for row in rows)
        self.seqlens: list[tuple[int, ...]] = []
        for row in rows:
            answers = row.answers or [([], [])]
            for answer, is_given in answers:
                tokens += row.prompt + answer
                is_prompt += [True] * len(row.prompt) + is_given
            self.seqlens.append(tuple(len(row.prompt) + len(answer) for answer, _ in answers))
        self._columns = {"input_ids": torch.tensor(tokens, dtype=torch.int64), "prompt_mask": torch.tensor(is_prompt)}
        if kind is DatasetKind.PROMPT:
            self._columns = {"prompt_ids": self._columns["input_ids"]}
        self._offsets = [0, *accumulate(map(sum, self.seqlens))]
        labels = [row.label for row in rows]
        self._labels = torch.tensor(labels, dtype=torch.bool) if kind is DatasetKind.UNPAIRED else None
        self._fields = [row.metadata for row in rows]
        self._metadata = [row.whole_metadata for row in rows]

    def __len__(self) -> int:
        return len(self.row_ids)

    @property
    def digest(self) -> str:
        """Hex digest of the tokenised rows with their labels and other fields."""
        digest = hashlib.blake2b(repr((self.kind.name, self.prompt_lens, self.seqlens)).encode(), digest_size=8)
        packed = [*self._columns.values(), *([] if self._labels is None else [self._labels])]
        for part in (*(tensor.numpy().tobytes() for tensor in packed), *self._fields):
            digest.update(part)
        return digest.hexdigest()

    @property
    def max_token_id(self) -> int:
        return max(int(packed.max()) for packed in self._columns.values() if packed.dtype == torch.int64)

    def samples(self, ids: Sequence[str], rows: Sequence[int]) -> SequenceSample:
        """Rows as samples with the keys of the dataset's kind; ``ids[i]`` is made from row ``rows[i]``.

        A row may be asked for several times, under different ids. A preference pair gives two sequences per sample:
        chosen, then rejected. An unpaired row gives two as well: its prompt with its own answer, then with the answer
        of its partner (`other_rows`).
        """
        seqlens = tuple(self.seqlens[row] for row in rows)
        data = {
            key: torch.cat([packed[:0], *(packed[self._offsets[r] : self._offsets[r + 1]] for r in rows)])
            for key, packed in self._columns.items()
        }
        sample = SequenceSample(tuple(ids), {key: _SCHEMAS[key] for key in data}, dict.fromkeys(data, seqlens), data)
        if self.kind is DatasetKind.PROMPT:
            return sample.update(self._metadata_of(sample.ids, rows))
        if self._labels is None:
            return sample
        labels = self._labels[torch.tensor(rows, dtype=torch.int64)]
        return sample.update(sample.derive("input_ids", {"label": (_SCHEMAS["label"], labels)}))

    def _metadata_of(self, ids: tuple[str, ...], rows: Sequence[int]) -> SequenceSample:
        objects = [self._metadata[row] for row in rows]
        packed = torch.tensor(list(b"".join(objects)), dtype=torch.uint8)
        lengths = tuple((len(item),) for item in objects)
        return SequenceSample(ids, {"metadata": _SCHEMAS["metadata"]}, {"metadata": lengths}, {"metadata": packed})


def answer_in(metadata: bytes) -> str:
    """Return the answer in a row's JSON object, its own or the last of its messages; "" if there is none."""
    row = json.loads(metadata)
    own = next((row[field] for field in ANSWER_FIELDS if isinstance(row.get(field), str)), "")
    messages = row.get("messages")
    if own or not isinstance(messages, list) or not messages or not isinstance(messages[-1], dict):
        return own
    last = messages[-1]
    return last["content"] if last.get("role") == "assistant" and isinstance(last.get("content"), str) else ""


def load_dataset(config: DatasetConfig, kind: DatasetKind, tokenizer: Any, *, is_held_out: bool = False) -> Dataset:
    """Read, check and tokenise a dataset; ``path: tiny`` is the built-in toy task, see `task_rows` for
    ``path: reasoning_gym:<task>``.

    Rows whose prompt has more than `max_prompt_tokens` tokens, or an answer more than `max_answer_tokens` (its
    end-of-sequence token counts, and all messages after the first answer), are dropped and counted.

    Args:
        kind: decides the fields that each row must have.
        tokenizer: a `transformers` fast tokenizer with an end-of-sequence token.
        is_held_out: take rows of the toy task whose prompts its training rows do not have.

    Raises:
        DataError: a file or row is unusable, ids repeat, or every row is too long.
    """
    checker = RowChecker(kind, has_template=config.chat_template, tokenizer=tokenizer)
    rows: list[Row] = []
    raw: list[RawRow] = []
    for name, source in config.sources.items():
        found = _raw_rows(source, kind, is_held_out)
        start = f"{name}/" if name else ""
        rows += [checker.check(row, start + name_of_row(row, i)) for i, row in enumerate(found)]
        raw += found
    _check_ids(rows, raw)
    return _tokenise(rows, kind, config, tokenizer)


def _raw_rows(source: DatasetFile, kind: DatasetKind, is_held_out: bool) -> list[RawRow]:
    if source.path.startswith(REASONING_TASKS):
        return with_names(task_rows(source.path), source.fields.given, source.path)
    if source.path != BUILT_IN:
        return read_rows(source.path, source.fields.given)
    toy = toy_rows(kind, N_ROWS, _TINY_SEED)
    if is_held_out:
        seen = {row["prompt"] for row in toy}
        others = toy_rows(kind, 2 * TINY_HELD_OUT_ROWS, _TINY_HELD_OUT_SEED)
        toy = [row for row in others if row["prompt"] not in seen][:TINY_HELD_OUT_ROWS]
    rows = [RawRow(row, f"toy task, row {i}") for i, row in enumerate(toy, start=1)]
    return with_names(rows, source.fields.given, source.path)


def _check_ids(rows: Sequence[Row], raw: Sequence[RawRow]) -> None:
    first: dict[str, int] = {}
    for i, row in enumerate(rows):
        j = first.setdefault(row.row_id, i)
        if j != i:
            raise DataError(
                f"{raw[i].where} has the id {row.row_id!r}, which {raw[j].where} has already",
                remedy="Ids must be unique; rows without one are called by their number from 0.",
            )


# ---------------------------------------------------------------- tokenising


def _token_rows(rows: Sequence[Row], tokenizer: Any) -> Iterator[TokenRow]:
    # A template writes its own start token.
    plain = iter(encode_batch(tokenizer, [r.prompt for r in rows if not r.has_template], with_start=True))
    templated = iter(encode_batch(tokenizer, [r.prompt for r in rows if r.has_template], with_start=False))
    texts = [text for row in rows for answer in row.answers for text, _ in answer.pieces]
    pieces = iter(encode_batch(tokenizer, texts, with_start=False))
    for row in rows:
        answers = []
        for answer in row.answers:
            parts = [(next(pieces), not is_learned) for _, is_learned in answer.pieces]
            parts += [([tokenizer.eos_token_id], False)] if answer.takes_end else []
            is_given = [flag for tokens, flag in parts for _ in tokens]
            answers.append(([token for tokens, _ in parts for token in tokens], is_given))
        prompt = next(templated if row.has_template else plain)
        yield TokenRow(row.row_id, prompt, answers, row.label, row.metadata, row.messages)


def _tokenise(rows: Sequence[Row], kind: DatasetKind, config: DatasetConfig, tokenizer: Any) -> Dataset:
    source = config.described
    kept: list[TokenRow] = []
    long_prompts: list[int] = []
    long_answers: list[int] = []
    for row in _token_rows(rows, tokenizer):
        longest = max((len(answer) for answer, _ in row.answers), default=0)
        if not all([row.prompt + answer for answer, _ in row.answers] or [row.prompt]):
            raise DataError(f"the tokenizer makes no token of row {row.row_id!r} of {source}")
        if len(row.prompt) > config.max_prompt_tokens:
            long_prompts.append(len(row.prompt))
        elif longest > config.max_answer_tokens:
            long_answers.append(longest)
        else:
            kept.append(row)
    notes = []
    for what, lengths in (("prompt", long_prompts), ("answer", long_answers)):
        limit = getattr(config, f"max_{what}_tokens")
        if len(lengths) == len(rows):
            raise DataError(
                f"all {len(rows)} {what}s of {source} are longer than {limit} tokens",
                remedy=f"Raise dataset.max_{what}_tokens; the shortest has {min(lengths)}.",
            )
        if lengths:
            verb = "was" if len(lengths) == 1 else "were"
            notes.append(f"{len(lengths)} of {len(rows)} {what}s longer than {limit} tokens {verb} dropped")
    if not kept:
        raise DataError(f"no row of {source} is left: {'; '.join(notes)}", remedy="Raise both limits.")
    if kind is DatasetKind.UNPAIRED:
        kept = _with_other_answers(kept, source)
    return Dataset(kind, kept, n_dropped=len(long_prompts) + len(long_answers), notes=notes)


def _with_other_answers(rows: Sequence[TokenRow], path: str) -> list[TokenRow]:
    """Append to each row the answer of its partner in `other_rows`."""
    if len(rows) < 2:
        raise DataError(
            f"{path} has a single usable row",
            remedy="Unpaired rows need the answer of another one to compare with: give at least two.",
        )
    others = other_rows([row.prompt for row in rows])
    return [
        replace(row, answers=[*row.answers, rows[other].answers[0]]) for row, other in zip(rows, others, strict=True)
    ]


def other_rows(prompts: Sequence[object]) -> list[int]:
    """Partner of each row: the next row, cyclically, whose prompt differs; the next row if all prompts are equal.

    Ethayarajh et al. 2024, "KTO: model alignment as prospect theoretic optimization", section 4, pairs each prompt of a
    batch with the next one's answer. Here partners follow from the dataset alone, so they do not depend on the order of
    samples, the batch or the ranks.
    """
    n = len(prompts)
    others = [(i + 1) % n for i in range(n)]
    if all(prompt == prompts[0] for prompt in prompts):
        return others
    for _ in range(2):  # the second pass carries the first rows' partners around the end
        for i in reversed(range(n)):
            if prompts[i] == prompts[(i + 1) % n]:
                others[i] = others[(i + 1) % n]
    return others
