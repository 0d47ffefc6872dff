"""Datasets: rows of a file become samples of token ids.

Fields of a row: `prompt` (a string, or chat messages ``[{"role": ..., "content": ...}, ...]``), `answer` (or
`response`, `completion`) or `chosen` and `rejected` (strings, or one assistant message), `label` (true or false) beside
an answer that is good or bad by itself, and optionally `id`. Other fields of a prompt's row are kept as `metadata`, for
reward functions to read; those of other kinds are ignored. A preference pair whose texts stand alone may leave its
prompt out or empty. Rows without `id` are called by their number from 0. Answers get an end-of-sequence token, unless
the row says ``"complete": false``. A reward model reads its score at the last token: one trained on complete texts
knows nothing of a text cut off without an end-of-sequence token.

Chat messages are always rendered with the tokenizer's chat template, strings only under ``dataset.chat_template``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import msgspec
import torch

from realrl.config.schema import BUILT_IN, REASONING_TASKS, DatasetConfig
from realrl.data.chat_template import render
from realrl.data.kinds import DatasetKind
from realrl.data.readers import RawRow, read_rows
from realrl.data.reasoning_tasks import task_rows
from realrl.data.sample import SequenceSample
from realrl.data.tiny import toy_rows
from realrl.data.tokenizer import encode_batch
from realrl.errors import DataError, did_you_mean, is_text
from realrl.sched.messages import KeySchema, Per

ANSWER_FIELDS = ("answer", "response", "completion")
PROMPT_FIELDS = ("id", "prompt", "complete")
TINY_ROWS = 512
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
class _Row:
    """A checked row: `prompt` as text after the chat template, and the 0 to 2 `answers` of its kind.

    The answers of a row that `is_complete` end with an end-of-sequence token. `label` is True if the answer of an
    unpaired row is good, and False for other kinds. `metadata` is the JSON object of a prompt's other fields, empty for
    other kinds.
    """

    row_id: str
    prompt: str
    has_template: bool
    answers: tuple[str, ...]
    is_complete: bool
    label: bool
    metadata: bytes


class Dataset:
    """Tokenised rows, packed.

    Attributes:
        row_ids: names of the usable rows.
        prompt_lens: tokens of each row's prompt.
        seqlens: tokens of each row's sequences; a sequence is the prompt with one of its answers, or alone.
        n_dropped: number of rows left out because they are too long.
        notes: messages for the user, e.g. "3 of 512 prompts longer than 128 tokens were dropped".
    """

    def __init__(
        self,
        kind: DatasetKind,
        sequences: Mapping[str, list[list[int]]],
        *,
        n_dropped: int,
        notes: Sequence[str],
        labels: Sequence[bool] = (),
        metadata: Sequence[bytes] = (),
    ) -> None:
        """Pack the rows.

        Args:
            sequences: row id -> token ids of the prompt and of each answer.
            labels: one for each unpaired row, none for other kinds.
            metadata: a JSON object for each prompt; empty stands for empty objects.
        """
        self.kind = kind
        self.row_ids = tuple(sequences)
        self.n_dropped = n_dropped
        self.notes = tuple(notes)
        tokens: list[int] = []
        is_prompt: list[bool] = []
        self.prompt_lens = tuple(len(prompt) for prompt, *_ in sequences.values())
        self.seqlens: list[tuple[int, ...]] = []
        for prompt, *answers in sequences.values():
            for answer in answers or [[]]:
                tokens += prompt + answer
                is_prompt += [True] * len(prompt) + [False] * len(answer)
            self.seqlens.append(tuple(len(prompt) + len(answer) for answer in answers or [[]]))
        self._columns = {"input_ids": torch.tensor(tokens, dtype=torch.int64), "prompt_mask": torch.tensor(is_prompt)}
        if kind is DatasetKind.PROMPT:
            self._columns = {"prompt_ids": self._columns["input_ids"]}
        self._offsets = [0, *accumulate(map(sum, self.seqlens))]
        self._labels = torch.tensor(labels, dtype=torch.bool) if kind is DatasetKind.UNPAIRED else None
        self._metadata = list(metadata) or [b"{}"] * len(sequences)

    def __len__(self) -> int:
        return len(self.row_ids)

    @property
    def digest(self) -> str:
        """Hex digest of the tokenised rows with their labels and metadata."""
        digest = hashlib.blake2b(repr((self.kind.name, self.prompt_lens, self.seqlens)).encode(), digest_size=8)
        packed = [*self._columns.values(), *([] if self._labels is None else [self._labels])]
        for part in (*(tensor.numpy().tobytes() for tensor in packed), *self._metadata):
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


def load_dataset(config: DatasetConfig, kind: DatasetKind, tokenizer: Any, *, is_held_out: bool = False) -> Dataset:
    """Read, check and tokenise a dataset; ``path: tiny`` is the built-in toy task, see `task_rows` for
    ``path: reasoning_gym:<task>``.

    Rows whose prompt has more than `max_prompt_tokens` tokens, or an answer more than `max_answer_tokens` (its
    end-of-sequence token counts), are dropped and counted.

    Args:
        kind: decides the fields that each row must have.
        tokenizer: a `transformers` fast tokenizer with an end-of-sequence token.
        is_held_out: take rows of the toy task whose prompts its training rows do not have.

    Raises:
        DataError: a file or row is unusable, ids repeat, or every row is too long.
    """
    if config.path == BUILT_IN:
        toy = toy_rows(kind, TINY_ROWS, _TINY_SEED)
        if is_held_out:
            seen = {row["prompt"] for row in toy}
            others = toy_rows(kind, 2 * TINY_HELD_OUT_ROWS, _TINY_HELD_OUT_SEED)
            toy = [row for row in others if row["prompt"] not in seen][:TINY_HELD_OUT_ROWS]
        raw = [RawRow(row, f"toy task, row {i}") for i, row in enumerate(toy, start=1)]
    else:
        raw = task_rows(config.path) if config.path.startswith(REASONING_TASKS) else read_rows(config.path)
    rows = [_check_row(row, i, kind, config, tokenizer) for i, row in enumerate(raw)]
    _check_ids(rows, raw)
    return _tokenise(rows, kind, config, tokenizer)


# ---------------------------------------------------------------- checking


def _check_row(row: RawRow, index: int, kind: DatasetKind, config: DatasetConfig, tokenizer: Any) -> _Row:
    row_id = row.fields.get("id", index)
    if isinstance(row_id, bool) or not isinstance(row_id, str | int) or row_id == "":
        raise DataError(f"{row.where} has an id that is neither a string nor a number: {repr(row_id)[:100]}")
    if isinstance(row_id, str) and not is_text(row_id):
        raise DataError(f"{row.where} has an id of {len(row_id)} characters that is no name: {row_id[:40]!r}...")
    is_complete = row.fields.get("complete", True)
    if not isinstance(is_complete, bool):
        raise DataError(f"{row.where} has a field complete that is neither true nor false: {is_complete!r}")
    prompt, has_template = _prompt(row, kind, config, tokenizer)
    answers: tuple[str, ...] = ()
    if kind in (DatasetKind.PROMPT_ANSWER, DatasetKind.UNPAIRED):
        answers = (_answer(row, _answer_field(row)),)
    elif kind is DatasetKind.PREFERENCE_PAIR:
        answers = (_answer(row, "chosen"), _answer(row, "rejected"))
    label = kind is DatasetKind.UNPAIRED and _label(row)
    metadata = _metadata(row) if kind is DatasetKind.PROMPT else b""
    return _Row(str(row_id), prompt, has_template, answers, is_complete, label, metadata)


def _metadata(row: RawRow) -> bytes:
    """JSON of the fields that do not make the prompt; values that JSON lacks become strings."""
    others = {name: value for name, value in row.fields.items() if name not in PROMPT_FIELDS}
    return msgspec.json.encode(others, enc_hook=str)


def _prompt(row: RawRow, kind: DatasetKind, config: DatasetConfig, tokenizer: Any) -> tuple[str, bool]:
    """The prompt's text, and True if a chat template made it."""
    prompt = row.fields.get("prompt")
    if kind is DatasetKind.PREFERENCE_PAIR and (prompt is None or prompt == ""):
        if config.chat_template:
            raise DataError(
                f"{row.where} has no prompt to put into the chat template", remedy="Set dataset.chat_template=false."
            )
        return "", False
    if prompt is None:
        raise DataError(f'{row.where} has no "prompt"; {_fields(row, "prompt")}', remedy="Name the field prompt.")
    if isinstance(prompt, str):
        if not prompt.strip():
            raise DataError(f"{row.where} has an empty prompt", remedy="Remove the row, or write a prompt.")
        if not config.chat_template:
            return prompt, False
        return _render([{"role": "user", "content": prompt}], row, tokenizer), True
    return _render(_messages(prompt, row, "prompt"), row, tokenizer), True


