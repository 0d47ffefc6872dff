"""Slices that a rank holds: the invariants listed in realrl/plan/parameters/layout.py, and every refusal."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from realrl.errors import AllocationError
from realrl.mesh.device_mesh import ParallelStrategy
from realrl.model.decoder import Decoder
from realrl.plan.parameters.decoder_specs import parameter_specs
from realrl.plan.parameters.layout import parameter_layout
from realrl.plan.parameters.shards import check_tp, shard_of, whole_shard
from realrl.plan.parameters.specs import slice_of, units_of
from realrl.plan.parameters.stages import stage_layers, stage_of_layers, stages_of
from realrl.shape import DecoderConfig
from tests.plan.parameters.micro_dp import micro_dp_groups

CONFIG = DecoderConfig(
    vocab_size=13, hidden_size=8, n_layers=5, n_heads=4, n_kv_heads=2, head_dim=2, intermediate_size=11
)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tied_embeddings": True},
        {"attention_bias": True, "o_bias": True, "mlp_bias": True},
        {"qk_norm": "head", "gated_mlp": False},
        {"norm": "layer", "learned_positions": True, "tied_embeddings": False},
        {"head": "value", "tied_embeddings": True},
        {"head": "reward", "attention_bias": True},
        {"dtype": "bfloat16"},
    ],
    ids=str,
)
def test_specs_are_the_parameters_of_the_decoder(changes: dict[str, Any]) -> None:
    config = replace(CONFIG, **changes)
    specs = parameter_specs(config)
    decoder = Decoder(config)
    assert [(spec.name, spec.shape, spec.num_bytes) for spec in specs] == [
        (name, tuple(p.shape), p.nbytes) for name, p in decoder.named_parameters()
    ]
    is_tied = changes == {"tied_embeddings": True}
    assert [spec.name for spec in specs if spec.also_layer == "head"] == ["embedding.weight"] * is_tied


def test_slices_follow_heads_rows_and_columns() -> None:
    config = replace(CONFIG, attention_bias=True, o_bias=True, mlp_bias=True, qk_norm="head")
    specs = parameter_specs(replace(config, learned_positions=True, max_positions=9))
    layout = parameter_layout(specs, ParallelStrategy(tp=2), (7, 5))
    slices = layout.slices_of(5)
    assert slices["embedding.weight"] == ((6, 13), (0, 8))
    assert slices["blocks.0.attention.q.weight"] == ((4, 8), (0, 8))
    assert slices["blocks.0.attention.q.bias"] == ((4, 8),)
    assert slices["blocks.0.attention.k.weight"] == ((2, 4), (0, 8))
    assert slices["blocks.0.attention.o.weight"] == ((0, 8), (4, 8))
    assert slices["blocks.0.attention.o.bias"] == ((0, 8),)
    assert slices["blocks.0.attention.q_norm.weight"] == slices["blocks.0.attention.k_norm.weight"] == ((0, 2),)
    assert slices["position_embedding.weight"] == ((4, 9), (0, 8))
    assert slices["blocks.4.mlp.gate.weight"] == ((5, 11), (0, 8))
    assert slices["blocks.4.mlp.up.bias"] == ((5, 11),)
    assert slices["blocks.4.mlp.down.weight"] == ((0, 8), (5, 11))
    assert slices["blocks.4.mlp.down.bias"] == ((0, 8),)
    assert slices["blocks.4.mlp_norm.weight"] == slices["norm.weight"] == ((0, 8),)
    assert slices["head.weight"] == ((6, 13), (0, 8))


def test_a_scalar_head_is_replicated() -> None:
    layout = parameter_layout(parameter_specs(replace(CONFIG, head="value")), ParallelStrategy(tp=4), range(4))
    assert {layout.slices_of(rank)["head.weight"] for rank in range(4)} == {((0, 1), (0, 8))}


def test_ranks_share_kv_heads_when_tp_exceeds_them() -> None:
    specs = {spec.name: spec for spec in parameter_specs(CONFIG)}
    k = specs["blocks.0.attention.k.weight"]
    assert [slice_of(k, rank, 4)[0] for rank in range(4)] == [(0, 2), (0, 2), (2, 4), (2, 4)]
    q = specs["blocks.0.attention.q.weight"]
    assert [slice_of(q, rank, 4)[0] for rank in range(4)] == [(0, 2), (2, 4), (4, 6), (6, 8)]


def test_a_tied_embedding_is_on_the_first_and_the_last_stage() -> None:
    layout = parameter_layout(
        parameter_specs(replace(CONFIG, tied_embeddings=True)), ParallelStrategy(pp=3), (10, 11, 12)
    )
    assert ["embedding.weight" in layout.slices_of(rank) for rank in (10, 11, 12)] == [True, False, True]
    assert ["norm.weight" in layout.slices_of(rank) for rank in (10, 11, 12)] == [False, False, True]
    layout = parameter_layout(
        parameter_specs(replace(CONFIG, tied_embeddings=True, head="value")), ParallelStrategy(pp=3), (10, 11, 12)
    )
    assert ["embedding.weight" in layout.slices_of(rank) for rank in (10, 11, 12)] == [True, False, False]


@given(
    n_layers=st.integers(1, 9),
    n_kv_heads=st.sampled_from([1, 2, 3, 4, 6]),
    heads_per_kv=st.sampled_from([1, 2, 3]),
    vocab_size=st.integers(12, 40),
    intermediate_size=st.integers(12, 30),
    tied=st.booleans(),
    head=st.sampled_from(["lm", "value", "reward"]),
    data=st.data(),
)
def test_tensor_ranks_cover_every_parameter_of_their_stage(
    n_layers: int,
    n_kv_heads: int,
    heads_per_kv: int,
    vocab_size: int,
    intermediate_size: int,
    tied: bool,
    head: Any,
    data: st.DataObject,
) -> None:
    n_heads = n_kv_heads * heads_per_kv
    config = DecoderConfig(
        vocab_size, 4, n_layers, n_heads, n_kv_heads, 2, intermediate_size, tied_embeddings=tied, head=head
    )
    specs = parameter_specs(config)
    legal = [tp for tp in range(1, 13) if n_heads % tp == 0 and (n_kv_heads % tp == 0 or tp % n_kv_heads == 0)]
    pp = data.draw(st.integers(1, n_layers))
    strategy = ParallelStrategy(
        dp=data.draw(st.integers(1, 2)),
        tp=data.draw(st.sampled_from(legal)),
        pp=pp,
        vpp=data.draw(st.integers(1, n_layers // pp)) if pp > 1 else 1,
    )
    ranks = data.draw(st.permutations(range(100, 100 + strategy.n_devices)))
    layout = parameter_layout(specs, strategy, ranks)
    assert layout.ranks == tuple(ranks)
    for pp_rank, dp_rank in itertools.product(range(strategy.pp), range(strategy.dp)):
        stage = range(strategy.n_devices)[(pp_rank * strategy.dp + dp_rank) * strategy.tp :][: strategy.tp]
        held = [layout.slices_of(ranks[mesh_rank]) for mesh_rank in stage]
        layers = set(itertools.chain(*layout.stages[pp_rank])) | ({"embedding"} if pp_rank == 0 else set())
        layers |= {"head"} if pp_rank == strategy.pp - 1 else set()
        expected = [spec for spec in specs if layers & set(spec.layers)]
        assert {tuple(slices) for slices in held} == {tuple(spec.name for spec in expected)}
        for mesh_rank, slices in zip(stage, held, strict=True):
            shard = shard_of(config, strategy, mesh_rank)
            assert layout.shard_of(ranks[mesh_rank]) == shard
            assert shard.chunks == layout.stages[pp_rank]
            sizes = [np.prod([b - a for a, b in place]) * 4 for place in slices.values()]
            assert layout.num_bytes_of(ranks[mesh_rank]) == sum(sizes)
        for spec in expected:
            count = np.zeros(spec.shape, dtype=int)
            for slices in held:
                count[tuple(slice(a, b) for a, b in slices[spec.name])] += 1
            times = strategy.tp if spec.sharded_dim is None else 1
            if spec.unit == "kv_head":
                times = max(1, strategy.tp // n_kv_heads)
            assert (count == times).all()


@given(
    n_layers=st.integers(1, 12),
    pp=st.integers(1, 12),
    vpp=st.integers(1, 4),
    vocab_size=st.integers(1, 400),
    is_lm=st.booleans(),
)
def test_no_split_has_a_cheaper_dearest_chunk(n_layers: int, pp: int, vpp: int, vocab_size: int, is_lm: bool) -> None:
    config = replace(CONFIG, n_layers=n_layers, vocab_size=vocab_size, head="lm" if is_lm else "value")
    specs = parameter_specs(config)
    if pp * vpp > n_layers:
        what = f"pp={pp} does not fit" if pp > n_layers else f"{vpp} virtual stages do not fit .* on pp={pp}"
        with pytest.raises(AllocationError, match=what):
            stage_layers(config, pp, vpp)
        return
    stages, n_chunks = stage_layers(config, pp, vpp), pp * vpp
    assert stages == stages_of(specs, pp, vpp)
    chunks = [stages[k % pp][k // pp] for k in range(n_chunks)]
    assert {len(stage) for stage in stages} == {vpp}
    assert [layer for chunk in chunks for layer in chunk] == list(range(n_layers))
    assert all(chunks)
    ends: dict[object, int] = {"embedding": 0, "head": pp - 1}
    assert stage_of_layers(stages) == ends | {layer: k % pp for k, chunk in enumerate(chunks) for layer in chunk}
    block = sum(spec.n_elements for spec in specs if spec.layer == 0 and len(spec.shape) == 2)
    head = vocab_size * 8 if is_lm else 8

    def dearest(sizes: list[int]) -> int:
        return max(size * block + head * (i == n_chunks - 1) for i, size in enumerate(sizes))

    cuts = itertools.combinations(range(1, n_layers), n_chunks - 1)
    best = min(dearest([b - a for a, b in itertools.pairwise((0, *cut, n_layers))]) for cut in cuts)
    assert dearest([len(chunk) for chunk in chunks]) == best


def test_more_virtual_stages_than_layers() -> None:
    with pytest.raises(AllocationError, match="3 virtual stages do not fit a model of 5 layers on pp=2") as caught:
        stage_layers(CONFIG, 2, 3)
    assert caught.value.remedy == "The most that fit is 2."
    with pytest.raises(AllocationError, match="each of the 6 chunks needs a layer") as caught:
        stage_layers(CONFIG, 3, 2)
    assert caught.value.remedy == "Leave them out, or use fewer pipeline stages."


def test_a_large_head_gets_fewer_blocks_beside_it() -> None:
    config = replace(CONFIG, n_layers=8, vocab_size=4096)
    assert [len(chunk) for (chunk,) in stage_layers(config, 4)] == [2, 2, 3, 1]
    assert [len(chunk) for (chunk,) in stage_layers(replace(config, vocab_size=13), 4)] == [2, 2, 2, 2]
    assert [[*map(len, chunks)] for chunks in stage_layers(config, 2, 2)] == [[2, 3], [2, 1]]


def test_chunks_of_a_shard() -> None:
    """Of five layers; the embedding comes before the first chunk of the model, the head behind the last."""
    first, last = (shard_of(CONFIG, ParallelStrategy(pp=2, vpp=2), stage) for stage in (0, 1))
    assert (first.layers, last.layers) == ((0, 2, 3), (1, 4))
    assert [(shard.layers, shard.has_embedding, shard.has_head) for shard in (*first.by_chunk, *last.by_chunk)] == [
        ((0,), True, False),
        ((2, 3), False, False),
        ((1,), False, False),
        ((4,), False, True),
    ]


def test_the_whole_model_is_one_shard() -> None:
    shard = whole_shard(CONFIG)
    assert shard == shard_of(CONFIG, ParallelStrategy(dp=3), 2)
    assert (shard.tp_rank, shard.tp_size, shard.chunks) == (0, 1, (range(5),))
    assert shard.has_embedding
    assert shard.has_head


def test_groups_are_those_of_a_mesh() -> None:
    layout = parameter_layout(parameter_specs(CONFIG), ParallelStrategy(dp=2, tp=2, pp=2), range(8, 16))
    assert layout.tp_groups() == ((8, 9), (10, 11), (12, 13), (14, 15))
    assert layout.rank_at(pp_rank=1, dp_rank=0, tp_rank=1) == 13
    assert layout.coordinates_of(13) == (1, 0, 1)
    assert 13 in layout
    assert 16 not in layout
    with pytest.raises(KeyError):
        layout.slices_of(16)


def test_micro_dp_groups_are_inside_one_replica() -> None:
    specs = parameter_specs(CONFIG)
    source = parameter_layout(specs, ParallelStrategy(dp=2, tp=4), range(8))
    target = parameter_layout(specs, ParallelStrategy(dp=4, tp=2), range(8))
    assert micro_dp_groups(source, target) == ((0, 2), (1, 3), (4, 6), (5, 7))


def test_units_are_split_as_evenly_as_possible() -> None:
    assert [units_of(7, rank, 3) for rank in range(3)] == [(0, 2), (2, 4), (4, 7)]
    assert [units_of(2, rank, 6) for rank in range(6)] == [(0, 1)] * 3 + [(1, 2)] * 3


@pytest.mark.parametrize(
    ("changes", "tp", "rule", "nearest"),
    [
        ({}, 3, "it must divide the 4 attention heads", 2),
        ({}, 8, "it must divide the 4 attention heads", 4),
        ({}, 0, "it is at least 1", 1),
        (
            {"n_heads": 12, "n_kv_heads": 4},
            6,
            "it must divide the 4 KV heads or be a multiple of them",
            4,
        ),
        ({"n_heads": 16, "n_kv_heads": 16}, 16, "it must not exceed the 11 rows of the vocabulary or the MLP", 8),
    ],
)
def test_an_illegal_tp_is_refused_with_the_nearest_legal_one(
    changes: dict[str, Any], tp: int, rule: str, nearest: int
) -> None:
    specs = parameter_specs(replace(CONFIG, **changes))
    with pytest.raises(AllocationError, match=rule) as caught:
        check_tp(specs, tp)
    assert caught.value.message.startswith(f"tp={tp} does not fit the model")
    assert caught.value.remedy == f"The nearest legal tp is {nearest}."
    check_tp(specs, nearest)
    if tp:
        with pytest.raises(AllocationError, match=rule):
            parameter_layout(specs, ParallelStrategy(tp=tp), range(tp))
        with pytest.raises(AllocationError, match=rule):
            shard_of(replace(CONFIG, **changes), ParallelStrategy(tp=tp), 0)


@pytest.mark.parametrize(("pp", "nearest"), [(6, 5), (64, 5), (0, 1)])
def test_more_stages_than_layers_are_refused(pp: int, nearest: int) -> None:
    with pytest.raises(AllocationError, match=f"pp={pp} does not fit a model of 5 layers") as caught:
        stage_layers(CONFIG, pp)
    assert caught.value.remedy == f"The nearest legal pp is {nearest}."


def test_ranks_must_fit_the_strategy() -> None:
    specs = parameter_specs(CONFIG)
    with pytest.raises(AllocationError, match="strategy d2t2p1 needs 4 ranks, not 6") as caught:
        parameter_layout(specs, ParallelStrategy(dp=2, tp=2), range(6))
    assert caught.value.remedy == "The nearest strategy for 6 ranks is d3t2p1."
    with pytest.raises(AllocationError, match="needs 4 ranks, not 0"):
        parameter_layout(specs, ParallelStrategy(dp=2, tp=2), ())
    with pytest.raises(AllocationError, match="rank 3 is in a layout of strategy d2t2p1 more than once"):
        parameter_layout(specs, ParallelStrategy(dp=2, tp=2), (1, 3, 2, 3))


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(AllocationError, match="parameters of dtype int8"):
        parameter_specs(replace(CONFIG, dtype="int8"))


@pytest.mark.parametrize("strategy", [ParallelStrategy(2, 2, 1), ParallelStrategy(1, 2, 2)], ids=str)
def test_layers_apart_are_the_layout_together(strategy: ParallelStrategy) -> None:
    layout = parameter_layout(parameter_specs(CONFIG), strategy, range(4))
    parts = layout.by_layer()
    assert [len({spec.layer for spec in part.specs}) for part in parts] == [1] * len(parts)
    assert [spec for part in parts for spec in part.specs] == list(layout.specs)
    for rank in range(4):
        together = {name: place for part in parts for name, place in part.slices_of(rank).items()}
        assert together == layout.slices_of(rank)
