"""Text generation from the layers of a model, whole or spread over pipeline stages and tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from realrl.algo.api import GenerationResult
from realrl.config.schema import GenerationConfig
from realrl.cpu import choose_kernels
from realrl.engine.generate.decode_batch import DecodeBatch
from realrl.engine.generate.network import FusedNetwork
from realrl.engine.generate.pipeline import Pipeline
from realrl.engine.generate.request import GenerateRequest
from realrl.engine.parallel import Parallel
from realrl.model.decoder import Decoder
from realrl.model.layers.heads import LMHead


class Generator:
    """Samples responses from a language model.

    It keeps nothing between calls: packed weights and the KV cache live as long as a call, so the parameters may
    change, move or be replaced in between.

    Args:
        decoder: this rank's layers.
        head: the language-model head; None on a pipeline stage that has none.
        device: device of decoder and head.
        parallel: the ranks that hold the rest. All ranks of a pipeline make the same calls.
    """

    def __init__(
        self, decoder: Decoder, head: LMHead | None, *, device: torch.device, parallel: Parallel | None = None
    ) -> None:
        self._decoder = decoder
        self._head = head
        self._device = device
        self._parallel = Parallel() if parallel is None else parallel

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
        samples, their order, `generation.max_batch_size`, or the number of ranks.

        Args:
            prompts: int64 [tokens] each.
            sample_ids: one per prompt, distinct.
            generation: lengths, filters, stop tokens and `max_batch_size`, the number of rows in flight at a time.
            seed: the run's seed.
            step: the run's step.
            eos_id: token that ends a response, like `generation.stop_ids`.

        Returns:
            Tensors on the CPU, outside of inference mode; the same on every rank.

        Raises:
            ConfigError: the stop tokens are impossible.
            CallError: a prompt cannot be continued, or logits are not finite; names the sample. Raised on every rank of
                the pipeline and its tensor-parallel groups.
        """
        stop_ids = tuple(dict.fromkeys((eos_id, *generation.stop_ids)))
        request = GenerateRequest(prompts, sample_ids, generation, seed, step, stop_ids)
        request.check(self._decoder.config)
        shares = divide(request, self._parallel.strategy.pp)
        with torch.inference_mode():
            batches = self._decode(request, shares) if shares else []
        return _join(shares, [batch.collect() for batch in batches], generation.n_responses)

    def _decode(self, request: GenerateRequest, shares: Sequence[Sequence[int]]) -> list[DecodeBatch]:
        generation = request.generation
        longest = max(map(len, shares)) * generation.n_responses
        max_rows = min(longest, generation.max_batch_size // len(shares))
        kernels = choose_kernels(self._device, self._decoder.dtype, n_rows=max_rows)
        network = FusedNetwork(self._decoder, self._head, kernels, tp=self._parallel.tp)
        batches = [
            DecodeBatch(network, _part(request, share), max_rows=max_rows, device=self._device) for share in shares
        ]
        Pipeline(batches, network, self._parallel, self._device).run()
        return batches


def divide(request: GenerateRequest, n_shares: int) -> list[list[int]]:
    """Divide the samples, by index, into at most `n_shares` shares of nearly equal number and length; none is empty."""
    n_shares = min(n_shares, len(request.prompts), request.generation.max_batch_size)
    by_length = sorted(range(len(request.prompts)), key=lambda i: len(request.prompts[i]))
    return [sorted(by_length[share::n_shares]) for share in range(n_shares)]


def _part(request: GenerateRequest, samples: Sequence[int]) -> GenerateRequest:
    return replace(
        request,
        prompts=[request.prompts[i] for i in samples],
        sample_ids=[request.sample_ids[i] for i in samples],
    )


def _join(shares: Sequence[Sequence[int]], results: Sequence[GenerationResult], n_responses: int) -> GenerationResult:
    """Put the responses of all shares into the order of the samples."""
    places = [
        (sample * n_responses + response, share, i * n_responses + response)
        for share, samples in enumerate(shares)
        for i, sample in enumerate(samples)
        for response in range(n_responses)
    ]
    order = [(share, row) for _, share, row in sorted(places)]
    return GenerationResult(
        responses=[results[share].responses[row] for share, row in order],
        logprobs=[results[share].logprobs[row] for share, row in order],
        policy_logprobs=[results[share].policy_logprobs[row] for share, row in order],
        truncated=[results[share].truncated[row] for share, row in order],
    )
