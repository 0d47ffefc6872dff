"""Home and call share memory in real workers: no rank holds a byte of a role twice."""

from __future__ import annotations

import pytest
import torch

from realrl.config.compose import compose
from realrl.config.serialize import dump_config
from realrl.experiment.discovery import config_dir, load_experiment
from realrl.runtime.worker.hook_runner import HookRunner
from realrl.runtime.worker.model_worker import ModelWorker
from realrl.runtime.worker.roles import HostedRole
from realrl.sched.key_value import KeyValueClient
from realrl.sched.messages import Initialize, RunHooks, Shutdown
from tests.helpers.live_memory import bytes_alive
from tests.helpers.ranks import run_ranks


def _shards(hosted: HostedRole) -> list[torch.Tensor]:
    engine = hosted.home_engine
    return [] if engine is None else [p for _, p in engine.decoder.named_shards()]


def _generate_twice(
    rank: int, world_size: int, meeting: KeyValueClient, overrides: tuple[str, ...], n_times: int
) -> list[tuple[int, int, float]]:
    """Bring the actor's parameters into the layout of generation and drop them again.

    Returns:
        For each time: the bytes of the role's parameters alive on this rank, those that the plan says, and the same
        number as a share of the model.
    """
    experiment = load_experiment("ppo")
    here = ("preset=tiny", f"cluster.n_devices_per_node={world_size}", "cluster.device=cpu")
    config = compose(experiment, [*here, *overrides], config_dir=config_dir())
    worker = ModelWorker(rank, meeting=meeting)
    worker.handle(Initialize(0, dump_config(config), ("",) * world_size))
    hooks, plan = worker._hooks, worker._plan
    assert isinstance(hooks, HookRunner)
    assert plan is not None
    actor, gen = worker._roles["actor"], plan.allocation_of("actor_gen")
    moved = hooks._reallocs.of(plan.hooks_of("actor_gen").before[-1])  # type: ignore[arg-type]
    home = _shards(actor)
    before, own = [p.detach().clone() for p in home], bytes_alive(home)
    found = []
    for number in range(n_times):
        hooks.run(RunHooks(2 * number, number, "actor_gen", 1, "before"))
        alive = bytes_alive([*_shards(actor), *actor.visiting.get("actor_gen", {}).values()])
        found.append((alive, moved.peak_bytes(rank), alive / moved.source_layout.model_bytes))
        for ours, expected in zip(home, before, strict=True):
            assert torch.equal(ours, expected)
        assert (gen in actor.models) == ("actor_gen" in actor.visiting)
        if gen in actor.models:
            actor.send_home("actor_gen")
        assert bytes_alive(_shards(actor)) == own
        for ours, expected in zip(home, before, strict=True):
            assert ours.is_contiguous()
            assert torch.equal(ours, expected)
    worker.handle(Shutdown(2 * n_times))
    return found


LAYOUTS = (
    "allocation=d4 allocation.calls.actor_train=t4 allocation.calls.actor_gen=d2t2",  # nested by tp
    "allocation=d4 allocation.calls.actor_train=t2p2 allocation.calls.actor_gen=d2p2",  # by part of the split
    "allocation=d4 allocation.calls.actor_train=p4 allocation.calls.actor_gen=d2p2",  # by pp
    "allocation=d4 allocation.calls.actor_train=t2p2 allocation.calls.actor_gen=d4",  # by both
    "allocation=d4 allocation.calls.actor_train=d2t2 allocation.calls.actor_gen=t4",  # the home is the larger one
    "allocation=d4 allocation.calls.actor_train=t4 allocation.calls.actor_gen=p4",  # by nothing, in part
    "allocation=d4 allocation.calls.actor_train=t2@0:0-1 allocation.calls.actor_gen=d4",  # of some ranks
)


@pytest.mark.parametrize("layouts", LAYOUTS)
def test_no_byte_is_there_twice(layouts: str) -> None:
    for of_rank in run_ranks(4, _generate_twice, tuple(layouts.split()), 2, joined=False):
        for alive, planned, _ in of_rank:
            assert alive == planned


def test_eight_ranks_trained_as_1_4_2_and_generating_as_1_2_2_2_hold_half_of_the_model() -> None:
    overrides = ("allocation=d8", "allocation.calls.actor_train=d2t4", "allocation.calls.actor_gen=d4t2")
    for of_rank in run_ranks(8, _generate_twice, overrides, 1, joined=False, timeout_s=110.0):
        for alive, planned, share in of_rank:
            assert alive == planned
            assert share == pytest.approx(0.5, abs=0.01)  # norms are on every rank


@pytest.mark.parametrize("n_times", [pytest.param(20, id="20"), pytest.param(200, id="200", marks=pytest.mark.slow)])
def test_many_times_leave_nothing_behind(n_times: int) -> None:
    overrides = tuple(LAYOUTS[0].split())
    for of_rank in run_ranks(4, _generate_twice, overrides, n_times, joined=False, timeout_s=110.0):
        assert len(set(of_rank)) == 1
