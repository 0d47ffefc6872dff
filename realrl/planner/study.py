"""Findings about a request for a plan: choices, prices, plans of methods, judgements."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property

from realrl.errors import AllocationError
from realrl.plan.memory.connections import CUDA_CONTEXT
from realrl.planner.evaluate import PlanChecks, judge
from realrl.planner.request import Request
from realrl.planner.settings import PlanSettings
from realrl.search.fast import Price
from realrl.search.local.chains import Chain, ChainMaker
from realrl.search.local.walk import State
from realrl.search.memory.devices import Shown
from realrl.search.methods import METHODS
from realrl.search.problem import Draft, Problem, draft
from realrl.search.runners import Plan
from realrl.sim.report import Figures

_ON_ALL_DEVICES = "colocate", "real_heuristic"  # methods

Alike = tuple[tuple[int, ...], int]
"""Calls of equal work, and a number of replicas."""


class Study:
    """Findings about a request; each question is answered once, or whenever it is asked.

    Args:
        seed: as for `Planning`.
    """

    def __init__(self, request: Request, seed: int = 1) -> None:
        self.request, self.seed = request, seed

    @cached_property
    def draft(self) -> Draft:
        """The search, of which choices may have no prices yet.

        Raises:
            AllocationError: a pin is impossible.
        """
        request = self.request
        checks = PlanChecks(request)
        always = 0 if request.on_cpu else request.config.cluster.device_rows_bytes + CUDA_CONTEXT

        def shows(placed: Plan) -> Shown | None:
            shown = checks.shows(placed)
            return None if shown is None else replace(shown, n_bytes=shown.n_bytes - always)

        found = draft(
            request.workload,
            request.hardware,
            capacity=request.capacity - always,
            roles=request.spaces,
            pins=request.pins,
            kernels=request.kernels_alone,
        )
        return replace(found, model=replace(found.model, accepts=checks.accepts, shows=shows))

    @cached_property
    def problem(self) -> Problem:
        """The search, all of whose choices have prices.

        Raises:
            AllocationError: a call fits no mesh.
        """
        return self.draft.problem()

    def on_all_devices(self) -> Plan | None:
        """Return a plan with all calls on all devices, for which few choices are priced; None if none fits."""
        try:
            few = self.draft.on_all_devices().problem()
        except AllocationError:
            return None
        for method in _ON_ALL_DEVICES:
            with suppress(AllocationError):
                return METHODS[method].place(few, self.seed)
        return None

    # ------------------------------------------------------------ questions

    @property
    def prices_to_ask(self) -> list[Alike]:
        """Questions for `price`, which ask for all prices."""
        choices = self.draft.choices
        return [
            (calls, dp)
            for calls in self.draft.alike
            for dp in sorted({choice.strategy.dp for call in calls for choice in choices[call]})
        ]

    def price(self, alike: Alike) -> list[list[Price]]:
        """Return the prices of those choices of some calls that have so many replicas."""
        calls, dp = alike
        model, choices = self.draft.model, self.draft.choices
        return [[model.price(call, one) for one in choices[call] if one.strategy.dp == dp] for call in calls]

    def learn(self, prices: Mapping[Alike, list[list[Price]]]) -> None:
        """Take prices from elsewhere."""
        for (calls, dp), of_calls in prices.items():
            for call, found in zip(calls, of_calls, strict=True):
                own = [choice for choice in self.draft.choices[call] if choice.strategy.dp == dp]
                for choice, price in zip(own, found, strict=True):
                    self.draft.model.note(call, choice, price)

    def place(self, method: str) -> Plan | str:
        """Return the plan of a method; or the reason why it has none."""
        try:
            return METHODS[method].place(self.problem, self.seed)
        except AllocationError as error:
            return error.message

    def anneal(self, chain: Chain) -> list[State]:
        """Return the states of a chain."""
        return [*self.chains.states(chain)]

    @cached_property
    def chains(self) -> ChainMaker:
        """Maker of the chains of this process."""
        return ChainMaker(self.problem, self.seed)

    def settings_by(self, method: str) -> PlanSettings:
        """Return the settings of the plan of a method.

        Raises:
            AllocationError: it has none.
        """
        return self.request.settings_of(METHODS[method].place(self.problem, self.seed))

    def judge(self, settings: PlanSettings) -> Figures | str:
        """Return what the real scheduler makes of a plan; or the reason why it cannot run."""
        return judge(self.request, settings)
