"""A small experiment to configure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from realrl.config.schema import RunConfig, Section
from realrl.data.kinds import DatasetKind
from realrl.experiment.declaration import Experiment, Role
from realrl.graph.mfc import InterfaceType, MFCDef


class Inner(Section):
    width: int = Field(3, ge=1, description="how wide")


class Options(Section):
    """One option of each kind."""

    n_minibatches: int = Field(4, ge=1, description="optimizer steps per step")
    beta: float = Field(0.1, gt=0, lt=1, description="strength")
    limit: float | None = Field(None, gt=0, description="largest value")
    kind: Literal["plain", "fancy"] = Field("plain", description="which one")
    label: str = Field("x", description="text")
    weights: dict[str, float] = Field({}, description="by name")
    inner: Inner = Inner()


def mfcs(config: RunConfig) -> list[MFCDef]:
    n_minibatches = config.algorithm.n_minibatches
    return [
        MFCDef(
            "gen", "actor", InterfaceType.GENERATE, "ppo_actor", ("prompt_ids",), ("input_ids",), n_seqs=config.n_seqs
        ),
        MFCDef(
            "ref_inf", "ref", InterfaceType.INFERENCE, "ppo_actor", ("input_ids",), ("scores",), n_seqs=config.n_seqs
        ),
        MFCDef(
            "train",
            "actor",
            InterfaceType.TRAIN_STEP,
            "ppo_actor",
            ("input_ids", "scores"),
            n_seqs=config.n_seqs,
            n_minibatches=n_minibatches,
        ),
    ]


def experiment(defaults: Mapping[str, object] | None = None, **changes: object) -> Experiment:
    settings: dict[str, object] = {
        "name": "demo",
        "description": "an experiment for tests",
        "roles": {"actor": Role(trainable=True), "ref": Role(trainable=False, path_from="actor")},
        "dataset": DatasetKind.PROMPT,
        "mfcs": mfcs,
        "options": Options,
        "defaults": defaults or {},
    }
    return Experiment(**{**settings, **changes})  # type: ignore[arg-type]
