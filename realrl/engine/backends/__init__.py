"""Training backends: what turns the gradients of a role's decoder into new parameters."""

from __future__ import annotations

from collections.abc import Callable

import torch

from realrl.config.schema import OptimizerConfig
from realrl.engine.backends.base import BackendName, OptimizerState, TrainingBackend
from realrl.engine.parallel import Parallel
from realrl.experiment.loading import load_object
from realrl.model.decoder import Decoder
from realrl.plan.backends import zero_stage_of

__all__ = ["BackendName", "OptimizerState", "TrainingBackend", "make_backend"]

# imported when a role asks for one: the packages of megatron and deepspeed are optional, and heavy
_CLASSES: dict[BackendName, str] = {
    "native": "realrl.engine.backends.native:NativeBackend",
    "megatron": "realrl.engine.backends.megatron:MegatronBackend",
    "deepspeed": "realrl.engine.backends.deepspeed:DeepSpeedBackend",
}


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
    backend: Callable[..., TrainingBackend] = load_object(_CLASSES[name])
    return backend(decoder, parallel, config, n_total, compute_dtype)
