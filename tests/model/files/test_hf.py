"""Loading and saving against `transformers`, and every message that a broken model folder can cause."""

from __future__ import annotations

import errno
import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import transformers

from realrl.errors import AssetError
from realrl.model.decoder import Decoder
from realrl.model.files.config_file import read_config
from realrl.model.files.hf import check_model, load_model, save_model
from realrl.model.init import random_model
from realrl.model.layers.attention import PackedAttention
from realrl.shape import DecoderConfig, DType, tiny_config

SEQLENS = (7, 1, 12)

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}

VARIANTS = {
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False},
    "grouped": {"num_key_value_heads": 1},
    "ungrouped": {"num_key_value_heads": 4},
    "llama3": {"rope_parameters": LLAMA3},
    "linear": {"rope_parameters": LINEAR},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "head_dim": {"head_dim": 16},
}


def hf_config(**changes: object) -> transformers.LlamaConfig:
    base: dict[str, object] = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return transformers.LlamaConfig(**(base | changes))


def randomise(model: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.3 + float("norm" in name))


def packed_hidden(decoder: Decoder, sequences: list[torch.Tensor]) -> torch.Tensor:
    ids = torch.cat(sequences)
    positions = torch.cat([torch.arange(len(s)) for s in sequences])
    return decoder(ids, positions, PackedAttention([len(s) for s in sequences]))


def sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 61, (n,), generator=generator) for n in SEQLENS]


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_those_of_transformers(variant: str, tmp_path: Path) -> None:
    theirs = transformers.LlamaForCausalLM(hf_config(**VARIANTS[variant])).eval()
    randomise(theirs)
    theirs.save_pretrained(tmp_path / "in")
    ours = load_model(tmp_path / "in")
    with torch.no_grad():
        expected = torch.cat([theirs(s[None]).logits[0] for s in sequences()])
        torch.testing.assert_close(ours.head(packed_hidden(ours, sequences())), expected, atol=1e-4, rtol=1e-4)

        save_model(ours, tmp_path / "out", max_shard_bytes=9000)
        assert (tmp_path / "out" / "model.safetensors.index.json").exists()
        back = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out")
        torch.testing.assert_close(torch.cat([back(s[None]).logits[0] for s in sequences()]), expected)
    assert read_config(tmp_path / "out") == ours.config
    assert back.config.eos_token_id == 2
    for name, p in load_model(tmp_path / "out").named_parameters():
        assert torch.equal(p, ours.get_parameter(name))


@pytest.mark.parametrize("head", ["reward", "value"])
def test_scalar_head_is_a_sequence_classifier_on_disk(head: str, tmp_path: Path) -> None:
    theirs = transformers.LlamaForSequenceClassification(hf_config(num_labels=1)).eval()
    randomise(theirs)
    theirs.save_pretrained(tmp_path / "in")
    ours = load_model(tmp_path / "in", head=head)
    save_model(ours, tmp_path / "out")
    back = transformers.LlamaForSequenceClassification.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        scores = ours.head(packed_hidden(ours, sequences()))
        last = torch.tensor(SEQLENS).cumsum(0) - 1
        expected = torch.cat([theirs(s[None]).logits[0] for s in sequences()])
        torch.testing.assert_close(scores[last], expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(torch.cat([back(s[None]).logits[0] for s in sequences()]), expected)
    assert scores.dtype == torch.float32


def test_language_model_checkpoint_gets_a_seeded_scalar_head(tmp_path: Path) -> None:
    save_model(random_model(tiny_config(61), seed=1), tmp_path)
    one, same, other = (load_model(tmp_path, head="value", seed=s).head.weight for s in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert 0 < one.abs().max() < 0.02


@pytest.mark.parametrize("stored", ["bfloat16", "float16", "float32"])
def test_source_dtype_is_converted(stored: DType, tmp_path: Path) -> None:
    model = random_model(tiny_config(61, dtype=stored), seed=1)
    save_model(model, tmp_path)
    assert read_config(tmp_path).dtype == stored
    for dtype in (torch.float32, torch.bfloat16):
        loaded = load_model(tmp_path, dtype=dtype)
        assert loaded.dtype == dtype
        for name, p in loaded.named_parameters():
            assert torch.equal(p, model.get_parameter(name).to(dtype))


def test_tied_head_stays_tied(tmp_path: Path) -> None:
    save_model(random_model(tiny_config(61), seed=1), tmp_path)
    model = load_model(tmp_path)
    assert model.head.weight is model.embedding.weight


def test_random_model_depends_on_seed_only() -> None:
    config = DecoderConfig(61, 32, 2, 4, 2, 8, 48)
    torch.manual_seed(5)
    one = random_model(config, seed=3).state_dict()
    torch.manual_seed(6)
    same, other = random_model(config, seed=3).state_dict(), random_model(config, seed=4).state_dict()
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["embedding.weight"], other["embedding.weight"])
    assert not torch.equal(one["blocks.0.mlp.gate.weight"], one["blocks.0.mlp.up.weight"])


def test_tiny_has_half_a_million_parameters() -> None:
    n = sum(p.numel() for p in random_model(tiny_config(260), seed=1).parameters())
    assert 400_000 < n < 600_000


# ---------------------------------------------------------------- broken folders


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model(random_model(tiny_config(61), seed=1), tmp_path, max_shard_bytes=600_000)
    assert (tmp_path / "model-00002-of-00004.safetensors").exists()
    return tmp_path


def edit_config(folder: Path, **changes: object) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({k: v for k, v in (raw | changes).items() if v != "remove"}))


