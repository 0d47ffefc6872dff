"""Two engines whose pipelines are one list: weights, gradients and results are to the bit those of each alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch

from realrl.algo.api import MicroBatching, TrainResult
from realrl.data.sample import SequenceSample
from realrl.engine import fused
from realrl.engine.decoder_engine import DecoderEngine
from realrl.engine.fused import FusedEngines
from realrl.engine.groups import Groups
from realrl.engine.parallel import parallel_of
from realrl.engine.train import pipeline
from realrl.mesh.device_mesh import Allocation, Cluster, DeviceMesh, ParallelStrategy
from realrl.model.init import random_model
from realrl.plan.fused_calls import FusedModel, FusedModels, reversed_stages
from realrl.plan.groups import process_groups
from realrl.plan.parameters.shards import shard_of
from realrl.plan.pipeline import Step
from realrl.sched.key_value import KeyValueClient
from tests.helpers.ranks import run_ranks
from tests.helpers.training import make_batch, masked_nll, n_masked
from tests.ranks.test_engine_3d import CONFIGS, CPU, OPTIMIZER, score_loss, share_of
from tests.ranks.test_engine_3d import TensorParallelGroup as TensorGroup


@dataclass(frozen=True)
class Trainee:
    """A model and its work: minibatches, each cut into some micro-batches."""

    model: str
    n_layers: int
    n_mbs: tuple[int, ...]
    seed: int
    checkpoints: bool = False
    zero_stage: int = 0

    def config(self) -> Any:
        return replace(CONFIGS[self.model], n_layers=self.n_layers)

    def engine(self, allocation: Allocation, parallel: Any) -> DecoderEngine:
        config, strategy = self.config(), allocation.strategy
        tp = TensorGroup(parallel.tp, sp=strategy.sp)
        shard = shard_of(config, strategy, parallel.mesh_rank)
        decoder = random_model(config, seed=self.seed, shard=shard, parallel=tp)
        decoder.activation_checkpointing = self.checkpoints
        return DecoderEngine(
            decoder,
            role=self.model,
            parallel=parallel,
            optimizer=OPTIMIZER.model_copy(update={"zero_stage": self.zero_stage}),
            total_optimizer_steps=10,
        )

    def train(self, engine: DecoderEngine, dp_rank: int, dp: int) -> list[TrainResult]:
        results = []
        for number, n_mbs in enumerate(self.n_mbs):
            batch: SequenceSample = make_batch(11, seed=self.seed + number)
            total = float(engine.all_reduce(torch.tensor(n_masked(share_of(batch, dp_rank, dp)))))
            results.append(
                engine.train_batch(
                    share_of(batch, dp_rank, dp),
                    score_loss if self.config().is_scalar else masked_nll,
                    normaliser=total,
                    micro_batching=MicroBatching(n_mbs=n_mbs),
                )
            )
        return results


CASES = {
    "pp2": (ParallelStrategy(pp=2), Trainee("untied", 4, (4, 3), 1), Trainee("value", 2, (2, 5), 2)),
    "pp4, the second has more minibatches": (
        ParallelStrategy(pp=4),
        Trainee("tied", 5, (5,), 1, checkpoints=True),
        Trainee("experts", 4, (3, 7, 1), 2),
    ),
    "d2p2, sharded optimizers": (
        ParallelStrategy(dp=2, pp=2),
        Trainee("experts", 2, (4, 4), 1, zero_stage=1),
        Trainee("value", 3, (2,), 2, zero_stage=1),
    ),
    "t2p2": (
        ParallelStrategy(tp=2, pp=2, sp=True),
        Trainee("untied", 3, (1, 3), 1),
        Trainee("tied", 2, (3, 1), 2, checkpoints=True),
    ),
}


def outcome(engine: DecoderEngine, results: list[TrainResult]) -> dict[str, Any]:
    assert engine._optimizer is not None
    state = engine.state_dict()["parameters"]
    return {
        "weights": {name: p.detach().numpy().tobytes() for name, p in engine.decoder.named_shards()},
        "moments": {name: own["exp_avg"].numpy().tobytes() for name, own in state.items()},
        "results": [(r.stats, r.grad_norm, r.lr, r.stepped) for r in results],
    }


def _train(rank: int, world_size: int, meeting: KeyValueClient, name: str) -> dict[str, Any]:
    strategy, *trainees = CASES[name]
    cluster = Cluster(1, world_size)
    plain = Allocation(DeviceMesh.whole(cluster), strategy)
    homes = [plain, reversed_stages(plain)]
    planned = process_groups(homes, cluster)
    groups = Groups.create(planned, rank=rank, world_size=world_size, meeting=meeting, device=CPU, timeout_s=120.0)
    places = [parallel_of(groups, planned, home, rank) for home in homes]

    def work(i: int, engine: DecoderEngine) -> list[TrainResult]:
        return trainees[i].train(engine, places[i].dp_rank, strategy.dp)

    alone = [trainee.engine(home, place) for trainee, home, place in zip(trainees, homes, places, strict=True)]
    expected = [outcome(engine, work(i, engine)) for i, engine in enumerate(alone)]

    engines = [trainee.engine(home, place) for trainee, home, place in zip(trainees, homes, places, strict=True)]
    models = FusedModels(
        *(
            FusedModel.of(t.config(), strategy.pp, recomputes=t.checkpoints, n_minibatches=len(t.n_mbs))
            for t in trainees
        )
    )
    planned_steps: list[list[Step]] = []
    done: list[Step] = []

    def noting(steps: Any, *args: Any, **settings: Any) -> None:
        planned_steps.append([step for step in steps if not step.kind.is_message])
        pipeline.run_stage(steps, *args, **settings)

    compute = pipeline._Run.compute

    def compute_noting(run: Any, step: Step) -> None:
        done.append(step)
        compute(run, step)

    pair = FusedEngines((engines[0], engines[1]), models)
    with mock.patch.object(fused, "run_stage", noting), mock.patch.object(pipeline._Run, "compute", compute_noting):
        results = pair.run(lambda: work(0, engines[0]), lambda: work(1, engines[1]))
    own = [outcome(engine, result) for engine, result in zip(engines, results, strict=True)]
    flat = [step for steps in planned_steps for step in steps]
    chunks = {step.chunk for step in flat}
    n_fused = min(len(t.n_mbs) for t in trainees)
    groups.destroy()
    return {
        "expected": expected,
        "own": own,
        "order": done[: len(flat)] == flat,
        "fused": (len(planned_steps), n_fused),
        "chunks": (chunks, {places[0].pp_rank, strategy.pp + places[1].pp_rank}),
    }


@pytest.mark.parametrize("name", CASES)
def test_fused_training_is_that_of_each_alone(name: str) -> None:
    results = run_ranks(CASES[name][0].n_devices, _train, name, timeout_s=120.0, joined=False)
    for result in results:
        for own, expected in zip(result["own"], result["expected"], strict=True):
            assert own["results"] == expected["results"]
            assert own["moments"] == expected["moments"]
            assert own["weights"] == expected["weights"]
        assert result["order"]
        assert result["fused"][0] == result["fused"][1]
        assert result["chunks"][0] == result["chunks"][1]
