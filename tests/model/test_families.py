"""Every dense family against `transformers`: logits, scores, files both ways, and what is refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from realrl.errors import AssetError
from realrl.model.decoder import Decoder
from realrl.model.families import FAMILIES
from realrl.model.files.config_file import read_config
from realrl.model.files.hf import check_model, load_model, save_model
from realrl.model.init import random_model
from realrl.model.layers.attention import PackedAttention
from realrl.shape import DecoderConfig
from tests.helpers.families import CASES, LINEAR, ONE_EACH, SEQLENS, decoder_config, hf_model, sequences


def packed_hidden(decoder: Decoder) -> torch.Tensor:
    positions = torch.cat([torch.arange(n) for n in SEQLENS])
    return decoder(torch.cat(sequences()), positions, PackedAttention(SEQLENS))


def their_logits(model: transformers.PreTrainedModel) -> torch.Tensor:
    return torch.cat([model(s[None]).logits[0] for s in sequences()])


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_logits_and_files_equal_those_of_transformers(case: str, tmp_path: Path) -> None:
    theirs = hf_model(case)
    theirs.save_pretrained(tmp_path / "in")
    ours = load_model(tmp_path / "in")
    expected = their_logits(theirs)
    torch.testing.assert_close(ours.head(packed_hidden(ours)), expected, atol=1e-4, rtol=1e-4)

    save_model(ours, tmp_path / "out", max_shard_bytes=9000)
    assert read_config(tmp_path / "out") == ours.config == decoder_config(case)
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(back) is type(theirs)
    for (name, p), (other_name, q) in zip(theirs.named_parameters(), back.named_parameters(), strict=True):
        assert name == other_name
        assert torch.equal(p, q), name
    torch.testing.assert_close(their_logits(back), expected)  # the configuration says the same as well
    again = load_model(tmp_path / "out")
    assert all(torch.equal(p, ours.get_parameter(name)) for name, p in again.named_parameters())


@pytest.mark.parametrize("case", ONE_EACH)
@torch.no_grad()
def test_scores_equal_those_of_a_sequence_classifier(case: str, tmp_path: Path) -> None:
    theirs = hf_model(case, is_classifier=True)
    theirs.save_pretrained(tmp_path / "in")
    ours = load_model(tmp_path / "in", head="reward")
    last = torch.tensor(SEQLENS).cumsum(0) - 1
    expected = their_logits(theirs)
    torch.testing.assert_close(ours.head(packed_hidden(ours))[last], expected, atol=1e-4, rtol=1e-4)
    save_model(ours, tmp_path / "out")
    back = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(their_logits(back), expected)


@pytest.mark.parametrize("case", ONE_EACH)
def test_a_random_model_normalises_by_one(case: str) -> None:
    model = random_model(decoder_config(case), seed=1)
    x = torch.randn(5, 32) * 3
    torch.testing.assert_close(model.norm(x).square().mean(-1), torch.ones(5), atol=1e-3, rtol=1e-3)


def test_gpt2_of_the_hub_is_read(tmp_path: Path) -> None:
    """Its tensors lack the prefix, causal masks are among them, and the head is left out."""
    hf_model("gpt2").save_pretrained(tmp_path)
    expected = load_model(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    bare = {name.removeprefix("transformer."): t for name, t in tensors.items() if name != "lm_head.weight"}
    bare |= {"h.0.attn.bias": torch.ones(1, 1, 4, 4), "h.1.attn.masked_bias": torch.tensor(-1e4)}
    save_file(bare, tmp_path / "model.safetensors")
    loaded = load_model(tmp_path)
    assert all(torch.equal(p, expected.get_parameter(name)) for name, p in loaded.named_parameters())


def test_a_bf16_gemma_scales_and_normalises_as_transformers_does(tmp_path: Path) -> None:
    """The scale is rounded to bfloat16; 1 + weight is not."""
    hf_model("gemma").to(torch.bfloat16).save_pretrained(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    ours = load_model(tmp_path, dtype=torch.bfloat16)
    (tokens, *_) = sequences()
    with torch.no_grad():
        expected = theirs.model.embed_tokens(tokens)
        assert torch.equal(ours.embed(tokens, torch.arange(len(tokens))), expected)
        norm = theirs.model.layers[0].input_layernorm
        torch.testing.assert_close(ours.blocks[0].attention_norm(expected), norm(expected), atol=0, rtol=0.01)


# ---------------------------------------------------------------- what is refused


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    save_model(random_model(decoder_config(request.param), seed=1), tmp_path)
    return tmp_path


def edit_config(folder: Path, **changes: Any) -> None:
    raw = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v != "remove"}))


REFUSED = [
    ("gpt2", {"activation_function": "relu"}, "activation_function 'relu' is not supported"),
    ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx True is not supported"),
    ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights False is not supported"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention True is not supported"),
    ("gpt2", {"n_head": 5}, "n_embd 32 is not a multiple of n_head 5"),
    ("gpt2", {"n_embd": "remove"}, "no key 'n_embd'"),
    ("gpt2", {"n_positions": 32}, r"wpe.weight' has shape \[64, 32\], config.json asks for \[32, 32\]"),
    ("gpt2", {"n_embd": 16}, r"has shape .* config.json asks for"),
    ("gemma", {"hidden_act": "silu"}, "hidden_act 'silu' is not supported"),
    ("gemma", {"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0 is not supported"),
    ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
    ("gemma", {"architectures": ["Gemma3ForConditionalGeneration"]}, "is not supported. Of Gemma 3, models of text"),
    ("gemma", {"architectures": None, "model_type": "gemma3"}, "model_type 'gemma3' .* Of Gemma 3, models of text"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention True"),
    ("gemma2", {"hidden_activation": "silu"}, "hidden_activation 'silu' is not supported"),
    ("gemma2", {"sliding_window": None}, "sliding_window is not set or not used"),
    ("gemma2", {"final_logit_softcapping": -1.0}, "logit_softcap must be above 0"),
    ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0 is not supported"),
    ("gemma3", {"rope_parameters": LINEAR}, "rope_parameters says nothing of 'full_attention' and 'sliding_attention'"),
    ("gemma3", {"rope_parameters": {"sliding_attention": LINEAR}}, "rope type 'linear' is not supported"),
    ("olmo2", {"model_type": "olmo"}, "'Olmo2ForCausalLM' is one of 'olmo2', but model_type is 'olmo'"),
    ("phi3", {"rope_scaling": {"type": "longrope"}}, "rope type 'longrope' is not supported"),
    ("phi3", {"partial_rotary_factor": 1.5}, "12 of the 8 dims of a head cannot be rotated"),
    ("qwen2", {"partial_rotary_factor": 0.5}, "partial_rotary_factor other than 1 is not supported"),
    ("qwen2", {"quantization_config": {"quant_method": "mxfp4"}}, r"quantized checkpoints cannot be trained \(mxfp4\)"),
    ("gemma", {"architectures": None, "model_type": "gema"}, "'gema' is not supported. Did you mean 'gemma'"),
    ("gemma", {"model_type": "llama"}, "'GemmaForCausalLM' is one of 'gemma', but model_type is 'llama'"),
    ("mistral", {"layer_types": ["full_attention"] * 3}, "layer_types is not supported"),
    ("mistral", {"sliding_window": 0}, r"Expected `int` >= 1 - at `\$.sliding_window`"),
    ("mistral", {"rope_parameters": {"rope_type": "dynamic"}}, "rope type 'dynamic' is not supported"),
    ("qwen2", {"layer_types": ["full_attention"]}, "layer_types has 1 entries for 3 layers"),
    ("qwen2", {"layer_types": ["chunked_attention"] * 3}, "not 'chunked_attention'"),
    ("qwen2", {"layer_types": ["sliding_attention"] * 3}, "sliding_window is not set or not used"),
    (
        "qwen2",
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
        "holds the tensor 'model.layers.0.self_attn.k_proj.bias', which config.json does not call for",
    ),
    (
        "mistral",
        {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
        "lacks 9 tensors, the first is 'model.layers.0.self_attn.k_proj.bias'(?s:.*)says 'qwen2', belongs to another",
    ),
    ("qwen2", {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}, "no key 'n_embd'"),
]


@pytest.mark.parametrize(("folder", "changes", "said"), REFUSED, indirect=["folder"])
def test_a_folder_of_another_family_or_with_an_unknown_option(folder: Path, changes: dict[str, Any], said: str) -> None:
    edit_config(folder, **changes)
    with pytest.raises(AssetError, match=said) as caught:
        load_model(folder)
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("folder", ["gemma"], indirect=True)
def test_options_that_mean_the_usual_are_no_variants(folder: Path) -> None:
    expected = read_config(folder)
    edit_config(folder, hidden_act="gelu", hidden_activation=None, architectures=None, attn_logit_softcapping=None)
    assert read_config(folder) == expected


def test_a_model_that_its_family_cannot_express_is_not_saved(tmp_path: Path) -> None:
    config = DecoderConfig(61, 32, 2, 4, 2, 8, 48, qk_norm="head")
    with pytest.raises(ValueError, match="family 'llama' cannot express qk_norm"):
        save_model(random_model(config, seed=1), tmp_path)
    with pytest.raises(ValueError, match="no family 'lama'; known are llama"):
        save_model(random_model(DecoderConfig(61, 32, 2, 4, 2, 8, 48, family="lama"), seed=1), tmp_path)
    assert not (tmp_path / "config.json").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sliding_window": 0}, "sliding_window must be at least 1"),
        ({"sliding_window": 4, "windowed_layers": (1, 2)}, "are not all among 2 layers"),
        ({"qk_norm": "head", "norm": "layer"}, "qk_norm needs RMSNorm"),
    ],
)
def test_impossible_models(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        DecoderConfig(61, 32, 2, 4, 2, 8, 48, **changes)


# ---------------------------------------------------------------- heads


@pytest.mark.parametrize("folder", ["gpt2"], indirect=True)
def test_a_head_is_made_with_a_warning_and_only_where_it_may_be(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        model = load_model(folder, head="value", seed=3)
    assert "holds a language model: its value head starts from small random numbers" in caplog.text
    assert 0 < model.head.weight.abs().max() < 0.02
    check_model(folder, head="value", makes_head=True)
    with pytest.raises(AssetError, match="holds a language model, which has no reward head"):
        check_model(folder, head="reward")
    save_model(model, folder)
    check_model(folder, head="reward")


def test_every_family_is_registered_under_its_own_name() -> None:
    for name, family in FAMILIES.items():
        assert family.model_type == name
        assert transformers.AutoConfig.for_model(name).model_type == name
        for architecture in (family.lm_architecture, family.scalar_architecture):
            assert hasattr(transformers, architecture)
