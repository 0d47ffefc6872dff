"""Rows of dataset files are checked, and become texts: a prompt, and the answers of the dataset's kind.

Fields of a row (`DatasetKind.forms`): `prompt` is a string, or chat messages ``[{"role": ..., "content": ...}, ...]``.
`answer` (or `response`, `completion`), `chosen` and `rejected` are strings, or messages that follow the prompt's, or
repeat them first. `messages` is a whole conversation instead: its last answer is what a prompt leaves out, and what an
unpaired `label` (true or false) judges; all answers in it are learned where the kind is prompts with answers. A
preference pair whose texts stand alone may leave its prompt out or empty.

Answers get an end-of-sequence token, unless the row says ``"complete": false``. A reward model reads its score at the
last token: one trained on complete texts knows nothing of a text cut off without an end-of-sequence token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from realrl.data.chat_template import render
from realrl.data.conversations import Answer, Message, as_messages, is_assistant, render_answer
from realrl.data.kinds import ANSWER_FIELDS, DatasetKind
from realrl.data.readers import RawRow
from realrl.errors import DataError, did_you_mean, is_text

NO_METADATA = ("id", "prompt", "complete")
_ALONE = "has no message before the answer"


@dataclass(frozen=True)
class Row:
    """A checked row.

    Attributes:
        prompt: text after the chat template.
        has_template: True if a template made the prompt.
        answers: the 0 to 2 answers of the kind.
        label: True if the answer of an unpaired row is good, and False for other kinds.
        metadata: JSON object of a prompt's other fields, empty for other kinds.
        messages: JSON list of the messages that made a prompt; empty where none did.
    """

    row_id: str
    prompt: str
    has_template: bool
    answers: tuple[Answer, ...] = ()
    label: bool = False
    metadata: bytes = b""
    messages: bytes = b""


class RowChecker:
    """Makes a `Row` of what a file holds.

    Args:
        has_template: strings go through the chat template too.
        tokenizer: a `transformers` fast tokenizer.
    """

    def __init__(self, kind: DatasetKind, *, has_template: bool, tokenizer: Any) -> None:
        self._kind = kind
        self._has_template = has_template
        self._tokenizer = tokenizer

    def check(self, row: RawRow, row_id: str) -> Row:
        """Return a row under this name; raises `DataError` with the row's place where it is unusable."""
        is_complete = row.fields.get("complete", True)
        if not isinstance(is_complete, bool):
            raise DataError(f"{row.where} has a field complete that is neither true nor false: {is_complete!r}")
        try:
            if self._kind is DatasetKind.PROMPT:
                return self._prompt_row(row, row_id)
            if self._kind is DatasetKind.PREFERENCE_PAIR:
                prompt, has_template, answers = self._pair(row, is_complete)
            else:
                prompt, has_template, answer = self._answered(row, is_complete)
                answers = (answer,)
        except _MisfitError as error:
            raise DataError(f"{row.where} does not fit: {error.message}", remedy=error.remedy) from error
        except _MissingError as error:
            forms = ", or ".join(" and ".join(form) for form in self._kind.forms)
            remedy = f"A row holds {forms}; dataset.fields.NAME=FIELD says what the file calls one of them."
            raise DataError(error.message, remedy=remedy) from None
        label = self._kind is DatasetKind.UNPAIRED and _label(row)
        return Row(row_id, prompt, has_template, answers, label)

    def _prompt_row(self, row: RawRow, row_id: str) -> Row:
        others = {name: value for name, value in row.fields.items() if name not in NO_METADATA}
        if row.fields.get("prompt") is not None or row.fields.get("messages") is None:
            prompt, messages = self._prompt(row)
        else:
            messages = as_messages(row.fields["messages"], row.where, "messages")
            while messages and is_assistant(messages[-1]):
                messages.pop()
            if not messages:
                raise _bad_conversation(row, "messages", _ALONE)
            prompt = self._render(messages, row)
        has_template = self._has_template or bool(messages)
        encoded = _to_json(messages) if messages else b""
        return Row(row_id, prompt, has_template, metadata=_to_json(others), messages=encoded)

    def _prompt(self, row: RawRow) -> tuple[str, list[Message]]:
        """The prompt's text, and its messages if it has any."""
        prompt = row.fields.get("prompt")
        if prompt is None:
            raise _missing(row, "prompt")
        if not isinstance(prompt, str):
            messages = as_messages(prompt, row.where, "prompt")
            return self._render(messages, row), messages
        if not prompt.strip():
            raise DataError(f"{row.where} has an empty prompt", remedy="Remove the row, or write a prompt.")
        return self._render(_said(prompt), row) if self._has_template else prompt, []

    def _answered(self, row: RawRow, is_complete: bool) -> tuple[str, bool, Answer]:
        """A prompt with one answer; whether a template made the prompt stands between them."""
        if "messages" in row.fields and not any(field in row.fields for field in ANSWER_FIELDS):
            return self._conversation(row, is_complete)
        prompt, messages = self._prompt(row)
        field = _answer_field(row)
        value = _present(row, field)
        text = _single_text(value, row, field)
        if text is not None:
            return prompt, self._has_template or bool(messages), Answer(((text, True),), is_complete)
        before = messages or _said(row.fields["prompt"])
        whole = _following(before, as_messages(value, row.where, field))
        _check_end(row, field, whole)
        first = next(i for i, message in enumerate(whole) if i >= len(before) and is_assistant(message))
        return self._rendered(row, whole, first, is_complete)

    def _conversation(self, row: RawRow, is_complete: bool) -> tuple[str, bool, Answer]:
        messages = as_messages(row.fields["messages"], row.where, "messages")
        while messages and not is_assistant(messages[-1]):
            messages.pop()
        if not messages:
            raise _bad_conversation(row, "messages", "has no assistant message")
        first = len(messages) - 1
        if self._kind is DatasetKind.PROMPT_ANSWER:
            first = next(i for i, message in enumerate(messages) if is_assistant(message))
        if first == 0:
            raise _bad_conversation(row, "messages", _ALONE)
        return self._rendered(row, messages, first, is_complete)

    def _pair(self, row: RawRow, is_complete: bool) -> tuple[str, bool, tuple[Answer, ...]]:
        """A prompt with a chosen and a rejected answer."""
        values = {field: _present(row, field) for field in ("chosen", "rejected")}
        texts = [_single_text(value, row, field) for field, value in values.items()]
        prompt = row.fields.get("prompt")
        if None in texts:
            return self._pair_of_conversations(row, values, is_complete)
        answers = tuple([Answer(((text, True),), is_complete) for text in texts if text is not None])
        if prompt is not None and prompt != "":
            text, messages = self._prompt(row)
            return text, self._has_template or bool(messages), answers
        if self._has_template:
            raise DataError(
                f"{row.where} has no prompt to put into the chat template", remedy="Set dataset.chat_template=false."
            )
        return "", False, answers

    def _pair_of_conversations(
        self, row: RawRow, values: Mapping[str, object], is_complete: bool
    ) -> tuple[str, bool, tuple[Answer, ...]]:
        """Two conversations, alike up to an answer; what follows is chosen or rejected."""
        prompt = row.fields.get("prompt")
        before = _said(prompt) if isinstance(prompt, str) and prompt else []
        if prompt is not None and not isinstance(prompt, str):
            before = as_messages(prompt, row.where, "prompt")
        both = [
            _following(
                before, as_messages(_said(value, "assistant") if isinstance(value, str) else value, row.where, f)
            )
            for f, value in values.items()
        ]
        n_shared = next((i for i, (a, b) in enumerate(zip(*both, strict=False)) if a != b), min(map(len, both)))
        first = min(n_shared, *(len(whole) - 1 for whole in both))
        while first > 0 and not all(is_assistant(whole[first]) for whole in both):
            first -= 1
        for field, whole in zip(values, both, strict=True):
            _check_end(row, field, whole)
        if first == 0:
            raise _bad_conversation(row, "chosen", "and its rejected do not begin with the same messages")
        rendered = [self._rendered(row, whole, first, is_complete) for whole in both]
        return rendered[0][0], True, tuple(answer for _, _, answer in rendered)

    def _rendered(
        self, row: RawRow, messages: Sequence[Message], first: int, is_complete: bool
    ) -> tuple[str, bool, Answer]:
        self._require_template(row)
        try:
            prompt, answer = render_answer(self._tokenizer, messages, first, is_complete=is_complete)
        except DataError as error:
            raise _MisfitError(error.message, remedy=error.remedy) from error
        return prompt, True, answer

    def _render(self, messages: Sequence[Message], row: RawRow) -> str:
        self._require_template(row)
        try:
            return render(self._tokenizer, messages)
        except DataError as error:
            raise _MisfitError(error.message) from error

    def _require_template(self, row: RawRow) -> None:
        if not self._tokenizer.chat_template:
            raise DataError(
                f"{row.where} needs a chat template, and the tokenizer has none",
                remedy="Use plain strings with dataset.chat_template=false, or add a chat_template to the tokenizer.",
            )