def test_folder_missing(tmp_path: Path) -> None:
    with pytest.raises(AssetError, match=r"model folder .*nowhere does not exist"):
        load_model(tmp_path / "nowhere")


def test_config_missing(tmp_path: Path) -> None:
    with pytest.raises(AssetError, match=r"has no config\.json"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "cannot be read as JSON"),
        ("[1]", "is not a JSON object"),
        ("[" * 100_000, "it has hundreds of levels"),
        ('{"vocab_size": ' + "9" * 5000 + "}", "cannot be read as JSON: Exceeds the limit"),
    ],
)
def test_config_not_json(folder: Path, text: str, said: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(AssetError, match=said):
        load_model(folder)


def test_unsupported_architecture_names_the_closest(folder: Path) -> None:
    edit_config(folder, architectures=["LLaMAForCausalLM"])
    with pytest.raises(AssetError, match=r"'LLaMAForCausalLM' is not supported\. Did you mean 'LlamaForCausalLM'"):
        load_model(folder)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_size": "remove"}, "no key 'hidden_size'"),
        ({"hidden_size": "wide"}, "impossible value"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 KV heads"),
        ({"num_attention_heads": 0, "head_dim": None}, "impossible value"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantized checkpoints"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope type 'longrope' is not supported"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "no key 'factor'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "no key 'factor'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"hidden_size": 128.5}, "got `float` - at `\\$.hidden_size`"),
        ({"num_hidden_layers": 10**9}, "<= 4096 - at `\\$.num_hidden_layers`"),
        ({"rope_parameters": ["yarn"]}, "Expected `object.*, got `array` - at `\\$.rope_parameters`"),
        ({"architectures": "LlamaForCausalLM"}, "got `str` - at `\\$.architectures`"),
        ({"bos_token_id": [1, 2]}, "got `array` - at `\\$.bos_token_id`"),
        ({"tie_word_embeddings": "false"}, "got `str` - at `\\$.tie_word_embeddings`"),
        ({"auto_map": {"AutoModel": "own.Own"}}, "names code of its own \\(auto_map\\), which realrl does not run"),
        ({"vocab_size": 62}, r"'model.embed_tokens.weight' has shape \[61, 128\], config.json asks for \[62, 128\]"),
        ({"num_hidden_layers": 2}, "holds the tensor 'model.layers.2.* config.json does not call for"),
        ({"num_hidden_layers": 5}, "lacks 9 tensors, the first is 'model.layers.4.input_layernorm.weight'"),
    ],
)
def test_config_that_does_not_fit(folder: Path, changes: dict[str, object], said: str) -> None:
    edit_config(folder, **changes)
    with pytest.raises(AssetError, match=said):
        load_model(folder)


def test_truncated_shard_is_named(folder: Path) -> None:
    shard = folder / "model-00002-of-00004.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(AssetError, match=r"model-00002-of-00004\.safetensors is truncated: \d+ of \d+ bytes"):
        load_model(folder)


@pytest.mark.parametrize("n_bytes", [0, 5, 20])
def test_shard_cut_in_its_header(folder: Path, n_bytes: int) -> None:
    shard = folder / "model-00002-of-00004.safetensors"
    shard.write_bytes(shard.read_bytes()[:n_bytes])
    with pytest.raises(AssetError, match=r"model-00002-of-00004\.safetensors is truncated"):
        load_model(folder)


def test_shard_with_a_damaged_header(folder: Path) -> None:
    shard = folder / "model-00002-of-00004.safetensors"
    shard.write_bytes((4).to_bytes(8, "little") + b"abcd" + bytes(100))
    with pytest.raises(AssetError, match=r"model-00002-of-00004\.safetensors is damaged"):
        load_model(folder)


def test_shard_missing(folder: Path) -> None:
    (folder / "model-00003-of-00004.safetensors").unlink()
    with pytest.raises(AssetError, match=r"model-00003-of-00004\.safetensors is missing"):
        load_model(folder)


def test_no_weights_at_all(folder: Path) -> None:
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(AssetError, match=r"neither model\.safetensors nor"):
        load_model(folder)


def test_index_without_map(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(AssetError, match="no weight_map"):
        load_model(folder)


def test_reward_model_cannot_be_an_actor(tmp_path: Path) -> None:
    save_model(random_model(tiny_config(61, head="reward"), seed=1), tmp_path)
    with pytest.raises(AssetError, match="reward or value model, which cannot predict tokens"):
        load_model(tmp_path)


@contextmanager
def file_size_limit(n_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_write_failure_is_an_oserror_and_leaves_the_old_file(tmp_path: Path) -> None:
    save_model(random_model(tiny_config(61), seed=1), tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    with file_size_limit(100_000), pytest.raises(OSError, match=r"model\.safetensors") as caught:
        save_model(random_model(tiny_config(61), seed=2), tmp_path)
    assert caught.value.errno == errno.EFBIG
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


@pytest.mark.parametrize("file", ["../x.safetensors", "a/b", "", "\0", "x" * 300, 5])
def test_an_index_stays_in_its_folder(folder: Path, file: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(AssetError, match="which is no file name of this folder"):
        check_model(folder)


def test_a_header_whose_tensors_overlap(tmp_path: Path) -> None:
    save_model(random_model(tiny_config(61), seed=1), tmp_path)
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    header = json.dumps({"a": entry, "b": entry}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)
    with pytest.raises(AssetError, match=r"model\.safetensors is damaged"):
        check_model(tmp_path)