def _messages(value: object, row: RawRow, field: str) -> list[dict[str, str]]:
    if not isinstance(value, list):
        raise DataError(
            f"{row.where} has a {field} of type {type(value).__name__}",
            remedy='It must be a string, or a list of messages {"role": ..., "content": ...}.',
        )
    if not value:
        raise DataError(f"{row.where} has a {field} without messages")
    for number, message in enumerate(value, start=1):
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise DataError(
                f"{row.where}: message {number} of its {field} is not an object with the strings role and content"
            )
    return value


def _render(messages: list[dict[str, str]], row: RawRow, tokenizer: Any) -> str:
    if not tokenizer.chat_template:
        raise DataError(
            f"{row.where} needs a chat template, and the tokenizer has none",
            remedy="Use plain strings with dataset.chat_template=false, or add a chat_template to the tokenizer.",
        )
    try:
        return render(tokenizer, messages)
    except DataError as error:
        raise DataError(f"{row.where} does not fit: {error.message}") from error


def _answer_field(row: RawRow) -> str:
    present = [field for field in ANSWER_FIELDS if field in row.fields]
    if len(present) > 1:
        raise DataError(f"{row.where} has both {present[0]!r} and {present[1]!r}", remedy="Keep one of them.")
    return present[0] if present else ANSWER_FIELDS[0]


