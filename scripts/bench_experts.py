"""One grouped product for all experts against one product for each, in one process: forward, and forward and backward.

The device decides which of the two a run takes: see `realrl.model.layers.moe`. Prints a table; a ratio above 1 means
that the grouped product is faster.

    python scripts/bench_experts.py --tokens 16 2048 --experts 64 --top-k 4 --device cpu
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from rich.console import Console
from rich.table import Table

from realrl.engine.device import resolve_device, synchronize
from realrl.model.layers.moe import mix_experts, route
from realrl.shape import MoEConfig


def main() -> None:
    args = _parse()
    device = resolve_device(args.device)
    title = f"{args.experts} experts of {args.inner}, {args.top_k} per token, bf16 on {device}"
    table = Table("tokens", "what", "for each, ms", "grouped, ms", "ratio", title=title)
    for n_tokens in args.tokens:
        for what, times_ms in _times(args, n_tokens, device).items():
            ratio = statistics.median(each / grouped for each, grouped in zip(*times_ms, strict=True))
            table.add_row(str(n_tokens), what, *(f"{statistics.median(t):.2f}" for t in times_ms), f"{ratio:.2f}")
    Console().print(table)


def _times(args: argparse.Namespace, n_tokens: int, device: torch.device) -> dict[str, list[list[float]]]:
    """Work -> times of the two, taken in turns, so that a busy machine slows both."""
    steps = {stays: _layer(args, n_tokens, device, stays) for stays in (False, True)}
    found: dict[str, list[list[float]]] = {"forward": [[], []], "forward + backward": [[], []]}
    for repeat in range(args.repeats + 2):
        for what, times_ms in found.items():
            for stays, times in zip(steps, times_ms, strict=True):
                synchronize(device)
                start_s = time.perf_counter()
                steps[stays](what != "forward")
                synchronize(device)
                if repeat > 1:  # the first two rounds warm up
                    times.append(1e3 * (time.perf_counter() - start_s))
    return found


def _layer(args: argparse.Namespace, n_tokens: int, device: torch.device, stays: bool) -> Callable[[bool], None]:
    generator = torch.Generator().manual_seed(0)
    n, inner, hidden = args.experts, args.inner, args.hidden
    shapes = [(n_tokens, hidden), (n, hidden), (n, inner, hidden), (n, inner, hidden), (n, hidden, inner)]
    x, router, *experts = (
        (torch.randn(shape, generator=generator) / hidden**0.5).to(device, torch.bfloat16).requires_grad_()
        for shape in shapes
    )
    config = MoEConfig(n_experts=n, top_k=args.top_k, intermediate_size=inner)

    def step(with_backward: bool) -> None:
        with torch.set_grad_enabled(with_backward):
            routing = route(x, router, config)
            y = mix_experts(x, replace(routing, groups=replace(routing.groups, stay_on_device=stays)), *experts)
            if with_backward:
                y.backward(x.detach())

    return step


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 256, 2048])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--inner", type=int, default=256)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    return parser.parse_args()


if __name__ == "__main__":
    main()
