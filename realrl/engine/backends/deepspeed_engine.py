"""DeepSpeed's engine over the ranks of one layout.

DeepSpeed expects its own launcher, and every rank of the run in one engine. A subclass of its accelerator says what
CPUs can do. Functions that take all ranks of the run for the engine's, and that no option changes, are replaced only
while their caller runs.
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from realrl.config.schema import OptimizerConfig
from realrl.engine.backends.base import decays
from realrl.engine.backends.replaced import replaced
from realrl.engine.groups import all_gather_single, reduce_scatter_single
from realrl.engine.parallel import Parallel
from realrl.model.decoder import Block, Decoder
from realrl.plan.memory.buffers import DEEPSPEED_BUCKET

with warnings.catch_warnings():  # the import warns at length of optional parts that it finds or lacks
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    import deepspeed
    from deepspeed.accelerator import get_accelerator, set_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
    from deepspeed.runtime.zero import parameter_offload, partitioned_param_coordinator
    from deepspeed.utils import logger as _deepspeed_logger
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    logging.disable(logging.NOTSET)

__all__ = [
    "LOSS_SCALE_WINDOW",
    "forward",
    "gathered",
    "make_engine",
    "safe_get_full_fp32_param",
    "safe_get_full_optimizer_state",
]

LOSS_SCALE_WINDOW = 1000
_FIRST_LOSS_SCALE_POWER = 16


def make_engine(
    decoder: Decoder,
    parallel: Parallel,
    trained: Mapping[str, nn.Parameter],
    config: OptimizerConfig,
    compute_dtype: torch.dtype,
) -> Any:
    """Make a `deepspeed.DeepSpeedEngine` that calls the function that it is given; see `forward`.

    All ranks of the layout call this together.

    Args:
        decoder: this rank's shard; with stage 3 its parameters are empty afterwards.
        trained: the decoder's parameters with gradient, by name.
        config: rates and decay of the first step; `zero_stage`, `offload`.
    """
    matrices = [p for name, p in trained.items() if decays(name, p)]
    vectors = [p for name, p in trained.items() if not decays(name, p)]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=config.lr, betas=config.betas, eps=config.eps, fused=True
    )
    with (
        _quiet(),
        _local_rank(decoder.device.index or 0),
        # DeepSpeed's own barrier waits for all ranks of the run
        replaced(deepspeed.comm, barrier=lambda *args, **kwargs: parallel.mesh.barrier()),
    ):
        if type(get_accelerator()) is CPU_Accelerator:
            set_accelerator(_Cpu())
        stage = _Stage(decoder)
        if config.zero_stage == 3:
            deepspeed.utils.set_z3_leaf_modules(stage, [Block])
            if decoder.head is not None:  # used outside of its module, when a loss asks for it
                deepspeed.zero.register_external_parameter(stage, decoder.head.weight)
        engine, *_ = deepspeed.initialize(
            model=stage, optimizer=adamw, mpu=_mpu(parallel), config=_settings(config, compute_dtype)
        )
    # the names of torch 2.13; those that DeepSpeed found still exist there, but warn
    backend = deepspeed.comm.comm.cdb
    backend.all_gather_function, backend.reduce_scatter_function = all_gather_single, reduce_scatter_single
    return engine


def forward(engine: Any, compute: Callable[[], torch.Tensor | None]) -> torch.Tensor | None:
    """Compute inside of the engine's forward pass, where its hooks gather parameters."""
    # after the first passes DeepSpeed compares its order of modules with all ranks of the run
    with replaced(partitioned_param_coordinator, assert_ints_same_as_other_ranks=_nothing):
        result: torch.Tensor | None = engine(compute)
    return result


@contextlib.contextmanager
def gathered(engine: Any, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Gather parameters for the block, with stage 3; modules may be called in it outside of a training pass."""
    with (
        deepspeed.zero.GatheredParameters(parameters),
        # a called module would drop its parameters afterwards, and DeepSpeed would count it in a training pass
        replaced(
            engine.optimizer.parameter_offload,
            pre_sub_module_forward_function=parameter_offload.FWD_MODULE_STACK.append,
            post_sub_module_forward_function=_nothing,
        ),
    ):
        yield


class _Stage(nn.Module):
    """The module that DeepSpeed wraps: the whole computation of a micro-batch happens in its forward pass.

    Args:
        decoder: source of the parameters.
    """

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, compute: Callable[[], torch.Tensor | None]) -> torch.Tensor | None:
        return compute()


class _Cpu(CPU_Accelerator):
    """CPUs, on which torch computes in fp16 with or without instructions for it."""

    def is_fp16_supported(self) -> bool:
        return True

    def create_op_builder(self, op_name: str) -> Any:
        """None for collectives in shared memory, whose compilation would take a minute."""
        return None if op_name == "ShareMemCommBuilder" else super().create_op_builder(op_name)


def _settings(config: OptimizerConfig, compute_dtype: torch.dtype) -> dict[str, Any]:
    stage = config.zero_stage
    assert stage is not None
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.clip_grad_norm if stage else 0.0,
        "gradient_allreduce_op": "mean" if stage == 3 else "sum",
        "zero_force_ds_cpu_optimizer": False,
        "communication_data_type": "fp32",
        "bf16": {"enabled": compute_dtype == torch.bfloat16},
        "fp16": {
            "enabled": compute_dtype == torch.float16,
            "initial_scale_power": _FIRST_LOSS_SCALE_POWER,
            "loss_scale_window": LOSS_SCALE_WINDOW,
            "hysteresis": 1,
        },
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": DEEPSPEED_BUCKET,
            "allgather_bucket_size": DEEPSPEED_BUCKET,
            "stage3_param_persistence_threshold": 0,
            **({"offload_optimizer": {"device": "cpu"}} if config.offload else {}),
        },
    }
    if stage > 1 and compute_dtype != torch.float32:
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    return settings


def _mpu(parallel: Parallel) -> Any:
    """The engine's groups in the form of DeepSpeed's `mpu`, which has data- and model-parallel ones only."""
    dp, tp = parallel.dp, parallel.tp
    return SimpleNamespace(
        get_data_parallel_group=lambda: dp.library_handle,
        get_data_parallel_rank=lambda: dp.rank,
        get_data_parallel_world_size=lambda: dp.n_ranks,
        get_model_parallel_group=lambda: tp.library_handle,
        get_model_parallel_rank=lambda: tp.rank,
        get_model_parallel_world_size=lambda: tp.n_ranks,
        get_tensor_model_parallel_group=lambda: tp.library_handle,
        get_tensor_model_parallel_rank=lambda: tp.rank,
        get_tensor_model_parallel_world_size=lambda: tp.n_ranks,
    )


def _nothing(_: Any) -> None:
    """Stand in for a hook or a check."""


@contextlib.contextmanager
def _local_rank(number: int) -> Iterator[None]:
    """Put the device's number into the variable that DeepSpeed's own launcher would set."""
    before = os.environ.get("LOCAL_RANK")
    os.environ["LOCAL_RANK"] = str(number)
    try:
        yield
    finally:
        if before is None:
            del os.environ["LOCAL_RANK"]
        else:
            os.environ["LOCAL_RANK"] = before


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Let DeepSpeed log warnings and errors only."""
    _deepspeed_logger.setLevel(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
