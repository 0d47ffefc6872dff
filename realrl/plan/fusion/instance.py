"""The problem of fusing pipelines: which stages of which models compute on which devices, for how long.

Each device computes one task at a time. A task is the forward or the backward of a micro-batch at a stage. A stage that
lies on several devices, such as one of a larger tensor-parallel size, computes on all of them at once.

Invariants of an `Instance`:
    - every pipeline has a stage and a micro-batch, every stage a device, and names differ;
    - times are positive and finite, activations finite and not negative;
    - no device is asked to hold more than its cap for one micro-batch, so that a schedule exists.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, get_args

from realrl.errors import UsageError

Transport = Literal["overtaking", "in_order"]
TRANSPORTS: tuple[Transport, ...] = get_args(Transport)
MAX_TASKS = 1 << 20  # of an instance


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of a pipeline.

    Attributes:
        devices: where it computes, all of them at once.
        forward, backward: time of a micro-batch, in any unit that the instance shares.
        activation: memory of a micro-batch on each of the devices, from its forward to its backward.
    """

    devices: tuple[int, ...]
    forward: float
    backward: float
    activation: float

    @property
    def work(self) -> float:
        """Time of a micro-batch's forward and backward."""
        return self.forward + self.backward


@dataclass(frozen=True)
class Pipeline:
    """A model that is trained with some micro-batches, or one of its copies.

    Attributes:
        stages: in the order of a forward.
    """

    name: str
    n_micro_batches: int
    stages: tuple[Stage, ...]


@dataclass(frozen=True)
class Instance:
    """Pipelines that share devices.

    Attributes:
        memory_caps: the most activations that each device may hold; None: there is no limit.
        transport: how messages travel. Those that overtake arrive when they were sent. Those in order use one
            communicator, which completes them in the order in which a device posted them.

    Raises:
        UsageError: the pipelines cannot be fused.
    """

    n_devices: int
    pipelines: tuple[Pipeline, ...]
    memory_caps: tuple[float, ...] | None = None
    transport: Transport = "overtaking"

    def __post_init__(self) -> None:
        if self.n_devices < 1:
            raise UsageError(f"pipelines cannot run on {self.n_devices} devices", remedy="Give 1 or more.")
        if not self.pipelines:
            raise UsageError("there is no pipeline to schedule", remedy="Name one or more.")
        if self.transport not in TRANSPORTS:
            raise UsageError(
                f"there is no transport {self.transport!r}", remedy=f"Choose from {', '.join(TRANSPORTS)}."
            )
        names = [pipeline.name for pipeline in self.pipelines]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise UsageError(f"two pipelines have the name {repeated[0]!r}", remedy="Give each a name of its own.")
        for pipeline in self.pipelines:
            _check_pipeline(pipeline, self.n_devices)
        if self.n_tasks > MAX_TASKS:
            raise UsageError(f"the pipelines have {self.n_tasks:,} tasks", remedy=f"Give at most {MAX_TASKS:,}.")
        if self.memory_caps is not None:
            self._check_caps(self.memory_caps)

    def _check_caps(self, caps: Sequence[float]) -> None:
        if len(caps) != self.n_devices:
            raise UsageError(f"there are {len(caps)} memory caps for {self.n_devices} devices", remedy="Give one each.")
        for device, (cap, least) in enumerate(zip(caps, self.least_caps, strict=True)):
            if not cap >= least:  # also where the cap is no number
                raise UsageError(
                    f"device {device} may hold {cap:g} of activations, but one micro-batch takes {least:g} there",
                    remedy=f"The least caps with a schedule are {', '.join(f'{x:g}' for x in self.least_caps)}.",
                )

    @cached_property
    def least_caps(self) -> tuple[float, ...]:
        """The least memory of each device with which a schedule exists.

        One micro-batch at a time, through all stages and back, holds the activations of its own pipeline only; and each
        pipeline's micro-batch has to be at all stages at once before its last backward.
        """
        return tuple(
            max((sum(s.activation for s in p.stages if device in s.devices) for p in self.pipelines), default=0.0)
            for device in range(self.n_devices)
        )

    @property
    def n_tasks(self) -> int:
        """Forwards and backwards of all stages."""
        return sum(2 * p.n_micro_batches * len(p.stages) for p in self.pipelines)

    def with_caps(self, caps: float | Sequence[float] | None) -> Instance:
        """Return the same with a memory cap for every device, or the same one for all.

        Raises:
            UsageError: no schedule keeps the caps; the message has the least ones that work.
        """
        if isinstance(caps, int | float):
            caps = (caps,) * self.n_devices
        return replace(self, memory_caps=None if caps is None else tuple(float(cap) for cap in caps))

    def with_micro_batches(self, counts: Sequence[int]) -> Instance:
        """Return the same with other numbers of micro-batches, one for each pipeline."""
        pairs = zip(self.pipelines, counts, strict=True)
        return replace(self, pipelines=tuple(replace(pipeline, n_micro_batches=n) for pipeline, n in pairs))

    def stages_on(self, device: int) -> tuple[tuple[int, int, Stage], ...]:
        """Return pipeline, number and stage of those that compute on a device."""
        return tuple(
            (p, i, stage)
            for p, pipeline in enumerate(self.pipelines)
            for i, stage in enumerate(pipeline.stages)
            if device in stage.devices
        )

    @property
    def shape(self) -> tuple[int, tuple[tuple[int, tuple[tuple[int, ...], ...]], ...]]:
        """Devices, and for each pipeline its micro-batches and the devices of its stages: what orders depend on."""
        return self.n_devices, tuple(
            (p.n_micro_batches, tuple(stage.devices for stage in p.stages)) for p in self.pipelines
        )


