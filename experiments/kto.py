"""Kahneman-Tversky optimisation: DPO's calls on single answers that are labelled good or bad."""

from dataclasses import replace

from realrl import DatasetKind, MFCDef, RunConfig
from realrl.config.algorithms import KTOOptions
from realrl_experiments.dpo import EXPERIMENT as DPO


def mfcs(config: RunConfig) -> list[MFCDef]:
    """DPO's calls; actor_train reads the label too."""
    ref_inf, actor_train = DPO.mfcs(config)
    return [ref_inf, replace(actor_train, interface_impl="kto", input_keys=(*actor_train.input_keys, "label"))]


EXPERIMENT = DPO.variant(
    "kto",
    "Kahneman-Tversky optimisation from answers that are labelled good or bad",
    dataset=DatasetKind.UNPAIRED,
    options=KTOOptions,
    mfcs=mfcs,
    eval_metrics=(),
)
