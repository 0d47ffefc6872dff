"""Supervised fine-tuning on prompt-answer pairs: one role, one call."""

from __future__ import annotations

from realrl import DatasetKind, Experiment, InterfaceType, MFCDef, Role, RunConfig
from realrl.config.algorithms import SFTOptions


def mfcs(config: RunConfig) -> list[MFCDef]:
    """The calls of one step: who runs, and what it reads."""
    return [
        MFCDef("actor_train", "actor", InterfaceType.TRAIN_STEP, "sft", ("input_ids", "prompt_mask"),
               n_seqs=config.n_seqs, n_minibatches=config.algorithm.n_minibatches, log_return_value=True),
    ]  # fmt: skip


EXPERIMENT = Experiment(
    name="sft",
    description="supervised fine-tuning on prompts and answers",
    roles={"actor": Role(trainable=True)},
    dataset=DatasetKind.PROMPT_ANSWER,
    options=SFTOptions,
    mfcs=mfcs,
    eval_metrics=("loss",),
)
