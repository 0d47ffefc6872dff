"""The machine that a command speaks of: the one at hand, or a modelled one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from realrl.config.schema import RunConfig
    from realrl.plan.memory.formulas import Kernels
    from realrl.plan.memory.plan import CallState, RoleState


def settled_for(config: RunConfig, hardware: str | None) -> RunConfig:
    """Return the configuration with device, precision and `cluster.hardware` settled, as far as they are known.

    Args:
        hardware: value of --hardware, in the place of `cluster.hardware`; `cluster.device=auto` means its devices.

    Raises:
        ConfigError: there is no such machine.
    """
    from realrl.profiler.hardware_files import hardware_like, named_hardware
    from realrl.runtime.processes.machine import accelerators, on_machine

    found = accelerators()
    named = hardware or config.cluster.hardware
    changes: dict[str, object] = {"hardware": named}
    if named and config.cluster.device == "auto":
        key = "--hardware" if hardware else "cluster.hardware"
        changes["device"] = named_hardware(named, option=key).device.kind
    config = config.model_copy(update={"cluster": config.cluster.model_copy(update=changes)})
    config, _ = on_machine(config, found)
    if named or config.cluster.device == "cpu":
        return config
    like = hardware_like(found.name)
    return config.model_copy(update={"cluster": config.cluster.model_copy(update={"hardware": like})})


def kernels_here(roles: Mapping[str, RoleState], calls: Sequence[CallState], device: str) -> Kernels:
    """Return the use of memory by the kernels that run these calls on this machine; on accelerators the defaults."""
    from realrl.plan.memory.formulas import Kernels

    if device != "cpu":
        return Kernels()
    from realrl.doctor.memory import machine_kernels  # brings torch

    return machine_kernels(roles, calls, device)
