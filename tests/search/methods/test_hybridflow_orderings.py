"""The smallest of the published points, by scripts/hybridflow_orderings.py, whose prices are its own."""

import pytest

from scripts.hybridflow_orderings import POINTS, hardware, margin, outcomes, prices_of


@pytest.mark.parametrize("is_pinned", [True, False])
def test_colocation_is_the_fastest_on_two_nodes(is_pinned):
    point = POINTS[0]
    assert (point.n_devices, point.fastest) == (16, "colocate")
    found = outcomes(point, prices_of(point.sizes, hardware(cards=1.0)), is_pinned=is_pinned)
    assert {"colocate", "split"} <= set(found)
    assert margin(point, found, "alone") > 0.0
