"""Conversations: lists of chat messages, and the text that a chat template makes of them, turn by turn.

    messages   user      assistant    user      assistant
    text       prompt ───► learned ───► given ───► learned      what `render_answer` tells apart

A template is a program and marks nothing. The beginning of a turn is where the text of all messages before it, with the
beginning of an answer, ends; its end is the special token that closes it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any

from realrl.data.chat_template import render
from realrl.errors import DataError

Message = Mapping[str, Any]
"""``{"role": ..., "content": ...}``, with other keys that the template may read."""

_ROLES = {"human": "user", "gpt": "assistant"}  # of messages with `from` and `value`


@dataclass(frozen=True)
class Answer:
    """Texts that follow a prompt.

    Attributes:
        pieces: texts in their order, each with True if it is learned; the first one is.
        takes_end: an end-of-sequence token follows, which is learned too.
    """

    pieces: tuple[tuple[str, bool], ...]
    takes_end: bool


def as_messages(value: object, where: str, field: str) -> list[Message]:
    """Return the messages of a field, each with the strings role and content.

    Messages with `from` and `value` are taken too, and contents that are lists of texts. Keys without value, which
    column stores add, are left out.

    Raises:
        DataError: the value is no list of messages; names the message.
    """
    if not isinstance(value, list):
        raise DataError(
            f"{where} has a {field} of type {type(value).__name__}",
            remedy='It must be a string, or a list of messages {"role": ..., "content": ...}.',
        )
    if not value:
        raise DataError(f"{where} has a {field} without messages")
    messages = [_as_message(message) for message in value]
    if None in messages:
        number = messages.index(None) + 1
        raise DataError(f"{where}: message {number} of its {field} is not an object with the strings role and content")
    return [message for message in messages if message is not None]


def _as_message(value: object) -> Message | None:
    if not isinstance(value, dict):
        return None
    message = {key: part for key, part in value.items() if part is not None}
    if "role" not in message and "from" in message:
        role, content = message.pop("from"), message.pop("value", None)
        message |= {"role": _ROLES.get(role, role) if isinstance(role, str) else role, "content": content}
    content = message.get("content", "" if message.get("tool_calls") else None)
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        texts = [part.get("text") for part in content]
        content = "".join(texts) if all(isinstance(text, str) for text in texts) else None
    if not isinstance(message.get("role"), str) or not isinstance(content, str):
        return None
    return {**message, "content": content}


def split_turns(tokens: Sequence[int], is_given: Sequence[bool]) -> tuple[list[int], list[tuple[list[int], bool]]]:
    """Return the prompt of a sequence, and the runs of tokens after it, each with True if it was given.

    Args:
        is_given: True on the prompt, and on what was put between generated tokens, such as the answer of a tool.
    """
    runs = [
        ([token for token, _ in run], flag)
        for flag, run in groupby(zip(tokens, is_given, strict=True), key=lambda pair: bool(pair[1]))
    ]
    return (runs[0][0], runs[1:]) if runs and runs[0][1] else ([], runs)


def conversation(before: object, prompt: str, turns: Sequence[tuple[str, bool]]) -> list[Message]:
    """Return a prompt and what followed as messages: the assistant's, and those of the role tool that were given.

    Args:
        before: the prompt's messages, if it is made of any.
        prompt: its text.
        turns: texts after the prompt, each with True if it was given.
    """
    said = [{"role": "tool" if is_given else "assistant", "content": text} for text, is_given in turns]
    return [*(before if isinstance(before, list) else [{"role": "user", "content": prompt}]), *said]


def is_assistant(message: Message) -> bool:
    """Return True if a message is what a model is to say."""
    return bool(message["role"] == "assistant")


def render_answer(tokenizer: Any, messages: Sequence[Message], first: int, *, is_complete: bool) -> tuple[str, Answer]:
    """Return the text of the messages before `first`, with the beginning of an answer, and what follows it.

    Args:
        messages: the last one and number `first` are an assistant's. Of those from `first` on, the assistant's are
            learned, each with the special token that closes it.
        is_complete: the last turn ends.

    Raises:
        DataError: the template fails, or does not show where a turn begins and ends.
    """
    whole = render(tokenizer, messages, asks=False)
    turns = [i for i in range(first, len(messages)) if is_assistant(messages[i])]
    begins = [len(_common_begin(tokenizer, whole, messages[:i])) for i in turns]
    pieces: list[tuple[str, bool]] = []
    is_closed = False
    for i, begin, following in zip(turns, begins, [*begins[1:], len(whole)], strict=True):
        text = whole[begin:following]
        is_last = i == turns[-1]
        alone = whole if is_last else render(tokenizer, messages[: i + 1], asks=False)
        n_said, n_closed = _end_of_turn(_special_tokens(tokenizer), messages[i], alone, whole, begin, text)
        is_closed = n_closed > n_said
        n_learned = n_said if is_last and not is_complete else n_closed
        pieces += [(text[:n_learned], True)] if is_last else [(text[:n_learned], True), (text[n_learned:], False)]
    return whole[: begins[0]], Answer(tuple(pieces), takes_end=is_complete and not is_closed)


def _common_begin(tokenizer: Any, whole: str, before: Sequence[Message]) -> str:
    asked = render(tokenizer, before)
    if not whole.startswith(asked):
        raise DataError(
            f"the tokenizer's chat template renders the first {len(before)} messages in another way when an answer "
            "follows, so that the answer cannot be told apart",
            remedy="Give the row a prompt and an answer instead of messages, or correct the template.",
        )
    return asked


def _end_of_turn(
    special: re.Pattern[str], message: Message, alone: str, whole: str, begin: int, text: str
) -> tuple[int, int]:
    """Return the lengths of what was said in a turn, and of that with the token that closes it.

    Args:
        special: finds special tokens.
        alone: text of the conversation up to the turn, itself included.
        whole: text of the whole conversation.
        begin: place in it where the turn begins.
        text: its text, and the text that follows up to the next turn.
    """
    is_alone = whole.startswith(alone) and len(alone) > begin
    own = alone[begin:] if alone[:begin] == whole[:begin] else ""
    said = str(message["content"]).strip()
    n_said = own.rfind(said) + len(said) if said and said in own else 0
    closing = list(special.finditer(own, n_said))
    if is_alone:
        return closing[-1].span() if closing else (len(own), len(own))
    at = text.find(closing[-1].group(), max(text.find(said), 0) + len(said)) if closing else -1
    if at >= 0:
        return at, at + len(closing[-1].group())
    raise DataError(
        "the tokenizer's chat template renders an answer in another way when messages follow, and closes it with no "
        "special token, so that its end cannot be told",
        remedy="Give the row a prompt and an answer instead of messages, or correct the template.",
    )


@lru_cache(maxsize=4)
def _special_tokens(tokenizer: Any) -> re.Pattern[str]:
    added = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
    tokens = {*map(str, tokenizer.all_special_tokens), *added} - {""}
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or r"(?!)")
