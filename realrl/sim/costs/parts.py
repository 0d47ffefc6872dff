"""The parts of a call's seconds: what it would gain if each took no time, one after the other.

Invariants of `parts_of`:
    - no part is negative, and together they are the seconds of the slowest rank;
    - a call without pipeline, tensor-parallel group or replicas has no part for what they do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from realrl.sched.calls import ScheduledCall
from realrl.sched.messages import RunCall
from realrl.sim.costs.calls import CostModel
from realrl.sim.costs.training import Free
from realrl.sim.durations import SampleSizes
from realrl.sim.hardware import Device, Hardware

COMPUTING = "computing"


def parts_of(
    model: CostModel, call: ScheduledCall, requests: Mapping[int, RunCall], sizes: Mapping[str, SampleSizes]
) -> dict[str, float]:
    """Return part -> seconds of one dispatch, in the order in which they are taken away; those that are 0 are left out.

    Args:
        requests, sizes: as for `CostModel.call`.
    """
    hardware = model.hardware
    streaming = replace(hardware, device=replace(hardware.device, bytes_per_s=math.inf))
    still = replace(streaming, device=_without_constants(streaming.device))
    alone = replace(still, host=replace(still.host, call_s=0.0, sample_s=0.0))
    steps: list[tuple[str, Free, Hardware]] = [
        ("messages between stages", Free(forward=True), hardware),
        ("stages that wait for others", Free(waits=True, forward=True), hardware),
        ("tensor-parallel messages", Free(waits=True, forward=True, tensor=True), hardware),
        ("gradients and shared parameters", Free(waits=True, forward=True, tensor=True, sharing=True), hardware),
    ]
    everything = Free(waits=True, forward=True, tensor=True, sharing=True, optimizer=True)
    steps += [
        ("optimizer", everything, hardware),
        ("reading memory", everything, streaming),
        ("blocks, passes and tokens by themselves", everything, still),
        ("the call by itself", everything, alone),
    ]
    left = max(model.call(call, requests, sizes).values())
    found: dict[str, float] = {}
    for name, free, machine in steps:
        seconds = max(model.without(free, machine).call(call, requests, sizes).values())
        found[name], left = left - seconds, seconds
    found["judging responses" if call.hooks.home is None else COMPUTING] = left
    return {name: seconds for name, seconds in found.items() if seconds > 0.0}


def _without_constants(device: Device) -> Device:
    generation = {name: 0.0 if name in ("block_s", "pass_s") else value for name, value in device.generation.items()}
    return replace(device, block_s=0.0, pass_s=0.0, token_s=0.0, size_s=0.0, generation=generation)
