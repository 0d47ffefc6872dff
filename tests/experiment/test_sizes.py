"""Models cut into parts for the memory of devices that are described here."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from realrl.config.compose import compose
from realrl.errors import AllocationError
from realrl.experiment.discovery import load_experiment
from realrl.experiment.models import role_configs
from realrl.experiment.planning import plan_run
from realrl.experiment.policy_calls import prefixed
from realrl.experiment.run_plan import RunPlan
from realrl.experiment.states import call_states, longest_rows, memory_model, role_states, runtime_bytes
from realrl.mesh.device_mesh import ParallelStrategy
from realrl.plan.memory.formulas.local import Kernels
from tests.docs.markdown import ROOT, files

PPO = load_experiment("ppo")
GB = 1_000_000_000
SIZES = {"7B": (4096, 32, 32, 32, 11008), "70B": (8192, 80, 64, 8, 28672)}


def model_folder(folder: Path, size: str) -> Path:
    """Make a folder that says what a llama is made of, and has no weights."""
    hidden, layers, heads, kv_heads, inner = SIZES[size]
    folder.mkdir(exist_ok=True)
    raw = {
        "model_type": "llama", "vocab_size": 32000, "hidden_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "intermediate_size": inner,
        "max_position_embeddings": 4096,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def planned(path: Path | str, n_nodes: int, *overrides: str) -> RunPlan:
    """PPO of a model on nodes of eight accelerators."""
    words = [
        f"models.actor.path={path}", f"models.reward.path={path}", f"cluster.n_nodes={n_nodes}",
        "cluster.n_devices_per_node=8", "cluster.device=cuda", "n_seqs=512", "n_mbs=16",
        "dataset.max_prompt_tokens=512", "generation.max_new_tokens=512",
    ]  # fmt: skip
    return plan_run(compose(PPO, [*words, *overrides]), PPO)


def strategies(plan: RunPlan) -> dict[str, ParallelStrategy]:
    """Call -> strategy."""
    return {name: allocation.strategy for name, allocation in plan.allocations.items()}


def most_bytes(plan: RunPlan) -> int:
    """Return the bytes that the fullest device needs, connections included."""
    states = role_states(plan, role_configs(plan)), call_states(plan, longest_rows(plan.config, PPO.dataset))
    model = memory_model(plan, Kernels(), on_cpu=False)
    return model.peaks(*states, runtime_bytes=runtime_bytes(plan, *states)).fullest[2]


@pytest.mark.parametrize("mode", ["heuristic", "colocate", "split", "standalone"])
def test_models_that_fit_stay_whole(mode: str) -> None:
    words = ("models.actor.path=tiny", "models.reward.path=tiny", f"allocation.mode={mode}")
    assert strategies(planned("tiny", 1, *words, "cluster.device_memory_gb=80")) == strategies(
        planned("tiny", 1, *words)
    )


@pytest.mark.parametrize("mode", ["heuristic", "colocate", "split"])
@pytest.mark.parametrize(("size", "n_nodes"), [("7B", 2), ("70B", 16)])
def test_models_that_do_not_fit_are_cut(mode: str, size: str, n_nodes: int, tmp_path: Path) -> None:
    path = model_folder(tmp_path / "model", size)
    words = (f"allocation.mode={mode}", "models.*.activation_checkpointing=true", "models.*.optimizer.zero_stage=1")
    whole = planned(path, n_nodes, *words)
    plan = planned(path, n_nodes, *words, "cluster.device_memory_gb=80")
    assert most_bytes(whole) > 80 * GB >= most_bytes(plan)
    for name, strategy in strategies(plan).items():
        assert 8 % strategy.tp == 0, name
        assert strategy.pp == 1 or strategy.tp == 8, name  # inside of a node first
        assert strategy.sp == (strategy.tp > 1)
    homes = {mfc.role: plan.allocations[mfc.name] for mfc in plan.mfcs}
    assert all(plan.allocations[mfc.name] == homes[mfc.role] for mfc in plan.mfcs), "parameters move"


def test_a_role_with_few_samples_gets_more_devices_when_it_is_cut(tmp_path: Path) -> None:
    words = ("allocation.mode=heuristic", "n_seqs=8", "algorithm.n_minibatches=2")
    path = model_folder(tmp_path / "model", "7B")
    plan = planned(path, 4, *words, "cluster.device_memory_gb=80")
    whole = planned(path, 4, *words)
    assert whole.allocations["actor_train"].mesh.n_devices == 4
    actor = plan.allocations["actor_train"]
    assert actor.strategy.tp > 1
    assert actor.mesh.n_devices == min(32, 4 * actor.strategy.tp * actor.strategy.pp)


@pytest.mark.parametrize("mode", ["data", "tensor", "d16t1p1"])
def test_modes_that_say_the_strategy_keep_it(mode: str, tmp_path: Path) -> None:
    path = model_folder(tmp_path / "model", "7B")
    words = f"allocation.mode={mode}"
    assert strategies(planned(path, 2, words, "cluster.device_memory_gb=80")) == strategies(planned(path, 2, words))


def test_pinned_calls_keep_their_place(tmp_path: Path) -> None:
    path = model_folder(tmp_path / "model", "7B")
    words = ("allocation.mode=heuristic", "allocation.calls.ref_inf=d2t4@1", "cluster.device_memory_gb=80")
    assert str(planned(path, 2, *words).allocations["ref_inf"]) == "d2t4p1@1:0-7"


def test_no_room(tmp_path: Path) -> None:
    path = model_folder(tmp_path / "model", "70B")
    with pytest.raises(AllocationError) as caught:
        planned(path, 1, "allocation.mode=heuristic", "cluster.device_memory_gb=80")
    message = str(caught.value)
    assert "allocation.mode=heuristic finds no room: device 0 needs" in message
    assert "and has 80.0 GB" in message
    assert "models.*.activation_checkpointing=true" in message


def test_a_model_that_cannot_be_read_is_left_to_the_checks_of_inputs(tmp_path: Path) -> None:
    words = ("allocation.mode=heuristic", "cluster.device_memory_gb=80")
    assert strategies(planned(tmp_path / "nothing", 1, *words))["actor_train"] == ParallelStrategy(dp=8)


@pytest.mark.parametrize("prefix", ["", "greedy_"])
def test_a_call_that_reads_the_best_responses_is_sized_for_all_of_them(prefix: str, tmp_path: Path) -> None:
    """Keys that were renamed on the way from the generate call are as long as those that they rename."""
    file = tmp_path / "best_of_n.py"
    file.write_text(files(ROOT / "docs/write-your-own.md")["best_of_n.py"])
    experiment = load_experiment(str(file))
    own = replace(experiment, mfcs=lambda config: [prefixed(prefix, call) for call in experiment.mfcs(config)])
    words = [
        "models.*.path=tiny", "cluster.n_devices_per_node=2", "allocation.mode=split", "n_seqs=64", "n_mbs=1",
        "dataset.max_prompt_tokens=9", "generation.max_new_tokens=16",
    ]  # fmt: skip
    plan = plan_run(compose(own, words), own)
    loads = {state.name: state.load for state in call_states(plan, longest_rows(plan.config, own.dataset))}
    assert loads["actor_train"].n_tokens == 64 * 8 * (9 + 16)
    assert loads["actor_train"].n_sequences == 8
    assert loads["actor_gen"].n_tokens == 64 * (9 + 8 * 16)
