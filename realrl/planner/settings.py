"""The settings that a plan decides, as text and as the configuration has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from realrl.config.schema import CallConfig, RunConfig


@dataclass(frozen=True)
class PlanSettings:
    """All that a plan decides, and nothing else.

    Attributes:
        allocations: call -> strategy and mesh, such as "d8t2@0-1".
        n_mbs: call -> micro-batches of a minibatch and worker, where the plan chose their number.
        zero_stage, checkpointing, offload_optimizer: trained role -> stage of ZeRO, blocks that are computed again in
            the backward pass, and an optimizer in host memory.
        offload: roles in host memory between their last call of a step and the next step.
        fuse: two calls that train at the same time; the search names none, a file may.
    """

    allocations: Mapping[str, str]
    n_mbs: Mapping[str, int] = field(default_factory=dict)
    zero_stage: Mapping[str, int] = field(default_factory=dict)
    checkpointing: Mapping[str, bool] = field(default_factory=dict)
    offload_optimizer: Mapping[str, bool] = field(default_factory=dict)
    offload: tuple[str, ...] = ()
    fuse: tuple[str, ...] = ()

    def overrides(self) -> dict[str, Any]:
        """Return the settings, nested like the configuration."""
        places = {"mode": "manual", "calls": dict(self.allocations), "offload": list(self.offload)}
        places |= {"fuse": list(self.fuse)} if self.fuse else {}
        found: dict[str, Any] = {"allocation": places}
        if self.n_mbs:
            found["calls"] = {call: {"n_mbs": number} for call, number in self.n_mbs.items()}
        models: dict[str, Any] = {}
        for role, recomputes in self.checkpointing.items():
            models.setdefault(role, {})["activation_checkpointing"] = recomputes
        for key, by_role in (("zero_stage", self.zero_stage), ("offload", self.offload_optimizer)):
            for role, value in by_role.items():
                models.setdefault(role, {}).setdefault("optimizer", {})[key] = value
        return {**found, "models": models} if models else found

    def applied(self, config: RunConfig) -> RunConfig:
        """Return a configuration with these settings in the place of its own."""
        nested = self.overrides()
        models, calls = dict(config.models), dict(config.calls)
        for role, own in nested.get("models", {}).items():
            optimizer = models[role].optimizer.model_copy(update=own.pop("optimizer", {}))
            models[role] = models[role].model_copy(update={**own, "optimizer": optimizer})
        for name, own in nested.get("calls", {}).items():
            calls[name] = calls.get(name, CallConfig()).model_copy(update=own)
        places = {**nested["allocation"], "offload": self.offload}
        places |= {"fuse": self.fuse} if self.fuse else {}
        allocation = config.allocation.model_copy(update=places)
        return config.model_copy(update={"models": models, "calls": calls, "allocation": allocation})
