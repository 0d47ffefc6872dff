"""Tensor and sequence parallelism over gloo: every number is that of the whole module."""

from __future__ import annotations

import errno
import itertools
import resource
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers

from realrl.engine.groups import ALONE, Communicator
from realrl.engine.parameters.gather_parameters import gather_parameters
from realrl.engine.tensor_parallel import TensorParallelGroup, sync_partial_gradients
from realrl.engine.train.outputs import DecoderOutput
from realrl.model.decoder import Decoder
from realrl.model.files.hf import load_model
from realrl.model.init import random_model
from realrl.model.layers.attention import PackedAttention
from tests.helpers.ranks import run_ranks
from tests.helpers.sharded import (
    CONFIG,
    CONFIGS,
    assert_close,
    assert_gradients_equal,
    backward,
    gradients_of,
    results_of,
    run_stages,
    save_sharded,
    stages_of,
    whole_model,
)


def world(rank: int, world_size: int) -> Communicator:
    return Communicator(dist.group.WORLD, world_size, rank)


def _compare(rank: int, world_size: int) -> None:
    group = world(rank, world_size)
    for (name, config), sp in itertools.product(CONFIGS.items(), (False, True)):
        whole = whole_model(replace(config, n_layers=2))
        expected = results_of(run_stages([whole], config.vocab_size), config)
        backward(expected)
        parallel = TensorParallelGroup(group, sp=sp)
        for pp, checkpointing in ((1, False), (2, True)):
            what = f"{name}, sp={sp}, pp={pp}"
            stages = stages_of(whole, pp=pp, parallel=parallel, activation_checkpointing=checkpointing)
            results = results_of(run_stages(stages, config.vocab_size), config)
            for ours, theirs in zip(results, expected, strict=True):
                assert_close(ours, theirs, what)
            backward(results)
            gradients = gradients_of(stages)
            for stage, by_name in zip(stages, gradients, strict=True):
                sync_partial_gradients(stage, group, by_name)
            assert_gradients_equal(stages, gradients, whole)


@pytest.mark.parametrize(
    "n_ranks",
    [2, pytest.param(4, marks=pytest.mark.slow), pytest.param(8, marks=[pytest.mark.slow, pytest.mark.timeout(400)])],
)
def test_results_and_gradients_equal_those_of_the_whole_module(n_ranks: int) -> None:
    run_ranks(n_ranks, _compare, timeout_s=300.0)


def _compute_nothing(rank: int, world_size: int) -> None:
    whole = whole_model(CONFIG)
    nothing = torch.zeros(0, dtype=torch.int64)
    for sp in (False, True):
        (decoder,) = stages_of(whole, parallel=TensorParallelGroup(world(rank, world_size), sp=sp))
        out = DecoderOutput(decoder, decoder(nothing, nothing, PackedAttention([0])), nothing, [0], role="tested")
        logprobs, entropy = out.logprobs_and_entropy()
        assert logprobs.shape == entropy.shape == (0,)
        (logprobs.sum() + entropy.sum()).backward()
        sync_partial_gradients(decoder, world(rank, world_size), gradients_of([decoder])[0])
        assert not any(p.grad.any() for p in decoder.parameters() if p.grad is not None)


def _compute_in_bf16(rank: int, world_size: int) -> None:
    config = replace(CONFIGS["tied"], dtype="bfloat16")
    whole = random_model(config, seed=1)
    expected = results_of(run_stages([whole], config.vocab_size), config)
    backward(expected)
    for sp in (False, True):
        stages = stages_of(whole, parallel=TensorParallelGroup(world(rank, world_size), sp=sp))
        results = results_of(run_stages(stages, config.vocab_size), config)
        for ours, theirs in zip(results, expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=0.02, rtol=0.02)
        backward(results)
        (gradients,) = gradients_of(stages)
        sync_partial_gradients(stages[0], world(rank, world_size), gradients)
        for name, grad in gradients.items():
            theirs = whole.get_parameter(name).grad[stages[0].place_of(name)]
            assert (grad - theirs).float().norm() < 0.05 * theirs.float().norm() + 1e-6, name


