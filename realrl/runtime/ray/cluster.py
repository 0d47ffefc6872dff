"""Requests of a run to Ray: the interface, and the only place that imports Ray."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Sequence
from typing import Any, Protocol

from realrl.errors import UsageError
from realrl.runtime.ray.holder import AgentHolder
from realrl.runtime.ray.messages import AUTO, HOW_TO_START
from realrl.sched.nodes.holders import AgentEnded, Happening, HolderLost, HolderReady, Need, RayMachine

_GCS_LIMIT_S = "5"  # by which Ray waits for its own server, instead of a minute
_GCS_LIMIT = "RAY_gcs_server_request_timeout_seconds"
_ASK_AGAIN_S = 1.0


class Cluster(Protocol):
    """A Ray cluster, as far as a run uses it. Places are numbered from 0, in the order of their machines."""

    def connect(self, address: str) -> str:
        """Join the cluster as a driver; returns its address. Raises `UsageError` if that cannot be."""

    def machines(self) -> Sequence[RayMachine]:
        """The living machines."""

    def reserve(self, need: Need, name: str) -> None:
        """Ask for a place on each of so many machines, no two on one."""

    def is_reserved(self, timeout_s: float) -> bool:
        """Return True if every place was given; waits for that."""

    def hold(self, place: int) -> None:
        """Ask for the holder of a place; an earlier one is forgotten."""

    def serve(self, place: int, start: bytes) -> None:
        """Have the holder of a place start an agent."""

    def news(self, timeout_s: float) -> list[Happening]:
        """Return what happened; waits for something."""

    def release(self) -> None:
        """End the holders, give the places back and leave. May be called at any time."""


def explained(error: BaseException, address: str) -> UsageError:
    """Return the refusal of a run whose driver could not join a cluster."""
    said = " ".join(str(error).split())
    if "Version mismatch" in said:
        versions = said.partition("Version mismatch:")[2].strip()
        return UsageError(
            f"the Ray cluster at {address} has other versions than this machine: {versions}",
            remedy="Install the same versions of Ray and Python on all machines, and start the cluster with them.",
        )
    if address == AUTO:
        return UsageError(
            f"there is no Ray cluster on this machine: {said}",
            remedy=HOW_TO_START,
        )
    return UsageError(
        f"this machine cannot join the Ray cluster at {address}: {said}",
        remedy="`realrl run` must be on a machine of the cluster: see `ray status`, and `ray start --address`.",
    )


class RayCluster:
    """A cluster by Ray itself.

    Nothing is detached: when this process ends, whichever way, Ray ends the actors and removes the placement group.
    """

    def __init__(self) -> None:
        self._need: Need | None = None
        self._group: Any = None
        self._bundles: list[int] = []  # of each place
        self._actors: dict[int, Any] = {}
        self._asked: dict[Any, int] = {}  # a call to `machine` -> place
        self._served: dict[Any, int] = {}  # a call to `wait` -> place
        self._unsure: dict[int, float] = {}  # place whose answer was lost on its way -> time to ask again

    def connect(self, address: str) -> str:
        os.environ.setdefault(_GCS_LIMIT, _GCS_LIMIT_S)
        import ray

        try:
            joined = ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        except Exception as error:
            raise explained(error, address) from error
        return str(joined.address_info["gcs_address"])

    def machines(self) -> list[RayMachine]:
        import ray

        return [_machine(node) for node in ray.nodes() if node["Alive"]]

    def reserve(self, need: Need, name: str) -> None:
        from ray.util.placement_group import placement_group

        self._need = need
        self._group = placement_group([_resources(need)] * need.n_machines, strategy="STRICT_SPREAD", name=name)

    def is_reserved(self, timeout_s: float) -> bool:
        import ray
        from ray.util.placement_group import placement_group_table

        if not self._group.wait(timeout_s):
            return False
        nodes = placement_group_table(self._group)["bundles_to_node_id"]
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
        self._bundles = sorted(nodes, key=lambda bundle: socket.inet_aton(addresses[nodes[bundle]]))
        return True

    def hold(self, place: int) -> None:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        assert self._need is not None
        self._forget(place)
        where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=self._bundles[place])
        make = ray.remote(AgentHolder).options(
            num_cpus=self._need.n_cpus, num_gpus=self._need.n_gpus, max_restarts=0, scheduling_strategy=where
        )
        self._actors[place] = make.remote()
        self._asked[self._actors[place].machine.remote()] = place

    def serve(self, place: int, start: bytes) -> None:
        self._actors[place].start.remote(start)
        self._served[self._actors[place].wait.remote()] = place

    def news(self, timeout_s: float) -> list[Happening]:
        import ray

        for place in [place for place, time_s in self._unsure.items() if time_s <= time.monotonic()]:
            del self._unsure[place]
            self._served[self._actors[place].wait.remote()] = place
        waited_for = [*self._asked, *self._served]
        if not waited_for:
            time.sleep(timeout_s)
            return []
        done, _ = ray.wait(waited_for, timeout=timeout_s)
        return [happening for one in done if (happening := self._outcome(one)) is not None]

    def _outcome(self, call: Any) -> Happening | None:
        import ray

        place = self._asked[call] if call in self._asked else self._served[call]
        try:
            found = ray.get(call)
        except ray.exceptions.RayError as error:
            if isinstance(error, ray.exceptions.ActorUnavailableError) and self._served.pop(call, None) is not None:
                self._unsure[place] = time.monotonic() + _ASK_AGAIN_S  # a broken connection: its agent may be well
                return None
            self._forget(place)
            return HolderLost(place, _reason(error))
        if self._asked.pop(call, None) is not None:
            return HolderReady(place, found)
        del self._served[call]
        return AgentEnded(place, *found)

    def _forget(self, place: int) -> None:
        import ray

        actor = self._actors.pop(place, None)
        if actor is not None:
            ray.kill(actor)
        self._asked = {call: other for call, other in self._asked.items() if other != place}
        self._served = {call: other for call, other in self._served.items() if other != place}
        self._unsure.pop(place, None)

    def release(self) -> None:
        import ray

        if not ray.is_initialized():
            return
        with contextlib.suppress(ray.exceptions.RayError):
            for place in list(self._actors):
                self._forget(place)
        if self._group is not None:
            from ray.util.placement_group import remove_placement_group

            with contextlib.suppress(ray.exceptions.RayError):
                remove_placement_group(self._group)
        ray.shutdown()


def _resources(need: Need) -> dict[str, float]:
    return {"CPU": float(need.n_cpus)} | ({"GPU": float(need.n_gpus)} if need.n_gpus else {})


def _machine(node: dict[str, Any]) -> RayMachine:
    has = node["Resources"]
    return RayMachine(node["NodeManagerHostname"], node["NodeManagerAddress"], has.get("CPU", 0.0), has.get("GPU", 0.0))


def _reason(error: BaseException) -> str:
    """Return the last line of an error of Ray that says something; the others are stacks and identifiers."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:300]
