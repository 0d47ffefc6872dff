"""Groups and runs whose ranks are not in ascending order."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from realrl.engine.groups import Groups
from realrl.experiment.discovery import load_run
from realrl.experiment.models import role_configs
from realrl.experiment.planning import plan_run
from realrl.mesh.device_mesh import Allocation, Cluster, DeviceMesh, ParallelStrategy
from realrl.plan.groups import GroupKind, group_of, process_groups
from realrl.plan.hooks import Realloc
from realrl.runtime.worker.reallocs import Reallocs
from realrl.sched.key_value import KeyValueClient
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import assert_same_numbers, read_metrics, realrl

CLUSTER = Cluster(1, 4)
ORDER = (2, 0, 3, 1)


def _collectives(rank: int, world_size: int, meeting: KeyValueClient) -> dict[str, object]:
    """Every operation whose result depends on places, in a tensor group in the order `ORDER`, and one in pairs."""
    whole = DeviceMesh.whole(CLUSTER)
    four = Allocation(whole, ParallelStrategy(tp=4), ORDER)
    pairs = Allocation(whole, ParallelStrategy(dp=2, tp=2), ORDER)
    planned = process_groups([four, pairs, replace(four, order=None)], CLUSTER)
    groups = Groups.create(
        planned, rank=rank, world_size=world_size, meeting=meeting, device=torch.device("cpu"), timeout_s=30.0
    )
    group = groups[group_of(planned, GroupKind.TP, four, rank)]
    pair = groups[group_of(planned, GroupKind.TP, pairs, rank)]
    received = torch.empty(1)
    after, before = (group.rank + 1) % 4, (group.rank - 1) % 4
    group.exchange([(after, torch.tensor([float(rank)]))], [(before, received)]).wait()
    result = {
        "place": group.rank,
        "gathered": group.all_gather(torch.tensor([[rank, 10 * rank]])).tolist(),
        "scattered": group.reduce_scatter(torch.arange(8.0)).tolist(),
        "root": group.broadcast_(torch.tensor([rank]), root=1).item(),
        "bytes": group.broadcast_bytes(bytes([rank]), root=2, device=torch.device("cpu")),
        "from before": received.item(),
        "pair": pair.all_gather(torch.tensor([rank])).tolist(),
        "sum": group.all_reduce_(torch.tensor([float(rank)])).item(),
        "plain": groups[group_of(planned, GroupKind.TP, replace(four, order=None), rank)].rank,
    }
    groups.destroy()
    return result


def test_places_in_a_group_are_those_of_its_order() -> None:
    results = run_ranks(4, _collectives, joined=False)
    for rank, result in enumerate(results):
        place = ORDER.index(rank)
        assert result == {
            "place": place,
            "gathered": [[other, 10 * other] for other in ORDER],
            "scattered": [4.0 * (2 * place), 4.0 * (2 * place + 1)],
            "root": ORDER[1],
            "bytes": bytes([ORDER[2]]),
            "from before": ORDER[place - 1],
            "pair": list(ORDER[:2] if place < 2 else ORDER[2:]),
            "sum": 6.0,
            "plain": rank,
        }


# ---------------------------------------------------------------- runs

SIZE = ("preset=tiny", "steps=2", "n_seqs=8", "generation.max_new_tokens=6", "algorithm.n_minibatches=2")


def metrics_of(run_dir: Path, *overrides: str) -> list[dict[str, Any]]:
    done = realrl("run", "ppo", *SIZE, f"run_dir={run_dir}", *overrides, timeout_s=200.0)
    assert done.returncode == 0, done.stdout + done.stderr
    return read_metrics(run_dir)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return metrics_of(tmp_path_factory.mktemp("single") / "run", "launcher=inline")


@pytest.mark.timeout(300)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("training", "generation", "moves"),
    [("t4", "d2t2", True), ("d2t2", "t4s", False)],
)
def test_a_run_moves_fewer_bytes_than_in_plain_order(
    training: str, generation: str, moves: bool, single: list[dict[str, Any]], tmp_path: Path
) -> None:
    """And has the numbers of a single worker. After d2t2, in the right order, each rank holds all that t4 needs."""
    overrides = (f"allocation={training}", f"allocation.calls.actor_gen={generation}")
    rows = metrics_of(tmp_path / "run", "cluster.n_devices_per_node=4", *overrides)
    assert_same_numbers(single, rows, rel=1e-4, floor=1e-6)
    experiment, config = load_run((tmp_path / "run" / "config.json").read_bytes())
    plan = plan_run(config, experiment)
    (hook,) = plan.hooks["actor_gen"].before
    assert isinstance(hook, Realloc)
    assert hook.target_allocation.order == (0, 2, 1, 3)
    reallocs = Reallocs(plan, role_configs(plan))
    plain = replace(hook, target_allocation=replace(hook.target_allocation, order=None))
    num_bytes = reallocs.of(hook).total_bytes
    assert [row["bytes/params"] for row in rows] == [num_bytes] * 2
    assert (num_bytes > 0) == moves
    assert num_bytes < reallocs.of(plain).total_bytes
