"""The time of real parameter reallocations between layouts of SmolLM2 on 4 gloo ranks of this machine.

Each case is timed against three others that move the same model, in rounds that take turns, barrier to barrier:

    gather   every rank gathers the whole model, each part from one holder, then takes its slices
    memcpy   every rank copies as many bytes as it must receive, into new memory, at the same time
    wire     every pair of ranks sends as many bytes as it must, from and into one buffer that is there already

With ``--mb-per-s``, 8 ranks are on two machines: network namespaces with a link of that rate (needs root). What a
machine lacks crosses the link once and is passed on inside; it is timed against

    one hop  the plan that knows no machines: every rank gets all that it lacks from a rank that holds it

Prints a table and writes JSON.

    python scripts/bench_realloc_run.py --model ~/.cache/realrl/smollm2-135m-instruct --repeats 3
    python scripts/bench_realloc_run.py --mb-per-s 50
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from simulated_machines import enter_machine, two_machines

from realrl.engine.device import resolve_device
from realrl.engine.groups import Communicator, Groups
from realrl.engine.parameters.realloc import Reallocator
from realrl.mesh.device_mesh import Allocation, Cluster, DeviceMesh, ParallelStrategy
from realrl.mesh.notation import parse_strategy
from realrl.model.dtypes import dtype_name
from realrl.model.files.hf import load_model
from realrl.plan.groups import GroupKind, group_of, process_groups
from realrl.plan.parameters.decoder_specs import parameter_specs
from realrl.plan.parameters.layout import ParameterLayout, parameter_layout
from realrl.plan.parameters.realloc import ReallocPlan, plan_realloc
from realrl.runtime.transport.sockets import RunKeys, WorkerKeys
from realrl.runtime.transport.zmq import ZmqKeyValueClient, ZmqKeyValueServer
from realrl.shape import DecoderConfig

N_RANKS, N_RANKS_ON_TWO_MACHINES = 4, 8
CPU = torch.device("cpu")
SMOLLM2 = DecoderConfig(49152, 576, 30, 9, 3, 64, 1536, rope_theta=100000.0, tied_embeddings=True, max_positions=8192)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CASES = ("p4>d4", "d4>p4", "d2p2>d4", "d2p2>p4", "t3>p4", "p4>t3")  # a layout of n ranks is on the first n
CASES_OF_TWO_MACHINES = ("p4>d4@4", "t3>d4@4", "p4>d2p2@4", "p8>d8")  # or on those from @n
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Measured:
    """One case; times are medians in seconds, bytes are sums over ranks except the peak."""

    case: str
    moved_bytes: int
    gathered_bytes: int
    peak_bytes: int
    realloc_s: float
    gather_s: float
    memcpy_s: float
    wire_s: float
    gather_over_realloc: float
    realloc_over_memcpy: float | None
    realloc_over_wire: float | None


@dataclass(frozen=True)
class MeasuredBetween:
    """One case on two machines; times are medians in seconds, bytes are those that cross the link in both directions.

    The model's bytes cross it in `model_s`, at the rate of the link.
    """

    case: str
    model_bytes: int
    relayed_bytes: int
    one_hop_bytes: int
    model_s: float
    relayed_s: float
    one_hop_s: float


def main(argv: Sequence[str] | None = None) -> int:
    """Run all cases; returns the exit code."""
    args = _parse(argv)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        machines = None if args.mb_per_s is None else stack.enter_context(two_machines(args.mb_per_s))
        return _run(args, machines, f"ipc://{folder}/meeting")


def _run(args: argparse.Namespace, machines: tuple[str, str] | None, endpoint: str) -> int:
    keys = RunKeys.new()
    store = ZmqKeyValueServer(keys, endpoint=endpoint)
    n_ranks = N_RANKS if machines is None else N_RANKS_ON_TWO_MACHINES
    place = (store.address, keys.for_workers)
    multiprocessing.set_forkserver_preload(["realrl.engine.parameters.realloc", "realrl.model.files.hf"])
    context = multiprocessing.get_context("forkserver")
    reader, writer = context.Pipe(duplex=False)
    ranks = [
        context.Process(target=_rank_main, args=(rank, n_ranks, place, args, machines, writer))
        for rank in range(n_ranks)
    ]
    for process in ranks:
        process.start()
    writer.close()
    try:
        results = reader.recv()
    except EOFError:
        print("a rank failed; its traceback is above", file=sys.stderr)
        return 1
    finally:
        for process in ranks:
            process.join()
        store.close()
    (_print if machines is None else _print_between)(results, args)
    if args.out is not None:
        report = {"model": str(args.model), "dtype": args.dtype, "results": [asdict(result) for result in results]}
        args.out.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def _rank_main(
    rank: int,
    n_ranks: int,
    place: tuple[str, WorkerKeys],
    args: argparse.Namespace,
    machines: tuple[str, str] | None,
    writer: Connection,
) -> None:
    if machines is not None:
        enter_machine(machines[_machine_of(rank)], _machine_of(rank))
    resolve_device("cpu")
    torch.set_num_threads(1)
    cluster = Cluster(1, n_ranks)
    allocation = Allocation(DeviceMesh.whole(cluster), ParallelStrategy(dp=n_ranks))
    planned = process_groups([allocation], cluster)
    groups = Groups.create(
        planned,
        rank=rank,
        world_size=n_ranks,
        meeting=ZmqKeyValueClient(*place),
        device=CPU,
        timeout_s=args.timeout_s,
    )
    world = groups[group_of(planned, GroupKind.GLOBAL, allocation, rank)]
    whole = _whole_model(args.model, DTYPES[args.dtype])
    measure = _measure if machines is None else partial(_measure_between, mb_per_s=args.mb_per_s)
    results = [measure(case, whole, DTYPES[args.dtype], world, args.repeats) for case in args.cases]
    if rank == 0:
        writer.send(results)
    groups.destroy()


def _whole_model(folder: Path | None, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    if folder is not None:
        return {name: p.detach() for name, p in load_model(folder, dtype=dtype).named_parameters()}
    generator = torch.Generator().manual_seed(0)
    return {s.name: torch.randn(s.shape, generator=generator).to(dtype) for s in parameter_specs(SMOLLM2)}


def _measure(case: str, whole: Tensors, dtype: torch.dtype, world: Communicator, repeats: int) -> Measured:
    source, target = (_layout(text, whole, dtype) for text in case.split(">"))
    plan = plan_realloc(source, target)
    held = _shard(whole, source, world.rank)
    expected = _shard(whole, target, world.rank)
    realloc = Reallocator(plan, world, world.rank, CPU)
    gather = _Gather(source, target, held, world)
    result = realloc.run(held)
    for given in (result.parameters, gather.run()):
        _check(given, expected, case)
    peak_bytes = int(world.all_reduce_(torch.tensor([result.peak_bytes]), "max"))
    del result, expected
    ways: dict[str, Callable[[], object]] = {
        "realloc": lambda: realloc.run(held),
        "gather": gather.run,
        "memcpy": _memcpy(plan.bytes_received(world.rank)),
        "wire": _wire(plan, world),
    }
    times_s = _take_turns(ways, world, repeats)
    realloc_s = times_s["realloc"]
    return Measured(
        case,
        plan.total_bytes,
        gather.num_bytes * (N_RANKS - 1),
        peak_bytes,
        *(times_s[way] for way in ("realloc", "gather", "memcpy", "wire")),
        times_s["gather"] / realloc_s,
        realloc_s / times_s["memcpy"] if plan.total_bytes else None,
        realloc_s / times_s["wire"] if plan.total_bytes else None,
    )


def _machine_of(rank: int) -> int:
    return rank // (N_RANKS_ON_TWO_MACHINES // 2)


def _measure_between(
    case: str, whole: Tensors, dtype: torch.dtype, world: Communicator, repeats: int, *, mb_per_s: float
) -> MeasuredBetween:
    source, target = (_layout(text, whole, dtype) for text in case.split(">"))
    held, expected = (_shard(whole, layout, world.rank) for layout in (source, target))
    plans = {
        "relayed": plan_realloc(source, target, node_of=_machine_of),
        "one hop": plan_realloc(source, target, node_of=lambda rank: rank),
    }
    ways: dict[str, Callable[[], object]] = {}
    for name, plan in plans.items():
        realloc = Reallocator(plan, world, world.rank, CPU)
        _check(realloc.run(held).parameters, expected, case)
        ways[name] = partial(realloc.run, held)
    times_s = _take_turns(ways, world, repeats)
    crossing = [
        sum(t.num_bytes for t in plan.transfers if _machine_of(t.source) != _machine_of(t.target))
        for plan in plans.values()
    ]
    assert crossing[0] == plans["relayed"].bytes_between_nodes
    model_bytes = source.model_bytes
    return MeasuredBetween(case, model_bytes, *crossing, model_bytes / mb_per_s / 1e6, *times_s.values())


def _take_turns(ways: Mapping[str, Callable[[], object]], world: Communicator, repeats: int) -> dict[str, float]:
    """Median seconds of each way, from its start on all ranks until all are done."""
    times_s: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, run in ways.items():
            world.barrier()
            start_s = time.perf_counter()
            made = run()
            world.barrier()
            times_s[name].append(time.perf_counter() - start_s)
            del made
    return {name: statistics.median(times) for name, times in times_s.items()}


def _layout(text: str, whole: Tensors, dtype: torch.dtype) -> ParameterLayout:
    config = DecoderConfig(**{**vars(SMOLLM2), "dtype": dtype_name(dtype)})
    specs = parameter_specs(config)
    assert {s.name: s.shape for s in specs} == {name: tuple(t.shape) for name, t in whole.items()}
    notation, _, first = text.partition("@")
    strategy = parse_strategy(notation)
    return parameter_layout(specs, strategy, range(int(first or 0), int(first or 0) + strategy.n_devices))


def _shard(whole: Tensors, layout: ParameterLayout, rank: int) -> dict[str, torch.Tensor]:
    if rank not in layout:
        return {}
    return {n: whole[n][tuple(slice(*at) for at in where)].clone() for n, where in layout.slices_of(rank).items()}


def _check(given: Tensors, expected: Tensors, case: str) -> None:
    if list(given) != list(expected) or not all(torch.equal(given[name], expected[name]) for name in expected):
        raise AssertionError(f"{case}: a rank did not receive its slices of the model")


class _Gather:
    """The baseline: a gather of everything, each part from the least loaded of its holders, and slicing afterwards."""

    def __init__(self, source: ParameterLayout, target: ParameterLayout, held: Tensors, world: Communicator) -> None:
        self._held, self._world = held, world
        self._wanted = target.slices_of(world.rank) if world.rank in target else {}
        self._specs = {spec.name: spec for spec in source.specs}
        self._dtype = next(iter(held.values())).dtype if held else getattr(torch, source.specs[0].dtype)
        holders: dict[tuple[str, Any], list[int]] = {}
        for rank in source.ranks:
            for name, where in source.slices_of(rank).items():
                holders.setdefault((name, where), []).append(rank)
        sizes = {key: torch.Size(stop - start for start, stop in key[1]) for key in holders}
        self._parts: list[list[tuple[str, Any, torch.Size]]] = [[] for _ in range(N_RANKS)]
        loads = [0] * N_RANKS
        for key in sorted(holders, key=lambda key: -sizes[key].numel()):
            root = min(holders[key], key=lambda rank: loads[rank])
            loads[root] += sizes[key].numel()
            self._parts[root].append((*key, sizes[key]))
        self.num_bytes = sum(loads) * torch.empty(0, dtype=self._dtype).element_size()

    def run(self) -> dict[str, torch.Tensor]:
        """This rank's target shard, in memory of its own."""
        whole = {name: torch.empty(spec.shape, dtype=self._dtype) for name, spec in self._specs.items()}
        for root, parts in enumerate(self._parts):
            if not parts:
                continue
            flat = torch.empty(sum(size.numel() for *_, size in parts), dtype=self._dtype)
            pieces = [p.view(size) for p, (*_, size) in zip(flat.split([s.numel() for *_, s in parts]), parts)]
            if root == self._world.rank:
                torch._foreach_copy_(pieces, [self._held[name] for name, *_ in parts])
            self._world.broadcast_(flat, root)
            for piece, (name, where, _) in zip(pieces, parts, strict=True):
                whole[name][tuple(slice(*at) for at in where)].copy_(piece)
        return {name: whole[name][tuple(slice(*at) for at in where)].clone() for name, where in self._wanted.items()}