class _MisfitError(DataError):
    """A row that the chat template cannot render."""


class _MissingError(DataError):
    """A row that lacks a field."""


def name_of_row(row: RawRow, number: int) -> str:
    """Return a row's `id`, or else its number.

    Raises:
        DataError: the id is no name.
    """
    row_id = row.fields.get("id", number)
    if isinstance(row_id, bool) or not isinstance(row_id, str | int) or row_id == "":
        raise DataError(f"{row.where} has an id that is neither a string nor a number: {repr(row_id)[:100]}")
    if isinstance(row_id, str) and not is_text(row_id):
        raise DataError(f"{row.where} has an id of {len(row_id)} characters that is no name: {row_id[:40]!r}...")
    return str(row_id)


def _to_json(value: object) -> bytes:
    """JSON; values that it lacks become strings."""
    return msgspec.json.encode(value, enc_hook=str)


def _said(text: str, role: str = "user") -> list[Message]:
    return [{"role": role, "content": text}]


def _following(before: Sequence[Message], answer: list[Message]) -> list[Message]:
    """The messages of a prompt and of its answer, which may repeat them, or the last one behind a system message."""
    n = len(before)
    if not n or answer[:n] == list(before):
        return answer
    turns = [i for i, message in enumerate(answer[:-1]) if message["content"] == before[-1]["content"]]
    return answer if n == 1 and turns and not is_assistant(answer[turns[0]]) else [*before, *answer]


