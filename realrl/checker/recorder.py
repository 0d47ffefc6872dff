"""Workers that write down what each call computed, and give it samples in another order or with junk where none counts.

CheckedWorker     as it is
ReversedWorker    every call gets its samples in reverse
ShuffledWorker    every call gets its samples in an order of its own
SpoiltWorker      rows without meaning hold junk: see `spoilt`
"""

from __future__ import annotations

import dataclasses
import functools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import torch

from realrl.algo.api import (
    CallContext,
    Engine,
    ForwardOutput,
    LossFn,
    LossOutput,
    MicroBatching,
    Model,
    ModelInterface,
    SampleNotes,
    TrainResult,
)
from realrl.algo.packed import action_mask
from realrl.checker.recording import FOLDER, CallSeen, MinibatchSeen, PartSeen, Rows, Sketch
from realrl.data.sample import SequenceSample
from realrl.engine.decoder_engine import DecoderEngine
from realrl.experiment.discovery import load_run
from realrl.experiment.loading import place_of_function
from realrl.graph.mfc import InterfaceType, MFCDef
from realrl.plan.samples.shuffle import keyed_draw, permutation
from realrl.runtime.transport.base import SampleClient
from realrl.runtime.worker.model_worker import ModelWorker
from realrl.runtime.worker.observer import Observer
from realrl.sched.key_value import KeyValueClient
from realrl.sched.messages import Initialize, Per, Reply, Request, RunCall

_MOST_NUMBERS = 512  # of a sketch
_MOST_STATE = 256  # numbers of an attribute that count as state
_DEPTH = 3  # of objects inside an interface
JUNK = 7.0

Ids = tuple[str, ...]


class CheckedWorker(ModelWorker):
    """A `ModelWorker` that records its calls below its run folder."""

    spoils: ClassVar[bool] = False

    def __init__(self, rank: int, client: SampleClient | None = None, *, meeting: KeyValueClient | None = None) -> None:
        self._recorder = Recorder(rank, spoils=self.spoils)
        super().__init__(rank, client, meeting=meeting, observer=self._recorder)

    def handle(self, request: Request) -> list[Reply | Future[Reply]]:
        if isinstance(request, Initialize):
            _, config = load_run(request.run)
            self._recorder.path = Path(config.run_dir) / FOLDER / f"rank-{self.rank}.jsonl"
            self._recorder.path.parent.mkdir(exist_ok=True)
        if isinstance(request, RunCall):
            ordered = tuple(self.ordered(request.call, ids) for ids in request.minibatches)
            keeps = self.ordered(request.call, request.keeps)  # what a role without weights works on
            request = msgspec.structs.replace(request, minibatches=ordered, keeps=keeps)
        return super().handle(request)

    def ordered(self, call: str, ids: Ids) -> Ids:
        """Return the samples of a minibatch in the order in which the call gets them."""
        return ids


class ReversedWorker(CheckedWorker):
    """Gives every call its samples in reverse."""

    def ordered(self, call: str, ids: Ids) -> Ids:
        return ids[::-1]


class ShuffledWorker(CheckedWorker):
    """Gives every call its samples in an order of its own."""

    def ordered(self, call: str, ids: Ids) -> Ids:
        return tuple(ids[i] for i in permutation(len(ids), keyed_draw(0, f"order of {call}")))


class SpoiltWorker(CheckedWorker):
    """Puts junk where a key holds nothing."""

    spoils = True


