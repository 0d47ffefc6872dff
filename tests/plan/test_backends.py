"""Abilities of each training backend."""

from __future__ import annotations

from dataclasses import replace

import pytest

from realrl.errors import ConfigError
from realrl.mesh.device_mesh import ParallelStrategy
from realrl.plan.backends import BACKENDS, TrainedRole, check_backend, zero_stage_of

ROLE = TrainedRole("actor", "native", None, offload=False, precision="fp32", strategy=ParallelStrategy(2))
DEEPSPEED = replace(ROLE, backend="deepspeed")
PIPELINE = ParallelStrategy(1, 1, 2)


def test_the_stage_that_nobody_asks_for() -> None:
    assert [zero_stage_of(name, None) for name in BACKENDS] == [0, 1, 1]
    assert zero_stage_of("deepspeed", 0) == 0


@pytest.mark.parametrize(
    "role",
    [
        ROLE,
        replace(ROLE, zero_stage=1, offload=True, precision="bf16", strategy=PIPELINE, is_offloaded=True),
        replace(ROLE, backend="megatron", zero_stage=1, precision="fp16", strategy=PIPELINE, has_adapters=True),
        *(replace(DEEPSPEED, zero_stage=stage) for stage in range(4)),
        replace(DEEPSPEED, zero_stage=3, offload=True, precision="fp16"),
        replace(DEEPSPEED, zero_stage=2, strategy=PIPELINE, precision="bf16"),
        replace(DEEPSPEED, zero_stage=2, has_adapters=True),
        replace(ROLE, strategy=replace(PIPELINE, vpp=2), has_adapters=True),
    ],
)
def test_what_is_accepted(role: TrainedRole) -> None:
    check_backend(role)


@pytest.mark.parametrize(
    ("role", "message", "remedy"),
    [
        (
            replace(ROLE, zero_stage=2),
            "models.actor.optimizer.zero_stage=2: backend=native has stages 0, 1",
            "deepspeed",
        ),
        (replace(ROLE, backend="megatron", zero_stage=0), "zero_stage=0: backend=megatron has stage 1", "Use one"),
        (replace(ROLE, precision="fp16"), "precision=fp16 needs loss scaling", "bf16"),
        (
            replace(ROLE, backend="megatron", offload=True),
            "backend=megatron keeps its optimizer on the device",
            "native",
        ),
        (replace(DEEPSPEED, is_offloaded=True), "role 'actor' is offloaded between calls", "allocation.offload"),
        (replace(DEEPSPEED, zero_stage=3, strategy=PIPELINE), "zero_stage=3 shares out parameters", "zero_stage=2"),
        (replace(DEEPSPEED, zero_stage=3, has_adapters=True), "zero_stage=3 cannot train adapters", "zero_stage=2"),
        (replace(DEEPSPEED, zero_stage=0, precision="bf16"), "trains in bf16 with ZeRO only", "zero_stage=1"),
        (replace(DEEPSPEED, zero_stage=0, offload=True), "deepspeed offloads with ZeRO only", "zero_stage=1"),
        (replace(DEEPSPEED, has_adapters=True, precision="bf16"), "adapters are float32", "precision=fp32"),
        (replace(DEEPSPEED, precision="fp16", strategy=PIPELINE), "scales the loss on one stage only", "megatron"),
        *(
            (
                replace(ROLE, backend=backend, strategy=replace(PIPELINE, vpp=2)),
                f"role 'actor' is trained on d1t1p2v2, but models.actor.backend={backend} has no virtual stages",
                "backend=native",
            )
            for backend in ("megatron", "deepspeed")
        ),
    ],
)
def test_what_is_refused(role: TrainedRole, message: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_backend(role)
    assert message in refused.value.message
    assert remedy in str(refused.value.remedy)
