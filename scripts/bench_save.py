"""Memory and time of a save under every training backend, on gloo ranks of this machine.

Each variant trains a random model for a step and saves it several times, in processes of its own. A save copies
moments, masters and parameters to host memory, as the checkpoint writer of a worker does, through staging buffers as if
they came from CUDA. Prints, per variant and for the rank that needs the most, in bytes for each of the model's
parameters: the growth of resident memory in the first save, whose copies stay; the growth in a later one, which is what
is gathered; and staging buffers that are alive after all saves. Writes JSON too.

    python scripts/bench_save.py [--precision bf16] [--strategy d2] [--saves 10] [--hidden 512] [--layers 12]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from bench_backends import Place, Variant, arguments, installed_variants, ready_engine, run_ranks, train_step
from rich.console import Console
from rich.table import Table

from realrl.engine.device import Staging
from realrl.mesh.device_mesh import ParallelStrategy
from realrl.mesh.notation import parse_strategy
from realrl.runtime.checkpoints.roles import HostCopies

_STAGE = 1 << 20  # bytes; small, so that resident memory shows what is gathered


@dataclass(frozen=True)
class Saved:
    """One rank's saves: sizes in bytes, and the median seconds of all but the first."""

    first: int
    later: int
    copies: int
    pinned: int
    seconds: float


def main(argv: Sequence[str] | None = None) -> int:
    """Run all variants; returns the exit code."""
    parser = arguments(__doc__)
    parser.add_argument("--saves", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("bench_save.json"))
    args = parser.parse_args(argv)
    strategy = parse_strategy(args.strategy)
    n_parameters = args.layers * 13 * args.hidden**2 + 2 * args.vocab * args.hidden
    table = Table("backend", "first save", "a later one", "copies that stay", "pinned after all", "seconds")
    table.title = f"a save on {args.strategy}, {args.precision}: bytes per parameter of {n_parameters / 1e6:.0f}M"
    rows = {}
    for variant in installed_variants(strategy, args.precision):
        by_rank = run_ranks(_measure, variant, strategy, args)
        if by_rank is None:
            return 1
        rows[str(variant)] = [asdict(saved) for saved in by_rank]
        most = (max(getattr(saved, name) for saved in by_rank) for name in ("first", "later", "copies", "pinned"))
        shown = [f"{n_bytes / n_parameters:.2f}" for n_bytes in most]
        table.add_row(str(variant), *shown, f"{max(saved.seconds for saved in by_rank):.3f}")
        print(f"{variant}: {' '.join(shown)}", file=sys.stderr, flush=True)
    Console(width=max(Console().width, 100)).print(table)
    args.out.write_text(json.dumps({"parameters": n_parameters, "results": rows}, indent=2) + "\n")
    return 0


def _measure(rank: int, place: Place, variant: Variant, strategy: ParallelStrategy, args: argparse.Namespace) -> Saved:
    buffers: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def allocate(n_bytes: int) -> torch.Tensor:
        buffer = torch.empty(n_bytes, dtype=torch.uint8)
        buffers.add(buffer.untyped_storage())
        return buffer

    with ready_engine(rank, place, variant, strategy, args) as (engine, parallel, _):
        train_step(engine, parallel, args)
        copies = HostCopies(lambda: Staging(_STAGE, allocate), lambda _: True)

        def keep(name: str, tensor: torch.Tensor) -> torch.Tensor:
            return copies.copy(name, tensor) if parallel.dp_rank == 0 else tensor.new_empty(0)

        growths, times_s = [], []
        for _ in range(args.saves):
            parallel.mesh.barrier()
            Path("/proc/self/clear_refs").write_text("5")  # the peak is what is resident now
            before, start_s = _resident("VmRSS"), time.perf_counter()
            copies.begin(nothing_changes=False)
            engine.state_dict(lambda part, tensor: keep(f"optimizer/{part}", tensor))
            engine.copy_hf(keep)
            copies.end()
            times_s.append(time.perf_counter() - start_s)
            growths.append(_resident("VmHWM") - before)
    pinned = sum(buffer.nbytes() for buffer in buffers)
    return Saved(growths[0], max(growths[1:]), copies.copied_bytes, pinned, statistics.median(times_s[1:]))


def _resident(field: str) -> int:
    """Bytes of a field of this process's status: VmRSS is resident memory, VmHWM its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


if __name__ == "__main__":
    sys.exit(main())
