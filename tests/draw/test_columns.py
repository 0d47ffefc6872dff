"""Order and heights of a layered drawing."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realrl.draw.columns import Item, ItemKind, Links, arrange, crossings, obstacles, pool


def items_of(*names):
    """Items named by column and letter, such as "0a"."""
    return {name: Item(ItemKind.CARD, int(name[0]), 100, 20, 20) for name in names}


def test_crossings():
    pairs = [("0a", "1b"), ("0b", "1a"), ("0b", "1b")]
    links = Links.of(items_of("0a", "0b", "1a", "1b"), pairs)
    assert crossings([["0a", "0b"], ["1a", "1b"]], links) == 1
    assert crossings([["0b", "0a"], ["1a", "1b"]], links) == 0


def test_a_ladder_given_upside_down_is_untangled():
    items = items_of("0a", "0b", "0c", "1c", "1b", "1a")
    y = arrange(items, [("0a", "1a"), ("0b", "1b"), ("0c", "1c")])
    assert [y[f"0{c}"] for c in "abc"] == pytest.approx([y[f"1{c}"] for c in "abc"])


def test_loops_decide_between_orders_with_equal_crossings():
    items = items_of("0a", "1a", "1b", "1c", "2a", "2b", "2c")
    pairs = [("0a", f"1{c}") for c in "abc"] + [(f"1{c}", f"2{c}") for c in "abc"]
    y = arrange(items, pairs, [("2b", "1b")])
    assert y["1b"] in (min(y["1a"], y["1b"], y["1c"]), max(y["1a"], y["1b"], y["1c"]))
    columns = [["0a"], ["1a", "1b", "1c"], ["2a", "2b", "2c"]]
    assert obstacles(items, columns, [("2b", "1b")]) == 2
    assert obstacles(items, columns, [("2c", "1c"), ("2a", "1a"), ("2a", "1c")]) == 2


def test_a_chain_is_level():
    y = arrange(items_of("0a", "1a", "2a"), [("0a", "1a"), ("1a", "2a")])
    assert len({round(value, 3) for value in y.values()}) == 1


@st.composite
def nets(draw):
    sizes = draw(st.lists(st.integers(1, 5), min_size=2, max_size=5))
    kinds = st.sampled_from(list(ItemKind))
    heights = st.floats(0, 40)
    items = {
        f"{column} {i}": Item(draw(kinds), column, 50, draw(heights), draw(heights), ports=20)
        for column, size in enumerate(sizes)
        for i in range(size)
    }
    possible = [(a, b) for a, b in itertools.product(items, items) if items[b].column == items[a].column + 1]
    return items, draw(st.lists(st.sampled_from(possible), unique=True))


@given(nets())
def test_items_of_a_column_never_overlap(net):
    items, pairs = net
    y = arrange(items, pairs)
    assert set(y) == set(items)
    for column in {item.column for item in items.values()}:
        names = sorted((name for name in items if items[name].column == column), key=y.__getitem__)
        for above, below in itertools.pairwise(names):
            assert y[above] + items[above].down < y[below] - items[below].up
    assert arrange(items, pairs) == y


@given(st.lists(st.tuples(st.floats(-100, 100), st.floats(0.1, 10)), min_size=1, max_size=8))
def test_pooled_levels_are_the_closest_in_order(points):
    wanted, weights = [w for w, _ in points], [w for _, w in points]
    levels = pool(wanted, weights)
    assert all(a <= b + 1e-9 for a, b in itertools.pairwise(levels))
    # optimality: the mean of every run of equal levels is its level, and no prefix of a run wants to go lower
    for level, run in itertools.groupby(range(len(levels)), key=lambda i: round(levels[i], 6)):
        indices = list(run)
        total = sum(weights[i] for i in indices)
        assert sum(weights[i] * wanted[i] for i in indices) / total == pytest.approx(level, abs=1e-4)
        for k in range(1, len(indices) + 1):
            part = indices[:k]
            mean = sum(weights[i] * wanted[i] for i in part) / sum(weights[i] for i in part)
            assert mean >= level - 1e-4
