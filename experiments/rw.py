"""Reward model from preference pairs: one role, one call."""

from __future__ import annotations

from realrl.config.algorithms import RWOptions
from realrl.config.schema import RunConfig
from realrl.experiment import DatasetKind, Experiment, Role
from realrl.graph.mfc import InterfaceType, MFCDef


def mfcs(config: RunConfig) -> list[MFCDef]:
    """The calls of one step."""
    reward_train = MFCDef(
        name="reward_train",
        model_name="reward",
        interface_type=InterfaceType.TRAIN_STEP,
        interface_impl="reward_model",
        input_keys=("input_ids",),
        n_seqs=config.n_seqs,
        n_minibatches=config.algorithm.n_minibatches,
        log_return_value=True,
    )
    return [reward_train]


EXPERIMENT = Experiment(
    name="rw",
    description="reward model from pairs of a chosen and a rejected answer",
    roles={"reward": Role(trainable=True, head="reward")},
    dataset=DatasetKind.PREFERENCE_PAIR,
    options=RWOptions,
    mfcs=mfcs,
    eval_metrics=("loss", "accuracy", "margin"),
)
