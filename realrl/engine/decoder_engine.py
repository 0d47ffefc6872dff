"""The engine of one role's decoder, or of one rank's shard: computes with torch, steps with a training backend.

    train_batch:  minibatch ──split──► micro-batches ──► pipeline of forward, loss sum / normaliser, backward
                  ──► stats summed over data-parallel ranks, told to all stages
                  ──► backend: gradients completed over ranks ──► skip? ──► clip, AdamW, schedule

Every (pp, tp) coordinate of a data-parallel rank has the same samples and cuts them alike, so that all stages know all
shapes. Losses and results are computed on the last stage, which has the head.
No result depends on the cut of a minibatch: losses and stats are sums, divided by one normaliser.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from realrl.algo.api import ForwardOutput, GenerationResult, LossFn, LossOutput, MicroBatching, TrainResult
from realrl.algo.checks import check_gradient, check_loss
from realrl.algo.phases import Phases
from realrl.config.schema import BackendName, GenerationConfig, OptimizerConfig
from realrl.data.sample import SequenceSample
from realrl.engine.backends import TrainingBackend, make_backend
from realrl.engine.backends.base import Keep, keep_itself, master_of, move
from realrl.engine.generate import GenerateRequest, generate
from realrl.engine.groups import Communicator
from realrl.engine.parallel import Parallel
from realrl.engine.parameters.averages import AveragedParameters, load_masters
from realrl.engine.parameters.gather_parameters import Copy, WriteModel, copy_sharded
from realrl.engine.parameters.replicas import check_replicas
from realrl.engine.train.duet import PipelineJob
from realrl.engine.train.load_balance import MinibatchBalance
from realrl.engine.train.microbatch import TOKENS, split_balanced, split_in_order
from realrl.engine.train.outputs import DecoderOutput
from realrl.engine.train.packing import Packing
from realrl.engine.train.pipeline import Chunk, run_stage
from realrl.errors import CallError
from realrl.model.decoder import Decoder
from realrl.model.dtypes import dtype_name
from realrl.model.lora import without_adapters
from realrl.plan.parameters.adapters import is_trained
from realrl.plan.pipeline import Schedule, Step, inference, interleaved
from realrl.plan.samples.partition import default_n_mbs

Work = tuple[SequenceSample, Callable[[DecoderOutput, SequenceSample], torch.Tensor | None]]
"""A micro-batch, and the function that turns its hidden states into a loss, or keeps a result and returns None."""


class DecoderEngine:
    """`realrl.algo.api.Engine` for a decoder whose shards are on the ranks of a layout.

    Args:
        decoder: this rank's shard, taken over and converted to `compute_dtype`. A frozen one computes in its own dtype,
            unless that is float32 and `compute_dtype` is not: then it keeps masters, see `AveragedParameters`.
        role: name of the role, for messages.
        parallel: this rank's place in the layout that the decoder was built for.
        optimizer: None for a frozen role.
        total_optimizer_steps: length of the learning-rate schedule; see `set_total_optimizer_steps`.
        compute_dtype: dtype of computation; masters and gradients are float32 either way.
        backend: name of the training backend of a trained decoder.

    Attributes:
        phases: recorder of what the calls spend their time on; records nothing until another one is set.

    Raises:
        ConfigError: the backend's package is not installed.
        ValueError: the decoder's shard belongs to another place.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        role: str,
        parallel: Parallel | None = None,
        optimizer: OptimizerConfig | None = None,
        total_optimizer_steps: int = 0,
        compute_dtype: torch.dtype = torch.float32,
        backend: BackendName = "native",
    ) -> None:
        self.decoder = decoder
        self.role = role
        self.phases = Phases()
        self._parallel = parallel = Parallel() if parallel is None else parallel
        shard = decoder.shard
        built_for = (shard.has_embedding, shard.has_head, shard.tp_rank, shard.tp_size, len(shard.chunks))
        place = (parallel.is_first_stage, parallel.is_last_stage, parallel.tp_rank, parallel.tp.n_ranks)
        if built_for != (*place, parallel.strategy.vpp):
            raise ValueError(f"role {role!r} has {shard} on rank {parallel.mesh_rank} of {parallel.strategy}")
        self.submit: Callable[[PipelineJob], None] | None = None  # runs pipelines of `train_batch` in another's list
        self._optimizer: TrainingBackend | None = None
        self._averages: AveragedParameters | None = None
        if optimizer is None:
            decoder.requires_grad_(False)
            if decoder.config.dtype == "float32" != dtype_name(compute_dtype):
                self._averages = AveragedParameters(decoder, compute_dtype)
        else:
            self._optimizer = make_backend(
                backend, decoder, parallel, optimizer, n_total=total_optimizer_steps, compute_dtype=compute_dtype
            )

    @property
    def device(self) -> torch.device:
        return self.decoder.device

    @property
    def stages(self) -> Communicator:
        """The pipeline that this rank is a stage of."""
        return self._parallel.pp

    def kept_tensors(self) -> dict[str, torch.Tensor]:
        """The parameters by global name, and the masters of a frozen role: what goes to host memory and comes back."""
        masters = {} if self._averages is None else self._averages.masters
        return dict(self.decoder.named_shards()) | {f"master of {name}": m for name, m in masters.items()}

    def set_total_optimizer_steps(self, n_total: int) -> None:
        """Set the end of the learning-rate schedule, once the length of the run is known."""
        self._require_optimizer().n_total = n_total

    # ------------------------------------------------------------ calls

    def train_batch(
        self,
        minibatch: SequenceSample,
        loss_fn: LossFn,
        *,
        normaliser: float,
        micro_batching: MicroBatching,
        skip_step: Callable[[Mapping[str, float]], bool] | None = None,
    ) -> TrainResult:
        """Forward, backward and one optimizer step over this rank's share of a minibatch.

        A model with experts is trained on their load-balancing loss too, with the coefficient of its configuration:
        see `realrl.model.layers.moe.LoadBalance`, and `realrl.engine.train.load_balance` for its statistics.

        A skipped step leaves parameters and moments alone but advances the learning-rate schedule. Where the backend
        scales the loss, so does a step whose gradient overflowed.

        Raises:
            CallError: the role is frozen, the share is empty, the loss or the gradient is not finite, or no loss of the
                minibatch has a gradient.
        """
        optimizer = self._require_optimizer()
        if len(minibatch) == 0:
            raise CallError(
                f"role {self.role!r} has no sample of a minibatch on this rank",
                remedy="Use larger minibatches or fewer data-parallel ranks.",
            )
        if not normaliser > 0:
            raise CallError(f"role {self.role!r} trains with normaliser {normaliser}, which must be positive")
        micro_batches = split_balanced(minibatch.to(self.device), micro_batching, default=self._n_mbs(is_train=True))
        losses: list[LossOutput] = []
        has_gradient: list[bool] = []  # of each loss
        factor = optimizer.loss_factor
        balance = None
        if self.decoder.config.moe is not None:
            balance = MinibatchBalance(self.decoder, self._parallel, minibatch, factor=factor)

        def loss_of(out: DecoderOutput, micro_batch: SequenceSample) -> torch.Tensor:
            result = check_loss(self.role, loss_fn(out, micro_batch))
            losses.append(LossOutput(result.loss.detach(), result.stats, result.maxima))
            has_gradient.append(result.loss.requires_grad)
            return result.loss / normaliser * factor

        def nothing_of(out: DecoderOutput, micro_batch: SequenceSample) -> torch.Tensor:
            return loss_fn(out, micro_batch).loss * 0.0

        work: list[Work] = [(micro_batch, loss_of) for micro_batch in micro_batches]
        if optimizer.needs_equal_passes:  # ranks with fewer micro-batches send one sample through again, for nothing
            n_passes = int(self.all_reduce(torch.tensor([len(work)]), "max"))
            work += [(micro_batches[0].select(micro_batches[0].ids[:1]), nothing_of)] * (n_passes - len(work))
        self._run(interleaved, work, balance=None if balance is None else (balance, len(micro_batches)))
        loss_scale = optimizer.loss_scale
        with self.phases.phase("gradient reduction"):
            n_trained, stats = self._reduce_stats(losses, has_gradient, normaliser)
            check_gradient(self.role, loss_fn, n_trained)
            if balance is not None:
                stats |= balance.stats()
            grad_norm = optimizer.reduce()
        if not math.isfinite(grad_norm) and loss_scale is None:
            raise CallError(
                f"the gradient of role {self.role!r} is not finite: its norm is {grad_norm}",
                remedy=f"Try a smaller models.{self.role}.optimizer.lr.",
            )
        lr = optimizer.lr
        stepped = skip_step is None or not skip_step(stats)
        with self.phases.phase("optimizer"):
            if stepped:
                optimizer.step()
                stepped = not optimizer.overflowed
            else:
                optimizer.skip()
        if loss_scale is not None:
            stats |= {"loss_scale": loss_scale, "overflow_fraction": float(optimizer.overflowed)}
        return TrainResult(stats=stats, grad_norm=grad_norm, lr=lr, stepped=stepped)

    @torch.no_grad()
    def forward(
        self,
        batch: SequenceSample,
        post_fn: Callable[[ForwardOutput, SequenceSample], torch.Tensor],
        *,
        micro_batching: MicroBatching,
        adapter: bool = True,
    ) -> torch.Tensor:
        """Inference without gradient; concatenates `post_fn`'s results (dim 0) in the order of `batch`.

        `post_fn` runs on the last stage; its result is returned on all of them.

        Args:
            adapter: False computes with the base model; a scalar head that is trained has no base and stays as it is.

        Raises:
            CallError: `adapter` is False, and the role has no adapters.
        """
        if not adapter and self.decoder.config.lora is None:
            raise CallError(
                f"role {self.role!r} has no adapters, so it is no base model of its own",
                remedy=f"Set models.{self.role}.lora.rank, or let a frozen role be the base.",
            )
        micro_batches = split_in_order(batch.to(self.device), micro_batching, default=self._n_mbs(is_train=False))
        results: list[torch.Tensor] = []

        def keep(out: DecoderOutput, micro_batch: SequenceSample) -> None:
            results.append(post_fn(out, micro_batch))

        with nullcontext() if adapter else without_adapters(self.decoder), self.whole_parameters():
            self._run(inference, [(micro_batch, keep) for micro_batch in micro_batches])
        result = torch.cat(results) if results else None
        return self._parallel.pp.broadcast_unknown(result, self._parallel.last_stage, self.device)

    def generate(
        self, prompts: SequenceSample, generation: GenerationConfig, *, seed: int, step: int, eos_id: int
    ) -> GenerationResult:
        """See `Engine`; raises CallError if the role has no language-model head, or responses no room."""
        if self.decoder.config.is_scalar:
            raise CallError(f"role {self.role!r} gives scores and cannot generate", remedy='Declare it with head="lm".')
        if generation.max_new_tokens < 1:  # a sampler may have worked it out
            raise CallError(f"max_new_tokens={generation.max_new_tokens} leaves no room for a response")
        config = self.decoder.config  # its files may name ends that the tokenizer does not, or that nothing can sample
        ends = [end for end in config.eos_token_ids if 0 <= end < config.vocab_size]
        generation = generation.model_copy(update={"stop_ids": (*generation.stop_ids, *ends)})
        request = GenerateRequest(prompts.samples("prompt_ids"), prompts.ids, generation, seed, step, eos_id)
        with self.whole_parameters():
            return generate(self.decoder, request, parallel=self._parallel, phases=self.phases)

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        return self._parallel.dp.all_reduce_(tensor.detach().to(self.device, copy=True), op)

    def whole_parameters(self, names: Collection[str] | None = None) -> AbstractContextManager[None]:
        """Gather, for the block, parameters that the backend shards between calls.

        All ranks of the layout enter it together.

        Args:
            names: names of the parameters to gather; all by default.
        """
        return nullcontext() if self._optimizer is None else self._optimizer.whole_parameters(names)

    def check_replicas(self, worker: int) -> None:
        """Compare the parameters of data-parallel ranks: see `realrl.engine.parameters.replicas.check_replicas`.

        Args:
            worker: global rank.
        """
        check_replicas(self.decoder, self._parallel.dp, role=self.role, worker=worker)

    @torch.no_grad()
    def move_parameters(self, values: Iterable[tuple[str, torch.Tensor]], eta: float) -> None:
        """Set parameters to ``eta * value + (1 - eta) * parameter``; the optimizer goes on from there.

        All ranks of the layout call this together.

        Args:
            values: (global name, value) of all parameters or some, in the shapes of this rank's shard. Each is used
                before the next is asked for.
            eta: above 0, up to 1.
        """
        if self._averages is not None:
            self._averages.move(values, eta)
            return
        optimizer = self._require_optimizer()
        named = dict(self.decoder.named_shards())

        def trained() -> Iterator[tuple[str, torch.Tensor]]:
            for name, value in values:
                if is_trained(self.decoder.config, name):
                    yield name, value
                else:
                    move(named[name].data, value, eta)

        optimizer.move_parameters(trained(), eta)

    # ------------------------------------------------------------ state

    def state_dict(self, keep: Keep | None = None) -> dict[str, Any]:
        """The state that an exact continuation needs beside the saved model; empty for most frozen roles.

        The state of a trained role holds moments, counters and, unless the decoder itself is float32 and without
        adapters, master weights; that of a frozen role its masters, if it has any. Its form is that of
        `realrl.engine.backends.base`, whatever the backend. All ranks of the layout call this together; ranks at the
        same place of different replicas get the same.

        Args:
            keep: see `TrainingBackend.state_dict`.
        """
        if self._averages is not None:
            keep = keep or keep_itself
            masters = {name: keep(f"{name}/master", master) for name, master in self._averages.masters.items()}
            return {"parameters": {name: {"master": master} for name, master in masters.items()}}
        return {} if self._optimizer is None else self._optimizer.state_dict(keep)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where `state_dict` of any backend was taken, with the decoder that `copy_hf` took then.

        With adapters, which the state holds, the decoder is the one that the run began with. A frozen role may take the
        masters of a run in another precision, or none.
        """
        if self._optimizer is not None:
            self._optimizer.load_state_dict(state)
        elif state:
            if state.keys() != {"parameters"}:
                raise ValueError(f"role {self.role!r} is frozen, but the state holds {sorted(state)}")
            saved = {name: master_of(state["parameters"], name) for name in state["parameters"]}
            load_masters(self.decoder, self._averages, saved)

    def copy_hf(self, copy: Copy) -> WriteModel | None:
        """Copy the model to host memory, for Hugging Face's format; all ranks of the layout call this together.

        Adapters are merged into the model, and also written to the sub-folder `adapter`, in PEFT's format.

        Args:
            copy: see `copy_sharded`.

        Returns:
            A function that writes this rank's part into a folder; None on other replicas than the first.
        """
        if self._parallel.dp_rank != 0:
            for name, _ in self.decoder.named_shards():  # as often as the first replica, which copies meanwhile
                with self.whole_parameters({name}):
                    pass
            return None
        tp, pp = self._parallel.tp, self._parallel.pp
        return copy_sharded(self.decoder, copy, tp=tp, pp=pp, present=lambda name: self.whole_parameters({name}))

    # ------------------------------------------------------------ internals

    def _require_optimizer(self) -> TrainingBackend:
        if self._optimizer is None:
            raise CallError(f"role {self.role!r} is frozen and cannot be trained")
        return self._optimizer

    def _n_mbs(self, *, is_train: bool) -> int:
        """Micro-batches where the call leaves them open."""
        return default_n_mbs(self._parallel.strategy.pp, is_train=is_train)

    def _run(
        self,
        schedule: Callable[[int, int, int], Schedule],
        work: Sequence[Work],
        *,
        balance: tuple[MinibatchBalance, int] | None = None,
    ) -> None:
        """Send micro-batches through the pipeline, and call each one's function behind the last chunk.

        Args:
            schedule: makes the lists for so many stages, micro-batches and chunks per stage.
            balance: the load-balancing loss, and the number of micro-batches, from the first, that have it.
        """
        trains = schedule is not inference
        job = PipelineJob(self._chunks(work, balance, trains=trains), len(work))
        if trains and self.submit is not None:
            self.submit(job)
        else:
            self.run_alone(job, schedule)

    def run_alone(self, job: PipelineJob, schedule: Callable[[int, int, int], Schedule] = interleaved) -> None:
        """Run the pipeline of a job by itself."""
        strategy = self._parallel.strategy
        steps = schedule(strategy.pp, job.n_micro_batches, strategy.vpp)[self._parallel.pp_rank]
        run_stage(steps, job.chunks, self._parallel.pp, device=self.device, phases=self.phases)

    def _chunks(
        self, work: Sequence[Work], balance: tuple[MinibatchBalance, int] | None = None, *, trains: bool
    ) -> dict[int, Chunk]:
        """Return the callbacks of this rank's chunks, by their number in the model.

        Args:
            balance: see `_run`.
            trains: False in a forward pass alone, whose last chunk computes no loss.
        """
        micro_batches = [micro_batch for micro_batch, _ in work]
        self._check_lengths(micro_batches)
        packings = [Packing(micro_batch, self.decoder.config) for micro_batch in micro_batches]
        optimizer, has_head, last = self._optimizer, self._parallel.is_last_stage, len(self.decoder.shard.chunks) - 1
        phases, head_phase = self.phases, "head, loss" if trains else "head"

        def received(step: Step) -> tuple[tuple[int, ...], torch.dtype]:
            n_rows = self.decoder.parallel.n_local_rows(packings[step.micro_batch].n_rows)
            return (n_rows, self.decoder.config.hidden_size), self.decoder.dtype

        def chunk_at(place: int) -> Chunk:
            def compute(step: Step, received: torch.Tensor | None) -> torch.Tensor | None:
                (micro_batch, finish), packing = work[step.micro_batch], packings[step.micro_batch]
                input_ids, seqlens = micro_batch[TOKENS], micro_batch.flat_seqlens(TOKENS)
                with phases.phase("forward", len(input_ids) if place == 0 else 0):
                    x = packing.input_ids if received is None else received
                    part = balance[0].of(seqlens) if balance is not None and step.micro_batch < balance[1] else None
                    attention = packing.attention()
                    x = self.decoder.forward_stage(x, packing.positions, attention, balance=part, chunk=place)
                if not has_head or place != last:
                    return x
                with phases.phase(head_phase):
                    hidden = packing.expand(x)
                    return finish(DecoderOutput(self.decoder, hidden, input_ids, seqlens, role=self.role), micro_batch)

            if optimizer is None:
                return Chunk(compute, received)
            run, propagate = optimizer.run, optimizer.backward

            def backward(output: torch.Tensor | None, gradient: torch.Tensor | None, is_last: bool) -> None:
                with phases.phase("backward"):
                    propagate(output, gradient, is_last and place == 0)  # the first chunk of a stage comes last

            return Chunk(lambda step, x: run(lambda: compute(step, x)), received, backward)

        return {
            place * self._parallel.strategy.pp + self._parallel.pp_rank: chunk_at(place) for place in range(last + 1)
        }

    def _check_lengths(self, micro_batches: Sequence[SequenceSample]) -> None:
        config = self.decoder.config
        longest = max((n for micro_batch in micro_batches for n in micro_batch.flat_seqlens(TOKENS)), default=0)
        if config.learned_positions and longest > config.max_positions:
            raise CallError(
                f"a sequence of {longest} tokens is too long for role {self.role!r}, which has learned "
                f"{config.max_positions} positions",
                remedy="Lower dataset.max_prompt_tokens or generation.max_new_tokens, or leave out longer samples.",
            )

    def _reduce_stats(
        self, losses: Sequence[LossOutput], has_gradient: Sequence[bool], normaliser: float
    ) -> tuple[int, dict[str, float]]:
        """Reduce the stats over ranks, and count losses to learn from; all get the same.

        Raises:
            CallError: the loss is not finite; raised on all ranks alike.
        """
        payload = b""
        if self._parallel.is_last_stage:
            loss, n_trained, stats = self._sum_up(losses, has_gradient, normaliser)
            payload = json.dumps([loss, n_trained, stats]).encode()
        pp = self._parallel.pp
        if pp.n_ranks > 1:
            loss, n_trained, stats = json.loads(pp.broadcast_bytes(payload, self._parallel.last_stage, self.device))
        if not math.isfinite(loss):
            raise CallError(
                f"the loss of role {self.role!r} is {loss}", remedy=f"Try a smaller models.{self.role}.optimizer.lr."
            )
        return n_trained, stats

    def _sum_up(
        self, losses: Sequence[LossOutput], has_gradient: Sequence[bool], normaliser: float
    ) -> tuple[float, int, dict[str, float]]:
        """Reduce loss and stats over micro-batches and data-parallel ranks, by sums or maxima.

        Counted are losses that have a gradient, or are 0 as there was nothing to learn from.
        """
        names, max_names = list(losses[0].stats), list(losses[0].maxima)
        dp = self._parallel.dp
        trained = [(r.loss == 0) | has for r, has in zip(losses, has_gradient, strict=True)]
        rows = [
            _to_row([r.loss, can, *map(r.stats.__getitem__, names)]) for r, can in zip(losses, trained, strict=True)
        ]
        sums = dp.all_reduce_(torch.stack(rows).sum(0))
        found = sums / normaliser
        found[1] = sums[1]  # the count; one wait for the device brings all numbers
        loss, n_trained, *means = found.tolist()
        stats = dict(zip(names, means, strict=True))
        if max_names:
            tops = torch.stack([_to_row([r.maxima[name] for name in max_names]) for r in losses]).amax(0)
            stats |= zip(max_names, dp.all_reduce_(tops, "max").tolist(), strict=True)
        return loss, int(n_trained), stats


def _to_row(scalars: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([s.detach().to(torch.float64).reshape(()) for s in scalars])
