"""One plan's memory as arrays over ranks: the additions and the comparisons, and nothing about parameters.

Usages are columns, [rows, ranks], see `realrl.plan.memory.roles.columns`. Their last two rows are the host's bytes and
the total; where these are all that is wanted, arrays have them alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from realrl.graph.mfc import InterfaceType
from realrl.mesh.device_mesh import Allocation
from realrl.plan.hooks import Offload, Realloc
from realrl.plan.memory.buffers import REALLOC_BUCKET, SAVE_STAGE
from realrl.plan.memory.cuts import first_replica, parts_of
from realrl.plan.memory.moves import MESSAGES, Lacking, Moves, lacking, ranks_of
from realrl.plan.memory.plan import SAVE, CallState, Usage
from realrl.plan.memory.roles import RoleBytes
from realrl.plan.memory.saving import Saves
from realrl.plan.parameters.realloc_portions import Matrix

Ranks = slice | Matrix
_FIELDS = [part.name for part in fields(Usage)]
_COPIES, _ROWS, _RUNTIME = (_FIELDS.index(name) for name in ("copies", "rows", "runtime"))
_ALL = len(_FIELDS) + 1
_HOST, _TOTAL = -2, -1


@dataclass(frozen=True)
class Residence:
    """Roles in host memory at some moment, and those that have been there before; these may have copies there."""

    absent: frozenset[str] = frozenset()
    copied: frozenset[str] = frozenset()


ALL_HERE = Residence()


class Step:
    """The calls of a step, and a save, on their ranks.

    Args:
        roles: role -> its bytes, and its home, in the order in which a run copies them.
        calls: calls in the order of a step.
        is_whole: all fields of usages are wanted, and not the host's bytes and the total alone.
        moves, rows_bytes, saves: see `MemoryModel`.
        runtime_bytes: see `MemoryModel.plan`.

    Raises:
        AllocationError: the strategy of a home does not fit its model.
    """

    def __init__(
        self,
        roles: Mapping[str, tuple[RoleBytes, Allocation]],
        calls: Sequence[CallState],
        *,
        is_whole: bool,
        moves: Moves,
        rows_bytes: int,
        runtime_bytes: Mapping[int, int],
        saves: Saves | None,
    ) -> None:
        self._roles, self._moves, self._rows_bytes, self._saves = roles, moves, rows_bytes, saves
        self._calls = {call.name: call for call in calls}
        self._on_host = any(own.on_host for own, _ in roles.values())
        self._view = slice(None) if is_whole else slice(_ALL - 2, None)
        self._n_rows = _ALL if is_whole else 2
        homes = {name: home for name, (_, home) in roles.items()}
        allocations = (*homes.values(), *(call.allocation for call in calls))
        self.n_ranks = 1 + max((allocation.mesh.ranks[-1] for allocation in allocations), default=-1)
        self._runtime = np.zeros(self.n_ranks, dtype=np.int64)
        for rank, n_bytes in runtime_bytes.items():
            if rank < self.n_ranks:
                self._runtime[rank] = n_bytes
        self._away = _offloaded(calls, homes)
        self._kept = {name: own.kept(home.strategy) for name, (own, home) in roles.items()}
        self._places = {name: (ranks_of(home), parts_of(home.strategy)) for name, home in homes.items()}
        here = np.zeros((self._n_rows, self.n_ranks), dtype=np.int64)
        for name, kept in self._kept.items():
            ranks, parts = self._places[name]
            here[:, ranks] += kept.resident[self._view].take(parts, axis=1)
        self._resident_without: dict[Residence, Matrix] = {ALL_HERE: here}
        self._copies_of = {} if saves is None else {name: self._copies(name) for name in roles}
        self._copied = sum(self._copies_of.values(), np.zeros(self.n_ranks, dtype=np.int64))
        # call -> bytes of what it computes with, or of a tensor that moves before that; and those of messages
        self._beside: dict[str, tuple[Matrix, Matrix]] = {}

    def usages(self, name: str) -> tuple[Ranks, Matrix]:
        """Return the ranks of a call or a save, and their usages."""
        ranks, usages, _ = self.least(name)
        if name == SAVE:
            return ranks, usages
        beside, received = self._beside[name]
        messages = received.copy()
        for hook in _reallocs(self._calls[name]):
            own, _ = self._roles[hook.source]
            if self._lacking(hook).received.any():
                sent = self._moves.sent(own.model, hook.source_allocation, hook.target_allocation)
                messages += sent.messages(ranks, is_average=hook.eta != 1.0)
        self._add(usages, _COPIES, np.maximum(messages, beside) - np.maximum(received, beside))
        return ranks, usages

    def least(self, name: str) -> tuple[Ranks, Matrix, int]:
        """Return ranks and usages without the messages that ranks send, and the most bytes that these may take."""
        if name == SAVE:
            return *self._save(), 0
        call = self._calls[name]
        ranks = ranks_of(call.allocation)
        first, *later = dict.fromkeys(self._away[call.name])
        usages = self._resident(first)[:, ranks]
        usages = self._larger(usages, self._resident(later[0])[:, ranks]) if later else usages.copy()
        own_total, received, moved = (np.zeros(usages.shape[1], dtype=np.int64) for _ in range(3))
        if call.role in self._roles:
            home = self._roles[call.role][1]
            assert call.kind is not InterfaceType.TRAIN_STEP or home == call.allocation, "a role is trained at home"
            computed = self._computed(call)
            usages += computed
            own_total = computed[_TOTAL]
        room = 0
        for hook in _reallocs(call):
            found = self._lacking(hook)
            brought, arriving = self._brought(hook, found)
            self._add(usages, _COPIES, brought[ranks])
            received += arriving[ranks]
            moved = np.maximum(moved, self._moved(hook, found)[ranks])
            if found.received.any():
                room += MESSAGES + (REALLOC_BUCKET if hook.eta != 1.0 else 0)
        beside = np.maximum(own_total, moved)
        self._add(usages, _COPIES, np.maximum(received, beside) - own_total)  # messages are gone when the call computes
        self._beside[name] = beside, received
        self._add(usages, _ROWS, self._rows_bytes)
        self._add(usages, _RUNTIME, self._runtime[ranks])
        if self._saves is not None and self._saves.is_repeated:
            usages[_HOST] += self._copied[ranks]
        usages[_HOST] += np.maximum(self._leaving(call)[ranks] - own_total, 0)
        return ranks, usages, room

    def _computed(self, call: CallState) -> Matrix:
        """Return the usages of a call's computations on its ranks, with those of a call that trains beside it."""
        own, strategy, beside = self._roles[call.role][0], call.allocation.strategy, call.beside
        if beside is None:
            computed = own.computed(strategy, call.kind, call.load)[self._view]
            found: Matrix = computed.take(parts_of(strategy), axis=1)
            return found
        other, ranks = self._roles[beside.role][0], ranks_of(call.allocation)
        together: Matrix | None = None
        for moment in range(max(map(len, beside.in_flight))):
            pairs = [moments[min(moment, len(moments) - 1)] for moments in beside.in_flight]
            mine = own.computed(strategy, call.kind, call.load, tuple(n for n, _ in pairs))[self._view]
            theirs = other.computed(strategy, call.kind, beside.load, tuple(n for _, n in reversed(pairs)))[self._view]
            everywhere = np.zeros((self._n_rows, self.n_ranks), dtype=np.int64)
            everywhere[:, ranks_of(beside.allocation)] = theirs.take(parts_of(strategy), axis=1)
            now = mine.take(parts_of(strategy), axis=1) + everywhere[:, ranks]
            together = now if together is None else self._larger(together, now)
        assert together is not None
        return together

    def _leaving(self, call: CallState) -> Matrix:
        """Return the bytes that each rank has in host memory before they leave its device, when the call is over."""
        leaving = np.zeros(self.n_ranks, dtype=np.int64)
        for hook in call.hooks.after:
            if isinstance(hook, Offload) and hook.role in self._roles and self._roles[hook.role][0].role.is_changed:
                ranks, parts = self._places[hook.role]
                leaving[ranks] = np.maximum(leaving[ranks], self._kept[hook.role].block[parts])
        return leaving

    def _add(self, usages: Matrix, row: int, n_bytes: Matrix | int) -> None:
        usages[_TOTAL] += n_bytes
        if self._n_rows == _ALL:
            usages[row] += n_bytes

    def _resident(self, residence: Residence) -> Matrix:
        """Return the usages that are independent of the call while some roles are in host memory."""
        if residence not in self._resident_without:
            usages = self._resident_without[ALL_HERE].copy()
            for name in residence.absent & self._roles.keys():
                ranks, parts = self._places[name]
                change = (self._kept[name].away - self._kept[name].resident)[self._view]
                usages[:, ranks] += change.take(parts, axis=1)
            for name in (residence.copied - residence.absent) & self._roles.keys():
                ranks, parts = self._places[name]
                if not self._roles[name][0].role.is_changed:  # what never changes keeps its copy in host memory
                    usages[_HOST, ranks] += self._kept[name].parameters[parts]
            self._resident_without[residence] = usages
        return self._resident_without[residence]

    def _larger(self, one: Matrix, other: Matrix) -> Matrix:
        """Return the usages with the larger totals; of equals those with more in host memory, and then the first."""
        more, more_on_host = (other[row] - one[row] for row in (_TOTAL, _HOST))
        if self._on_host:
            more = more + more_on_host
        larger: Matrix = np.where((more > 0) | ((more == 0) & (more_on_host > 0)), other, one)
        return larger

    # ------------------------------------------------------------ reallocations

    def _lacking(self, hook: Realloc) -> Lacking:
        own, _ = self._roles[hook.source]
        return lacking(own.model, hook.source_allocation, hook.target_allocation)

    def _brought(self, hook: Realloc, found: Lacking) -> tuple[Matrix, Matrix]:
        """Return, for all ranks, the bytes of a hook's parameters that are new to them, and of incoming messages."""
        own, _ = self._roles[hook.source]
        role = own.role
        brought, arriving = (np.zeros(self.n_ranks, dtype=np.int64) for _ in range(2))
        target = ranks_of(hook.target_allocation)
        arriving[target] = found.buffered if hook.is_implied else np.minimum(found.received, MESSAGES)
        if hook.is_implied:
            # of parameters that are gathered for the moment, home and call share nothing
            is_gathered = role.is_trained and role.zero_stage == 3
            brought[target] = found.needed if is_gathered else found.received if own.has_own_memory else found.copied
        elif (changed := self._roles[hook.target][0]).role.is_trained or changed.role.is_averaged:
            strategy = hook.target_allocation.strategy
            followed = np.array([kind.followed for kind in changed.model.cut(strategy).kinds])[parts_of(strategy)]
            brought[target] = np.minimum(followed[:, 0], found.copied) + followed[:, 1]
        return brought, arriving

    def _moved(self, hook: Realloc, found: Lacking) -> Matrix:
        """Return the bytes, on all ranks, of the largest tensor that moves into one with room for the call's slices."""
        own, source = self._roles[hook.source][0], hook.source_allocation
        moved = np.zeros(self.n_ranks, dtype=np.int64)
        if hook.is_implied and own.has_own_memory:
            ranks = ranks_of(source)
            is_partial = np.zeros(self.n_ranks, dtype=np.bool_)
            is_partial[ranks_of(hook.target_allocation)] = (found.received > 0) & (found.received < found.needed)
            largest = np.array([kind.largest for kind in own.model.cut(source.strategy).kinds])
            moved[ranks] = largest[parts_of(source.strategy)] * is_partial[ranks]
        return moved

    # ------------------------------------------------------------ checkpoints

    def _copies(self, name: str) -> Matrix:
        """Return the bytes of a role that each rank copies for a checkpoint."""
        own, home = self._roles[name]
        copied = np.zeros(self.n_ranks, dtype=np.int64)
        copied[self._places[name][0]] = own.copied(home.strategy)
        return copied

    def _save(self) -> tuple[Ranks, Matrix]:
        """Return the usages while the role that needs the most is copied, for which changed parameters come back."""
        usages = np.full((self._n_rows, self.n_ranks), -1, dtype=np.int64)
        is_repeated = self._saves is not None and self._saves.is_repeated
        comes_in_turn = self._on_host and not is_repeated  # copies of roles, which take the same memory
        for away in dict.fromkeys(self._away[SAVE]):
            copied = np.zeros(self.n_ranks, dtype=np.int64)
            for name, (own, _) in self._roles.items():
                ranks, parts = self._places[name]
                copied = copied + self._copies_of[name]
                back = replace(away, absent=away.absent - {name}) if own.role.is_changed else away
                moment = self._resident(back)[:, ranks].copy()
                self._add(moment, _COPIES, own.gathered(self._roles[name][1].strategy))
                if name in away.absent and own.role.is_changed:
                    moment[_HOST] += self._kept[name].block[parts]  # in host memory before it leaves the device again
                moment[_HOST] += (copied if comes_in_turn else self._copied)[ranks]
                usages[:, ranks] = self._larger(usages[:, ranks], moment)
        if self._saves is not None and not self._saves.copies_all:
            # a checkpoint has the tensors that came back for it, of which host memory gets others meanwhile
            for name in frozenset.union(*(away.absent for away in self._away[SAVE])) & self._roles.keys():
                (own, home), kept, (ranks, parts) = self._roles[name], self._kept[name], self._places[name]
                if own.role.is_changed and own.has_own_memory:
                    is_held = first_replica(home.strategy) & ((kept.merging[parts] == 0) | own.role.is_averaged)
                    usages[_HOST, ranks] += is_held * (kept.parameters - kept.block)[parts]
        homes = np.flatnonzero(usages[_TOTAL] >= 0)
        usages = usages[:, homes]
        self._add(usages, _ROWS, self._rows_bytes)
        self._add(usages, _RUNTIME, self._runtime[homes])
        usages[_HOST] += 2 * SAVE_STAGE if self._saves and self._saves.is_staged else 0
        return homes, usages


def _reallocs(call: CallState) -> list[Realloc]:
    return [hook for hook in (*call.hooks.before, *call.hooks.after) if isinstance(hook, Realloc)]


def _offloaded(calls: Sequence[CallState], homes: Mapping[str, Allocation]) -> dict[str, tuple[Residence, Residence]]:
    """Return call or `SAVE` -> where parameters are then, in the first step and in any later one.

    All parameters begin on the device. A call brings back those of its role if it runs where they live, and those that
    move; they stay until a call offloads them again.
    """
    away, copied = set[str](), set[str]()
    steps: list[dict[str, Residence]] = []
    for _ in range(2):
        step = {}
        for call in calls:
            used = {role for hook in _reallocs(call) for role in (hook.source, hook.target)}
            if call.role in homes and homes[call.role] == call.allocation:
                used.add(call.role)
            away -= used
            step[call.name] = Residence(frozenset(away), frozenset(copied))
            away |= {hook.role for hook in call.hooks.after if isinstance(hook, Offload)}
            copied |= away
        steps.append({**step, SAVE: Residence(frozenset(away), frozenset(copied))})
    return {name: (first, steps[1][name]) for name, first in steps[0].items()}
