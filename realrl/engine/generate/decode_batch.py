"""Continuous batching on one rank: finished rows leave, new prompts enter, the rest decode one token at a time.

All stages of a pipeline begin and finish a step alike, and compute it one after the other:

    begin    admit -> prefill prompts, copy them for their other responses; otherwise decode one token for every row
    compute  this stage's layers, chunk by chunk
    finish   record the tokens that the last stage sampled, retire finished rows

Shapes: B rows in this step, T tokens in this step, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from realrl.algo.api import GenerationResult
from realrl.cpu import MIN_GROWTH, CacheShape, KVCache, NewTokens, SampledTokens, Sampler, SamplingOp, SavedRow
from realrl.engine.generate.network import FusedNetwork
from realrl.engine.generate.philox import hash_words, row_uniforms, step_key
from realrl.engine.generate.recorded_steps import CACHE_GROWTH, RecordedSteps
from realrl.engine.generate.replay import Recorder
from realrl.engine.generate.request import GenerateRequest
from realrl.errors import CallError
from realrl.plan.samples.slot_table import Admission, Entry, SlotTable, prefill_chunks

RowIndices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PendingStep:
    """A step that has begun.

    Attributes:
        admission: the rows that enter; None for a decode step.
        rows: the B rows that get a token, by index sample * n_responses + response.
        n_tokens: T, the tokens whose hidden states pass from stage to stage; 0 if all prompts are in the cache already.
    """

    admission: Admission | None
    rows: RowIndices
    n_tokens: int


class DecodeBatch:
    """The rows of one request.

    Args:
        network: this rank's layers.
        request: a checked request that is not empty.
        max_rows: largest number of rows at a time.
        device: device of the network.
        recorder: maker of records of decode steps; None launches their operations one by one.

    Attributes:
        pending: the step that has begun and not finished, if any.
    """

    def __init__(
        self,
        network: FusedNetwork,
        request: GenerateRequest,
        *,
        max_rows: int,
        device: torch.device,
        recorder: Recorder | None = None,
    ) -> None:
        generation = request.generation
        self.pending: PendingStep | None = None
        self._network = network
        self._request = request
        self._device = device
        self._responses = Responses(request.n_rows, generation.max_new_tokens, request.stop_ids)
        self._prompt_lengths = np.array([len(prompt) for prompt in request.prompts], dtype=np.int64)
        max_rows = min(max_rows, request.n_rows)
        self._slots = SlotTable(self._prompt_lengths.tolist(), n_responses=generation.n_responses, max_rows=max_rows)
        max_tokens = int(self._prompt_lengths.max()) + generation.max_new_tokens - 1  # the last token is never read
        shape = CacheShape(network.n_layers, max_rows, network.n_kv_heads, network.config.head_dim, max_tokens)
        self._cache = KVCache(
            shape,
            dtype=network.dtype,
            device=device,
            grows=not (network.fuses_attention or network.attends_by_flash),
            growth=MIN_GROWTH if recorder is None else CACHE_GROWTH,
            token_major=network.attends_by_flash,
        )
        self._held: dict[int, tuple[SavedRow, torch.Tensor | None]] = {}
        sample_words = np.array([hash_words(i) for i in request.sample_ids], dtype=np.uint64)
        self._uniforms = row_uniforms(
            step_key(request.seed, request.step),
            sample_words.repeat(generation.n_responses, axis=0),
            np.tile(np.arange(generation.n_responses), len(sample_words)),
        )
        self._sampler: SamplingOp | None = None
        self._max_rows = max_rows
        self._recorded = None if recorder is None else self._record(recorder)

    @property
    def is_done(self) -> bool:
        return self._slots.is_done

    def begin(self) -> None:
        """Begin the next step: admit rows if it is worth a prefill, else decode."""
        admission = self._slots.admit() if self._slots.can_admit else None
        rows = self._row_indices()
        if admission is None:
            self.pending = PendingStep(None, rows, len(rows))
            return
        n_tokens = sum(int(self._prompt_lengths[entry.row.sample]) for entry in admission.prefills)
        self.pending = PendingStep(admission, rows[admission.entries[0].slot :], n_tokens)

    def compute(self, step: PendingStep, x: torch.Tensor | None, chunk: int = 0) -> torch.Tensor:
        """Compute the layers of one of this stage's chunks.

        Args:
            x: [T, H] from the chunk before; None for the first chunk of the model, and for a step without tokens.
            chunk: place among this stage's chunks, which come in order.

        Returns:
            [T, H] for the next chunk; of the last one logits [B, V].
        """
        return self._decode(x, chunk) if step.admission is None else self._enter(step.admission, x, chunk)

    def sample(self, step: PendingStep, logits: torch.Tensor) -> torch.Tensor:
        """Sample one token for each row of the step.

        Returns:
            Float64 [3, B], which holds the fields of `SampledTokens` exactly.

        Raises:
            InvalidLogitsError: a row's logits are not finite.
        """
        generation = self._request.generation
        if self._recorded is not None and step.admission is None:
            drawn = self._recorded.sample()
            if drawn is not None:
                return drawn
        if self._sampler is None:
            self._sampler = self._network.kernels.sampler(
                generation,
                self._request.stop_ids,
                max_rows=self._max_rows,
                vocab_size=logits.shape[1],
                device=self._device,
            )
        n_tokens = self._responses.n_tokens[step.rows]
        numbers = self._uniforms(step.rows, n_tokens)
        is_early = n_tokens < generation.min_new_tokens
        sampled = self._sampler(logits, torch.from_numpy(numbers).to(self._device), is_early)
        return torch.stack([sampled.tokens.double(), sampled.logprobs.double(), sampled.policy_logprobs.double()])

    def finish(self, step: PendingStep, sampled: SampledTokens) -> None:
        """Record the tokens, take finished rows out, and move others, with their cache, into the holes."""
        finished = np.flatnonzero(self._responses.append(step.rows, sampled))
        self.pending = None
        if not len(finished):
            return
        n_responses = self._request.generation.n_responses
        first_slot = len(self._slots.rows) - len(step.rows)
        for source, target in self._slots.retire((first_slot + finished).tolist()):
            row = self._slots.rows[target]
            n_generated = self._responses.n_tokens[row.sample * n_responses + row.response]
            self._cache.copy(source, target, int(self._prompt_lengths[row.sample] + n_generated - 1))

    def collect(self) -> GenerationResult:
        """All responses, in the order of the request."""
        return self._responses.collect()

    def invalid_logits(self, step: PendingStep, row: int) -> CallError:
        """Make the error for a row of the step whose logits are not finite."""
        sample_id = self._request.sample_ids[step.rows[row] // self._request.generation.n_responses]
        return CallError(
            f"the model's logits for sample {sample_id!r} are not finite",
            remedy="Look at the last train_step: a learning rate that is too high, or a broken checkpoint.",
            step=self._request.step,
        )

    # ------------------------------------------------------------ internals

    def _record(self, recorder: Recorder) -> RecordedSteps:
        network, request, rows, device = self._network, self._request, self._max_rows, self._device
        sampler = None
        if network.has_head(network.n_chunks - 1):
            size = network.config.vocab_size
            sampler = Sampler(request.generation, request.stop_ids, max_rows=rows, vocab_size=size, device=device)
            self._sampler = sampler.sample
        return RecordedSteps(network, self._cache, sampler, recorder, max_rows=rows, device=device)

    def _row_indices(self) -> RowIndices:
        n_responses = self._request.generation.n_responses
        return np.array([row.sample * n_responses + row.response for row in self._slots.rows], dtype=np.int64)

    def _enter(self, admission: Admission, x: torch.Tensor | None, chunk: int) -> torch.Tensor:
        """Fill the cache for the entering rows; returns hidden states [T, H], or logits [B, V] where the head is.

        Rows are copied when the last chunk has filled its layers.
        """
        slot_of: dict[int, int] = {}
        computed: list[torch.Tensor] = []
        start = 0
        lengths = [int(self._prompt_lengths[entry.row.sample]) for entry in admission.prefills]
        for part in prefill_chunks(lengths):
            entries, n_tokens = admission.prefills[part.start : part.stop], sum(lengths[part.start : part.stop])
            computed.append(self._prefill(entries, None if x is None else x[start : start + n_tokens], chunk))
            slot_of.update({entry.row.sample: entry.slot for entry in entries})
            start += n_tokens
        has_head = self._network.has_head(chunk)
        logits_of: dict[int, torch.Tensor] = {}
        if has_head:
            logits_of = {sample: logits for sample, (_, logits) in self._held.items() if logits is not None}
            rows = (row for logits in computed for row in logits)
            logits_of.update(zip((entry.row.sample for entry in admission.prefills), rows, strict=True))
        if chunk == self._network.n_chunks - 1:
            self._copy_rows(admission, slot_of, logits_of)
        if has_head:
            return torch.stack([logits_of[entry.row.sample] for entry in admission.entries])
        if not computed:
            return torch.empty(0, self._network.config.hidden_size, dtype=self._network.dtype, device=self._device)
        return computed[0] if len(computed) == 1 else torch.cat(computed)

    def _copy_rows(
        self, admission: Admission, slot_of: Mapping[int, int], logits_of: Mapping[int, torch.Tensor]
    ) -> None:
        """Copy prompts to the rows of their other responses, and keep what later ones need.

        Args:
            slot_of: sample -> slot, of the prompts that were computed.
            logits_of: sample -> logits [V] that follow its prompt, where the head is.
        """
        for entry in admission.copies:
            sample = entry.row.sample
            if sample in slot_of:
                self._cache.copy(slot_of[sample], entry.slot, int(self._prompt_lengths[sample]))
            else:
                self._cache.load(entry.slot, self._held[sample][0])
        if admission.drop is not None:
            del self._held[admission.drop]
        if admission.hold is not None:
            saved = self._cache.save(slot_of[admission.hold], int(self._prompt_lengths[admission.hold]))
            self._held[admission.hold] = (saved, logits_of.get(admission.hold))

    def _prefill(self, entries: Sequence[Entry], x: torch.Tensor | None, chunk: int) -> torch.Tensor:
        """Compute prompts into their slots; returns hidden states, or the logits [B, V] that follow the prompts."""
        samples = [entry.row.sample for entry in entries]
        lengths = self._prompt_lengths[samples]
        self._cache.reserve(int(lengths.max()))
        tokens = NewTokens.of_prompts(lengths.tolist(), first_row=entries[0].slot, device=self._device)
        if x is None:
            x = torch.cat([self._request.prompts[sample].to(self._device) for sample in samples])
        hidden = self._network.hidden(x, self._network.attention(self._cache, tokens), chunk)
        if not self._network.has_head(chunk):
            return hidden
        ends = torch.from_numpy(lengths.cumsum() - 1).to(self._device)
        return self._network.logits(hidden[ends])

    def _decode(self, x: torch.Tensor | None, chunk: int) -> torch.Tensor:
        """Feed every row its newest token; returns hidden states, or the logits [B, V] that follow."""
        network, rows = self._network, self._row_indices()
        n_generated = self._responses.n_tokens[rows]
        lengths = self._prompt_lengths[rows // self._request.generation.n_responses] + n_generated - 1
        self._cache.reserve(int(lengths.max()) + 1)
        if self._recorded is not None:
            if chunk == 0:
                is_early = n_generated < self._request.generation.min_new_tokens
                self._recorded.begin(self._responses.newest(rows), lengths, self._uniforms(rows, n_generated), is_early)
            return self._recorded.compute(x, chunk)
        if x is None:
            x = torch.from_numpy(self._responses.newest(rows)).to(self._device)
        tokens = NewTokens(torch.from_numpy(lengths).to(self._device))
        hidden = network.hidden(x, network.attention(self._cache, tokens), chunk)
        return network.logits(hidden) if network.has_head(chunk) else hidden


class Responses:
    """Token and log-probability buffers of all rows of a call.

    Attributes:
        n_tokens: int64 [n_rows], length of each response so far.

    Args:
        n_rows: number of responses.
        max_new_tokens: largest length of a response.
        stop_ids: tokens that end a response.
    """

    def __init__(self, n_rows: int, max_new_tokens: int, stop_ids: Sequence[int]) -> None:
        self.n_tokens = np.zeros(n_rows, dtype=np.int64)
        self._tokens = np.zeros((n_rows, max_new_tokens), dtype=np.int64)
        self._logprobs = np.zeros((n_rows, max_new_tokens), dtype=np.float32)
        self._policy_logprobs = np.zeros((n_rows, max_new_tokens), dtype=np.float32)
        self._stopped = np.zeros(n_rows, dtype=np.bool_)
        self._stop_ids = np.array(stop_ids, dtype=np.int64)

    def newest(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The last token of each row; every row must have one."""
        return self._tokens[rows, self.n_tokens[rows] - 1]

    def append(self, rows: npt.NDArray[np.int64], sampled: SampledTokens) -> npt.NDArray[np.bool_]:
        """Add one token to each row; returns True for rows that are finished, by a stop token or by length."""
        tokens = sampled.tokens.cpu().numpy()
        positions = self.n_tokens[rows]
        self._tokens[rows, positions] = tokens
        self._logprobs[rows, positions] = sampled.logprobs.cpu().numpy()
        self._policy_logprobs[rows, positions] = sampled.policy_logprobs.cpu().numpy()
        self.n_tokens[rows] += 1
        self._stopped[rows] = (tokens[:, None] == self._stop_ids).any(axis=1)
        return self._stopped[rows] | (self.n_tokens[rows] == self._tokens.shape[1])

    def collect(self) -> GenerationResult:
        """All rows in order, as views of one CPU tensor for each field."""
        is_token = np.arange(self._tokens.shape[1]) < self.n_tokens[:, None]
        lengths = self.n_tokens.tolist()

        def rows(values: npt.NDArray[np.int64] | npt.NDArray[np.float32]) -> list[torch.Tensor]:
            return list(torch.from_numpy(values[is_token]).split(lengths))

        return GenerationResult(
            responses=rows(self._tokens),
            logprobs=rows(self._logprobs),
            policy_logprobs=rows(self._policy_logprobs),
            truncated=(~self._stopped).tolist(),
        )