def _check_pipeline(pipeline: Pipeline, n_devices: int) -> None:
    name = pipeline.name
    if not pipeline.stages:
        raise UsageError(f"pipeline {name!r} has no stages", remedy="Give one or more.")
    if pipeline.n_micro_batches < 1:
        raise UsageError(f"pipeline {name!r} has {pipeline.n_micro_batches} micro-batches", remedy="Give 1 or more.")
    for i, stage in enumerate(pipeline.stages):
        where = f"stage {i} of pipeline {name!r}"
        if not stage.devices or len(set(stage.devices)) < len(stage.devices):
            raise UsageError(f"{where} is on the devices {stage.devices}", remedy="Give one or more, each once.")
        if outside := [device for device in stage.devices if not 0 <= device < n_devices]:
            raise UsageError(f"{where} is on device {outside[0]}", remedy=f"The devices are 0 to {n_devices - 1}.")
        for what, time in (("forward", stage.forward), ("backward", stage.backward)):
            if not 0 < time < math.inf:
                raise UsageError(f"the {what} of {where} takes {time}", remedy="Give a positive time.")
        if not 0 <= stage.activation < math.inf:
            raise UsageError(f"{where} keeps {stage.activation} of activations", remedy="Give 0 or more.")


# ---------------------------------------------------------------- the usual cases


@dataclass(frozen=True)
class Model:
    """A model to place on a block of devices.

    Attributes:
        n_stages: of one copy.
        n_micro_batches: of one copy.
        forward, backward, activation: of a micro-batch at a stage, for all stages or one number for each.
        width: devices of a stage: its tensor-parallel size in units of the smallest one.
        is_reversed: True if forwards run along decreasing device numbers.
    """

    name: str
    n_stages: int
    n_micro_batches: int
    forward: float | Sequence[float]
    backward: float | Sequence[float]
    activation: float | Sequence[float]
    width: int = 1
    is_reversed: bool = False


def on_block(models: Iterable[Model], n_devices: int | None = None, *, transport: Transport = "overtaking") -> Instance:
    """Place as many copies of each model on a block of devices as it has room for.

    Copies of a model lie side by side, all in its direction. With K copies each, models A and B of N_A and N_B devices
    share a block of K_A N_A = K_B N_B.

    Args:
        n_devices: of the block; None: the smallest that whole copies of every model fill.

    Raises:
        UsageError: copies of a model do not fill the block, or a model is given in a wrong way.
    """
    models = tuple(models)
    for model in models:
        if model.n_stages < 1 or model.width < 1:
            raise UsageError(
                f"model {model.name!r} has {model.n_stages} stages of {model.width} devices", remedy="Give 1 or more."
            )
    if n_devices is None:
        n_devices = math.lcm(*(model.n_stages * model.width for model in models))
    pipelines = []
    for model in models:
        n_own = model.n_stages * model.width
        if n_devices < n_own or n_devices % n_own:
            raise UsageError(
                f"{model.n_stages} stages of model {model.name!r} take {n_own} devices, whose copies cannot "
                f"fill a block of {n_devices}",
                remedy=f"Give a multiple of {math.lcm(*(m.n_stages * m.width for m in models))} devices.",
            )
        pipelines += [_copy_of(model, number, n_devices // n_own) for number in range(n_devices // n_own)]
    return Instance(n_devices, tuple(pipelines), transport=transport)


def _copy_of(model: Model, number: int, n_copies: int) -> Pipeline:
    first = number * model.n_stages * model.width
    places = [tuple(range(first + i * model.width, first + (i + 1) * model.width)) for i in range(model.n_stages)]
    if model.is_reversed:
        places.reverse()
    numbers = [_per_stage(model, what) for what in ("forward", "backward", "activation")]
    stages = tuple(Stage(place, *of_stage) for place, *of_stage in zip(places, *numbers, strict=True))
    return Pipeline(model.name if n_copies == 1 else f"{model.name}.{number}", model.n_micro_batches, stages)


def _per_stage(model: Model, what: str) -> tuple[float, ...]:
    given: float | Sequence[float] = getattr(model, what)
    numbers = (given,) * model.n_stages if isinstance(given, int | float) else tuple(given)
    if len(numbers) != model.n_stages:
        raise UsageError(
            f"model {model.name!r} has {len(numbers)} numbers for {what}, and {model.n_stages} stages",
            remedy="Give one number, or one for each stage.",
        )
    return numbers
