"""Step time and peak memory of the training backends, on gloo ranks of this machine, as ratios to native without ZeRO.

Every backend and stage trains the same random model on the same sequences, in processes of its own, and they take
turns: a round runs all of them, one after the other, and a ratio is the median over rounds of the ratios within a
round. Memory is what a rank's resident memory grew by at its peak, from before the optimizer was made, and counts the
imported packages of a backend too. Prints a table and writes JSON.

    python scripts/bench_backends.py
    python scripts/bench_backends.py --strategy d2t2 --hidden 768 --layers 12 --rounds 5 --precision bf16
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from realrl.algo.api import ForwardOutput, LossOutput, MicroBatching
from realrl.config.schema import BackendName, OptimizerConfig
from realrl.data.sample import SequenceSample
from realrl.engine import device as devices
from realrl.engine.decoder_engine import DecoderEngine
from realrl.engine.groups import Groups, GroupSettings
from realrl.engine.parallel import Parallel, parallel_of
from realrl.engine.tensor_parallel import TensorParallelGroup
from realrl.mesh.device_mesh import Allocation, Cluster, DeviceMesh, ParallelStrategy
from realrl.mesh.notation import parse_strategy
from realrl.model.init import random_model
from realrl.plan.backends import BACKENDS
from realrl.plan.groups import process_groups
from realrl.plan.parameters.shards import shard_of
from realrl.runtime.transport.sockets import RunKeys, WorkerKeys
from realrl.runtime.transport.zmq import ZmqKeyValueClient, ZmqKeyValueServer
from realrl.sched.messages import KeySchema, Per
from realrl.shape import DecoderConfig

CPU = torch.device("cpu")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Place = tuple[str, WorkerKeys]
_WIDTH = 100


@dataclass(frozen=True)
class Variant:
    """One way to train."""

    backend: BackendName
    stage: int
    offload: bool = False

    def __str__(self) -> str:
        return f"{self.backend}, stage {self.stage}" + (", offloaded" if self.offload else "")


@dataclass(frozen=True)
class Measured:
    """One variant in one round: median seconds of a step and peak growth of memory, of the slowest and largest rank."""

    step_s: float
    peak_gb: float


def main(argv: Sequence[str] | None = None) -> int:
    """Run all variants; returns the exit code."""
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=4, help="timed ones of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("bench_backends.json"))
    args = parser.parse_args(argv)
    strategy = parse_strategy(args.strategy)
    variants = list(installed_variants(strategy, args.precision))
    multiprocessing.set_forkserver_preload(["realrl.engine.decoder_engine", "realrl.model.init"])
    rounds: list[list[Measured]] = []
    for number in range(args.rounds):
        rounds.append([])
        for variant in variants:
            by_rank = run_ranks(_measure, variant, strategy, args)
            if by_rank is None:
                return 1
            measured = Measured(max(r.step_s for r in by_rank), max(r.peak_gb for r in by_rank))
            rounds[-1].append(measured)
            print(f"round {number + 1}: {variant}: {measured.step_s:.3f} s a step", file=sys.stderr, flush=True)
    rows = [_summary(variant, [r[i] for r in rounds], [r[0] for r in rounds]) for i, variant in enumerate(variants)]
    _print(rows, args)
    args.out.write_text(
        json.dumps({"arguments": {k: str(v) for k, v in vars(args).items()}, "results": rows}, indent=2) + "\n"
    )
    return 0


def installed_variants(strategy: ParallelStrategy, precision: str) -> list[Variant]:
    """Variants that are installed and fit, native without ZeRO first."""
    variants = [Variant("native", 0), Variant("native", 1), Variant("native", 1, offload=True)]
    if find_spec("megatron") is not None:
        variants.append(Variant("megatron", 1))
    if find_spec("deepspeed") is not None:
        stages = [
            s
            for s in sorted(BACKENDS["deepspeed"].stages)
            if (s or precision == "fp32") and (s < 3 or strategy.pp == 1)
        ]
        variants += [Variant("deepspeed", stage) for stage in stages]
    return variants


def run_ranks(
    measure: Callable[[int, Place, Variant, ParallelStrategy, argparse.Namespace], Any],
    variant: Variant,
    strategy: ParallelStrategy,
    args: argparse.Namespace,
) -> list[Any] | None:
    """Measure one variant in processes of its own; None if it failed."""
    keys = RunKeys.new()
    store = ZmqKeyValueServer(keys)
    place = (store.address, keys.for_workers)
    context = multiprocessing.get_context("forkserver")
    pipes, ranks = [], []
    for rank in range(strategy.n_devices):
        reader, writer = context.Pipe(duplex=False)
        work = (measure, rank, place, variant, strategy, args)
        ranks.append(context.Process(target=_rank_main, args=(writer, *work)))
        ranks[-1].start()
        writer.close()
        pipes.append(reader)
    try:
        return [reader.recv() for reader in pipes]
    except EOFError:
        print(f"{variant} failed; its traceback is above", file=sys.stderr)
        for process in ranks:
            process.kill()
        return None
    finally:
        for process in ranks:
            process.join()
        store.close()


def _rank_main(writer: Connection, measure: Callable[..., Any], *work: Any) -> None:
    writer.send(measure(*work))


@contextmanager
def ready_engine(
    rank: int, place: Place, variant: Variant, strategy: ParallelStrategy, args: argparse.Namespace
) -> Iterator[tuple[DecoderEngine, Parallel, float]]:
    """Build one rank's engine; yields it with the memory in use before it, in GB."""
    devices.resolve_device("cpu")
    torch.set_num_threads(1)
    cluster = Cluster(1, strategy.n_devices)
    allocation = Allocation(DeviceMesh.whole(cluster), strategy)
    planned = process_groups([allocation], cluster)
    groups = Groups.create(
        planned,
        rank=rank,
        world_size=strategy.n_devices,
        meeting=ZmqKeyValueClient(*place),
        device=CPU,
        timeout_s=600.0,
        settings=GroupSettings(for_libraries=True),
    )
    parallel = parallel_of(groups, planned, allocation, rank)
    heads = max(args.hidden // 64, strategy.tp)
    config = DecoderConfig(args.vocab, args.hidden, args.layers, heads, heads, args.hidden // heads, 3 * args.hidden)
    decoder = random_model(
        config,
        seed=1,
        shard=shard_of(config, strategy, parallel.mesh_rank),
        parallel=TensorParallelGroup(parallel.tp, sp=strategy.sp),
    )
    before_gb = devices.memory_gb(CPU)
    engine = DecoderEngine(
        decoder,
        role="model",
        parallel=parallel,
        optimizer=OptimizerConfig(zero_stage=variant.stage, offload=variant.offload),
        total_optimizer_steps=100,
        compute_dtype=DTYPES[args.precision],
        backend=variant.backend,
    )
    yield engine, parallel, before_gb
    groups.destroy()


def _measure(
    rank: int, place: Place, variant: Variant, strategy: ParallelStrategy, args: argparse.Namespace
) -> Measured:
    with ready_engine(rank, place, variant, strategy, args) as (engine, parallel, before_gb):
        times_s = [train_step(engine, parallel, args) for _ in range(args.steps + 1)]
        return Measured(statistics.median(times_s[1:]), devices.peak_memory_gb(CPU) - before_gb)


def train_step(engine: DecoderEngine, parallel: Parallel, args: argparse.Namespace) -> float:
    """Train on one batch, which is always the same; returns the seconds."""
    batch = _batch(args, seed=parallel.dp_rank)
    n_tokens = float(batch.n_rows("input_ids")) * parallel.strategy.dp
    parallel.mesh.barrier()
    start_s = time.perf_counter()
    engine.train_batch(batch, _loss, normaliser=n_tokens, micro_batching=MicroBatching(n_mbs=args.n_mbs))
    return time.perf_counter() - start_s


def _batch(args: argparse.Namespace, *, seed: int) -> SequenceSample:
    generator = torch.Generator().manual_seed(seed)
    samples = [[torch.randint(0, args.vocab, (args.tokens,), generator=generator)] for _ in range(args.n_seqs)]
    ids = [f"{seed}/{i}" for i in range(args.n_seqs)]
    return SequenceSample.from_lists(ids, {"input_ids": (KeySchema("int64", Per.TOKEN), samples)})


def _loss(out: ForwardOutput, _: SequenceSample) -> LossOutput:
    return LossOutput(-out.logprobs().sum())


def _summary(variant: Variant, measured: Sequence[Measured], base: Sequence[Measured]) -> dict[str, object]:
    time_ratios = [m.step_s / b.step_s for m, b in zip(measured, base, strict=True)]
    memory_ratios = [m.peak_gb / b.peak_gb for m, b in zip(measured, base, strict=True)]
    return {
        "variant": str(variant),
        "step_s": statistics.median(m.step_s for m in measured),
        "peak_gb": statistics.median(m.peak_gb for m in measured),
        "time_ratio": statistics.median(time_ratios),
        "memory_ratio": statistics.median(memory_ratios),
        "rounds": [asdict(m) for m in measured],
    }


def _print(rows: Sequence[dict[str, object]], args: argparse.Namespace) -> None:
    title = (
        f"training on {args.strategy}, {args.precision}, {args.layers} layers of {args.hidden}, {args.rounds} rounds"
    )
    table = Table("backend", "step", "time ratio", "peak memory", "memory ratio", title=title)
    for row in rows:
        table.add_row(
            str(row["variant"]),
            f"{row['step_s']:.3f} s",
            f"{row['time_ratio']:.2f}",
            f"{row['peak_gb']:.3f} GB",
            f"{row['memory_ratio']:.2f}",
        )
    Console(width=max(Console().width, _WIDTH)).print(table)


def arguments(description: str | None) -> argparse.ArgumentParser:
    """Make a parser of the layout, the model and the batch."""
    parser = argparse.ArgumentParser(description=(description or "").split("\n")[0])
    parser.add_argument("--strategy", default="d2", help="such as d2, t2, p2 or d2t2")
    parser.add_argument("--precision", choices=sorted(DTYPES), default="fp32")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=64, help="of a sequence")
    parser.add_argument("--n-seqs", type=int, default=8, help="of each data-parallel rank")
    parser.add_argument("--n-mbs", type=int, default=2)
    return parser


if __name__ == "__main__":
    sys.exit(main())
