"""Another user of the machine who attacks a run neither reads nor changes anything; the run goes on or ends by itself.

The attacker knows all ports, files and process ids of the run, which the tests look up as root.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import struct
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.stranger import STRANGER, as_stranger
from tests.helpers.live import LIMIT_S, LiveRun, wait_until
from tests.helpers.runs import assert_same_numbers, read_metrics

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can act as another user"),
    pytest.mark.skipif(not Path("/proc/net/unix").exists(), reason="needs /proc"),
]
STEPS = ("steps=2", "save.every_steps=0")
WAITS = """
import os, time

def score(prompt, response):
    if "This is a placeholder response.".startswith(response[:3] or "-"):  # the check before a run
        return 0.0
    open({held!r}, "a").close()
    while not os.path.exists({free!r}):
        time.sleep(0.01)
    return float(len(set(response)))
"""


def sockets_of(pids: Iterable[int]) -> tuple[list[int], list[str]]:
    """TCP ports and names of Unix sockets on which these processes listen; a name may be abstract ("@...")."""
    ours: set[str] = set()
    for pid in pids:
        try:
            ours.update(os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd"))
        except OSError:  # ended, or a descriptor was closed
            continue
    ports, names = [], []
    for table in ("tcp", "tcp6"):
        for fields in map(str.split, Path("/proc/net", table).read_text().splitlines()[1:]):
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in ours:
                assert fields[1].split(":")[0] == "0100007F"
                ports.append(int(fields[1].split(":")[1], 16))
    for fields in map(str.split, Path("/proc/net/unix").read_text().splitlines()[1:]):
        if f"socket:[{fields[6]}]" in ours and fields[7:]:
            names.append(fields[7])
    return ports, sorted(set(names))


def start_held(folder: Path) -> tuple[LiveRun, Path, Path]:
    """A run whose reward function says that it is there, in the first file, and waits for the second file."""
    held, free, rewards = folder / "held", folder / "free", folder / "rewards.py"
    rewards.write_text(WAITS.format(held=str(held), free=str(free)))
    function = f"algorithm.reward_function={rewards}:score"
    return LiveRun(folder, *STEPS, function, f"algorithm.reward_timeout_s={LIMIT_S}"), held, free


def keys_of(pid: int) -> list[str]:
    """All texts of 40 printable characters, as keys are, that a process could have been started with."""
    start = Path(f"/proc/{pid}/environ").read_bytes() + Path(f"/proc/{pid}/cmdline").read_bytes()
    return [text.decode() for part in start.split(b"\0") for text in part.split(b"=")[-1:] if len(text) == 40]


def test_a_stranger_gets_nowhere_and_the_run_has_the_same_numbers(tmp_path: Path) -> None:
    (tmp_path / "alone").mkdir()
    (tmp_path / "attacked").mkdir()
    alone, _, free = start_held(tmp_path / "alone")
    run, held, go_on = start_held(tmp_path / "attacked")
    try:
        free.touch()
        wait_until(lambda: held.exists() or run.process.poll() is not None, "the first rewards")
        assert run.process.poll() is None, run.output + run.errors
        pids = run.processes()
        ports, names = sockets_of(pids)
        assert len(ports) == 2, "gloo's, of two workers, and nothing else"
        folder = Path(names[0]).parent
        assert [Path(name).name for name in names] == ["key-values", "master", "samples-0", "samples-1"]
        assert {str(Path(name).parent) for name in names} == {str(folder)}
        assert (folder.stat().st_mode & 0o777, folder.stat().st_uid) == (0o700, os.geteuid())
        assert [key for pid in pids for key in keys_of(pid)] == []
        findings = attack_until({"ports": ports, "files": names, "pids": pids}, go_on)
        assert (run.end(), alone.end()) == (0, 0), run.output + run.errors
    finally:
        run.clean_up()
        alone.clean_up()
    swallowed = findings.pop("swallowed")
    assert max(swallowed.values()) < 20 * (32 << 20), "no more than the kernel's buffers of 20 connections"
    text = findings.pop("text")
    assert "worker\0--rank\0001" in text  # command lines are there for everybody
    assert findings == {
        "uid": STRANGER,
        **{door: [] for door in ("answers", "zmq", "files", "listed", "environments", "memories", "stdins")},
    }
    assert not folder.exists()
    assert_same_numbers(read_metrics(alone.run_dir), read_metrics(run.run_dir), rel=0.0, floor=0.0)


def attack_until(targets: dict[str, Any], go_on: Path) -> dict[str, Any]:
    """Attack once while the run is held, then let it go on, and attack again until it has ended; the first findings."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    attacker = context.Process(target=as_stranger, args=(theirs, targets))
    attacker.start()
    theirs.close()
    try:
        assert ours.poll(LIMIT_S), "the attacker says nothing"
        findings: dict[str, Any] = ours.recv()
        go_on.touch()
        attacker.join(LIMIT_S)
        assert attacker.exitcode == 0
    finally:
        attacker.kill()
        attacker.join()
    return findings


class _Squatter(threading.Thread):
    """Connects to each new port of the run at once, with the numbers by which gloo tells its connections apart."""

    def __init__(self, run: LiveRun) -> None:
        super().__init__(daemon=True)
        self._run = run
        self.doors: dict[tuple[int, int], socket.socket] = {}
        self.is_over = threading.Event()

    def run(self) -> None:
        while not self.is_over.is_set():
            for port in sockets_of(self._run.processes())[0]:
                for number in range(4):
                    if (port, number) not in self.doors:
                        with contextlib.suppress(ConnectionError):  # the worker has ended meanwhile
                            door = self.doors[port, number] = socket.create_connection(("127.0.0.1", port), 5.0)
                            door.sendall(struct.pack("<Q", number))
            time.sleep(0.001)
        for door in self.doors.values():
            door.close()


@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(4))
def test_a_stranger_who_takes_a_rank_s_place_ends_the_run_before_it_learns_anything(
    tmp_path: Path, attempt: int
) -> None:
    run = LiveRun(tmp_path, *STEPS, "cluster.worker_timeout_s=10")
    squatter = _Squatter(run)
    squatter.start()
    try:
        exit_code = run.end()
    finally:
        squatter.is_over.set()
        squatter.join()
        run.clean_up()
    assert squatter.doors
    assert exit_code in (0, 1)
    if exit_code == 1:
        assert "could not join the 2 workers of this run" in run.errors
        assert not (run.run_dir / "metrics.jsonl").exists() or not read_metrics(run.run_dir)
