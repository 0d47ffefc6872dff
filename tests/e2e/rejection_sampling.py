"""An experiment of a user: generate, keep what a rule likes, fine-tune on that."""

from __future__ import annotations

import torch
from pydantic import Field

from realrl.algo.api import CallContext, Model, ModelInterface
from realrl.algo.packed import response_mask
from realrl.algo.supervised.sft import SFT
from realrl.config.algorithms import SFTOptions
from realrl.config.schema import RunConfig
from realrl.data.sample import SequenceSample
from realrl.experiment import DatasetKind, Experiment, Role
from realrl.graph.mfc import InterfaceType, MFCDef
from realrl.sched.messages import KeySchema, Per


class Options(SFTOptions):
    """The rule."""

    keep: int = Field(256, ge=0, description="responses whose token ids sum to less than this, modulo 256, are kept")


class Judge(ModelInterface):
    """inference: `input_ids`, `prompt_mask` -> `scores`, of the samples that it keeps."""

    def inference(self, model: Model, batch: SequenceSample, ctx: CallContext) -> SequenceSample:
        sums = torch.stack([tokens.sum() for tokens in batch.samples("input_ids")]) % 256
        ctx.metrics.add("judge/sum", float(sums.sum()), len(batch))
        ctx.metrics.add_max("judge/max", float(sums.max()))
        scores = batch.derive("input_ids", {"scores": (KeySchema("float32", Per.SEQUENCE), sums.float())})
        return scores.select([i for i, s in zip(batch.ids, sums.tolist(), strict=True) if s < ctx.algorithm.keep])


class Student(SFT):
    """train_step: fine-tuning that also tells how long the responses are."""

    def train_step(self, model: Model, batch: SequenceSample, ctx: CallContext) -> dict[str, float]:
        ctx.metrics.add("response_length/mean", float(response_mask(batch).sum()), len(batch))
        return super().train_step(model, batch, ctx)


def mfcs(config: RunConfig) -> list[MFCDef]:
    """The calls of one step."""
    tokens = ("input_ids", "prompt_mask")
    inference, ahead = InterfaceType.INFERENCE, config.max_staleness
    return [
        MFCDef("actor_gen", "actor", InterfaceType.GENERATE, "ppo_actor", ("prompt_ids",), tokens,
               n_seqs=config.n_seqs, max_staleness=ahead),
        MFCDef("judge", "judge", inference, "rejection_sampling:Judge", tokens, ("scores",), n_seqs=config.n_seqs,
               may_drop=True),
        MFCDef("actor_train", "actor", InterfaceType.TRAIN_STEP, "rejection_sampling:Student", (*tokens, "scores"),
               n_seqs=config.n_seqs, n_minibatches=config.algorithm.n_minibatches, log_return_value=True),
    ]  # fmt: skip


EXPERIMENT = Experiment(
    name="rejection_sampling",
    description="fine-tuning on responses that a rule likes",
    roles={"actor": Role(trainable=True), "judge": Role(trainable=False, head="none")},
    dataset=DatasetKind.PROMPT,
    options=Options,
    mfcs=mfcs,
)
