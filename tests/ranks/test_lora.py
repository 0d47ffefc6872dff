"""Adapters under (dp, tp, pp, sp) over gloo: the numbers are those of one process, saved and resumed as well."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from realrl.algo.api import LossFn, MicroBatching
from realrl.config.schema import GenerationConfig, OptimizerConfig
from realrl.engine.decoder_engine import DecoderEngine
from realrl.engine.parallel import Parallel
from realrl.engine.tensor_parallel import TensorParallelGroup
from realrl.mesh.device_mesh import ParallelStrategy
from realrl.model.decoder import Decoder
from realrl.model.files.hf import load_model
from realrl.model.init import random_model
from realrl.plan.parameters.adapters import is_adapter
from realrl.plan.parameters.shards import shard_of
from realrl.sched.key_value import KeyValueClient
from realrl.shape import DecoderConfig
from tests.helpers.adapters import LORA, fill_adapters, merged
from tests.helpers.ranks import run_ranks
from tests.helpers.sharded import save_engine
from tests.helpers.training import VOCAB_SIZE, make_batch, masked_nll, n_masked
from tests.ranks.test_engine_3d import N_SAMPLES, join, score_loss, share_of

OPTIMIZER = OptimizerConfig(lr=1e-2, schedule="constant", clip_grad_norm=0.1, weight_decay=0.1, eps=1e-2)
# 46 MLP rows that no tp divides, 2 KV heads that 4 ranks share
BASE = DecoderConfig(VOCAB_SIZE, 32, 4, 8, 2, 4, 46, attention_bias=True, o_bias=True, mlp_bias=True, lora=LORA)
MODELS = {
    "untied": BASE,
    "tied": replace(BASE, tied_embeddings=True, attention_bias=False, o_bias=False, mlp_bias=False),
    "value": replace(BASE, head="value", lora=replace(LORA, targets=("k", "o"))),
}
TP2, TP4 = ParallelStrategy(tp=2), ParallelStrategy(tp=4)
TWO = [
    ("untied", TP2),
    ("value", replace(TP2, sp=True)),
    ("tied", ParallelStrategy(pp=2)),
    ("untied", ParallelStrategy(pp=2, vpp=2)),
    ("value", ParallelStrategy(2)),
]
FOUR = [
    ("untied", TP4),
    ("tied", replace(TP4, sp=True)),
    ("value", TP4),
    ("tied", ParallelStrategy(tp=2, pp=2, sp=True)),
    ("value", ParallelStrategy(tp=2, pp=2)),
    ("value", ParallelStrategy(2, 1, 2, vpp=2)),
    ("untied", ParallelStrategy(2, 2)),
    ("untied", ParallelStrategy(2, 1, 2)),
]


@dataclass(frozen=True)
class Case:
    model: str
    strategy: ParallelStrategy
    n_mbs: int | None = 3

    @property
    def config(self) -> DecoderConfig:
        return MODELS[self.model]

    @property
    def loss(self) -> LossFn:
        return score_loss if self.config.is_scalar else masked_nll


def make_decoder(case: Case, parallel: Parallel) -> Decoder:
    shard = shard_of(case.config, case.strategy, parallel.mesh_rank)
    group = TensorParallelGroup(parallel.tp, sp=case.strategy.sp)
    decoder = random_model(case.config, seed=1, shard=shard, parallel=group)
    for name, p in decoder.named_parameters():
        if p.dim() > 1 and not is_adapter(name):
            p.data.mul_(5)
    decoder.activation_checkpointing = case.n_mbs is not None
    return fill_adapters(decoder)


def make_engine(case: Case, parallel: Parallel) -> DecoderEngine:
    decoder = make_decoder(case, parallel)
    return DecoderEngine(decoder, role="actor", parallel=parallel, optimizer=OPTIMIZER, total_optimizer_steps=10)


def outcome(case: Case, parallel: Parallel, folder: Path | None = None) -> dict[str, Any]:
    engine, whole = make_engine(case, parallel), make_batch(N_SAMPLES)
    share = share_of(whole, parallel.dp_rank, parallel.dp.n_ranks)
    cut = MicroBatching(n_mbs=case.n_mbs)
    result = engine.train_batch(share, case.loss, normaliser=n_masked(whole), micro_batching=cut)
    forwards = [
        engine.forward(
            share,
            lambda out, _: out.scores() if case.config.is_scalar else out.logprobs(0.8),
            micro_batching=cut,
            adapter=adapter,
        )
        for adapter in (True, False)
    ]
    responses: list[list[int]] = []
    if not case.config.is_scalar:
        prompts = whole.remap({"input_ids": "prompt_ids"})
        generation = GenerationConfig(max_new_tokens=6, temperature=0.0)
        made = engine.generate(prompts, generation, seed=1, step=1, eos_id=2)
        responses = [tokens.tolist() for tokens in made.responses]
    state = engine.state_dict()
    if folder is not None and parallel.dp_rank == 0:
        save_engine(engine, folder)
    resumed = make_engine(case, parallel)
    resumed.load_state_dict(state)
    again = [e.train_batch(share, case.loss, normaliser=n_masked(whole), micro_batching=cut) for e in (engine, resumed)]
    assert again[0] == again[1]
    named = dict(engine.decoder.named_shards())
    return {
        "result": result,
        "forwards": [f.numpy() for f in forwards],
        "responses": responses,
        "slices": {name: p.detach().numpy() for name, p in named.items()},
        "places": {name: engine.decoder.place_of(name) for name in named},
        "trained": sorted(state["parameters"]),
    }


def _outcomes(
    rank: int, world_size: int, meeting: KeyValueClient, cases: list[Case], folder: Path
) -> list[dict[str, Any]]:
    groups, places = join(rank, world_size, meeting, {case.strategy for case in cases})
    out = [outcome(case, places[case.strategy], folder / str(i)) for i, case in enumerate(cases)]
    groups.destroy()
    return out


@cache
def reference(case: Case) -> dict[str, Any]:
    return outcome(case, Parallel())


@pytest.mark.parametrize(("world_size", "cases"), [(2, TWO), pytest.param(4, FOUR, marks=pytest.mark.slow)])
def test_every_layout_gives_the_numbers_of_one_rank(
    world_size: int, cases: list[tuple[str, ParallelStrategy]], tmp_path: Path
) -> None:
    every = [Case(*case) for case in cases]
    by_rank = run_ranks(world_size, _outcomes, every, tmp_path, joined=False, timeout_s=110.0)
    for index, case in enumerate(every):
        expected = reference(Case(case.model, ParallelStrategy(), None))
        forwards: dict[int, list[Any]] = {}
        for rank, outcomes in enumerate(by_rank):
            got = outcomes[index]
            assert got["result"] == by_rank[0][index]["result"], case  # bit for bit on all ranks
            assert got["result"].stats == pytest.approx(expected["result"].stats, rel=1e-5), case
            assert got["result"].grad_norm == pytest.approx(expected["result"].grad_norm, rel=1e-4), case
            assert got["responses"] == expected["responses"], case
            for name, values in got["slices"].items():
                wanted = expected["slices"][name][got["places"][name]]
                np.testing.assert_allclose(values, wanted, rtol=1e-4, atol=2e-5, err_msg=f"{case} {name}")
            trained = [name for name in got["slices"] if is_adapter(name) or name == "head.weight"]
            assert got["trained"] == sorted(n for n in trained if is_adapter(n) or case.config.is_scalar)
            dp_rank = case.strategy.coordinates(rank)[1]
            same = forwards.setdefault(dp_rank, got["forwards"])
            assert all((a == b).all() for a, b in zip(same, got["forwards"], strict=True))
        for kind in (0, 1):
            together = np.concatenate([forwards[dp_rank][kind] for dp_rank in sorted(forwards)])
            np.testing.assert_allclose(together, expected["forwards"][kind], rtol=1e-4, atol=5e-5, err_msg=str(case))
        check_saved(case, tmp_path / str(index))


def check_saved(case: Case, folder: Path) -> None:
    """The folder holds what one rank would have merged and written, whatever the stages."""
    from safetensors.torch import load_file

    one = Case(case.model, ParallelStrategy(), None)
    engine = make_engine(one, Parallel())
    whole = make_batch(N_SAMPLES)
    engine.train_batch(whole, case.loss, normaliser=n_masked(whole), micro_batching=MicroBatching())
    saved = load_model(folder, head=case.config.head)
    for name, p in merged(engine.decoder).named_parameters():
        torch.testing.assert_close(saved.get_parameter(name), p, rtol=1e-4, atol=2e-5, msg=f"{case} {name}")
    adapters = load_file(folder / "adapter" / "adapter_model.safetensors")
    n_trained = len([name for name in engine.decoder.specs if is_adapter(name)]) + case.config.is_scalar
    assert len(adapters) == n_trained
    b = adapters["base_model.model.model.layers.3.self_attn.o_proj.lora_B.weight"]
    expected = engine.decoder.get_parameter("blocks.3.attention.o.lora_b").detach()
    torch.testing.assert_close(b, expected, rtol=1e-4, atol=2e-5)
