"""The native engine under (dp, tp, pp, sp) over gloo: the numbers are those of one process that holds everything."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from realrl.algo.api import ForwardOutput, LossFn, LossOutput, MicroBatching, TrainResult
from realrl.config.schema import OptimizerConfig
from realrl.data.sample import SequenceSample
from realrl.engine.decoder_engine import DecoderEngine
from realrl.engine.groups import Groups, GroupSettings
from realrl.engine.parallel import Parallel, parallel_of
from realrl.engine.tensor_parallel import TensorParallelGroup
from realrl.errors import CallError
from realrl.mesh.device_mesh import Allocation, Cluster, DeviceMesh, ParallelStrategy
from realrl.model.files.hf import load_model
from realrl.model.init import random_model
from realrl.plan.groups import process_groups
from realrl.plan.parameters.shards import shard_of
from realrl.plan.samples import prefixes
from realrl.sched.key_value import KeyValueClient
from realrl.shape import DecoderConfig, MoEConfig
from tests.helpers.ranks import run_ranks
from tests.helpers.sharded import save_engine
from tests.helpers.training import VOCAB_SIZE, make_batch, masked_nll, n_masked

CPU = torch.device("cpu")
# a large eps: Adam's first step would else be the sign of the gradient, however small that is
OPTIMIZER = OptimizerConfig(lr=1e-2, schedule="constant", clip_grad_norm=0.1, weight_decay=0.1, eps=1e-2)
N_SAMPLES = 11
# 61 tokens and 46 MLP rows that no tp divides, 2 KV heads that 4 and 8 ranks share
UNTIED = DecoderConfig(VOCAB_SIZE, 32, 4, 8, 2, 4, 46, attention_bias=True, o_bias=True, mlp_bias=True)
CONFIGS = {
    "untied": UNTIED,
    "tied": replace(UNTIED, tied_embeddings=True, attention_bias=False, o_bias=False, mlp_bias=False),
    "value": replace(UNTIED, head="value"),
    "experts": replace(UNTIED, qk_norm="head", moe=MoEConfig(5, 2, 14, aux_loss_coef=0.3, dense_layers=(1,))),
}


@dataclass(frozen=True)
class Case:
    """One engine: a model, a layout and a way to cut batches."""

    model: str
    strategy: ParallelStrategy
    micro_batching: MicroBatching
    n_layers: int = 4
    dtype: torch.dtype = torch.float32
    activation_checkpointing: bool = False
    n_shared: int = 0

    @property
    def batch(self) -> SequenceSample:
        return make_batch(N_SAMPLES, sequences_per_sample=3 if self.n_shared else 1, n_shared=self.n_shared)

    @property
    def config(self) -> DecoderConfig:
        return replace(CONFIGS[self.model], n_layers=self.n_layers)

    @property
    def loss(self) -> LossFn:
        return score_loss if self.config.is_scalar else masked_nll


def score_loss(out: ForwardOutput, batch: SequenceSample) -> LossOutput:
    """Squared distance of the scores to the tokens."""
    loss = (out.scores() - batch["input_ids"] / VOCAB_SIZE).square().sum()
    return LossOutput(loss, {"square": loss.detach()}, {"top": out.scores().detach().max()})


def strategies(world_size: int) -> Iterator[ParallelStrategy]:
    """All that fill the world."""
    sizes = [n for n in range(1, world_size + 1) if world_size % n == 0]
    for tp in sizes:
        for pp in sizes:
            if world_size % (tp * pp) == 0:
                for sp in (False, True) if tp > 1 else (False,):
                    yield ParallelStrategy(world_size // (tp * pp), tp, pp, sp)


def share_of(batch: SequenceSample, dp_rank: int, dp: int) -> SequenceSample:
    """Uneven parts, none empty: the first rank has most."""
    ends = [0, *(N_SAMPLES - dp + 1 + i for i in range(dp))]
    return batch.split([range(ends[i], ends[i + 1]) for i in range(dp)])[dp_rank]


def join(
    rank: int, world_size: int, meeting: KeyValueClient, used: set[ParallelStrategy], *, for_libraries: bool = False
) -> tuple[Groups, dict[Any, Parallel]]:
    cluster = Cluster(1, world_size)
    mesh = DeviceMesh.whole(cluster)
    allocations = [Allocation(mesh, strategy) for strategy in used]
    planned = process_groups(allocations, cluster)
    groups = Groups.create(
        planned,
        rank=rank,
        world_size=world_size,
        meeting=meeting,
        device=CPU,
        timeout_s=120.0,
        settings=GroupSettings(for_libraries=for_libraries),
    )
    return groups, {a.strategy: parallel_of(groups, planned, a, rank) for a in allocations}


def make_engine(case: Case, parallel: Parallel) -> DecoderEngine:
    shard = shard_of(case.config, case.strategy, parallel.mesh_rank)
    decoder = random_model(
        case.config, seed=1, shard=shard, parallel=TensorParallelGroup(parallel.tp, sp=case.strategy.sp)
    )
    decoder.activation_checkpointing = case.activation_checkpointing
    return DecoderEngine(
        decoder,
        role="actor",
        parallel=parallel,
        optimizer=OPTIMIZER,
        total_optimizer_steps=10,
        compute_dtype=case.dtype,
    )


def outcome(case: Case, parallel: Parallel) -> dict[str, Any]:
    """Everything that must not depend on the layout, and this rank's slices."""
    engine = make_engine(case, parallel)
    whole = case.batch
    share = share_of(whole, parallel.dp_rank, parallel.dp.n_ranks)
    slices: dict[str, Any] = {}

    def keep_gradients(_: object) -> bool:
        assert engine._optimizer is not None
        slices.update({f"grad of {name}": g.clone() for name, g in engine._optimizer.gradients().items()})
        return False

    result = engine.train_batch(
        share,
        case.loss,
        normaliser=n_masked(whole),
        micro_batching=case.micro_batching,
        skip_step=keep_gradients,
    )
    slices |= {name: p.detach().float() for name, p in engine.decoder.named_shards()}
    forward = engine.forward(
        share,
        lambda out, _: out.scores() if case.config.is_scalar else out.logprobs(0.8),
        micro_batching=case.micro_batching,
    )
    return {
        "result": result,
        "forward": forward.numpy(),
        "slices": {name: t.numpy() for name, t in slices.items()},
        "places": {name: engine.decoder.place_of(name.removeprefix("grad of ")) for name in slices},
    }


