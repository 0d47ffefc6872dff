import pytest

from realrl.profiler.dispatch import handling_seconds
from tests.profiler.test_sizes import plan_of


@pytest.mark.parametrize("name", ["ppo", "sft", "dapo", "safe_rlhf", "self_play", "gen"])
@pytest.mark.parametrize("overrides", [(), ("cluster.n_devices_per_node=4", "allocation=split", "save.every_steps=1")])
def test_a_run_whose_workers_answer_at_once_comes_to_its_end(name, overrides):
    if name == "gen":
        overrides = overrides[:1]
    assert 0 < handling_seconds(plan_of(name, *overrides)) < 1


def test_rows_that_move_by_collectives_are_answered():
    overrides = ("cluster.n_devices_per_node=4", "allocation=split", "cluster.data_plane=collective")
    assert handling_seconds(plan_of("ppo", *overrides, "allocation.calls.actor_gen=d2t2@0:0-3")) > 0
