"""Averages in half precision: float32 masters keep steps that half precision rounds away."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from realrl.engine.decoder_engine import DecoderEngine
from realrl.engine.parameters.offload import Offloader
from realrl.model.files.hf import load_model
from realrl.model.init import random_model
from realrl.runtime.checkpoints.state_file import load_state
from tests.helpers.runs import SMALL, run_here
from tests.helpers.training import CONFIG, make_engine

HALVES = [torch.bfloat16, torch.float16]


def averaged(compute_dtype: torch.dtype, n: int = 12, eta: float = 0.01) -> DecoderEngine:
    """A frozen engine after `n` steps towards parameters of another seed."""
    engine = make_engine(optimizer=None, compute_dtype=compute_dtype)
    goal = dict(random_model(CONFIG, seed=2).named_shards())
    for _ in range(n):
        values = ((name, p.detach().to(compute_dtype)) for name, p in goal.items())
        if compute_dtype == torch.float32:  # the path without masters, which hooks take in float32
            for name, value in values:
                engine.decoder.get_parameter(name).data.lerp_(value, eta)
        else:
            engine.move_parameters(values, eta)
    return engine


@pytest.mark.parametrize("compute_dtype", HALVES)
def test_small_steps_add_up_as_in_float32(compute_dtype: torch.dtype) -> None:
    ours, theirs = averaged(compute_dtype), averaged(torch.float32)
    start = dict(make_engine(optimizer=None).decoder.named_shards())
    rounding = torch.finfo(compute_dtype).eps
    for name, p in ours.decoder.named_shards():
        expected = theirs.decoder.get_parameter(name).detach()
        assert p.dtype == compute_dtype
        # the goal is rounded once, and so is the result
        torch.testing.assert_close(p.detach().float(), expected, rtol=rounding, atol=rounding * 0.2)
    name = "blocks.0.attention.q.weight"
    moved = (theirs.decoder.get_parameter(name) - start[name]).norm()
    found = (ours.decoder.get_parameter(name).float() - start[name]).norm()
    assert found == pytest.approx(float(moved), rel=0.1)


def test_a_frozen_decoder_in_its_own_dtype_has_no_masters() -> None:
    assert make_engine(optimizer=None).state_dict() == {}
    half = random_model(replace(CONFIG, dtype="bfloat16"), seed=1)
    assert DecoderEngine(half, role="ref", compute_dtype=torch.bfloat16).state_dict() == {}


def test_masters_are_saved_and_resumed_and_come_back_from_host_memory() -> None:
    engine = averaged(torch.bfloat16)
    offloader = Offloader(engine.kept_tensors(), engine.device)
    offloader.offload()
    assert all(t.numel() == 0 for t in engine.kept_tensors().values())
    offloader.wait()
    again = make_engine(optimizer=None, compute_dtype=torch.bfloat16)
    again.load_state_dict(engine.state_dict())
    for name, tensor in averaged(torch.bfloat16).kept_tensors().items():
        assert torch.equal(engine.kept_tensors()[name], tensor)
        assert torch.equal(again.kept_tensors()[name], tensor)


def test_a_run_in_float32_goes_on_from_masters() -> None:
    engine, plain = averaged(torch.bfloat16), make_engine(optimizer=None)
    state = engine.state_dict()
    plain.load_state_dict(state)
    for name, p in plain.decoder.named_shards():
        assert torch.equal(p, state["parameters"][name]["master"])


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"n_taken": 3, "parameters": {}}, "role 'actor' is frozen, but the state holds"),
        ({"parameters": {"nothing": {"master": torch.zeros(2)}}}, "a master of 'nothing', \\[2\\], which does not fit"),
    ],
)
def test_state_of_another_role_is_refused(state: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_engine(optimizer=None).load_state_dict(state)


# ---------------------------------------------------------------- in runs

EMA = ("ppo_ref_ema", *SMALL, "precision=bf16", "models.actor.optimizer.lr=0.001", "save.every_steps=1", "save.keep=9")
ELSEWHERE = (
    "cluster.n_devices_per_node=2",
    "allocation=t2",
    "allocation.calls.ref_inf=p2",
    "allocation.offload=[ref]",
)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_reference_in_bf16_follows_the_actor_in_any_layout_also_after_a_resume(tmp_path: Path) -> None:
    """ref = 0.01 actor + 0.99 ref in float32 after each step, and rounded to bf16 for calls and files."""
    first, second, third = (tmp_path / name / "checkpoints" for name in ("first", "second", "third"))
    run_here("run", *EMA, "launcher=inline", f"run_dir={first.parent}")
    run_here("run", *EMA, f"resume={first / 'step_1'}", *ELSEWHERE, f"run_dir={second.parent}")
    run_here("run", *EMA, f"resume={second / 'step_2'}", *ELSEWHERE, f"run_dir={third.parent}")
    for before, after in (
        (first / "step_1", first / "step_2"),
        (first / "step_1", second / "step_2"),
        (second / "step_2", second / "step_3"),
    ):
        old, new, actor, ref = masters(before), masters(after), parameters(after / "actor"), parameters(after / "ref")
        assert new.keys() == ref.keys() == actor.keys()
        for name, master in new.items():
            assert torch.equal(ref[name], master.bfloat16())
            torch.testing.assert_close(master, 0.01 * actor[name].float() + 0.99 * old[name], rtol=1e-6, atol=1e-8)
        assert any(not torch.equal(new[name], old[name]) for name in new)
    expected, found = masters(second / "step_3"), masters(third / "step_3")
    assert all(torch.equal(found[name], master) for name, master in expected.items())


def masters(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("state/ref-optimizer-*"))
    return {name: kept["master"] for file in files for name, kept in load_state(file)["parameters"].items()}


def parameters(folder: Path) -> dict[str, torch.Tensor]:
    decoder = load_model(str(folder), head="lm", dtype=torch.bfloat16, device=torch.device("cpu"))
    return {name: p.detach() for name, p in decoder.named_shards()}
