"""Every training backend under (dp, tp, pp, sp) over gloo: the numbers are native's, and so is the state it keeps.

In each layout a backend trains four minibatches, the second of which is skipped; its state then goes on in a native
engine, and in another one of its own; and its parameters are moved by a hook, after which it trains on.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from realrl.algo.api import MicroBatching, TrainResult
from realrl.config.schema import BackendName, GenerationConfig, OptimizerConfig
from realrl.engine.decoder_engine import DecoderEngine
from realrl.engine.parallel import Parallel
from realrl.engine.tensor_parallel import TensorParallelGroup
from realrl.errors import ConfigError
from realrl.mesh.device_mesh import ParallelStrategy
from realrl.model.init import random_model
from realrl.model.lora import add_adapters
from realrl.plan.backends import TrainedRole, check_backend
from realrl.plan.parameters.shards import shard_of
from realrl.sched.key_value import KeyValueClient
from realrl.shape import LoRA
from scripts.plan_table import LIMIT, largest_difference, run_plan
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import SMALL, read_metrics, realrl
from tests.helpers.training import make_batch, masked_nll, n_masked
from tests.ranks.test_engine_3d import CONFIGS, N_SAMPLES, join, score_loss, share_of

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
    def is_accepted(self) -> bool:
        """Return True if a run may ask for it."""
        precision = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[self.dtype]
        role = TrainedRole(
            "actor", self.backend, self.stage, self.offload, precision, self.strategy, has_adapters=self.has_adapters
        )
        try:
            check_backend(role)
        except ConfigError:
            return False
        return True

    @property
    def reference(self) -> Case:
        """The same model on one rank, with the native backend."""
        return Case("native", 0, ParallelStrategy(), self.model, self.dtype, has_adapters=self.has_adapters)


def make_engine(
    case: Case, parallel: Parallel, backend: BackendName | None = None, weights: Mapping[str, np.ndarray] | None = None
) -> DecoderEngine:
    """An engine of new parameters, or of those that a saved model has."""
    config = replace(CONFIGS[case.model], dtype="float32")
    shard = shard_of(config, case.strategy, parallel.mesh_rank)
    tensor_parallel = TensorParallelGroup(parallel.tp, sp=case.strategy.sp)
    decoder = random_model(config, seed=1, shard=shard, parallel=tensor_parallel)
    if case.has_adapters:
        add_adapters(decoder, LoRA(2, 4.0, ("q", "o")), seed=1)
    if weights is not None:
        for name, p in decoder.named_shards():
            p.data.copy_(torch.from_numpy(weights[name]))
    settings = {"zero_stage": case.stage, "offload": case.offload} if backend is None else {}
    return DecoderEngine(
        decoder,
        role="actor",
        parallel=parallel,
        optimizer=OPTIMIZER.model_copy(update=settings),
        total_optimizer_steps=N_STEPS + 1,
        compute_dtype=case.dtype,
        backend=backend or case.backend,
    )


def train(engine: DecoderEngine, parallel: Parallel, *, skips: bool = False) -> TrainResult:
    whole = make_batch(N_SAMPLES)
    loss = score_loss if engine.decoder.config.is_scalar else masked_nll
    return engine.train_batch(
        share_of(whole, parallel.dp_rank, parallel.dp.n_ranks),  # so uneven that ranks have 3 micro-batches and 1
        loss,
        normaliser=n_masked(whole),
        micro_batching=MicroBatching(n_mbs=3),
        skip_step=lambda _: skips,
    )


def slices_of(engine: DecoderEngine) -> dict[str, np.ndarray]:
    with engine.whole_parameters():
        return {name: p.detach().float().clone().numpy() for name, p in engine.decoder.named_shards()}


def state_of(engine: DecoderEngine) -> dict[str, Any]:
    """A copy of the state, as a checkpoint takes one."""
    return copy.deepcopy(engine.state_dict())


def distant_values(case: Case, parallel: Parallel) -> Iterator[tuple[str, torch.Tensor]]:
    """Of every parameter of this rank's shard, in its working dtype: far from those that an engine has."""
    engine = make_engine(case, parallel, "native")
    for name, p in engine.decoder.named_shards():
        yield name, p.detach() + 0.25


