"""Asks the machines of a run, through agents that join, what they have and whom they reach: `realrl doctor --nodes`."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from realrl.runtime.launchers.nodes import NodesStart, expected_of
from realrl.runtime.nodes.survey import put_nonce
from realrl.runtime.processes.lifeline import lease_clock
from realrl.runtime.transport.nodes import NodeServer
from realrl.sched.nodes.differences import Expected
from realrl.sched.nodes.inspection import Concluded, Inspection, InspectionPlan, MachineReport
from realrl.sched.nodes.machines import Received, SendTo, Tell, Ticked, with_clock
from realrl.sched.nodes.messages import Examine

_TURN_S = 0.1


def inspect_machines(
    nodes: NodesStart, folder: Path, tell: Callable[[str], None], is_lost: Callable[[], bool]
) -> tuple[Expected, tuple[MachineReport, ...]]:
    """Wait until the machines of a run have joined, and ask them; returns what they should have, and what they told.

    The agents go on waiting then: `realrl.runtime.launchers.nodes.dismiss` sends them away.

    Args:
        folder: that of the run, or the nearest one above it that exists.
        tell: shows a line to the user.
        is_lost: whether the agents were started, and too few of them are left: nothing is waited for then.

    Raises:
        UsageError: nothing can be written there.
    """
    name, nonce = put_nonce(folder)
    try:
        expected = expected_of(nodes, folder, nonce)
        examine = Examine(str(folder), name, nodes.directory, tuple(nodes.files))
        inspection = Inspection(
            InspectionPlan(nodes.n_machines, examine, nodes.lease_s, nodes.start_timeout_s), lease_clock()
        )
        tell(f"waiting for {nodes.n_machines} machines at {nodes.host}:{nodes.port}")
        server = NodeServer(nodes.key, f"tcp://{nodes.host}:{nodes.port}", nodes.listening)
        try:
            while not (_turn(server, inspection, tell) or is_lost()):
                pass
        finally:
            server.close()
        return expected, inspection.reports()
    finally:
        (folder / name).unlink(missing_ok=True)


def _turn(server: NodeServer, inspection: Inspection, tell: Callable[[str], None]) -> bool:
    """Handle a message, or the passing of time; returns True at the end."""
    received = server.receive(_TURN_S)
    now_s = lease_clock()
    is_over = False
    for instruction in inspection.handle(Ticked(now_s) if received is None else Received(*received, now_s)):
        match instruction:
            case SendTo(agent, message):
                server.send(agent, with_clock(message, time.time()))
            case Tell(text):
                tell(text)
            case Concluded():
                is_over = True
    return is_over
