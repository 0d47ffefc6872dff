"""Settings that follow from a machine's CUDA devices, on machines that are described here."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from realrl.config.compose import compose
from realrl.config.schema import RunConfig
from realrl.errors import ConfigError
from realrl.experiment.backends import check_backends
from realrl.experiment.discovery import load_experiment
from realrl.experiment.planning import plan_run
from realrl.runtime.checkpoints.store import Resume
from realrl.runtime.processes import start
from realrl.runtime.processes.machine import (
    Accelerators,
    accelerators,
    check_devices,
    on_machine,
    worker_environments,
)
from tests.helpers.runs import run_ppo

NONE, ONE, FOUR, OLD = Accelerators(), Accelerators(1, (9, 0)), Accelerators(4, (8, 0)), Accelerators(4, (7, 5))
TWO_WORKERS = "cluster.n_devices_per_node=2"


def config(*overrides: str) -> RunConfig:
    return compose(load_experiment("ppo"), overrides)


def environments(found: Accelerators, environment: dict[str, str], *overrides: str) -> tuple[dict[str, str], ...]:
    settled, _ = on_machine(config(*overrides), found)
    return worker_environments(plan_run(settled, load_experiment("ppo")), found, environment)


@pytest.mark.parametrize(
    ("found", "overrides", "expected"),
    [
        (NONE, (), ("cpu", "fp32")),
        (ONE, (), ("cuda", "bf16")),
        (OLD, (), ("cuda", "fp32")),
        (ONE, (TWO_WORKERS,), ("cpu", "fp32")),
        (FOUR, (TWO_WORKERS,), ("cuda", "bf16")),
        (ONE, (TWO_WORKERS, "cluster.shares_devices=true"), ("cuda", "bf16")),
        (ONE, ("cluster.device=cpu",), ("cpu", "fp32")),
        (NONE, ("cluster.device=cuda",), ("cuda", "bf16")),
        (FOUR, ("precision=fp32",), ("cuda", "fp32")),
        (NONE, ("precision=bf16",), ("cpu", "bf16")),
    ],
)
def test_device_and_precision(found: Accelerators, overrides: tuple[str, ...], expected: tuple[str, str]) -> None:
    settled, _ = on_machine(config(*overrides), found)
    assert (settled.cluster.device, settled.precision) == expected
    assert on_machine(settled, found)[0] == settled


def test_notes_say_what_was_not_taken() -> None:
    assert on_machine(config(TWO_WORKERS), ONE)[1] == (
        "cluster.device=auto takes the CPU: a node has 2 workers, this machine 1 CUDA device",
    )
    assert on_machine(config(), OLD)[1] == (
        "precision=auto takes fp32: a device has compute capability 7.5, below 8.0",
    )
    assert on_machine(config(), ONE)[1] == on_machine(config(), NONE)[1] == ()


def test_too_few_devices_are_refused() -> None:
    with pytest.raises(ConfigError, match="worker 1 of this node needs a CUDA device of its own, the node has 1"):
        check_devices(config("cluster.device=cuda", TWO_WORKERS), ONE)
    check_devices(config("cluster.device=cuda", TWO_WORKERS, "cluster.shares_devices=true"), ONE)
    check_devices(config("cluster.device=cuda", TWO_WORKERS), FOUR)


def test_each_worker_sees_one_device() -> None:
    found = environments(FOUR, {}, TWO_WORKERS)
    assert [each["CUDA_VISIBLE_DEVICES"] for each in found] == ["0", "1"]
    assert {each["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] for each in found} == {"3600"}
    assert {each["NCCL_SOCKET_IFNAME"] for each in found} == {"lo"}
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in found[0]
    chosen = environments(FOUR, {"CUDA_VISIBLE_DEVICES": "5,GPU-7,1,0", "NCCL_SOCKET_IFNAME": "eth0"}, TWO_WORKERS)
    assert [each["CUDA_VISIBLE_DEVICES"] for each in chosen] == ["5", "GPU-7"]
    assert "NCCL_SOCKET_IFNAME" not in chosen[0]
    shared = environments(ONE, {}, TWO_WORKERS, "cluster.shares_devices=true")
    assert [each["CUDA_VISIBLE_DEVICES"] for each in shared] == ["0", "0"]
    assert environments(NONE, {}, TWO_WORKERS) == ({}, {})


def test_megatron_with_tensor_parallelism_starts_kernels_in_order() -> None:
    tensor = (TWO_WORKERS, "allocation.mode=tensor", "models.actor.backend=megatron")
    assert environments(FOUR, {}, *tensor)[0]["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in environments(FOUR, {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}, *tensor)[0]
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in environments(FOUR, {}, TWO_WORKERS, "models.actor.backend=megatron")[0]


def test_shared_devices_refuse_backends_with_collectives_of_their_own() -> None:
    settled = config(TWO_WORKERS, "cluster.shares_devices=true", "models.actor.backend=deepspeed")
    with pytest.raises(ConfigError, match=r"shares_devices=true, but models\.actor\.backend=deepspeed has collectives"):
        check_backends(plan_run(settled, load_experiment("ppo")))


def test_hidden_devices_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert accelerators() == NONE


def test_a_run_writes_what_it_settled(tmp_path: Path) -> None:
    run_ppo(tmp_path / "run", "steps=1", "launcher=inline")
    written = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (written["precision"], written["cluster"]["device"]) == ("fp32", "cpu")


def test_the_memory_of_devices_is_noted_for_modes_that_cut_models() -> None:
    large = Accelerators(4, (9, 0), 80_000_000_000)

    def noted(found: Accelerators, *overrides: str) -> float | None:
        return on_machine(config(TWO_WORKERS, *overrides), found)[0].cluster.device_memory_gb

    assert noted(large, "allocation.mode=heuristic") == 80.0
    assert noted(large, "allocation.mode=heuristic", "cluster.device_memory_gb=40") == 40.0
    assert noted(large) is None
    assert noted(FOUR, "allocation.mode=heuristic") is None
    assert noted(large, "allocation.mode=heuristic", "cluster.device=cpu") is None
    assert noted(large, "allocation.mode=heuristic", "cluster.shares_devices=true") is None


@pytest.mark.parametrize(("n_before", "expected"), [(None, "1"), (3, "3"), (0, "4")])
def test_threads_of_a_resumed_run_are_those_of_its_steps_before(n_before, expected, tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(start, "available_cores", lambda: 8)
    monkeypatch.setattr(start, "lasting_cores_of_others", float)  # all cores
    monkeypatch.setattr(start, "load_manifest", lambda _: SimpleNamespace(n_threads=n_before))
    resume = Resume() if n_before is None else Resume(tmp_path)
    plan = plan_run(config("cluster.device=cpu", TWO_WORKERS), load_experiment("ppo"))
    environments, cores = start._worker_environments(plan, NONE, resume)
    assert [variables["OMP_NUM_THREADS"] for variables in environments] == [expected] * 2
    assert cores.notes
