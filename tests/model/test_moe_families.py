"""Files of families with experts: both forms, what disagrees with itself, what is absent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from realrl.errors import AssetError
from realrl.model.files.config_file import read_config
from realrl.model.files.hf import load_model, save_model
from realrl.model.files.tensor_file import stored_names
from tests.helpers.assets import edit_json
from tests.helpers.families import CASES, hf_config, hf_model

FILE = "model.safetensors"
MIXED = "qwen3_moe some dense"


def stored(folder: Path) -> set[str]:
    return set(stored_names(folder / FILE))


@pytest.mark.parametrize("case", ["mixtral", MIXED])
def test_experts_are_read_one_by_one_and_together_and_written_as_transformers_does(case: str, tmp_path: Path) -> None:
    theirs = hf_model(case)
    theirs.save_pretrained(tmp_path / "one by one")
    theirs.save_pretrained(tmp_path / "together", save_original_format=False)
    assert any(name.endswith("experts.gate_up_proj") for name in stored(tmp_path / "together"))
    assert not any(name.endswith("experts.gate_up_proj") for name in stored(tmp_path / "one by one"))
    ours, other = load_model(tmp_path / "one by one"), load_model(tmp_path / "together")
    for name, p in ours.named_parameters():
        assert torch.equal(p, other.get_parameter(name)), name
    save_model(other, tmp_path / "out")
    assert stored(tmp_path / "out") == stored(tmp_path / "one by one")


def test_the_coefficient_of_the_checkpoint_is_kept(tmp_path: Path) -> None:
    for case, coefficient in (("mixtral", 0.25), (MIXED, 0.02)):
        hf_config(case, router_aux_loss_coef=coefficient, architectures=[]).save_pretrained(tmp_path)
        moe = read_config(tmp_path).moe
        assert moe is not None
        assert moe.aux_loss_coef == coefficient


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise 0.1 is not supported"),
        ("mixtral", {"num_experts_per_tok": 5}, "impossible value: a token cannot use 5 of 4 experts"),
        ("mixtral", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ("mixtral", {"num_local_experts": 3}, "tensor 'model.layers.0.block_sparse_moe.experts.3"),
        ("mixtral", {"num_local_experts": 5}, "gate.weight' has shape [4, 32], config.json asks for [5, 32]"),
        ("mixtral", {"intermediate_size": 25}, "has shape [20, 32], config.json asks for [25, 32]"),
        (MIXED, {"decoder_sparse_step": 0}, "impossible value"),
        (MIXED, {"mlp_only_layers": [1]}, "'model.layers.0.mlp."),
        (MIXED, {"moe_intermediate_size": 21}, "has shape [32, 12], config.json asks for [32, 21]"),
    ],
    ids=str,
)
def test_a_folder_that_disagrees_with_itself_is_refused(
    case: str, changes: dict[str, object], message: str, tmp_path: Path
) -> None:
    hf_model(case).save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", **changes)
    with pytest.raises(AssetError) as caught:
        load_model(tmp_path)
    assert message in str(caught.value)


@pytest.mark.parametrize("lost", ["experts.2.w3", "gate"])
def test_a_file_without_an_expert_or_a_router_is_refused(lost: str, tmp_path: Path) -> None:
    hf_model("mixtral").save_pretrained(tmp_path)
    name = f"model.layers.1.block_sparse_moe.{lost}.weight"
    tensors = load_file(tmp_path / FILE)
    del tensors[name]
    save_file(tensors, tmp_path / FILE, metadata={"format": "pt"})
    with pytest.raises(AssetError, match=f"lacks 1 tensor.*{name}"):
        load_model(tmp_path)


@pytest.mark.parametrize(("case", "architecture"), [("mixtral", "Mixtral"), (MIXED, "Qwen3Moe")])
def test_absent_keys_mean_what_they_mean_to_transformers(case: str, architecture: str, tmp_path: Path) -> None:
    raw: dict[str, object] = {"architectures": [f"{architecture}ForCausalLM"], "model_type": CASES[case][0]}
    raw |= {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 8}
    raw["intermediate_size"] = 20
    (tmp_path / "config.json").write_text(json.dumps(raw))
    ours, theirs = read_config(tmp_path), transformers.AutoConfig.from_pretrained(tmp_path)
    assert ours.moe is not None
    assert ours.n_kv_heads == theirs.num_key_value_heads
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.sliding_window == theirs.sliding_window
    assert ours.moe.n_experts == theirs.num_experts
    assert ours.moe.top_k == theirs.num_experts_per_tok
    assert ours.moe.aux_loss_coef == theirs.router_aux_loss_coef
