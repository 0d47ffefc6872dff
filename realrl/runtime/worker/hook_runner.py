"""Hooks around a call, on one rank: parameters move between layouts and roles, or to host memory.

Hooks write into a trained role through its training backend, so that the optimizer continues from the new values, and
into the float32 masters of a frozen role that keeps some for averages.
Interface state moves with the parameters: a critic that infers on other devices than it trains on needs the return
statistics that training keeps. Ranks outside the home get the state from the home's first rank.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from realrl.engine import device as devices
from realrl.engine.groups import Communicator
from realrl.engine.parameters.realloc import Reallocation, Reallocator, ReallocResult
from realrl.experiment.run_plan import RunPlan
from realrl.mesh.device_mesh import Allocation
from realrl.plan.hooks import Offload, PlannedHook, Realloc
from realrl.runtime.checkpoints.state_file import decode_state, encode_state
from realrl.runtime.worker.reallocs import Reallocs
from realrl.runtime.worker.roles import HostedRole
from realrl.sched.messages import HooksDone, RunHooks, Span


class HookRunner:
    """Runs this rank's part of planned hooks.

    Args:
        roles: the roles that this rank hosts.
        reallocs: plans of the reallocations.
        world: the group of all ranks.
        device: device of the parameters.
    """

    def __init__(
        self,
        plan: RunPlan,
        roles: Mapping[str, HostedRole],
        *,
        reallocs: Reallocs,
        world: Communicator,
        device: torch.device,
    ) -> None:
        self.rank = world.rank
        self._plan = plan
        self._roles = roles
        self._reallocs = reallocs
        self._world = world
        self._device = device
        self._reallocators: dict[Realloc, tuple[Reallocator, ...]] = {}
        self._journeys: dict[str, tuple[Reallocation, float]] = {}  # call -> what set out for it, and when

    def run(self, request: RunHooks) -> HooksDone:
        """Run this rank's part of the hooks before or after a call, in their order."""
        if request.when == "ahead of":
            return self._set_out(request)
        begin_s = time.time()
        planned = self._plan.hooks_of(request.call)
        hooks = [hook for hook in getattr(planned, request.when) if self.rank in hook.ranks]
        self._prefetch(hooks)
        spans: list[Span] = []
        bytes_received = 0
        for hook in hooks:
            start_s = time.time()
            args: dict[str, str | int | float] = {
                "step": request.step, "dispatch": request.dispatch_id, "for": request.call, "when": request.when,
            }  # fmt: skip
            set_out_s = self._journeys[request.call][1] if request.call in self._journeys else None
            if isinstance(hook, Offload):
                self._roles[hook.role].offload()
                name, kind = f"offload {hook.role}", "offload"
            else:
                received = self._move(hook, request.call)
                bytes_received += received
                args |= {"from": str(hook.source_allocation), "to": str(hook.target_allocation), "bytes": received}
                plans = [reallocator.plan for reallocator in self._reallocators_of(hook)]
                args["bytes_between_nodes"] = sum(plan.bytes_from_other_nodes(self.rank) for plan in plans)
                name = f"{hook.source} to {hook.target if not hook.is_implied else request.call}"
                kind = "realloc"
            devices.synchronize(self._device)
            spans.append(Span(name, kind, start_s, time.time(), args))
            if set_out_s is not None and kind == "realloc":
                spans.append(Span(name, "travel", set_out_s, time.time(), args))
        waited_s = time.time() - begin_s if request.when == "before" else 0.0
        return self._done(request, waited_s=waited_s, spans=tuple(spans), bytes_received=bytes_received)

    def _set_out(self, request: RunHooks) -> HooksDone:
        """Begin to bring a call's parameters to its layout, or back from host memory, and do not wait for their end."""
        start_s = time.time()
        planned = self._plan.hooks_of(request.call)
        role = next(mfc.role for mfc in self._plan.mfcs if mfc.name == request.call)
        if role in self._roles:
            self._roles[role].prefetch()
        for hook in planned.before:
            assert isinstance(hook, Realloc)
            (reallocator,) = self._reallocators_of(hook)
            source = self._home_shards(hook.source, hook.source_allocation)
            moves_source = self._reallocs.moves_source(hook)
            self._journeys[request.call] = reallocator.start(source, moves_source=moves_source, at_once=True), start_s
        return self._done(request, waited_s=time.time() - start_s)

    def _done(
        self, request: RunHooks, *, waited_s: float, spans: tuple[Span, ...] = (), bytes_received: int = 0
    ) -> HooksDone:
        return HooksDone(
            rank=self.rank,
            seq=request.seq,
            dispatch_id=request.dispatch_id,
            call=request.call,
            step=request.step,
            when=request.when,
            spans=spans,
            bytes_received=bytes_received,
            memory_gb=devices.memory_gb(self._device),
            waited_s=waited_s,
        )

    def _prefetch(self, hooks: Sequence[PlannedHook]) -> None:
        """Start to bring back, from host memory, all parameters that these hooks read or write."""
        for hook in hooks:
            for name in (hook.source, hook.target) if isinstance(hook, Realloc) else ():
                if name in self._roles:
                    self._roles[name].prefetch()

    def _move(self, hook: Realloc, call: str) -> int:
        """Send and receive parameters; returns the bytes received."""
        n_bytes: list[int] = []
        moved: list[torch.Tensor] = []

        def arriving() -> Iterator[tuple[str, torch.Tensor]]:
            journey = self._journeys.pop(call, None) if hook.is_implied else None
            for result in self._reallocate(hook) if journey is None else (journey[0].wait(),):
                n_bytes.append(result.bytes_received)
                moved.extend(result.moved)
                yield from result.parameters.items()

        is_here = self.rank in hook.target_allocation.ranks
        if is_here and not hook.is_implied:
            self._roles[hook.target].forget_visits()
        if hook.is_implied:
            parameters = dict(arriving())
            if is_here:
                self._roles[hook.target].receive(call, parameters, moved)
            self._share_memory_of_interfaces(hook)
        elif is_here and self._is_followed(hook):
            hosted = self._roles[hook.target]
            hosted.wait_resident()
            assert hosted.home_engine is not None
            hosted.home_engine.move_parameters(arriving(), hook.eta)
        else:
            deque(arriving(), maxlen=0)
        return sum(n_bytes)

    def _reallocate(self, hook: Realloc) -> Iterator[ReallocResult]:
        """Run the parts of a reallocation, and yield each result before the next part begins."""
        target = None
        if not hook.is_implied and not self._is_followed(hook):
            target = self._home_shards(hook.target, hook.target_allocation)
        reallocators = self._reallocators_of(hook)
        for reallocator in reallocators:
            names = {spec.name for spec in reallocator.plan.source_layout.specs}
            with self._present(hook, names):
                source = self._home_shards(hook.source, hook.source_allocation)
                part = None if target is None else {name: t for name, t in target.items() if name in names}
                # an alias would keep parameters that were gathered for this part only
                may_alias = len(reallocators) == 1 or not hook.is_implied
                yield reallocator.run(
                    source,
                    target=part,
                    eta=hook.eta,
                    alias=may_alias,
                    moves_source=self._reallocs.moves_source(hook),
                )

    def _is_followed(self, hook: Realloc) -> bool:
        """True if the target has masters, which must take the values that a hook writes."""
        return self._plan.roles[hook.target].trainable or hook.target in self._plan.averaged_roles

    def _present(self, hook: Realloc, names: Collection[str]) -> AbstractContextManager[None]:
        """Gather these source parameters on the ranks of their home within the block."""
        engine = self._roles[hook.source].home_engine if self.rank in hook.source_allocation.ranks else None
        return nullcontext() if engine is None else engine.whole_parameters(names)

    def _home_shards(self, role: str, home: Allocation) -> dict[str, torch.Tensor] | None:
        """This rank's resident parameters of a role; None if it is not in the role's home."""
        if self.rank not in home.ranks:
            return None
        hosted = self._roles[role]
        hosted.wait_resident()
        return dict(hosted.decoder(home).named_shards())

    def _reallocators_of(self, hook: Realloc) -> tuple[Reallocator, ...]:
        if hook not in self._reallocators:
            self._reallocators[hook] = tuple(
                Reallocator(plan, self._world, self.rank, self._device) for plan in self._reallocs.parts_of(hook)
            )
        return self._reallocators[hook]

    def _share_memory_of_interfaces(self, hook: Realloc) -> None:
        """Bring version and interface state of the home to the ranks of the call that are not in the home."""
        home, ranks = hook.source_allocation.ranks, hook.target_allocation.ranks
        guests = [rank for rank in ranks if rank not in home]
        if self.rank == home[0] and guests:
            hosted = self._roles[hook.source]
            states = {call: interface.state_dict() for call, interface in hosted.state_interfaces.items()}
            message = encode_state({"version": hosted.version, "interfaces": states})
            payload = torch.frombuffer(bytearray(message), dtype=torch.uint8).to(self._device)
            size = torch.tensor([len(message)], device=self._device)
            self._world.exchange([(guest, size) for guest in guests], []).wait()
            self._world.exchange([(guest, payload) for guest in guests], []).wait()
        elif self.rank in guests:
            hosted = self._roles[hook.target]
            size = torch.zeros(1, dtype=torch.int64, device=self._device)
            self._world.exchange([], [(home[0], size)]).wait()
            payload = torch.empty(int(size), dtype=torch.uint8, device=self._device)
            self._world.exchange([], [(home[0], payload)]).wait()
            state = decode_state(payload.cpu().numpy().tobytes())
            hosted.version = state["version"]
            for call, interface in hosted.state_interfaces.items():
                interface.load_state_dict(state["interfaces"][call])