def _outcomes(rank: int, world_size: int, meeting: KeyValueClient, cases: list[Case]) -> list[dict[str, Any]]:
    groups, places = join(rank, world_size, meeting, {case.strategy for case in cases})
    with mock.patch.object(prefixes, "CALL_COST", 0):  # share the beginnings even of so small a model
        out = [outcome(case, places[case.strategy]) for case in cases]
    groups.destroy()
    return out


@cache
def reference(case: Case) -> dict[str, Any]:
    return outcome(replace(case, strategy=ParallelStrategy()), Parallel())


def check(world_size: int, cases: list[Case], timeout_s: float = 110.0) -> list[list[dict[str, Any]]]:
    """Compare every case with one process that holds everything; returns the outcomes of each rank."""
    by_rank = run_ranks(world_size, _outcomes, cases, joined=False, timeout_s=timeout_s)
    for index, case in enumerate(cases):
        expected = reference(replace(case, strategy=ParallelStrategy(), micro_batching=MicroBatching()))
        forwards: dict[int, Any] = {}
        for rank, outcomes in enumerate(by_rank):
            got = outcomes[index]
            result: TrainResult = got["result"]
            assert result == by_rank[0][index]["result"], case  # bit for bit on all ranks
            assert result.stats == pytest.approx(expected["result"].stats, rel=1e-5), case
            assert result.grad_norm == pytest.approx(expected["result"].grad_norm, rel=1e-5), case
            assert result.grad_norm > OPTIMIZER.clip_grad_norm  # clipping is in force
            assert result.stepped
            for name, values in got["slices"].items():
                wanted = expected["slices"][name][got["places"][name]]
                np.testing.assert_allclose(values, wanted, rtol=1e-5, atol=1e-5, err_msg=f"{case} {name}")
            dp_rank = case.strategy.coordinates(rank)[1]
            same = forwards.setdefault(dp_rank, got["forward"])
            assert (same == got["forward"]).all()
        together = np.concatenate([forwards[dp_rank] for dp_rank in sorted(forwards)])
        np.testing.assert_allclose(together, expected["forward"], rtol=1e-5, atol=2e-5, err_msg=str(case))
    return by_rank


