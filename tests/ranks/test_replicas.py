"""Replicas of trained parameters over gloo: those of one rank that drift away are found and named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from realrl.algo.api import MicroBatching
from realrl.engine.decoder_engine import DecoderEngine
from realrl.engine.parameters import replicas
from realrl.engine.parameters.replicas import drift, hashes
from realrl.errors import CallError
from realrl.mesh.device_mesh import ParallelStrategy
from realrl.model.init import random_model
from realrl.plan.parameters.shards import shard_of
from realrl.sched.key_value import KeyValueClient
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import read_metrics, realrl, run_here
from tests.helpers.training import CONFIG, OPTIMIZER, make_batch, masked_nll, n_masked
from tests.ranks.test_engine_3d import join

BF16 = torch.bfloat16


def _drifting(
    rank: int, world_size: int, meeting: KeyValueClient, strategy: ParallelStrategy, victim: int, zero_stage: int
) -> str:
    """Train a step, compare, change the lowest bit of one element on the victim, compare again."""
    groups, places = join(rank, world_size, meeting, {strategy})
    place = places[strategy]
    decoder = random_model(CONFIG, seed=1, shard=shard_of(CONFIG, strategy, rank))
    engine = DecoderEngine(
        decoder, role="actor", parallel=place, total_optimizer_steps=3, compute_dtype=BF16,
        optimizer=OPTIMIZER.model_copy(update={"zero_stage": zero_stage}),
    )  # fmt: skip
    if strategy.pp == strategy.tp == 1:
        batch = make_batch(9).split([[i, i + 3, i + 6] for i in range(3)])[place.dp_rank]
        engine.train_batch(batch, masked_nll, normaliser=n_masked(batch), micro_batching=MicroBatching())
    engine.check_replicas(rank)
    if rank == victim:
        parameter = [*engine.decoder.named_shards()][5][1]
        parameter.detach().view(torch.int16).view(-1)[-1] ^= 1
    told = ""
    try:
        engine.check_replicas(rank)
    except CallError as error:
        told = error.message if "check_replicas_every_steps=1" in str(error.remedy) else "no remedy"
    groups.destroy()
    return told


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_the_rank_and_the_parameter_that_differ_are_named_on_all_ranks(zero_stage: int) -> None:
    name = [*random_model(CONFIG, seed=1).named_shards()][5][0]
    told = run_ranks(3, _drifting, ParallelStrategy(dp=3), 1, zero_stage, joined=False)
    assert told == [f"replicas of role 'actor' differ: worker 1 holds another {name!r} than workers 0, 2"] * 3


def test_only_the_replicas_of_a_slice_are_compared() -> None:
    told = run_ranks(4, _drifting, ParallelStrategy(dp=2, pp=2), 3, 0, joined=False)
    assert told[:2] == ["", ""]  # the first stage
    assert told[2] == told[3]
    assert "worker 3 holds another 'blocks.1." in told[2]
    assert told[2].endswith("than worker 2")


def test_one_rank_has_nothing_to_compare() -> None:
    told = run_ranks(1, _drifting, ParallelStrategy(), 0, 0, joined=False)
    assert told == [""]


def test_hashes_tell_bits_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "_PIECE", 7)
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.int64):
        tensor = (torch.randn(4, 5, generator=generator) * 50).to(dtype)
        changed = [tensor]
        for i in range(20):
            one = tensor.clone()
            one.view(-1).view(torch.uint8)[i * tensor.element_size()] ^= 1
            changed.append(one)
        changed += [tensor.flip(0), tensor.flip(1), tensor.roll(7), torch.zeros_like(tensor)]
        values = [int(value) for value in hashes(changed)]
        assert len(set(values)) == len(values), dtype
        assert values[0] == int(hashes([tensor.t().contiguous().t()])[0])
    nan = torch.tensor([float("nan"), -0.0])
    assert hashes([nan]) == hashes([nan.clone()])
    assert hashes([nan]) != hashes([torch.tensor([float("nan"), 0.0])])
    assert [int(value) for value in hashes([torch.empty(0)])] == [0]


def test_words_for_a_drift() -> None:
    names = ["a", "b", "c"]
    same = [1, 2, 3]
    assert drift(names, [same, same, same], [4, 5, 6]) == ""
    assert drift(names, [same, [1, 9, 3]], [4, 6]) == "worker 6 holds another 'b' than worker 4"
    many = drift(names, [[1, 8, 8], same, [1, 7, 3], same], [0, 2, 4, 6])
    assert many == "workers 0, 4 hold another 'b' than workers 2, 6; 2 of 3 parameters differ"


DRIFTING = '''
"""Supervised fine-tuning in which worker 1 goes astray in its second step."""

import torch

from realrl import InterfaceType, MFCDef, register_interface
from realrl.algo.supervised.sft import SFT
from realrl_experiments.sft import EXPERIMENT as PARENT


@register_interface("drifting")
class Drifting(SFT):
    def train_step(self, model, batch, ctx):
        metrics = super().train_step(model, batch, ctx)
        if ctx.step == 2 and torch.distributed.get_rank() == 1:
            next(model.engine.decoder.parameters()).data.view(-1)[3] += 1e-3
        return metrics


def calls(config):
    return [MFCDef("actor_train", "actor", InterfaceType.TRAIN_STEP, "drifting", ("input_ids", "prompt_mask"),
                   n_seqs=config.n_seqs, log_return_value=True)]


EXPERIMENT = PARENT.variant("drifting", "one worker goes astray", mfcs=calls)
'''


@pytest.mark.slow
def test_a_run_ends_at_the_next_comparison(tmp_path: Path) -> None:
    (tmp_path / "drifting.py").write_text(DRIFTING)
    workers = ("cluster.n_devices_per_node=2", "cluster.device=cpu", "cluster.check_replicas_every_steps=3")
    run = ("run", str(tmp_path / "drifting.py"), "preset=tiny", "steps=4", "n_seqs=8", *workers)
    ended = realrl(*run, f"run_dir={tmp_path / 'run'}", timeout_s=110.0)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    told = " ".join((ended.stdout + ended.stderr).split())
    assert "actor_train at step 3: replicas of role 'actor' differ: worker 1 holds another 'embedding.weight'" in told
    assert "Go on from a checkpoint of an earlier step" in told
    assert len(read_metrics(tmp_path / "run")) == 2


def test_a_run_may_never_compare(tmp_path: Path) -> None:
    run_here("run", "sft", "preset=tiny", "steps=1", "n_seqs=4", "launcher=inline", f"run_dir={tmp_path / 'run'}",
             "cluster.check_replicas_every_steps=0")  # fmt: skip
    assert len(read_metrics(tmp_path / "run")) == 1
