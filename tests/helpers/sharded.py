"""Small models with every kind of parameter, cut into shards, and their outputs and gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from realrl.engine.decoder_engine import DecoderEngine
from realrl.engine.groups import Communicator
from realrl.engine.parameters.gather_parameters import WriteModel, copy_sharded
from realrl.engine.train.outputs import DecoderOutput
from realrl.mesh.device_mesh import ParallelStrategy
from realrl.model.decoder import Decoder
from realrl.model.init import random_model
from realrl.model.layers.attention import PackedAttention
from realrl.model.parallel import UNSHARDED, TensorParallel
from realrl.plan.parameters.shards import shard_of
from realrl.shape import DecoderConfig, MoEConfig

SEQLENS = (6, 1, 0, 11, 4, 5)  # 27 tokens: no tensor-parallel size divides them
CONFIG = DecoderConfig(61, 32, 3, 8, 4, 4, 50, attention_bias=True, o_bias=True, mlp_bias=True)
"""A model of 61 tokens and 50 inner units: no tensor-parallel size divides both."""

CONFIGS = {
    "biases": CONFIG,
    "tied": replace(CONFIG, tied_embeddings=True, attention_bias=False, o_bias=False, mlp_bias=False),
    "one KV head": replace(CONFIG, n_kv_heads=1),
    "value": replace(CONFIG, head="value", n_kv_heads=2),
    "experts": replace(
        CONFIG,
        attention_bias=False,
        o_bias=False,
        mlp_bias=False,
        family="qwen3_moe",
        qk_norm="head",
        moe=MoEConfig(6, 2, 13, normalise_top_k=False, aux_loss_coef=0.1, dense_layers=(1,)),
    ),
}


def whole_model(config: DecoderConfig) -> Decoder:
    """Make a decoder in which no parameter is zero, one or tiny."""
    decoder = random_model(config, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, p in decoder.named_parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.2 + float("norm" in name))
    return decoder


def stages_of(
    whole: Decoder,
    *,
    pp: int = 1,
    vpp: int = 1,
    parallel: TensorParallel = UNSHARDED,
    activation_checkpointing: bool = False,
) -> list[Decoder]:
    """Make one tensor rank's shard of each pipeline stage, with parameters of its own."""
    config = whole.config
    strategy = ParallelStrategy(pp=pp, tp=parallel.tp_size, vpp=vpp)
    stages = []
    for pp_rank in range(pp):
        mesh_rank = strategy.mesh_rank(pp_rank=pp_rank, dp_rank=0, tp_rank=parallel.tp_rank)
        stage = Decoder(
            config,
            shard=shard_of(config, strategy, mesh_rank),
            parallel=parallel,
            device=torch.device("meta"),
            activation_checkpointing=activation_checkpointing,
        )
        stage.set_parameters({name: whole.get_parameter(name)[stage.place_of(name)].clone() for name in stage.specs})
        stages.append(stage)
    return stages


def run_stages(stages: Sequence[Decoder], vocab_size: int) -> DecoderOutput:
    """Feed the same tokens through the stages, one after the other."""
    generator = torch.Generator().manual_seed(3)
    input_ids = torch.randint(0, vocab_size, (sum(SEQLENS),), generator=generator)
    positions = torch.cat([torch.arange(n) for n in SEQLENS])
    attention = PackedAttention(SEQLENS)
    x = input_ids
    for chunk in range(len(stages[0].shard.chunks)):
        for stage in stages:
            x = stage.forward_stage(x, positions, attention, chunk=chunk)
    return DecoderOutput(stages[-1], x, input_ids, SEQLENS, role="tested")


def results_of(out: DecoderOutput, config: DecoderConfig) -> list[torch.Tensor]:
    """All outputs that a loss can use."""
    if config.is_scalar:
        return [out.scores()]
    n_transitions = sum(n - 1 for n in SEQLENS if n)
    mask = torch.rand(n_transitions, generator=torch.Generator().manual_seed(4)) < 0.7
    others = torch.randint(0, config.vocab_size, (int(mask.sum()), 3), generator=torch.Generator().manual_seed(6))
    top = out.top_logprobs(3, 0.7, mask)[1]
    return [*out.logprobs_and_entropy(0.7, mask), out.logprobs(), out.logprobs_of(others, 0.7, mask), top]


def backward(results: Sequence[torch.Tensor]) -> None:
    """Do the backward pass of a loss in which each number weighs differently."""
    generator = torch.Generator().manual_seed(5)
    loss = sum((torch.randn(r.shape, generator=generator) * r).mean() for r in results)
    assert isinstance(loss, torch.Tensor)
    loss.backward()


def gradients_of(stages: Sequence[Decoder]) -> list[dict[str, torch.Tensor]]:
    """Gradients by stage and global name, zeros where none arrived."""
    return [
        {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in stage.named_shards()}
        for stage in stages
    ]


def assert_close(ours: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Assert agreement to 1e-5."""
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5, msg=lambda text: f"{what}: {text}")


def assert_gradients_equal(
    stages: Sequence[Decoder], gradients: Sequence[Mapping[str, torch.Tensor]], whole: Decoder
) -> None:
    """Compare with the whole model's gradients; those of a tied embedding are added up over its stages."""
    tied = [g["embedding.weight"] for g in gradients if "embedding.weight" in g]
    for stage, by_name in zip(stages, gradients, strict=True):
        for name, grad in by_name.items():
            expected = whole.get_parameter(name).grad
            assert expected is not None
            total = torch.stack(tied).sum(0) if name == "embedding.weight" else grad
            assert_close(total, expected[stage.place_of(name)], name)


def save_sharded(decoder: Decoder, folder: Path, *, tp: Communicator, pp: Communicator) -> None:
    """Write this rank's part of the model."""
    _write(copy_sharded(decoder, _copy, tp=tp, pp=pp), folder)


def save_engine(engine: DecoderEngine, folder: Path) -> None:
    """Write this rank's part of the engine's model."""
    _write(engine.copy_hf(_copy), folder)


def _copy(_: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().clone()


def _write(write: WriteModel | None, folder: Path) -> None:
    if write is not None:
        write(folder)
