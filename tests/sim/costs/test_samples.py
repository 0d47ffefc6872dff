import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from realrl.graph.mfc import InterfaceType, MFCDef
from realrl.plan.samples.partition import micro_batches_balanced, micro_batches_in_order
from realrl.sim.costs.flops import attended
from realrl.sim.costs.samples import micro_batches, tokens_of
from realrl.sim.durations import SampleSizes
from tests.sim.costs.models import llama, small

SIZES = {"a": SampleSizes((5,), (7,)), "b": SampleSizes((3, 3), (1, 9)), "c": SampleSizes((4, 6))}


def call(kind=InterfaceType.TRAIN_STEP, **changes):
    return MFCDef("call", "actor", kind, "x", n_seqs=8, **changes)


def test_what_samples_are_for_a_model():
    found = tokens_of(SIZES, small(), shares_prefixes=False)
    assert found.index == {"a": 0, "b": 1, "c": 2}
    assert found.weights == found.load.tokens.tolist() == [12, 16, 10]
    assert found.load.scored.tolist() == [7, 10, 10]  # responses, or all of a sequence that has none
    assert found.load.pairs[None].tolist() == [12 * 13 / 2, (4 * 5 + 12 * 13) / 2, (4 * 5 + 6 * 7) / 2]


def test_windows_count_apart():
    found = tokens_of({"a": SIZES["a"]}, small(sliding_window=4, windowed_layers=(1,)), shares_prefixes=False)
    assert {window: n.tolist() for window, n in found.load.pairs.items()} == {None: [78], 4: [10 + 8 * 4]}


def test_a_shared_prompt_is_computed_once():
    sizes = {"a": SampleSizes((500,) * 4, (20, 30, 40, 50)), "b": SampleSizes((500,), (20,))}
    plain, shared = (tokens_of(sizes, llama(), shares_prefixes=shares) for shares in (False, True))
    assert shared.load.tokens.tolist() == [500 + 140, 520]
    assert shared.weights == plain.weights  # micro-batches are cut by all tokens
    assert shared.load.scored.tolist() == plain.load.scored.tolist()
    assert plain.load.pairs[None][0] - shared.load.pairs[None][0] == 3 * float(attended(500, None))
    assert shared.load.forks.tolist() == [9 / 13, 0]
    assert plain.load.forks.tolist() == [0, 0]
    parts = list(micro_batches(shared, ["ab", "ba", "b"], call(), n_stages=1))
    assert [(part.places, part.load.forks.tolist()) for part in parts] == [((0, 1, 2), [[9 / 13, 9 / 13, 0]])]


def test_a_shared_prompt_takes_more_for_more_responses_and_for_padding():
    responses = [(20,) * 4, (20, 20, 20, 21), (20,) * 8, tuple(range(20, 28))]
    sizes = {str(i): SampleSizes((500,) * len(some), some) for i, some in enumerate(responses)}
    forks = tokens_of(sizes, llama(), shares_prefixes=True).load.forks
    assert isinstance(forks, np.ndarray)
    assert forks.tolist() == sorted(set(forks.tolist()))
    assert forks[-1] == 1.0


@given(
    weights=st.lists(st.integers(1, 50), min_size=1, max_size=20),
    n_mbs=st.one_of(st.none(), st.integers(1, 6)),
    budget=st.one_of(st.none(), st.integers(10, 90)),
    n_stages=st.integers(1, 3),
    trains=st.booleans(),
)
def test_micro_batches_are_those_of_the_engine(weights, n_mbs, budget, n_stages, trains):
    ids = [str(i) for i in range(len(weights))]
    sizes = {i: SampleSizes((w,)) for i, w in zip(ids, weights, strict=True)}
    mfc = call(
        InterfaceType.TRAIN_STEP if trains else InterfaceType.INFERENCE,
        n_mbs=None if budget else n_mbs,
        max_tokens_per_mb=budget,
    )
    tokens = tokens_of(sizes, small(), shares_prefixes=False)
    shares = [tuple(ids), (), tuple(ids[::2])]
    found = {}
    for part in micro_batches(tokens, shares, mfc, n_stages=n_stages):
        for column, place in zip(part.columns, part.places, strict=True):
            found[place] = part.load.tokens[:, column].tolist()
    assert found.keys() == {0, 2}
    split = micro_batches_balanced if trains else micro_batches_in_order
    default = (2 * n_stages if n_stages > 1 else 1) if trains else n_stages
    for place, mine in found.items():
        members = [weights[int(i)] for i in shares[place]]
        parts = split(members, n_mbs=mfc.n_mbs or default, budget=budget)
        assert mine == [sum(members[i] for i in part) for part in parts]


def test_shares_of_equal_cuts_come_together():
    tokens = tokens_of({i: SampleSizes((8,)) for i in "abcdef"}, small(), shares_prefixes=False)
    parts = list(micro_batches(tokens, ["ab", "cd", "e", "f"], call(n_mbs=2), n_stages=1))
    assert {part.places: part.load.tokens.shape for part in parts} == {(0, 1): (2, 1), (2, 3): (1, 1)}
    assert [part.columns.tolist() for part in parts] == [[0, 0], [0, 0]]
    assert all(np.all(part.load.tokens == 8) for part in parts)
