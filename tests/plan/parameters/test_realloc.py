"""Who sends what to whom: the invariants listed in realrl/plan/parameters/realloc.py, on random models and layouts."""

import itertools
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from realrl.errors import AllocationError
from realrl.mesh.device_mesh import ParallelStrategy
from realrl.plan.parameters.decoder_specs import parameter_specs
from realrl.plan.parameters.layout import ParameterLayout, parameter_layout
from realrl.plan.parameters.rank_order import order_for
from realrl.plan.parameters.realloc import ReallocPlan, SliceTransfer, best_rank_order, plan_realloc
from realrl.shape import DecoderConfig
from scripts.realloc_baselines import deepspeed_chat, hybrid_engine, hybridflow_v
from tests.helpers.layouts import (
    LLAMA_70B,
    MAX_RANKS,
    Array,
    make_shape,
    perform,
    shapes,
    shards_of,
    strategies,
    whole_parameters,
)
from tests.plan.parameters.micro_dp import micro_dp_groups

ELEMENT_BYTES = 8
MAX_BRUTE_FORCE = 6
SPLIT = tuple(f".{name}.weight" for name in ("q", "k", "v", "o", "gate", "up", "down"))


@given(shape=shapes(), n_per_node=st.integers(1, 8), data=st.data())
def test_realloc_between_any_two_layouts(shape: DecoderConfig, n_per_node: int, data: st.DataObject) -> None:
    specs = parameter_specs(shape)
    max_ranks = data.draw(st.sampled_from([6, 12, MAX_RANKS]))
    source_strategy, target_strategy = (data.draw(strategies(shape, max_ranks)) for _ in range(2))
    # The two sides are the same ranks, nested, overlapping or disjoint, in any order.
    first, step = data.draw(st.sampled_from([0, 0, 5, MAX_RANKS])), data.draw(st.sampled_from([1, 1, 3]))
    sides = [*range(source_strategy.n_devices)], [first + step * i for i in range(target_strategy.n_devices)]
    source_ranks, target_ranks = (
        data.draw(st.permutations(side)) if data.draw(st.booleans()) else side for side in sides
    )
    source = parameter_layout(specs, source_strategy, source_ranks)
    plain = parameter_layout(specs, target_strategy, target_ranks)
    best = best_rank_order(source, target_strategy, target_ranks)
    assert sorted(best.ranks) == sorted(target_ranks)
    lacking = bytes_lacking(source, plain)
    best_place = {rank: mesh_rank for mesh_rank, rank in enumerate(best.ranks)}
    best_bytes = sum(lacking[i][best_place[rank]] for i, rank in enumerate(target_ranks))
    assert best_bytes <= sum(lacking[i][i] for i in range(len(target_ranks)))
    if len(target_ranks) <= MAX_BRUTE_FORCE:
        assert best_bytes == min(
            sum(lacking[i][place] for i, place in enumerate(places))
            for places in itertools.permutations(range(len(target_ranks)))
        )
    check_plan(source, plain if data.draw(st.booleans()) else best, n_per_node)


TP_AND_PP_DIVIDE_NOTHING = [
    ((1, 2, 3), (1, 3, 2)),
    ((1, 4, 3), (1, 3, 4)),
    ((3, 3, 1), (2, 4, 1)),
    ((5, 2, 1), (3, 3, 1)),
    ((2, 6, 2), (5, 4, 1)),
    ((1, 12, 1), (2, 1, 6)),
]


