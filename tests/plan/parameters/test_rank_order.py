"""Coordinates that ranks take: the invariants of rank_order.py and realloc_assignment.py."""

import itertools
import math
import time
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from realrl.errors import AllocationError
from realrl.mesh.device_mesh import ParallelStrategy
from realrl.plan.parameters.decoder_specs import parameter_specs
from realrl.plan.parameters.layout import ParameterLayout, parameter_layout
from realrl.plan.parameters.rank_order import best_rank_order, order_for
from realrl.plan.parameters.realloc import plan_realloc
from realrl.plan.parameters.realloc_assignment import transport
from realrl.shape import DecoderConfig
from tests.helpers.layouts import LLAMA_70B, make_shape, shapes, strategies
from tests.plan.parameters.micro_dp import micro_dp_groups

EIGHT_HEADS = make_shape(n_layers=8, n_heads=8, n_kv_heads=8)


def layout(shape: DecoderConfig, p_t_d: tuple[int, int, int], first: int = 0) -> ParameterLayout:
    pp, tp, dp = p_t_d
    strategy = ParallelStrategy(dp=dp, tp=tp, pp=pp)
    return parameter_layout(parameter_specs(shape), strategy, range(first, first + strategy.n_devices))


def best(source: ParameterLayout, p_t_d: tuple[int, int, int], ranks: object = None) -> ParameterLayout:
    pp, tp, dp = p_t_d
    chosen = source.ranks if ranks is None else tuple(ranks)  # type: ignore[call-overload]
    return best_rank_order(source, ParallelStrategy(dp=dp, tp=tp, pp=pp), chosen)


def moved(source: ParameterLayout, target: ParameterLayout) -> int:
    return plan_realloc(source, target).total_bytes


