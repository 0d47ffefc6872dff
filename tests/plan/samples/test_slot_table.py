import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realrl.plan.memory.buffers import PREFILL_TOKENS
from realrl.plan.samples.slot_table import Row, SlotTable, divide_prompts, prefill_chunks


@st.composite
def cases(draw):
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=12))
    return lengths, draw(st.integers(1, 5)), draw(st.integers(1, 9))


class Story:
    """Drives a table like the generator does and checks its invariants on the way."""

    def __init__(self, lengths, n_responses, max_rows):
        self.table = SlotTable(lengths, n_responses=n_responses, max_rows=max_rows)
        self.max_rows = max_rows
        self.slots = {}  # slot -> row, as a cache would see it
        self.held = set()
        self.entered, self.prefilled = Counter(), Counter()

    def admit(self):
        before = len(self.table.rows)
        admission = self.table.admit()
        assert [entry.slot for entry in admission.entries] == list(range(before, len(self.table.rows)))
        computed = {entry.row.sample for entry in admission.prefills}
        for entry in admission.copies:
            assert entry.row.sample in computed | self.held
        for entry in admission.entries:
            self.slots[entry.slot] = entry.row
            self.entered[entry.row] += 1
        self.prefilled.update(computed)
        if admission.drop is not None:
            self.held.remove(admission.drop)
        if admission.hold is not None:
            assert admission.hold in computed
            self.held.add(admission.hold)
        assert len(self.held) <= 1
        self.check()

    def retire(self, slots):
        moves = self.table.retire(slots)
        before = dict(self.slots)
        for source, target in moves:
            self.slots[target] = before[source]
        for slot in range(len(self.table.rows), len(before)):
            del self.slots[slot]
        assert len({source for source, _ in moves}) == len({target for _, target in moves}) == len(moves)
        self.check()

    def check(self):
        assert len(self.table.rows) <= self.max_rows
        assert self.slots == dict(enumerate(self.table.rows))


@given(cases(), st.data())
def test_every_response_enters_once_and_every_prompt_is_prefilled_once(case, data):
    lengths, n_responses, _ = case
    story = Story(*case)
    left = []
    while not story.table.is_done:
        if story.table.can_admit:
            story.admit()
        n_rows = len(story.table.rows)
        assert n_rows > 0
        leaving = data.draw(st.sets(st.integers(0, n_rows - 1)))
        if not leaving:
            leaving = {0}  # time passes
        left += [story.table.rows[slot] for slot in leaving]
        story.retire(leaving)
    everything = [Row(sample, response) for sample in range(len(lengths)) for response in range(n_responses)]
    assert story.entered == Counter(everything)
    assert sorted(left, key=str) == sorted(everything, key=str)
    assert story.prefilled == Counter(range(len(lengths)))
    assert not story.held


def test_long_prompts_enter_first():
    table = SlotTable([3, 9, 5], n_responses=1, max_rows=2)
    assert [entry.row.sample for entry in table.admit().entries] == [1, 2]


def test_waits_until_a_prefill_is_worth_its_time():
    table = SlotTable([1] * 40, n_responses=1, max_rows=32)
    table.admit()
    table.retire([0, 1, 2])
    assert not table.can_admit
    table.retire([0])
    assert table.can_admit


def test_holes_are_filled_from_the_end_with_as_few_moves_as_possible():
    table = SlotTable([1] * 6, n_responses=1, max_rows=6)
    table.admit()
    moves = table.retire([1, 4, 5])
    assert moves == [(3, 1)]


@pytest.mark.parametrize(("lengths", "n_shares"), [((5, 3, 9, 1, 7, 2), 4), ((4, 4), 3), ((1, 2, 3), 2), ((), 2)])
def test_shares_hold_each_sample_once_in_nearly_equal_numbers(lengths, n_shares):
    shares = divide_prompts(lengths, n_shares)
    assert len(shares) == min(n_shares, len(lengths))
    assert sorted(itertools.chain.from_iterable(shares)) == list(range(len(lengths)))
    sizes = [len(share) for share in shares]
    assert not sizes or (min(sizes) >= 1 and max(sizes) - min(sizes) <= 1)


@given(st.lists(st.integers(1, 2 * PREFILL_TOKENS), max_size=12))
def test_prompts_of_one_prefill_are_neighbours_within_the_limit(lengths):
    chunks = [lengths[part.start : part.stop] for part in prefill_chunks(lengths)]
    assert list(itertools.chain.from_iterable(chunks)) == lengths
    assert all(len(chunk) == 1 or (chunk and sum(chunk) <= PREFILL_TOKENS) for chunk in chunks)
    assert all(sum(a) + b[0] > PREFILL_TOKENS for a, b in itertools.pairwise(chunks))