@pytest.mark.parametrize(("training", "generation"), TP_AND_PP_DIVIDE_NOTHING)
@pytest.mark.parametrize("n_kv_heads", [12, 2, 1])
@pytest.mark.parametrize("tied", [False, True])
def test_sizes_that_do_not_divide_each_other(
    training: tuple[int, int, int], generation: tuple[int, int, int], n_kv_heads: int, tied: bool
) -> None:
    (pp, tp, dp), (pp_g, tp_g, dp_g) = training, generation
    if any(size % n_kv_heads and n_kv_heads % size for size in (tp, tp_g)):
        n_kv_heads = 12
    shape = make_shape(
        n_layers=5, n_heads=12, n_kv_heads=n_kv_heads, vocab_size=17, intermediate_size=19, tied_embeddings=tied
    )
    specs = parameter_specs(shape)
    a = parameter_layout(specs, ParallelStrategy(dp=dp, tp=tp, pp=pp), range(dp * tp * pp))
    b = parameter_layout(specs, ParallelStrategy(dp=dp_g, tp=tp_g, pp=pp_g), range(1, dp_g * tp_g * pp_g + 1))
    check_plan(a, b, n_per_node=4)
    check_plan(b, a, n_per_node=4)


def check_plan(source: ParameterLayout, target: ParameterLayout, n_per_node: int) -> None:
    """Check all invariants of a plan, and that the way back restores the source."""

    def node_of(rank: int) -> int:
        return rank // n_per_node

    plan = plan_realloc(source, target, node_of=node_of)
    held = shards_of(source)
    reached, counts = perform(plan, held)
    assert all((count == 1).all() for of_rank in counts.values() for count in of_rank.values())
    expected = shards_of(target)
    assert_equal(reached, expected)
    back, _ = perform(plan_realloc(target, source, node_of=node_of), reached)
    assert_equal(back, held)
    check_nothing_held_moves(plan, held, expected)
    check_bytes(plan, held, expected)
    check_nodes(plan, held, expected, node_of)
    check_order(plan)
    again = plan_realloc(source, target, node_of=node_of)
    assert again.transfers == plan.transfers


def bytes_lacking(source: ParameterLayout, plain: ParameterLayout) -> list[list[int]]:
    """[rank, mesh rank]: what a rank of the target lacks at a coordinate, by comparing slices one by one."""
    known: dict[tuple[object, ...], int] = {}

    def lacking(rank: int, at: int) -> int:
        pp_rank, _, tp_rank = plain.coordinates_of(at)
        replica = source.coordinates_of(rank)[::2] if rank in source else None
        if (replica, pp_rank, tp_rank) not in known:
            ours = source.slices_of(rank) if rank in source else {}
            total = plain.num_bytes_of(at)
            for name, theirs in plain.slices_of(at).items():
                common = [min(b, d) - max(a, c) for (a, b), (c, d) in zip(ours.get(name, ()), theirs, strict=False)]
                total -= math.prod(max(length, 0) for length in common) * ELEMENT_BYTES if common else 0
            known[replica, pp_rank, tp_rank] = total
        return known[replica, pp_rank, tp_rank]

    return [[lacking(rank, at) for at in plain.ranks] for rank in plain.ranks]


def assert_equal(ours: dict[int, dict[str, Array]], theirs: dict[int, dict[str, Array]]) -> None:
    assert ours.keys() == theirs.keys()
    for rank in ours:
        assert ours[rank].keys() == theirs[rank].keys()
        for name, tensor in ours[rank].items():
            assert np.array_equal(tensor, theirs[rank][name]), (rank, name)


def elements(parameters: dict[str, Array] | None) -> Array:
    """Return which elements of the model some tensors contain; no tensor contains one twice."""
    if not parameters:
        return np.empty(0, dtype=np.int64)
    return np.concatenate([tensor.ravel() for tensor in parameters.values()])


def check_nothing_held_moves(
    plan: ReallocPlan, held: dict[int, dict[str, Array]], expected: dict[int, dict[str, Array]]
) -> None:
    for rank in plan.ranks:
        received = [elements_of(transfer, held, expected) for transfer in plan.transfers_to(rank)]
        arrived = np.concatenate(received) if received else np.empty(0, dtype=np.int64)
        lacking = np.setdiff1d(elements(expected.get(rank)), elements(held.get(rank)))
        np.testing.assert_array_equal(np.sort(arrived), lacking)


