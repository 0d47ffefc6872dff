"""Findings of a doctor in the answers of machines."""

from __future__ import annotations

import math

from realrl.doctor.findings import Status
from realrl.doctor.nodes_checks import device_bytes, machine_findings
from realrl.sched.nodes.differences import Expected
from realrl.sched.nodes.inspection import MachineReport
from realrl.sched.nodes.messages import Examined, Greeting, NodeFacts

EXPECTED = Expected({"torch": "2"}, {}, {}, "/runs", "nonce", 0, 2)
FOUND = Examined("nonce", "", {}, {"/runs": 10**12, "/dev/shm": 64 << 20})


def report(name: str, *, found: Examined | None = FOUND, offset_s: float = 0.0, **changes: object) -> MachineReport:
    facts = NodeFacts(**({"versions": {"torch": "2"}, "digests": {}, "cpu": "x86", "memory_bytes": 8} | changes))
    greeting = Greeting(machine=name, pid=1, address="10.0.0.1", facts=facts)
    return MachineReport(name, greeting, found, offset_s, 0.001, {"alpha": 0.001, "beta": 0.002}, {})


def told(*reports: MachineReport, device: str = "cpu") -> list[tuple[str, str]]:
    found = machine_findings(reports, EXPECTED, device=device, waited_s=60.0)
    assert {one.check for one in found} == {"machines"}
    assert all(one.remedy for one in found if one.status is Status.PROBLEM and "more pairs" not in one.message)
    return [(one.status.value, one.message) for one in found]


def test_machines_that_are_alike_and_reach_each_other_are_well() -> None:
    assert told(report("alpha"), report("beta", offset_s=0.002)) == [
        ("ok", "2 joined: alpha, beta"),
        ("ok", "all 4 pairs connect; the slowest in 2.0 ms"),
        ("ok", "no clock is off by more than 3.0 ms"),
    ]


def test_missing_machines_and_differences_are_problems() -> None:
    assert told()[0] == ("problem", "0 of 2 machines joined within 60 s: none")
    other = report("beta", versions={"torch": "1"})
    assert ("problem", "machine beta has torch 1, the master's machine 2") in told(report("alpha"), other)
    unshared = report("beta", found=Examined("", "", {}))
    assert ("problem", "machine beta does not see the run folder /runs of the master") in told(report("a"), unshared)
    assert told(report("alpha"), report("beta", found=None))[0][1] == "1 of 2 machines joined within 60 s: alpha"


def test_pairs_that_cannot_connect_are_problems() -> None:
    cut = MachineReport("alpha", report("alpha").greeting, FOUND, 0.0, math.inf, {}, {"beta": "No route to host"})
    assert told(cut, report("beta"))[1] == ("problem", "alpha cannot connect to a free port of beta: No route to host")
    many = MachineReport("alpha", cut.greeting, FOUND, 0.0, math.inf, {}, {f"m{n}": "timed out" for n in range(12)})
    assert told(many, report("beta"))[11] == ("problem", "2 more pairs of machines cannot connect")


def test_what_runs_survive_is_a_warning() -> None:
    warned = [text for status, text in told(report("alpha"), report("beta", offset_s=5.0, cpu="arm")) if status != "ok"]
    assert warned[0].startswith("the CPUs of alpha and beta are of different kinds")
    assert warned[1].startswith("the clock of beta is 5.0 s behind")
    gpus = [report(name, n_accelerators=8, accelerator_bytes=80) for name in ("alpha", "beta")]
    assert any("cluster.device" in text or "planned for CPUs" in text for _, text in told(*gpus))
    assert sum("free in /dev/shm of" in text for _, text in told(*gpus, device="cuda")) == 2


def test_the_smallest_device_counts() -> None:
    machines = (report("alpha", memory_bytes=64, accelerator_bytes=80), report("beta", memory_bytes=32))
    assert device_bytes(machines, 4, "cpu") == 8
    assert device_bytes(machines[:1], 4, "cuda") == 80
    assert device_bytes(machines, 4, "cuda") is None
    assert device_bytes((), 4, "cpu") is None
