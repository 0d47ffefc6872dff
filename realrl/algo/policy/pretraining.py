"""Pretraining loss: a policy also learns the dataset's own answers.

Ouyang et al. 2022, "Training language models to follow instructions with human feedback", equation 2: the policy's loss
plus `ptx_coef` times the mean negative log-likelihood of other text, here the answers to the batch's prompts.

An answer is one more sequence of its sample. All its tokens are marked as prompt, so that no other loss includes them;
`ANSWER_WEIGHTS` marks its transitions.
"""

from __future__ import annotations

import torch

from realrl.algo.api import CallContext, Model
from realrl.algo.packed import response_mask
from realrl.data.datasets import answer_in
from realrl.data.sample import SequenceSample
from realrl.data.tokenizer import encode_batch
from realrl.errors import CallError
from realrl.sched.messages import KeySchema, Per

ANSWER_WEIGHTS = "answer_weights"


def with_answers(data: SequenceSample, metadata: SequenceSample, model: Model, ctx: CallContext) -> SequenceSample:
    """`data` with each sample's answer as its last sequence, and `answer_weights`, float32 per transition.

    Args:
        data: `input_ids`, `prompt_mask` and keys per token, transition, sequence or sample; 0 on the answers.
        metadata: `metadata` of the same samples, which holds the answer of their row.
        model: its tokenizer encodes answers.
        ctx: names the minibatches of one pass.

    Returns:
        `answer_weights` are 0 off the answers. The weighted sum over a minibatch's answer tokens, divided by its number
        of actions, is the mean over its answer tokens, both over all ranks.

    Raises:
        CallError: a row has no answer; names the sample.
    """
    answers = _answers(metadata, model, ctx)
    sequences = {key: data.sequences(key) for key in data.keys}
    weights = _weights(data, answers, model, ctx)
    columns: dict[str, tuple[KeySchema, list[list[torch.Tensor]]]] = {key: (data.schemas[key], []) for key in data.keys}
    columns[ANSWER_WEIGHTS] = (KeySchema("float32", Per.TRANSITION), [])
    for i, answer in enumerate(answers):
        n_prompt = int(sequences["prompt_mask"][i][0].long().cumprod(0).sum())  # later ones are what tools said
        prompt = sequences["input_ids"][i][0][:n_prompt]
        tokens = torch.cat([prompt, torch.tensor(answer, dtype=prompt.dtype, device=prompt.device)])
        for key in data.keys:
            own = sequences[key][i]
            extra = _extra(key, data.schemas[key].per, own[0], tokens)
            columns[key][1].append(own if extra is None else [*own, extra])
        of_answer = torch.zeros(len(tokens) - 1, device=tokens.device)
        of_answer[len(prompt) - 1 :] = weights[i]
        before = [torch.zeros(len(t) - 1, device=tokens.device) for t in sequences["input_ids"][i]]
        columns[ANSWER_WEIGHTS][1].append([*before, of_answer])
    return SequenceSample.from_lists(data.ids, columns).to(model.engine.device)


def _extra(key: str, per: Per, like: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor | None:
    """Rows of a key for an answer; None for a per-sample key."""
    if key == "input_ids":
        return tokens
    if key == "prompt_mask":
        return torch.ones_like(tokens, dtype=torch.bool)
    rows = {Per.TOKEN: len(tokens), Per.TRANSITION: len(tokens) - 1, Per.SEQUENCE: 1}
    return like.new_zeros(rows[per], *like.shape[1:]) if per in rows else None


def _answers(metadata: SequenceSample, model: Model, ctx: CallContext) -> list[list[int]]:
    """Token ids of each sample's answer, the end of sequence included."""
    texts = []
    for sample_id, packed in zip(metadata.ids, metadata.samples("metadata"), strict=True):
        text = answer_in(bytes(packed.tolist()))
        if not text:
            error = CallError(
                f"{ctx.call} at step {ctx.step}: the row of sample {sample_id!r} has no answer, and algorithm.ptx_coef="
                f"{ctx.algorithm.ptx_coef:g} trains on the answers of all rows",
                remedy="Give every row a field answer, or set algorithm.ptx_coef=0.",
                call=ctx.call,
                step=ctx.step,
            )
            error.sample_ids = (sample_id,)
            raise error
        texts.append(text)
    end = model.tokenizer.eos_token_id
    return [[*tokens, end] for tokens in encode_batch(model.tokenizer, texts, with_start=False)]


def _weights(data: SequenceSample, answers: list[list[int]], model: Model, ctx: CallContext) -> list[float]:
    """Weight of each sample's answer tokens: actions / answer tokens of its minibatch, over all ranks."""
    place = {sample_id: i for i, ids in enumerate(ctx.minibatches) for sample_id in ids}
    totals = torch.zeros(2, len(ctx.minibatches), dtype=torch.float64, device=model.engine.device)
    for i, ids in enumerate(ctx.minibatches):
        totals[0, i] = float(response_mask(data.select(ids)).sum())
    for sample_id, answer in zip(data.ids, answers, strict=True):
        totals[1, place[sample_id]] += len(answer)
    n_actions, n_tokens = model.engine.all_reduce(totals).clamp(min=1.0)
    ratios = (n_actions / n_tokens).tolist()
    return [ratios[place[sample_id]] for sample_id in data.ids]
