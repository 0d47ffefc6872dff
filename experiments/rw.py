"""Reward model from preference pairs: one role, one call."""

from __future__ import annotations

from realrl import DatasetKind, Experiment, InterfaceType, MFCDef, Role, RunConfig
from realrl.config.algorithms import SFTOptions


def mfcs(config: RunConfig) -> list[MFCDef]:
    """The calls of one step: who runs, and what it reads."""
    return [
        MFCDef("reward_train", "reward", InterfaceType.TRAIN_STEP, "reward_model", ("input_ids",),
               n_seqs=config.n_seqs, n_minibatches=config.algorithm.n_minibatches, log_return_value=True),
    ]  # fmt: skip


EXPERIMENT = Experiment(
    name="rw",
    description="reward model from pairs of a chosen and a rejected answer",
    roles={"reward": Role(trainable=True, head="reward")},
    dataset=DatasetKind.PREFERENCE_PAIR,
    options=SFTOptions,
    mfcs=mfcs,
    eval_metrics=("loss", "accuracy", "margin"),
)
