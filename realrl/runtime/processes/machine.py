"""This machine's CUDA devices, and what they settle: device and precision of a run, environment of its workers.

The driver is asked directly: torch would take seconds to import, and might keep a context on a device of the workers.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass

from realrl.config.schema import RunConfig
from realrl.errors import ConfigError
from realrl.experiment.models import with_precision
from realrl.experiment.run_plan import RunPlan
from realrl.plan.modes import SIZED_MODES

VISIBLE = "CUDA_VISIBLE_DEVICES"
_BF16_CAPABILITY = (8, 0)
_MAJOR, _MINOR = 75, 76  # CUdevice_attribute, <cuda.h>
_MOST_NAME = 256  # bytes
_LEAST_WATCHDOG_S = 480  # torch's own default


@dataclass(frozen=True)
class Accelerators:
    """CUDA devices that this process may use.

    Attributes:
        count: their number.
        capability: the lowest compute capability among them, (major, minor).
        memory_bytes: the least memory of one of them; 0 if it is not known.
        name: of the first one, as the driver has it.
    """

    count: int = 0
    capability: tuple[int, int] = (0, 0)
    memory_bytes: int = 0
    name: str = ""


def accelerators() -> Accelerators:
    """Ask the driver, if there is one and torch was built for it; makes no context."""
    if os.environ.get(VISIBLE) in ("", "-1"):  # the driver reads it once per process
        return Accelerators()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Accelerators()
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        return Accelerators()
    from realrl.engine.device import is_built_for_cuda

    if not is_built_for_cuda():
        return Accelerators()
    indices = range(count.value)
    capability = min(_capability(driver, index) for index in indices)
    n_bytes = min(_memory_bytes(driver, index) for index in indices)
    return Accelerators(count.value, capability, n_bytes, _name(driver))


def _name(driver: ctypes.CDLL) -> str:
    device, text = ctypes.c_int(), ctypes.create_string_buffer(_MOST_NAME)
    if driver.cuDeviceGet(ctypes.byref(device), 0) or driver.cuDeviceGetName(text, _MOST_NAME, device):
        return ""
    return text.value.decode(errors="replace")


def _capability(driver: ctypes.CDLL, index: int) -> tuple[int, int]:
    device, numbers = ctypes.c_int(), []
    for attribute in (_MAJOR, _MINOR):
        value = ctypes.c_int()
        if driver.cuDeviceGet(ctypes.byref(device), index) or driver.cuDeviceGetAttribute(
            ctypes.byref(value), attribute, device
        ):
            return 0, 0
        numbers.append(value.value)
    return numbers[0], numbers[1]


def _memory_bytes(driver: ctypes.CDLL, index: int) -> int:
    device, size = ctypes.c_int(), ctypes.c_size_t()
    if driver.cuDeviceGet(ctypes.byref(device), index) or driver.cuDeviceTotalMem_v2(ctypes.byref(size), device):
        return 0
    return size.value


def on_machine(config: RunConfig, found: Accelerators) -> tuple[RunConfig, tuple[str, ...]]:
    """Return the configuration with its `auto` values of device and precision settled, and notes to the user.

    A plan for `cluster.device=cuda` made on a machine without such a device counts on bf16.
    """
    cluster, notes = config.cluster, []
    device, needed = cluster.device, cluster.n_needed_per_node
    if device == "auto":
        device = "cuda" if found.count >= needed else "cpu"
        if device == "cpu" and found.count:
            notes.append(
                f"cluster.device=auto takes the CPU: a node has {needed} workers, this machine {found.count} CUDA "
                f"device{'s' if found.count > 1 else ''}"
            )
        config = config.model_copy(update={"cluster": cluster.model_copy(update={"device": device})})
    if device == "cuda" and found.memory_bytes and config.allocation.mode in SIZED_MODES:
        config = _with_memory(config, found.memory_bytes)
    if config.precision == "auto" and device == "cuda" and found.count and found.capability < _BF16_CAPABILITY:
        capability = ".".join(map(str, found.capability))
        notes.append(f"precision=auto takes fp32: a device has compute capability {capability}, below 8.0")
        config = config.model_copy(update={"precision": "fp32"})
    return with_precision(config), tuple(notes)


def _with_memory(config: RunConfig, n_bytes: int) -> RunConfig:
    """Return the configuration with the memory of the devices noted, unless it has one, or workers share devices."""
    cluster = config.cluster
    if cluster.device_memory_gb is not None or cluster.shares_devices:
        return config
    return config.model_copy(update={"cluster": cluster.model_copy(update={"device_memory_gb": n_bytes / 1e9})})


def check_devices(config: RunConfig, found: Accelerators) -> None:
    """Refuse a run on CUDA whose workers lack devices.

    Raises:
        ConfigError: names the numbers.
    """
    needed = config.cluster.n_needed_per_node
    if config.cluster.device == "cuda" and found.count < needed:
        raise ConfigError(
            f"worker {found.count} of this node needs a CUDA device of its own, the node has {found.count}",
            remedy="Use cluster.device=cpu, or a smaller cluster.n_devices_per_node.",
        )


def worker_environments(
    plan: RunPlan, found: Accelerators, environment: Mapping[str, str]
) -> tuple[dict[str, str], ...]:
    """Return the environment variables of each worker of this machine, beside those that all processes inherit.

    A worker on CUDA sees one device, so that libraries and reward functions that take "the first" take the worker's
    own. What the user has set stays, but for the list of devices, of which each worker gets one.

    Args:
        environment: the user's environment.
    """
    n_workers = plan.config.cluster.n_devices_per_node
    if plan.config.cluster.device != "cuda":
        return ({},) * n_workers
    common = {name: value for name, value in common_environment(plan).items() if name not in environment}
    return tuple({**common, **own} for own in device_environments(n_workers, found, environment))


def common_environment(plan: RunPlan) -> dict[str, str]:
    """Return the environment variables of all workers, on every machine, unless the user has set them."""
    cluster = plan.config.cluster
    if cluster.device != "cuda":
        return {}
    watchdog_s = max(_LEAST_WATCHDOG_S, math.ceil(cluster.collective_timeout_s))
    common = {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": str(watchdog_s)}
    if cluster.n_nodes == 1:
        common["NCCL_SOCKET_IFNAME"] = "lo"
    if any(_overlaps(plan, name) for name in plan.roles):
        common["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    return common


def device_environments(
    n_workers: int, found: Accelerators, environment: Mapping[str, str]
) -> tuple[dict[str, str], ...]:
    """Return the environment variable by which each worker of a machine sees one device; they share too few."""
    given = [name.strip() for name in environment.get(VISIBLE, "").split(",") if name.strip()]
    names = given[: found.count] or [str(index) for index in range(found.count or 1)]
    return tuple({VISIBLE: names[place % len(names)]} for place in range(n_workers))


def _overlaps(plan: RunPlan, role: str) -> bool:
    """Return True if Megatron trains a role with tensor parallelism: kernels must start in the order of the calls."""
    home = plan.home_of(role)
    is_megatron = plan.config.models[role].backend == "megatron"
    return is_megatron and plan.roles[role].trainable and home is not None and home.strategy.tp > 1
