"""Order and heights of a layered drawing."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realrl.draw.columns import Item, ItemKind, Links, arrange, crossings, level_rises, obstacles, separation, stiffness


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


@st.composite
def small_nets(draw):
    """At most 7 items, whose places on the grid are exact: sizes are halves."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=2, max_size=3).filter(lambda sizes: sum(sizes) <= 7))
    kinds, halves = st.sampled_from(list(ItemKind)), st.integers(0, 80).map(lambda n: n / 2)
    items = {
        f"{column} {i}": Item(draw(kinds), column, 50, draw(halves), draw(halves), ports=22)
        for column, size in enumerate(sizes)
        for i in range(size)
    }
    possible = [(a, b) for a, b in itertools.product(items, items) if items[b].column == items[a].column + 1]
    return items, draw(st.lists(st.sampled_from(possible), unique=True, min_size=1))


@given(small_nets())
def test_no_group_of_items_could_move_to_make_links_more_level(net):
    """The cost is convex in differences of heights: were there better ones, moving some group would show it."""
    items, pairs = net
    y = arrange(items, pairs)
    columns = [[n for n in sorted(items, key=y.__getitem__) if items[n].column == c] for c in range(3)]
    rises = level_rises(items, columns, Links.of(items, pairs))

    def cost(y):
        tight = [
            y[below] - y[above] >= separation(items[above], items[below]) - 1e-6
            for column in columns
            for above, below in itertools.pairwise(column)
        ]
        paid = sum(stiffness(items[a], items[b]) * abs(y[b] - y[a] - rise) for (a, b), rise in rises.items())
        return paid if all(tight) else float("inf")

    least = cost(y)
    assert least < float("inf")
    for size in range(1, len(items)):
        for group in itertools.combinations(items, size):
            for step in (-0.5, 0.5):
                assert cost({n: y[n] + step * (n in group) for n in items}) >= least - 1e-6


def test_a_pill_that_may_choose_stays_level_with_its_producer():
    items = {
        "card a": Item(ItemKind.CARD, 0, 100, 20, 20, ports=22),
        "pill": Item(ItemKind.PILL, 1, 50, 10, 10),
        **{f"card {c}": Item(ItemKind.CARD, 2, 100, 20, 20, ports=22) for c in "bc"},
        "bend": Item(ItemKind.BEND, 1),
    }
    y = arrange(items, [("card a", "pill"), ("pill", "card b"), ("card a", "bend"), ("bend", "card c")])
    assert abs(y["pill"] - y["card a"]) == pytest.approx(5.5)  # level with its port
