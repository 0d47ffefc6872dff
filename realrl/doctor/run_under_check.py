"""The run that is examined: its plan, and inputs of several checks, each read once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from realrl.config.schema import BUILT_IN, RunConfig
from realrl.data.datasets import Dataset, load_dataset
from realrl.data.kinds import DatasetKind
from realrl.data.tokenizer import load_tokenizer
from realrl.engine import device as devices
from realrl.experiment.evaluation import held_out_data
from realrl.experiment.models import DTYPES, role_configs
from realrl.experiment.run_plan import RunPlan
from realrl.model.dtypes import torch_dtype
from realrl.runtime.worker.roles import role_tokenizer
from realrl.shape import DecoderConfig

Recompose = Callable[[Sequence[str]], RunConfig]


@dataclass(frozen=True)
class RunUnderCheck:
    """A run that has not started.

    Attributes:
        recompose: returns the configuration with further overrides, to see their effect.
        device_memory_bytes: memory of each device; None for that of this machine.
        loads_models: True if checks may load a model.
        is_elsewhere: True if the run is meant for other machines: what this one has tells nothing then.
    """

    plan: RunPlan
    recompose: Recompose
    device_memory_bytes: int | None = None
    loads_models: bool = True
    is_elsewhere: bool = False
    tokenizers: dict[str, Any] = field(default_factory=dict)

    @property
    def left_out(self) -> dict[str, str]:
        """Names of checks that only the machine itself could make -> the reason."""
        if not self.is_elsewhere:
            return {}
        found = dict.fromkeys(("packages", "devices", "disk", "port", "start"), "only the machine itself could tell")
        folders = {self.config.models[name].path for name in self.plan.roles} - {BUILT_IN}
        bare = sorted(path for path in folders if not any(Path(path).glob("*.safetensors*")))
        if bare:
            found["weights"] = found["tokenizers"] = f"there is no model here, but its sizes: {', '.join(bare)}"
        return found

    @property
    def config(self) -> RunConfig:
        return self.plan.config

    @cached_property
    def models(self) -> dict[str, DecoderConfig]:
        """Role -> its model, for roles that have one."""
        return role_configs(self.plan)

    @cached_property
    def dtype(self) -> torch.dtype:
        """The dtype of computation."""
        return torch_dtype(DTYPES[self.config.precision])

    @cached_property
    def device(self) -> torch.device:
        """The device of the first worker; raises `ConfigError` where there is none."""
        return devices.resolve_device(self.config.cluster.device)

    @property
    def planned_device(self) -> torch.device:
        """The device that the run is planned for; it need not be present."""
        return torch.device("cuda") if self.config.cluster.device == "cuda" else self.device

    def tokenizer(self, path: str) -> Any:
        """Return the tokenizer of a model folder."""
        if path not in self.tokenizers:
            self.tokenizers[path] = load_tokenizer(path)
        return self.tokenizers[path]

    @cached_property
    def reading_tokenizer(self) -> Any:
        """The tokenizer that makes the dataset's tokens."""
        return role_tokenizer(self.plan)

    @cached_property
    def dataset(self) -> Dataset:
        """The run's dataset, or its validation data if it only evaluates."""
        config = held_out_data(self.config) if self.config.eval.only else self.config.dataset
        return load_dataset(config, self.kind, self.reading_tokenizer, is_held_out=self.config.eval.only)

    @property
    def kind(self) -> DatasetKind:
        """Kind of the dataset."""
        return self.plan.experiment.dataset