def _answer(row: RawRow, field: str) -> str:
    value = row.fields.get(field)
    if value is None:
        raise DataError(f'{row.where} has no "{field}"; {_fields(row, field)}')
    if not isinstance(value, str):
        messages = _messages(value, row, field)
        if len(messages) > 1 or messages[0]["role"] != "assistant":
            raise DataError(
                f"{row.where}: its {field} must be one assistant message",
                remedy="Move the messages before it into the prompt.",
            )
        value = messages[0]["content"]
    if not value:
        raise DataError(f"{row.where} has an empty {field}", remedy="Remove the row, or write a text.")
    return value


def _label(row: RawRow) -> bool:
    value = row.fields.get("label")
    if value is None:
        raise DataError(
            f'{row.where} has no "label"; {_fields(row, "label")}',
            remedy="Write true for a good answer, false for a bad one.",
        )
    if not isinstance(value, bool):
        raise DataError(
            f"{row.where} has a label that is neither true nor false: {value!r}",
            remedy="Decide which ratings count as good, and write true or false.",
        )
    return value


def _fields(row: RawRow, wanted: str) -> str:
    names = ", ".join(map(repr, list(row.fields)[:8]))
    return f"its fields are {names}.{did_you_mean(wanted, row.fields)}" if names else "it is an empty object"


def _check_ids(rows: Sequence[_Row], raw: Sequence[RawRow]) -> None:
    first: dict[str, int] = {}
    for i, row in enumerate(rows):
        j = first.setdefault(row.row_id, i)
        if j != i:
            raise DataError(
                f"{raw[i].where} has the id {row.row_id!r}, which {raw[j].where} has already",
                remedy="Ids must be unique; rows without one are called by their number from 0.",
            )


# ---------------------------------------------------------------- tokenising


def _tokenise(rows: Sequence[_Row], kind: DatasetKind, config: DatasetConfig, tokenizer: Any) -> Dataset:
    # A template writes its own start token.
    plain = iter(encode_batch(tokenizer, [r.prompt for r in rows if not r.has_template], with_start=True))
    templated = iter(encode_batch(tokenizer, [r.prompt for r in rows if r.has_template], with_start=False))
    answers = iter(encode_batch(tokenizer, [a for r in rows for a in r.answers], with_start=False))
    sequences: dict[str, list[list[int]]] = {}
    long_prompts: list[int] = []
    long_answers: list[int] = []
    for row in rows:
        prompt = next(templated if row.has_template else plain)
        end = [tokenizer.eos_token_id] if row.is_complete else []
        parts = [next(answers) + end for _ in row.answers]
        longest = max(map(len, parts), default=0)
        if not all([prompt + answer for answer in parts] or [prompt]):
            raise DataError(f"the tokenizer makes no token of row {row.row_id!r} of {config.path}")
        if len(prompt) > config.max_prompt_tokens:
            long_prompts.append(len(prompt))
        elif longest > config.max_answer_tokens:
            long_answers.append(longest)
        else:
            sequences[row.row_id] = [prompt, *parts]
    notes = []
    for what, lengths in (("prompt", long_prompts), ("answer", long_answers)):
        limit = getattr(config, f"max_{what}_tokens")
        if len(lengths) == len(rows):
            raise DataError(
                f"all {len(rows)} {what}s of {config.path} are longer than {limit} tokens",
                remedy=f"Raise dataset.max_{what}_tokens; the shortest has {min(lengths)}.",
            )
        if lengths:
            verb = "was" if len(lengths) == 1 else "were"
            notes.append(f"{len(lengths)} of {len(rows)} {what}s longer than {limit} tokens {verb} dropped")
    if not sequences:
        raise DataError(f"no row of {config.path} is left: {'; '.join(notes)}", remedy="Raise both limits.")
    if kind is DatasetKind.UNPAIRED:
        sequences = _with_other_answers(sequences, config.path)
    labels = [row.label for row in rows if row.row_id in sequences]
    metadata = [row.metadata for row in rows if row.row_id in sequences]
    n_dropped = len(long_prompts) + len(long_answers)
    return Dataset(kind, sequences, n_dropped=n_dropped, notes=notes, labels=labels, metadata=metadata)


def _with_other_answers(sequences: Mapping[str, list[list[int]]], path: str) -> dict[str, list[list[int]]]:
    """Append to each row the answer of its partner in `other_rows`."""
    if len(sequences) < 2:
        raise DataError(
            f"{path} has a single usable row",
            remedy="Unpaired rows need the answer of another one to compare with: give at least two.",
        )
    rows = list(sequences.values())
    others = other_rows([prompt for prompt, _ in rows])
    return {row_id: [*row, rows[other][1]] for (row_id, row), other in zip(sequences.items(), others, strict=True)}


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
