"""PPO in worker processes: sharded, reallocated and offloaded runs give a single worker's numbers, and continue."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from scripts.plan_table import FLOOR, LIMIT, PLANS, largest_difference, run_plan
from tests.helpers.runs import SMALL, assert_same_numbers, read_metrics, run_here
from tests.helpers.traces import load_trace

pytestmark = pytest.mark.timeout(300)

MOVING_REFERENCE = """
import dataclasses
from pathlib import Path

from realrl.experiment.discovery import load_experiment
from realrl.graph.mfc import ModelName, ParamReallocHook

PPO = load_experiment("ppo")
CHANGES = {
    "actor_gen": {"model_name": ModelName("actor", 1)},
    "actor_train": {"post_hooks": (ParamReallocHook(target=ModelName("ref"), eta=0.25),)},
}


def mfcs(config):
    return [dataclasses.replace(mfc, **CHANGES.get(mfc.name, {})) for mfc in PPO.mfcs(config)]


def score(prompt_ids, response_ids):
    with Path(__file__).with_name("scored.txt").open("a") as log:
        log.write("x")
    return response_ids.count(max(response_ids)) / len(response_ids)


EXPERIMENT = dataclasses.replace(PPO, name="moving_reference", mfcs=mfcs)
"""
TENSOR = (
    "cluster.n_devices_per_node=2",
    "allocation=t2",
    "allocation.calls.actor_gen=d2",
    "allocation.calls.critic_inf=d1@0:0",
    "allocation.calls.ref_inf=p2",
    "allocation.offload=[actor,ref]",
    "cluster.data_plane=collective",
)
Rows = list[dict[str, Any]]
Run = Callable[..., Path]


def run_in(folder: Path, *overrides: str) -> Path:
    """The run folder of PPO whose reference follows the actor; the reward counts how often it is called."""
    file, run_dir = folder / "moving_reference.py", folder / "run"
    file.write_text(MOVING_REFERENCE)
    settings = (f"algorithm.reward_function={file}:score", "models.actor.optimizer.schedule=constant")
    run_here("run", str(file), *SMALL, *settings, f"run_dir={run_dir}", *overrides)
    return run_dir


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_in(tmp_path_factory.mktemp("single"), "launcher=inline")


@pytest.fixture(scope="module")
def tensor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps, then a third one from the checkpoint."""
    folder = tmp_path_factory.mktemp("tensor")
    run_in(folder, *TENSOR, "steps=2")
    return run_in(folder, *TENSOR, "resume=auto")


def test_every_call_on_its_own_layout_gives_the_same_numbers_also_after_a_resume(single: Path, tensor: Path) -> None:
    rows = read_metrics(tensor)
    assert_same_numbers(read_metrics(single), rows, rel=LIMIT, floor=FLOOR)
    assert all(row["bytes/params"] > 1e6 for row in rows)
    assert all(row["bytes/data"] > 0 for row in rows)


def test_a_reward_function_is_called_once_a_response_however_it_is_sharded(single: Path, tensor: Path) -> None:
    for run_dir, n_starts in ((single, 1), (tensor, 2)):
        n_tried = 3 * n_starts  # responses of the check before a run
        assert len(run_dir.with_name("scored.txt").read_text()) == 3 * 8 + n_tried


def test_the_trace_shows_what_moves(tensor: Path) -> None:
    events = [event for event in load_trace(tensor / "trace.json") if event.get("ph") == "X"]
    names = {(event["cat"], event["name"]) for event in events}
    assert {
        ("realloc", "actor to actor_gen"),
        ("realloc", "critic to critic_inf"),
        ("realloc", "actor to ref"),
        ("offload", "offload actor"),
        ("offload", "offload ref"),
        ("transfer", "spread for actor_train"),  # a member of the replica has what the other lacks
    } <= names
    assert {event["tid"] for event in events if event["name"] == "critic to critic_inf"} == {0, 1}


