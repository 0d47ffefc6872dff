"""Training speed of the native engine's decoder against `transformers` on the same weights, in one process.

Forward and backward of the token-mean negative log-likelihood on sequences of different lengths: packed for realrl,
padded with an attention mask for transformers. Prints a table and writes JSON.

    python scripts/bench_train.py --model ~/.cache/realrl/SmolLM2-135M-Instruct --n-seqs 16
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch.nn import functional as F

from realrl.engine.device import resolve_device
from realrl.engine.train.packing import packed_positions
from realrl.model.decoder import Decoder
from realrl.model.files.hf import load_model, save_model
from realrl.model.init import random_model
from realrl.model.layers.attention import PackedAttention
from realrl.model.lm_logprobs import lm_logprobs
from realrl.shape import DecoderConfig

SMOLLM2 = DecoderConfig(49152, 576, 30, 9, 3, 64, 1536, rope_theta=100000.0, tied_embeddings=True, max_positions=8192)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def main() -> None:
    args = _parse()
    torch.set_num_threads(args.threads)
    resolve_device("cpu")
    generator = torch.Generator().manual_seed(0)
    seqlens = torch.randint(args.min_tokens, args.max_tokens + 1, (args.n_seqs,), generator=generator).tolist()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.model
        if folder is None:
            folder = Path(scratch)
            save_model(random_model(SMOLLM2, seed=1), folder)
        results = [_compare(folder, precision, seqlens, args.repeats) for precision in args.precisions]
    _print(results, seqlens, args.threads)
    report = {"threads": args.threads, "seqlens": seqlens, "results": results}
    args.out.write_text(json.dumps(report, indent=2) + "\n")


def _compare(folder: Path, precision: str, seqlens: list[int], repeats: int) -> dict[str, float | str]:
    """Alternate the two, so that a busy machine slows both, and take medians."""
    from transformers import LlamaForCausalLM

    dtype = DTYPES[precision]
    ours = load_model(folder, dtype=dtype)
    theirs = LlamaForCausalLM.from_pretrained(folder, dtype=dtype)
    sequences = [torch.randint(0, ours.config.vocab_size, (n,)) for n in seqlens]
    steps: dict[str, Callable[[], float]] = {
        "realrl": _packed_step(ours, sequences),
        "transformers": _padded_step(theirs, sequences),
    }
    times_s: dict[str, list[float]] = {name: [] for name in steps}
    losses: dict[str, float] = {}
    for repeat in range(repeats + 1):
        for name, step in steps.items():
            start_s = time.perf_counter()
            losses[name] = step()
            if repeat:  # the first round warms up
                times_s[name].append(time.perf_counter() - start_s)
    n_tokens = sum(seqlens)
    rates = {name: n_tokens / statistics.median(times) for name, times in times_s.items()}
    return {
        "precision": precision,
        "realrl_tokens_per_s": rates["realrl"],
        "transformers_tokens_per_s": rates["transformers"],
        "ratio": rates["realrl"] / rates["transformers"],
        "loss_difference": abs(losses["realrl"] - losses["transformers"]),
    }


def _packed_step(model: Decoder, sequences: list[torch.Tensor]) -> Callable[[], float]:
    seqlens = [len(s) for s in sequences]
    input_ids = torch.cat(sequences)
    positions = packed_positions(seqlens, input_ids.device)
    rows = torch.ones(len(input_ids), dtype=torch.bool)
    rows[torch.tensor(seqlens).cumsum(0) - 1] = False
    rows = rows.nonzero()[:, 0]

    def step() -> float:
        model.zero_grad()
        hidden = model(input_ids, positions, PackedAttention(seqlens))
        logprobs, _ = lm_logprobs(hidden.index_select(0, rows), model.head.weight, input_ids[rows + 1])
        loss = -logprobs.mean()
        loss.backward()
        return loss.item()

    return step


def _padded_step(model: torch.nn.Module, sequences: list[torch.Tensor]) -> Callable[[], float]:
    input_ids = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    real = torch.nn.utils.rnn.pad_sequence([torch.ones_like(s) for s in sequences], batch_first=True)
    targets = input_ids.masked_fill(real == 0, -100)[:, 1:].flatten()

    def step() -> float:
        model.zero_grad()
        logits = model(input_ids=input_ids, attention_mask=real, use_cache=False).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets, ignore_index=-100)
        loss.backward()
        return loss.item()

    return step


def _print(results: list[dict[str, float | str]], seqlens: list[int], threads: int) -> None:
    title = f"forward + backward, {len(seqlens)} sequences, {sum(seqlens)} tokens, {threads} threads"
    table = Table("precision", "realrl tokens/s", "transformers tokens/s", "ratio", "loss difference", title=title)
    for r in results:
        table.add_row(
            str(r["precision"]),
            f"{r['realrl_tokens_per_s']:.0f}",
            f"{r['transformers_tokens_per_s']:.0f}",
            f"{r['ratio']:.2f}",
            f"{r['loss_difference']:.1e}",
        )
    Console().print(table)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, help="Hugging Face folder; default: random weights in SmolLM2's shape")
    parser.add_argument("--n-seqs", type=int, default=16)
    parser.add_argument("--min-tokens", type=int, default=40)
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--precisions", nargs="+", choices=sorted(DTYPES), default=["fp32", "bf16"])
    parser.add_argument("--out", type=Path, default=Path("bench_train.json"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