def _gather_logits(rank: int, world_size: int) -> None:
    group = world(rank, world_size)
    whole = torch.randn(7, 61, generator=torch.Generator().manual_seed(0))
    stop = [(r + 1) * 61 // world_size for r in range(world_size)]
    part = whole[:, stop[rank - 1] if rank else 0 : stop[rank]]
    parallel = TensorParallelGroup(group)
    assert torch.equal(parallel.gather_logits(part, 61), whole)
    assert parallel.gather_logits(part[:0], 61).shape == (0, 61)


def _edges(rank: int, world_size: int) -> None:
    _compute_in_bf16(rank, world_size)
    _gather_logits(rank, world_size)
    _compute_nothing(rank, world_size)


def test_bf16_is_close_and_no_tokens_give_no_gradient_and_uneven_logits_are_gathered() -> None:
    run_ranks(4, _edges)


def grid(rank: int) -> tuple[Communicator, Communicator]:
    """The (tp, pp) groups of a rank of d1t2p2."""
    tp_groups, pp_groups = ([dist.new_group(ranks) for ranks in rows] for rows in ([[0, 1], [2, 3]], [[0, 2], [1, 3]]))
    pp_rank, tp_rank = divmod(rank, 2)
    return Communicator(tp_groups[pp_rank], 2, tp_rank), Communicator(pp_groups[tp_rank], 2, pp_rank)


def _save(rank: int, world_size: int, folder: Path) -> int | None:
    tp, pp = grid(rank)
    for name, config in CONFIGS.items():
        whole = whole_model(config)
        stage = stages_of(whole, pp=2, parallel=TensorParallelGroup(tp))[pp.rank]
        save_sharded(stage, folder / name, tp=tp, pp=pp)
        gathered = dict(gather_parameters(stage, tp))
        own = [name for name in stage.specs if name != "embedding.weight" or not stage.has_tied_copy]
        assert list(gathered) == (own if tp.rank == 0 else [])
        for parameter, tensor in gathered.items():
            assert torch.equal(tensor, whole.get_parameter(parameter))
    return _save_on_a_full_disk(rank, stage, folder / "full", (tp, pp))


def _save_on_a_full_disk(
    rank: int, stage: Decoder, folder: Path, groups: tuple[Communicator, Communicator]
) -> int | None:
    tp, pp = groups
    _, hard = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 2:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        save_sharded(stage, folder, tp=tp, pp=pp)
    except OSError as error:
        return error.errno
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return None


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int | None]]:
    """Every configuration saved by d1t2p2, one more with a full disk on rank 2, and what each rank met there."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, run_ranks(4, _save, folder)


def test_a_model_saved_from_tensor_ranks_of_two_stages_is_read_by_transformers(saved: tuple[Path, list]) -> None:
    folder, _ = saved
    for name, config in CONFIGS.items():
        files = {path.name for path in (folder / name).iterdir()}
        shards = {f"model-0000{i}-of-00002.safetensors" for i in (1, 2)}
        assert files == {"config.json", "model.safetensors.index.json", *shards}
        whole = whole_model(config)
        loaded = load_model(folder / name, head=config.head)
        for parameter, tensor in whole.named_parameters():
            assert torch.equal(loaded.get_parameter(parameter), tensor)
        if config.head == "lm":
            theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / name)
            assert torch.equal(theirs.model.embed_tokens.weight, whole.embedding.weight)
            assert torch.equal(theirs.lm_head.weight, whole.head.weight)
            assert torch.equal(theirs.model.layers[2].self_attn.o_proj.weight, whole.blocks[2].attention.o.weight)


def test_a_full_disk_is_reported_where_it_is_and_leaves_no_torn_file(saved: tuple[Path, list]) -> None:
    folder, errors = saved
    assert errors == [None, None, errno.EFBIG, None]
    written = {"config.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors"}
    assert {path.name for path in (folder / "full").iterdir()} == written


def test_a_group_of_one_communicates_nothing() -> None:
    parallel = TensorParallelGroup(ALONE, sp=True)
    x = torch.randn(5, 3)
    assert not parallel.is_sequence_parallel
    assert parallel.n_local_rows(5) == 5
    for y in (parallel.enter(x, 5), parallel.leave(x), parallel.gather_rows(x, 5), parallel.gather_logits(x, 3)):
        assert y is x
