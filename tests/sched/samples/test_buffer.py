"""The sample buffer and the queues of calls."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realrl.errors import InvalidTransitionError
from realrl.graph.mfc import MFCDef
from realrl.mesh.device_mesh import Cluster
from realrl.plan.samples.cursor import SampleRef
from realrl.plan.samples.placements import Placement
from realrl.plan.samples.transfer import Arrival
from realrl.sched.messages import KeySchema, Per, SampleMeta
from realrl.sched.samples.buffer import SampleBuffer
from realrl.sched.samples.call_queue import CallQueue, RoundQueue
from tests.sched.plans import INFERENCE, make_plan, on_all
from tests.sched.simulator import meta

CLUSTER = Cluster(1, 2)


def make_buffer(**first):
    """Two calls in a row over steps of four samples, with four samples on their way."""
    mfcs = [
        MFCDef("first", "a", INFERENCE, "x", ("prompt_ids",), ("k",), n_seqs=4, **first),
        MFCDef("second", "b", INFERENCE, "x", ("prompt_ids", "k"), ("l",), n_seqs=2),
    ]
    buffer = SampleBuffer(make_plan(mfcs, on_all(mfcs, CLUSTER), CLUSTER).main.calls, 4)
    buffer.expect([SampleRef(f"1/{i}", i) for i in range(4)])
    return buffer


IDS = tuple(f"1/{i}" for i in range(4))


def test_a_sample_is_read_once_by_each_call_and_then_freed():
    buffer = make_buffer()
    assert [queue.batch_size() for queue in buffer.queues] == [0, 0]
    buffer.add_loaded(0, meta(IDS, ["prompt_ids"]))
    assert [queue.batch_size() for queue in buffer.queues] == [4, 0]
    assert buffer.take(0) == (0, IDS)
    buffer.add_rows(1, meta(IDS[2:], ["k"]))
    assert buffer.queues[1].batch_size() == 0, "the oldest window is not ready"
    assert buffer.missing_output(0, IDS) == ("1/0", "k")
    buffer.add_rows(0, meta(IDS[:2], ["k"]))
    assert buffer.missing_output(0, IDS) is None
    assert buffer.finish(0, IDS) == []
    for window in (IDS[:2], IDS[2:]):
        assert buffer.take(1) == (0, window)
        buffer.validate()
        assert buffer.finish(1, window) == list(window)
        freed = buffer.free(window)
        assert freed == ({0: window} if window == IDS[:2] else {0: window, 1: window})
    buffer.validate()
    assert len(buffer) == 0


@pytest.mark.parametrize(("n_seqs", "is_early"), [(2, True), (4, False)])
def test_outputs_are_taken_in_when_somebody_may_start(n_seqs, is_early):
    """A reader of half batches can start with half of the output, one of whole batches only with all of it."""
    mfcs = [
        MFCDef("first", "a", INFERENCE, "x", ("prompt_ids",), ("k",), n_seqs=4),
        MFCDef("second", "b", INFERENCE, "x", ("k",), ("l",), n_seqs=n_seqs),
    ]
    buffer = SampleBuffer(make_plan(mfcs, on_all(mfcs, CLUSTER), CLUSTER).main.calls, 4)
    buffer.expect([SampleRef(f"1/{i}", i) for i in range(4)])
    buffer.add_loaded(0, meta(IDS, ["prompt_ids"]))
    buffer.take(0)
    buffer.grew_ready = False
    halves = IDS[1::-1], IDS[2:]
    buffer.add_output(0, 0, meta(halves[0], ["k"]), 4)
    assert (buffer.grew_ready, buffer.queues[1].batch_size()) == (is_early, 2 * is_early)
    assert (buffer.missing_output(0, IDS) == ("1/2", "k")) == is_early
    buffer.validate()
    buffer.add_output(0, 1, meta(halves[1], ["k"]), 4)
    assert buffer.queues[1].batch_size() == n_seqs
    assert buffer.missing_output(0, IDS) is None
    assert [buffer.holders("k", sample_id) for sample_id in IDS] == [{0}, {0}, {1}, {1}]
    buffer.validate()


def test_outputs_that_are_short_are_taken_in_at_the_end_of_the_call():
    buffer = make_buffer()
    buffer = SampleBuffer(buffer._calls[:1], 4)
    buffer.expect([SampleRef(f"1/{i}", i) for i in range(4)])
    buffer.add_loaded(0, meta(IDS, ["prompt_ids"]))
    buffer.take(0)
    buffer.add_output(0, 0, meta(IDS[:3], ["k"]), 4)
    buffer.take_in(0)
    assert buffer.missing_output(0, IDS) == ("1/3", "k")


def test_arrivals_are_incoming_until_the_call_is_done():
    buffer = make_buffer()
    buffer.add_loaded(0, meta(IDS, ["prompt_ids"]))
    arrivals = [Arrival(("prompt_ids",), IDS[:2], (1,))]
    buffer.begin_arrivals(arrivals)
    buffer.validate()
    placed = buffer.placements(["prompt_ids"])["prompt_ids"]
    assert placed["1/0"] == Placement(frozenset({0}), frozenset({1}))
    assert placed["1/2"] == Placement(frozenset({0}))
    buffer.finish_arrivals(arrivals)
    assert placed["1/0"] == Placement(frozenset({0, 1}))


def test_token_counts_take_the_longest_key_with_a_row_per_token():
    buffer = make_buffer()
    schemas = {
        "prompt_ids": KeySchema("int64", Per.TOKEN),
        "score": KeySchema("float32", Per.SEQUENCE),
        "logprobs": KeySchema("float32", Per.TRANSITION),
        "metadata": KeySchema("uint8", Per.TOKEN),  # bytes of text
    }
    seqlens = {"prompt_ids": ((3, 4), (1,)), "score": ((1, 1), (100,)), "logprobs": ((2, 9), (0,))}
    seqlens["metadata"] = ((500,), (600,))
    buffer.add_rows(0, SampleMeta(IDS[:2], schemas, seqlens))
    assert buffer.token_counts(IDS[:2]) == [11, 1]
    assert buffer.token_counts(IDS[:2], ["prompt_ids"]) == [7, 1]
    assert buffer.token_counts(IDS[:1], ["score", "metadata"]) == [1]


def test_refusals():
    buffer = make_buffer()
    with pytest.raises(InvalidTransitionError, match="sample '1/0' is loaded a second time"):
        buffer.expect([SampleRef("1/0", 0)])
    buffer.add_loaded(0, meta(IDS, ["prompt_ids"]))
    with pytest.raises(InvalidTransitionError, match="'1/0' cannot go from ready to done for call 'first'"):
        buffer.finish(0, IDS)
    buffer.take(0)
    with pytest.raises(InvalidTransitionError, match="'1/0' is freed, but first, second must read it"):
        buffer.free(IDS)


@given(st.data())
def test_streaming_takes_the_oldest_and_leaves_no_rest(data):
    n_seqs = data.draw(st.integers(1, 8))
    min_n_seqs = data.draw(st.integers(1, n_seqs))
    step_size = n_seqs * data.draw(st.integers(1, 3))
    queue = CallQueue(n_seqs=n_seqs, min_n_seqs=min_n_seqs, step_size=step_size)
    order = data.draw(st.permutations(range(2 * step_size)))
    ready, taken = set(), []
    for index in order:
        queue.add_ready(index)
        ready.add(index)
        while queue.batch_size() and data.draw(st.booleans()):
            take(queue, ready, taken, range(min_n_seqs, n_seqs + 1))
    while queue.batch_size():
        take(queue, ready, taken, range(min_n_seqs, n_seqs + 1))
    assert sorted(taken) == list(range(2 * step_size)), "some samples could not be taken"
    assert queue.steps_taken == 2


def take(queue, ready, taken, sizes):
    step_size, step = queue._step_size, queue.steps_taken
    oldest = sorted(i for i in ready if i // step_size == step)
    batch = queue.take()
    assert len(batch) in sizes
    assert batch == oldest[: len(batch)]
    ready.difference_update(batch)
    taken += batch


@given(st.permutations(range(12)), st.sampled_from([1, 2, 3, 6]))
def test_windows_do_not_depend_on_the_order(order, n_seqs):
    queue, batches = CallQueue(n_seqs=n_seqs, min_n_seqs=None, step_size=6), []
    for index in order:
        queue.add_ready(index)
        while queue.batch_size():
            batches.append(queue.take())
            queue.finish(n_seqs)
    assert batches == [list(range(i, i + n_seqs)) for i in range(0, 12, n_seqs)]
    assert queue.steps_finished == 2


def test_versions_of_what_was_read_are_kept_by_sample():
    buffer = make_buffer()
    buffer.add_loaded(0, meta(IDS, ["prompt_ids"]))
    buffer.set_version(0, IDS[:2], 3)
    buffer.set_version(1, IDS[:1], 5)
    assert [buffer.versions(sample_id) for sample_id in IDS[:3]] == [{"first": 3, "second": 5}, {"first": 3}, {}]


@given(st.data())
def test_rounds_leave_nothing_behind_and_keep_their_windows(data):
    n_seqs = data.draw(st.integers(1, 5))
    min_n_seqs = data.draw(st.none() | st.integers(1, n_seqs))
    queue, end = RoundQueue(n_seqs=n_seqs, min_n_seqs=min_n_seqs), 0
    for expected in range(data.draw(st.integers(1, 3))):
        assert (queue.steps_taken, queue.steps_begun) == (expected, expected)
        for _ in range(data.draw(st.integers(1, 3))):
            samples = range(end, end := end + data.draw(st.integers(1, 9)))
            queue.open(len(samples))
            dropped = data.draw(st.sets(st.sampled_from(list(samples))))
            batches = run_round(queue, data.draw(st.permutations(samples)), dropped)
            assert sorted(i for batch in batches for i in batch) == sorted(set(samples) - dropped)
            if min_n_seqs is None:
                windows = [samples[i : i + n_seqs] for i in range(0, len(samples), n_seqs)]
                kept = [[i for i in window if i not in dropped] for window in windows]
                assert batches == [window for window in kept if window]
            assert (queue.steps_taken, queue.steps_begun) == (expected, expected + 1)
        queue.close_step()
        assert (queue.steps_taken, queue.steps_finished) == (expected + 1, expected + 1)


def run_round(queue, order, dropped):
    """Samples become ready, or are dropped, in an order; the batches that a call takes as soon as it can."""
    batches, ready = [], set()
    for index in order:
        (queue.add_dropped if index in dropped else queue.add_ready)(index)
        ready |= {index} - dropped
        while queue.batch_size():
            batch = queue.take()
            assert batch == sorted(ready)[: len(batch)]
            ready -= set(batch)
            batches.append(batch)
            queue.finish(len(batch))
    return batches


def test_a_step_is_finished_when_its_last_batch_is_done():
    queue = RoundQueue(n_seqs=2, min_n_seqs=None)
    queue.open(2)
    for index in range(2):
        queue.add_ready(index)
    assert queue.take() == [0, 1]
    assert (queue.steps_begun, queue.steps_read) == (1, 0)
    queue.close_step()
    assert (queue.steps_taken, queue.steps_finished) == (1, 0)
    queue.open(2)
    assert (queue.steps_begun, queue.steps_read) == (1, 0)
    queue.finish(2)
    assert (queue.steps_taken, queue.steps_finished) == (1, 1)
    assert (queue.steps_begun, queue.steps_read) == (1, 1)


def test_a_step_is_read_before_its_replacements_come():
    queue = RoundQueue(n_seqs=1, min_n_seqs=None)
    queue.open(2)
    for index in range(2):
        queue.add_ready(index)
    seen = []
    for _ in range(2):
        queue.take()
        seen.append(queue.steps_read)
        queue.finish(1)
        seen.append(queue.steps_read)
    queue.open(1)
    queue.add_ready(2)
    queue.take()
    assert [*seen, queue.steps_read] == [0, 0, 0, 1, 1]
    assert queue.steps_finished == 0
