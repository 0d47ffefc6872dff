"""Runs over two machines: their numbers, who can join them, and what a listener shows. Machines are namespaces."""

from __future__ import annotations

import hashlib
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.helpers.machines import Machine, Site, machines, needs_machines, python
from tests.helpers.runs import SMALL, assert_same_numbers, read_metrics, realrl

pytestmark = [pytest.mark.netns, pytest.mark.timeout(900), needs_machines]
LIMIT_S = 400.0  # generous: the machines share the cores of one
PORT = 29500
PLANS = {
    "d2 across": (),
    "tp 2 across": ("allocation=tensor",),
    "split": ("allocation=split",),
    "realloc into generation": ("allocation.calls.actor_gen=d1t2",),
}


class Team:
    """A run whose master is on the first machine, and an agent on each of them."""

    def __init__(self, site: Site, folder: Path, *overrides: str, experiment: str = "ppo", **environment: str) -> None:
        self.site, self.folder, self.key = site, folder, os.urandom(32).hex()
        self.run_dir = folder / "run"
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        words = ["run", experiment, *SMALL, f"run_dir={self.run_dir}", "launcher=external", "cluster.n_nodes=2"]
        words += [f"cluster.master_port={PORT}", *overrides]
        self.master = self._start(site.machines[0], "master", words, **environment)

    @property
    def place(self) -> str:
        return f"{self.site.machines[0].address}:{PORT}"

    def _start(self, machine: Machine, name: str, words: list[str], **environment: str) -> subprocess.Popen[bytes]:
        variables = {"REALRL_KEY": self.key, "REALRL_CACHE": str(self.folder / "cache"), **environment}
        log = self.folder / f"{name}.log"
        return machine.popen(python(), "-m", "realrl", *words, log=log, cwd=self.folder, **variables)

    def join(self, *chosen: Machine, **environment: str) -> None:
        """Start agents; on all machines if none is named."""
        for machine in chosen or self.site.machines:
            words = ["node", self.place, f"--index={self.site.machines.index(machine)}"]
            self.agents[machine.name] = self._start(machine, machine.name, words, **environment)

    def said(self, name: str = "master") -> str:
        return (self.folder / f"{name}.log").read_text()

    def wait_for(self, text: str, name: str = "master") -> float:
        """Wait until a log has a text; returns the time."""
        deadline_s = time.monotonic() + LIMIT_S
        while text not in self.said(name):
            assert time.monotonic() < deadline_s, f"{name} never said {text!r}:\n{self.all_said()}"
            assert self.master.poll() is None or text in self.said(name), f"no {text!r}:\n{self.all_said()}"
            time.sleep(0.02)
        return time.monotonic()

    def end(self) -> dict[str, int]:
        """Wait for the end of all, and return the exit codes."""
        codes = {"master": self.master.wait(LIMIT_S)}
        return codes | {name: agent.wait(LIMIT_S) for name, agent in self.agents.items()}

    def all_said(self) -> str:
        logs = [*self.folder.glob("*.log"), *self.run_dir.glob("logs/*.log")]
        return "\n".join(f"== {path.name}\n{path.read_text()[-3000:]}" for path in sorted(logs))

    def close(self) -> None:
        for process in (self.master, *self.agents.values()):
            process.kill()
            process.wait()


@contextmanager
def team(
    folder: Path, *overrides: str, names: tuple[str, ...] = ("alpha", "beta"), experiment: str = "ppo"
) -> Iterator[Team]:
    """Machines with a run whose agents are to be started."""
    folder.mkdir(exist_ok=True)
    with machines(*names) as site:
        made = Team(site, folder, *overrides, experiment=experiment)
        try:
            yield made
        finally:
            made.close()


