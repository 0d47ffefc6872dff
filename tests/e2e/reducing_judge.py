"""A call that drops one sample of a step and reduces over all workers: its replacement leaves a worker idle."""

from __future__ import annotations

from dataclasses import replace

import torch
from pydantic import Field

from realrl.algo.api import CallContext, Model, ModelInterface
from realrl.config.schema import RunConfig
from realrl.data.sample import SequenceSample
from realrl.graph.mfc import MFCDef
from realrl.sched.messages import KeySchema, Per
from tests.e2e import rejection_sampling


class Options(rejection_sampling.Options):
    """Choice of the sample that goes."""

    without: str = Field("0/0", description="id of the sample that is dropped")


class ReducingJudge(ModelInterface):
    """inference: `input_ids`, `prompt_mask` -> `scores`, of all samples but one."""

    def inference(self, model: Model, batch: SequenceSample, ctx: CallContext) -> SequenceSample:
        largest = float(model.engine.all_reduce(torch.tensor([batch["input_ids"].max()]), "max"))
        values = torch.full((len(batch),), largest)
        scores = batch.derive("input_ids", {"scores": (KeySchema("float32", Per.SEQUENCE), values)})
        return scores.select([i for i in batch.ids if i != ctx.algorithm.without])


def mfcs(config: RunConfig) -> list[MFCDef]:
    """The calls of one step."""
    own = "tests.e2e.reducing_judge:ReducingJudge"
    declared = rejection_sampling.EXPERIMENT.mfcs(config)
    return [replace(mfc, interface_impl=own) if mfc.name == "judge" else mfc for mfc in declared]


EXPERIMENT = replace(rejection_sampling.EXPERIMENT, name="reducing_judge", options=Options, mfcs=mfcs)
