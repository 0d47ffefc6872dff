"""Columns of living samples: what a slice does is what its samples do one by one."""

from hypothesis import given
from hypothesis import strategies as st

from realrl.sched.samples.columns import Columns, add, fill, is_everywhere, of, put, where


def test_neighbours_are_a_range_and_a_step_is_not_cut():
    columns = Columns(4)
    ids = tuple(f"1/{i}" for i in range(8))
    columns.add(0, ids)
    assert columns.slots(ids[2:5]) == range(2, 5)
    assert columns.slots((ids[3], ids[2])) == [3, 2]
    columns.remove(columns.slots(ids[:4]))
    columns.add(8, ("2/0", "2/1", "2/2", "2/3"))
    assert columns.at(range(8, 12)) == range(4)
    assert columns.at(range(6, 10)) == [6, 7, 0, 1]


@given(st.data())
def test_samples_keep_their_properties_while_columns_grow(data):
    """Samples come in rounds, and go in any order, so that old ones are in the way of new ones."""
    columns, expected, number = Columns(3), {}, 0
    small, large = columns.bytes(7), columns.values(None)
    for _ in range(data.draw(st.integers(1, 6))):
        ids = [f"1/{i}" for i in range(number, number + data.draw(st.integers(1, 5)))]
        columns.add(number, ids)
        slots = columns.slots(ids)
        assert is_everywhere(small, slots, 7)
        assert set(of(large, slots)) == {None}
        fill(small, slots, number % 5)
        put(large, slots, ids)
        expected |= {sample_id: (n, number % 5) for n, sample_id in enumerate(ids, number)}
        number += len(ids)
        for sample_id in data.draw(st.lists(st.sampled_from(sorted(expected)), unique=True)):
            columns.remove(columns.slots((sample_id,)))
            del expected[sample_id]
        for sample_id, (n, value) in expected.items():
            (slot,) = columns.slots((sample_id,))
            assert (columns.ids[slot], columns.numbers[slot]) == (sample_id, n)
            assert (small[slot], large[slot]) == (value, sample_id)
            assert list(columns.at((n,))) == [slot]
        assert columns.slot_of.keys() == expected.keys()


@given(st.lists(st.integers(0, 255), min_size=1, max_size=9), st.integers(-3, 3), st.data())
def test_a_range_is_as_good_as_its_slots(numbers, change, data):
    start = data.draw(st.integers(0, len(numbers) - 1))
    stop = data.draw(st.integers(start + 1, len(numbers)))
    found = []
    for slots in (range(start, stop), [*range(start, stop)]):
        column = bytearray(numbers)
        add(column, slots, change)
        assert [*of(column, slots)] == [(n + change) % 256 for n in numbers[start:stop]]
        value = column[start]
        chosen = [*where(column, slots, value)]
        assert is_everywhere(column, slots, value) == (len(chosen) == stop - start)
        fill(column, slots, 9)
        found.append((bytes(column), chosen))
    assert found[0] == found[1]
