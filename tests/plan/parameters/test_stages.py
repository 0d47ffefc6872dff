"""Blocks of unlike cost over pipeline stages, against all splits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from realrl.mesh.device_mesh import ParallelStrategy
from realrl.plan.parameters.decoder_specs import parameter_specs
from realrl.plan.parameters.layout import ParameterLayout, parameter_layout
from realrl.plan.parameters.specs import slice_of
from realrl.plan.parameters.stages import split_by_cost, stages_of
from tests.helpers.layouts import EXPERTS, make_shape


def costs(stages: Sequence[range], blocks: Sequence[int], head: int) -> list[int]:
    found = [sum(blocks[i] for i in stage) for stage in stages]
    found[-1] += head
    return found


@given(blocks=st.lists(st.integers(1, 9), min_size=1, max_size=7), head=st.integers(0, 20), data=st.data())
def test_no_split_is_cheaper_or_as_cheap_and_more_even(blocks: list[int], head: int, data: st.DataObject) -> None:
    n_stages = data.draw(st.integers(1, len(blocks)))
    stages = split_by_cost(blocks, head, n_stages)
    assert [i for stage in stages for i in stage] == list(range(len(blocks)))
    assert len(stages) == n_stages
    assert all(stages)
    ours = costs(stages, blocks, head)
    for cuts in combinations(range(1, len(blocks)), n_stages - 1):
        other = costs([range(a, b) for a, b in pairwise((0, *cuts, len(blocks)))], blocks, head)
        assert (max(ours), sum(c * c for c in ours)) <= (max(other), sum(c * c for c in other))


def test_experts_that_compute_no_token_cost_nothing() -> None:
    """Of a hundred experts of 10 inner units two compute a token: they are cheaper than a plain MLP of 150 units."""
    experts = replace(EXPERTS, n_experts=100, intermediate_size=10, dense_layers=(0, 1))
    specs = parameter_specs(make_shape(n_layers=6, vocab_size=1, intermediate_size=150, moe=experts))
    assert stages_of(specs, 2) == ((range(2),), (range(2, 6),))
    specs = parameter_specs(make_shape(n_layers=6, vocab_size=1, moe=replace(experts, dense_layers=())))
    assert stages_of(specs, 2) == ((range(3),), (range(3, 6),))


def test_experts_are_cut_between_inner_units_and_the_router_is_not() -> None:
    shape = make_shape(n_heads=3, n_kv_heads=3, moe=replace(EXPERTS, n_experts=6, intermediate_size=10))
    specs = {spec.name: spec for spec in parameter_specs(shape)}
    size = make_shape().hidden_size
    assert slice_of(specs["blocks.0.mlp.router.weight"], 1, 3) == ((0, 6), (0, size))
    assert slice_of(specs["blocks.0.mlp.experts.gate"], 1, 3) == ((0, 6), (3, 6), (0, size))
    assert slice_of(specs["blocks.0.mlp.experts.down"], 2, 3) == ((0, 6), (0, size), (6, 10))
    layout: ParameterLayout = parameter_layout(tuple(specs.values()), ParallelStrategy(tp=3), range(3))
    replicated = sum(spec.num_bytes for spec in specs.values() if spec.sharded_dim is None)
    assert sum(layout.num_bytes_of(rank) for rank in range(3)) == layout.model_bytes + 2 * replicated
