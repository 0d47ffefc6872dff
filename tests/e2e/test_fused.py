"""PPO whose actor and critic train at once: the numbers of calls one after the other, also after a kill."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from realrl.cli import main
from realrl.config.compose import compose
from realrl.config.schema import RunConfig
from realrl.errors import ConfigError
from realrl.experiment.backends import check_backends
from realrl.experiment.discovery import config_dir, load_experiment
from realrl.experiment.models import role_configs
from realrl.experiment.planning import plan_run
from realrl.experiment.run_plan import RunPlan
from realrl.experiment.states import call_states, longest_rows, memory_model, role_states
from realrl.plan.memory.formulas.local import Kernels
from tests.e2e.test_resume import assert_same_checkpoint, numbers
from tests.helpers.live import LiveRun, wait_until
from tests.helpers.runs import SMALL
from tests.helpers.traces import load_trace

NAMES = ("actor_train", "critic_train")
FUSE = "allocation.fuse=[actor_train,critic_train]"
STAGES = ("cluster.n_devices_per_node=2", "allocation=pipeline", "algorithm.early_stop_ratio=null")


def planned(*overrides: str) -> RunPlan:
    experiment = load_experiment("ppo")
    config: RunConfig = compose(experiment, [*SMALL, *STAGES, FUSE, *overrides], config_dir=config_dir())
    return plan_run(config, experiment)


@pytest.mark.timeout(200)
def test_fused_calls_give_the_numbers_of_calls_one_after_the_other(tmp_path: Path) -> None:
    for name, overrides in (("apart", ()), ("fused", (FUSE,))):
        assert main(["run", "ppo", *SMALL, *STAGES, *overrides, f"run_dir={tmp_path / name}"]) == 0
    fused, apart = tmp_path / "fused", tmp_path / "apart"
    assert numbers(fused) == numbers(apart)
    assert (fused / "generations.jsonl").read_text() == (apart / "generations.jsonl").read_text()
    for role in ("actor", "critic"):
        for file in (apart / f"checkpoints/step_3/{role}").glob("*.safetensors"):
            expected = load_file(file)
            ours = load_file(fused / f"checkpoints/step_3/{role}" / file.name)
            assert all(ours[key].equal(tensor) for key, tensor in expected.items())
    for rank in range(2):
        spans = {
            name: [e for e in load_trace(fused / "trace.json") if e["name"] == name and e.get("tid") == rank]
            for name in NAMES
        }
        for one, other in zip(*spans.values(), strict=True):
            assert one["args"]["fused"] == other["args"]["fused"] == "actor_train + critic_train"
            assert one["args"]["phase_s/backward"] > 0 < other["args"]["phase_s/backward"]
            assert abs(one["ts"] - other["ts"]) < 2  # both from the beginning to the end of the pair


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("who", ["worker 0", "worker 1", "master"])
def test_a_killed_run_ends_with_the_bits_of_a_whole_one(
    start: Callable[..., LiveRun], tmp_path: Path, who: str
) -> None:
    saves = ("steps=5", "save.every_steps=1", "save.keep=5")
    assert main(["run", "ppo", *SMALL, *STAGES, FUSE, *saves, f"run_dir={tmp_path / 'whole'}"]) == 0
    killed = start(*STAGES, FUSE, *saves)
    killed.wait_for("step")
    wait_until(lambda: any(killed.checkpoints.glob("step_*")), "a checkpoint")
    os.kill(killed.pid(who), signal.SIGKILL)
    assert killed.end() == 1
    assert not (killed.checkpoints / "step_5").exists()
    assert main(["run", "ppo", *SMALL, *STAGES, FUSE, *saves, f"run_dir={killed.run_dir}", "resume=auto"]) == 0
    assert numbers(killed.run_dir) == numbers(tmp_path / "whole")
    assert_same_checkpoint(killed.checkpoints / "step_5", tmp_path / "whole/checkpoints/step_5")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_checkpoint_goes_on_with_and_without_the_pair(tmp_path: Path) -> None:
    """The homes' orders differ, the files do not."""
    saves = ("save.every_steps=1", "save.keep=3")
    for name, overrides in (("apart", ()), ("fused", (FUSE,))):
        assert main(["run", "ppo", *SMALL, *STAGES, *saves, *overrides, f"run_dir={tmp_path / name}"]) == 0
    for name, other in (("apart", (FUSE,)), ("fused", ())):
        again, resume = tmp_path / "again", f"resume={tmp_path / name}/checkpoints/step_1"
        assert main(["run", "ppo", *SMALL, *STAGES, *saves, *other, f"run_dir={again}", resume]) == 0
        assert numbers(again) == numbers(tmp_path / name)[1:]
        shutil.rmtree(again)


@pytest.mark.slow
def test_a_failing_call_of_a_pair_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The critic's learning rate breaks it; the error is the critic's, though the actor's call runs as well."""
    broken = ("models.critic.optimizer.lr=1e30", "models.critic.optimizer.schedule=constant", "recover.retries=0")
    assert main(["run", "ppo", *SMALL, *STAGES, FUSE, *broken, f"run_dir={tmp_path / 'run'}"]) == 1
    errors = capfd.readouterr().err
    assert "critic" in errors
    assert "actor_train" not in errors.split("realrl: error: ")[-1].splitlines()[0]


def test_another_backend_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="call 'critic_train' trains with backend=megatron"):
        check_backends(planned("models.critic.backend=megatron"))


def test_evaluations_leave_the_pair_out() -> None:
    experiment = load_experiment("sft")
    config = compose(experiment, ["preset=tiny", "eval.only=true", "eval.path=tiny", FUSE], config_dir=config_dir())
    assert plan_run(config, experiment).fusion is None


def test_memory_counts_both_calls_at_once() -> None:
    together, apart = planned(), planned("allocation.fuse=[]")
    usages = []
    for plan in (together, apart):
        models = role_configs(plan)
        rows = longest_rows(plan.config, plan.experiment.dataset)
        memory = memory_model(plan, Kernels(), on_cpu=False)
        usages.append(memory.plan(role_states(plan, models), call_states(plan, rows)).calls)
    pair, single = usages
    for rank in range(2):
        assert pair["actor_train"][rank].activations == pair["critic_train"][rank].activations
        assert pair["actor_train"][rank].activations > single["actor_train"][rank].activations
        assert pair["actor_train"][rank].gradients > single["actor_train"][rank].gradients
        assert pair["ref_inf"][rank].activations == single["ref_inf"][rank].activations
