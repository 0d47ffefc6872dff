"""`realrl doctor --nodes` on machines that join it; and how soon a machine that does not fit a run is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.e2e.test_machines import LIMIT_S, PORT
from tests.helpers.machines import Machine, Site, machines, needs_machines, python
from tests.helpers.runs import SMALL

pytestmark = [pytest.mark.netns, pytest.mark.timeout(900), needs_machines]
KEY = "ab" * 32


class Visit:
    """A doctor on the first machine, and agents."""

    def __init__(self, site: Site, folder: Path, *overrides: str) -> None:
        self.site, self.folder = site, folder
        words = ["doctor", "ppo", *SMALL, "launcher=external", "cluster.n_nodes=2", f"cluster.master_port={PORT}"]
        words += [f"run_dir={folder / 'shared' / 'run'}", f"--json={folder / 'report.json'}", "--nodes", *overrides]
        (folder / "shared").mkdir(exist_ok=True)
        self.doctor = self._start(site.machines[0], "doctor", words)
        self.agents = [self._join(machine) for machine in site.machines]

    def _start(self, machine: Machine, name: str, words: list[str]) -> subprocess.Popen[bytes]:
        log = self.folder / f"{name}.log"
        return machine.popen(python(), "-m", "realrl", *words, log=log, cwd=self.folder, REALRL_KEY=KEY)

    def _join(self, machine: Machine) -> subprocess.Popen[bytes]:
        index = self.site.machines.index(machine)
        words = ["node", f"{self.site.machines[0].address}:{PORT}", f"--index={index}", f"--patience={LIMIT_S:g}"]
        return self._start(machine, machine.name, words)

    def end(self) -> tuple[int, list[int], str]:
        """Wait for the end of all; returns exit codes of the doctor and of the agents, and what the doctor said."""
        codes = self.doctor.wait(LIMIT_S), [agent.wait(LIMIT_S) for agent in self.agents]
        return *codes, (self.folder / "doctor.log").read_text()

    def close(self) -> None:
        for process in (self.doctor, *self.agents):
            process.kill()
            process.wait()


def test_machines_are_asked_and_shown(tmp_path: Path) -> None:
    with machines("alpha", "beta") as site:
        visit = Visit(site, tmp_path)
        try:
            code, agents, said = visit.end()
        finally:
            visit.close()
        assert [machine.processes("realrl") for machine in site.machines] == [[], []]
    assert (code, agents) == (0, [0, 0]), said
    for told in ("10.77.0.2", "2 joined: alpha, beta", "all 4 pairs connect", "no clock is off by more than", "± "):
        assert told in said
    found = {one["machine"]: one for one in json.loads((tmp_path / "report.json").read_text())["machines"]}
    assert sorted(found) == ["alpha", "beta"]
    assert sorted(found["beta"]["connects_s"]) == ["alpha", "beta"]
    assert abs(found["beta"]["clock_offset_s"]) < 0.1
    assert list((tmp_path / "shared").iterdir()) == []  # nothing is left of the visit


def test_what_is_wrong_is_told_by_name(tmp_path: Path) -> None:
    with machines("alpha", "beta") as site:
        (tmp_path / "shared").mkdir()
        site.machines[1].run("mount", "-t", "tmpfs", "none", str(tmp_path / "shared"))
        visit = Visit(site, tmp_path)
        try:
            code, agents, said = visit.end()
        finally:
            visit.close()
    assert (code, agents) == (2, [2, 2]), said
    assert "machine beta does not see the run folder" in said
    assert "not shared" in said


def test_machines_that_do_not_come_are_missed(tmp_path: Path) -> None:
    with machines("alpha") as site:
        visit = Visit(site, tmp_path, "cluster.start_timeout_s=15")
        begin_s = time.monotonic()
        try:
            code, agents, said = visit.end()
        finally:
            visit.close()
    assert (code, agents) == (2, [2]), said
    assert "1 of 2 machines joined within 15 s: alpha" in said
    assert time.monotonic() - begin_s < LIMIT_S


@pytest.mark.skipif(shutil.which("nft") is None, reason="needs nft")
def test_a_firewall_between_workers_is_found(tmp_path: Path) -> None:
    with machines("alpha", "beta") as site:
        alpha, beta = site.machines
        for rule in (
            "add table ip wall",
            "add chain ip wall in { type filter hook input priority 0; }",
            f"add rule ip wall in ip saddr {alpha.address} tcp flags & (syn|ack) == syn drop",
        ):
            beta.run("nft", rule)
        visit = Visit(site, tmp_path)
        try:
            code, agents, said = visit.end()
        finally:
            visit.close()
    assert (code, agents) == (2, [2, 2]), said
    assert "alpha cannot connect to a free port of beta: no answer within 3 s" in said
    assert "cannot connect to a free port of alpha" not in said
