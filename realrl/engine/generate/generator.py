"""Continuous batching: finished rows leave, new prompts enter, the rest decode one token at a time.

    admit -> prefill prompts, copy them for their other responses ─┐
                                                                   ├─> sample, record, retire what is finished
    otherwise -> decode one token for every row ───────────────────┘

Shapes: B rows in this step, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from realrl.algo.api import GenerationResult
from realrl.config.schema import GenerationConfig
from realrl.engine.generate.attention import DecodeAttention, PrefillAttention
from realrl.engine.generate.cache import CacheShape, KVCache, SavedRow
from realrl.engine.generate.network import FusedNetwork
from realrl.engine.generate.philox import hash_words, step_key, uniforms
from realrl.engine.generate.request import Request
from realrl.engine.generate.responses import Responses
from realrl.engine.generate.sampler import InvalidLogitsError, Sampler
from realrl.engine.generate.schedule import Admission, Entry, Schedule
from realrl.errors import CallError
from realrl.model.decoder import Decoder
from realrl.model.heads import LMHead

_PREFILL_TOKENS = 4096  # bounds the activations of one prefill pass

RowIndices = npt.NDArray[np.int64]


class Generator:
    """Samples responses from a language model.

    Keeps nothing between calls: packed weights and the KV cache live as long as a call, so the parameters may change,
    move or be replaced in between.

    Args:
        decoder: whole, not sharded.
        head: its language-model head.
        device: where both live.
    """

    def __init__(self, decoder: Decoder, head: LMHead, *, device: torch.device) -> None:
        self._decoder = decoder
        self._head = head
        self._device = device

    def generate(
        self,
        prompts: Sequence[torch.Tensor],
        sample_ids: Sequence[str],
        generation: GenerationConfig,
        *,
        seed: int,
        step: int,
        eos_id: int,
    ) -> GenerationResult:
        """Sample `generation.n_responses` responses per prompt.

        The tokens depend on the weights, the prompt and (seed, step, sample id, response index) only: not on the other
        samples, their order, or `generation.max_batch_size`.

        Args:
            prompts: int64 [tokens] each.
            sample_ids: one per prompt, distinct.
            generation: lengths, filters, stop tokens and `max_batch_size`, the rows that are computed at a time.
            seed: of the run.
            step: of the run.
            eos_id: ends a response, like `generation.stop_ids`.

        Returns:
            Tensors on the CPU, outside of inference mode.

        Raises:
            ConfigError: impossible stop tokens.
            CallError: a prompt that cannot be continued, or logits that are not finite; names the sample.
        """
        stop_ids = tuple(dict.fromkeys((eos_id, *generation.stop_ids)))
        request = Request(prompts, sample_ids, generation, seed, step, stop_ids)
        request.check(self._decoder.config)
        responses = Responses(request.n_rows, generation.max_new_tokens, stop_ids)
        if request.n_rows:
            with torch.inference_mode():
                run = _Run(FusedNetwork(self._decoder, self._head), request, responses, self._device)
                while not run.is_done:
                    run.step()
        return responses.collect()


class _Run:
    """One generate call. A row is identified by its index sample * n_responses + response."""

    def __init__(self, network: FusedNetwork, request: Request, responses: Responses, device: torch.device) -> None:
        generation = request.generation
        self._network = network
        self._request = request
        self._responses = responses
        self._device = device
        self._prompt_lengths = np.array([len(prompt) for prompt in request.prompts], dtype=np.int64)
        max_rows = min(generation.max_batch_size, request.n_rows)
        self._schedule = Schedule(self._prompt_lengths.tolist(), n_responses=generation.n_responses, max_rows=max_rows)
        config = network.config
        max_tokens = int(self._prompt_lengths.max()) + generation.max_new_tokens - 1  # the last token is never read
        shape = CacheShape(config.n_layers, max_rows, config.n_kv_heads, config.head_dim, max_tokens)
        self._cache = KVCache(shape, dtype=config.dtype, device=device)
        self._sampler = Sampler(
            generation, request.stop_ids, max_rows=max_rows, vocab_size=config.vocab_size, device=device
        )
        self._held: dict[int, tuple[SavedRow, torch.Tensor]] = {}
        self._key = step_key(request.seed, request.step)
        self._sample_words = np.array([hash_words(i) for i in request.sample_ids], dtype=np.uint64)

    @property
    def is_done(self) -> bool:
        return self._schedule.is_done

    def step(self) -> None:
        """Let rows enter, or decode a token for all; then retire those that are finished."""
        if self._schedule.can_admit:
            first_slot, logits = self._enter(self._schedule.admit())
        else:
            first_slot, logits = 0, self._decode()
        rows = self._row_indices()[first_slot:]
        finished = self._sample(rows, logits)
        self._retire(first_slot + np.flatnonzero(finished))

    def _row_indices(self) -> RowIndices:
        n_responses = self._request.generation.n_responses
        return np.array([row.sample * n_responses + row.response for row in self._schedule.rows], dtype=np.int64)

    def _enter(self, admission: Admission) -> tuple[int, torch.Tensor]:
        """Fill the cache for the entering rows; returns the first of their slots and their logits [B, V]."""
        logits_of: dict[int, torch.Tensor] = {sample: logits for sample, (_, logits) in self._held.items()}
        slot_of: dict[int, int] = {}
        for chunk in self._chunks(admission.prefills):
            logits = self._prefill(chunk)
            logits_of.update({entry.row.sample: row for entry, row in zip(chunk, logits, strict=True)})
            slot_of.update({entry.row.sample: entry.slot for entry in chunk})
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
            self._held[admission.hold] = (saved, logits_of[admission.hold])
        entries = admission.entries
        return entries[0].slot, torch.stack([logits_of[entry.row.sample] for entry in entries])

    def _chunks(self, entries: Sequence[Entry]) -> Iterator[list[Entry]]:
        chunk: list[Entry] = []
        n_tokens = 0
        for entry in entries:
            length = int(self._prompt_lengths[entry.row.sample])
            if chunk and n_tokens + length > _PREFILL_TOKENS:
                yield chunk
                chunk, n_tokens = [], 0
            chunk.append(entry)
            n_tokens += length
        if chunk:
            yield chunk

    def _prefill(self, entries: Sequence[Entry]) -> torch.Tensor:
        """Compute prompts into their slots; returns the logits [B, V] that follow them."""
        samples = [entry.row.sample for entry in entries]
        lengths = self._prompt_lengths[samples]
        self._cache.reserve(int(lengths.max()))
        attention = PrefillAttention(self._cache, entries[0].slot, lengths.tolist(), self._device)
        input_ids = torch.cat([self._request.prompts[sample].to(self._device) for sample in samples])
        hidden = self._network.hidden(input_ids, attention.positions, attention)
        ends = torch.from_numpy(lengths.cumsum() - 1).to(self._device)
        return self._network.logits(hidden[ends])

    def _decode(self) -> torch.Tensor:
        """Feed every row its newest token; returns the logits [B, V] that follow."""
        rows = self._row_indices()
        newest = self._responses.newest(rows)
        lengths = (
            self._prompt_lengths[rows // self._request.generation.n_responses] + self._responses.n_tokens[rows] - 1
        )
        self._cache.reserve(int(lengths.max()) + 1)
        input_ids = torch.from_numpy(newest).to(self._device)
        positions = torch.from_numpy(lengths).to(self._device)
        config = self._network.config
        attention = DecodeAttention(self._cache, positions, n_heads=config.n_heads, dtype=config.dtype)
        return self._network.logits(self._network.hidden(input_ids, positions, attention))

    def _sample(self, rows: RowIndices, logits: torch.Tensor) -> npt.NDArray[np.bool_]:
        """Append one token to each of these rows; returns which are finished."""
        generation = self._request.generation
        samples, responses = np.divmod(rows, generation.n_responses)
        n_tokens = self._responses.n_tokens[rows]
        numbers = uniforms(self._key, self._sample_words[samples], responses, n_tokens)
        is_early = n_tokens < generation.min_new_tokens
        try:
            sampled = self._sampler.sample(logits, torch.from_numpy(numbers).to(self._device), is_early)
        except InvalidLogitsError as error:
            raise CallError(
                f"the model's logits for sample {self._request.sample_ids[samples[error.row]]!r} are not finite",
                remedy="Look at the last train_step: a learning rate that is too high, or a broken checkpoint.",
                step=self._request.step,
            ) from None
        return self._responses.append(rows, sampled)

    def _retire(self, slots: npt.NDArray[np.int64]) -> None:
        """Take out the rows at these slots and move others into the holes, with their cache."""
        if not len(slots):
            return
        n_responses = self._request.generation.n_responses
        for move in self._schedule.retire(slots.tolist()):
            row = self._schedule.rows[move.target]
            n_generated = self._responses.n_tokens[row.sample * n_responses + row.response]
            self._cache.copy(move.source, move.target, int(self._prompt_lengths[row.sample] + n_generated - 1))
