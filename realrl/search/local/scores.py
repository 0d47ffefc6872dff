"""Answers about whole plans: the period of one, its bytes, whether it is accepted; and what answers have shown."""

from __future__ import annotations

import math

from realrl.search.memory.devices import Learned
from realrl.search.problem import Problem
from realrl.search.runners import Plan


class Scores:
    """Answers about plans of one problem.

    Attributes:
        learned: about bytes of plans, from those that were not accepted.
    """

    def __init__(self, problem: Problem) -> None:
        self.learned, self._model = Learned(), problem.model

    def period(self, plan: Plan, *, limit: float = math.inf) -> float:
        """Return the period of a plan, as `Model.period` does."""
        return self._model.period(plan, limit=limit)

    def likely(self, plan: Plan, limit: float = math.inf) -> int:
        """Return the bytes that the fullest device needs as far as is known, as `DeviceMemory.likely` does."""
        return self._model.memory.likely(plan, self.learned, limit)

    def is_accepted(self, plan: Plan) -> bool:
        """Return True if a plan is accepted; else learn why it is not."""
        return self._model.is_accepted(plan, self.learned)