CUTS = [MicroBatching(), MicroBatching(n_mbs=1), MicroBatching(n_mbs=3), MicroBatching(max_tokens_per_mb=40)]


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_layout_of_up_to_four_ranks(world_size: int) -> None:
    cases = [
        Case(model, strategy, CUTS[(i + j) % len(CUTS)], activation_checkpointing=i % 3 == 0)
        for i, strategy in enumerate(strategies(world_size))
        for j, model in enumerate(CONFIGS)
        if world_size < 4 or (i + j) % 2 == 0
    ]
    assert len({case.strategy for case in cases}) == {2: 4, 4: 9}[world_size]
    check(world_size, cases)


P2, P2V2 = ParallelStrategy(pp=2), ParallelStrategy(pp=2, vpp=2)


def test_virtual_stages() -> None:
    """Gradients are those of the same stages without them, to the last bit: each sum has its terms in one order.

    So are the losses; the norm adds up the squares of other parts.
    """
    cases = [
        Case("tied", P2V2, MicroBatching(n_mbs=4)),
        Case("untied", P2V2, MicroBatching(n_mbs=3), activation_checkpointing=True),
        Case("experts", P2V2, MicroBatching(n_mbs=5)),
        Case("value", ParallelStrategy(pp=2, vpp=3), MicroBatching(max_tokens_per_mb=40), n_layers=7),
    ]
    plain = [replace(case, strategy=P2) for case in cases]
    by_rank = check(2, [*cases, *plain])
    for i, case in enumerate(cases):
        gradients: list[dict[str, Any]] = [{}, {}]
        for outcomes in by_rank:
            for found, got in zip(gradients, (outcomes[i], outcomes[len(cases) + i]), strict=True):
                found.update({name: g for name, g in got["slices"].items() if name.startswith("grad")})
        assert by_rank[0][i]["result"].stats == by_rank[0][len(cases) + i]["result"].stats
        assert gradients[0].keys() == gradients[1].keys()
        for name, gradient in gradients[0].items():
            np.testing.assert_array_equal(gradient, gradients[1][name], err_msg=f"{case} {name}")


@pytest.mark.slow
@pytest.mark.parametrize("vpp", [2, 3])
def test_virtual_stages_of_four_ranks(vpp: int) -> None:
    layouts = [
        ParallelStrategy(2, 1, 2, vpp=vpp),
        ParallelStrategy(1, 2, 2, True, vpp),
        ParallelStrategy(pp=4, vpp=vpp),
    ]
    check(4, [Case(m, s, c, n_layers=4 * vpp + 1) for s in layouts for m, c in zip(CONFIGS, CUTS, strict=True)])


def test_beginnings_that_are_computed_once() -> None:
    """In one process, where nothing is shared, and on four ranks."""
    strategies = [ParallelStrategy(2, 2, 1, sp=True), ParallelStrategy(2, 1, 2), ParallelStrategy(1, 2, 2, sp=True)]
    models = [model for model in CONFIGS if model != "experts"]
    cuts = [MicroBatching(n_mbs=3), MicroBatching()]
    check(4, [Case(m, s, c, n_shared=6) for s, m, c in zip(strategies * 2, models * 2, cuts * 3, strict=True)])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world_size", [2, 3, 4, 6, 8])
