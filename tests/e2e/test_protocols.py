"""Each transfer protocol in a run of real workers: the examples of docs/protocols.md divide calls, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from realrl.graph.mfc import protocol_names
from tests.docs.markdown import ROOT, commands
from tests.helpers.runs import SMALL, assert_same_numbers, read_metrics, run_here
from tests.helpers.traces import load_trace

pytestmark = pytest.mark.timeout(300)

PAGE = ROOT / "docs" / "protocols.md"
EXAMPLES = {words[-1].rpartition("=")[2]: words for words in commands(PAGE, "realrl") if ".protocol=" in words[-1]}
QUICK = (*SMALL, "steps=1")  # eight samples
CALLS = {  # calls of the example, and workers that have the same samples
    "3D_PROTO": {"ref_inf": [{0, 1}, {2, 3}]},
    "DP_PROTO": {"rew_inf": [{0}, {1}]},
    "ALL_TO_ALL": {"rew_inf": [{0}, {1}]},
    "ONE_TO_ALL": {"critic_inf": [{0, 1}]},
    "3D_PP_ONLY": {"critic_inf": [{0, 1}]},
    "3D_ALL_MICRO_DP": {"actor_gen": [{0}, {1}, {2}, {3}], "ref_inf": [{0, 1}, {2, 3}]},
}


def spans_of(run_dir: Path, name: str) -> dict[int, dict[str, Any]]:
    """Arguments of the last span of one name, by worker."""
    return {e["tid"]: e["args"] for e in load_trace(run_dir / "trace.json") if e["name"] == name}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("reference")
    run_here("run", "ppo", *QUICK, "launcher=inline", f"run_dir={folder / 'run'}")
    return read_metrics(folder / "run")


def test_every_protocol_has_an_example() -> None:
    assert set(EXAMPLES) == set(CALLS)
    assert set(EXAMPLES) <= set(protocol_names())


# tests/plan/test_protocols.py has how they divide
SLOW = ("3D_PROTO", "ALL_TO_ALL", "ONE_TO_ALL", "3D_PP_ONLY", "3D_ALL_MICRO_DP")


@pytest.mark.parametrize(
    "protocol", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in CALLS]
)
def test_the_example_gives_the_same_numbers(reference, protocol: str, tmp_path: Path) -> None:
    run_here(*EXAMPLES[protocol], *QUICK, f"run_dir={tmp_path / 'run'}")
    assert_same_numbers(reference, read_metrics(tmp_path / "run"), rel=1e-4, floor=1e-6)
    for call, alike in CALLS[protocol].items():
        samples = {worker: args["samples"] for worker, args in spans_of(tmp_path / "run", call).items()}
        assert sorted(samples) == sorted(set().union(*alike))
        counts = [{samples[worker] for worker in workers} for workers in alike]
        assert all(len(count) == 1 and min(count) > 0 for count in counts), samples
        assert sum(map(min, counts)) == 8, samples


# tests/ranks/test_ppo_plans.py spreads rows over the collective plane by default
@pytest.mark.parametrize("plane", ["socket", pytest.param("collective", marks=pytest.mark.slow)])
def test_a_replica_pulls_one_copy_and_spreads_it(reference, plane: str, tmp_path: Path) -> None:
    """Tensor ranks 2 and 3 read what rank 0 made: one of them pulls it, the other gets the same bytes from that one."""
    layout = ("cluster.n_devices_per_node=4", "allocation=d1@0:0", "allocation.calls.ref_inf=t2@0:2-3")
    run_here("run", "ppo", *QUICK, *layout, f"cluster.data_plane={plane}", f"run_dir={tmp_path / 'run'}")
    assert_same_numbers(reference, read_metrics(tmp_path / "run"), rel=1e-4, floor=1e-6)
    pulled, spread = (spans_of(tmp_path / "run", f"{word} for ref_inf") for word in ("transfer", "spread"))
    assert pulled[2]["bytes"] > 1000
    assert 3 not in pulled
    n_bytes = {worker: args["bytes"] for worker, args in spread.items()}
    assert set(n_bytes) == {2, 3}
    assert n_bytes[2] == 0
    assert 0 <= n_bytes[3] - pulled[2]["bytes"] < 200  # a pull has one header for all keys
