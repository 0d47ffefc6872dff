"""Chains of annealing: how many there are, from which plans, how long, and how hot.

    plan ─────────┬─► chain of changes, hot ──► cool, where only better plans are taken ─┬─► best plan ──► chain,
                  ├─► another one ───────────────────────────────────────────────────────┤                 less hot
    other meshes ─┴─► ... ───────────────────────────────────────────────────────────────┘

Chains from one plan find more than one from what another one has found, which may be a plan that it cannot leave. Some
begin with a plan on other meshes, as no chain from the best one may get there. Most of them pass plans that lack
memory, at a price, to reach those behind them: where devices are nearly full, a call can be quicker only after another
one keeps less. Others do not, and settle among plans that fit. Annealing proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

from realrl.compiler import UnavailableError
from realrl.search.local.anneal import Annealing, Kind
from realrl.search.local.compiled import CompiledAnnealing
from realrl.search.local.walk import State
from realrl.search.problem import Problem
from realrl.search.runners import Plan

_STAYS = Kind(apart=0.1, groups=0.0, pairs=0.2, passes=False, hot=0.1)
_PASSES = Kind(apart=0.1, groups=0.1, pairs=0.1, passes=True, hot=0.1)
_PARTS = Kind(apart=0.4, groups=0.1, pairs=0.1, passes=True, hot=0.1)
_GATHERS = Kind(apart=0.3, groups=0.3, pairs=0.1, passes=True, hot=0.05)
_SINGLE = Kind(apart=0.0, groups=0.0, pairs=0.0, passes=True, hot=0.1)
_SINGLE_HOT = _SINGLE._replace(hot=0.3)
_COOL = Kind(apart=0.1, groups=0.2, pairs=0.2, passes=True, hot=0.02)


class Length(NamedTuple):
    """Proposals of a chain: some for each choice of a call, and the most on few devices."""

    per_choice: int
    most: int


class Recipe(NamedTuple):
    """Settings of a chain in a round.

    Attributes:
        start: number of the plan that it begins with, best first; the last one if there are fewer.
    """

    kind: Kind
    length: Length
    start: int = 0


Rounds = Sequence[Sequence[Recipe]]

# where memory is short, chains that stay find the best plan far more often, or never leave where they begin
_ROUNDS: Rounds = (
    (Recipe(_STAYS, Length(120, 45_000)), Recipe(_PASSES, Length(80, 30_000))),
    (Recipe(_COOL, Length(27, 10_000)),),
)
_LONG = Length(5000, 300_000)
_FEW_DEVICES, _LEAST_SHARE = 32, 0.2  # with more, proposals take longer, and are fewer: as many as so large a share
_NEXT, _FAR = 1, 9  # numbers of plans on other meshes
_COMPILED: Rounds = (
    (
        Recipe(_PARTS, _LONG, _FAR),
        Recipe(_GATHERS, _LONG),
        Recipe(_SINGLE, _LONG),
        Recipe(_SINGLE_HOT, _LONG, _NEXT),
        Recipe(_SINGLE, _LONG, _FAR),
        Recipe(_SINGLE_HOT, _LONG),
        Recipe(_PASSES, _LONG),
        Recipe(_STAYS, _LONG),
    ),
    (Recipe(_COOL, _LONG), Recipe(_COOL, _LONG)),
)
_ON_MANY_DEVICES: Rounds = (_COMPILED[0][:4], _COMPILED[1])


class Chain(NamedTuple):
    """A chain from a plan, by its round and its number there, which decide what is proposed."""

    plan: Plan
    round: int
    number: int


Chains = Callable[[Sequence[Chain]], Iterable[Iterable[State]]]
"""Maker of chains, of which none depends on another one: a call returns the states of each."""


class ChainMaker:
    """Maker of the chains of one problem.

    Args:
        seed: decides what they propose.
    """

    def __init__(self, problem: Problem, seed: int) -> None:
        self._problem, self._seed = problem, seed
        n_simulations = 1 if problem.model.alone == 1.0 else 3  # of a plan
        n_devices = max(_FEW_DEVICES, problem.model.cluster.n_devices)
        self._share = max(_LEAST_SHARE, _FEW_DEVICES / n_devices) / n_simulations

    def states(self, chain: Chain) -> Iterator[State]:
        """Yield the states of a chain while it is made; it ends where another one begins."""
        kind, length, _ = self._rounds[chain.round][chain.number]
        seed, annealing = f"{self._seed} {chain.round} {chain.number}", self._compiled or Annealing(self._problem)
        n_proposals = int(self._share * min(length.per_choice * annealing.n_choices, length.most))
        return annealing.run(chain.plan, kind, n_proposals, seed=seed)

    def annealed(self, plans: Sequence[Plan], chains: Chains | None = None) -> Iterator[State]:
        """Yield plans with their periods, of which those that are better than all before are accepted.

        After `TICK` proposals comes (None, inf).

        Args:
            plans: the best plan, which fits, and then the best ones of other arrangements of meshes.
            chains: what makes the chains; None makes one after the other.
        """
        starts, least = plans, self._problem.model.period(plans[0])
        for number, recipes in enumerate(self._rounds):
            begun = [starts[min(recipe.start, len(starts) - 1)] for recipe in recipes]
            asked = [Chain(plan, number, place) for place, plan in enumerate(begun)]
            for states in chains(asked) if chains else map(self.states, asked):
                for found, period in states:
                    if found is not None and period < least:
                        starts, least = [found, *starts[1:]], period
                    yield found, period

    @cached_property
    def _compiled(self) -> CompiledAnnealing | None:
        try:
            return CompiledAnnealing(self._problem)
        except UnavailableError:
            return None

    @property
    def _rounds(self) -> Rounds:
        if self._compiled is None:
            return _ROUNDS
        return _ON_MANY_DEVICES if self._problem.has_many_devices else _COMPILED
