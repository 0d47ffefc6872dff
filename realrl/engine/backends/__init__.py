"""Training backends: what turns the gradients of a role's decoder into new parameters."""

from __future__ import annotations

import torch

from realrl.config.schema import OptimizerConfig
from realrl.engine.backends.base import BackendName, OptimizerState, TrainingBackend
from realrl.engine.parallel import Parallel
from realrl.model.decoder import Decoder
from realrl.plan.backends import zero_stage_of

__all__ = ["BackendName", "OptimizerState", "TrainingBackend", "make_backend"]


def make_backend(
    name: BackendName,
    decoder: Decoder,
    parallel: Parallel,
    config: OptimizerConfig,
    *,
    n_total: int,
    compute_dtype: torch.dtype,
) -> TrainingBackend:
    """The backend of a trained decoder, which it takes over and converts to `compute_dtype`.

    All ranks of the layout call this together.

    Args:
        parallel: this rank's place.
        n_total: optimizer steps of the whole run; may be set later, before the first step.

    Raises:
        ConfigError: the backend's package is not installed.
    """
    config = config.model_copy(update={"zero_stage": zero_stage_of(name, config.zero_stage)})
    if name == "megatron":
        from realrl.engine.backends.megatron import MegatronBackend

        return MegatronBackend(decoder, parallel, config, n_total, compute_dtype)
    if name == "deepspeed":
        from realrl.engine.backends.deepspeed import DeepSpeedBackend

        return DeepSpeedBackend(decoder, parallel, config, n_total, compute_dtype)
    from realrl.engine.backends.native import NativeBackend

    return NativeBackend(decoder, parallel, config, n_total, compute_dtype)
