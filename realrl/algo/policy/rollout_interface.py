"""Base class of the interfaces that train on rollouts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from realrl.algo.api import Engine, ModelInterface
from realrl.algo.policy.kl import adapted_coef
from realrl.algo.policy.rollout import Rollout, check_granularity
from realrl.config.policy_options import PolicyOptions
from realrl.data.sample import SequenceSample

_PIECE = "piece/"


class RolloutInterface(ModelInterface):
    """Keeps the KL coefficient, and the state of pieces.

    Policy and critic update the coefficient with the same numbers, so theirs stay equal.
    """

    def __init__(self) -> None:
        self._kl_coef: float | None = None  # None before the first batch
        self._piece_state: dict[str, float] = {}

    def rollout(self, engine: Engine, batch: SequenceSample, options: PolicyOptions) -> Rollout:
        """Combine a batch with the current KL coefficient and the state of pieces.

        Raises:
            SampleError: a key has another granularity than the formulas need.
        """
        check_granularity(batch)
        if self._kl_coef is None:
            self._kl_coef = options.kl_coef
        return Rollout(batch, options, engine.all_reduce, self._kl_coef, self._piece_state)

    def follow_kl(self, rollout: Rollout) -> None:
        """Adapt the KL coefficient, unless it is fixed, to the KL of a batch; call once per batch."""
        o = rollout.options
        if rollout.sequence_kl is not None and o.kl_controller == "adaptive":
            kl = rollout.moments(rollout.sequence_kl)
            self._kl_coef = adapted_coef(
                rollout.kl_coef, kl.mean, int(kl.count), target=o.kl_target, horizon=o.kl_horizon
            )

    def state_dict(self) -> dict[str, Any]:
        kept = {_PIECE + name: value for name, value in self._piece_state.items()}
        return kept if self._kl_coef is None else {"kl_coef": self._kl_coef, **kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._kl_coef = state.get("kl_coef")
        kept = {name.removeprefix(_PIECE): float(value) for name, value in state.items() if name.startswith(_PIECE)}
        self._piece_state = kept