class Recorder(Observer):
    """Writes a line for each call.

    Args:
        spoils: calls get junk where a key holds nothing.

    Attributes:
        path: the file; set before the first call.
    """

    path: Path

    def __init__(self, rank: int, *, spoils: bool) -> None:
        self._rank = rank
        self._spoils = spoils

    def begin(
        self, mfc: MFCDef, ctx: CallContext, interface: ModelInterface, model: Model, batch: SequenceSample
    ) -> tuple[Model, SequenceSample]:
        if self._spoils:
            batch = spoilt(batch)
        self._mfc, self._interface, self._batch = mfc, interface, batch
        self._given = {key: batch[key].clone() for key in batch.keys}
        self._generators = _generators()
        self._state_before = dict(_state(vars(interface), "", _DEPTH))
        self._engine = RecordingEngine(model.engine)
        return dataclasses.replace(model, engine=self._engine), batch

    def end(
        self, ctx: CallContext, model: Model, engine: Engine | None, outcome: SequenceSample | Mapping[str, float]
    ) -> None:
        output = outcome if isinstance(outcome, SequenceSample) else None
        gradients, weights = _sketches(engine) if isinstance(engine, DecoderEngine) else ({}, {})
        changed = [key for key, old in self._given.items() if not torch.equal(self._batch[key], old)]
        drawn = [name for name, state in _generators().items() if state != self._generators[name]]
        seen = CallSeen(
            rank=self._rank,
            step=ctx.step,
            call=ctx.call,
            ids=self._batch.ids,
            counts=counts_of(output if output is not None and "input_ids" in output else self._batch),
            outputs=_noted(ctx.notes) if output is None else _rows(output),
            metrics={} if isinstance(outcome, SequenceSample) else dict(outcome),
            sums=ctx.metrics.sums,
            maxima=ctx.metrics.maxima,
            minibatches=tuple(self._engine.minibatches),
            state_before=self._state_before,
            state=dict(_state(vars(self._interface), "", _DEPTH)),
            changed_inputs=tuple(changed),
            drawn_from=tuple(drawn),
            n_reductions=self._engine.n_reductions,
            gradients=gradients,
            weights=weights,
            places={**self._engine.places, **_place_of_method(self._mfc, self._interface)},
        )
        with self.path.open("ab") as file:
            file.write(msgspec.json.encode(seen) + b"\n")


