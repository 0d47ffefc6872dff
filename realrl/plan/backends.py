"""Capabilities of each training backend, and the refusal of settings beyond them.

Invariants of `check_backend`:
- it depends on its arguments only, and on nothing that is installed;
- `realrl.engine.backends.make_backend` can build and train every role that it accepts.
"""

from __future__ import annotations

from dataclasses import dataclass

from realrl.errors import ConfigError
from realrl.mesh.device_mesh import ParallelStrategy


@dataclass(frozen=True)
class BackendRules:
    """Capabilities of one backend.

    Attributes:
        implementation: ``module:Class``, imported when a role asks for it: some need optional, heavy packages.
        package: module that must be importable; empty for none.
        extra: extra of realrl that installs the package.
        stages: supported ZeRO stages; the first one is the default.
        precisions: supported precisions of training.
        offloads: True if it can keep the optimizer in host memory.
        has_own_buffers: True if parameters lie in buffers of the backend, and cannot move to other memory.
    """

    implementation: str
    package: str
    extra: str
    stages: tuple[int, ...]
    precisions: tuple[str, ...]
    offloads: bool
    has_own_buffers: bool


BACKENDS = {
    "native": BackendRules(
        implementation="realrl.engine.backends.native:NativeBackend",
        package="",
        extra="",
        stages=(0, 1),
        precisions=("fp32", "bf16"),
        offloads=True,
        has_own_buffers=False,
    ),
    "megatron": BackendRules(
        implementation="realrl.engine.backends.megatron:MegatronBackend",
        package="megatron.core",
        extra="megatron",
        stages=(1,),
        precisions=("fp32", "bf16", "fp16"),
        offloads=False,
        has_own_buffers=True,
    ),
    "deepspeed": BackendRules(
        implementation="realrl.engine.backends.deepspeed:DeepSpeedBackend",
        package="deepspeed",
        extra="deepspeed",
        stages=(1, 0, 2, 3),
        precisions=("fp32", "bf16", "fp16"),
        offloads=True,
        has_own_buffers=True,
    ),
}


@dataclass(frozen=True)
class TrainedRole:
    """A trained role, as far as `check_backend` needs it.

    Attributes:
        backend: one of `BACKENDS`.
        zero_stage: the configured stage; None for the backend's default.
        offload: True if the optimizer stays in host memory.
        precision: fp32, bf16 or fp16.
        strategy: strategy of its home layout.
        has_adapters: True if low-rank adapters are trained in place of the model.
        is_offloaded: True if its parameters go to host memory between calls.
    """

    name: str
    backend: str
    zero_stage: int | None
    offload: bool
    precision: str
    strategy: ParallelStrategy
    has_adapters: bool = False
    is_offloaded: bool = False

    @property
    def stage(self) -> int:
        """The ZeRO stage, configured or default."""
        return zero_stage_of(self.backend, self.zero_stage)

    @property
    def shares_parameters(self) -> bool:
        """True if data-parallel ranks hold only a part of each parameter between calls."""
        return self.stage == 3

    @property
    def has_own_buffers(self) -> bool:
        """True if the backend's buffers hold the parameters, so that they cannot move to other memory."""
        return BACKENDS[self.backend].has_own_buffers


def zero_stage_of(backend: str, zero_stage: int | None) -> int:
    """Return `zero_stage`, or the backend's default where it is None."""
    return BACKENDS[backend].stages[0] if zero_stage is None else zero_stage


def check_backend(role: TrainedRole) -> None:
    """Refuse settings that the role's backend does not support.

    Raises:
        ConfigError: names the role, the rule and a remedy.
    """
    rules, key = BACKENDS[role.backend], f"models.{role.name}"
    if role.stage not in rules.stages:
        raise ConfigError(
            f"{key}.optimizer.zero_stage={role.stage}: backend={role.backend} has "
            f"{'stage' if len(rules.stages) == 1 else 'stages'} {', '.join(map(str, sorted(rules.stages)))}",
            remedy=f"Use one of these, or {key}.backend=deepspeed, which has 0 to 3.",
        )
    if role.precision not in rules.precisions:
        raise ConfigError(
            f"precision={role.precision} needs loss scaling, which {key}.backend={role.backend} does not have",
            remedy=f"Use precision=bf16, or {key}.backend=megatron or deepspeed.",
        )
    if role.offload and not rules.offloads:
        raise ConfigError(
            f"{key}.optimizer.offload=true: backend={role.backend} keeps its optimizer on the device",
            remedy=f"Leave it out, or use {key}.backend=native or deepspeed.",
        )
    if role.is_offloaded and role.has_own_buffers:
        raise ConfigError(
            f"role '{role.name}' is offloaded between calls, but {key}.backend={role.backend} keeps parameters in "
            "buffers of its own, which must stay",
            remedy=f"Take '{role.name}' out of allocation.offload, or use {key}.backend=native.",
        )
    if role.backend != "native" and role.strategy.vpp > 1:
        raise ConfigError(
            f"role '{role.name}' is trained on {role.strategy}, but {key}.backend={role.backend} has no virtual stages",
            remedy=f"Leave out virtual_stages of its train_step, or use {key}.backend=native.",
        )
    if role.backend == "deepspeed":
        _check_deepspeed(role, key)


def _check_deepspeed(role: TrainedRole, key: str) -> None:
    strategy, stage = role.strategy, role.stage
    if stage == 3 and strategy.pp > 1:
        raise ConfigError(
            f"{key}.optimizer.zero_stage=3 shares out parameters, which a pipeline ({strategy}) has cut already",
            remedy="Use zero_stage=2, or a strategy with pp=1.",
        )
    if stage == 3 and role.has_adapters:
        raise ConfigError(
            f"{key}.optimizer.zero_stage=3 cannot train adapters ({key}.lora.rank)",
            remedy="Use zero_stage=2: the frozen model takes no optimizer state anyway.",
        )
    if stage == 0 and role.precision != "fp32":
        raise ConfigError(
            f"{key}.backend=deepspeed trains in {role.precision} with ZeRO only, not with zero_stage=0",
            remedy="Use zero_stage=1, or precision=fp32.",
        )
    if stage == 0 and role.offload:
        raise ConfigError(
            f"{key}.optimizer.offload=true: deepspeed offloads with ZeRO only, not with zero_stage=0",
            remedy="Use zero_stage=1.",
        )
    if role.has_adapters and role.precision != "fp32":
        raise ConfigError(
            f"{key}.lora.rank: adapters are float32, but deepspeed would convert them to {role.precision}",
            remedy=f"Use precision=fp32, or {key}.backend=native or megatron.",
        )
    if role.precision == "fp16" and strategy.pp > 1:
        raise ConfigError(
            f"precision=fp16: {key}.backend=deepspeed scales the loss on one stage only, not along {strategy}",
            remedy=f"Use precision=bf16, a strategy with pp=1, or {key}.backend=megatron.",
        )
