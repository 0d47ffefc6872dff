"""Rewards that are Python functions, and weighted sums of rewards: inference calls that need no engine."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch

from realrl.algo.api import CallContext, Model, ModelInterface
from realrl.config.reward_options import OVERLONG, REWARD_MODEL
from realrl.config.schema import Section
from realrl.data.conversations import Message, conversation, split_turns
from realrl.data.sample import SequenceSample
from realrl.errors import CallError, RunError
from realrl.experiment.rewards import MODEL_REWARDS, SHORT_FORM
from realrl.rewards.call import NO_NUMBER, NO_NUMBERS, Traits
from realrl.rewards.pool import TOO_LATE, FunctionSpec, InProcessPool, LoadError, Outcome, ProcessPool, Request
from realrl.sched.messages import KeySchema, Per

log = logging.getLogger(__name__)

METADATA = "metadata"
DEFAULT_CACHE_SHARE = 0.2


@dataclass(frozen=True)
class _Part:
    """One reward of several, with the fields of `realrl.config.reward_options.RewardPart`."""

    name: str
    function: str
    weight: float = 1.0
    reads: str = "auto"
    timeout_s: float = 10.0
    on_failure: Literal["error", "zero", "drop"] = "error"
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_function(self) -> bool:
        return self.function not in (REWARD_MODEL, OVERLONG)


class WeightedRewards(ModelInterface):
    """inference: `input_ids`, `prompt_mask` -> `rewards`, the weighted sum of several rewards.

    It reads `metadata` (the dataset row's other fields, JSON) if there is any, for functions that take a row, and
    `model_rewards` if one part is the reward model. It uses only the model's tokenizer, and that only for text.
    The result lacks samples for which a function with ``on_failure="drop"`` failed. Each part logs
    ``<metrics>/<name>/mean`` and ``/std`` before weighting. ``<metrics>/<name>/failed`` is the share of responses for
    which a function failed, unless that ends the run.

    Args:
        parts: name -> fields of `RewardPart`.
        concurrency: number of processes for all functions together; a function need not be thread-safe.
        async_concurrency: number of responses that an async function has in hand at a time in each process.
        in_process: True calls functions in this thread, where a debugger can stop; then nothing can interrupt them.
        metrics: prefix of the metrics' names.
    """

    def __init__(
        self,
        parts: Mapping[str, Mapping[str, Any]],
        *,
        concurrency: int = 2,
        async_concurrency: int = 32,
        in_process: bool = False,
        metrics: str = "reward",
    ) -> None:
        self._parts = [_Part(name, **settings) for name, settings in parts.items()]
        self._functions = [part for part in self._parts if part.is_function]
        self._metrics = metrics
        specs = [FunctionSpec(p.function, p.reads, p.timeout_s, p.options) for p in self._functions]
        self._pool = (
            InProcessPool(specs, async_concurrency)
            if in_process
            else ProcessPool(specs, concurrency, async_concurrency)
        )

    def inference(self, model: Model, batch: SequenceSample, ctx: CallContext) -> SequenceSample:
        """Return `rewards`, float32 per sequence, on the device of `input_ids`; without the samples to drop.

        Raises:
            CallError: a function failed for a response and its `on_failure` is "error"; names the sample.
            ConfigError: a function cannot be found.
            RunError: a function cannot be loaded, or its processes cannot be kept alive.
        """
        responses = _Responses(batch.to(torch.device("cpu")), model.tokenizer)
        values = {part.name: self._value(part, responses, ctx) for part in self._parts if not part.is_function}
        dropped: set[str] = set()
        if responses.owners and self._functions:
            try:
                with ctx.phases.phase("reward functions"):
                    values |= self._run(responses, dropped, model, ctx)
            except LoadError as error:
                self._pool.close()
                raise error.set_by([*_keys_of(ctx.algorithm, error.function)]) from None
            except RunError:
                self._pool.close()
                raise
        total = torch.zeros(len(responses.owners), dtype=torch.float64)
        kept = torch.tensor([sample_id not in dropped for sample_id, _ in responses.owners], dtype=torch.bool)
        for part in self._parts if responses.owners else ():
            total += part.weight * values[part.name]
            self._log_values(part, values[part.name][kept], ctx)
        rewards = total.float().to(batch["input_ids"].device)
        for part in self._parts if len(self._parts) > 1 else ():
            ctx.notes.add(f"reward_parts/{part.name}", responses.batch, values[part.name].tolist())
        result = batch.derive("input_ids", {"rewards": (KeySchema("float32", Per.SEQUENCE), rewards)})
        return result.select([i for i in batch.ids if i not in dropped]) if dropped else result

    def close(self) -> None:
        """End the processes now, not with this one; `inference` starts new ones."""
        self._pool.close()

    def _value(self, part: _Part, responses: _Responses, ctx: CallContext) -> torch.Tensor:
        """Compute a reward that needs no function, float64 [S]."""
        if part.function == REWARD_MODEL:
            return responses.batch[MODEL_REWARDS].double()
        options = {"max_tokens": ctx.generation.max_new_tokens, **part.options}
        return overlong_penalty(responses.lengths, **options)

    def _run(self, responses: _Responses, dropped: set[str], model: Model, ctx: CallContext) -> dict[str, torch.Tensor]:
        """Call all functions; returns float64 [S] by part, 0 for a failed response. Adds samples to `dropped`."""
        requests: list[Request] = []
        scored: list[Sequence[int]] = []  # request -> its responses
        for number, traits in enumerate(self._pool.traits()):
            groups: Sequence[Sequence[int]] = responses.samples if traits.is_group else responses.singles
            for owned in groups:
                if owned:
                    requests.append(responses.request(number, owned, traits))
                    scored.append(owned)
        values = {part.name: torch.zeros(len(responses.owners), dtype=torch.float64) for part in self._functions}
        n_failed = dict.fromkeys(values, 0)

        def is_fatal(outcome: Outcome) -> bool:
            part = self._functions[requests[outcome.index].part]
            return outcome.failure is not None and part.on_failure == "error"

        for outcome in until_failure(self._pool.score(requests), len(requests), is_fatal):
            part, owned = self._functions[requests[outcome.index].part], scored[outcome.index]
            if outcome.work is not None:
                process, begin_s, end_s = outcome.work
                ctx.phases.beside(part.function.rpartition(":")[2], begin_s, end_s, process=process)
            if outcome.failure is None:
                values[part.name][list(owned)] = torch.tensor(list(outcome.rewards), dtype=torch.float64)
                continue
            self._handle(part, outcome, [responses.owners[n] for n in owned], model, ctx)
            n_failed[part.name] += len(owned)
            if part.on_failure == "drop":
                dropped.add(responses.owners[owned[0]][0])
        for part in self._functions:
            if part.on_failure != "error":
                ctx.metrics.add(self._metric(part, "failed"), n_failed[part.name], len(responses.owners))
        return values

    def _handle(
        self, part: _Part, outcome: Outcome, owners: Sequence[tuple[str, int]], model: Model, ctx: CallContext
    ) -> None:
        sample_id, response = owners[0]
        where = f"sample {sample_id!r} " + (f"(response {response})" if len(owners) == 1 else "(all responses)")
        what = f"the reward function {part.function!r} {outcome.failure}"
        if part.on_failure == "zero":
            log.warning("%s at step %d scores %s 0: %s", ctx.call, ctx.step, where, what)
            return
        if part.on_failure == "drop":
            log.warning("%s at step %d drops %s: %s", ctx.call, ctx.step, where, what)
            return
        error = CallError(
            f"{ctx.call} of role {model.name.role!r} at step {ctx.step}, {where}: {what}",
            remedy=self._remedy(part, outcome.fault),
            call=ctx.call,
            step=ctx.step,
        )
        error.sample_ids = (sample_id,)
        raise error

    def _remedy(self, part: _Part, fault: str) -> str:
        if fault == NO_NUMBER:
            return (
                "Return a number. To log a second number, make it a reward of its own with weight 0: "
                "algorithm.rewards.NAME=FILE:FUNCTION algorithm.rewards.NAME.weight=0."
            )
        if fault == NO_NUMBERS:
            return "Return a list with a number for each response."
        slow = f", raise {self._key(part, 'timeout_s')}" if fault == TOO_LATE else ""
        return (
            f"Make the function {'faster' if slow else 'handle it'}{slow}, or set {self._key(part, 'on_failure')}=zero "
            "to score such responses 0, =drop to leave such samples out."
        )

    def _key(self, part: _Part, field_name: str) -> str:
        """The configuration key of a part's setting."""
        is_short_form = part.name == SHORT_FORM
        return f"algorithm.reward_{field_name}" if is_short_form else f"algorithm.rewards.{part.name}.{field_name}"

    def _metric(self, part: _Part, what: str) -> str:
        return f"{self._metrics}/{part.name}/{what}"

    def _log_values(self, part: _Part, values: torch.Tensor, ctx: CallContext) -> None:
        ctx.metrics.add_values(f"{self._metrics}/{part.name}", values.tolist())


class FunctionReward(WeightedRewards):
    """inference: `input_ids`, `prompt_mask` -> `rewards`, given by one function.

    Args:
        function: "module:function" or "file.py:function", called as ``function(prompt, response) -> float``, or with
            the dataset row's other fields and the conversation too (`realrl.rewards.call`). A response is what the
            policy generated, its stop token included; text leaves special tokens out.
        reads: "ids" (lists of int), "text", or "auto": ids if the first two parameters are named ``*_ids``.
        timeout_s: time limit for one response.
        concurrency, async_concurrency, in_process: see `WeightedRewards`.
        on_failure: "error" ends the run, "zero" scores the response 0 and logs a warning, "drop" leaves the sample out
            (the call must be one that ``may_drop``).
    """

    def __init__(
        self,
        function: str,
        *,
        reads: Literal["auto", "ids", "text"] = "auto",
        timeout_s: float = 10.0,
        concurrency: int = 2,
        async_concurrency: int = 32,
        on_failure: Literal["error", "zero", "drop"] = "error",
        in_process: bool = False,
    ) -> None:
        part = {"function": function, "reads": reads, "timeout_s": timeout_s, "on_failure": on_failure}
        super().__init__(
            {SHORT_FORM: part}, concurrency=concurrency, async_concurrency=async_concurrency, in_process=in_process
        )

    def _metric(self, part: _Part, what: str) -> str:
        return f"{self._metrics}/{what}"

    def _log_values(self, part: _Part, values: torch.Tensor, ctx: CallContext) -> None:
        """Log nothing: the call that trains on the only reward logs it as `reward/mean`."""


def _keys_of(value: Any, function: str, key: str = "algorithm") -> Iterator[str]:
    """Yield the keys of the algorithm's options that name a function."""
    if value == function:
        yield key
    elif isinstance(value, Section | Mapping):
        for name, one in value if isinstance(value, Section) else value.items():
            yield from _keys_of(one, function, f"{key}.{name}")


def until_failure(
    outcomes: Iterable[Outcome], n_requests: int, is_fatal: Callable[[Outcome], bool]
) -> Iterator[Outcome]:
    """Yield outcomes as they come; of fatal ones the first by its request alone, as the last one.

    Processes are not equally quick from one run to the next, and yet a run tells of the same response each time.
    """
    coming, first = set(range(n_requests)), None
    for outcome in outcomes:
        coming.discard(outcome.index)
        if is_fatal(outcome):
            first = outcome if first is None or outcome.index < first.index else first
        elif first is None:
            yield outcome
        if first is not None and first.index < min(coming, default=n_requests):
            yield first
            return


class _Responses:
    """A batch in the form for reward functions; text and rows are made at their first use.

    Attributes:
        owners: (sample id, number of the response in the sample) of every response.
        samples: the numbers of the responses of each sample.
        singles: the number of each response in a list of its own.
        lengths: int64 [S], length of each response.
    """

    def __init__(self, batch: SequenceSample, tokenizer: Any) -> None:
        self.batch = batch
        self._tokenizer = tokenizer
        counts = [len(sequences) for sequences in batch.seqlens["input_ids"]]
        self.owners = [(i, n) for i, count in zip(batch.ids, counts, strict=True) for n in range(count)]
        ends = torch.tensor(counts, dtype=torch.int64).cumsum(0).tolist()
        self.samples = [range(end - count, end) for end, count in zip(ends, counts, strict=True)]
        self.singles = [[n] for n in range(len(self.owners))]

    def request(self, part: int, owned: Sequence[int], traits: Traits) -> Request:
        """Make the request to function number `part` for the responses `owned`, all of one sample."""
        pairs = self._ids if traits.reads == "ids" else self._text
        responses = [pairs[n][1] for n in owned]
        row = self._rows[self.owners[owned[0]][0]] if traits.takes_row else None
        talks = [self._conversations[n] for n in owned] if traits.takes_messages else [None]
        if traits.is_group:
            return Request(part, pairs[owned[0]][0], responses, row, talks if traits.takes_messages else None)
        return Request(part, pairs[owned[0]][0], responses[0], row, talks[0])

    @cached_property
    def lengths(self) -> torch.Tensor:
        masks = [mask for sample in self.batch.sequences("prompt_mask") for mask in sample]
        return torch.tensor([int((~mask).sum()) for mask in masks], dtype=torch.int64)

    @cached_property
    def _turns(self) -> list[tuple[list[int], list[tuple[list[int], bool]]]]:
        """Of each response: its prompt, and the runs of tokens after it, each with True if it was not generated."""
        tokens = [t.tolist() for sample in self.batch.sequences("input_ids") for t in sample]
        masks = [m.tolist() for sample in self.batch.sequences("prompt_mask") for m in sample]
        return [split_turns(t, m) for t, m in zip(tokens, masks, strict=True)]

    @cached_property
    def _ids(self) -> list[tuple[list[int], list[int]]]:
        return [
            (prompt, [token for tokens, is_given in turns if not is_given for token in tokens])
            for prompt, turns in self._turns
        ]

    def _decoded(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    @cached_property
    def _text(self) -> list[tuple[str, str]]:
        return [(self._decoded(prompt), self._decoded(response)) for prompt, response in self._ids]

    @cached_property
    def _conversations(self) -> list[list[Message]]:
        """Of each response: the messages of its prompt, and what followed."""
        return [
            conversation(
                self._rows[sample_id].get("prompt"),
                self._decoded(prompt),
                [(self._decoded(tokens), is_given) for tokens, is_given in turns],
            )
            for (sample_id, _), (prompt, turns) in zip(self.owners, self._turns, strict=True)
        ]

    @cached_property
    def _rows(self) -> dict[str, Mapping[str, Any]]:
        if METADATA not in self.batch:
            return {sample_id: {} for sample_id in self.batch.ids}
        packed = self.batch.samples(METADATA)
        return {i: json.loads(bytes(rows.tolist())) for i, rows in zip(self.batch.ids, packed, strict=True)}


def overlong_penalty(lengths: torch.Tensor, max_tokens: int, cache_tokens: int | None = None) -> torch.Tensor:
    """Soft overlong punishment: 0 up to ``max_tokens - cache_tokens``, then falling linearly to -1 at `max_tokens`.

    Yu et al. 2025, "DAPO: an open-source LLM reinforcement learning system at scale", equation 13.

    Args:
        lengths: int64 [S], tokens of each response, its stop token included.
        max_tokens: length from which the penalty is -1.
        cache_tokens: length of the slope; default: a fifth of `max_tokens`, as in the paper, and at least 1.

    Returns:
        float64 [S], in [-1, 0].

    Raises:
        ValueError: not 0 < cache_tokens <= max_tokens.
    """
    cache = max(1, round(DEFAULT_CACHE_SHARE * max_tokens)) if cache_tokens is None else cache_tokens
    if not 0 < cache <= max_tokens:
        raise ValueError(f"cache_tokens={cache} must be above 0 and at most max_tokens={max_tokens}")
    return ((max_tokens - cache - lengths.double()) / cache).clamp(-1.0, 0.0)
