"""Inputs of `realrl.plan.memory.model` from a run and the machine, and settings that would need less memory."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from realrl.config.schema import ClusterConfig, RunConfig
from realrl.cpu import attention_dtype, choose_kernels
from realrl.doctor.run_under_check import Recompose
from realrl.engine.device import device_count, free_memory_bytes, total_memory_bytes
from realrl.errors import UsageError
from realrl.experiment.models import role_configs
from realrl.experiment.planning import plan_run
from realrl.experiment.run_plan import RunPlan
from realrl.experiment.states import (
    MARGIN,
    call_states,
    longest_rows,
    memory_model,
    role_states,
    runtime_bytes,
)
from realrl.graph.mfc import InterfaceType
from realrl.model.dtypes import torch_dtype
from realrl.plan.hooks import Overlap
from realrl.plan.memory.formulas.local import ON_CUDA, Kernels
from realrl.plan.memory.load import RowLengths
from realrl.plan.memory.overlap import plan_overlap
from realrl.plan.memory.plan import CallState, MemoryPlan, RoleState
from realrl.plan.samples.partition import default_n_mbs
from realrl.shape import DecoderConfig

_WORTH_SAYING = 0.98
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True)
class Alternative:
    """Other settings, and the need of the fullest device with them.

    Attributes:
        overrides: overrides as a user types them.
        peak_bytes: bytes that the fullest device needs.
        fits: True if the device has that much.
    """

    overrides: tuple[str, ...]
    peak_bytes: int
    fits: bool


@dataclass(frozen=True)
class Fullest:
    """The device that needs the most, the call in which it does, and its need in bytes.

    On the CPU, bytes offloaded to host memory count as well: it is the same memory.
    """

    rank: int
    call: str
    needs: int


def fullest(memory: MemoryPlan, device: torch.device) -> Fullest:
    """Return the fullest of all devices on which some call of a plan runs."""
    found = []
    for call, by_rank in memory.calls.items():
        for rank, usage in by_rank.items():
            found.append(Fullest(rank, call, usage.total + (usage.host if device.type == "cpu" else 0)))
    return max(found, key=lambda one: (one.needs, -one.rank))


def memory_plan(
    plan: RunPlan, models: Mapping[str, DecoderConfig], rows: RowLengths, *, device: torch.device
) -> MemoryPlan:
    """Plan the memory of a run's devices, evaluation included.

    Raises:
        AllocationError: a strategy does not fit a model.
    """
    return _memory_of(plan, role_states(plan, models), call_states(plan, rows), device)


def _memory_of(
    plan: RunPlan, roles: Mapping[str, RoleState], calls: Sequence[CallState], device: torch.device
) -> MemoryPlan:
    on_cpu = device.type == "cpu"
    model = memory_model(plan, machine_kernels(roles, calls, device.type), on_cpu=on_cpu)
    return model.plan(roles, calls, runtime_bytes=None if on_cpu else runtime_bytes(plan, roles, calls))


def decide_overlap(plan: RunPlan, *, capacity: int = 0) -> Overlap:
    """Decide which parameters come early and which stay, for the longest texts that the configuration allows.

    Args:
        plan: plan of a run whose device is settled.
        capacity: bytes of one device; 0: those of this machine's, which must be there.

    Raises:
        UsageError: a model cannot be read, or its strategy does not fit it.
    """
    config, device = plan.config, torch.device(plan.config.cluster.device)
    rows = longest_rows(config, plan.experiment.dataset)
    roles, calls = role_states(plan, role_configs(plan)), call_states(plan, rows)
    return plan_overlap(
        roles,
        calls,
        _memory_of(plan, roles, calls, device),
        capacity=int(MARGIN * (capacity or device_capacity(config, device))),
        is_host_memory=device.type == "cpu",
        evaluating=[call.name for call in calls if plan.is_evaluating(call.name)],
        batches={mfc.name: plan.samples_per_step // (mfc.min_n_seqs or mfc.n_seqs) for mfc in plan.mfcs},
    )


# ---------------------------------------------------------------- the machine


def machine_kernels(roles: Mapping[str, RoleState], calls: Sequence[CallState], device: str) -> Kernels:
    """Return the use of memory by the kernels that run these calls here."""
    n_rows = max((call.load.n_rows for call in calls), default=1)
    dtype = torch_dtype(next(iter(roles.values())).model.dtype) if roles else torch.float32
    return kernels_of(torch.device(device), dtype, n_rows=max(n_rows, 1))


def kernels_of(device: torch.device, dtype: torch.dtype, *, n_rows: int) -> Kernels:
    """Return the use of memory by this machine's kernels."""
    if device.type != "cpu":
        return ON_CUDA
    kernels = choose_kernels(device, dtype, n_rows=n_rows)
    return Kernels(
        fused_norms=False,
        float_attention=attention_dtype(device, dtype) != dtype,
        whole_logits=False,
        float_products=kernels.dtype != dtype,
        generation_bytes=kernels.dtype.itemsize,
        packs_weights=kernels.packs_weights,
        fused_products=kernels.fuses_products,
        fused_heads=kernels.head_multiple,
        fused_sampling=kernels.fuses_sampling,
        tiles=kernels.tiles,
        on_host=True,
        shares_prompts=True,
    )


