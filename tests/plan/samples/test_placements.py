"""Placements in columns, which the routes of rows are planned with."""

import pytest
from hypothesis import given

from realrl.plan.samples.placements import PlacementColumn, lying
from realrl.plan.samples.spread import plan_spreads
from realrl.plan.samples.transfer import plan_transfers
from tests.plan.samples.test_transfer import node_of, place, situations


def columns_of(placements):
    """The same placements in columns with one order of the samples, and a vacant slot before them."""
    ids = list(next(iter(placements.values())))
    slot_of = {sample_id: slot for slot, sample_id in enumerate(ids, 1)}
    return {key: PlacementColumn(slot_of, [None, *(lie[i] for i in ids)]) for key, lie in placements.items()}


@given(situations())
def test_routes_do_not_depend_on_the_form_of_the_placements(situation):
    shares, placements = situation
    columns = columns_of(placements)
    planned = plan_transfers(shares, placements, node_of=node_of)
    assert plan_transfers(shares, columns, node_of=node_of) == planned
    spread = plan_spreads(shares, planned[0], placements, node_of=node_of)
    assert plan_spreads(shares, planned[0], columns, node_of=node_of) == spread


def test_keys_that_lie_alike_are_told_together():
    here, there = place([0]), place([1])
    column = {"1/0": here, "1/1": there}
    placements = {"a": column, "b": dict(column), "c": {"1/0": here, "1/1": here}, "d": column}
    assert lying(placements, ("1/1", "1/0")) == [
        (("a", "b"), (there, here)),
        (("c",), (here, here)),
        (("d",), (there, here)),
    ]


def test_a_column_is_a_mapping_of_the_samples_that_have_a_place():
    column = PlacementColumn({"1/0": 1, "1/1": 0}, [None, place([3])])
    assert dict(column) == {"1/0": place([3])}
    assert len(column) == 1
    with pytest.raises(KeyError, match="1/1"):
        column["1/1"]
    with pytest.raises(KeyError, match="1/1"):
        lying({"a": column}, ("1/0", "1/1"))
