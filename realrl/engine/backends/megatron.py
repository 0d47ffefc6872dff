"""The megatron backend: DistributedDataParallel and DistributedOptimizer of megatron-core around our module.

    gradients ──► flat float32 buffers, in buckets ──reduce-scatter──► this rank's shard of each bucket ──► AdamW on
    float32 main parameters ──all-gather──► parameters, which are views of one flat buffer

A bucket is reduced as soon as the last micro-batch's backward pass has filled it. Parameters with copies on other ranks
of the layout (tensor ranks that share norms or KV heads, two stages that share an embedding) have buffers of their own:
their gradients are added up over these ranks first, and equal buffers are reduced alike, so that copies stay equal for
ever.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from realrl.config.schema import OptimizerConfig
from realrl.engine.backends.base import (
    MOMENTS,
    Keep,
    OptimizerState,
    check_parameters,
    decays,
    keep_itself,
    master_of,
    move,
    n_warmup_steps,
)
from realrl.engine.backends.megatron_cpu import cpu_for_cuda
from realrl.engine.backends.replaced import replaced
from realrl.engine.groups import all_gather_single, reduce_scatter_single
from realrl.engine.parallel import Parallel
from realrl.engine.tensor_parallel import sync_partial_gradients
from realrl.engine.train.gradients import TIED, is_copied, is_counted_here, is_tied
from realrl.engine.train.pipeline import propagate
from realrl.engine.train.precision import TrainedParameters
from realrl.model.decoder import Decoder

with warnings.catch_warnings():  # the import warns at length of optional packages that are not installed
    warnings.simplefilter("ignore")
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, param_and_grad_buffer
    from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.grad_scaler import DynamicGradScaler
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig

_FIRST_LOSS_SCALE = 2.0**16
_LOSS_SCALE_WINDOW = 1000
_ONE_KIND = {"lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}


class _Scheduler(OptimizerParamScheduler):
    """Megatron's schedule, whose warm-up starts above zero as in `learning_rate`."""

    def get_lr(self, param_group: dict[str, Any]) -> float:
        if self.num_steps < self.lr_warmup_steps:
            return self.max_lr * (self.num_steps + 1) / self.lr_warmup_steps
        return float(super().get_lr(param_group))


