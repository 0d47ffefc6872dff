"""The interface of training backends, and the one form in which each gives its optimizer's state.

    forward, backward of each micro-batch ──► reduce ──► step or skip
                 └── run, backward ──┘         gradients complete, their norm

A backend keeps the optimizer's state as it likes: whole, sharded over data-parallel ranks, in host memory. It gives and
takes the state in the canonical form, `OptimizerState`, which depends on neither backend nor data-parallel size:

    n_taken, n_total            optimizer steps that the schedule has seen, and where it ends
    loss_scale                  in fp16 only: scale, and growth_tracker, the steps since it last changed
    parameters                  name in the whole model -> exp_avg, exp_avg_sq, step and, unless the saved model has it,
                                master: float32 tensors of this rank's (tp, pp) shard, whole over data-parallel ranks
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from realrl.config.schema import OptimizerConfig

OptimizerState = dict[str, Any]
"""The canonical form; see the module."""

Keep = Callable[[str, torch.Tensor], torch.Tensor]
"""``keep(name, tensor)``: the tensor that a state holds in the place of one that the optimizer may change or drop."""

MOMENTS = ("exp_avg", "exp_avg_sq")


class TrainingBackend(Protocol):
    """The optimizer of one role's decoder; all ranks of the role's layout call the methods together.

    Attributes:
        n_taken: number of minibatches that the schedule has seen, skipped ones included.
        n_total: number of optimizer steps of the whole run.
        overflowed: True if the last gradient was beyond the range of its dtype, so that the step was left out.
    """

    n_taken: int
    n_total: int
    overflowed: bool

    @property
    def lr(self) -> float:
        """The rate that the next step uses."""

    @property
    def loss_factor(self) -> float:
        """The factor of a minibatch's loss before its backward pass."""

    @property
    def loss_scale(self) -> float | None:
        """The factor that keeps small fp16 gradients above zero; None where nothing is scaled."""

    def run(self, compute: Callable[[], torch.Tensor | None]) -> torch.Tensor | None:
        """Call `compute`, one micro-batch through this rank's layers, with gradient or without."""

    def backward(self, output: torch.Tensor | None, gradient: torch.Tensor | None, is_last: bool) -> None:
        """Add one micro-batch's gradients to those of the minibatch.

        Args:
            output: result of `run`; None or without gradient where nothing depends on the parameters.
            gradient: gradient of the output; None for a loss.
            is_last: True if no other backward pass of this minibatch follows on this rank.
        """

    def reduce(self) -> float:
        """Complete the gradients over all ranks; returns their global norm, equal on all of them."""

    def step(self) -> None:
        """Clip the gradients, update and publish the parameters, forget the gradients, advance the schedule.

        Parameters and moments stay if the gradient overflowed.
        """

    def skip(self) -> None:
        """Forget the gradients and advance the schedule; parameters and moments stay."""

    @property
    def needs_equal_passes(self) -> bool:
        """True if all data-parallel ranks must compute equally many micro-batches, because they meet in each."""

    def whole_parameters(self, names: Collection[str] | None) -> AbstractContextManager[None]:
        """Gather the named parameters, or all, for the block, where the backend shards them."""

    def move_parameters(self, values: Iterable[tuple[str, torch.Tensor]], eta: float) -> None:
        """Set trained parameters to ``eta * value + (1 - eta) * parameter``, masters included; moments stay.

        Args:
            values: (name, value), each in the shape of this rank's (tp, pp) shard and equal on data-parallel ranks.
                Each is used before the next is asked for.
            eta: above 0, up to 1.
        """

    def state_dict(self, keep: Keep | None = None) -> OptimizerState:
        """The optimizer's state in the canonical form.

        Args:
            keep: called with "parameter/key" and each whole tensor as soon as it is gathered, so that a copy in host
                memory may take its place before the next bucket is gathered; without it the state holds the tensors.
        """

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where `state_dict` of this or another backend was taken.

        Raises:
            KeyError: the state lacks a parameter, or its master: it comes from another model or precision.
            ValueError: the state has a parameter that is not trained here, or a shape does not fit.
        """


def n_warmup_steps(config: OptimizerConfig, n_total: int) -> int:
    """Number of optimizer steps before the learning rate is at its peak."""
    return math.ceil(config.warmup_fraction * n_total)


def learning_rate(config: OptimizerConfig, n_taken: int, n_total: int) -> float:
    """Return the rate of the optimizer step that follows `n_taken` earlier ones.

    The rate rises linearly over ceil(warmup_fraction * n_total) steps, and is above zero in the first. Then it follows
    the schedule: one that decays is exactly at ``lr * min_lr_fraction`` after `n_total` steps, and stays there.
    """
    n_warmup = n_warmup_steps(config, n_total)
    if n_taken < n_warmup:
        return config.lr * (n_taken + 1) / n_warmup
    if config.schedule == "constant":
        return config.lr
    progress = min(1.0, (n_taken - n_warmup) / max(1, n_total - n_warmup))
    decayed = 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_fraction + (1.0 - config.min_lr_fraction) * decayed)


def decays(name: str, parameter: torch.Tensor) -> bool:
    """True if weight decay applies: to matrices, not to biases (those of experts are one matrix) and norms' weights."""
    return parameter.dim() >= 2 and not name.endswith("bias")


def move(tensor: torch.Tensor, value: torch.Tensor, eta: float) -> None:
    """Set `tensor` in place to ``eta * value + (1 - eta) * tensor``."""
    value = value.to(tensor.device, tensor.dtype)
    if eta == 1.0:
        tensor.copy_(value)
    else:
        tensor.lerp_(value, eta)


def keep_itself(_: str, tensor: torch.Tensor) -> torch.Tensor:
    """The `Keep` of a state that is used before the next step."""
    return tensor


def check_parameters(parameters: Mapping[str, Mapping[str, Any]], shapes: Mapping[str, torch.Size]) -> None:
    """Refuse a state that does not fit the trained parameters, before any of them changes.

    Args:
        parameters: parameters of a canonical state.
        shapes: shapes of the trained parameters, by name.

    Raises:
        KeyError, ValueError: see `TrainingBackend.load_state_dict`.
    """
    unknown = sorted(parameters.keys() - shapes.keys())
    if unknown:
        raise ValueError(f"it holds {len(unknown)} parameters that are not trained here, the first is {unknown[0]!r}")
    for name in shapes:
        if name not in parameters:
            raise KeyError(f"{name} is not in it")
    for name, shape in shapes.items():
        stored = parameters[name]["exp_avg"].shape
        if stored != shape:
            raise ValueError(f"its {name!r} is {list(stored)}, here it is {list(shape)}")


def master_of(parameters: Mapping[str, Mapping[str, Any]], name: str) -> torch.Tensor:
    """The master weight of a parameter.

    Raises:
        KeyError: there is none, because the state comes from a run in float32 and without adapters.
    """
    master = parameters[name].get("master")
    if master is None:
        raise KeyError(f"{name}: no master weight, which a run in float32 does not keep")
    assert isinstance(master, torch.Tensor)
    return master