def outcome(case: Case, parallel: Parallel) -> dict[str, Any]:
    engine = make_engine(case, parallel)
    results = [train(engine, parallel, skips=step == 1) for step in range(N_STEPS)]
    slices, state = slices_of(engine), engine.state_dict()
    moments = {name: stored["exp_avg"].numpy().copy() for name, stored in state["parameters"].items()}
    assert {stored["step"] for stored in state["parameters"].values()} == {N_STEPS - 1}
    again = []
    for backend in ("native", None):
        continued = make_engine(case, parallel, backend, slices)
        continued.load_state_dict(state)
        again.append(train(continued, parallel))
    again.append(train(engine, parallel))
    assert engine._optimizer is not None
    final_lr = engine._optimizer.lr
    forward = engine.forward(
        make_batch(3),
        lambda out, _: out.scores() if engine.decoder.config.is_scalar else out.logprobs(),
        micro_batching=MicroBatching(n_mbs=2),
    )
    engine.move_parameters(distant_values(case, parallel), 0.5)
    moved = slices_of(engine)
    train(engine, parallel)
    return {
        "results": results,
        "again": again,
        "final_lr": final_lr,
        "slices": slices,
        "moved": moved,
        "after move": slices_of(engine),
        "moments": moments,
        "places": {name: engine.decoder.place_of(name) for name in slices},
        "forward": forward.numpy(),
    }


def _outcomes(rank: int, world_size: int, meeting: KeyValueClient, cases: list[Case]) -> list[dict[str, Any]]:
    groups, places = join(rank, world_size, meeting, {case.strategy for case in cases}, for_libraries=True)
    out = [outcome(case, places[case.strategy]) for case in cases]
    groups.destroy()
    return out


@cache
def reference(case: Case) -> dict[str, Any]:
    return outcome(case, Parallel())


def check(world_size: int, cases: list[Case], timeout_s: float = 280.0) -> None:
    by_rank = run_ranks(world_size, _outcomes, cases, joined=False, timeout_s=timeout_s)
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
            for kind in ("slices", "moments", "moved", "after move"):
                for name, values in got[kind].items():
                    wanted = expected[kind][name][got["places"][name]]
                    np.testing.assert_allclose(values, wanted, rtol=rel, atol=atol, err_msg=f"{case} {kind} {name}")
            np.testing.assert_allclose(got["forward"], expected["forward"], rtol=10 * rel, atol=10 * atol)
        _check_copies(case, [outcomes[index] for outcomes in by_rank])


def _check_copies(case: Case, by_rank: list[dict[str, Any]]) -> None:
    """Ranks that hold the same slice of a parameter hold the same bits."""
    seen: dict[tuple[str, str, str], np.ndarray] = {}
    for got in by_rank:
        for kind in ("slices", "after move"):
            for name, values in got[kind].items():
                known = seen.setdefault((kind, name, str(got["places"][name])), values)
                assert (known == values).all(), f"{case} {kind} {name}"


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


def _bits(rank: int, world_size: int, meeting: KeyValueClient) -> bool:
    groups, places = join(rank, world_size, meeting, {D2})
    outcomes = [outcome(Case("native", stage, D2, dtype=torch.bfloat16), places[D2]) for stage in (0, 1)]
    groups.destroy()
    for kind in ("slices", "moments"):
        for name, values in outcomes[0][kind].items():
            assert (outcomes[1][kind][name] == values).all(), name
    return bool(outcomes[0]["results"] == outcomes[1]["results"] and outcomes[0]["again"] == outcomes[1]["again"])


