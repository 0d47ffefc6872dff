"""Training backends, which turn the gradients of a role's decoder into new parameters."""

from __future__ import annotations

from collections.abc import Callable

import torch

from realrl.config.schema import BackendName, OptimizerConfig
from realrl.engine.backends.base import OptimizerState, TrainingBackend
from realrl.engine.parallel import Parallel
from realrl.experiment.loading import load_object
from realrl.model.decoder import Decoder
from realrl.plan.backends import BACKENDS, zero_stage_of

__all__ = ["OptimizerState", "TrainingBackend", "make_backend"]


def make_backend(
    name: BackendName,
    decoder: Decoder,
    parallel: Parallel,
    config: OptimizerConfig,
    *,
    n_total: int,
    compute_dtype: torch.dtype,
) -> TrainingBackend:
    """Make the backend of a trained decoder; it takes the decoder over and converts it to `compute_dtype`.

    All ranks of the layout call this together.

    Args:
        parallel: this rank's place.
        n_total: number of optimizer steps of the whole run; may be set later, before the first step.

    Raises:
        ConfigError: the backend's package is not installed.
    """
    config = config.model_copy(update={"zero_stage": zero_stage_of(name, config.zero_stage)})
    backend: Callable[..., TrainingBackend] = load_object(BACKENDS[name].implementation)
    return backend(decoder, parallel, config, n_total, compute_dtype)
