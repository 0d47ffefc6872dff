"""Samplers of responses, chosen by ``algorithm.sampler``."""

from __future__ import annotations

from realrl.algo.api import CallContext, GenerationResult, Model
from realrl.data.sample import SequenceSample


def sample(model: Model, prompts: SequenceSample, ctx: CallContext) -> GenerationResult:
    """`generation.n_responses` independent responses, sampled as ``generation.*`` says."""
    return model.engine.generate(
        prompts, ctx.generation, seed=ctx.seed, step=ctx.step, eos_id=model.tokenizer.eos_token_id
    )


def greedy(model: Model, prompts: SequenceSample, ctx: CallContext) -> GenerationResult:
    """A single response, of the likeliest token at each position."""
    generation = ctx.generation.model_copy(update={"temperature": 0.0, "n_responses": 1})
    return model.engine.generate(prompts, generation, seed=ctx.seed, step=ctx.step, eos_id=model.tokenizer.eos_token_id)
