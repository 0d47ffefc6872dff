"""The native backend: AdamW over master parameters, whole or sharded over data-parallel ranks (ZeRO-1).

When sharded, every rank updates its slice of each parameter and the ranks gather the result (Rajbhandari et al. 2020,
stage 1). Gradients are all-reduced either way, so that both give the same numbers, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from realrl.config.schema import OptimizerConfig
from realrl.engine.backends.adamw import AdamW
from realrl.engine.backends.base import (
    MOMENTS,
    Keep,
    OptimizerState,
    check_parameters,
    decays,
    keep_itself,
    learning_rate,
    master_of,
)
from realrl.engine.backends.masters import Masters, Room
from realrl.engine.groups import ALONE
from realrl.engine.parallel import Parallel
from realrl.engine.train.gradients import reduce_gradients
from realrl.engine.train.pipeline import propagate
from realrl.engine.train.precision import TrainedParameters
from realrl.model.decoder import Decoder


class NativeBackend:
    """AdamW (Loshchilov and Hutter 2019); weight decay on matrices only, not on norms and biases.

    Args:
        decoder: this rank's shard, which is converted to `compute_dtype`.
        parallel: this rank's place.
        config: rates, decay, clipping, schedule; `zero_stage` 0 or 1, `offload`.
        n_total: number of optimizer steps of the whole run; may be set later, before the first step.
        compute_dtype: dtype of the decoder; masters, moments and gradients are float32.
    """

    loss_factor = 1.0
    loss_scale = None
    overflowed = False
    needs_equal_passes = False

    def __init__(
        self, decoder: Decoder, parallel: Parallel, config: OptimizerConfig, n_total: int, compute_dtype: torch.dtype
    ) -> None:
        self.config = config
        self.n_total = n_total
        self.n_taken = 0
        self._decoder = decoder
        self._parallel = parallel
        self._trained = TrainedParameters(decoder, compute_dtype)
        self._masters = Masters(self._trained, parallel.dp if config.zero_stage else ALONE, on_host=config.offload)
        self._masters.attach()
        self._n_stepped = 0
        self._grad_norm = 0.0
        groups: dict[bool, list[torch.Tensor]] = {True: [], False: []}
        named = zip(self._trained.names, self._trained.parameters, self._masters.tensors, strict=True)
        for name, parameter, master in named:
            if master.numel():
                groups[decays(name, parameter)].append(master)
        self._adamw = AdamW([(groups[True], config.weight_decay), (groups[False], 0.0)], config)
        self._masters.detach()

    @property
    def lr(self) -> float:
        return learning_rate(self.config, self.n_taken, self.n_total)

    def run(self, compute: Callable[[], torch.Tensor | None]) -> torch.Tensor | None:
        return compute()

    def backward(self, output: torch.Tensor | None, gradient: torch.Tensor | None, is_last: bool) -> None:
        propagate(output, gradient, is_last)

    def gradients(self) -> dict[str, torch.Tensor]:
        """The float32 gradients by parameter name; complete after `reduce`."""
        return dict(zip(self._trained.names, self._trained.gradients(), strict=True))

    def reduce(self) -> float:
        """Complete the gradients over all ranks; returns their global norm."""
        self._grad_norm = reduce_gradients(self._decoder, self.gradients(), self._parallel)
        return self._grad_norm

    @torch.no_grad()
    def step(self) -> None:
        """Clip the gradients, update the masters and publish them, forget the gradients."""
        self._masters.attach()
        slices = self._masters.take_gradients()
        coefficient = self.config.clip_grad_norm / (self._grad_norm + 1e-6)
        if coefficient < 1.0:
            torch._foreach_mul_(slices, coefficient)
        self._adamw.step(self.lr)
        self._n_stepped += 1
        self._masters.publish()
        self._masters.detach()
        self.skip()

    def skip(self) -> None:
        """Forget the gradients and advance the schedule; moments and parameters stay."""
        self.n_taken += 1
        self._trained.clear_gradients()

    def whole_parameters(self, names: Collection[str] | None) -> AbstractContextManager[None]:
        """Do nothing: parameters are whole at all times."""
        return nullcontext()

    def move_parameters(self, values: Iterable[tuple[str, torch.Tensor]], eta: float) -> None:
        """Move the masters, and publish them."""
        self._masters.move(values, eta)

    # ------------------------------------------------------------ state

    def state_dict(self, keep: Keep | None = None) -> OptimizerState:
        """The canonical form; the ranks that share the state gather it, bucket by bucket."""
        keep = keep or keep_itself
        self._masters.attach()
        parameters: dict[str, dict[str, Any]] = {name: {"step": self._n_stepped} for name in self._trained.names}
        room = Room()
        for key, tensors in self._state_tensors():
            wholes = self._masters.whole(tensors, range(len(self._masters.tensors)), room)
            for name in self._trained.names:  # a variable of the loop would keep a tensor while the next one is made
                parameters[name][key] = keep(f"{name}/{key}", next(wholes).detach())
        self._masters.detach()
        return {"n_taken": self.n_taken, "n_total": self.n_total, "parameters": parameters}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where `state_dict` of this or another backend was taken."""
        parameters, trained = state["parameters"], self._trained
        check_parameters(parameters, {n: p.shape for n, p in zip(trained.names, trained.parameters, strict=True)})
        masters = {} if trained.is_in_saved_model else {name: master_of(parameters, name) for name in trained.names}
        self._masters.attach()
        for name, p, tensor in zip(trained.names, trained.parameters, self._masters.tensors, strict=True):
            tensor.copy_(self._masters.part_of(masters.get(name, p)))
            stored = parameters[name]
            self._n_stepped = int(stored["step"])
            if tensor.numel():
                moments = {k: self._masters.part_of(stored[k]).to(tensor.device, copy=True) for k in MOMENTS}
                self._adamw.restore(tensor, self._n_stepped, moments)
        self.n_taken, self.n_total = int(state["n_taken"]), int(state["n_total"])
        if masters:
            self._masters.publish()
        self._masters.detach()

    def _state_tensors(self) -> Iterator[tuple[str, Iterable[torch.Tensor]]]:
        """Yield (key, this rank's slices in the order of the parameters) for each kind of tensor in the state."""
        tensors = self._masters.tensors
        for key in MOMENTS:
            yield key, (self._adamw.moment_of(t, key) for t in tensors)
        if not self._trained.is_in_saved_model:
            yield "master", tensors