def _check_end(row: RawRow, field: str, messages: Sequence[Message]) -> None:
    if not is_assistant(messages[-1]):
        raise _bad_conversation(row, field, "must be one assistant message, or a conversation that ends with one")


def _bad_conversation(row: RawRow, field: str, what: str) -> DataError:
    return DataError(
        f"{row.where}: its {field} {what}",
        remedy='Write the messages in their order, a user\'s first: {"role": "user", ...}, {"role": "assistant", ...}.',
    )


def _answer_field(row: RawRow) -> str:
    present = [field for field in ANSWER_FIELDS if field in row.fields]
    if len(present) > 1:
        raise DataError(f"{row.where} has both {present[0]!r} and {present[1]!r}", remedy="Keep one of them.")
    return present[0] if present else ANSWER_FIELDS[0]


def _present(row: RawRow, field: str) -> object:
    value = row.fields.get(field)
    if value is None:
        raise _missing(row, field)
    if value == "":
        raise DataError(f"{row.where} has an empty {field}", remedy="Remove the row, or write a text.")
    return value


def _single_text(value: object, row: RawRow, field: str) -> str | None:
    """The text of a string or of a single assistant message; None for more messages."""
    if isinstance(value, str):
        return value
    messages = as_messages(value, row.where, field)
    if len(messages) > 1:
        return None
    if not is_assistant(messages[0]):
        raise _bad_conversation(row, field, "must be one assistant message, or a conversation that ends with one")
    return str(_present(RawRow({field: messages[0]["content"]}, row.where), field))


def _label(row: RawRow) -> bool:
    value = row.fields.get("label")
    if value is None:
        raise _missing(row, "label")
    if not isinstance(value, bool):
        raise DataError(
            f"{row.where} has a label that is neither true nor false: {value!r}",
            remedy="Decide which ratings count as good, and write true or false.",
        )
    return value


def _missing(row: RawRow, field: str) -> DataError:
    wanted = row.names.get(field, field)
    names = ", ".join(map(repr, list(row.fields)[:8]))
    told = f"its fields are {names}.{did_you_mean(wanted, row.fields)}" if names else "it is an empty object"
    named = "" if wanted == field else f" (dataset.fields.{field})"
    return _MissingError(f'{row.where} has no "{wanted}"{named}; {told}')
