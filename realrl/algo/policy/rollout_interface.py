"""Base class of the interfaces that train on rollouts: the KL controller, and the state that pieces keep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from realrl.algo.api import Engine, ModelInterface
from realrl.algo.policy.kl import KLController, make_controller
from realrl.algo.policy.rollout import Rollout, check_granularity
from realrl.config.policy_options import PolicyOptions
from realrl.data.sample import SequenceSample

_PIECE = "piece/"


class RolloutInterface(ModelInterface):
    """Keeps the KL controller. Policy and critic feed it the same numbers, so their weights stay equal."""

    def __init__(self) -> None:
        self._controller: KLController | None = None
        self._restored_kl_coef: float | None = None
        self._piece_state: dict[str, float] = {}

    def rollout(self, engine: Engine, batch: SequenceSample, options: PolicyOptions) -> Rollout:
        """Combine a batch with the current KL coefficient and the state of pieces.

        Raises:
            SampleError: a key has another granularity than the formulas need.
        """
        check_granularity(batch)
        if self._controller is None:
            start = options.kl_coef if self._restored_kl_coef is None else self._restored_kl_coef
            self._controller = make_controller(options.kl_controller, start, options.kl_target, options.kl_horizon)
        return Rollout(batch, options, engine.all_reduce, self._controller.coef, self._piece_state)

    def follow_kl(self, rollout: Rollout) -> None:
        """Update the KL controller with the KL of a batch; call once per batch."""
        if self._controller is not None and rollout.sequence_kl is not None:
            kl = rollout.moments(rollout.sequence_kl)
            self._controller.update(kl.mean, int(kl.count))

    def state_dict(self) -> dict[str, Any]:
        coef = self._restored_kl_coef if self._controller is None else self._controller.coef
        kept = {_PIECE + name: value for name, value in self._piece_state.items()}
        return kept if coef is None else {"kl_coef": coef, **kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._restored_kl_coef = state.get("kl_coef")
        self._controller = None
        kept = {name.removeprefix(_PIECE): float(value) for name, value in state.items() if name.startswith(_PIECE)}
        self._piece_state = kept