class RecordingEngine:
    """The engine of a role, whose results it passes on, with all else that the engine has."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.minibatches: list[MinibatchSeen] = []
        self.n_reductions = 0
        self.places: dict[str, str] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def train_batch(
        self,
        minibatch: SequenceSample,
        loss_fn: LossFn,
        *,
        normaliser: float,
        micro_batching: MicroBatching,
        skip_step: Callable[[Mapping[str, float]], bool] | None = None,
    ) -> TrainResult:
        parts: list[PartSeen] = []
        self.places.setdefault("loss", place_of_function(loss_fn))

        @functools.wraps(loss_fn)
        def loss(out: ForwardOutput, part: SequenceSample) -> LossOutput:
            found = loss_fn(out, part)
            stats, maxima = _floats(found.stats), _floats(found.maxima)
            parts.append(PartSeen(part.ids, counts_of(part), float(found.loss.detach()), stats, maxima))
            return found

        result = self._engine.train_batch(
            minibatch, loss, normaliser=normaliser, micro_batching=micro_batching, skip_step=skip_step
        )
        self.minibatches.append(MinibatchSeen(minibatch.ids, float(normaliser), tuple(parts), result.grad_norm))
        return result

    def forward(self, batch: SequenceSample, post_fn: Callable[..., torch.Tensor], **settings: Any) -> torch.Tensor:
        self.places.setdefault("post", place_of_function(post_fn))
        return self._engine.forward(batch, post_fn, **settings)

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        self.n_reductions += 1
        return self._engine.all_reduce(tensor, op)


def spoilt(batch: SequenceSample) -> SequenceSample:
    """Return the batch with junk on transitions and tokens of prompts, in keys that are 0 on all of them.

    A call that writes such a key, as log-probabilities of responses, left these rows empty. Keys that have a value on
    some prompt stay as they are.
    """
    if "input_ids" not in batch or "prompt_mask" not in batch:
        return batch
    actions = action_mask(batch["prompt_mask"], batch.cu_seqlens("input_ids"))
    empty_of = {Per.TOKEN: batch["prompt_mask"], Per.TRANSITION: ~actions}
    data = dict(batch.data)
    for key, schema in batch.schemas.items():
        empty, tensor = empty_of.get(schema.per), batch[key]
        if empty is None or not tensor.is_floating_point() or len(tensor) != len(empty) or not bool(empty.any()):
            continue
        if not bool(tensor[empty].any()):
            data[key] = tensor.masked_fill(empty.reshape(-1, *[1] * (tensor.dim() - 1)), JUNK)
    return SequenceSample(batch.ids, batch.schemas, batch.seqlens, data)


def counts_of(batch: SequenceSample) -> dict[str, float]:
    """Count what the mean of a batch may be over."""
    counts = {"samples": float(len(batch))}
    if "input_ids" in batch:
        n_sequences = len(batch.flat_seqlens("input_ids"))
        counts |= {"sequences": float(n_sequences), "tokens": float(batch.n_rows("input_ids"))}
        counts["transitions"] = counts["tokens"] - n_sequences
        if "prompt_mask" in batch and batch.n_rows("prompt_mask") == batch.n_rows("input_ids"):
            counts["response tokens"] = float((~batch["prompt_mask"]).sum())
    return counts


def _place_of_method(mfc: MFCDef, interface: ModelInterface) -> dict[str, str]:
    names = {InterfaceType.GENERATE: "generate", InterfaceType.TRAIN_STEP: "train_step"}
    return {"method": place_of_function(getattr(interface, names.get(mfc.interface_type, "inference")))}


def _rows(batch: SequenceSample) -> dict[str, dict[str, Rows]]:
    found: dict[str, dict[str, Rows]] = {}
    for key in batch.keys:
        is_exact = not batch[key].is_floating_point()
        numbers = (tuple(rows.double().flatten().tolist()) for rows in batch.samples(key))
        found[key] = {
            sample_id: Rows(lengths, values, is_exact)
            for sample_id, lengths, values in zip(batch.ids, batch.seqlens[key], numbers, strict=True)
        }
    return found


def _noted(notes: SampleNotes) -> dict[str, dict[str, Rows]]:
    """Return the numbers of single responses that a train_step noted, such as their mean advantages."""
    return {
        name: {sample_id: Rows((1,) * len(values), values) for sample_id, values in noted.items()}
        for name, noted in notes.values.items()
    }


def _floats(values: Mapping[str, torch.Tensor]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}


def _generators() -> dict[str, object]:
    """Return the states of the generators that all code of a process shares, in a form that can be compared."""
    numpy_state = np.random.get_state(legacy=False)
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "random": random.getstate(),
        "numpy": repr(numpy_state["state"]["pos"]) + numpy_state["state"]["key"].tobytes().hex(),
    }


def _sketches(engine: DecoderEngine) -> tuple[dict[str, Sketch], dict[str, Sketch]]:
    """Return sketches of the first moments of AdamW and of the weights, by parameter."""
    gradients: dict[str, Sketch] = {}

    def keep(name: str, tensor: torch.Tensor) -> torch.Tensor:
        parameter, _, kind = name.rpartition("/")
        if kind == "exp_avg":
            gradients[parameter] = _sketch(tensor)
        return tensor

    engine.state_dict(keep)
    return gradients, {name: _sketch(tensor) for name, tensor in engine.kept_tensors().items()}


def _sketch(tensor: torch.Tensor) -> Sketch:
    numbers = tensor.detach().double().flatten()
    stride = max(1, -(-len(numbers) // _MOST_NUMBERS))
    return Sketch(float(numbers.norm()), tuple(numbers[::stride].tolist()))


def _state(values: Mapping[str, object], prefix: str, depth: int) -> Iterator[tuple[str, tuple[float, ...]]]:
    """Yield the numbers below an object's attributes with their dotted names."""
    for name, value in values.items():
        numbers = _numbers(value)
        if numbers is not None:
            if 0 < len(numbers) <= _MOST_STATE and all(map(math.isfinite, numbers)):
                yield f"{prefix}{name}", numbers
        elif isinstance(value, Mapping):
            yield from _state({str(key): item for key, item in value.items()}, f"{prefix}{name}.", depth)
        elif depth > 1 and hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
            yield from _state(vars(value), f"{prefix}{name}.", depth - 1)


def _numbers(value: object) -> tuple[float, ...] | None:
    """Return a value's numbers; None if it is no number, nor tensor, array or list of numbers."""
    if isinstance(value, int | float):
        return (float(value),)
    if isinstance(value, torch.Tensor | np.ndarray):
        flat = torch.as_tensor(value).detach().flatten()
        return tuple(flat[: _MOST_STATE + 1].double().tolist())
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return tuple(map(float, value)) if all(isinstance(item, int | float) for item in value) else None
    return None