def elements_of(
    transfer: SliceTransfer, held: dict[int, dict[str, Array]], expected: dict[int, dict[str, Array]]
) -> Array:
    place = tuple(slice(a, b) for a, b in transfer.source_slice)
    shards = held if transfer.origin is None else expected
    sent = shards[transfer.source][transfer.parameter][place]
    assert sent.nbytes == transfer.num_bytes > 0
    assert transfer.source != transfer.target
    return sent.ravel()


def check_bytes(plan: ReallocPlan, held: dict[int, dict[str, Array]], expected: dict[int, dict[str, Array]]) -> None:
    received, sent = Counter[int](), Counter[int]()
    for transfer in plan.transfers:
        received[transfer.target] += transfer.num_bytes
        sent[transfer.source] += transfer.num_bytes
    assert plan.total_bytes == received.total() == sent.total()
    for rank in plan.ranks:
        assert plan.bytes_received(rank) == received[rank]
        assert plan.bytes_sent(rank) == sent[rank]
        ours, theirs = elements(held.get(rank)), elements(expected.get(rank))
        assert plan.peak_bytes(rank) == len(np.union1d(ours, theirs)) * ELEMENT_BYTES
        for keep in plan.keeps(rank):
            covered = [b - a for a, b in keep.target_slice]
            assert keep.is_whole_target == (covered == [*expected[rank][keep.parameter].shape])
        if rank in plan.target_layout:
            for moves_source in (False, True):
                kept = sum(keep.num_bytes for keep in plan.keeps(rank) if moves_source or keep.is_whole_target)
                lacking = plan.target_layout.num_bytes_of(rank) - kept
                assert plan.new_bytes(rank, moves_source=moves_source) == lacking
    assert (plan.bytes_received(10_000), plan.bytes_sent(10_000), plan.peak_bytes(10_000)) == (0, 0, 0)
    assert plan.keeps(10_000) == plan.transfers_to(10_000) == plan.transfers_from(10_000) == ()


