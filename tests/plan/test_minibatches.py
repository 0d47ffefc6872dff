"""Minibatches: random by seed, step, batch and pass, the same under every plan, and divided by whole rounds."""

import dataclasses
import math
import re
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from realrl.graph.mfc import InterfaceType, MFCDef
from realrl.mesh.device_mesh import Cluster
from realrl.mesh.notation import parse_allocation
from realrl.plan.minibatches import draw_minibatches, share_minibatches
from realrl.plan.protocols import CallLayout, divide, register_protocol, slices_of, transfer_protocol
from realrl.plan.samples.transfer import Share

CLUSTER = Cluster(1, 8)
LENGTHS = st.lists(st.integers(0, 900), min_size=1, max_size=48)
BUILT_IN = ["3D_PROTO", "DP_PROTO", "ONE_TO_ALL", "ALL_TO_ALL", "3D_ALL_MICRO_DP", "3D_PP_ONLY"]


def train(n_minibatches=1, n_passes=1, protocol="3D_PROTO"):
    return MFCDef(
        "actor_train", "actor", InterfaceType.TRAIN_STEP, "x", ("k",), n_seqs=64, n_minibatches=n_minibatches,
        n_passes=n_passes, protocol=protocol,
    )  # fmt: skip


def layout_of(strategy, *, balanced_dp=False, home=None):
    """On the first devices of a node."""
    n_devices = math.prod(map(int, re.findall(r"\d", strategy)))
    mesh = f"0:0-{n_devices - 1}" if n_devices > 1 else "0:0"
    spread, at_home = (s and parse_allocation(f"{s}@{mesh}", CLUSTER) for s in (strategy, home))
    return CallLayout(spread, at_home, equal_count=balanced_dp)


def ids_of(token_counts):
    return tuple(f"1/{i}" for i in range(len(token_counts)))


@st.composite
def layouts(draw):
    """Strategies on one to eight devices, with homes for replicas inside of them."""
    strategy, home = draw(
        st.sampled_from([("d1", "d1"), ("d2", "d2"), ("d4", "t4"), ("d2t2", "t4"), ("d4t2", "d2t4"), ("d8", "d2p4"),
                         ("t4", "t4"), ("d2p2", "d2p2")])
    )  # fmt: skip
    return layout_of(strategy, balanced_dp=draw(st.booleans()), home=home)


@given(LENGTHS, st.integers(1, 7), st.integers(1, 3), st.integers(0, 2**40), st.integers(1, 99))
def test_a_pass_is_over_all_samples_in_minibatches_of_nearly_equal_size(lengths, n_minibatches, n_passes, seed, step):
    drawn = draw_minibatches(lengths, n_minibatches, n_passes=n_passes, seed=seed, step=step)
    assert len(drawn) == n_minibatches * n_passes
    assert drawn == draw_minibatches(list(lengths), n_minibatches, n_passes=n_passes, seed=seed, step=step)
    for start in range(0, len(drawn), n_minibatches):
        one_pass = drawn[start : start + n_minibatches]
        assert sorted(i for members in one_pass for i in members) == list(range(len(lengths)))
        assert all(members == sorted(members) for members in one_pass)
        sizes = [len(members) for members in one_pass]
        assert max(sizes) - min(sizes) <= 1
        tokens = [sum(lengths[i] for i in members) for members in one_pass]
        assert max(tokens) - min(tokens) <= max(lengths)


def test_the_draw_is_the_same_on_every_platform_and_version():
    assert draw_minibatches([5, 9, 1, 7, 3, 8, 2], 3, n_passes=2, seed=1, step=1) == [
        [3, 6], [0, 2, 5], [1, 4],
        [2, 3, 6], [4, 5], [0, 1],
    ]  # fmt: skip


def test_seeds_steps_and_passes_draw_other_minibatches():
    lengths = [10 + i for i in range(32)]
    keys = ((1, 1), (1, 2), (2, 1), (1, 11), (11, 1))
    draws = [draw_minibatches(lengths, 4, n_passes=3, seed=seed, step=step) for seed, step in keys]
    passes = [str(drawn[start : start + 4]) for drawn in draws for start in (0, 4, 8)]
    assert len(set(passes)) == len(passes)


def test_batches_of_a_step_draw_other_minibatches():
    lengths = [10 + i for i in range(32)]
    draws = [draw_minibatches(lengths, 4, n_passes=3, seed=1, step=1, batch=batch) for batch in range(3)]
    passes = [str(drawn[start : start + 4]) for drawn in draws for start in (0, 4, 8)]
    assert len(set(passes)) == len(passes)
    assert draws[0] == draw_minibatches(lengths, 4, n_passes=3, seed=1, step=1)
    assert draw_minibatches([5, 9, 1, 7, 3, 8, 2], 3, seed=1, step=1, batch=1) == [[0, 1], [4, 5], [2, 3, 6]]


def test_passes_before_others_do_not_depend_on_how_many_follow():
    lengths = [3, 1, 4, 1, 5, 9, 2, 6]
    assert draw_minibatches(lengths, 2, seed=5, step=3) == draw_minibatches(lengths, 2, n_passes=4, seed=5, step=3)[:2]


