"""Parameters of one call on a device while others compute there: who may come early, and who may stay.

Invariants of `plan_overlap`:
    - at any moment a device holds what a call needs there, the parameters that stay, and those of one call that come
      early; together they fit, while a checkpoint is copied too;
    - only calls that change no parameters come early, and only parameters that come in one piece and through no relay;
    - parameters stay only where no hook offloads their role; for the whole run only where nothing changes the role.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

from realrl.graph.mfc import InterfaceType
from realrl.plan.backends import BACKENDS
from realrl.plan.hooks import CallHooks, Offload, Overlap, Realloc
from realrl.plan.memory.plan import SAVE, CallState, MemoryPlan, RoleState, layout_of
from realrl.plan.parameters.realloc import ReallocPlan, plan_realloc
from realrl.plan.parameters.realloc_overlap import part_of


def can_stay(call: str, role: str, hooks: Mapping[str, CallHooks]) -> bool:
    """Return True if the only hook before a call brings its role's parameters, and no call offloads the role."""
    return _is_only_brought(hooks[call]) and not _is_offloaded(role, hooks)


def can_come_early(call: str, role: str, hooks: Mapping[str, CallHooks]) -> bool:
    """Return True if a call waits for its role's parameters before each batch, and for nothing else of hooks."""
    return _is_only_brought(hooks[call]) if hooks[call].before else _is_offloaded(role, hooks)


def plan_overlap(
    roles: Mapping[str, RoleState],
    calls: Sequence[CallState],
    memory: MemoryPlan,
    *,
    capacity: int,
    is_host_memory: bool,
    evaluating: Collection[str] = (),
    batches: Mapping[str, int],
) -> Overlap:
    """Decide which parameters come early and which stay, so that every device has room for them.

    Args:
        roles, calls, memory: input and result of `plan_memory`.
        capacity: usable bytes of one device.
        is_host_memory: the devices are CPUs, where what is offloaded takes the same memory.
        evaluating: calls of the evaluation, which come between any two calls.
        batches: call -> the most batches of one step.
    """
    hooks = {call.name: call.hooks for call in calls}
    with_model = [call for call in calls if call.role in roles]
    used = {
        name: {rank: usage.total + (usage.host if is_host_memory else 0) for rank, usage in by_rank.items()}
        for name, by_rank in memory.calls.items()
    }

    def fits_beside(extra: Mapping[int, int], own: str) -> frozenset[str]:
        return frozenset(
            name
            for name, by_rank in used.items()
            if name != own and all(n + extra.get(rank, 0) <= capacity for rank, n in by_rank.items())
        )

    stays, resident = set[str](), set[str]()
    everyone = frozenset(used)
    for call in with_model:
        is_frozen = not roles[call.role].is_trained and not roles[call.role].is_changed
        if not can_stay(call.name, call.role, hooks) or not (is_frozen or batches.get(call.name, 1) > 1):
            continue
        extra = _copies(call, roles, calls, at_once=False, is_offloaded=False)
        if fits_beside(extra, call.name) == everyone - {call.name}:
            (resident if is_frozen else stays).add(call.name)
            for name, by_rank in used.items():
                for rank in by_rank if name != call.name else ():
                    by_rank[rank] += extra.get(rank, 0)
    early = {}
    for call in with_model:
        role = roles[call.role]
        is_whole = not role.is_trained or (role.backend == "native" and role.zero_stage == 0)
        is_changing = call.kind is InterfaceType.TRAIN_STEP or any(
            isinstance(hook, Realloc) and not hook.is_implied for hook in call.hooks.after
        )
        if call.name in resident or is_changing or not is_whole or not can_come_early(call.name, call.role, hooks):
            continue
        if call.hooks.before and _plan_of(call, role).has_relays:  # which send what they get, and so not at once
            continue
        is_offloaded = _is_offloaded(call.role, hooks)
        beside = fits_beside(_copies(call, roles, calls, at_once=True, is_offloaded=is_offloaded), call.name)
        sharing = {other.name for other in calls if set(other.allocation.ranks) & _extent(call)}
        between = sharing & set(evaluating) | used.keys() & {SAVE}
        if between <= beside and sharing & beside:
            early[call.name] = beside - {SAVE}
    return Overlap(frozenset(stays), frozenset(resident), early)


