"""Shards of a decoder: built, filled, loaded and saved without any group; pipeline stages against the whole."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from realrl.engine.groups import Communicator
from realrl.engine.tensor_parallel import TensorParallelGroup
from realrl.mesh.device_mesh import ParallelStrategy
from realrl.model.decoder import Decoder
from realrl.model.dtypes import dtype_name
from realrl.model.files.config_file import read_model_config
from realrl.model.files.hf import load_model, save_index, save_model, save_stage
from realrl.model.init import random_model
from realrl.plan.parameters.shards import ModelShard, shard_of
from realrl.plan.parameters.stages import stage_layers
from realrl.shape import DecoderConfig
from tests.helpers.sharded import (
    CONFIG,
    CONFIGS,
    assert_close,
    assert_gradients_equal,
    backward,
    gradients_of,
    results_of,
    run_stages,
    stages_of,
    whole_model,
)

META = torch.device("meta")


def shards(config: DecoderConfig, strategy: ParallelStrategy) -> Iterator[ModelShard]:
    return (shard_of(config, strategy, rank) for rank in range(strategy.n_devices))


@pytest.fixture(params=CONFIGS)
def config(request: pytest.FixtureRequest) -> DecoderConfig:
    return CONFIGS[request.param]


# ---------------------------------------------------------------- stages


@pytest.mark.parametrize("pp", [2, 3])
def test_stages_one_after_the_other_equal_the_whole(config: DecoderConfig, pp: int) -> None:
    whole = whole_model(config)
    expected = results_of(run_stages([whole], config.vocab_size), config)
    backward(expected)
    stages = stages_of(whole, pp=pp)
    results = results_of(run_stages(stages, config.vocab_size), config)
    for ours, theirs in zip(results, expected, strict=True):
        assert_close(ours, theirs, f"pp={pp}")
    backward(results)
    assert_gradients_equal(stages, gradients_of(stages), whole)


def test_stages_hold_every_parameter_under_its_global_name_once(config: DecoderConfig) -> None:
    whole = whole_model(config)
    stages = stages_of(whole, pp=3)
    names = [name for stage in stages for name, _ in stage.named_shards()]
    if stages[-1].has_tied_copy:
        assert names.count("embedding.weight") == 2
        names.reverse()
        names.remove("embedding.weight")
        names.reverse()
    assert names == [name for name, _ in whole.named_parameters()]
    assert [len(stage.blocks) for stage in stages] == [len(layers) for (layers,) in stage_layers(config, 3)]
    assert stages[1].embedding is stages[1].head is stages[0].norm is None


def test_a_stage_or_a_slice_alone_does_not_compute_the_whole() -> None:
    ids = torch.zeros(3, dtype=torch.int64)
    first, last = stages_of(whole_model(CONFIG), pp=2)
    for stage, said in ((first, "an earlier pipeline stage"), (last, "a later pipeline stage")):
        with pytest.raises(AssertionError, match=said):
            stage(ids, ids, None)
    slice_only = random_model(CONFIG, 1, shard=shard_of(CONFIG, ParallelStrategy(tp=2), 0))
    with pytest.raises(AssertionError, match="only with the ranks that hold the others"):
        slice_only(ids, ids, None)


def test_a_group_that_does_not_fit_the_shard_is_refused() -> None:
    parallel = TensorParallelGroup(Communicator(None, 2, 1))
    with pytest.raises(ValueError, match=r"the shard is for rank 0 of 2, this is rank 1 of 2"):
        Decoder(CONFIG, shard=shard_of(CONFIG, ParallelStrategy(tp=2), 0), parallel=parallel)


# ---------------------------------------------------------------- parameters


def test_random_shards_are_slices_of_the_whole(config: DecoderConfig) -> None:
    whole = random_model(config, seed=7)
    for shard in shards(config, ParallelStrategy(tp=4, pp=2)):
        part = random_model(config, seed=7, shard=shard)
        for name, p in part.named_shards():
            assert torch.equal(p, whole.get_parameter(name)[part.place_of(name)])


def test_set_parameters_aliases_and_keeps_the_objects_and_the_tie() -> None:
    whole = whole_model(CONFIGS["tied"])
    other = random_model(CONFIGS["tied"], seed=9)
    objects = dict(other.named_parameters())
    tensors = {name: p.detach().clone() for name, p in whole.named_parameters()}
    other.set_parameters(tensors)
    assert other.head.weight is other.embedding.weight
    for name, p in other.named_shards():
        assert p is objects[name]
        assert p.data_ptr() == tensors[name].data_ptr()


def test_a_decoder_without_memory_is_filled_later() -> None:
    for config in CONFIGS.values():
        whole = whole_model(config)
        decoder = Decoder(config, device=META).requires_grad_(False)
        decoder.set_parameters(dict(whole.named_parameters()))
        assert not any(p.requires_grad for p in decoder.parameters())
        if config.tied_embeddings:
            assert decoder.head.weight is decoder.embedding.weight
        ours, theirs = (results_of(run_stages([model], config.vocab_size), config) for model in (decoder, whole))
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b)


def test_released_parameters_hold_no_memory_and_come_back() -> None:
    whole = whole_model(CONFIGS["tied"])
    tensors = {name: p.detach().clone() for name, p in whole.named_parameters()}
    expected = results_of(run_stages([whole], CONFIG.vocab_size), CONFIG)
    backward(expected)
    whole.release_parameters()
    assert sum(p.untyped_storage().nbytes() for p in whole.parameters()) == 0
    assert all(p.grad is None for p in whole.parameters())
    whole.set_parameters(tensors)
    assert whole.head.weight is whole.embedding.weight
    for a, b in zip(results_of(run_stages([whole], CONFIG.vocab_size), CONFIG), expected, strict=True):
        assert torch.equal(a, b)


def test_parameters_of_another_shard_are_refused() -> None:
    whole = whole_model(CONFIG)
    tensors = dict(whole.named_parameters())
    half = random_model(CONFIG, 1, shard=shard_of(CONFIG, ParallelStrategy(tp=2), 0))
    with pytest.raises(ValueError, match=r"'embedding.weight' has shape \[61, 32\], this shard has \[30, 32\]"):
        half.set_parameters(tensors)
    with pytest.raises(ValueError, match=r"1 parameters are missing or not of this shard, the first is 'norm.weight'"):
        whole.set_parameters({name: t for name, t in tensors.items() if name != "norm.weight"})


@pytest.mark.parametrize(("n_kv_heads", "n_kv"), [(8, 0), (4, 0), (2, 4), (1, 4)])
def test_shared_kv_heads_have_partial_gradients(n_kv_heads: int, n_kv: int) -> None:
    config = replace(CONFIG, n_kv_heads=n_kv_heads)
    part = Decoder(config, shard=shard_of(config, ParallelStrategy(tp=4), 1), device=META)
    partial = [(name, kind) for name, _, kind in part.tp_partial_gradients() if name.startswith("blocks.2.")]
    assert partial == [(f"blocks.2.attention.{x}", "kv") for x in ("k.weight", "k.bias", "v.weight", "v.bias")[:n_kv]]


# ---------------------------------------------------------------- files


def test_a_loaded_shard_is_a_slice_of_the_whole(config: DecoderConfig, tmp_path: Path) -> None:
    whole = whole_model(config)
    save_model(whole, tmp_path, max_shard_bytes=9000)
    assert read_model_config(tmp_path, head=config.head) == config
    for shard in shards(config, ParallelStrategy(tp=4, pp=3)):
        part = load_model(tmp_path, head=config.head, shard=shard)
        for name, p in part.named_shards():
            assert torch.equal(p, whole.get_parameter(name)[part.place_of(name)])


def test_every_shard_of_a_new_value_head_is_the_same(tmp_path: Path) -> None:
    save_model(whole_model(CONFIGS["tied"]), tmp_path)
    whole = load_model(tmp_path, head="value", seed=3)
    parts = [
        load_model(tmp_path, head="value", seed=3, shard=shard)
        for shard in shards(whole.config, ParallelStrategy(tp=2, pp=2))
    ]
    heads = [part.head.weight for part in parts if part.head is not None]
    assert len(heads) == 2
    assert all(torch.equal(head, whole.head.weight) for head in heads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_stages_saved_one_by_one_are_read_by_transformers(
    config: DecoderConfig, dtype: torch.dtype, tmp_path: Path
) -> None:
    whole = whole_model(replace(config, dtype=dtype_name(dtype)))
    stages = stages_of(whole, pp=3)
    for pp_rank in (2, 0, 1):
        tensors = (
            (name, p) for name, p in stages[pp_rank].named_shards() if pp_rank == 0 or name != "embedding.weight"
        )
        save_stage(
            whole.config,
            tmp_path,
            tensors,
            pp_rank=pp_rank,
            stages=stage_layers(whole.config, 3),
            max_shard_bytes=20_000,
        )
    with pytest.raises(FileNotFoundError):
        (tmp_path / "config.json").stat()
    save_index(whole.config, tmp_path, stages=stage_layers(whole.config, 3), max_shard_bytes=20_000)
    theirs = (
        transformers.AutoModelForSequenceClassification if config.is_scalar else transformers.AutoModelForCausalLM
    ).from_pretrained(tmp_path, dtype="auto")
    assert theirs.dtype == dtype
    state = theirs.state_dict()
    state.pop("lm_head.weight" if config.tied_embeddings else "", None)
    back = load_model(tmp_path, head=config.head, dtype=dtype)
    n_joined = sum(config.experts_of(i) is not None for i in range(config.n_layers))  # gate and up of all experts
    assert len(state) == len(list(back.parameters())) - n_joined
    assert torch.equal(state["model.layers.1.mlp.down_proj.weight"], whole.blocks[1].mlp.down.weight)
    for name, p in whole.named_parameters():
        assert torch.equal(back.get_parameter(name), p)


def test_files_of_an_earlier_save_do_not_stay(tmp_path: Path) -> None:
    """An index that stays would win over the new file, a single file that stays over the new index."""
    config = replace(CONFIG, attention_bias=False, o_bias=False, mlp_bias=False)
    first, second = whole_model(config), random_model(config, seed=9)
    (tmp_path / "model_card.safetensors").write_bytes(b"of the user")
    for model, max_shard_bytes in ((first, 20_000), (second, 1 << 30), (first, 20_000)):
        save_model(model, tmp_path, max_shard_bytes=max_shard_bytes)
        names = {path.name for path in tmp_path.iterdir()} - {"config.json", "model_card.safetensors"}
        assert (names == {"model.safetensors"}) == (model is second)
        assert "model.safetensors" in names or "model.safetensors.index.json" in names
        for load in (load_model(tmp_path), transformers.AutoModelForCausalLM.from_pretrained(tmp_path)):
            embedding = next(iter(load.parameters()))
            assert torch.equal(embedding, model.embedding.weight)
    assert (tmp_path / "model_card.safetensors").exists()


def test_tensors_in_another_order_or_dtype_are_not_saved(tmp_path: Path) -> None:
    whole = whole_model(CONFIG)
    named = list(whole.named_shards())
    with pytest.raises(ValueError, match=re.escape("'head.weight' came to be saved where 'embedding.weight' is next")):
        save_stage(CONFIG, tmp_path, reversed(named))
    with pytest.raises(
        ValueError, match=r"'model.embed_tokens.weight' is torch.float32 \[61, 32\], not torch.bfloat16"
    ):
        save_stage(replace(CONFIG, dtype="bfloat16"), tmp_path, named)
    with pytest.raises(ValueError, match="shorter"):
        save_stage(CONFIG, tmp_path, named[:-1])
    assert list(tmp_path.iterdir()) == []
