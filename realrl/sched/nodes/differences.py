"""Reasons for which a machine cannot take part in a run: what differs from the master's machine, what it lacks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath

from realrl.sched.nodes.messages import NODES_VERSION, Examined, Greeting

SHARED_REMEDY = "All machines must share run_dir: choose a folder of a file system that is mounted on each of them."


@dataclass(frozen=True)
class Expected:
    """Versions and files that every machine must have.

    Attributes:
        versions: package or "python" -> version on the master's machine.
        digests: name -> digest there, of what must be equal everywhere.
        files: path -> digest there, of files of the user.
        run_dir: folder of the run.
        nonce: content of the master's file in it.
        n_accelerators: devices that the workers of a machine need; 0 on CPUs.
        n_machines: machines of the run.
    """

    versions: Mapping[str, str]
    digests: Mapping[str, str]
    files: Mapping[str, str]
    run_dir: str
    nonce: str
    n_accelerators: int
    n_machines: int


@dataclass(frozen=True)
class Difference:
    """Reason why a machine is refused, to follow its name; and advice."""

    message: str
    remedy: str


def difference_of(greeting: Greeting, expected: Expected) -> Difference | None:
    """Return the first reason in what an agent says of itself; None if there is none."""
    if greeting.version != NODES_VERSION:
        return Difference(
            f"speaks version {greeting.version} of the protocol of machines, the master {NODES_VERSION}",
            "Install the same version of realrl on every machine.",
        )
    for name, version in expected.versions.items():
        found = greeting.facts.versions.get(name, "none")
        if found != version:
            return Difference(
                f"has {name} {found}, the master's machine {version}", "Install the same versions on every machine."
            )
    for name, digest in expected.digests.items():
        if greeting.facts.digests.get(name) != digest:
            return Difference(
                f"has other {name} than the master's machine", "Install the same version of realrl on every machine."
            )
    if greeting.facts.n_accelerators < expected.n_accelerators:
        return Difference(
            f"has {greeting.facts.n_accelerators} CUDA devices, and {expected.n_accelerators} workers need one each",
            "Use cluster.device=cpu, or a smaller cluster.n_devices_per_node.",
        )
    if 0 < greeting.n_allocated < expected.n_machines:
        return Difference(
            f"is one of {greeting.n_allocated} machines of its job, and the plan needs {expected.n_machines}",
            f"Ask for {expected.n_machines} machines, or use cluster.n_nodes={greeting.n_allocated}.",
        )
    if greeting.address.startswith("127.") and expected.n_machines > 1:
        return Difference(
            f"reached the master over {greeting.address}, where no other machine can reach its workers",
            "Join by the address that the master's machine has for the others.",
        )
    return None


def difference_found(examined: Examined, expected: Expected) -> Difference | None:
    """Return the first reason in what an agent found on its machine; None if there is none."""
    if examined.problem:
        return Difference(examined.problem, SHARED_REMEDY)
    if examined.nonce != expected.nonce:
        return Difference(f"does not see the run folder {expected.run_dir} of the master", SHARED_REMEDY)
    for path, digest in expected.files.items():
        found = examined.digests.get(path)
        if found is None:
            return Difference(f"has no file {path}", "Files of your own must be there on every machine.")
        if found != digest:
            return Difference(
                f"has another {PurePath(path).name} than the master's machine: {path}",
                "Files of your own must be the same on every machine.",
            )
    return None