def _copies(
    call: CallState, roles: Mapping[str, RoleState], calls: Sequence[CallState], *, at_once: bool, is_offloaded: bool
) -> dict[int, int]:
    """Return rank -> bytes that a call's parameters take before the call starts, or after its end.

    Those that set out early are sent at once, and have all their messages under way; if their role is offloaded, they
    are back from host memory in their home too. What `_left_behind` counts comes on top.
    """
    role = roles[call.role]
    home = layout_of(role.model, role.home)
    found = {rank: home.num_bytes_of(rank) for rank in role.home.ranks} if at_once else {}
    if call.hooks.before:
        moved = _plan_of(call, role)
        target = moved.target_layout
        is_gathered = role.is_trained and role.zero_stage == 3  # then home and call share nothing
        others = [
            _plan_of(other, role)
            for other in calls
            if other.role == call.role and other.name != call.name and _moves_home(other, role)
        ]
        layouts = (home, target, *(other.target_layout for other in others))
        new: dict[tuple[int | None, ...], int] = {}  # by the parts that a rank has of the layouts
        for rank in {*role.home.ranks, *call.allocation.ranks}:
            parts = tuple(part_of(layout, rank) if rank in layout else None for layout in layouts)
            if parts not in new:
                new[parts] = _left_behind(moved, others, rank)
                if rank in target:
                    alone = target.num_bytes_of(rank)
                    new[parts] += alone if is_gathered else moved.new_bytes(rank, moves_source=False)
            messages = moved.bytes_received(rank) + moved.bytes_sent(rank) if at_once else 0
            found[rank] = new[parts] + messages + (found.get(rank, 0) if at_once and is_offloaded else 0)
    return found


def _moves_home(call: CallState, role: RoleState) -> bool:
    """Return True if the home of a call's role may move into memory that it shares with the call's parameters."""
    may_move = not (role.is_trained and BACKENDS[role.backend].has_own_buffers)
    return may_move and any(isinstance(hook, Realloc) and hook.is_implied for hook in call.hooks.before)


def _left_behind(moved: ReallocPlan, others: Iterable[ReallocPlan], rank: int) -> int:
    """Return the most bytes that live on where a home lay beside a call, which it left with another call's parameters.

    Bytes common to home and call are counted already, as new bytes of the call, unless the home contains the call's.

    Args:
        moved: the plan that brings the call's parameters.
        others: those of other calls that the home may move for.
    """
    moving = {keep.parameter for other in others for keep in other.keeps(rank) if not keep.is_whole_target}
    n_bytes = 0
    for keep in moved.keeps(rank) if moving else ():
        if keep.parameter in moving:
            of_home, in_common = (
                math.prod(stop - start for start, stop in place) for place in (keep.source_place, keep.source_slice)
            )
            n_bytes += keep.num_bytes * of_home // in_common - (0 if keep.is_whole_target else keep.num_bytes)
    return n_bytes


def _plan_of(call: CallState, role: RoleState) -> ReallocPlan:
    """Plan the transfers that bring a call its parameters."""
    home, target = (layout_of(role.model, allocation) for allocation in (role.home, call.allocation))
    return plan_realloc(home, target, node_of=call.allocation.mesh.cluster.node_of)


def _is_only_brought(hooks: CallHooks) -> bool:
    """Return True if the only hook before a call brings its role's parameters."""
    before = hooks.before
    return len(before) == 1 and isinstance(before[0], Realloc) and before[0].is_implied


def _extent(call: CallState) -> set[int]:
    return {*call.allocation.ranks, *call.hooks.before_ranks}


def _is_offloaded(role: str, hooks: Mapping[str, CallHooks]) -> bool:
    return any(isinstance(hook, Offload) and hook.role == role for one in hooks.values() for hook in one.after)