def test_every_two_samples_of_different_rounds_meet_as_often_as_chance_has_it():
    """Unlike minibatches of fixed strata, where some never meet; those of one round never do."""
    lengths = [80, 70, 60, 50, 40, 30, 20, 10]
    met, n_steps = Counter(), 2000
    for step in range(1, n_steps + 1):
        for members in draw_minibatches(lengths, 2, seed=1, step=step):
            met.update((i, j) for i in members for j in members if i < j)
    for i in range(8):
        for j in range(i + 1, 8):
            share = met[i, j] / n_steps
            assert share == 0 if i // 2 == j // 2 else abs(share - 0.5) < 0.06, (i, j)


@given(LENGTHS, st.integers(1, 6), st.integers(1, 3), layouts(), st.sampled_from(BUILT_IN))
def test_shares_make_up_the_minibatches_and_none_is_empty(lengths, n_minibatches, n_passes, layout, protocol):
    mfc, ids = train(n_minibatches, n_passes, protocol), ids_of(lengths)
    shares = share_minibatches(mfc, ids, lengths, layout, seed=3, step=4)
    drawn = draw_minibatches(lengths, n_minibatches, n_passes=n_passes, seed=3, step=4)
    assert sorted(rank for ranks in shares for rank in ranks) == sorted(layout.allocation.ranks)
    for number, members in enumerate(drawn):
        held = [sample_id for share in shares.values() for sample_id in share[number]]
        assert sorted(held, key=ids.index) == [ids[i] for i in members], "a sample is lost, or given twice"
    for share in shares.values():
        passes = [share[start : start + n_minibatches] for start in range(0, len(share), n_minibatches)]
        assert len(passes) == n_passes
        assert len({tuple(sorted(i for members in one for i in members)) for one in passes}) == 1
        assert all(list(members) == sorted(members, key=ids.index) for members in share)
    n_slices = len(slices_of(protocol, layout))
    if len(lengths) >= n_minibatches * n_slices:
        assert all(members for share in shares.values() for members in share)


@given(LENGTHS, st.integers(1, 6), layouts(), st.sampled_from(BUILT_IN))
def test_tokens_and_counts_are_balanced_over_ranks(lengths, n_minibatches, layout, protocol):
    ids = ids_of(lengths)
    shares = share_minibatches(train(n_minibatches, 2, protocol), ids, lengths, layout, seed=1, step=1)
    tokens_of = dict(zip(ids, lengths, strict=True))
    for number in range(2 * n_minibatches):
        loads = [sum(tokens_of[i] for i in share[number]) for share in shares.values()]
        counts = [len(share[number]) for share in shares.values()]
        if layout.equal_count and protocol != "3D_ALL_MICRO_DP":
            assert max(counts) - min(counts) <= 1
        elif protocol in ("3D_PROTO", "DP_PROTO"):
            # One sample for the spread of its rounds, one for how rounds are divided, one for the minibatch's size.
            assert max(loads) <= sum(loads) / len(loads) + 3 * max(lengths)


@given(LENGTHS, layouts(), st.sampled_from(BUILT_IN))
def test_a_single_minibatch_is_divided_as_the_protocol_divides_the_batch(lengths, layout, protocol):
    ids = ids_of(lengths)
    wanted, _ = divide(protocol, ids, lengths, layout, call="actor_train")
    shares = share_minibatches(train(1, 2, protocol), ids, lengths, layout, seed=1, step=1)
    assert shares == {share.ranks: (share.ids, share.ids) for share in wanted}


def test_an_incomplete_round_goes_to_all_ranks_of_the_lightest_share():
    """Also where a protocol names every rank in a share of its own."""

    def one_by_one(ids, token_counts, layout):
        whole = transfer_protocol("3D_PROTO").distribute(ids, token_counts, layout)
        return [Share((rank,), share.ids) for share in whole for rank in share.ranks]

    register_protocol("TEST_ONE_BY_ONE", one_by_one, transfer_protocol("3D_PROTO").collect)
    lengths, layout = [9, 9, 9, 8, 8, 8, 1], layout_of("d2t2")
    whole = share_minibatches(train(3), ids_of(lengths), lengths, layout, seed=1, step=1)
    apart = share_minibatches(train(3, protocol="TEST_ONE_BY_ONE"), ids_of(lengths), lengths, layout, seed=1, step=1)
    assert apart == {(rank,): share for ranks, share in whole.items() for rank in ranks}
    assert sum(len(members) for members in whole[0, 1]) == 3
    assert sum(len(members) for members in whole[2, 3]) == 4


@given(LENGTHS, st.integers(1, 4), st.integers(1, 3))
def test_data_parallel_ranks_share_the_same_minibatches(lengths, n_minibatches, n_passes):
    mfc, ids = train(n_minibatches, n_passes), ids_of(lengths)
    found = []
    for strategy in ("d1", "d2", "d4", "d8", "t2", "p2", "d2t2p2"):
        for balanced_dp in (False, True):
            layout = layout_of(strategy, balanced_dp=balanced_dp)
            changed = dataclasses.replace(mfc, balanced_dp=balanced_dp)
            shares = share_minibatches(changed, ids, lengths, layout, seed=1, step=2)
            found.append([{i for s in shares.values() for i in s[n]} for n in range(n_minibatches * n_passes)])
    assert all(minibatches == found[0] for minibatches in found)
