"""Runs over machines of a real Ray cluster: their numbers, what dies and comes again, where the key is, refusals."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.test_machine_failures import LEASE_S, STEPS, kill, wait_until
from tests.e2e.test_machines import LIMIT_S, PLANS, Team, weights
from tests.helpers.machines import Site, needs_machines, python
from tests.helpers.ray_cluster import address, ask, needs_ray, ray_cluster
from tests.helpers.runs import SMALL, assert_same_numbers, read_metrics, realrl

pytestmark = [pytest.mark.netns, pytest.mark.timeout(1800), needs_machines, needs_ray]
OURS = "m realrl|AgentHolder"  # processes of a run, on any machine
FREE = "print(ray.available_resources().get('CPU'), [g['state'] for g in ray.util.placement_group_table().values()])"


class RayRun(Team):
    """A run on a Ray cluster, which starts the agents. The key is known, to look for it."""

    def __init__(self, site: Site, folder: Path, *overrides: str, **environment: str) -> None:
        folder.mkdir()
        super().__init__(
            site, folder, "launcher=ray", f"cluster.ray_address={address(site)}", *overrides, **environment
        )

    def __enter__(self) -> RayRun:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        for machine in self.site.machines:  # whoever is left after a failure
            subprocess.run(machine.command("pkill", "-9", "-f", OURS), check=False)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Site]:
    """Two machines."""
    with ray_cluster(alpha=2, beta=2) as site:
        yield site


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Weights of a run on one machine."""
    folder = tmp_path_factory.mktemp("undisturbed")
    words = ["run", "ppo", *SMALL, *STEPS, f"run_dir={folder / 'run'}", "cluster.n_devices_per_node=2"]
    done = realrl(*words, timeout_s=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return weights(folder / "run")


def nothing_is_left(site: Site) -> bool:
    """True if no process of a run is there."""
    return not any(machine.processes(OURS) for machine in site.machines)


@pytest.mark.parametrize(("plan", "planes"), [("d2 across", ("socket", "collective")), ("split", ("socket",))])
def test_numbers_are_those_of_one_machine(cluster: Site, tmp_path: Path, plan: str, planes: tuple[str, ...]) -> None:
    alone = tmp_path / "alone"
    words = ("run", "ppo", *SMALL, *PLANS[plan], f"run_dir={alone}", "cluster.n_devices_per_node=2")
    done = realrl(*words, timeout_s=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    for plane in planes:
        with RayRun(cluster, tmp_path / plane, *PLANS[plan], f"cluster.data_plane={plane}") as run:
            assert run.end() == {"master": 0}, run.all_said()
            assert "agents on alpha, beta by Ray" in run.said()
            assert weights(run.run_dir) == weights(alone)
            assert_same_numbers(read_metrics(run.run_dir), read_metrics(alone), rel=0.0, floor=0.0)
        assert nothing_is_left(cluster)
    assert ask(cluster, FREE).split()[0] == "4.0"


LOOK = """
import os, re, sys
from pathlib import Path
key = bytes.fromhex(sys.argv[1])
for process in Path("/proc").glob("[0-9]*"):
    try:
        words, variables = (process / "cmdline").read_bytes(), (process / "environ").read_bytes()
        if int(process.name) == os.getpid() or not words:
            continue
        held = [name for name, text in (("arguments", words), ("environment", variables)) if key.hex().encode() in text]
        is_rays = b"-m\\0realrl" not in words and b"AgentHolder" not in words
        if is_rays:
            with open(process / "mem", "rb", 0) as memory:
                for line in (process / "maps").read_text().splitlines():
                    begin, end, may_read = re.match(r"(\\w+)-(\\w+) (r?)", line).groups()
                    if may_read and not line.endswith(("[vvar]", "[vsyscall]")):
                        memory.seek(int(begin, 16))
                        try:
                            text = memory.read(int(end, 16) - int(begin, 16))
                        except OSError:
                            continue
                        held += ["memory"] * (key in text or key.hex().encode() in text)
        print("looked at" if is_rays else "passed", words[:100], *held)
    except (FileNotFoundError, ProcessLookupError):
        continue
"""


def test_the_key_is_neither_in_rays_state_nor_in_its_logs(cluster: Site, tmp_path: Path) -> None:
    """Whatever Ray's lists and pages show comes from the memory of its servers; so these are searched."""
    with RayRun(cluster, tmp_path / "a", "steps=6") as run:
        run.wait_for("step 2/")
        for machine in cluster.machines:
            found = machine.run(python(), "-c", LOOK, run.key).splitlines()
            looked = [line for line in found if line.startswith("looked at")]
            daemons = ("raylet", "gcs_server") if machine is cluster.machines[0] else ("raylet",)
            assert all(any(f"/{daemon}" in line for line in looked) for daemon in daemons), found
            assert [line for line in found if line.endswith(("arguments", "environment", "memory"))] == []
            logs = "find /tmp/rr-*/ -type f | xargs cat"
            assert run.key not in machine.run("sh", "-c", logs)
        assert run.end() == {"master": 0}, run.all_said()
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert [path for path in files if run.key.encode() in path.read_bytes()] == []
        assert [path for path in files if bytes.fromhex(run.key) in path.read_bytes()] == []


def test_an_agent_that_is_killed_is_started_again_on_its_machine(
    cluster: Site, tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    beta = cluster.machines[1]
    with RayRun(cluster, tmp_path / "a", *STEPS) as run:
        run.wait_for("step 3/")
        kill(beta, "realrl.runtime.ray.agent")
        run.wait_for("the agent on beta was killed by signal 9: it is started again")
        assert run.end() == {"master": 0}, run.all_said()
        assert weights(run.run_dir) == undisturbed


def test_all_ends_with_a_run_that_is_killed(cluster: Site, tmp_path: Path) -> None:
    with RayRun(cluster, tmp_path / "a", *STEPS) as run:
        run.wait_for("step 2/")
        for pid in cluster.machines[0].processes("realrl run|main master"):
            cluster.machines[0].run("kill", "-9", str(pid))
        wait_until(lambda: nothing_is_left(cluster), LEASE_S + 10.0)
    n_cpus, *states = ask(cluster, FREE).split(maxsplit=1)
    assert n_cpus == "4.0"
    assert "CREATED" not in states[0]


OLDER = """
import json; from ray.experimental.internal_kv import _internal_kv_get as get, _internal_kv_put as put
known = json.loads(get(b"CLUSTER_METADATA", namespace=b"cluster"))
put(b"CLUSTER_METADATA", json.dumps(known | {"ray_version": "2.9.0"}).encode(), overwrite=True, namespace=b"cluster")
"""  # the cluster of the module is of no use after that


def test_a_cluster_that_will_not_do_is_refused_in_time(cluster: Site, tmp_path: Path) -> None:
    head = cluster.machines[0]
    refusals = {
        f"the Ray cluster at {address(cluster)} has 2 machines, and the plan needs 3": "cluster.n_nodes=3",
        "0 of the 2 machines that the plan needs have 3 CPUs": "cluster.ray_cpus=3",
        f"no Ray cluster answers at {head.address}:1: Connection refused": f"cluster.ray_address={head.address}:1",
        "has other versions than this machine: The cluster was started with: Ray: 2.9.0": "seed=2",
    }
    for number, (message, override) in enumerate(refusals.items()):
        if "versions" in message:
            ask(cluster, OLDER)
        begin_s = time.monotonic()
        with RayRun(cluster, tmp_path / str(number), override) as run:
            assert run.end() == {"master": 2}, run.said()
            assert message in run.said(), run.said()
        took_s = time.monotonic() - begin_s
        print(f"{message}: refused after {took_s:.1f} s")
        assert took_s < 10.0
    assert nothing_is_left(cluster)


def test_a_machine_that_dies_has_a_successor_if_there_is_one(tmp_path: Path, undisturbed: dict[str, str]) -> None:
    with ray_cluster(alpha=2, beta=2, gamma=2) as site:
        with RayRun(site, tmp_path / "a", *STEPS) as run:
            run.wait_for("step 3/")
            victim = next(machine for machine in site.machines[1:] if machine.processes("worker --rank"))
            spare = next(machine for machine in site.machines[1:] if machine is not victim)
            victim.die()
            run.wait_for(f"Ray has lost the agent on {victim.name}")
            assert run.end() == {"master": 0}, run.all_said()
            assert f"machine {spare.name} at" in run.said()
            assert weights(run.run_dir) == undisturbed
        with RayRun(site, tmp_path / "b", *STEPS, "cluster.start_timeout_s=20") as run:
            run.wait_for("step 3/")
            spare.die()
            assert run.end() == {"master": 75}, run.all_said()
            assert "1 of 2 machines joined within 20 s: alpha" in run.said()
