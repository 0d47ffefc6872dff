"""Memory that every device of a plan needs, call by call, computed before anything starts.

    roles, their homes ──► parameters, optimizer state, gradients          there between calls, unless offloaded
    calls, their loads ──► copies, KV cache, activations                   there while the call runs
    checkpoints       ──► what is gathered for one, copies                 there while one is copied; copies may stay

A device runs one call at a time. Meanwhile it holds the state that its roles keep there, and the call's own memory.

A `MemoryModel` keeps what it has counted: ranks with the same part of a model are alike, on whatever mesh. Another plan
then costs a few additions of arrays over ranks.

Invariants of `MemoryModel.plan`:
- every rank of a call has a `Usage` for it, and no other rank has;
- a usage's total is the sum of its parts, and no part is negative;
- the parameters that the ranks of one data-parallel replica hold add up to the model, shared KV heads and a tied
  embedding's second copy on top;
- the state that a role keeps on a rank is counted in every call on that rank, except while it is offloaded;
- a save is planned on the ranks that keep state of a role, and nowhere else;
- equal input gives an equal plan, whatever was planned before;
- `MemoryModel.peaks` gives the largest of these usages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from realrl.plan.memory.cuts import CutModel, parts_of
from realrl.plan.memory.formulas import Kernels
from realrl.plan.memory.load import Load
from realrl.plan.memory.moves import Moves
from realrl.plan.memory.plan import SAVE, CallState, MemoryPlan, RoleState, Usage
from realrl.plan.memory.roles import RoleBytes
from realrl.plan.memory.saving import Saves
from realrl.plan.memory.step import Step
from realrl.plan.parameters.realloc_portions import Matrix
from realrl.shape import DecoderConfig


@dataclass(frozen=True)
class PeakGroup:
    """Ranks that need the most in the same call, and are alike in it."""

    ranks: tuple[int, ...]
    call: str
    usage: Usage


@dataclass(frozen=True, eq=False)
class Peaks:
    """The call in which each rank needs the most; the first of several.

    Attributes:
        names: calls, and `SAVE` if the run writes checkpoints.
        calls: int64 [ranks], place in `names`; -1 for a rank on which nothing runs.
        needs: int64 [ranks], bytes.
    """

    names: tuple[str, ...]
    calls: Matrix
    needs: Matrix
    _step: Callable[[], Step]

    @property
    def fullest(self) -> tuple[int, str, int]:
        """The rank that needs the most, its call, and its bytes."""
        rank = int(self.needs.argmax())
        return rank, self.names[self.calls[rank]], int(self.needs[rank])

    def groups(self) -> Iterator[PeakGroup]:
        """Yield the ranks that are alike, call by call."""
        step, everyone = self._step(), np.arange(len(self.calls))
        for place, name in enumerate(self.names):
            if not (self.calls == place).any():
                continue
            ranks, usages = step.usages(name)
            is_peak = self.calls[ranks] == place
            unique, which = np.unique(usages[:-1, is_peak], axis=1, return_inverse=True)
            for number, usage in enumerate(unique.T.tolist()):
                alike = everyone[ranks][is_peak][which.ravel() == number]
                yield PeakGroup(tuple(alike.tolist()), name, Usage(*usage))


def plan_memory(
    roles: Mapping[str, RoleState],
    calls: Sequence[CallState],
    *,
    kernels: Kernels | None = None,
    rows_bytes: int = 0,
    saves: Saves | None = None,
) -> MemoryPlan:
    """Plan the memory of one run; see `MemoryModel`."""
    return MemoryModel(kernels=kernels, rows_bytes=rows_bytes, saves=saves).plan(roles, calls)


class MemoryModel:
    """The memory of any plan of a run.

    Args:
        kernels: the machine's kernels; those of CUDA by default.
        rows_bytes: most bytes that rows of samples may take on a device.
        saves: the run's checkpoints; None if it writes none.
    """

    def __init__(self, *, kernels: Kernels | None = None, rows_bytes: int = 0, saves: Saves | None = None) -> None:
        self._rows_bytes, self.saves, self._moves = rows_bytes, saves, Moves()
        self._kernels = kernels or Kernels()
        self._models: dict[DecoderConfig, CutModel] = {}
        self._roles: dict[tuple[object, ...], RoleBytes] = {}

    def plan(self, roles: Mapping[str, RoleState], calls: Sequence[CallState]) -> MemoryPlan:
        """Add up the bytes that every device holds during every call that runs on it, and while a checkpoint is copied.

        Args:
            roles: roles that have parameters.
            calls: calls in the order of a step; those of roles without parameters take nothing of their own.

        Raises:
            AllocationError: a strategy does not fit a model.
        """
        step = self._step(roles, calls, is_whole=True)
        loads = {call.name: call.load for call in calls}
        if self.saves is not None:
            loads[SAVE] = Load(0)
        found = {}
        for name in loads:
            ranks, usages = step.usages(name)
            alike = {column: Usage(*column[:-1]) for column in set(zip(*usages.tolist(), strict=True))}
            spelled = (alike[column] for column in zip(*usages.tolist(), strict=True))
            found[name] = dict(zip(np.arange(step.n_ranks)[ranks].tolist(), spelled, strict=True))
        return MemoryPlan(found, {name: self._kept(role) for name, role in roles.items()}, loads)

    def peaks(
        self, roles: Mapping[str, RoleState], calls: Sequence[CallState], *, is_host_memory: bool = False
    ) -> Peaks:
        """Return what every device needs in the call that needs the most.

        Args:
            roles, calls: as for `plan`.
            is_host_memory: the devices are CPUs, where what is in host memory takes the same memory.

        Raises:
            AllocationError: a strategy does not fit a model.
        """
        step = self._step(roles, calls, is_whole=False)

        def needs(usages: Matrix) -> Matrix:
            return usages.sum(axis=0) if is_host_memory else usages[-1]

        found = [(call.name, *step.least(call)) for call in calls]
        if self.saves is not None:
            found.append((SAVE, *step.usages(SAVE), 0))
        floor, chosen = np.zeros(step.n_ranks, dtype=np.int64), np.full(step.n_ranks, -1)
        for _, ranks, usages, _ in found:
            floor[ranks] = np.maximum(floor[ranks], needs(usages))
        most = np.full(step.n_ranks, -1, dtype=np.int64)
        for place, (name, ranks, usages, room) in enumerate(found):
            n_bytes = needs(usages)
            if room and (n_bytes + room >= floor[ranks]).any():
                n_bytes = needs(step.usages(name)[1])
            is_more = n_bytes > most[ranks]
            chosen[ranks] = np.where(is_more, place, chosen[ranks])
            most[ranks] = np.where(is_more, n_bytes, most[ranks])
        names = tuple(name for name, *_ in found)
        return Peaks(names, chosen, np.maximum(most, 0), lambda: self._step(roles, calls, is_whole=True))

    def _step(self, roles: Mapping[str, RoleState], calls: Sequence[CallState], *, is_whole: bool) -> Step:
        return Step(
            {name: (self._role(role), role.home) for name, role in roles.items()},
            calls,
            is_whole=is_whole,
            moves=self._moves,
            rows_bytes=self._rows_bytes,
            saves=self.saves,
        )

    def _kept(self, role: RoleState) -> dict[int, Usage]:
        """Return rank -> bytes that a role keeps there; its gradients are those of its train_step."""
        parts = self._role(role).kept(role.home.strategy).parts
        usages = [Usage(part.parameters, part.optimizer, part.gradients, host=part.host) for part in parts]
        numbers = parts_of(role.home.strategy).tolist()
        return {rank: usages[number] for rank, number in zip(role.home.ranks, numbers, strict=True)}

    def _role(self, role: RoleState) -> RoleBytes:
        """Return the bytes of a role wherever it lives."""
        key = (role.model, role.is_trained, role.is_changed, role.is_averaged, role.backend, role.zero_stage,
               role.offloads_optimizer, role.checkpoints_activations)  # fmt: skip
        if key not in self._roles:
            if role.model not in self._models:
                self._models[role.model] = CutModel(role.model)
            self._roles[key] = RoleBytes(role, self._models[role.model], self._kernels, self.saves)
        return self._roles[key]
