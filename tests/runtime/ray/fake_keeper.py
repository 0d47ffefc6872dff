"""The keeper's process, with a cluster that needs no Ray; a word says what happens there."""

from __future__ import annotations

import sys

from realrl.errors import UsageError
from realrl.runtime.ray import keeper
from realrl.sched.nodes.holders import AgentEnded
from tests.runtime.ray.test_keeper import FakeCluster


class ScriptedCluster(FakeCluster):
    """Does what the address says."""

    def connect(self, address: str) -> str:
        if address == "refuse":
            raise UsageError("there is no Ray cluster on this machine", remedy="Start one.")
        if address == "crash":
            sys.exit("Ray has crashed this process")
        if address == "kill":
            self.script.append(AgentEnded(1, -9))
        return address

    def release(self) -> None:
        print("released", flush=True)


if __name__ == "__main__":
    keeper.RayCluster = ScriptedCluster
    sys.exit(keeper.main())
