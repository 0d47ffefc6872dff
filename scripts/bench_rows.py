"""Time of what a call does to rows beside computing: python scripts/bench_rows.py [--device cuda] [--repeats 30]

    pack     responses behind their prompts, as the output of a generation
    select   the samples of a minibatch, with some keys, under other names
    put      into the store of the worker
    get      out of it
    message  to another worker and back

The table has medians in microseconds for each response, and the time of all by that of copying the bytes once: what is
left of that ratio for many long responses is the price of a row, for few short ones that of an operation.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from realrl.algo.api import GenerationResult
from realrl.algo.policy.responses import pack_responses
from realrl.data.rows import SampleStore, decode_rows, encode_rows
from realrl.data.sample import SequenceSample
from realrl.engine.device import synchronize
from realrl.sched.messages import KeySchema, Per

CASES = ((16, 4, 16), (64, 1, 16), (64, 1, 512), (256, 4, 512), (1024, 1, 1024))  # prompts, responses to each, tokens


def drawn(n_prompts: int, n_each: int, longest: int, device: torch.device) -> tuple[SequenceSample, GenerationResult]:
    """Return prompts and responses of 1 to `longest` tokens."""
    rng = torch.Generator().manual_seed(0)
    before, new = (torch.randint(1, longest + 1, (n,), generator=rng).tolist() for n in (n_prompts, n_prompts * n_each))
    ids = [f"sample-{i}" for i in range(n_prompts)]
    rows = [[torch.ones(length, dtype=torch.int64, device=device)] for length in before]
    prompts = SequenceSample.from_lists(ids, {"prompt_ids": (KeySchema("int64", Per.TOKEN), rows)})
    tokens, logprobs = (list(torch.ones(sum(new), dtype=dtype).split(new)) for dtype in (torch.int64, torch.float32))
    return prompts, GenerationResult(tokens, logprobs, logprobs, [False] * len(new))


def ways_of(prompts: SequenceSample, result: GenerationResult) -> dict[str, Callable[[], object]]:
    """Return what is timed."""
    rows = pack_responses(prompts, result)
    keys = ("input_ids", "prompt_mask", "old_logprobs")
    store, wanted = SampleStore(device_limit_bytes=2**34), rows.ids[: max(1, len(rows) // 4)]
    store.put(rows)
    return {
        "pack": lambda: pack_responses(prompts, result),
        "select": lambda: rows.remap({"input_ids": "tokens"}).select(wanted, ("tokens", *keys[1:])),
        "put": lambda: store.put(rows),
        "get": lambda: store.get(rows.ids, keys, device=rows["input_ids"].device),
        "message": lambda: decode_rows(encode_rows(rows)),
        "copy": lambda: [rows[key].clone() for key in rows.keys],
    }


def seconds_of(ways: dict[str, Callable[[], object]], device: torch.device, repeats: int) -> dict[str, float]:
    """Return the median of each, which take turns."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(repeats + 1):
        for name, way in ways.items():
            synchronize(device)
            begin = time.perf_counter()
            way()
            synchronize(device)
            if number:
                taken[name].append(time.perf_counter() - begin)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--repeats", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = Table(*("prompts", "responses", "tokens up to"))
    for n_prompts, n_each, longest in CASES:
        seconds = seconds_of(
            ways_of(*drawn(n_prompts, n_each, longest, options.device)), options.device, options.repeats
        )
        copy, n = seconds.pop("copy"), n_prompts * n_each
        if not table.rows:
            for name in (*seconds, "all, ms", "by copy"):
                table.add_column(name, justify="right")
        parts = [f"{value / n * 1e6:.1f}" for value in seconds.values()]
        whole = sum(seconds.values())
        table.add_row(str(n_prompts), str(n), str(longest), *parts, f"{whole * 1e3:.2f}", f"{whole / copy:.1f}")
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
