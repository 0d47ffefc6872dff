"""The machine that a command speaks of: the one at hand, or a modelled one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from realrl.config.schema import RunConfig
    from realrl.plan.memory.formulas.local import Kernels
    from realrl.plan.memory.plan import CallState, RoleState
    from realrl.sim.hardware import Hardware


def settled_for(config: RunConfig, hardware: str | None) -> RunConfig:
    """Return the configuration with device, its memory, precision and `cluster.hardware` settled, as far as known.

    Args:
        hardware: value of --hardware, in the place of `cluster.hardware`; `cluster.device=auto` means its devices.

    Raises:
        ConfigError: there is no such machine, or its devices are of another kind.
    """
    from realrl.planner.modelled import check_kind
    from realrl.profiler.hardware_files import hardware_like, named_hardware
    from realrl.runtime.processes.machine import accelerators, on_machine

    found = accelerators()
    named = hardware or config.cluster.hardware
    changes: dict[str, object] = {"hardware": named}
    if named:
        key = "--hardware" if hardware else "cluster.hardware"
        machine = named_hardware(named, option=key)
        if config.cluster.device == "auto":
            changes["device"] = machine.device.kind
        else:
            check_kind(machine, config.cluster.device, source=f"{key} {named}")
        if config.cluster.device_memory_gb is None:
            changes["device_memory_gb"] = machine.device.memory_bytes / 1e9
    config = config.model_copy(update={"cluster": config.cluster.model_copy(update=changes)})
    config, _ = on_machine(config, found)
    if named or config.cluster.device == "cpu":
        return config
    like = hardware_like(found.name)
    return config.model_copy(update={"cluster": config.cluster.model_copy(update={"hardware": like})})


def settle(config: RunConfig, hardware: str | None) -> tuple[RunConfig, tuple[str, ...]]:
    """Return the configuration of a run as it would start here, or on the machine of --hardware, and notes to the user.

    Raises:
        ConfigError: there is no such machine, or its devices are of another kind.
    """
    from realrl.runtime.processes.machine import accelerators, on_machine

    if hardware is not None:
        return settled_for(config, hardware), ()
    if config.cluster.hardware:
        from realrl.profiler.hardware_files import named_hardware

        named_hardware(config.cluster.hardware, option="cluster.hardware")
    return on_machine(config, accelerators())


def memory_of(config: RunConfig) -> int | None:
    """Return the bytes of a device, where they are not those of its hardware file.

    Args:
        config: from `settled_for`.
    """
    cluster = config.cluster
    if cluster.device_memory_gb is not None:
        return int(cluster.device_memory_gb * 1e9)
    if cluster.device != "cpu":
        return None
    from realrl.doctor.memory import machine_memory  # brings torch

    return machine_memory() // cluster.n_devices_per_node


def worker_memory(config: RunConfig, machine: Hardware) -> int | None:
    """Return the bytes of a device that a worker may use, where they are not those of its hardware file.

    Args:
        config: from `settled_for`.
    """
    n_bytes, cluster = memory_of(config), config.cluster
    if cluster.device == "cpu" or not cluster.shares_devices:
        return n_bytes
    from realrl.doctor.memory import workers_per_device  # brings torch
    from realrl.runtime.processes.machine import accelerators

    return (n_bytes or int(machine.device.memory_bytes)) // workers_per_device(cluster, accelerators().count)


def kernels_here(roles: Mapping[str, RoleState], calls: Sequence[CallState], device: str) -> Kernels:
    """Return the use of memory by the kernels that run these calls on this machine; on accelerators the defaults."""
    from realrl.plan.memory.formulas.local import Kernels

    if device != "cpu":
        return Kernels()
    from realrl.doctor.memory import machine_kernels  # brings torch

    return machine_kernels(roles, calls, device)
