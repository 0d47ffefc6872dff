from dataclasses import replace

import numpy as np
import pytest

from realrl.mesh.device_mesh import ParallelStrategy
from realrl.sim.costs.collectives import FREE, Route, all_gather, all_reduce
from realrl.sim.costs.flops import stage_work
from realrl.sim.costs.passes import Load
from realrl.sim.costs.training import StageLinks, Training, optimizer_seconds, passes_of, train_seconds
from tests.sim.costs.models import hardware, llama, small

A100 = hardware()
WORK = stage_work(llama(), ParallelStrategy(tp=8), 0)


def links(dp=1, *, reduce=None):
    route = Route(dp, max(1, dp // 8), 8)
    dp_reduce = all_reduce(route, A100.links) if reduce is None else reduce
    return StageLinks(FREE, dp_reduce, all_gather(route, A100.links), FREE, FREE)


def training(dp=1, **changes):
    return replace(Training("native", 0, False, False, dp), **changes)


def test_one_rank_streams_its_optimizer_state():
    n = WORK.n_trained
    expected = n * (4 + 28 + 8) / A100.device.stream + n * (4 + 2) / A100.device.stream  # norm, AdamW, clip; publish
    assert optimizer_seconds(WORK, links(), A100, training()) == pytest.approx(expected)


def test_data_parallel_ranks_reduce_their_gradients():
    alone, four = (optimizer_seconds(WORK, links(dp), A100, training(dp)) for dp in (1, 4))
    n = WORK.n_trained
    reduced = 2 * 3 / 4 * 4 * n / A100.links.device.speed() + 16 * n / A100.device.stream
    assert four - alone == pytest.approx(reduced, rel=0.05)


def test_zero_shares_the_update():
    plain, shared = (optimizer_seconds(WORK, links(8), A100, training(8, zero_stage=stage)) for stage in (0, 1))
    saved = (28 + 8 + 6) * WORK.n_trained * 7 / 8 / A100.device.stream
    gathered = 2 * WORK.n_trained * 7 / 8 / A100.links.device.speed()
    assert plain - shared == pytest.approx(saved - gathered, rel=0.01)


def test_backends_reduce_other_bytes():
    seconds = {
        (backend, stage): optimizer_seconds(WORK, links(64), A100, training(64, backend=backend, zero_stage=stage))
        for backend, stage in (("native", 1), ("megatron", 1), ("deepspeed", 1), ("deepspeed", 2), ("deepspeed", 3))
    }
    assert seconds["megatron", 1] < seconds["native", 1]  # gradients are scattered
    assert seconds["deepspeed", 2] < seconds["deepspeed", 1] < seconds["native", 1]  # in half precision
    assert seconds["deepspeed", 3] < seconds["deepspeed", 2]  # whose parameters are gathered in every pass instead
    gathered = [
        passes_of([WORK], [links(64)], A100, training(64, backend="deepspeed", zero_stage=stage))[0][0].extra_s
        for stage in (2, 3)
    ]
    assert gathered[0] == 0.0 < gathered[1]


def test_an_optimizer_in_host_memory_is_slower():
    on_device, on_host = (optimizer_seconds(WORK, links(), A100, training(on_host=there)) for there in (False, True))
    assert on_host > 5 * on_device


def test_a_tied_embedding_is_added_up_by_the_ends():
    work = stage_work(small(tied_embeddings=True), ParallelStrategy(pp=2), 1)
    pair = all_reduce(Route(2, 1, 8), A100.links)
    free, tied = (optimizer_seconds(work, replace(links(), tied=cost), A100, training()) for cost in (FREE, pair))
    assert tied - free == pytest.approx(pair(4 * 512 * 64))


def test_minibatches_wait_for_their_slowest_replica():
    passes = passes_of([WORK], [links()], A100, training())

    def load(*tokens):
        n = np.array([tokens], dtype=float)
        return Load(n, n, {None: n})

    def seconds(*tokens):
        return train_seconds([([0], np.array([0]), load(*tokens))], 1, passes, [links()], 0.0)

    shares = [0, 0, 1, 1], np.arange(4), load(10, 500, 300, 20)
    both = train_seconds([shares], 2, passes, [links()], 0.25)
    assert both == pytest.approx(seconds(500) + seconds(300) + 2 * 0.25)
    alike = [0, 0, 1, 1], np.array([0, 1, 1, 0]), load(10, 500)
    assert train_seconds([alike], 2, passes, [links()], 0.0) == pytest.approx(2 * seconds(500))
