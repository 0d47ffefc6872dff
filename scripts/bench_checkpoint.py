"""Cost of a checkpoint: the time that training stands still for it, against the time to copy the same bytes.

    python scripts/bench_checkpoint.py [--hidden 512] [--layers 8] [--saves 5] [--out bench_checkpoint.json]

A worker trains a language model (SFT, one process) and is asked for checkpoints as a master would ask. `stands_still`
is the time from the request until the worker takes the next one, `copy` the time to copy the same tensors into memory
that is there already, `write` the time until all files are on disk with their digests. A training call while a
checkpoint is written is compared with one when nothing is.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from concurrent.futures import Future
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from realrl.config.compose import compose
from realrl.config.serialize import dump_config
from realrl.data.tiny import tiny_tokenizer
from realrl.experiment.discovery import config_dir, load_experiment
from realrl.model.files.hf import save_model
from realrl.model.init import random_model
from realrl.runtime.worker.model_worker import ModelWorker
from realrl.sched.messages import Initialize, LoadSamples, Reply, RunCall, SaveCheckpoint
from realrl.shape import DecoderConfig

SHOWN = {
    "copy_s": "copying the same bytes into memory that is there",
    "stands_still_s": "training stands still for a save",
    "first_save_s": "the same for the first save, which gets its memory",
    "write_s": "until everything is on disk, with digests, beside training",
    "call_alone_s": "a train_step call while nothing is written",
    "call_while_writing_s": "a train_step call while a checkpoint is written",
}


class Worker:
    """One worker, driven by hand."""

    def __init__(self, folder: Path, n_seqs: int, threads: int) -> None:
        experiment = load_experiment("sft")
        overrides = ["preset=tiny", f"models.actor.path={folder / 'model'}", f"n_seqs={n_seqs}", "launcher=inline"]
        config = compose(experiment, overrides, config_dir=config_dir())
        self._worker = ModelWorker(0)
        self._seq = 0
        self._n_seqs = n_seqs
        run = dump_config(config.model_copy(update={"run_dir": str(folder / "run")}))
        (ready,) = self._worker.handle(Initialize(self._next(), run, ("",)))
        self._row_ids = ready.row_ids
        self._call = experiment.calls(config)[-1].name
        torch.set_num_threads(threads)

    def train(self, step: int) -> float:
        """Seconds of one train_step call."""
        rows = tuple(i % len(self._row_ids) for i in range(step * self._n_seqs, (step + 1) * self._n_seqs))
        ids = tuple(f"{step}/{i}" for i in range(self._n_seqs))
        self._worker.handle(LoadSamples(self._next(), ids, rows))
        start_s = time.perf_counter()
        self._worker.handle(RunCall(self._next(), step, self._call, step, (ids,), (), 1000))
        return time.perf_counter() - start_s

    def save(self, step: int, folder: Path) -> tuple[float, Future[Reply]]:
        """Ask for a checkpoint; returns the seconds that it held the worker up, and its future reply."""
        folder.mkdir(parents=True)
        start_s = time.perf_counter()
        (answer,) = self._worker.handle(SaveCheckpoint(self._next(), step, str(folder)))
        return time.perf_counter() - start_s, answer

    def copy(self) -> tuple[float, int]:
        """Seconds to copy a checkpoint's tensors into existing memory, and their bytes."""
        sources = list(self._worker._writer._copies._memory.values())
        targets = [torch.zeros_like(source) for source in sources]
        start_s = time.perf_counter()
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)
        return time.perf_counter() - start_s, sum(source.nbytes for source in sources)

    def _next(self) -> int:
        self._seq += 1
        return self._seq - 1


def measure(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Medians over all saves."""
    tokenizer, hidden, heads = tiny_tokenizer(), options.hidden, options.hidden // 64
    config = DecoderConfig(len(tokenizer), hidden, options.layers, heads, heads, 64, hidden * 3)
    save_model(random_model(config, seed=1), folder / "model")
    tokenizer.save_pretrained(folder / "model")
    worker = Worker(folder, options.n_seqs, options.threads)
    worker.train(0)
    stands, copies, writes, alone, beside = [], [], [], [], []
    for i in range(1, options.saves + 2):
        alone.append(worker.train(2 * i))
        start_s = time.perf_counter()
        stand_s, answer = worker.save(i, folder / f"step_{i}")
        stands.append(stand_s)
        beside.append(worker.train(2 * i + 1))
        answer.result()
        writes.append(time.perf_counter() - start_s)
        copy_s, n_bytes = worker.copy()
        copies.append(copy_s)
    first_s, stands, copies = stands[0], stands[1:], copies[1:]  # the first save allocates memory
    stand_s, copy_s = statistics.median(stands), statistics.median(copies)
    return {
        "megabytes": n_bytes / 1e6,
        "stands_still_s": stand_s,
        "copy_s": copy_s,
        "ratio": stand_s / copy_s,
        "first_save_s": first_s,
        "write_s": statistics.median(writes[1:]),
        "call_alone_s": statistics.median(alone[1:]),
        "call_while_writing_s": statistics.median(beside[1:]),
    }


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--n-seqs", type=int, default=8)
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--threads", type=int, default=int(os.environ.get("OMP_NUM_THREADS", "2")))
    parser.add_argument("--out", type=Path, default=Path("bench_checkpoint.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="realrl-bench-") as folder:
        results = measure(options, Path(folder))
    title = f"checkpoint of {results['megabytes']:.0f} MB: weights and both moments, fp32"
    table = Table("what", "time", "against the copy", title=title)
    for name, told in SHOWN.items():
        table.add_row(told, f"{1000 * results[name]:.0f} ms", f"{results[name] / results['copy_s']:.2f}")
    Console(width=max(Console().width, 100)).print(table)
    options.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
