"""Supervised fine-tuning on prompt-answer pairs: one role, one call."""

from __future__ import annotations

from realrl.config.algorithms import SFTOptions
from realrl.config.schema import RunConfig
from realrl.experiment import DatasetKind, Experiment, Role
from realrl.graph.mfc import InterfaceType, MFCDef


def mfcs(config: RunConfig) -> list[MFCDef]:
    """The calls of one step."""
    actor_train = MFCDef(
        name="actor_train",
        model_name="actor",
        interface_type=InterfaceType.TRAIN_STEP,
        interface_impl="sft",
        input_keys=("input_ids", "prompt_mask"),
        n_seqs=config.n_seqs,
        n_minibatches=config.algorithm.n_minibatches,
        log_return_value=True,
    )
    return [actor_train]


EXPERIMENT = Experiment(
    name="sft",
    description="supervised fine-tuning on prompts and answers",
    roles={"actor": Role(trainable=True)},
    dataset=DatasetKind.PROMPT_ANSWER,
    options=SFTOptions,
    mfcs=mfcs,
    eval_metrics=("loss",),
)