class MegatronBackend:
    """`TrainingBackend` with megatron-core's optimizer, sharded over data-parallel ranks.

    Args:
        decoder: this rank's shard; its trained parameters become views of megatron's buffers.
        parallel: this rank's place, in groups that have handles for libraries.
        config: rates, decay, clipping, schedule.
        n_total: number of optimizer steps of the whole run; may be set later, before the first step.
        compute_dtype: dtype of the decoder.
    """

    needs_equal_passes = False

    def __init__(
        self, decoder: Decoder, parallel: Parallel, config: OptimizerConfig, n_total: int, compute_dtype: torch.dtype
    ) -> None:
        self.config = config
        self.overflowed = False
        self._decoder = decoder
        self._parallel = parallel
        self._trained = trained = TrainedParameters(decoder, compute_dtype)
        self._n_stepped = 0
        values = dict(zip(trained.names, (p.data for p in trained.parameters), strict=True))
        trained.convert(accumulate=False)
        self._named = dict(zip(trained.names, trained.parameters, strict=True))
        for name, p in self._named.items():
            p.tensor_model_parallel = True  # counted in the norm wherever it is not `shared`
            p.shared = not is_counted_here(decoder, name)
            # a bucket of its own, so that both stages reduce it alike
            p.shared_embedding = name == TIED and parallel.tied.n_ranks > 1 and is_tied(decoder)
        with self._on_device():
            self._chunks = list(self._make_chunks())
            self._scaler = self._make_scaler()
            self._optimizer = self._make_optimizer()
            self._shards = dict(self._main_shards())
        if not trained.is_in_saved_model:
            self.move_parameters(values.items(), 1.0)
        self._scheduler = self._make_scheduler(n_total)

    # ------------------------------------------------------------ schedule

    @property
    def n_taken(self) -> int:
        """The number of minibatches that the schedule has seen."""
        return int(self._scheduler.num_steps)

    @property
    def n_total(self) -> int:
        """The number of optimizer steps of the whole run."""
        return self._n_total

    @n_total.setter
    def n_total(self, n_total: int) -> None:
        n_taken = self.n_taken
        self._scheduler = self._make_scheduler(n_total)
        self._scheduler.step(n_taken)

    @property
    def lr(self) -> float:
        """The rate that the next step uses."""
        return self._scheduler.get_lr({})

    @property
    def loss_scale(self) -> float | None:
        """Megatron's loss scale in fp16; None otherwise."""
        return None if self._scaler is None else float(self._scaler.scale)

    @property
    def loss_factor(self) -> float:
        return self.loss_scale or 1.0

    # ------------------------------------------------------------ a minibatch

    def run(self, compute: Callable[[], torch.Tensor | None]) -> torch.Tensor | None:
        return compute()

    def backward(self, output: torch.Tensor | None, gradient: torch.Tensor | None, is_last: bool) -> None:
        """Add gradients to the buffers; in the last pass, reduce each bucket as soon as it is complete."""
        own, copied = self._chunks
        with _current_collectives(), nullcontext() if is_last else own.no_sync(), copied.no_sync():
            propagate(output, gradient, is_last)

    def reduce(self) -> float:
        """Complete this rank's shards of the gradients; returns the global norm before they are clipped."""
        gradients = {name: p.main_grad for name, p in self._named.items()}
        sync_partial_gradients(self._decoder, self._parallel.tp, gradients)
        if TIED in gradients and self._named[TIED].shared_embedding:
            self._parallel.tied.all_reduce_(gradients[TIED])
        with self._on_device():
            for chunk in self._chunks:
                chunk.finish_grad_sync()
            self.overflowed = self._optimizer.prepare_grads()
            if self.overflowed:
                return float("inf")
            return float(self._optimizer.clip_grad_norm(self.config.clip_grad_norm))

    def step(self) -> None:
        """Update main parameters and gather parameters, unless the gradient overflowed."""
        if not self.overflowed:
            with self._on_device():
                self._optimizer.step_with_ready_grads()
            self._n_stepped += 1
        self.skip()

    def skip(self) -> None:
        """Forget the gradients and advance the schedule."""
        self._optimizer.zero_grad()
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._scheduler.step(1)

    def whole_parameters(self, names: Collection[str] | None) -> AbstractContextManager[None]:
        """Do nothing: parameters are whole at all times."""
        return nullcontext()

    @torch.no_grad()
    def move_parameters(self, values: Iterable[tuple[str, torch.Tensor]], eta: float) -> None:
        """Move this rank's shards of the main parameters, and gather parameters."""
        for name, value in values:
            p = self._named[name]
            if p in self._shards:
                shard, part = self._shards[p]
                move(shard.data, value.reshape(-1)[part], eta)
        with self._on_device():
            self._optimizer._copy_main_params_to_model_params()
            for chunk in self._chunks:
                chunk.start_param_sync(force_sync=True)

    # ------------------------------------------------------------ state

    def state_dict(self, keep: Keep | None = None) -> OptimizerState:
        """The canonical form; data-parallel ranks gather it parameter by parameter."""
        keep = keep or keep_itself
        parameters: dict[str, dict[str, Any]] = {name: {"step": self._n_stepped} for name in self._named}
        keys = MOMENTS if self._trained.is_in_saved_model else (*MOMENTS, "master")
        for key in keys:
            for name, p in self._named.items():
                parameters[name][key] = keep(f"{name}/{key}", self._gather(p, key))
        result: OptimizerState = {"n_taken": self.n_taken, "n_total": self.n_total, "parameters": parameters}
        if self._scaler is not None:  # with a hysteresis of 1, its tracker decides nothing
            known = self._scaler.state_dict()
            result["loss_scale"] = {"scale": float(known["scale"]), "growth_tracker": known["growth_tracker"]}
        return result

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where `state_dict` of this or another backend was taken."""
        parameters = state["parameters"]
        check_parameters(parameters, {name: p.shape for name, p in self._named.items()})
        masters = {}
        if not self._trained.is_in_saved_model:
            masters = {name: master_of(parameters, name) for name in self._named}
        for name, p in self._named.items():
            stored = parameters[name]
            self._n_stepped = int(stored["step"])
            if p not in self._shards:
                continue
            shard, part = self._shards[p]
            self._optimizer.optimizer.state[shard] = {
                "step": torch.tensor(float(self._n_stepped), device=shard.device),
                **{key: stored[key].reshape(-1)[part].to(shard.device, copy=True) for key in MOMENTS},
            }
        if masters:
            self.move_parameters(masters.items(), 1.0)
        scale = state.get("loss_scale")
        if self._scaler is not None and scale is not None:
            # a scale that deepspeed was about to double is doubled by the next step here, too
            growth_tracker = min(int(scale["growth_tracker"]), _LOSS_SCALE_WINDOW - 1)
            known = {**self._scaler.state_dict(), "growth_tracker": growth_tracker}
            with self._on_device():
                self._scaler.load_state_dict({**known, "scale": torch.tensor([float(scale["scale"])])})
        self._scheduler = self._make_scheduler(int(state["n_total"]))
        self._scheduler.step(int(state["n_taken"]))

    def _main_shards(self) -> Iterator[tuple[nn.Parameter, tuple[torch.Tensor, slice]]]:
        """Yield each parameter that this rank updates a part of, with the part's main parameter and its place."""
        optimizer = self._optimizer
        pairs = (
            (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
            (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
        )
        for model_groups, shard_groups in pairs:
            for model_group, shard_group in zip(model_groups, shard_groups, strict=True):
                for p, shard in zip(model_group, shard_group, strict=True):
                    place = optimizer._get_model_param_range_map(p)["param"]
                    yield p, (shard, slice(place.start, place.end))

    @torch.no_grad()
    def _gather(self, p: nn.Parameter, key: str) -> torch.Tensor:
        """Gather a whole float32 moment or master from every data-parallel rank's part; what is not there is zero."""
        whole = torch.zeros(p.numel(), device=p.device)
        if p in self._shards:
            shard, part = self._shards[p]
            found = shard.data if key == "master" else self._optimizer.optimizer.state.get(shard, {}).get(key)
            if found is not None:
                whole[part] = found
        self._parallel.dp.all_reduce_(whole.view(torch.int32))  # as integers: in floats, 0.0 + -0.0 is 0.0
        return whole.view(p.shape)

    # ------------------------------------------------------------ making

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        with cpu_for_cuda(self._decoder.device), _current_collectives():
            yield

    def _make_chunks(self) -> Iterator[DistributedDataParallel]:
        """Make two modules: of the parameters without copies on other ranks of the layout, and of those with copies."""
        decoder, parallel = self._decoder, self._parallel
        groups = ProcessGroupCollection()
        groups.dp = groups.dp_cp = groups.expt_dp = parallel.dp.library_handle
        groups.tp, groups.pp, groups.ep = (
            parallel.tp.library_handle,
            parallel.pp.library_handle,
            parallel.tp.library_handle,
        )
        config = TransformerConfig(
            num_layers=decoder.config.n_layers,
            hidden_size=decoder.config.hidden_size,
            num_attention_heads=decoder.config.n_heads,
            kv_channels=decoder.config.head_dim,
            cuda_graph_scope=[],  # its default warns
            calculate_per_token_loss=True,  # gradients are added up over ranks: the loss has its normaliser already
        )
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, overlap_grad_reduce=True, use_distributed_optimizer=True
        )
        copied = [name for name in self._named if is_copied(decoder, parallel, name)]
        for names in ([name for name in self._named if name not in copied], copied):
            module = nn.ParameterList([self._named[name] for name in names])
            yield DistributedDataParallel(config, ddp_config, module, pg_collection=groups)

    def _make_scaler(self) -> DynamicGradScaler | None:
        if self._trained.compute_dtype != torch.float16:
            return None
        return DynamicGradScaler(
            initial_scale=_FIRST_LOSS_SCALE,
            min_scale=1.0,
            growth_factor=2.0,
            backoff_factor=0.5,
            growth_interval=_LOSS_SCALE_WINDOW,
            hysteresis=1,
        )

    def _make_optimizer(self) -> DistributedOptimizer:
        config, dtype = self.config, self._trained.compute_dtype
        matrices = [p for name, p in self._named.items() if decays(name, p)]
        vectors = [p for name, p in self._named.items() if not decays(name, p)]
        adamw = torch.optim.AdamW(
            [{"params": matrices, "wd_mult": 1.0, **_ONE_KIND}, {"params": vectors, "wd_mult": 0.0, **_ONE_KIND}],
            lr=config.lr,
            weight_decay=config.weight_decay,
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )
        optimizer = DistributedOptimizer(
            adamw,
            MegatronOptimizerConfig(
                lr=config.lr,
                weight_decay=config.weight_decay,
                bf16=dtype == torch.bfloat16,
                fp16=dtype == torch.float16,
                params_dtype=dtype,
                use_distributed_optimizer=True,
                clip_grad=config.clip_grad_norm,
            ),
            self._scaler,
            None,
            model_chunks=self._chunks,
            per_model_buffers={i: chunk.buffers for i, chunk in enumerate(self._chunks)},
            data_parallel_group=self._parallel.dp.library_handle,
            data_parallel_group_gloo=None,
            data_parallel_group_idx=0,
            distributed_optimizer_instance_id=0,
        )
        optimizer.grad_stats_parallel_group = self._parallel.mesh.library_handle
        optimizer.tp_group = self._parallel.tp.library_handle
        return optimizer

    def _make_scheduler(self, n_total: int) -> _Scheduler:
        self._n_total = n_total
        config = self.config
        n_warmup = n_warmup_steps(config, n_total)
        return _Scheduler(
            self._optimizer,
            init_lr=0.0,
            max_lr=config.lr,
            min_lr=config.lr * config.min_lr_fraction,
            lr_warmup_steps=n_warmup,
            lr_decay_steps=max(n_total, n_warmup + 1),
            lr_decay_style=config.schedule,
            start_wd=config.weight_decay,
            end_wd=config.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )


def _current_collectives() -> AbstractContextManager[None]:
    """Give megatron the collectives by their names of torch 2.13; those that its import took warn there."""
    return replaced(
        param_and_grad_buffer,
        dist_all_gather_func=all_gather_single,
        dist_reduce_scatter_func=reduce_scatter_single,
    )
