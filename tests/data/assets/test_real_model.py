"""The real model, where the cache holds it: `scripts/fetch_assets.py` puts it there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from realrl.data.assets.fetch import MODEL_FOLDER
from realrl.data.tokenizer import load_tokenizer
from realrl.files import cache_dir

pytestmark = pytest.mark.slow

TEXT = (
    "The French Revolution was a period of political and societal change in France that began with the Estates General "
    "of 1789 and ended with the coup of 18 Brumaire in November 1799."
)


@pytest.fixture(scope="module")
def folder() -> Path:
    folder = cache_dir() / MODEL_FOLDER
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there")
    return folder


def test_the_model_knows_english(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    tokenizer = load_tokenizer(str(folder))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    ids = torch.tensor([tokenizer(TEXT)["input_ids"]])
    with torch.no_grad():
        perplexity = model(ids, labels=ids).loss.exp().item()
    assert perplexity < 15
    prompt = torch.tensor([tokenizer("The capital of France is")["input_ids"]])
    written = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=2, do_sample=False)
    assert tokenizer.decode(written[0]).startswith("The capital of France is Paris")


def test_its_tokenizer_speaks_chat_and_splits_digits(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    assert (tokenizer.eos_token, tokenizer.eos_token_id, len(tokenizer)) == ("<|im_end|>", 2, 49152)
    assert tokenizer.convert_ids_to_tokens(tokenizer("in 1789")["input_ids"]) == ["in", "Ġ", "1", "7", "8", "9"]
    chat = [{"role": "user", "content": "hi"}]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert rendered.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
