"""Memory that devices lack, and suggestions of what would do: checked by asking again for what is suggested."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from realrl.config.compose import compose
from realrl.experiment.discovery import load_experiment
from realrl.planner.evaluate import why_not
from realrl.planner.request import Request
from realrl.planner.shortage import Shortage, find_shortage, least_plan
from realrl.profiler.hardware_files import hardware_names, named_hardware
from tests.experiment.test_sizes import model_folder

MACHINES = {name: named_hardware(name) for name in hardware_names()}
PPO = load_experiment("ppo")


def request_of(path: Path | str, n_nodes: int, *overrides: str, hardware: str = "h100") -> Request:
    words = [
        f"models.actor.path={path}", f"models.reward.path={path}", f"cluster.n_nodes={n_nodes}",
        "cluster.n_devices_per_node=8", "cluster.device=cuda", "precision=bf16", "n_seqs=256",
        "dataset.max_prompt_tokens=512", "generation.max_new_tokens=512",
    ]  # fmt: skip
    given = frozenset(word.partition("=")[0] for word in overrides)
    config = compose(PPO, [*words, *overrides])
    return Request(PPO, config, MACHINES[hardware], "prompt=fixed:512 response=fixed:512", given)


def shortage(request: Request) -> Shortage:
    found = find_shortage(request, MACHINES)
    assert found is not None
    return found


def with_nodes(request: Request, n_nodes: int) -> Request:
    cluster = request.config.cluster.model_copy(update={"n_nodes": n_nodes})
    return replace(request, config=request.config.model_copy(update={"cluster": cluster}))


def test_nothing_lacks() -> None:
    assert find_shortage(request_of("tiny", 1), MACHINES) is None


def test_the_smallest_cluster_has_room_and_a_smaller_one_has_not(tmp_path: Path) -> None:
    request = request_of(model_folder(tmp_path / "model", "70B"), 1)
    found = shortage(request)
    assert found.n_nodes is not None
    assert find_shortage(with_nodes(request, found.n_nodes), MACHINES) is None
    assert found.n_nodes == 2 or find_shortage(with_nodes(request, found.n_nodes - 1), MACHINES) is not None


@pytest.mark.slow
def test_a_setting_that_the_user_has_fixed(tmp_path: Path) -> None:
    path = model_folder(tmp_path / "model", "70B")
    fixed = ("models.actor.optimizer.offload=false", "models.critic.optimizer.offload=false")
    found = shortage(request_of(path, 2, *fixed))
    assert found.change == ("models.actor.optimizer.offload=true", "models.critic.optimizer.offload=true")


def test_the_message_names_roles_calls_and_ways_out(tmp_path: Path) -> None:
    request = request_of(model_folder(tmp_path / "model", "70B"), 1)
    found = shortage(request)
    assert {need.role for need in found.needs} >= {"actor", "critic", "ref", "reward"}
    message = str(found.error)
    assert message.startswith("no plan fits: it may use 72.0 GB of a device")
    assert "critic 7" in message
    assert "in critic_train (parameters 3" in message
    assert f"cluster.n_nodes={found.n_nodes}" in message
    assert found.machine is not None
    assert f"devices with the memory of {found.machine}" in message
    assert find_shortage(replace(request, hardware=MACHINES[found.machine]), MACHINES) is None


def test_pins_are_honoured(tmp_path: Path) -> None:
    """A pin to one device asks for all of the model there, whatever the cluster."""
    pin = "allocation.calls.actor_train=d1@0:0"
    found = shortage(request_of(model_folder(tmp_path / "model", "70B"), 2, pin))
    assert found.n_nodes is None
    assert found.needs[0].call == "actor_train"
    assert found.change == ("no allocation.calls.actor_train",)


def test_roles_without_parameters_have_no_micro_batches(tmp_path: Path) -> None:
    reward = "algorithm.reward_function=realrl.data.tiny:toy_reward"
    request = request_of(model_folder(tmp_path / "model", "70B"), 1, reward)
    assert "no plan fits" in str(shortage(request).error)


def test_the_plan_that_takes_the_least_is_one_of_a_run(tmp_path: Path) -> None:
    """The optimizer has a stage of ZeRO and a place that its backend has for the pinned strategy."""
    path = model_folder(tmp_path / "model", "7B")
    backend = ("models.actor.backend=deepspeed", "models.critic.backend=megatron")
    for pin, stage in (((), 3), (("allocation.calls.actor_train=p2",), 2)):
        request = request_of(path, 4, *backend, *pin)
        settings = least_plan(request)
        assert settings.zero_stage == {"actor": stage, "critic": 1}
        assert settings.offload_optimizer == {"actor": True, "critic": False}
        assert settings.checkpointing == {"actor": True, "critic": True}
        assert why_not(request, settings) == ""
