"""Direct preference optimisation from pairs of a chosen and a rejected answer: two roles, two calls."""

from __future__ import annotations

from realrl import DatasetKind, Experiment, InterfaceType, MFCDef, Role, RunConfig
from realrl.config.algorithms import DPOOptions
from realrl.experiment import policy_calls as add


def mfcs(config: RunConfig) -> list[MFCDef]:
    """The calls of one step: who runs, what it reads, what it gives."""
    n, tokens = config.n_seqs, ("input_ids", "prompt_mask")
    return [
        MFCDef("ref_inf", "ref", InterfaceType.INFERENCE, "ppo_actor", tokens, ("ref_logprobs",),
               output_key_remap={"logprobs": "ref_logprobs"}, n_seqs=n),
        MFCDef("actor_train", "actor", InterfaceType.TRAIN_STEP, "dpo", (*tokens, "ref_logprobs"), n_seqs=n,
               n_minibatches=config.algorithm.n_minibatches, log_return_value=True),
    ]  # fmt: skip


def role_changes(config: RunConfig) -> dict[str, Role | None]:
    """The reference is left out where the actor trains an adapter."""
    return {"ref": None} if add.has_adapter(config, "actor") else {}


EXPERIMENT = Experiment(
    name="dpo",
    description="direct preference optimisation from pairs of a chosen and a rejected answer",
    roles={"actor": Role(trainable=True), "ref": Role(trainable=False, path_from="actor")},
    dataset=DatasetKind.PREFERENCE_PAIR,
    options=DPOOptions,
    mfcs=mfcs,
    adds=(add.own_reference,),  # models.actor.lora.rank: ref_inf runs on the actor without its adapter
    role_changes=role_changes,
    eval_metrics=("loss", "accuracy", "margin"),
)
