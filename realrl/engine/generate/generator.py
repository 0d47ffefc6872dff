"""Text generation from the layers of a model, whole or spread over pipeline stages and tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from realrl.algo.api import GenerationResult
from realrl.algo.phases import Phases
from realrl.cpu import choose_kernels
from realrl.engine.generate.cuda_graphs import make_recorder
from realrl.engine.generate.decode_batch import DecodeBatch
from realrl.engine.generate.network import FusedNetwork
from realrl.engine.generate.pipeline import run_batches
from realrl.engine.generate.request import GenerateRequest
from realrl.engine.parallel import Parallel
from realrl.model.decoder import Decoder
from realrl.plan.samples.slot_table import divide_prompts, rows_at_a_time


def generate(
    decoder: Decoder, request: GenerateRequest, *, parallel: Parallel | None = None, phases: Phases | None = None
) -> GenerationResult:
    """Sample `n_responses` responses for each prompt of a request.

    The tokens depend on the weights, the prompt and (seed, step, sample id, response index) only: not on the other
    samples, their order, `max_batch_size`, or the number of ranks. Packed weights and the KV cache end with the call,
    so the parameters may change, move or be replaced afterwards.

    Args:
        decoder: this rank's layers of a language model.
        parallel: the ranks that hold the rest. All ranks of a pipeline make the same calls.
        phases: recorder of prefills and decode steps.

    Returns:
        Tensors on the CPU, outside of inference mode; the same on every rank.

    Raises:
        ConfigError: the stop tokens are impossible.
        CallError: a prompt cannot be continued, or logits are not finite; names the sample. Raised on every rank of
            the pipeline and its tensor-parallel groups.
    """
    request.check(decoder.config)
    parallel = Parallel() if parallel is None else parallel
    phases = Phases() if phases is None else phases
    n_shares = min(parallel.strategy.pp, request.generation.max_batch_size)
    shares = divide_prompts([len(prompt) for prompt in request.prompts], n_shares)
    with torch.inference_mode():
        batches = _decode(decoder, request, shares, parallel, phases) if shares else []
    return _join(shares, [batch.collect() for batch in batches], request.generation.n_responses)


def _decode(
    decoder: Decoder, request: GenerateRequest, shares: Sequence[Sequence[int]], parallel: Parallel, phases: Phases
) -> list[DecodeBatch]:
    generation, device = request.generation, decoder.device
    max_rows = rows_at_a_time(
        max(map(len, shares)),
        n_shares=len(shares),
        n_responses=generation.n_responses,
        max_batch_size=generation.max_batch_size,
    )
    with phases.phase("prepare weights"):
        network = FusedNetwork(decoder, choose_kernels(device, decoder.dtype, n_rows=max_rows), tp=parallel.tp)
    can_record = generation.cuda_graphs and parallel.tp.n_ranks == 1 and not network.waits
    recorder = make_recorder(device) if can_record else None
    batches = [
        DecodeBatch(network, _part(request, share), max_rows=max_rows, device=device, recorder=recorder)
        for share in shares
    ]
    run_batches(batches, network, parallel, device, phases)
    return batches


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
