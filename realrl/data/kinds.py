"""Kinds of datasets. Imports no torch."""

from __future__ import annotations

from enum import Enum

ANSWER_FIELDS = ("answer", "response", "completion")


class DatasetKind(Enum):
    """Content of one dataset row, and the keys that it becomes."""

    PROMPT = "prompt"  # prompt_ids; metadata, per sample: the row's other fields as the bytes of a JSON object
    PROMPT_ANSWER = "prompt_answer"  # input_ids, prompt_mask
    PREFERENCE_PAIR = "preference_pair"  # input_ids with two sequences per sample: chosen, rejected; prompt_mask
    UNPAIRED = "unpaired"  # as a pair: the row's own answer, another row's; label, per sample: True if its own is good

    @property
    def keys(self) -> tuple[str, ...]:
        """The dataset keys that a graph can read."""
        if self is DatasetKind.PROMPT:
            return ("prompt_ids", "metadata")
        tokens = ("input_ids", "prompt_mask")
        return (*tokens, "label") if self is DatasetKind.UNPAIRED else tokens

    @property
    def forms(self) -> tuple[tuple[str, ...], ...]:
        """The fields of a row: one of these sets. An `answer` may also be called as in `ANSWER_FIELDS`."""
        return {
            DatasetKind.PROMPT: (("prompt",), ("messages",)),
            DatasetKind.PROMPT_ANSWER: (("prompt", "answer"), ("messages",)),
            DatasetKind.PREFERENCE_PAIR: (("prompt", "chosen", "rejected"), ("chosen", "rejected")),
            DatasetKind.UNPAIRED: (("prompt", "answer", "label"), ("messages", "label")),
        }[self]