def device_capacity(config: RunConfig, device: torch.device, given_bytes: int | None = None) -> int:
    """Return the bytes of one worker's device; where workers share it, and on the CPU, each has an equal share.

    Args:
        given_bytes: memory of a device, where it is not that of this machine's.
    """
    if device.type == "cpu":
        return given_bytes or machine_memory() // config.cluster.n_devices_per_node
    whole = given_bytes or total_memory_bytes(device)
    return whole // workers_per_device(config.cluster, device_count())


def workers_per_device(cluster: ClusterConfig, n_devices: int) -> int:
    """Return the most workers that one of a node's accelerators has."""
    return math.ceil(cluster.n_devices_per_node / max(1, n_devices)) if cluster.shares_devices else 1


def machine_memory() -> int:
    """Return the bytes of host memory, or of the part of it that this container may use."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for name in _CGROUP_LIMITS:
        path = Path(name)
        text = path.read_text().strip() if path.is_file() else ""
        if text.isdigit():
            total = min(total, int(text))
    return total


def free_memory(device: torch.device, of_accelerator: Callable[[torch.device], int] = free_memory_bytes) -> int:
    """Return the free bytes of a CUDA device; of host memory, those that the kernel can give without swapping."""
    if device.type != "cpu":
        return of_accelerator(device)
    lines = Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").is_file() else []
    available = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return min([*available, machine_memory()])


# ---------------------------------------------------------------- alternatives


def alternatives(
    plan: RunPlan, rows: RowLengths, *, needs: int, capacity: int, recompose: Recompose, device: torch.device
) -> list[Alternative]:
    """Return settings with which the fullest device needs less; those that fit, with the fewest overrides, first.

    Each is planned as the run itself; one that the run would refuse is left out.
    """
    found = []
    for overrides in _candidates(plan):
        try:
            other = plan_run(recompose(overrides), plan.experiment)
            memory = memory_plan(other, role_configs(other), rows, device=device)
        except UsageError:
            continue
        peak = fullest(memory, device).needs
        if peak < _WORTH_SAYING * needs:
            found.append(Alternative(overrides, peak, peak <= MARGIN * capacity))
    return sorted(found, key=lambda one: (0, len(one.overrides)) if one.fits else (1, one.peak_bytes))


def _candidates(plan: RunPlan) -> list[tuple[str, ...]]:
    """Return single settings first, then those that cost the least speed together."""
    config = plan.config
    sections = {name: config.models[name] for name, role in plan.roles.items() if role.trainable}
    checkpointing = tuple(
        f"models.{name}.activation_checkpointing=true"
        for name, section in sections.items()
        if not section.activation_checkpointing
    )
    optimizers = {
        key: tuple(f"models.{name}.optimizer.{key}" for name in sections) for key in ("zero_stage=1", "offload=true")
    }
    pieces = [_more_micro_batches(plan, factor) for factor in (2, 4, 16)] if sections else [()]
    singles = [checkpointing, *optimizers.values(), *pieces]
    if any(mfc.interface_type is InterfaceType.GENERATE for mfc in plan.mfcs):
        singles.append((f"generation.max_batch_size={max(1, config.generation.max_batch_size // 4)}",))
    if any(not role.trainable and role.head != "none" for role in plan.roles.values()):
        singles.append(("allocation.offload_frozen=true",))
    if plan.n_workers > 1:
        singles.append(("allocation.mode=tensor",))
        singles.append(("allocation.mode=heuristic",))
    if config.precision == "fp32":
        singles.append(("precision=bf16",))
    singles.append(tuple(f"models.{name}.lora.rank=16" for name in sections))
    together = [(*checkpointing, *pieces[-1]), (*checkpointing, *pieces[-1], *optimizers["offload=true"])]
    return list(dict.fromkeys(overrides for overrides in (*singles, *together) if overrides))


def _more_micro_batches(plan: RunPlan, factor: int) -> tuple[str, ...]:
    """Return settings that cut each minibatch into more micro-batches, also of calls with a number of their own.

    Calls that follow a token budget stay as they are.
    """
    config = plan.config
    own = {name: call.n_mbs for name, call in config.calls.items() if call.n_mbs is not None}
    own |= {mfc.name: mfc.n_mbs for mfc in plan.mfcs if mfc.n_mbs not in (None, config.n_mbs)}
    others = [mfc for mfc in plan.mfcs if mfc.is_train and mfc.name not in own and mfc.max_tokens_per_mb is None]
    of_calls = tuple(f"calls.{name}.n_mbs={factor * n_mbs}" for name, n_mbs in own.items())
    if not others:
        return of_calls
    n_mbs = config.n_mbs or max(default_n_mbs(plan.allocations[mfc.name].strategy.pp, is_train=True) for mfc in others)
    return (f"n_mbs={factor * n_mbs}", *of_calls)