@pytest.mark.parametrize("first", [0, 1, 24])
def test_nested_tensor_sizes_give_the_grouping_of_the_hybrid_engine(first: int) -> None:
    source = layout(make_shape(), (1, 4, 2), first)
    target = best(source, (1, 2, 4))
    assert [[rank - first for rank in group] for group in target.tp_groups()] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    groups = micro_dp_groups(source, target)
    assert [[rank - first for rank in group] for group in groups] == [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize(
    ("training", "generation"),
    [
        ((1, 4, 2), (1, 2, 4)),
        ((1, 8, 2), (1, 2, 8)),
        ((2, 2, 2), (1, 2, 4)),
        ((4, 2, 2), (2, 2, 4)),
        ((2, 4, 3), (1, 2, 12)),
        ((4, 4, 1), (2, 1, 8)),
    ],
)
def test_replicas_of_one_source_replica_are_adjacent(
    training: tuple[int, int, int], generation: tuple[int, int, int]
) -> None:
    source = layout(EIGHT_HEADS, training)
    target = best(source, generation)
    d_g = generation[2] // training[2]
    for rank in source.ranks:
        assert target.coordinates_of(rank)[1] // d_g == source.coordinates_of(rank)[1]
    for group in micro_dp_groups(source, target):
        dp_ranks = [target.coordinates_of(rank)[1] for rank in group]
        assert dp_ranks == list(range(dp_ranks[0], dp_ranks[0] + d_g))


@given(shape=shapes(), data=st.data())
def test_an_order_that_saves_nothing_keeps_what_the_plain_order_gives(
    shape: DecoderConfig, data: st.DataObject
) -> None:
    source_strategy, target_strategy = (data.draw(strategies(shape, 16)) for _ in range(2))
    specs, start = parameter_specs(shape), data.draw(st.sampled_from([0, 3, 64]))
    source = parameter_layout(specs, source_strategy, range(source_strategy.n_devices))
    plain = parameter_layout(specs, target_strategy, range(start, start + target_strategy.n_devices))
    ordered = best_rank_order(source, target_strategy, plain.ranks)
    assert ordered == best_rank_order(source, target_strategy, plain.ranks)
    saved = moved(source, plain) - moved(source, ordered)
    assert saved >= 0
    if not saved:
        assert all(ordered.slices_of(rank) == plain.slices_of(rank) for rank in plain.ranks)


@given(shape=shapes(), data=st.data())
def test_the_order_for_a_call_saves_bytes_or_is_plain(shape: DecoderConfig, data: st.DataObject) -> None:
    source_strategy, target_strategy = (data.draw(strategies(shape, 16)) for _ in range(2))
    node_size = data.draw(st.sampled_from([2, 4, 64]))
    specs = parameter_specs(shape)
    source = parameter_layout(specs, source_strategy, range(source_strategy.n_devices))
    plain = parameter_layout(specs, target_strategy, range(target_strategy.n_devices))
    order = order_for(source, target_strategy, plain.ranks, node_of=lambda rank: rank // node_size)
    chosen = parameter_layout(specs, target_strategy, order)
    costs = [
        (plan.bytes_between_nodes, plan.total_bytes)
        for plan in (plan_realloc(source, one, node_of=lambda rank: rank // node_size) for one in (chosen, plain))
    ]
    assert order == plain.ranks or any(a < 0.99 * b for a, b in zip(*costs, strict=True))
    assert costs[0][0] <= costs[1][0]
    if order == plain.ranks and node_size >= plain.strategy.n_devices:
        assert moved(source, best_rank_order(source, target_strategy, order)) >= 0.99 * moved(source, plain)
    n_nodes = [max(len({rank // node_size for rank in g}) for g in one.tp_groups()) for one in (chosen, plain)]
    assert n_nodes[0] <= n_nodes[1]


@settings(max_examples=12)
@given(shape=shapes(), data=st.data())
def test_the_fewest_bytes_cross_between_nodes_then_the_fewest_move(shape: DecoderConfig, data: st.DataObject) -> None:
    """Against all orders of up to six ranks on two to three nodes."""
    source_strategy, target_strategy = (data.draw(strategies(shape, 6)) for _ in range(2))
    node_size, first = data.draw(st.sampled_from([2, 3, 4])), data.draw(st.sampled_from([0, 0, 2, 5]))
    specs = parameter_specs(shape)
    source = parameter_layout(specs, source_strategy, range(source_strategy.n_devices))
    ranks = range(first, first + target_strategy.n_devices)

    def node_of(rank: int) -> int:
        return rank // node_size

    def cost(target: ParameterLayout) -> tuple[int, int]:
        plan = plan_realloc(source, target, node_of=node_of)
        return plan.bytes_between_nodes, plan.total_bytes

    best = best_rank_order(source, target_strategy, ranks, node_of=node_of)
    known: dict[tuple[object, ...], tuple[int, int]] = {}  # by part of each rank: replicas are alike
    for order in itertools.permutations(ranks):
        target = parameter_layout(specs, target_strategy, order)
        parts = tuple(target.coordinates_of(rank)[::2] for rank in ranks)
        if parts not in known:
            known[parts] = cost(target)
    assert cost(best) == min(known.values())
    plain = parameter_layout(specs, target_strategy, ranks)
    if cost(plain) == cost(best):
        assert all(best.slices_of(rank) == plain.slices_of(rank) for rank in ranks)


@pytest.mark.parametrize("order", [range(6), (4, 0, 3, 1, 5, 2)])
def test_of_the_orders_that_let_as_little_cross_the_one_that_moves_least(order: Sequence[int]) -> None:
    """Against all ways in which eight ranks on three nodes, three of which have parameters, can take two parts."""
    source = parameter_layout(parameter_specs(EIGHT_HEADS), ParallelStrategy(tp=2, dp=3), order)
    strategy, ranks = ParallelStrategy(tp=2, dp=4), range(3, 11)

    def node_of(rank: int) -> int:
        return rank // 3

    def cost(target: ParameterLayout) -> tuple[int, int]:
        plan = plan_realloc(source, target, node_of=node_of)
        return plan.bytes_between_nodes, plan.total_bytes

    costs = set()
    for firsts in itertools.combinations(ranks, 4):
        others = [rank for rank in ranks if rank not in firsts]
        costs.add(cost(parameter_layout(source.specs, strategy, [*itertools.chain(*zip(firsts, others, strict=True))])))
    least = min(costs)
    assert any(across == least[0] and moves > least[1] for across, moves in costs)
    assert cost(best_rank_order(source, strategy, ranks, node_of=node_of)) == least


def test_stages_go_to_the_nodes_that_hold_them() -> None:
    """The tensor groups stay inside their nodes, and nothing crosses."""
    source = parameter_layout(parameter_specs(EIGHT_HEADS), ParallelStrategy(pp=2, tp=4), (4, 5, 6, 7, 0, 1, 2, 3))
    target_strategy = ParallelStrategy(pp=2, tp=2, dp=2)
    order = order_for(source, target_strategy, range(8), node_of=lambda rank: rank // 4)
    target = parameter_layout(source.specs, target_strategy, order)
    assert all(len({rank // 4 for rank in group}) == 1 for group in target.tp_groups())
    assert plan_realloc(source, target, node_of=lambda rank: rank // 4).bytes_between_nodes == 0


def test_replicas_of_a_part_share_a_node() -> None:
    """Two nodes of four get half of the model each, instead of all of it; for a call, tensor groups forbid that."""
    source, strategy = layout(EIGHT_HEADS, (1, 8, 1)), ParallelStrategy(tp=2, dp=4)
    best = best_rank_order(source, strategy, range(8, 16), node_of=lambda rank: rank // 4)
    split = sum(spec.num_bytes for spec in source.specs if spec.sharded_dim is not None)
    crossing = plan_realloc(source, best, node_of=lambda rank: rank // 4).bytes_between_nodes
    assert crossing == 2 * source.model_bytes - split
    assert order_for(source, strategy, range(8, 16), node_of=lambda rank: rank // 4) == tuple(range(8, 16))


def test_tensor_groups_that_would_span_nodes_are_not_worth_it() -> None:
    """Nodes of two: what each rank has in common with tp=2 of four ranks lies on two nodes."""
    source, generation = layout(make_shape(), (1, 4, 1)), ParallelStrategy(dp=2, tp=2)
    for node_size, order in ((4, (0, 2, 1, 3)), (2, (0, 1, 2, 3))):
        assert order_for(source, generation, range(4), node_of=lambda rank, n=node_size: rank // n) == order


def test_ranks_without_parameters_keep_the_plain_order() -> None:
    source = layout(EIGHT_HEADS, (2, 2, 2))
    assert best(source, (1, 4, 3), range(8, 20)).ranks == tuple(range(8, 20))


def test_the_layout_itself_is_kept() -> None:
    for p_t_d in [(1, 4, 2), (2, 2, 2), (4, 1, 3), (8, 1, 1)]:
        source = layout(EIGHT_HEADS, p_t_d)
        assert best(source, p_t_d).ranks == source.ranks


def test_permuted_source_ranks_are_found_again() -> None:
    specs, order = parameter_specs(EIGHT_HEADS), (5, 3, 0, 7, 1, 6, 2, 4)
    source = parameter_layout(specs, ParallelStrategy(tp=4, pp=2), order)
    target = best(source, (2, 4, 1), range(8))
    assert target.ranks == order
    assert moved(source, target) == 0


def test_tensor_groups_stay_inside_nodes_where_that_costs_no_bytes() -> None:
    """Each quarter of the source is on four ranks and holds two eighths of the target: many orders are as good."""
    source = layout(EIGHT_HEADS, (1, 4, 4))
    target = best(source, (1, 8, 2))
    assert moved(source, target) < moved(source, layout(EIGHT_HEADS, (1, 8, 2)))
    assert [sorted(group) for group in target.tp_groups()] == [list(range(8)), list(range(8, 16))]
    source = layout(EIGHT_HEADS, (8, 4, 4))
    target = best(source, (4, 8, 4))
    assert all(len({rank // 8 for rank in group}) == 1 for group in target.tp_groups())


@pytest.mark.parametrize(
    ("training", "generation"), [((7, 2, 9), (5, 4, 6)), ((3, 4, 6), (4, 8, 2)), ((7, 8, 18), (12, 4, 21))]
)
def test_tensor_groups_are_near_where_stages_overlap_unevenly(
    training: tuple[int, int, int], generation: tuple[int, int, int]
) -> None:
    source = layout(make_shape(n_layers=35, n_heads=8, n_kv_heads=8), training)
    target = best(source, generation, source.ranks[: math.prod(generation)])
    assert max(len({rank // 8 for rank in group}) for group in target.tp_groups()) <= 2


def test_a_target_on_part_of_the_ranks_takes_what_is_there() -> None:
    source = layout(EIGHT_HEADS, (2, 2, 2))
    target = best(source, (1, 2, 2), (4, 5, 6, 7))
    assert sorted(target.ranks) == [4, 5, 6, 7]
    held = plan_realloc(source, target)
    assert all(held.keeps(rank) for rank in target.ranks)


def test_a_larger_target_may_have_new_ranks() -> None:
    source = layout(EIGHT_HEADS, (1, 4, 1))
    target = best(source, (1, 2, 4), range(8))
    parts = {rank: target.coordinates_of(rank)[2] for rank in range(4)}
    assert parts == {0: 0, 1: 0, 2: 1, 3: 1}


def test_wrong_ranks_are_refused() -> None:
    source = layout(EIGHT_HEADS, (1, 4, 2))
    with pytest.raises(AllocationError, match="strategy d4t2p1 needs 8 ranks, not 7"):
        best(source, (1, 2, 4), range(7))
    with pytest.raises(AllocationError, match="rank 1 is in a layout of strategy d2t1p1 more than once"):
        best(source, (1, 1, 2), (1, 1))
    with pytest.raises(AllocationError, match="tp=3 does not fit the model"):
        best(source, (1, 3, 1), range(3))


@given(st.data())
def test_transport_is_exact(data: st.DataObject) -> None:
    """Against all assignments of single units; an assignment is as good exactly if it uses free entries alone.

    Some rows are equal, and some columns.
    """
    n_units, n_rows = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4))
    columns = data.draw(st.lists(st.integers(0, 3), min_size=n_units, max_size=n_units))
    rows = data.draw(st.lists(st.integers(0, n_rows - 1), min_size=n_units, max_size=n_units))
    supplies = [rows.count(row) for row in range(n_rows)]
    demands = [columns.count(column) for column in range(4)]
    gain = st.integers(-3, 3) | st.integers(10**11, 10**11 + 3)
    gains = np.array([[data.draw(gain) for _ in range(4)] for _ in range(n_rows)], dtype=np.int64)
    gains = gains[[data.draw(st.integers(0, row)) for row in range(n_rows)]]
    gains = gains[:, [data.draw(st.integers(0, column)) for column in range(4)]]
    amounts, is_free = transport(gains, supplies, demands)
    assert (amounts >= 0).all()
    assert amounts.sum(axis=1).tolist() == supplies
    assert amounts.sum(axis=0).tolist() == demands
    ours = int((amounts * gains).sum())
    best_gain = max(sum(int(gains[r, c]) for r, c in zip(rows, order)) for order in itertools.permutations(columns))
    assert ours == best_gain
    for order in itertools.permutations(columns):
        is_best = sum(int(gains[r, c]) for r, c in zip(rows, order)) == best_gain
        assert is_best == all(is_free[r, c] for r, c in zip(rows, order))


@pytest.mark.parametrize(
    ("training", "generation"),
    [((1, 8, 128), (1, 2, 512)), ((8, 4, 32), (4, 8, 32)), ((5, 32, 6), (12, 8, 10)), ((16, 16, 4), (32, 32, 1))],
)
def test_a_thousand_ranks_are_ordered_in_time(training: tuple[int, int, int], generation: tuple[int, int, int]) -> None:
    shape = LLAMA_70B
    source = layout(shape, training)
    pp, tp, dp = generation
    ranks = range(pp * tp * dp)
    start = time.perf_counter()
    target = best(source, generation, ranks)
    assert time.perf_counter() - start < 20.0
    assert moved(source, target) < moved(source, layout(shape, generation))