def test_native_stage_1_is_stage_0_bit_for_bit() -> None:
    assert run_ranks(2, _bits, joined=False) == [True, True]


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
    check(2, [Case("deepspeed", 3, D2), Case("deepspeed", 1, T2)])


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
        Case("deepspeed", 2, D2),
        Case("deepspeed", 3, T2),
        Case("deepspeed", 1, D2, has_adapters=True),
    ]
    check(2, cases)


# ---------------------------------------------------------------- continuing

GROWS = {"scale": 2.0**4, "growth_tracker": 999}  # the scale of fp16 doubles after 1000 steps without an overflow
OVERFLOWS = {"scale": 2.0**26, "growth_tracker": 0}


def _continues(
    rank: int, world_size: int, meeting: KeyValueClient, cases: list[Case], n_steps: int
) -> list[tuple[list[float | None], list[str]]]:
    """After each step, another engine continues from the state; gives the loss scales and what is not equal in bits."""
    groups, places = join(rank, world_size, meeting, {case.strategy for case in cases}, for_libraries=True)
    found = []
    for case in cases:
        scales, differences = [], []
        for start in (GROWS, OVERFLOWS) if case.dtype == torch.float16 else ({},):
            engine = make_engine(case, places[case.strategy])
            if start:
                engine.load_state_dict({**engine.state_dict(), "loss_scale": start})
            for step in range(n_steps):
                other = make_engine(case, places[case.strategy], weights=slices_of(engine))
                other.load_state_dict(state_of(engine))
                results = [train(one, places[case.strategy], skips=step == 1) for one in (engine, other)]
                scales.append(results[0].stats.get("loss_scale"))
                if results[0] != results[1]:
                    differences.append(f"step {step}: {results}")
                differences += [f"step {step}: {name}" for name in _differences(engine, other)]
        found.append((scales, differences))
    groups.destroy()
    return found


def _differences(engine: DecoderEngine, other: DecoderEngine) -> Iterator[str]:
    """Names of weights and of parts of the state that differ in bits."""
    ours, theirs = slices_of(engine), slices_of(other)
    yield from (name for name, values in ours.items() if values.tobytes() != theirs[name].tobytes())
    state, other_state = engine.state_dict(), other.state_dict()
    parameters = other_state.pop("parameters")
    for name, stored in state.pop("parameters").items():
        for key, value in stored.items():
            there = parameters[name][key]
            is_same = value == there if key == "step" else torch.equal(value.view(torch.int32), there.view(torch.int32))
            if not is_same:
                yield f"{name} {key}"
    if state != other_state:
        yield f"{state} {other_state}"


def check_continues(cases: list[Case], world_size: int = 2, n_steps: int = 4) -> None:
    by_rank = run_ranks(
        world_size, _continues, cases, n_steps, joined=False, timeout_s=280.0 if n_steps == 4 else 580.0
    )
    for found in by_rank:
        for case, (scales, differences) in zip(cases, found, strict=True):
            assert not differences, (case, differences)
            if case.dtype == torch.float16:
                assert max(scales[:n_steps]) > GROWS["scale"], "the scale never grew"
                assert scales[n_steps] > scales[-1], "there was no overflow"


def test_native_continues_bit_for_bit() -> None:
    check_continues(
        [Case("native", 1, D2, dtype=torch.bfloat16), Case("native", 1, D2, offload=True), Case("native", 0, T2)]
    )


@needs_megatron
@pytest.mark.slow
def test_megatron_continues_bit_for_bit() -> None:
    check_continues([Case("megatron", 1, D2, dtype=torch.bfloat16), Case("megatron", 1, D2, dtype=torch.float16)])


@needs_deepspeed
@pytest.mark.slow
def test_deepspeed_continues_bit_for_bit() -> None:
    check_continues([Case("deepspeed", 2, D2, dtype=torch.float16), Case("deepspeed", 3, D2, dtype=torch.bfloat16)])


