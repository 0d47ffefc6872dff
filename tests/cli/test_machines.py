"""The machine that a command speaks of, and the memory of its devices."""

import pytest

from realrl.cli.machines import memory_of, settled_for, worker_memory
from realrl.config.compose import compose
from realrl.doctor.memory import machine_memory
from realrl.errors import ConfigError
from realrl.experiment.discovery import load_experiment
from realrl.planner.modelled import hardware_for
from realrl.profiler.hardware_files import named_hardware


def config_of(*overrides):
    return compose(load_experiment("ppo"), overrides)


def test_memory_is_that_of_the_machine_that_is_named():
    settled = settled_for(config_of(), "h200")
    assert (settled.cluster.device, settled.cluster.hardware, settled.precision) == ("cuda", "h200", "bf16")
    assert memory_of(settled) == 141_000_000_000
    assert memory_of(settled_for(config_of("cluster.hardware=l40s"), None)) == 48_000_000_000
    assert memory_of(settled_for(config_of("cluster.hardware=l40s"), "h100")) == 80_000_000_000


def test_memory_that_the_user_has_given_counts():
    settled = settled_for(config_of("cluster.device_memory_gb=16"), "h100")
    assert memory_of(settled) == 16_000_000_000


def test_workers_on_cpus_share_the_memory_of_this_machine():
    for n_workers in (1, 3):
        settled = settled_for(config_of("cluster.device=cpu", f"cluster.n_devices_per_node={n_workers}"), None)
        assert settled.cluster.hardware == ""
        assert memory_of(settled) == machine_memory() // n_workers
        assert hardware_for(settled).device.kind == "cpu"


def test_the_memory_of_accelerators_that_are_not_here_is_that_of_their_file():
    assert memory_of(config_of("cluster.device=cuda")) is None


def test_workers_that_share_devices_share_their_memory():
    h100 = named_hardware("h100")
    for shares, n_bytes in (("true", 20_000_000_000), ("false", 80_000_000_000)):
        config = config_of("cluster.n_devices_per_node=4", f"cluster.shares_devices={shares}")
        assert worker_memory(settled_for(config, "h100"), h100) == n_bytes


def test_a_machine_has_devices_of_the_kind_that_is_planned_for():
    """A plan's file says for which kind it was made."""
    with pytest.raises(
        ConfigError, match=r"--hardware h100 has devices of kind cuda, and the plan is for cluster\.device=cpu"
    ):
        settled_for(config_of("cluster.device=cpu"), "h100")
    with pytest.raises(ConfigError, match=r"cluster\.hardware two_cores has devices of kind cpu"):
        settled_for(config_of("cluster.device=cuda", "cluster.hardware=two_cores"), None)
