"""Generation over tensor- and pipeline-parallel ranks: token for token what one process generates."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from realrl.algo.api import GenerationResult
from realrl.config.schema import GenerationConfig
from realrl.cpu import TorchKernels
from realrl.data.sample import SequenceSample
from realrl.engine.decoder_engine import DecoderEngine
from realrl.engine.generate import generator
from realrl.engine.groups import Groups
from realrl.engine.parallel import Parallel, parallel_of
from realrl.engine.tensor_parallel import TensorParallelGroup
from realrl.errors import CallError
from realrl.mesh.device_mesh import Allocation, Cluster, DeviceMesh, ParallelStrategy
from realrl.model.decoder import Decoder
from realrl.plan.groups import process_groups
from realrl.sched.key_value import KeyValueClient
from realrl.sched.messages import KeySchema, Per
from realrl.shape import DecoderConfig
from tests.helpers.ranks import run_ranks
from tests.helpers.sharded import CONFIGS, stages_of, whole_model
from tests.helpers.tape import Tapes

CPU = torch.device("cpu")
TOKENS = KeySchema("int64", Per.TOKEN)
EOS = 0
PROMPT_LENGTHS = (5, 3, 9, 1, 7, 2, 4)
LIMITS = {"max_new_tokens": 9, "n_responses": 3, "stop_ids": (7, 9, 20, 30, 41, 50)}
OPTIONS = {
    "greedy": GenerationConfig(temperature=0.0, max_new_tokens=9),
    "sampled": GenerationConfig(**LIMITS, min_new_tokens=4),
    "temperature": GenerationConfig(**LIMITS, temperature=0.7, max_batch_size=7),
    "top-k": GenerationConfig(**LIMITS, top_k=6, temperature=1.3, max_batch_size=5),
    "top-p": GenerationConfig(**LIMITS, top_p=0.8, max_batch_size=4, min_new_tokens=2),
    "one row": GenerationConfig(max_new_tokens=4, n_responses=2, max_batch_size=1),
    "one token": GenerationConfig(max_new_tokens=1, n_responses=2, max_batch_size=3),
}


def make_prompts(n_samples: int) -> tuple[list[torch.Tensor], list[str]]:
    rng = torch.Generator().manual_seed(2)
    prompts = [torch.randint(1, 60, (length,), generator=rng) for length in PROMPT_LENGTHS[:n_samples]]
    return prompts, [f"0/{i}" for i in range(n_samples)]


def generate(
    decoder: Decoder, parallel: Parallel, generation: GenerationConfig, n_samples: int = len(PROMPT_LENGTHS)
) -> GenerationResult:
    prompts, sample_ids = make_prompts(n_samples)
    batch = SequenceSample.from_lists(sample_ids, {"prompt_ids": (TOKENS, [[prompt] for prompt in prompts])})
    engine = DecoderEngine(decoder, role="actor", parallel=parallel)
    return engine.generate(batch, generation, seed=3, step=4, eos_id=EOS)


def place(rank: int, strategy: ParallelStrategy, meeting: KeyValueClient) -> Parallel:
    cluster = Cluster(1, strategy.n_devices)
    allocation = Allocation(DeviceMesh(cluster, tuple(range(strategy.n_devices))), strategy)
    planned = process_groups([allocation], cluster)
    groups = Groups.create(
        planned, rank=rank, world_size=strategy.n_devices, meeting=meeting, device=CPU, timeout_s=30.0
    )
    return parallel_of(groups, planned, allocation, rank)


def shard(whole: Decoder, parallel: Parallel) -> Decoder:
    group = TensorParallelGroup(parallel.tp, sp=parallel.strategy.sp)
    strategy = parallel.strategy
    return stages_of(whole, pp=strategy.pp, vpp=strategy.vpp, parallel=group)[parallel.pp_rank]


def as_lists(result: GenerationResult) -> tuple[list[list[int]], list[list[float]], list[list[float]], list[bool]]:
    return (
        [response.tolist() for response in result.responses],
        [values.tolist() for values in result.logprobs],
        [values.tolist() for values in result.policy_logprobs],
        list(result.truncated),
    )


def _generate_sharded(
    rank: int, world_size: int, meeting: KeyValueClient, config: DecoderConfig, strategy: ParallelStrategy
):
    parallel = place(rank, strategy, meeting)
    decoder = shard(whole_model(config), parallel)
    results = {name: as_lists(generate(decoder, parallel, generation)) for name, generation in OPTIONS.items()}
    results["two samples"] = as_lists(generate(decoder, parallel, OPTIONS["sampled"], 2))
    results["no sample"] = as_lists(generate(decoder, parallel, OPTIONS["sampled"], 0))
    return results


@pytest.mark.parametrize(
    ("model", "strategy"),
    [
        ("biases", ParallelStrategy(tp=2, sp=True)),
        pytest.param("one KV head", ParallelStrategy(tp=4), marks=pytest.mark.slow),
        ("tied", ParallelStrategy(pp=2)),
        ("five layers", ParallelStrategy(pp=2, vpp=2)),
        pytest.param("biases", ParallelStrategy(pp=3), marks=pytest.mark.slow),
        pytest.param("tied", ParallelStrategy(tp=2, pp=2), marks=pytest.mark.slow),
        ("experts", ParallelStrategy(tp=2, pp=2)),
        pytest.param("experts", ParallelStrategy(tp=4), marks=pytest.mark.slow),
        pytest.param("five of experts", ParallelStrategy(tp=2, pp=2, vpp=2), marks=pytest.mark.slow),
        pytest.param("seven layers", ParallelStrategy(pp=3, vpp=2), marks=pytest.mark.slow),
        pytest.param("two KV heads", ParallelStrategy(dp=2, tp=4), marks=pytest.mark.slow),
        pytest.param("one KV head", ParallelStrategy(tp=2, pp=3, sp=True), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_tokens_equal_those_of_one_process_on_every_rank(model: str, strategy: ParallelStrategy) -> None:
    others = {
        "two KV heads": replace(CONFIGS["tied"], n_kv_heads=2),
        "five layers": replace(CONFIGS["biases"], n_layers=5),
        "five of experts": replace(CONFIGS["experts"], n_layers=5),
        "seven layers": replace(CONFIGS["tied"], n_layers=7),
    }
    config = {**CONFIGS, **others}[model]
    whole = whole_model(config)
    expected = {name: as_lists(generate(whole, Parallel(), generation)) for name, generation in OPTIONS.items()}
    expected["two samples"] = as_lists(generate(whole, Parallel(), OPTIONS["sampled"], 2))
    expected["no sample"] = ([], [], [], [])
    assert len({tuple(response) for response in expected["sampled"][0]}) > len(PROMPT_LENGTHS)
    assert len(set(map(len, expected["temperature"][0]))) > 3  # rows leave at different times

    ranks = run_ranks(strategy.n_devices, _generate_sharded, config, strategy, joined=False)
    assert all(results == ranks[0] for results in ranks)
    for name, (tokens, logprobs, policy_logprobs, truncated) in expected.items():
        assert ranks[0][name][0] == tokens, name
        assert ranks[0][name][3] == truncated, name
        for actual, wanted in ((ranks[0][name][1], logprobs), (ranks[0][name][2], policy_logprobs)):
            for a, b in zip(actual, wanted, strict=True):
                assert a == pytest.approx(b, abs=1e-4), name


def _generate_recorded(rank: int, world_size: int, meeting: KeyValueClient, strategy: ParallelStrategy):
    tapes = Tapes()
    generator.make_recorder = lambda device: tapes
    generator.choose_kernels = lambda device, dtype, n_rows: TorchKernels(dtype)
    parallel = place(rank, strategy, meeting)
    decoder = shard(whole_model(replace(CONFIGS["biases"], n_layers=5)), parallel)
    return as_lists(generate(decoder, parallel, OPTIONS["temperature"])), tapes.n_replayed


def test_recorded_steps_of_a_pipeline() -> None:
    whole = whole_model(replace(CONFIGS["biases"], n_layers=5))
    expected = as_lists(generate(whole, Parallel(), OPTIONS["temperature"]))
    for result, n_replayed in run_ranks(2, _generate_recorded, ParallelStrategy(pp=2, vpp=2), joined=False):
        assert result[0] == expected[0]
        assert result[3] == expected[3]
        assert n_replayed > 10


def _generate_invalid(rank: int, world_size: int, meeting: KeyValueClient, strategy: ParallelStrategy) -> str:
    parallel = place(rank, strategy, meeting)
    whole = whole_model(CONFIGS["biases"])
    prompts, _ = make_prompts(4)
    assert 60 not in torch.cat(prompts)
    if parallel.dp_rank == 0:
        with torch.no_grad():
            whole.get_parameter("embedding.weight")[int(prompts[2][0])] = float("nan")
    decoder = shard(whole, parallel)
    # the other data-parallel rank goes on
    try:
        result = generate(decoder, parallel, OPTIONS["temperature"], 4)
    except CallError as error:
        return f"{error.step}: {error}"
    finally:
        parallel.dp.barrier()
    return f"{len(result.responses)} responses"


@pytest.mark.parametrize(
    "strategy",
    [ParallelStrategy(tp=2, pp=2), pytest.param(ParallelStrategy(dp=2, tp=2, pp=2), marks=pytest.mark.slow)],
    ids=str,
)
def test_logits_that_are_not_finite_stop_every_rank_of_the_replica(strategy: ParallelStrategy) -> None:
    outcomes = run_ranks(strategy.n_devices, _generate_invalid, strategy, joined=False)
    for mesh_rank, outcome in enumerate(outcomes):
        if strategy.coordinates(mesh_rank)[1] == 0:
            assert outcome == outcomes[0]
            assert "the model's logits for sample '0/2' are not finite" in outcome
            assert outcome.startswith("4: ")
        else:
            assert outcome == "12 responses"
