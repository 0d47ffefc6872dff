"""Generated data of the tiny preset: a byte-level tokenizer and a toy task whose reward is a rule.

The task: answer in lower-case letters. A response is worth the fraction of its tokens that are bytes ``a`` to ``z``,
so a random policy starts near 26 / 260 and a perfect one earns 1. Prompts are upper-case words; the model answer
repeats the word in lower case, and the answer that loses in a preference pair is made of other bytes.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

from realrl.data.kinds import DatasetKind

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

N_BYTES = 256
SPECIAL_TOKENS = ("<|end|>", "<|pad|>", "<|user|>", "<|assistant|>")
VOCAB_SIZE = N_BYTES + len(SPECIAL_TOKENS)
N_ROWS = 512  # of the toy task
LONGEST_PROMPT, LONGEST_ANSWER = 9, 13  # tokens, an answer with its end-of-sequence token
TARGET_IDS = frozenset(range(ord("a"), ord("z") + 1))
VOWEL_IDS = frozenset(map(ord, "aeiou"))

_CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_CONSONANTS, _VOWELS = "BCDFGHKLMNPRSTVZ", "AEIOU"
_OTHER_CHARACTERS = "0123456789!?#$%&*+-=<>/@^_QWXY"
_ANSWER_CHARACTERS = 12


def toy_reward(prompt_ids: Iterable[int], response_ids: Iterable[int]) -> float:
    """The fraction of response tokens that are bytes ``a`` to ``z``; in [0, 1], and 0 for an empty response.

    A stop token counts as a token that is not a letter, so ending early does not pay.

    Args:
        prompt_ids: byte-level tokens of the prompt (the rule ignores them).
        response_ids: byte-level tokens of the response: a sequence of integers or a 1-dim tensor.
    """
    ids = [int(token) for token in response_ids]
    return sum(token in TARGET_IDS for token in ids) / len(ids) if ids else 0.0


def toy_cost(prompt_ids: Iterable[int], response_ids: Iterable[int]) -> float:
    """The fraction of response tokens that are lower-case vowels; in [0, 1], and 0 for an empty response.

    For algorithms that keep a cost below a limit: vowels are letters, so they earn reward and cost alike.

    Args:
        prompt_ids: byte-level tokens of the prompt (the rule ignores them).
        response_ids: byte-level tokens of the response.
    """
    ids = [int(token) for token in response_ids]
    return sum(token in VOWEL_IDS for token in ids) / len(ids) if ids else 0.0


def toy_rows(kind: DatasetKind, n_rows: int, seed: int) -> list[dict[str, Any]]:
    """Rows of the toy task in the format of dataset files; a pure function of its arguments.

    Args:
        kind: decides the fields: prompt; prompt, answer; prompt, chosen, rejected; prompt, answer, label.
        n_rows: number of rows, with ids ``"0"``, ``"1"``, ...
        seed: a longer list of the same seed starts with the shorter one.
    """
    rng = random.Random(seed)
    rows = []
    for i in range(n_rows):
        word = "".join(rng.choice(_CONSONANTS) + rng.choice(_VOWELS) for _ in range(rng.randint(1, 4)))
        answer = (word.lower() * _ANSWER_CHARACTERS)[: rng.randint(_ANSWER_CHARACTERS // 2, _ANSWER_CHARACTERS)]
        # At most a third of the losing answer is letters, so the rule ranks every pair as it says.
        n_letters = rng.randint(0, len(answer) // 3)
        losing = [rng.choice(_OTHER_CHARACTERS) for _ in range(len(answer) - n_letters)] + list(answer[:n_letters])
        rng.shuffle(losing)
        row: dict[str, Any] = {"id": str(i), "prompt": f"{word}:"}
        if kind is DatasetKind.PROMPT_ANSWER:
            row["answer"] = answer
        if kind is DatasetKind.PREFERENCE_PAIR:
            row |= {"chosen": answer, "rejected": "".join(losing)}
        if kind is DatasetKind.UNPAIRED:
            row |= {"answer": answer, "label": True} if i % 2 == 0 else {"answer": "".join(losing), "label": False}
        rows.append(row)
    return rows


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """The byte-level tokenizer: token i is byte i below 256, then `SPECIAL_TOKENS`; pad and end tokens are set.

    A `transformers` tokenizer: ``save_pretrained`` writes a folder that ``AutoTokenizer`` reads back.
    """
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=_byte_level(),
        eos_token=SPECIAL_TOKENS[0],
        pad_token=SPECIAL_TOKENS[1],
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=1 << 20,
    )


def _byte_level() -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = {character: byte for byte, character in enumerate(_byte_alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


@cache
def _byte_alphabet() -> tuple[str, ...]:
    """Byte -> its printable stand-in in byte-level BPE: itself where printable, else 256 plus a running number.

    Source: the GPT-2 encoder (Radford et al., 2019), which every byte-level tokenizer follows.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(N_BYTES))
    return tuple(chr(byte) if byte in printable else chr(N_BYTES + next(others)) for byte in range(N_BYTES))
