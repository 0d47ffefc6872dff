"""The parts that families differ in, over tensor-parallel ranks and pipeline stages: numbers of the whole module."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers

from realrl.config.schema import GenerationConfig
from realrl.engine.groups import Communicator
from realrl.engine.parallel import Parallel
from realrl.engine.tensor_parallel import TensorParallelGroup, sync_partial_gradients
from realrl.mesh.device_mesh import ParallelStrategy
from realrl.model.files.hf import load_model
from realrl.sched.key_value import KeyValueClient
from realrl.shape import DecoderConfig
from tests.helpers.families import CASES, ONE_EACH, decoder_config
from tests.helpers.ranks import run_ranks
from tests.helpers.sharded import (
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
from tests.ranks.test_generate_parallel import as_lists, generate, place, shard

FEW = ("qwen3 window", "gpt2", "olmo2 bias")  # head norms and windows; learned positions; one norm of shared heads
ALL = tuple(tuple(CASES)[i::4] for i in range(4))
SAMPLED = GenerationConfig(max_new_tokens=9, n_responses=2, max_batch_size=6)


def configs(cases: tuple[str, ...], *, heads: bool = False) -> dict[str, DecoderConfig]:
    """By case; with `heads`, each as a critic too."""
    found = {case: decoder_config(case) for case in cases}
    if heads:
        found |= {f"{case}, value": replace(config, head="value") for case, config in found.items()}
    return found


def _compare(rank: int, world_size: int, models: dict[str, DecoderConfig]) -> None:
    """In float64, because gradients of models that scale what they compute are large; the head stays float32."""
    group = Communicator(dist.group.WORLD, world_size, rank)
    for name, config in models.items():
        config = replace(config, dtype="float64")
        whole = whole_model(config)
        expected = results_of(run_stages([whole], config.vocab_size), config)
        backward(expected)
        for sp, pp in ((False, 2), (True, 1)):
            parallel = TensorParallelGroup(group, sp=sp)
            stages = stages_of(whole, pp=pp, parallel=parallel, activation_checkpointing=sp)
            results = results_of(run_stages(stages, config.vocab_size), config)
            for ours, theirs in zip(results, expected, strict=True):
                assert_close(ours, theirs, f"{name}, sp={sp}, pp={pp}")
            backward(results)
            gradients = gradients_of(stages)
            for stage, by_name in zip(stages, gradients, strict=True):
                sync_partial_gradients(stage, group, by_name)
            assert_gradients_equal(stages, gradients, whole)


@pytest.mark.parametrize(
    ("n_ranks", "cases"),
    [(2, ONE_EACH), (4, FEW), *(pytest.param(n, part, marks=pytest.mark.slow) for n in (1, 2, 4) for part in ALL)],
)
def test_results_and_gradients_equal_those_of_the_whole_module(n_ranks: int, cases: tuple[str, ...]) -> None:
    run_ranks(n_ranks, _compare, configs(cases, heads=cases != ONE_EACH), timeout_s=100.0)


def _generate_and_save(
    rank: int,
    world_size: int,
    meeting: KeyValueClient,
    models: dict[str, DecoderConfig],
    strategy: ParallelStrategy,
    folder: Path,
) -> dict[str, object]:
    parallel = place(rank, strategy, meeting)
    tokens: dict[str, object] = {}
    for name, config in models.items():
        stage = shard(whole_model(config), parallel)
        tokens[name] = as_lists(generate(stage, parallel, SAMPLED))[0]
        save_sharded(stage, folder / name, tp=parallel.tp, pp=parallel.pp)
    return tokens


@pytest.mark.parametrize(
    ("strategy", "cases"),
    [
        (ParallelStrategy(tp=2, pp=2), ONE_EACH),
        *(
            pytest.param(strategy, part, marks=pytest.mark.slow)
            for strategy in (ParallelStrategy(tp=4), ParallelStrategy(tp=2, pp=2), ParallelStrategy(pp=2))
            for part in ALL
        ),
    ],
    ids=str,
)
def test_generated_and_saved_like_one_process(
    strategy: ParallelStrategy, cases: tuple[str, ...], tmp_path: Path
) -> None:
    models = configs(cases)
    arguments = (models, strategy, tmp_path)
    ranks = run_ranks(strategy.n_devices, _generate_and_save, *arguments, timeout_s=100.0, joined=False)
    assert all(tokens == ranks[0] for tokens in ranks)
    for name, config in models.items():
        whole = whole_model(config)
        assert ranks[0][name] == as_lists(generate(whole, Parallel(), SAMPLED))[0], name
        loaded = load_model(tmp_path / name)
        for parameter, tensor in whole.named_parameters():
            assert torch.equal(loaded.get_parameter(parameter), tensor), parameter
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert torch.equal(theirs.get_input_embeddings().weight, whole.embedding.weight)
