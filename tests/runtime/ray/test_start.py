"""The side of `realrl run`: its keeper is a process, which tells what happens and ends with it. No Ray is needed."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from realrl.config.schema import ClusterConfig
from realrl.errors import Error, RunError, UsageError
from realrl.runtime.launchers.nodes import NodesStart
from realrl.runtime.processes.lifeline import framed
from realrl.runtime.ray.holder import AgentHolder
from realrl.runtime.ray.messages import AgentStart
from realrl.runtime.ray.start import Keeper, keeper_start
from tests.runtime.ray.test_keeper import KEY, START

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = "tests.runtime.ray.fake_keeper"


@pytest.fixture(autouse=True)
def _finds_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def keeper(folder: Path, address: str) -> Keeper:
    return Keeper(msgspec.structs.replace(START, address=address), folder / "ray.log", program=PROGRAM)


def test_the_user_hears_of_an_agent_that_was_killed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    said = ""
    with keeper(tmp_path, "kill") as kept:
        assert kept.wait_for_machines() == ("alpha", "beta")
        kept.pass_on()
        deadline_s = time.monotonic() + 60
        while "killed by signal 9" not in (said := said + capfd.readouterr().err):
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
    assert said == "realrl: the agent on beta was killed by signal 9: it is started again\n"
    assert "released" in (tmp_path / "ray.log").read_text()
    assert KEY.hex() not in (tmp_path / "ray.log").read_text()


@pytest.mark.parametrize(
    ("address", "kind", "message"),
    [
        ("refuse", UsageError, "there is no Ray cluster on this machine"),
        ("crash", RunError, "the process that asks Ray for machines died: Ray has crashed this process"),
    ],
)
def test_a_run_without_machines_is_told_why(tmp_path: Path, address: str, kind: type[Error], message: str) -> None:
    with pytest.raises(kind) as caught, keeper(tmp_path, address) as kept:
        kept.wait_for_machines()
    assert message in caught.value.message


def test_the_keeper_ends_with_the_run_whichever_way_it_ends() -> None:
    start = msgspec.msgpack.encode(msgspec.structs.replace(START, address="10.0.0.1:6379"))
    ours, stdin = socket.socketpair()
    with stdin:
        process = subprocess.Popen([sys.executable, "-m", PROGRAM], stdin=stdin.fileno(), stdout=subprocess.PIPE)
    ours.sendall(framed(start))
    ours.close()  # as that of a killed run is closed
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert output.endswith(b"released\n")


def test_an_agent_ends_with_the_actor_that_started_it() -> None:
    start = AgentStart(place="127.0.0.1:9", key=KEY, index=0, n_machines=2, n_threads=1)
    command = [sys.executable, "-P", "-m", "realrl.runtime.ray.agent"]
    agent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert agent.stdin is not None
    assert agent.stdout is not None
    agent.stdin.write(framed(msgspec.msgpack.encode(start)))
    agent.stdin.flush()
    assert b"seeks the master at 127.0.0.1:9" in agent.stdout.readline()
    begin_s = time.monotonic()
    agent.stdin.close()
    with agent.stdout:
        agent.stdout.read()
    assert agent.wait(30) in (-signal.SIGHUP, 128 + signal.SIGHUP)  # before it handles signals, or after
    assert time.monotonic() - begin_s < 30


def test_ray_is_asked_for_a_cpu_a_worker_or_for_what_the_user_says() -> None:
    nodes = NodesStart(
        key=KEY,
        host="10.0.0.1",
        port=29500,
        listening=3,
        n_machines=2,
        n_workers_each=4,
        n_accelerators=4,
        lease_s=10.0,
        start_timeout_s=60.0,
        versions={},
        digests={},
        files={},
        directory="/",
        device="cuda",
    )
    plain = keeper_start(ClusterConfig(n_nodes=2, n_devices_per_node=4), nodes, "a", "auto")
    assert (plain.n_machines, plain.n_cpus, plain.n_gpus, plain.agent.n_threads) == (2, 4, 4, 1)
    more = keeper_start(ClusterConfig(n_nodes=2, n_devices_per_node=4, ray_cpus=32), nodes, "a", "auto")
    assert (more.n_cpus, more.agent.n_threads, more.agent.place) == (32, 8, "10.0.0.1:29500")


def test_an_actor_tells_the_end_of_its_agent_as_often_as_it_is_asked(capfd: pytest.CaptureFixture[str]) -> None:
    holder = AgentHolder()
    with pytest.raises(RuntimeError, match="could not be started"):
        holder.wait()
    start = AgentStart(place="nowhere", key=KEY, index=0, n_machines=2, n_threads=1)
    for _ in range(2):  # agents, one after another
        holder.start(msgspec.msgpack.encode(start))
        assert holder.wait() == (2, "realrl: error: 'nowhere' is no HOST:PORT")
        assert holder.wait() == (2, "realrl: error: 'nowhere' is no HOST:PORT")
    assert capfd.readouterr().out.count("is no HOST:PORT") == 2  # in the log of the actor


def test_threads_that_ray_has_set_for_the_actor_are_not_those_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import os; from realrl.runtime.ray.holder import own_environment; os.environ['OMP_NUM_THREADS'] = '8'; "
        "print(own_environment().get('OMP_NUM_THREADS'))"
    )
    command = [sys.executable, "-c", code]
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "None\n"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "8\n"
