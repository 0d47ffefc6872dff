"""Model folders whose keys say things twice, or not at all, are read as `transformers` reads them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from realrl.model.files.config_file import read_config, read_notes
from realrl.model.files.hf import load_model
from realrl.model.layers.attention import PackedAttention
from realrl.model.layers.rope import inverse_frequencies
from tests.helpers.families import LINEAR, YARN, hf_model

YARN_ALONE = {key: value for key, value in YARN.items() if key != "rope_theta"}
SHAPE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
LM = {
    "llama": "Llama",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "gemma": "Gemma",
    "gemma2": "Gemma2",
    "olmo2": "Olmo2",
}
ABSENT = object()
ROPES = list(
    itertools.product(
        (ABSENT, None, {}, YARN_ALONE, LINEAR | {"rope_theta": 3e4}, {"type": "linear", "factor": 2.0}),
        (ABSENT, {"rope_theta": 5e5, "rope_type": "default"}, YARN | {"rope_theta": 7e5, "factor": 2.0}),
        (ABSENT, 2e4),
    )
)


def folder_with(tmp_path: Path, model_type: str, **keys: Any) -> Path:
    raw = SHAPE | {"model_type": model_type, "architectures": [f"{LM[model_type]}ForCausalLM"]} | keys
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v is not ABSENT}))
    return tmp_path


@pytest.mark.parametrize("model_type", LM)
def test_rotary_positions_under_old_keys_and_new_ones(model_type: str, tmp_path: Path) -> None:
    rotary = getattr(transformers, f"{LM[model_type]}Model")
    for scaling, parameters, theta in ROPES:
        keys = {"rope_scaling": scaling, "rope_parameters": parameters, "rope_theta": theta}
        folder = folder_with(tmp_path, model_type, max_position_embeddings=64, **keys)
        theirs = rotary(transformers.AutoConfig.from_pretrained(folder)).rotary_emb
        ours = read_config(folder)
        torch.testing.assert_close(inverse_frequencies(ours), theirs.inv_freq, msg=f"{keys}")
        amplitude = 1.0 if ours.rope_scaling is None else ours.rope_scaling.amplitude
        assert amplitude == pytest.approx(theirs.attention_scaling)


@pytest.mark.parametrize("model_type", [*LM, "gemma3_text", "phi3", "qwen3_moe"])
def test_absent_keys_mean_what_they_mean_to_transformers(model_type: str, tmp_path: Path) -> None:
    raw = {key: value for key, value in SHAPE.items() if key != "head_dim"} | {"model_type": model_type}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    ours, theirs = read_config(tmp_path), transformers.AutoConfig.from_pretrained(tmp_path)
    assert ours.max_positions == theirs.max_position_embeddings
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 8)
    assert ours.tied_embeddings == theirs.tie_word_embeddings
    kinds = getattr(theirs, "layer_types", None) or [None] * ours.n_layers
    ours_by_layer = [ours.window_of(layer) for layer in range(ours.n_layers)]
    if None not in kinds:
        assert ours_by_layer == [theirs.sliding_window if kind == "sliding_attention" else None for kind in kinds]


@pytest.mark.parametrize(
    ("keys", "note"),
    [
        (
            {"rope_scaling": YARN_ALONE, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
            "rope_scaling and rope_parameters differ: rope_scaling is read",
        ),
        (
            {"rope_theta": 2e4, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            "rope_theta is 500000 in rope_parameters and 20000 in config.json: 500000 is read",
        ),
        (
            {"rope_scaling": LINEAR, "rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}},
            "rope_theta is 10000 in rope_scaling and 500000 in rope_parameters: 10000 is read",
        ),
        ({"rope_scaling": LINEAR | {"type": "yarn"}}, "rope_type 'linear' and the type 'yarn': rope_type is read"),
        (
            {"rope_scaling": YARN_ALONE, "max_position_embeddings": 32},
            "YaRN's factor is 4, but max_position_embeddings is 2 times",
        ),
        ({"dtype": "float32", "torch_dtype": "bfloat16"}, "dtype is 'float32' and torch_dtype is 'bfloat16'"),
    ],
)
def test_contradictions_are_named(keys: dict[str, Any], note: str, tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "llama", **({"max_position_embeddings": 64} | keys))
    [found] = read_notes(folder)
    assert note in found


def test_what_transformers_saves_contradicts_nothing(tmp_path: Path) -> None:
    for case in ("llama yarn", "qwen3 window", "gemma3", "phi3 partial", "mixtral", "gpt2"):
        hf_model(case).save_pretrained(tmp_path / case)
        assert read_notes(tmp_path / case) == []


def test_a_head_that_is_there_and_differs_is_not_tied(tmp_path: Path) -> None:
    for case in ("qwen2", "gemma", "gpt2"):
        folder = tmp_path / case
        theirs = hf_model(case)
        assert theirs.config.tie_word_embeddings
        theirs.save_pretrained(folder)
        tensors = load_file(folder / "model.safetensors")
        embedding = next(t for name, t in tensors.items() if name.endswith(("embed_tokens.weight", "wte.weight")))
        for head, is_tied in ((embedding.clone(), True), (embedding * 0.5, False)):
            save_file(tensors | {"lm_head.weight": head}, folder / "model.safetensors", metadata={"format": "pt"})
            ours, theirs = load_model(folder), transformers.AutoModelForCausalLM.from_pretrained(folder)
            assert ours.config.tied_embeddings == read_config(folder).tied_embeddings == is_tied
            assert ["hold a head that differs" in note for note in read_notes(folder)] == ([] if is_tied else [True])
            tokens = torch.tensor([5, 9, 3])
            with torch.no_grad():
                hidden = ours(tokens, torch.arange(3), PackedAttention([3]))
                torch.testing.assert_close(ours.head(hidden), theirs(tokens[None]).logits[0], atol=1e-4, rtol=1e-4)


def test_ends_of_responses_come_from_both_files(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, "llama", eos_token_id=[7, 9])
    assert read_config(folder).eos_token_ids == (7, 9)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [9, 11, 1000, True, None]}))
    assert read_config(folder).eos_token_ids == (7, 9, 11)
    (folder / "generation_config.json").write_text("{")
    assert read_config(folder).eos_token_ids == (7, 9)