@needs_megatron
@needs_deepspeed
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", ["megatron", *(f"deepspeed {stage}" for stage in range(4)), "native 1"])
def test_every_backend_continues_bit_for_bit(backend: str, dtype: torch.dtype) -> None:
    name, _, stage = backend.partition(" ")
    cases = [
        Case(name, int(stage or 1), strategy, dtype=dtype, offload=offload, has_adapters=has_adapters)
        for strategy in (D2, T2, P2)
        for offload in (False, True)
        for has_adapters in (False, True)
    ]
    accepted = [case for case in cases if case.is_accepted]
    if not accepted:
        pytest.skip("check_backend refuses it")
    check_continues(accepted, n_steps=6)


# ---------------------------------------------------------------- fp16


def _overflow(rank: int, world_size: int, meeting: KeyValueClient, case: Case) -> list[tuple[bool, float, float, bool]]:
    """Steps in fp16 from a loss scale that is far too high: (stepped, loss scale, overflow, did a parameter move)."""
    groups, places = join(rank, world_size, meeting, {case.strategy}, for_libraries=True)
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
    by_rank = run_ranks(2, _overflow, case, joined=False, timeout_s=280.0)
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


# ---------------------------------------------------------------- a hook that writes into a trained role

RETURNING_ACTOR = """
import dataclasses

from realrl.experiment.discovery import load_experiment
from realrl.graph.mfc import ModelName, ParamReallocHook

PPO = load_experiment("ppo")
HOOK = ParamReallocHook(source=ModelName("ref"), eta={eta})


def mfcs(config):
    calls = PPO.calls(config)
    return [dataclasses.replace(mfc, post_hooks=(HOOK,)) if mfc.name == "actor_train" else mfc for mfc in calls]


EXPERIMENT = dataclasses.replace(PPO, name="returning_actor", mfcs=mfcs)
"""
RETURNING_PLANS = {
    "native-0": ("allocation=d2", "models.actor.optimizer.zero_stage=0"),
    "native-1": ("allocation=d2", "models.actor.optimizer.zero_stage=1"),
    "native-offloaded": ("allocation=d2", "models.actor.optimizer.offload=true", "allocation.offload=[actor,ref]"),
    "megatron-d2": ("allocation=d2", "models.actor.backend=megatron"),
    "megatron-t2": ("allocation=t2", "allocation.calls.ref_inf=p2", "models.actor.backend=megatron"),
    **{
        f"deepspeed-{stage}": (
            "allocation=d2",
            "models.actor.backend=deepspeed",
            f"models.actor.optimizer.zero_stage={stage}",
        )
        for stage in range(4)
    },
    "deepspeed-3-from-elsewhere": (
        "allocation=d2",
        "allocation.calls.ref_inf=t2",
        "models.actor.backend=deepspeed",
        "models.actor.optimizer.zero_stage=3",
    ),
}


def returning_actor(folder: Path, eta: float, *overrides: str) -> list[dict[str, Any]]:
    """PPO whose actor is moved towards the reference after each step."""
    file = folder / "returning_actor.py"
    file.write_text(RETURNING_ACTOR.format(eta=eta))
    settings = ("models.actor.optimizer.schedule=constant", "models.actor.optimizer.lr=0.001", "steps=4")
    done = realrl("run", str(file), *SMALL, *settings, f"run_dir={folder / 'run'}", *overrides, timeout_s=250.0)
    assert done.returncode == 0, done.stdout + done.stderr
    return read_metrics(folder / "run")


@pytest.fixture(scope="module", params=[1.0, 0.5])
def returning(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[float, Any]:
    return request.param, returning_actor(tmp_path_factory.mktemp("single"), request.param, "launcher=inline")


@needs_megatron
@needs_deepspeed
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("plan", RETURNING_PLANS)
def test_an_optimizer_goes_on_from_what_a_hook_writes(plan: str, returning: tuple[float, Any], tmp_path: Path) -> None:
    eta, expected = returning
    rows = returning_actor(tmp_path, eta, "cluster.n_devices_per_node=2", *RETURNING_PLANS[plan])
    assert largest_difference(expected, rows).relative <= LIMIT
