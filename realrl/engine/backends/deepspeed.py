"""The deepspeed backend: ZeRO stages 0 to 3 of DeepSpeed around our module.

    stage 1     optimizer state and float32 masters are sharded over data-parallel ranks
    stage 2     gradients too: each is reduced to its owner as soon as a backward pass has made it
    stage 3     parameters too: a block's are gathered when a forward or backward pass comes to it, and dropped after it

Where other ranks of the layout hold copies of parameters (tensor parallelism, or two stages that share an embedding),
and in pipelines, gradients stay whole until the last micro-batch: those of copies are added up first.

DeepSpeed's own global norm counts each copy of a parameter that several tensor or pipeline ranks hold, so the norm that
it clips by is computed here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from realrl.config.schema import OptimizerConfig
from realrl.engine.backends.base import (
    MOMENTS,
    Keep,
    OptimizerState,
    check_parameters,
    keep_itself,
    learning_rate,
    master_of,
    move,
)
from realrl.engine.backends.deepspeed_engine import (
    LOSS_SCALE_WINDOW,
    forward,
    gathered,
    make_engine,
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
)
from realrl.engine.groups import Communicator
from realrl.engine.parallel import Parallel
from realrl.engine.tensor_parallel import sync_partial_gradients
from realrl.engine.train.gradients import TIED, is_counted_here, is_tied
from realrl.engine.train.pipeline import propagate
from realrl.engine.train.precision import TrainedParameters
from realrl.model.decoder import Decoder


class DeepSpeedBackend:
    """`TrainingBackend` with a DeepSpeed engine.

    Args:
        decoder: this rank's shard; with stage 3 its parameters are empty between calls.
        parallel: this rank's place, in groups that have handles for libraries.
        config: rates, decay, clipping, schedule; `zero_stage` 0 to 3, `offload`.
        n_total: number of optimizer steps of the whole run; may be set later, before the first step.
        compute_dtype: dtype of the decoder.
    """

    def __init__(
        self, decoder: Decoder, parallel: Parallel, config: OptimizerConfig, n_total: int, compute_dtype: torch.dtype
    ) -> None:
        self.config = config
        self.n_total = n_total
        self.n_taken = 0
        assert config.zero_stage is not None
        self.stage = config.zero_stage
        self.overflowed = False
        self._decoder = decoder
        self._parallel = parallel
        self._trained = trained = TrainedParameters(decoder, compute_dtype)
        self._named = dict(zip(trained.names, trained.parameters, strict=True))
        self._shapes = {name: p.shape for name, p in self._named.items()}
        self._counted = {id(p): is_counted_here(decoder, name) for name, p in self._named.items()}
        self._sums_copies = parallel.tp.n_ranks > 1 or (parallel.tied.n_ranks > 1 and is_tied(decoder))
        self._coalesces = self.stage > 0 and (self._sums_copies or parallel.pp.n_ranks > 1)
        self._pass: ExitStack | None = None  # open from the first backward pass to `reduce`
        self._norm = torch.zeros((), device=decoder.device)
        self._n_stepped = 0
        values = {name: p.data for name, p in self._named.items()}
        trained.convert(accumulate=False)
        self._engine = make_engine(decoder, parallel, self._named, config, compute_dtype)
        self._zero = self._engine.optimizer
        # their own results would count copies of a parameter more than once
        self._zero.scaled_global_norm = lambda norm_type=2: self._norm
        self._zero._get_norm_groups = lambda: [self._norm]
        self._make_moments()
        if not trained.is_in_saved_model:
            self.move_parameters(values.items(), 1.0)

    # ------------------------------------------------------------ a minibatch

    @property
    def lr(self) -> float:
        return learning_rate(self.config, self.n_taken, self.n_total)

    @property
    def loss_scale(self) -> float | None:
        """DeepSpeed's loss scale in fp16; None otherwise."""
        return float(self._zero.loss_scale) if self._trained.compute_dtype == torch.float16 else None

    @property
    def loss_factor(self) -> float:
        """The loss scale; with stage 3, which averages gradients, times the number of ranks."""
        return (self.loss_scale or 1.0) * (self._parallel.dp.n_ranks if self.stage == 3 else 1)

    def run(self, compute: Callable[[], torch.Tensor | None]) -> torch.Tensor | None:
        """Compute inside of the engine's forward pass if its hooks are needed."""
        if self.stage == 0 or not torch.is_grad_enabled():
            return compute()
        return forward(self._engine, compute)

    def backward(self, output: torch.Tensor | None, gradient: torch.Tensor | None, is_last: bool) -> None:
        """Add gradients to those of the minibatch, and reduce complete ones unless that must wait for `reduce`."""
        if self._pass is None:
            self._pass = ExitStack()
            if self._coalesces:
                self._pass.enter_context(self._engine.coalesce_grad_reduction())
        if self.stage > 0 and not self._coalesces:
            self._engine.set_gradient_accumulation_boundary(is_last)
        self._engine._manual_backward_expected = True  # the loss was multiplied by the loss scale: `loss_factor`
        propagate(output, gradient, is_last)

    def reduce(self) -> float:
        """Complete this rank's part of the gradients; returns the global norm before they are clipped."""
        if self._sums_copies:
            self._sum_copies()
        if self._pass is not None:
            self._pass.close()
            self._pass = None
        if self.stage == 0:
            self._engine.set_gradient_accumulation_boundary(True)
            self._engine.allreduce_gradients()
        norm = self._global_norm()
        self._norm = torch.tensor(norm, device=self._decoder.device)
        self.overflowed = not math.isfinite(norm)
        return norm / (self.loss_scale or 1.0)

    @torch.no_grad()
    def step(self) -> None:
        """Clip, update and publish, unless the gradient overflowed."""
        for group in self._zero.param_groups:
            group["lr"] = self.lr
        if self.stage == 0:
            coefficient = self.config.clip_grad_norm / (float(self._norm) + 1e-6)
            if coefficient < 1.0:
                torch._foreach_mul_([p.grad for p in self._named.values()], coefficient)
        self._engine.set_gradient_accumulation_boundary(True)
        self._engine.step()
        self.overflowed = self.stage > 0 and bool(self._zero.overflow)
        self._n_stepped += not self.overflowed
        self.n_taken += 1
        if self.overflowed and self.stage < 3:
            self._drop_reduced()

    def skip(self) -> None:
        """Forget the gradients and advance the schedule."""
        self.n_taken += 1
        zero = self._zero
        zero.zero_grad(set_to_none=True)
        if self.stage == 3:
            zero._pre_step()
            zero._partition_all_parameters()
            zero._overflow_clean_up(1.0)
        elif self.stage > 0:
            zero.micro_step_id = -1
            zero._release_preflattened_grad_buffers()
            if zero.cpu_offload:
                zero.reset_cpu_buffers()
            self._drop_reduced()

    def _drop_reduced(self) -> None:
        """Forget reduced gradients, or an offloaded optimizer would add the next minibatch's to them."""
        zero = self._zero
        zero.averaged_gradients = dict.fromkeys(zero.averaged_gradients)
        zero.all_grad_tensors = dict.fromkeys(zero.all_grad_tensors)

    @property
    def needs_equal_passes(self) -> bool:
        """True if a pass gathers parameters or reduces gradients."""
        return self.stage == 3 or (self.stage == 2 and not self._coalesces)

    @contextmanager
    def whole_parameters(self, names: Collection[str] | None = None) -> Iterator[None]:
        """Gather parameters for the block, with stage 3, unless they are there already."""
        wanted = [p for name, p in self._named.items() if names is None or name in names]
        if self.stage < 3 or all(p.numel() for p in wanted):
            yield
            return
        with gathered(self._engine, wanted):
            yield

    @torch.no_grad()
    def move_parameters(self, values: Iterable[tuple[str, torch.Tensor]], eta: float) -> None:
        """Move this rank's part of the float32 masters, and publish them; with stage 0, the parameters."""
        zero = self._zero
        for name, value in values:
            p = self._named[name]
            if self.stage == 0:
                move(p.data, value, eta)
            elif self.stage == 3:
                part, _ = zero._get_fp32_opt_state_partition(p, release_swap_buffers=True)
                mine = _part_of(value, part.numel(), self._parallel.dp)
                move(part[: mine.numel()], mine, eta)
            elif p._hp_mapping is not None:
                place = p._hp_mapping.lp_fragment_address
                move(p._hp_mapping.get_hp_fragment().data, value.reshape(-1).narrow(0, place.start, place.numel), eta)
        if self.stage == 3:
            for i in range(len(zero.fp16_groups)):
                zero._reassign_or_swap_out_partitioned_parameters(i)
        elif self.stage > 0:
            for p in self._named.values():
                p.data.copy_(safe_get_full_fp32_param(p))

    def _sum_copies(self) -> None:
        """Add up each parameter's gradient over the ranks that hold copies."""
        for p in self._named.values():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        gradients = {name: p.grad.float() for name, p in self._named.items()}
        sync_partial_gradients(self._decoder, self._parallel.tp, gradients)
        if TIED in gradients and is_tied(self._decoder):
            self._parallel.tied.all_reduce_(gradients[TIED])
        for name, p in self._named.items():
            if gradients[name] is not p.grad:
                p.grad.copy_(gradients[name])

    def _global_norm(self) -> float:
        """Compute sqrt(sum g^2) over the whole model, of gradients multiplied by the loss scale."""
        square = torch.zeros(1, dtype=torch.float64, device=self._decoder.device)
        for norm in self._norms_here():
            square += norm.to(square.device).double().square()
        groups: list[Communicator] = [self._parallel.tp, self._parallel.pp]
        if self.stage > 0:
            groups.append(self._parallel.dp)
        for group in groups:
            group.all_reduce_(square)
        return math.sqrt(square.item()) if math.isfinite(square.item()) else float("inf")

    def _norms_here(self) -> Iterator[torch.Tensor]:
        """Yield the norm of this rank's part of each gradient that counts here."""
        zero = self._zero
        if self.stage == 0:
            yield from (torch.linalg.vector_norm(p.grad) for p in self._named.values() if self._counted[id(p)])
            return
        groups = zero.fp16_groups if self.stage == 3 else zero.params_in_partition
        if self.config.offload:
            yield from (
                torch.as_tensor(zero.norm_for_param_grads[zero.get_param_id(p)])
                for group in groups
                for p in group
                if self._counted[id(p)] and zero.get_param_id(p) in zero.norm_for_param_grads
            )
            return
        for i, group in enumerate(groups):
            parts = [g for g in zero.averaged_gradients[i] if not getattr(g, "_zero_padding", False)]
            for p, part in zip(group, parts, strict=False):  # the filling of the last partition has no parameter
                if self._counted[id(p)]:
                    yield torch.linalg.vector_norm(part.float())

    # ------------------------------------------------------------ state

    def state_dict(self, keep: Keep | None = None) -> OptimizerState:
        """The canonical form; data-parallel ranks gather it parameter by parameter."""
        keep = keep or keep_itself
        parameters: dict[str, dict[str, Any]] = {}
        for name, p in self._named.items():
            stored: dict[str, Any] = {"step": self._n_stepped}
            for key in MOMENTS if self._trained.is_in_saved_model else (*MOMENTS, "master"):
                stored[key] = keep(f"{name}/{key}", self._whole(p, key))
            parameters[name] = stored
        result: OptimizerState = {"n_taken": self.n_taken, "n_total": self.n_total, "parameters": parameters}
        if self.loss_scale is not None:
            scaler = self._zero.loss_scaler
            result["loss_scale"] = {
                "scale": float(scaler.cur_scale),
                "growth_tracker": _growth_tracker(scaler.cur_iter - scaler.last_overflow_iter - 1),
            }
        return result

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where `state_dict` of this or another backend was taken."""
        parameters = state["parameters"]
        check_parameters(parameters, self._shapes)
        if self._trained.is_in_saved_model:
            if self.stage in (1, 2):
                self._zero.refresh_fp32_params()
        else:
            self.move_parameters([(name, master_of(parameters, name)) for name in self._named], 1.0)
        self._n_stepped = max(int(stored["step"]) for stored in parameters.values())
        self._make_moments()
        for name, p in self._named.items():
            for key in MOMENTS:
                self._set_moment(p, key, parameters[name][key])
        self.n_taken, self.n_total = int(state["n_taken"]), int(state["n_total"])
        scale = state.get("loss_scale")
        if self.loss_scale is not None and scale is not None:
            scaler = self._zero.loss_scaler
            scaler.cur_scale = float(scale["scale"])
            scaler.last_overflow_iter = scaler.cur_iter - int(scale["growth_tracker"]) - 1

    def _whole(self, p: nn.Parameter, key: str) -> torch.Tensor:
        """Gather a whole moment or master, which no variable keeps while the next one is gathered."""
        if self.stage == 0:
            return p.detach() if key == "master" else self._zero.state[p][key]
        return safe_get_full_fp32_param(p) if key == "master" else safe_get_full_optimizer_state(p, key)

    def _set_moment(self, p: nn.Parameter, key: str, value: torch.Tensor) -> None:
        if self.stage == 0:
            self._zero.state[p][key].copy_(value)
        elif self.stage == 3:
            part, _ = self._zero._get_fp32_opt_state_partition(p, release_swap_buffers=True, optim_state_key=key)
            mine = _part_of(value, part.numel(), self._parallel.dp)
            part[: mine.numel()].copy_(mine)
        else:
            p.set_full_hp_param(value, key)

    def _make_moments(self) -> None:
        """Make moments of zeros in the inner optimizer for every tensor that it updates.

        If the first step made them, they would be linked to the parameters of the first group only.
        """
        inner = self._zero if self.stage == 0 else self._zero.optimizer
        flats = (
            self._zero.fp32_partitioned_groups_flat
            if self.stage == 3
            else [p for group in inner.param_groups for p in group["params"]]
        )
        for flat in flats:
            inner.state[flat] = {
                "step": torch.tensor(float(self._n_stepped), device=flat.device),
                **{key: torch.zeros_like(flat) for key in MOMENTS},
            }
        if self.stage in (1, 2):
            self._zero._hp_optimizer_states_linked = False
            self._zero._lazy_init_hp_params_optimizer_state()


def _part_of(whole: torch.Tensor, size: int, dp: Communicator) -> torch.Tensor:
    """This rank's `size` elements of a flat tensor; the last ranks may have fewer, or none."""
    return whole.reshape(-1)[size * dp.rank : size * (dp.rank + 1)]


def _growth_tracker(n_stable: int) -> int:
    """The steps since the loss scale last changed; after a whole window of them the next step doubles it."""
    return n_stable % LOSS_SCALE_WINDOW or min(n_stable, LOSS_SCALE_WINDOW)
