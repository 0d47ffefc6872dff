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
from functools import cached_property

import numpy as np

from realrl.plan.memory.cuts import CutModel, parts_of
from realrl.plan.memory.formulas.local import Kernels
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


class Peaks:
    """Memory of every rank in the call that needs the most there.

    Messages that a rank sends are a small part of that, and take far longer to count than all the rest. They are
    counted for the calls on whose ranks a question depends on them.

    Args:
        step: the calls, with all fields of usages, and with sums alone.
        is_host_memory: what is in host memory takes the same memory.
    """

    def __init__(self, step: Callable[[bool], Step], names: Sequence[str], *, is_host_memory: bool) -> None:
        self.names = tuple(names)
        self._step, self._sums, self._is_host_memory = step, step(False), is_host_memory
        self._least = [self._sums.least(name) for name in names]
        self._needs = [self._of(usages) for _, usages, _ in self._least]
        self._rooms = [room for *_, room in self._least]

    def fits(self, capacity: int) -> bool:
        """Return True if no rank needs more than `capacity` bytes in any call."""
        for place, needs in enumerate(self._needs):
            if needs.max(initial=0) <= capacity < needs.max(initial=0) + self._rooms[place]:
                self._count_messages(place)
        return all(needs.max(initial=0) <= capacity for needs in self._needs)

    @property
    def known(self) -> tuple[int, str, int]:
        """`fullest`, with messages as far as they were counted."""
        most = max(needs.max(initial=0) for needs in self._needs)
        found = []
        for place, needs in enumerate(self._needs):
            if needs.max(initial=0) == most:
                ranks, _, _ = self._least[place]
                found.append((int(self._everyone[ranks][needs == most].min()), place))
        rank, place = min(found)
        return rank, self.names[place], int(most)

    @property
    def fullest(self) -> tuple[int, str, int]:
        """The rank that needs the most, the first of several; its first call that needs as much; and the bytes."""
        floor = max(needs.max(initial=0) for needs in self._needs)
        for place, needs in enumerate(self._needs):
            if needs.max(initial=0) + self._rooms[place] >= floor:
                self._count_messages(place)
        return self.known

    @cached_property
    def by_rank(self) -> tuple[Matrix, Matrix]:
        """int64 [ranks]: the call that needs the most, the first of several, as its place in `names`; and its bytes.

        The call is -1, and the bytes are 0, where nothing runs.
        """
        floor = np.zeros(self._sums.n_ranks, dtype=np.int64)
        for (ranks, _, _), needs in zip(self._least, self._needs, strict=True):
            floor[ranks] = np.maximum(floor[ranks], needs)
        calls, most = np.full(len(floor), -1), np.full(len(floor), -1, dtype=np.int64)
        for place, (ranks, _, _) in enumerate(self._least):
            if self._rooms[place] and (self._needs[place] + self._rooms[place] >= floor[ranks]).any():
                self._count_messages(place)
            needs = self._needs[place]
            is_more = needs > most[ranks]
            calls[ranks] = np.where(is_more, place, calls[ranks])
            most[ranks] = np.where(is_more, needs, most[ranks])
        return calls, np.maximum(most, 0)

    def groups(self) -> Iterator[PeakGroup]:
        """Yield the ranks that are alike in the call that needs the most, call by call."""
        step, (calls, _) = self._step(True), self.by_rank
        for place, name in enumerate(self.names):
            if not (calls == place).any():
                continue
            ranks, usages = step.usages(name)
            is_peak = calls[ranks] == place
            unique, which = np.unique(usages[:-1, is_peak], axis=1, return_inverse=True)
            for number, usage in enumerate(unique.T.tolist()):
                alike = self._everyone[ranks][is_peak][which.ravel() == number]
                yield PeakGroup(tuple(alike.tolist()), name, Usage(*usage))

    @property
    def _everyone(self) -> Matrix:
        return np.arange(self._sums.n_ranks)

    def _of(self, usages: Matrix) -> Matrix:
        needs: Matrix = usages.sum(axis=0) if self._is_host_memory else usages[-1]
        return needs

    def _count_messages(self, place: int) -> None:
        if self._rooms[place]:
            self._needs[place], self._rooms[place] = self._of(self._sums.usages(self.names[place])[1]), 0


def plan_memory(
    roles: Mapping[str, RoleState],
    calls: Sequence[CallState],
    *,
    kernels: Kernels | None = None,
    rows_bytes: int = 0,
    runtime_bytes: Mapping[int, int] | None = None,
    saves: Saves | None = None,
) -> MemoryPlan:
    """Plan the memory of one run; see `MemoryModel` and its `plan`."""
    model = MemoryModel(kernels=kernels, rows_bytes=rows_bytes, saves=saves)
    return model.plan(roles, calls, runtime_bytes=runtime_bytes)


class MemoryModel:
    """The memory of any plan of a run.

    Args:
        kernels: the machine's kernels; those of CUDA by default.
        rows_bytes: most bytes that rows of samples may take on a device.
        saves: the run's checkpoints; None if it writes none.
    """

    def __init__(self, *, kernels: Kernels | None = None, rows_bytes: int = 0, saves: Saves | None = None) -> None:
        self._rows_bytes, self.saves, self.moves = rows_bytes, saves, Moves()
        self._kernels = kernels or Kernels()
        self._models: dict[DecoderConfig, CutModel] = {}
        self._roles: dict[tuple[object, ...], RoleBytes] = {}

    def plan(
        self,
        roles: Mapping[str, RoleState],
        calls: Sequence[CallState],
        *,
        runtime_bytes: Mapping[int, int] | None = None,
    ) -> MemoryPlan:
        """Add up the bytes that every device holds during every call that runs on it, and while a checkpoint is copied.

        Args:
            roles: roles that have parameters.
            calls: calls in the order of a step; those of roles without parameters take nothing of their own.
            runtime_bytes: rank -> bytes that its process takes on the device before any call; none by default.

        Raises:
            AllocationError: a strategy does not fit a model.
        """
        step = self._step(roles, calls, runtime_bytes, is_whole=True)
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
        self,
        roles: Mapping[str, RoleState],
        calls: Sequence[CallState],
        *,
        runtime_bytes: Mapping[int, int] | None = None,
        is_host_memory: bool = False,
    ) -> Peaks:
        """Return what every device needs in the call that needs the most.

        Args:
            roles, calls, runtime_bytes: as for `plan`.
            is_host_memory: the devices are CPUs, where what is in host memory takes the same memory.

        Raises:
            AllocationError: a strategy does not fit a model.
        """
        names = [call.name for call in calls] + ([SAVE] if self.saves is not None else [])
        return Peaks(
            lambda is_whole: self._step(roles, calls, runtime_bytes, is_whole=is_whole),
            names,
            is_host_memory=is_host_memory,
        )

    def _step(
        self,
        roles: Mapping[str, RoleState],
        calls: Sequence[CallState],
        runtime_bytes: Mapping[int, int] | None,
        *,
        is_whole: bool,
    ) -> Step:
        return Step(
            {name: (self._role(role), role.home) for name, role in roles.items()},
            calls,
            is_whole=is_whole,
            moves=self.moves,
            rows_bytes=self._rows_bytes,
            runtime_bytes=runtime_bytes or {},
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