def weights(run_dir: Path) -> dict[str, str]:
    """Digests of the weights of the last checkpoint."""
    found = sorted((run_dir / "checkpoints" / "latest").glob("*/*.safetensors"))
    return {str(path.relative_to(run_dir)): hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


@pytest.mark.parametrize("plan", list(PLANS))
def test_numbers_are_those_of_the_same_plan_on_one_machine(tmp_path: Path, plan: str) -> None:
    alone = tmp_path / "alone"
    done = realrl(
        "run", "ppo", *SMALL, *PLANS[plan], f"run_dir={alone}", "cluster.n_devices_per_node=2", timeout_s=LIMIT_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(weights(alone)) > 1
    for plane in ("socket", "collective"):
        with team(tmp_path / plane, *PLANS[plan], f"cluster.data_plane={plane}") as run:
            run.join()
            run.wait_for("step 1/")
            listening = {machine.name: machine.listening() for machine in run.site.machines}
            assert run.end() == {"master": 0, "alpha": 0, "beta": 0}, run.all_said()
            for machine in run.site.machines:
                assert listening[machine.name]
                assert {place.rpartition(":")[0] for place in listening[machine.name]} == {machine.address}
                assert machine.processes("realrl") == []
            assert weights(run.run_dir) == weights(alone)
            assert_same_numbers(read_metrics(run.run_dir), read_metrics(alone), rel=0.0, floor=0.0)


def test_the_key_is_nowhere_and_without_it_nobody_gets_in(tmp_path: Path) -> None:
    with team(tmp_path) as run:
        alpha, beta = run.site.machines
        run.wait_for("waiting for 2 machines")
        variables = {"REALRL_KEY": "cd" * 32}
        stranger = run._start(beta, "stranger", ["node", run.place], **variables)
        assert stranger.wait(30) == 2
        assert "does not accept this key" in run.said("stranger")
        for junk in ("b''", r"b'GET / HTTP/1.1\r\n\r\n'", r"b'\xff' * 100_000"):
            code = f"import socket; s = socket.create_connection(({alpha.address!r}, {PORT})); s.sendall({junk})"
            subprocess.run(beta.command(python(), "-c", code), timeout=20, check=False, capture_output=True)
        run.join()
        run.wait_for("step 1/")
        shown = [alpha.run("cat", f"/proc/{pid}/environ", f"/proc/{pid}/cmdline") for pid in alpha.processes("realrl")]
        assert shown
        assert [text for text in shown if run.key in text] == []
        assert run.end() == {"master": 0, "alpha": 0, "beta": 0}, run.all_said()
        log = (run.run_dir / "logs" / "master.log").read_text()
        assert log.count("does not hold this run's key") == 1
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert [path for path in files if run.key.encode() in path.read_bytes()] == []


def test_a_file_admits_machines_and_goes_with_the_run(tmp_path: Path) -> None:
    file = tmp_path / "join.json"
    with machines("alpha", "beta") as site:
        run = Team(site, tmp_path, f"cluster.join_file={file}", "cluster.master_port=0", REALRL_KEY="ef" * 32)
        try:
            run.wait_for("waiting for 2 machines")
            assert file.stat().st_mode & 0o777 == 0o600
            for machine in site.machines:
                run.agents[machine.name] = run._start(machine, machine.name, ["node", "--join", str(file)])
            assert run.end() == {"master": 0, "alpha": 0, "beta": 0}, run.all_said()
            assert not file.exists()
        finally:
            run.close()


def test_too_few_machines_end_the_run(tmp_path: Path) -> None:
    with team(tmp_path / "late", "cluster.start_timeout_s=15") as run:
        run.wait_for("waiting for 2 machines")
        run.join(run.site.machines[0])
        run.wait_for("machine alpha at")
        assert run.end() == {"master": 75, "alpha": 75}, run.all_said()
        assert "1 of 2 machines joined within 15 s: alpha" in run.said()


def test_junk_from_a_holder_of_no_key_does_not_end_an_agent(tmp_path: Path) -> None:
    """An agent that meets another program at its master's port is told so, and ends."""
    with machines("alpha", "beta") as site:
        alpha, beta = site.machines
        code = f"import socket; s = socket.create_server(({alpha.address!r}, {PORT}))\n"
        code += "while 1: s.accept()[0].sendall(b'x' * 100)"
        server = alpha.popen(python(), "-c", code, log=tmp_path / "server.log", cwd=tmp_path)
        try:
            time.sleep(0.5)
            log = tmp_path / "agent.log"
            agent = beta.popen(
                python(), "-m", "realrl", "node", f"{alpha.address}:{PORT}", "--patience=8", log=log, cwd=tmp_path,
                REALRL_KEY="ab" * 32,
            )  # fmt: skip
            assert agent.wait(60) in (1, 2), log.read_text()
            assert "realrl: error" in log.read_text()
        finally:
            server.kill()
            server.wait()
