"""Greedy generation of every dense family: token for token what `transformers` generates."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from realrl.config.schema import GenerationConfig
from realrl.engine.generate import GenerateRequest, generate
from realrl.errors import CallError
from realrl.model.files.hf import load_model
from realrl.model.init import random_model
from tests.helpers.families import CASES, decoder_config, hf_model, sequences

EOS = 2
GREEDY = GenerationConfig(temperature=0.0, max_new_tokens=14, max_batch_size=2)


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_greedy_tokens_equal_those_of_transformers(case: str, tmp_path: Path) -> None:
    theirs = hf_model(case)
    theirs.save_pretrained(tmp_path)
    decoder = load_model(tmp_path)
    prompts = sequences()
    ids = [str(i) for i in range(len(prompts))]
    ours = generate(decoder, GenerateRequest(prompts, ids, GREEDY, 1, 1, EOS)).responses
    for prompt, response in zip(prompts, ours, strict=True):
        mask = torch.ones_like(prompt)[None]
        expected = theirs.generate(prompt[None], attention_mask=mask, do_sample=False, max_new_tokens=14)[0]
        assert response.tolist() == expected[len(prompt) :].tolist()
    assert len({token for response in ours for token in response.tolist()}) > 3


def test_a_response_beyond_the_learned_positions_is_refused() -> None:
    decoder = random_model(decoder_config("gpt2"), seed=1)
    prompt = torch.ones(51, dtype=torch.int64)
    with pytest.raises(CallError, match=r"a prompt of 51 tokens .* exceed the model's 64 positions"):
        generate(decoder, GenerateRequest([prompt], ["0/0"], GREEDY, 1, 1, EOS))