@pytest.mark.parametrize("model", list(CONFIGS))
def test_every_layout_and_cut(world_size: int, model: str) -> None:
    legal = [s for s in strategies(world_size) if 8 % s.tp == 0]
    cases = [Case(model, strategy, cut, n_layers=world_size + 1) for strategy in legal for cut in CUTS]
    check(world_size, cases, timeout_s=880.0)


# ---------------------------------------------------------------- what layouts must not break

D2P2 = Case("tied", ParallelStrategy(2, 1, 2), MicroBatching(n_mbs=3))
T2P2 = Case("tied", ParallelStrategy(1, 2, 2, sp=True), MicroBatching(n_mbs=3))
D2P2V2 = replace(D2P2, strategy=ParallelStrategy(2, 1, 2, vpp=2))
BF16 = [replace(case, dtype=torch.bfloat16) for case in (D2P2, T2P2, D2P2V2)]


def train(case: Case, engine: DecoderEngine, parallel: Parallel, n: int, loss: LossFn = masked_nll) -> TrainResult:
    whole = make_batch(N_SAMPLES)
    share = share_of(whole, parallel.dp_rank, parallel.dp.n_ranks)
    for _ in range(n):
        result = engine.train_batch(share, loss, normaliser=n_masked(whole), micro_batching=case.micro_batching)
    return result


def tied_weights(engine: DecoderEngine) -> Any:
    named = dict(engine.decoder.named_shards())
    return named["embedding.weight"].detach().float().numpy() if "embedding.weight" in named else None


def _resume(rank: int, world_size: int, meeting: KeyValueClient, folder: Path) -> list[Any]:
    groups, places = join(rank, world_size, meeting, {case.strategy for case in BF16})
    out = []
    for i, case in enumerate(BF16):
        parallel = places[case.strategy]
        engine, resumed = make_engine(case, parallel), make_engine(case, parallel)
        train(case, engine, parallel, n=3)
        state = engine.state_dict()
        torch.save(state, folder / f"{i}-{rank}.pt")
        if parallel.dp_rank == 0:
            save_engine(engine, folder / f"model-{i}")
        for group in (parallel.tp, parallel.pp, parallel.dp):
            group.barrier()  # the folder is complete
        shard = engine.decoder.shard
        loaded = load_model(folder / f"model-{i}", dtype=case.dtype, shard=shard, parallel=engine.decoder.parallel)
        resumed.decoder.load_state_dict(loaded.state_dict())
        resumed.load_state_dict(torch.load(folder / f"{i}-{rank}.pt", weights_only=True))
        saved = {name: p.detach().float().numpy() for name, p in engine.decoder.named_shards()}
        expected = train(case, engine, parallel, n=2)
        assert train(case, resumed, parallel, n=2) == expected
        for (name, p), (_, q) in zip(engine.decoder.named_shards(), resumed.decoder.named_shards(), strict=True):
            assert torch.equal(p, q), name
        out.append((saved, {name: engine.decoder.place_of(name) for name in saved}, tied_weights(engine)))
    groups.destroy()
    return out


def test_saved_models_and_states_continue_exactly(tmp_path: Path) -> None:
    by_rank = run_ranks(4, _resume, tmp_path, joined=False)
    for i, case in enumerate(BF16):
        whole = {name: p.detach().float().numpy() for name, p in load_model(tmp_path / f"model-{i}").named_parameters()}
        for saved, places, _ in (results[i] for results in by_rank):
            for name, values in saved.items():
                np.testing.assert_array_equal(values, whole[name][places[name]])
        tied: dict[int, Any] = {}
        for rank, results in enumerate(by_rank):  # copies of the tied embedding never drift apart, nor do replicas
            tp_rank = case.strategy.coordinates(rank)[2]
            np.testing.assert_array_equal(results[i][2], tied.setdefault(tp_rank, results[i][2]))


