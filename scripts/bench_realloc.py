"""Cost of moving parameters between layouts, as planned and as measured.

    plan    planned bytes per rank and between nodes, peak memory and planning time for llama shapes on up to 1,024
            ranks of 8 per node, against the formulas of other systems; fails if a plan moves more than HybridFlow's or
            takes too long
    run     real reallocations of a small model on 4 gloo ranks, or on 8 of two simulated machines
            (scripts/bench_realloc_run.py; its options follow)

Prints tables and, with ``--out``, writes the numbers of `plan` as JSON. Strategies are p-t-d; parameters are bfloat16.

    python scripts/bench_realloc.py plan --out plan.json
    python scripts/bench_realloc.py run --help
    python scripts/bench_realloc.py run --mb-per-s 100
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from realloc_baselines import deepspeed_chat, hybrid_engine, hybridflow_v
from rich import box
from rich.console import Console
from rich.table import Table

from realrl.mesh.device_mesh import ParallelStrategy
from realrl.plan.parameters.decoder_specs import parameter_specs
from realrl.plan.parameters.layout import ParameterLayout, parameter_layout
from realrl.plan.parameters.rank_order import order_for
from realrl.plan.parameters.realloc import ReallocPlan, plan_realloc
from realrl.plan.parameters.specs import ParameterSpec
from realrl.shape import DecoderConfig

N_DEVICES_PER_NODE = 8
TIME_LIMITS_S = {1024: 1.0}  # number of ranks -> time for layout, rank order and plan


def llama(size: int, n_layers: int, n_heads: int, n_kv_heads: int, inner: int) -> DecoderConfig:
    """The shape of a llama in bfloat16."""
    return DecoderConfig(32000, size, n_layers, n_heads, n_kv_heads, 128, inner, dtype="bfloat16")


SHAPES = {
    "7B": llama(4096, 32, 32, 32, 11008),
    "13B": llama(5120, 40, 40, 40, 13824),
    "34B": llama(8192, 48, 64, 8, 22016),
    "70B": llama(8192, 80, 64, 8, 28672),
}


@dataclass(frozen=True)
class Case:
    """One reallocation from a training to a generation layout on the same ranks."""

    model: str
    training: ParallelStrategy
    generation: ParallelStrategy


@dataclass(frozen=True)
class Row:
    """Numbers of one case; bytes are those of one rank."""

    model: str
    training: str
    generation: str
    n_ranks: int
    model_bytes: int
    received_max: int
    received_mean: float
    plain_received_max: int
    sent_max: int
    peak_max: int
    between_nodes: int
    engine_received: int
    hybridflow_v_received: int
    deepspeed_chat_received: int
    baseline_peak: int
    plan_s: float
    problems: tuple[str, ...]


def cases() -> Iterator[Case]:
    """All cases of the table."""
    for model in SHAPES:
        for tp in (1, 2, 4, 8):
            yield Case(model, ParallelStrategy(dp=2, tp=8), ParallelStrategy(dp=16 // tp, tp=tp))
    for tp in (1, 2, 4):
        yield Case("70B", ParallelStrategy(dp=128, tp=8), ParallelStrategy(dp=1024 // tp, tp=tp))
    for model, pp, dps in (("34B", 4, (1, 4, 8, 32)), ("70B", 8, (1, 2, 8, 16))):
        for dp in dps:
            yield Case(model, ParallelStrategy(dp=dp, tp=8, pp=pp), ParallelStrategy(dp=dp * pp, tp=8))


def measure(case: Case) -> Row:
    """Plan one case; the time includes layout, rank order, plan and the bytes of every rank."""
    specs = parameter_specs(SHAPES[case.model])
    n_ranks = case.training.n_devices
    start = time.perf_counter()
    source = parameter_layout(specs, case.training, range(n_ranks))
    order = order_for(source, case.generation, range(n_ranks), node_of=node_of)
    target = parameter_layout(specs, case.generation, order)
    plan = plan_realloc(source, target, node_of=node_of)
    received = [plan.bytes_received(rank) for rank in plan.ranks]
    sent = [plan.bytes_sent(rank) for rank in plan.ranks]
    peaks = [plan.peak_bytes(rank) for rank in plan.ranks]
    between_nodes = plan.bytes_between_nodes
    plan_s = time.perf_counter() - start
    plain = plan_realloc(source, parameter_layout(specs, case.generation, range(n_ranks)), node_of=node_of)
    model_bytes = source.model_bytes
    flow, chat = hybridflow_v(model_bytes, case.training), deepspeed_chat(model_bytes, case.training)
    return Row(
        model=case.model,
        training=strategy_text(case.training),
        generation=strategy_text(case.generation),
        n_ranks=n_ranks,
        model_bytes=model_bytes,
        received_max=max(received),
        received_mean=sum(received) / n_ranks,
        plain_received_max=max(plain.bytes_received(rank) for rank in plain.ranks),
        sent_max=max(sent),
        peak_max=max(peaks),
        between_nodes=between_nodes,
        engine_received=hybrid_engine(model_bytes, case.training, case.generation).bytes_received,
        hybridflow_v_received=flow.bytes_received,
        deepspeed_chat_received=chat.bytes_received,
        baseline_peak=flow.peak_bytes,
        plan_s=plan_s,
        problems=tuple(problems(case, specs, source, plan, plain, plan_s)),
    )


def problems(
    case: Case,
    specs: Sequence[ParameterSpec],
    source: ParameterLayout,
    plan: ReallocPlan,
    plain: ReallocPlan,
    plan_s: float,
) -> Iterator[str]:
    """Violations of a plan's limits. The 3D-HybridEngine's formula lacks replicated parameters: they are added."""
    n_ranks, model_bytes = case.training.n_devices, source.model_bytes
    flow = hybridflow_v(model_bytes, case.training)
    if max(plan.bytes_received(rank) for rank in plan.ranks) > flow.bytes_received:
        yield "a rank receives more than with HybridFlow-V"
    if max(plan.peak_bytes(rank) for rank in plan.ranks) > flow.peak_bytes:
        yield "a rank holds more than with HybridFlow-V"
    engine = hybrid_engine(model_bytes, case.training, case.generation)
    replicated = sum(spec.num_bytes for spec in specs if spec.sharded_dim is None)
    if plan.total_bytes > n_ranks * (engine.bytes_received + replicated):
        yield "the ranks receive more than with the 3D-HybridEngine"
    if plan.total_bytes > plain.total_bytes:
        yield "the best order moves more than the plain order"
    limit_s = min((limit for n, limit in TIME_LIMITS_S.items() if n_ranks <= n), default=float("inf"))
    if plan_s > limit_s:
        yield f"planning took {plan_s:.1f} s, more than {limit_s:g} s"


def node_of(rank: int) -> int:
    return rank // N_DEVICES_PER_NODE


def strategy_text(strategy: ParallelStrategy) -> str:
    """Text of a strategy as ``p-t-d``."""
    return f"{strategy.pp}-{strategy.tp}-{strategy.dp}"


def show(rows: Sequence[Row]) -> None:
    """Print the table, GB per rank."""
    table = Table(
        title="Planned reallocation, GB of one rank", box=box.SIMPLE, pad_edge=False, padding=(0, 1), show_edge=False
    )
    for name in ("model", "training", "generation"):
        table.add_column(name, no_wrap=True)
    numbers = "ranks|received\nmax|received\nmean|in plain\norder|3D-Hybrid\nEngine|Hybrid\nFlow-V|DeepSpeed\nChat"
    numbers += "|peak|peak of\nboth|between\nnodes, all|plan\nms"
    for name in numbers.split("|"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        sizes = (
            row.received_max,
            row.received_mean,
            row.plain_received_max,
            row.engine_received,
            row.hybridflow_v_received,
            row.deepspeed_chat_received,
            row.peak_max,
            row.baseline_peak,
            row.between_nodes,
        )
        cells = [f"{size / 1e9:.2f}" for size in sizes]
        table.add_row(row.model, row.training, row.generation, str(row.n_ranks), *cells, f"{row.plan_s * 1e3:.0f}")
    Console(width=max(Console().width, 150)).print(table)


def plan_section(out: Path | None) -> int:
    """Measure, print and check all cases; returns the exit code."""
    rows = [measure(case) for case in cases()]
    show(rows)
    if out is not None:
        out.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    failures = [f"{row.model} {row.training} -> {row.generation}: {text}" for row in rows for text in row.problems]
    for failure in failures:
        print(failure, file=sys.stderr)
    if not failures:
        print(
            f"{len(rows)} cases: no rank receives or holds more than with HybridFlow-V, all together no more than with "
            "the 3D-HybridEngine (whose formula leaves out replicated parameters); planned in time."
        )
    return 1 if failures else 0


def main(argv: Sequence[str]) -> int:
    """Run one section."""
    if argv[:1] == ["run"]:
        import bench_realloc_run  # imports torch, which planning does without

        return bench_realloc_run.main(argv[1:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("section", nargs="?", choices=("plan", "run"), default="plan")
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    return plan_section(parser.parse_args(argv).out)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