def test_phases_lie_in_their_calls(tensor: Path) -> None:
    events = [event for event in load_trace(tensor / "trace.json") if event.get("ph") == "X"]
    found: dict[str, list[str]] = {}
    for call in (event for event in events if event["cat"] == "call" and event["tid"] == 0):
        end = call["ts"] + call["dur"]
        inside = [e for e in events if e["cat"] == "phase" and e["tid"] == 0 and call["ts"] <= e["ts"] <= end]
        assert all(event["ts"] + event["dur"] <= end + 2 for event in inside)  # rounded
        found.setdefault(call["name"], [event["name"] for event in inside])
        summed = {name.removeprefix("phase_s/") for name in call["args"] if name.startswith("phase_s/")}
        assert summed == {event["name"] for event in inside}
    assert found["actor_gen"][:2] == ["prepare weights", "prefill"]
    assert set(found["actor_gen"][2:]) == {"decode"}
    assert {"forward", "wait for other stages"} == set(found["ref_inf"]), "a first stage has no head"
    assert found["actor_train"][:5] == ["forward", "head, loss", "backward", "gradient reduction", "optimizer"]
    assert {"step", "master"} <= {event["cat"] for event in events}


def test_a_sharded_checkpoint_holds_whole_models(single: Path, tensor: Path) -> None:
    from transformers import AutoModelForCausalLM

    for role in ("actor", "ref"):
        ours, theirs = (
            AutoModelForCausalLM.from_pretrained(folder / "checkpoints" / "latest" / role).state_dict()
            for folder in (tensor, single)
        )
        assert ours.keys() == theirs.keys()
        for name, parameter in ours.items():
            torch.testing.assert_close(parameter, theirs[name], rtol=1e-3, atol=1e-4)
    files = {path.name for path in (tensor / "checkpoints" / "latest" / "state").iterdir()}
    assert {
        f"{role}-optimizer-pp0-tp{tp_rank}.safetensors" for role in ("actor", "critic") for tp_rank in (0, 1)
    } <= files


def test_the_reference_moves_towards_the_actor(tensor: Path) -> None:
    """ref = 0.25 actor + 0.75 ref, after each of the steps."""
    steps = [tensor / "checkpoints" / f"step_{step}" for step in (2, 3)]
    before, after, actor = (load_tensors(folder) for folder in (steps[0] / "ref", steps[1] / "ref", steps[1] / "actor"))
    assert before.keys() == after.keys()
    for name, parameter in after.items():
        torch.testing.assert_close(parameter, 0.25 * actor[name] + 0.75 * before[name])
    assert any(not torch.equal(after[name], before[name]) for name in after)


def load_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


# ---------------------------------------------------------------- the table


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    return run_plan(tmp_path_factory.mktemp("reference") / "run", ["launcher=inline"], steps=5)[0]


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_of_the_table(plan: str, reference: Rows, tmp_path: Path) -> None:
    rows, _ = run_plan(tmp_path / "run", PLANS[plan], steps=5)
    assert largest_difference(reference, rows).relative <= LIMIT


@pytest.mark.slow
def test_calls_on_disjoint_meshes_overlap(tmp_path: Path) -> None:
    run_plan(tmp_path / "run", PLANS["eight"], steps=3)
    events = [e for e in load_trace(tmp_path / "run" / "trace.json") if e.get("cat") == "call"]
    overlapping = {
        (a["name"], b["name"])
        for a in events
        for b in events
        if a["ts"] < b["ts"] + b["dur"] and b["ts"] < a["ts"] + a["dur"]
    }
    assert {("actor_train", "critic_train"), ("critic_inf", "ref_inf")} <= overlapping
    assert not {("actor_gen", "critic_inf"), ("actor_gen", "actor_train")} & overlapping


def test_a_difference_is_found_and_named() -> None:
    rows = [{"step": 1, "a": 1.0, "b": 1e-9, "time_s/x": 3.0}, {"step": 2, "a": 2.0, "b": 0.0, "time_s/x": 4.0}]
    other = [{**rows[0], "b": 2e-9, "time_s/x": 30.0}, {**rows[1], "a": 2.2}]
    worst = largest_difference(rows, other)
    assert (worst.metric, worst.step) == ("a", 2)
    assert worst.relative == pytest.approx(0.2 / 2.2)
    assert largest_difference(rows, rows).relative == 0.0
    for broken in (rows[:1], [rows[0], {"step": 2, "a": 2.0}]):
        with pytest.raises(ValueError, match=r"steps|only one run has b"):
            largest_difference(rows, broken)