def _errors(rank: int, world_size: int, meeting: KeyValueClient) -> list[Any]:
    groups, places = join(rank, world_size, meeting, {D2P2.strategy, T2P2.strategy})
    out: list[Any] = []
    for case in (D2P2, T2P2):
        parallel = places[case.strategy]
        factor = float("nan") if parallel.dp_rank == parallel.dp.n_ranks - 1 else 1.0
        assert parallel.tied.handle is parallel.pp.handle  # two stages: one group
        engine = make_engine(case, parallel)

        def nan_loss(out: ForwardOutput, batch: SequenceSample, factor: float = factor) -> LossOutput:
            result = masked_nll(out, batch)
            result.loss.mul_(factor)
            return result

        def steep_loss(out: ForwardOutput, batch: SequenceSample) -> LossOutput:
            x = out.logprobs().sum()
            return LossOutput((x - x).sqrt())  # 0, with an infinite slope

        for loss in (nan_loss, steep_loss):
            with pytest.raises(CallError) as caught:
                train(case, engine, parallel, n=1, loss=loss)
            out.append(caught.value.message)
            assert engine._optimizer is not None
            engine._optimizer.skip()
        empty = make_batch().split([[], range(10)])[0]
        out.append(engine.forward(empty, lambda o, _: o.logprobs(), micro_batching=case.micro_batching).tolist())
        flags = engine.forward(make_batch(3), lambda o, _: o.logprobs() < -3, micro_batching=MicroBatching(n_mbs=3))
        out.append((flags.dtype, flags.shape))
        out.append(engine.all_reduce(torch.tensor([parallel.mesh_rank])).tolist())
        with pytest.raises(ValueError, match=r"role 'actor' has ModelShard\(.*\) on rank 0 of d1t1p1"):
            DecoderEngine(engine.decoder, role="actor")
    groups.destroy()
    return out


def test_errors_and_odd_results_are_the_same_on_all_ranks() -> None:
    by_rank = run_ranks(4, _errors, joined=False)
    n_rows = make_batch(3).n_rows("mask")
    for rank, results in enumerate(by_rank):
        for i, reduced_to in enumerate(([1, 5][rank // 2], rank)):
            loss, gradient, empty, flags, reduced = results[5 * i : 5 * i + 5]
            assert loss == "the loss of role 'actor' is nan"
            assert gradient.startswith("the gradient of role 'actor' is not finite")
            assert empty == []
            assert flags == (torch.bool, (n_rows,))
            assert reduced == [reduced_to]  # mesh ranks over dp


def _pieces(rank: int, world_size: int, meeting: KeyValueClient, sizes: tuple[int, ...]) -> list[tuple[int, int]]:
    """Micro-batches of a training and of an inference on so many samples, where nothing says how many."""
    case = Case("tied", ParallelStrategy(pp=world_size), MicroBatching())
    groups, places = join(rank, world_size, meeting, {case.strategy})
    parallel, found = places[case.strategy], []
    engine = make_engine(case, parallel)
    for size in sizes:
        batch = make_batch(size)
        trained: list[int] = []
        inferred: list[int] = []

        def loss(out: ForwardOutput, piece: SequenceSample, seen: list[int] = trained) -> LossOutput:
            seen.append(len(piece))
            return masked_nll(out, piece)

        def logprobs(out: ForwardOutput, piece: SequenceSample, seen: list[int] = inferred) -> torch.Tensor:
            seen.append(len(piece))
            return out.logprobs()

        engine.train_batch(batch, loss, normaliser=n_masked(batch), micro_batching=case.micro_batching)
        engine.forward(batch, logprobs, micro_batching=case.micro_batching)
        assert sum(trained) == sum(inferred) == (size if parallel.is_last_stage else 0)
        found.append((len(trained), len(inferred)))
    groups.destroy()
    return found


def test_a_pipeline_is_kept_busy_where_no_number_of_micro_batches_is_given() -> None:
    first, last = run_ranks(2, _pieces, (1, 2, 3, 4, 10), joined=False)
    assert first == [(0, 0)] * 5
    assert last == [(1, 1), (2, 2), (3, 2), (4, 2), (4, 2)]