def _memcpy(num_bytes: int) -> Callable[[], torch.Tensor]:
    source = torch.ones(num_bytes, dtype=torch.uint8)
    return source.clone


def _wire(plan: ReallocPlan, world: Communicator) -> Callable[[], None]:
    sizes: dict[tuple[int, int], int] = {}
    for transfer in plan.transfers:
        pair = (transfer.source, transfer.target)
        sizes[pair] = sizes.get(pair, 0) + transfer.num_bytes
    sends = [(b, torch.ones(n, dtype=torch.uint8)) for (a, b), n in sizes.items() if a == world.rank]
    receives = [(a, torch.ones(n, dtype=torch.uint8)) for (a, b), n in sizes.items() if b == world.rank]
    return lambda: world.exchange(sends, receives).wait()


def _print(results: Sequence[Measured], args: argparse.Namespace) -> None:
    title = f"SmolLM2-135M in {args.dtype} on {N_RANKS} gloo ranks, median of {args.repeats} rounds"
    columns = ("layouts", "moved MB", "peak MB", "realloc s", "gather s", "memcpy s", "wire s")
    table = Table(*columns, "gather/realloc", "realloc/memcpy", "realloc/wire", title=title)
    for r in results:
        times_s = (r.realloc_s, r.gather_s, r.memcpy_s, r.wire_s)
        ratios = (r.gather_over_realloc, r.realloc_over_memcpy, r.realloc_over_wire)
        table.add_row(
            r.case.replace(">", " -> "),
            f"{r.moved_bytes / 1e6:.0f}",
            f"{r.peak_bytes / 1e6:.0f}",
            *(f"{t:.3f}" for t in times_s),
            *("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
        )
    Console(width=140).print(table)


def _print_between(results: Sequence[MeasuredBetween], args: argparse.Namespace) -> None:
    title = f"SmolLM2-135M in {args.dtype} between two machines with {args.mb_per_s:g} MB/s, median of {args.repeats}"
    columns = ("layouts", "model MB", "model s", "crossing MB", "s", "crossing MB in one hop", "s", "one hop/relayed")
    table = Table(*columns, title=title)
    for r in results:
        table.add_row(
            r.case.replace(">", " -> "),
            f"{r.model_bytes / 1e6:.0f}",
            f"{r.model_s:.2f}",
            f"{r.relayed_bytes / 1e6:.0f}",
            f"{r.relayed_s:.2f}",
            f"{r.one_hop_bytes / 1e6:.0f}",
            f"{r.one_hop_s:.2f}",
            f"{r.one_hop_s / r.relayed_s:.2f}",
        )
    Console(width=140).print(table)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, help="Hugging Face folder; default: random weights in SmolLM2's shape")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bf16")
    parser.add_argument("--cases", nargs="+", help="like p4>d4@4: source and target strategy, and their first ranks")
    parser.add_argument("--mb-per-s", type=float, help="two machines of 4 ranks each, with a link of that rate")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--timeout-s", type=float, default=120.0)
    parser.add_argument("--out", type=Path, default=Path("bench_realloc_run.json"))
    args = parser.parse_args(argv)
    args.cases = args.cases or (CASES if args.mb_per_s is None else CASES_OF_TWO_MACHINES)
    return args


if __name__ == "__main__":
    sys.exit(main())