def check_nodes(
    plan: ReallocPlan,
    held: dict[int, dict[str, Array]],
    expected: dict[int, dict[str, Array]],
    node_of: Callable[[int], int],
) -> None:
    """Elements that a node lacks cross to it once, to a rank that needs them and passes them on; loads are even."""
    across, n_bytes = defaultdict[int, list[Array]](list), 0
    came: dict[tuple[int, int], list[Array]] = defaultdict(list)  # (source, relay) -> elements
    passed_on: dict[tuple[int, int], list[Array]] = defaultdict(list)  # (origin, relay) -> elements
    sent, received = Counter[int](), Counter[int]()
    for transfer in plan.transfers:
        ends, moved = (transfer.source, transfer.target), elements_of(transfer, held, expected)
        if transfer.origin is not None:
            assert node_of(ends[0]) == node_of(ends[1]) != node_of(transfer.origin)
            passed_on[transfer.origin, transfer.source].append(moved)
        elif node_of(ends[0]) != node_of(ends[1]):
            across[node_of(transfer.target)].append(moved)
            came[ends].append(moved)
            n_bytes += transfer.num_bytes
            sent[transfer.source] += transfer.num_bytes
            received[transfer.target] += transfer.num_bytes
    for node in {node_of(rank) for rank in plan.target_layout.ranks}:
        has, needs = (
            [elements(of_rank) for rank, of_rank in shards.items() if node_of(rank) == node]
            for shards in (held, expected)
        )
        lacks = np.setdiff1d(np.concatenate(needs), np.concatenate([*has, elements(None)]))
        np.testing.assert_array_equal(np.sort(np.concatenate([*across[node], elements(None)])), lacks)
    assert plan.bytes_between_nodes == n_bytes
    assert all(plan.bytes_from_other_nodes(rank) == received[rank] for rank in plan.ranks)
    for ends, moved in passed_on.items():
        assert np.isin(np.concatenate(moved), np.concatenate(came[ends])).all()
    item = max(max(spec.unit_bytes for spec in plan.source_layout.specs), plan.source_layout.model_bytes // 256)
    alike = [*_alike(plan.source_layout, sent, lambda rank: 0), *_alike(plan.target_layout, received, node_of)]
    assert all(max(loads) - min(loads) <= 3 * item for loads in alike)


def _alike(layout: ParameterLayout, loads: Counter[int], node_of: Callable[[int], int]) -> list[list[int]]:
    """Loads of the ranks with the same slices on the same node."""
    groups = defaultdict[tuple[int, int, int], list[int]](list)
    for rank in layout.ranks:
        pp_rank, _, tp_rank = layout.coordinates_of(rank)
        groups[node_of(rank), pp_rank, tp_rank].append(loads[rank])
    return [*groups.values()]


def check_order(plan: ReallocPlan) -> None:
    """Both sides see the transfers in the order of `transfers`."""
    to, of = defaultdict[int, list[SliceTransfer]](list), defaultdict[int, list[SliceTransfer]](list)
    for transfer in plan.transfers:
        to[transfer.target].append(transfer)
        of[transfer.source].append(transfer)
    for rank in plan.ranks:
        assert plan.transfers_to(rank) == tuple(to[rank])
        assert plan.transfers_from(rank) == tuple(of[rank])
    names = list(whole_parameters(plan.source_layout.specs))
    places = [names.index(transfer.parameter) for transfer in plan.transfers]
    assert places == sorted(places)


# ---------------------------------------------------------------- the 3D-HybridEngine's example


def hybrid_example() -> tuple[ParameterLayout, ParameterLayout]:
    source = parameter_layout(parameter_specs(make_shape()), ParallelStrategy(dp=2, tp=4), range(1, 9))
    return source, best_rank_order(source, ParallelStrategy(dp=4, tp=2), range(1, 9))


def test_hybrid_engine_groups() -> None:
    source, target = hybrid_example()
    assert target.tp_groups() == ((1, 3), (2, 4), (5, 7), (6, 8))
    assert micro_dp_groups(source, target) == ((1, 2), (3, 4), (5, 6), (7, 8))


def test_hybrid_engine_bytes() -> None:
    """All sizes divide here. Replicated parameters, which all ranks hold, are not received and not redundant."""
    source, target = hybrid_example()
    plan = plan_realloc(source, target)
    replicated = sum(spec.num_bytes for spec in source.specs if spec.sharded_dim is None)
    split = source.model_bytes - replicated
    training, generation = source.strategy, target.strategy
    d_g = training.tp * training.pp // (generation.tp * generation.pp)
    for rank in target.ranks:
        assert plan.bytes_received(rank) == (d_g - 1) * split // (training.tp * training.pp)
        assert plan.bytes_received(rank) == hybrid_engine(split, training, generation).bytes_received
        assert plan.bytes_received(rank) <= hybridflow_v(source.model_bytes, training).bytes_received
        assert plan.peak_bytes(rank) == split // (generation.tp * generation.pp) + replicated
        assert plan.peak_bytes(rank) == target.num_bytes_of(rank)
        assert plan.bytes_sent(rank) == plan.bytes_received(rank)
        kept = {keep.parameter for keep in plan.keeps(rank)}
        assert kept == set(source.slices_of(rank))
        senders = {transfer.source for transfer in plan.transfers_to(rank)}
        assert len(senders) == 1
        assert {rank, *senders} in [set(group) for group in micro_dp_groups(source, target)]


@pytest.mark.parametrize("sizes", [(1, 8, 2, 1, 1), (1, 8, 2, 1, 4), (2, 4, 2, 1, 2), (4, 4, 1, 2, 2), (4, 2, 2, 2, 2)])
def test_nested_strategies_cost_what_the_hybrid_engine_costs(sizes: tuple[int, int, int, int, int]) -> None:
    """With stages of one size: the value head is replicated, and the embedding too small to matter."""
    pp, tp, dp, pp_g, tp_g = sizes
    shape = make_shape(n_layers=8, n_heads=8, n_kv_heads=8, head="value")
    specs = parameter_specs(shape)
    training = ParallelStrategy(dp=dp, tp=tp, pp=pp)
    generation = ParallelStrategy(dp=pp * tp * dp // (pp_g * tp_g), tp=tp_g, pp=pp_g)
    source = parameter_layout(specs, training, range(training.n_devices))
    target = best_rank_order(source, generation, range(training.n_devices))
    plan = plan_realloc(source, target)
    blocks = sum(spec.num_bytes for spec in specs if isinstance(spec.layer, int) and spec.sharded_dim is not None)
    block_bytes = {
        rank: sum(t.num_bytes for t in plan.transfers_to(rank) if t.parameter.endswith(SPLIT)) for rank in target.ranks
    }
    assert set(block_bytes.values()) == {hybrid_engine(blocks, training, generation).bytes_received}


def test_baselines_follow_their_formulas() -> None:
    training = ParallelStrategy(dp=2, tp=4, pp=2)
    chat, flow = deepspeed_chat(1600, training), hybridflow_v(1600, training)
    engine = hybrid_engine(1600, training, ParallelStrategy(dp=8, tp=2))
    assert (chat.bytes_received, chat.peak_bytes, chat.redundant_bytes) == (1500, 1600, 100)
    assert (flow.bytes_received, flow.peak_bytes, flow.redundant_bytes) == (1400, 1600, 200)
    assert (engine.bytes_received, engine.peak_bytes, engine.redundant_bytes) == (600, 800, 0)
    assert hybridflow_v(1601, training).bytes_received == 1401


# ---------------------------------------------------------------- senders


def test_senders_share_the_work() -> None:
    specs = parameter_specs(make_shape(n_layers=12))
    source = parameter_layout(specs, ParallelStrategy(dp=3), range(3))
    target = parameter_layout(specs, ParallelStrategy(dp=5), range(3, 8))
    plan = plan_realloc(source, target)
    sent = [plan.bytes_sent(rank) for rank in source.ranks]
    layer = sum(spec.num_bytes for spec in specs if spec.layer == 0)
    assert sum(sent) == 5 * source.model_bytes
    assert max(sent) - min(sent) <= layer
    assert [plan.bytes_received(rank) for rank in target.ranks] == [source.model_bytes] * 5
    assert plan.bytes_received(0) == 0
    assert plan.peak_bytes(0) == source.model_bytes


def test_a_node_helps_itself_first() -> None:
    specs = parameter_specs(make_shape())
    source = parameter_layout(specs, ParallelStrategy(dp=2), (0, 4))
    target = parameter_layout(specs, ParallelStrategy(dp=4), (1, 2, 3, 5))
    plan = plan_realloc(source, target, node_of=lambda rank: rank // 4)
    assert {(t.source, t.target) for t in plan.transfers} == {(0, 1), (0, 2), (0, 3), (4, 5)}
    anywhere = plan_realloc(source, target)
    assert anywhere.bytes_sent(0) == anywhere.bytes_sent(4)


def test_what_crosses_is_shared_by_senders_of_all_nodes() -> None:
    """Rank 0 serves its neighbour as well: that takes nothing of what it can send across."""
    specs = parameter_specs(make_shape())
    source = parameter_layout(specs, ParallelStrategy(dp=2), (0, 4))
    target = parameter_layout(specs, ParallelStrategy(dp=3), (1, 8, 9))
    plan = plan_realloc(source, target, node_of=lambda rank: rank // 4)
    across = Counter({0: plan.bytes_sent(0) - source.model_bytes, 4: plan.bytes_sent(4)})
    assert across.total() == plan.bytes_between_nodes == source.model_bytes
    assert abs(across[0] - across[4]) <= source.model_bytes // 8
    assert {t.source for t in plan.transfers_to(1)} == {0}


def eight_heads(p_t_d: tuple[int, int, int], ranks: range) -> ParameterLayout:
    pp, tp, dp = p_t_d
    shape = make_shape(n_layers=8, n_heads=8, n_kv_heads=8, vocab_size=64)
    return parameter_layout(parameter_specs(shape), ParallelStrategy(dp=dp, tp=tp, pp=pp), ranks)


@pytest.mark.parametrize("target", [(1, 1, 8), (1, 2, 4), (2, 2, 2), (1, 8, 1)])
def test_a_model_crosses_to_a_node_once(target: tuple[int, int, int]) -> None:
    """From eight ranks of one node to eight of another, which get equal shares and pass them on."""
    source, there = eight_heads((1, 8, 1), range(8)), eight_heads(target, range(8, 16))
    plan = plan_realloc(source, there, node_of=lambda rank: rank // 8)
    model_bytes = source.model_bytes
    assert plan.bytes_between_nodes == model_bytes
    for rank in there.ranks:
        direct = sum(t.num_bytes for t in plan.direct_transfers_to(rank))
        assert direct == pytest.approx(model_bytes / 8, rel=0.25 if target == (2, 2, 2) else 0.05)
        assert plan.bytes_received(rank) == there.num_bytes_of(rank)
        assert plan.bytes_sent(rank) < model_bytes
    for rank in source.ranks:
        assert plan.bytes_sent(rank) == pytest.approx(model_bytes / 8, rel=0.05)


def test_two_nodes_get_what_each_lacks() -> None:
    source, target = eight_heads((2, 8, 1), range(16)), eight_heads((1, 2, 8), range(16))
    plan = plan_realloc(source, target, node_of=lambda rank: rank // 8)
    held = [
        sum(t.num_bytes for t in plan.direct_transfers_to(rank) if t.source // 8 != rank // 8) for rank in range(16)
    ]
    lacks = [
        source.model_bytes - sum(s.num_bytes for s in source.specs if s.name in source.slices_of(8 * n)) for n in (0, 1)
    ]
    assert [sum(held[:8]), sum(held[8:])] == lacks
    assert plan.bytes_between_nodes == source.model_bytes
    assert plan.total_bytes > 3 * source.model_bytes


def test_the_same_layout_moves_nothing() -> None:
    layout = parameter_layout(parameter_specs(make_shape()), ParallelStrategy(dp=2, tp=2, pp=2), range(8))
    plan = plan_realloc(layout, layout)
    assert plan.total_bytes == 0
    assert plan.transfers == ()
    for rank in layout.ranks:
        assert plan.peak_bytes(rank) == layout.num_bytes_of(rank)
        assert all(keep.is_whole_target for keep in plan.keeps(rank))


@example(source=(1, 8, 2), target=(1, 2, 8))
@given(
    source=st.sampled_from([(8, 8, 2), (1, 8, 16), (8, 1, 16), (4, 4, 8)]),
    target=st.sampled_from([(1, 8, 16), (1, 1, 128), (5, 4, 6), (2, 8, 8)]),
)
def test_a_large_model_is_planned_by_its_portions(source: tuple[int, int, int], target: tuple[int, int, int]) -> None:
    """Bytes add up on 128 ranks without any transfer being spelled out; one rank's transfers agree with them."""
    specs = parameter_specs(LLAMA_70B)
    layouts = []
    for pp, tp, dp in (source, target):
        layouts.append(parameter_layout(specs, ParallelStrategy(dp=dp, tp=tp, pp=pp), range(pp * tp * dp)))
    plan = plan_realloc(*layouts, node_of=lambda rank: rank // 8)
    assert sum(plan.bytes_sent(rank) for rank in plan.ranks) == plan.total_bytes
    rank = layouts[1].ranks[-1]
    assert sum(t.num_bytes for t in plan.transfers_to(rank)) == plan.bytes_received(rank)
    kept = sum(keep.num_bytes for keep in plan.keeps(rank))
    assert plan.bytes_received(rank) + kept == layouts[1].num_bytes_of(rank)


@pytest.mark.parametrize(
    ("training", "generation"),
    [
        ((8, 8, 16), (1, 8, 128)),
        ((8, 8, 16), (1, 1, 1024)),
        ((1, 8, 128), (1, 2, 512)),
        ((4, 8, 32), (2, 4, 128)),
    ],
)
def test_a_large_model_on_1024_ranks_is_planned_in_a_second(
    training: tuple[int, int, int], generation: tuple[int, int, int]
) -> None:
    """The time of this process alone: tests run beside others."""
    specs = parameter_specs(LLAMA_70B)
    source_strategy, strategy = (ParallelStrategy(dp=dp, tp=tp, pp=pp) for pp, tp, dp in (training, generation))

    def node_of(rank: int) -> int:
        return rank // 8

    start_s = time.process_time()
    source = parameter_layout(specs, source_strategy, range(1024))
    order = order_for(source, strategy, range(1024), node_of=node_of)
    plan = plan_realloc(source, parameter_layout(specs, strategy, order), node_of=node_of)
    received = [plan.bytes_received(rank) for rank in plan.ranks]
    assert sum(plan.bytes_sent(rank) for rank in plan.ranks) == sum(received) == plan.total_bytes
    assert plan.bytes_between_nodes <= plan.total_bytes
    assert time.process_time() - start_s < 1.0
    assert max(received) < source.model_bytes
    rank = plan.target_layout.ranks[-1]
    assert sum(t.num_bytes for t in plan.transfers_to(rank)) == plan.bytes_received(rank)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"vocab_size": 17}, r"embedding.weight is float64\[16, 4\] \(16 units along dim 0\) in the source"),
        ({"n_layers": 5}, "blocks.4.attention_norm.weight is missing in the source"),
        ({"n_layers": 3}, r"blocks.3.attention_norm.weight is float64\[4\] \(replicated\) in the source and missing"),
        ({"head": "value"}, r"head.weight .* and float64\[1, 4\] \(replicated\) in the target"),
        ({"dtype": "float32"}, r"embedding.weight .* float32\[16, 4\]"),
        ({"tied_embeddings": True}, r"embedding.weight .*, tied\) in the target"),
    ],
    ids=str,
)
def test_layouts_of_different_models_are_refused(changes: dict[str, object], what: str) -> None:
    shape = make_shape()
    source = parameter_layout(parameter_specs(shape), ParallelStrategy(), (0,))
    other = parameter_layout(parameter_specs(replace(shape, **changes)), ParallelStrategy(), (1,))  # type: ignore[arg-type]
    with pytest.raises(AllocationError, match=f"different models: parameter {what}") as caught:
        plan_realloc(source, other)
    assert caught.value.remedy is not None
    assert "from the same configuration" in caught.value.remedy


def test_specs_in_another_order_are_refused() -> None:
    specs = parameter_specs(make_shape())
    source = parameter_layout(specs, ParallelStrategy(), (0,))
    other = parameter_layout([*specs[1:], specs[0]], ParallelStrategy(), (1,))
    with pytest.raises(AllocationError, match="in a different order"):
        plan_realloc(source, other)


def test_equal_specs_need_not_be_the_same_object() -> None:
    a, b = (parameter_layout(parameter_specs(make_shape()), ParallelStrategy(), (rank,)) for rank in (0, 1))
    assert plan_realloc(a, b).total_bytes == a.model_bytes
    assert [t.parameter for t in plan_realloc(a, b).transfers] == [spec.name for spec in a.specs]


def test_consecutive_plans_do_not_share_state() -> None:
    source, target = hybrid_example()
    plans = [plan_realloc(source, target) for _ in range(2)]
    for first, second in itertools.pairwise(plans):
        assert first.transfers == second.transfers
        assert first.keeps(1) == second.keeps(1)
