"""Kahneman-Tversky optimisation from answers labelled good or bad: two roles, two calls."""

from __future__ import annotations

from realrl.config.algorithms import KTOOptions
from realrl.config.schema import RunConfig
from realrl.experiment import DatasetKind, Experiment, Role
from realrl.experiment.calls import ACTOR, REFERENCE, TOKENS, has_adapter, reference_call
from realrl.graph.mfc import InterfaceType, MFCDef


def mfcs(config: RunConfig) -> list[MFCDef]:
    """The calls of one step."""
    actor_train = MFCDef(
        name="actor_train",
        model_name="actor",
        interface_type=InterfaceType.TRAIN_STEP,
        interface_impl="kto",
        input_keys=(*TOKENS, "ref_logprobs", "label"),
        n_seqs=config.n_seqs,
        n_minibatches=config.algorithm.n_minibatches,
        log_return_value=True,
    )
    return [reference_call(config), actor_train]


def role_changes(config: RunConfig) -> dict[str, Role | None]:
    """An actor with an adapter is its own reference."""
    return {"ref": None} if has_adapter(config, "actor") else {}


EXPERIMENT = Experiment(
    name="kto",
    description="Kahneman-Tversky optimisation from answers that are labelled good or bad",
    roles={"actor": ACTOR, "ref": REFERENCE},
    dataset=DatasetKind.UNPAIRED,
    options=KTOOptions,
    mfcs=mfcs,
    role_changes=role_changes,
)
