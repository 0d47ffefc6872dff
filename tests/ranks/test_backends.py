"""Every training backend under (dp, tp, pp, sp) over gloo: the numbers are native's, and so is the state it keeps.

In each layout a backend trains four minibatches, the second of which is skipped; its state then goes on in a native
engine, whose state goes on in the backend.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from realrl.algo.api import MicroBatching, TrainResult
from realrl.config.schema import GenerationConfig, OptimizerConfig
from realrl.engine.backends import BackendName
from realrl.engine.native import NativeEngine
from realrl.engine.parallel import Parallel
from realrl.engine.tensor_parallel import TensorParallelGroup
from realrl.mesh.device_mesh import ParallelStrategy
from realrl.model.init import random_model
from realrl.model.lora import add_adapters
from realrl.plan.adapters import LoRA
from realrl.plan.layout import shard_of
from scripts.plan_table import LIMIT, largest_difference, run_plan
from tests.helpers.ranks import run_ranks
from tests.helpers.training import make_batch, masked_nll, n_masked
from tests.ranks.test_engine_3d import CONFIGS, N_SAMPLES, free_address, join, score_loss, share_of

N_STEPS = 4
OPTIMIZER = OptimizerConfig(
    lr=1e-2, schedule="linear", warmup_fraction=0.3, clip_grad_norm=0.1, weight_decay=0.1, eps=1e-2
)
D2, T2, P2 = ParallelStrategy(2), ParallelStrategy(1, 2, 1, sp=True), ParallelStrategy(1, 1, 2)
needs_megatron = pytest.mark.skipif(find_spec("megatron") is None, reason="needs the extra megatron")
needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs the extra deepspeed")


@dataclass(frozen=True)
class Case:
    """One engine in one layout."""

    backend: BackendName
    stage: int | None
    strategy: ParallelStrategy
    model: str = "tied"
    dtype: torch.dtype = torch.float32
    offload: bool = False
    has_adapters: bool = False

    @property
    def reference(self) -> Case:
        """The same model on one rank, with the native backend."""
        return Case("native", 0, ParallelStrategy(), self.model, self.dtype, has_adapters=self.has_adapters)


def make_engine(case: Case, parallel: Parallel, backend: BackendName | None = None) -> NativeEngine:
    config = replace(CONFIGS[case.model], dtype=torch.float32)
    shard = shard_of(config, case.strategy, parallel.mesh_rank)
    tensor_parallel = TensorParallelGroup(parallel.tp, sp=case.strategy.sp)
    decoder = random_model(config, seed=1, shard=shard, parallel=tensor_parallel)
    if case.has_adapters:
        add_adapters(decoder, LoRA(2, 4.0, ("q", "o")), seed=1)
    settings = {"zero_stage": case.stage, "offload": case.offload} if backend is None else {}
    return NativeEngine(
        decoder,
        role="actor",
        parallel=parallel,
        optimizer=OPTIMIZER.model_copy(update=settings),
        total_optimizer_steps=N_STEPS + 1,
        compute_dtype=case.dtype,
        backend=backend or case.backend,
    )


def train(engine: NativeEngine, parallel: Parallel, *, skips: bool = False) -> TrainResult:
    whole = make_batch(N_SAMPLES)
    loss = score_loss if engine.decoder.config.is_scalar else masked_nll
    return engine.train_batch(
        share_of(whole, parallel.dp_rank, parallel.dp.n_ranks),  # so uneven that ranks have 3 micro-batches and 1
        loss,
        normaliser=n_masked(whole),
        micro_batching=MicroBatching(n_mbs=3),
        skip_step=lambda _: skips,
    )


def slices_of(engine: NativeEngine) -> dict[str, np.ndarray]:
    with engine.whole_parameters():
        return {name: p.detach().float().clone().numpy() for name, p in engine.decoder.named_shards()}


def copy_weights(source: NativeEngine, target: NativeEngine) -> None:
    """What a saved model carries from one engine to another."""
    saved = slices_of(source)
    with target.whole_parameters(), torch.no_grad():
        for name, p in target.decoder.named_shards():
            p.copy_(torch.from_numpy(saved[name]))


def outcome(case: Case, parallel: Parallel) -> dict[str, Any]:
    engine = make_engine(case, parallel)
    results = [train(engine, parallel, skips=step == 1) for step in range(N_STEPS)]
    slices, state = slices_of(engine), engine.state_dict()
    moments = {name: stored["exp_avg"].numpy().copy() for name, stored in state["parameters"].items()}
    assert {stored["step"] for stored in state["parameters"].values()} == {N_STEPS - 1}
    continued = make_engine(case, parallel, "native")
    copy_weights(engine, continued)
    continued.load_state_dict(state)
    again = [train(continued, parallel)]
    returned = make_engine(case, parallel)
    if case.stage != 3:  # a resumed run loads its model before the ranks share it out
        copy_weights(engine, returned)
        returned.load_state_dict(state)
        again.append(train(returned, parallel))
    again.append(train(engine, parallel))
    assert engine._optimizer is not None
    return {
        "results": results,
        "again": again,
        "final_lr": engine._optimizer.lr,
        "slices": slices,
        "moments": moments,
        "places": {name: engine.decoder.place_of(name) for name in slices},
        "forward": engine.forward(
            make_batch(3),
            lambda out, _: out.scores() if engine.decoder.config.is_scalar else out.logprobs(),
            micro_batching=MicroBatching(n_mbs=2),
        ).numpy(),
    }


def _outcomes(rank: int, world_size: int, address: str, cases: list[Case]) -> list[dict[str, Any]]:
    groups, places = join(rank, world_size, address, {case.strategy for case in cases}, for_libraries=True)
    out = [outcome(case, places[case.strategy]) for case in cases]
    groups.destroy()
    return out


@cache
def reference(case: Case) -> dict[str, Any]:
    return outcome(case, Parallel.alone())


def check(world_size: int, cases: list[Case], timeout_s: float = 280.0) -> None:
    by_rank = run_ranks(world_size, _outcomes, free_address(), cases, joined=False, timeout_s=timeout_s)
    for index, case in enumerate(cases):
        expected = reference(case.reference)
        exact = case.dtype == torch.float32
        rel, atol = (2e-5, 2e-5) if exact else (5e-2, 5e-2)
        for outcomes in by_rank:
            got = outcomes[index]
            assert got["final_lr"] == pytest.approx(0.0, abs=1e-12), case
            for ours, theirs in zip(got["results"], expected["results"], strict=True):
                assert (ours.stepped, ours.lr) == (theirs.stepped, pytest.approx(theirs.lr, rel=1e-9)), case
                assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=rel), case
                assert ours.grad_norm > OPTIMIZER.clip_grad_norm  # clipping is in force
                shared = {name: value for name, value in ours.stats.items() if name in theirs.stats}
                assert shared == pytest.approx(theirs.stats, rel=rel), case
            for other in got["again"]:
                assert other.grad_norm == pytest.approx(expected["again"][-1].grad_norm, rel=rel), case
                assert other.lr == pytest.approx(expected["again"][-1].lr, rel=1e-9), case
            for kind in ("slices", "moments"):
                for name, values in got[kind].items():
                    wanted = expected[kind][name][got["places"][name]]
                    np.testing.assert_allclose(values, wanted, rtol=rel, atol=atol, err_msg=f"{case} {kind} {name}")
            np.testing.assert_allclose(got["forward"], expected["forward"], rtol=10 * rel, atol=10 * atol)
        _check_copies(case, [outcomes[index] for outcomes in by_rank])


def _check_copies(case: Case, by_rank: list[dict[str, Any]]) -> None:
    """Ranks that hold the same slice of a parameter hold the same bits."""
    seen: dict[tuple[str, str], np.ndarray] = {}
    for got in by_rank:
        for name, values in got["slices"].items():
            known = seen.setdefault((name, str(got["places"][name])), values)
            assert (known == values).all(), f"{case} {name}"


# ---------------------------------------------------------------- native


def test_native_sharded_and_offloaded() -> None:
    cases = [
        Case("native", 1, D2),
        Case("native", 1, D2, offload=True),
        Case("native", 0, T2, offload=True),
        Case("native", 1, D2, dtype=torch.bfloat16),
        Case("native", 1, D2, has_adapters=True),
    ]
    check(2, cases)


def _bits(rank: int, world_size: int, address: str) -> bool:
    groups, places = join(rank, world_size, address, {D2})
    outcomes = [outcome(Case("native", stage, D2, dtype=torch.bfloat16), places[D2]) for stage in (0, 1)]
    groups.destroy()
    for kind in ("slices", "moments"):
        for name, values in outcomes[0][kind].items():
            assert (outcomes[1][kind][name] == values).all(), name
    return bool(outcomes[0]["results"] == outcomes[1]["results"] and outcomes[0]["again"] == outcomes[1]["again"])


def test_native_stage_1_is_stage_0_bit_for_bit() -> None:
    assert run_ranks(2, _bits, free_address(), joined=False) == [True, True]


# ---------------------------------------------------------------- megatron


@needs_megatron
def test_megatron_on_two_ranks() -> None:
    check(2, [Case("megatron", 1, D2), Case("megatron", 1, T2, "untied"), Case("megatron", 1, P2)])


@needs_megatron
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", list(CONFIGS))
def test_megatron_on_four_ranks(model: str) -> None:
    strategies = [ParallelStrategy(2, 2, 1), ParallelStrategy(2, 1, 2), ParallelStrategy(1, 2, 2, sp=True)]
    check(4, [Case("megatron", 1, s, model) for s in (*strategies, ParallelStrategy(1, 4, 1))], timeout_s=580.0)


@needs_megatron
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_megatron_in_half_precision_and_with_adapters() -> None:
    cases = [
        Case("megatron", 1, D2, dtype=torch.bfloat16),
        Case("megatron", 1, P2, dtype=torch.bfloat16),
        Case("megatron", 1, T2, has_adapters=True),
        Case("megatron", 1, D2, dtype=torch.bfloat16, has_adapters=True),
    ]
    check(2, cases)


# ---------------------------------------------------------------- deepspeed


@needs_deepspeed
def test_deepspeed_on_two_ranks() -> None:
    check(2, [Case("deepspeed", 3, D2), Case("deepspeed", 2, D2), Case("deepspeed", 1, T2)])


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", list(CONFIGS))
def test_deepspeed_on_four_ranks(model: str) -> None:
    cases = [Case("deepspeed", stage, ParallelStrategy(2, 2, 1, sp=True), model) for stage in range(4)]
    cases += [
        Case("deepspeed", stage, s, model)
        for s in (ParallelStrategy(2, 1, 2), ParallelStrategy(1, 2, 2))
        for stage in (0, 1, 2)
    ]
    check(4, cases, timeout_s=580.0)


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_deepspeed_in_half_precision_offloaded_and_with_adapters() -> None:
    cases = [
        *(Case("deepspeed", stage, D2, dtype=torch.bfloat16) for stage in (1, 2, 3)),
        *(Case("deepspeed", stage, D2, offload=True) for stage in (1, 2, 3)),
        Case("deepspeed", 2, P2, dtype=torch.bfloat16),
        Case("deepspeed", 0, D2),
        Case("deepspeed", 3, T2),
        Case("deepspeed", 1, D2, has_adapters=True),
    ]
    check(2, cases)


# ---------------------------------------------------------------- fp16


def _overflow(rank: int, world_size: int, address: str, case: Case) -> list[tuple[bool, float, float, bool]]:
    """Steps in fp16 from a loss scale that is far too high: (stepped, loss scale, overflow, did a parameter move)."""
    groups, places = join(rank, world_size, address, {case.strategy}, for_libraries=True)
    parallel = places[case.strategy]
    engine = make_engine(case, parallel)
    state = engine.state_dict()
    state["loss_scale"]["scale"] = 2.0**28
    engine.load_state_dict(state)
    engine.set_total_optimizer_steps(100)
    seen = []
    for _ in range(16):
        before = slices_of(engine)
        result = train(engine, parallel)
        moved = any((before[name] != values).any() for name, values in slices_of(engine).items())
        seen.append((result.stepped, result.stats["loss_scale"], result.stats["overflow_fraction"], moved))
    assert engine.state_dict()["loss_scale"]["scale"] < 2.0**28
    generated = engine.generate(
        make_batch(2).remap({"input_ids": "prompt_ids"}), GenerationConfig(max_new_tokens=3), seed=1, step=1, eos_id=2
    )
    assert len(generated.responses) == 2
    groups.destroy()
    return seen


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case("megatron", 1, D2, dtype=torch.float16), marks=needs_megatron),
        *(
            pytest.param(Case("deepspeed", stage, D2, dtype=torch.float16), marks=needs_deepspeed)
            for stage in (1, 2, 3)
        ),
    ],
    ids=lambda case: f"{case.backend}-{case.stage}",
)
def test_an_overflow_in_fp16_skips_the_step_and_lowers_the_scale(case: Case) -> None:
    by_rank = run_ranks(2, _overflow, free_address(), case, joined=False, timeout_s=280.0)
    assert by_rank[0] == by_rank[1]
    stepped, scales, overflows, moved = (list(column) for column in zip(*by_rank[0], strict=True))
    assert overflows == [float(not done) for done in stepped]
    assert moved == stepped
    n_overflows = stepped.index(True)
    assert n_overflows >= 1
    assert all(stepped[n_overflows:])
    assert scales[: n_overflows + 1] == [2.0 ** (28 - i) for i in range(n_overflows + 1)]


# ---------------------------------------------------------------- PPO


def _ppo(*settings: str, both: str = "", stage: int | None = None) -> tuple[str, ...]:
    chosen = [f"models.{role}.backend={both}" for role in ("actor", "critic") if both]
    chosen += [f"models.{role}.optimizer.zero_stage={stage}" for role in ("actor", "critic") if stage is not None]
    return ("cluster.n_devices_per_node=2", *settings, *chosen)


_SHARED = ("models.actor.backend=deepspeed", "models.actor.optimizer.zero_stage=3")
PPO_PLANS = {
    **{f"native-1-{plan}": _ppo(f"allocation={plan}", both="native", stage=1) for plan in ("data", "tensor")},
    **{f"megatron-{plan}": _ppo(f"allocation={plan}", both="megatron") for plan in ("data", "tensor", "pipeline")},
    **{f"deepspeed-{n}-data": _ppo("allocation=data", both="deepspeed", stage=n) for n in range(4)},
    **{f"deepspeed-{n}-tensor": _ppo("allocation=tensor", both="deepspeed", stage=n) for n in (2, 3)},
    **{f"deepspeed-{n}-pipeline": _ppo("allocation=pipeline", both="deepspeed", stage=n) for n in (1, 2)},
    "different": _ppo("allocation=data", "models.actor.backend=megatron", "models.critic.backend=deepspeed"),
    "apart": _ppo("allocation=split", *_SHARED, "models.critic.backend=megatron"),
    "stage 3 moves": _ppo(
        "allocation=d2", "allocation.calls.actor_gen=t2", "allocation.calls.critic_inf=p2", both="deepspeed", stage=3
    ),
}


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_plan(tmp_path_factory.mktemp("single") / "run", ["launcher=inline"], steps=5)[0]


@needs_megatron
@needs_deepspeed
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("plan", PPO_PLANS)
def test_ppo_has_the_numbers_of_native(plan: str, single: list[dict[str, Any]], tmp_path: Path) -> None:
    rows, _ = run_plan(tmp_path / "run", PPO_PLANS[plan], steps=5)
    assert largest_difference(single, rows).relative <= LIMIT
