"""Tokens per second of realrl's generation against `transformers`' `generate`, in one process.

Both use the same weights, dtype, threads, prompts and number of new tokens (the end-of-sequence token is masked until
the last), each with its default settings and its KV cache. They run in interleaved pairs, so that a neighbour's load
hits both; the table shows medians, and the median of the pairwise ratios.

    python scripts/bench_generate.py                                  # SmolLM2-135M from the asset cache, or its shape
    python scripts/bench_generate.py --model FOLDER --batch 8 --dtype bf16 --mode sampled --pairs 5
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from realrl.config.schema import GenerationConfig
from realrl.cpu import describe
from realrl.engine.generate import GenerateRequest, generate
from realrl.model.decoder import Decoder
from realrl.model.files.hf import load_model, save_model
from realrl.model.init import random_model
from realrl.shape import DecoderConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MODES = ("greedy", "sampled")
SMOLLM2_SHAPE = DecoderConfig(
    vocab_size=49152,
    hidden_size=576,
    n_layers=30,
    n_heads=9,
    n_kv_heads=3,
    head_dim=64,
    intermediate_size=1536,
    rope_theta=100000.0,
    tied_embeddings=True,
    max_positions=8192,
    eos_token_ids=(2,),
)


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    dtype: str
    mode: str
    batch: int


@dataclass(frozen=True)
class Outcome:
    """Medians over the pairs; `agreement` is the share of equal tokens (greedy only)."""

    case: Case
    realrl_tokens_per_s: float
    transformers_tokens_per_s: float
    ratio: float
    agreement: float | None


def main() -> None:
    args = parse_args()
    torch.set_num_threads(args.threads)
    warnings.filterwarnings("ignore")
    print(f"realrl with {describe()}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.model or find_model(Path(scratch))
        outcomes = [outcome for dtype in args.dtype for outcome in bench_dtype(folder, dtype, args)]
    report = {
        "model": str(args.model or folder.name),
        "prompt_tokens": args.prompt_tokens,
        "new_tokens": args.new_tokens,
        "threads": args.threads,
        "pairs": args.pairs,
        "torch": torch.__version__,
        "cpu": platform.processor() or platform.machine(),
        "kernels": describe(),
        "results": [asdict(outcome) for outcome in outcomes],
    }
    args.out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(f"written to {args.out}")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="Hugging Face folder")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=list(DTYPES))
    parser.add_argument("--mode", choices=MODES, nargs="+", default=list(MODES))
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=3, help="interleaved pairs of runs per case")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("bench_generate.json"))
    return parser.parse_args()


def find_model(scratch: Path) -> Path:
    """SmolLM2-135M in the asset cache, or a random model of its shape."""
    cache = Path(os.environ.get("REALRL_CACHE", "~/.cache/realrl")).expanduser()
    for config in sorted(cache.glob("**/config.json")):
        if "smollm2" in str(config.parent).lower():
            print(f"model: {config.parent}")
            return config.parent
    print("model: random weights in the shape of SmolLM2-135M (scripts/fetch_assets.py gets the real ones)")
    folder = scratch / "random-smollm2-shape"
    save_model(random_model(SMOLLM2_SHAPE, seed=1), folder)
    return folder


def bench_dtype(folder: Path, dtype: str, args: argparse.Namespace) -> list[Outcome]:
    """All cases of one dtype; prints a line for each."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    decoder = load_model(folder, dtype=DTYPES[dtype])
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype]).eval()
    print(f"{'dtype':<6}{'mode':<9}{'batch':>5}{'realrl tok/s':>14}{'transformers tok/s':>20}{'ratio':>7}  same tokens")
    outcomes = []
    for mode in args.mode:
        for batch in args.batch:
            outcome = bench_case(Case(dtype, mode, batch), decoder, reference, args)
            outcomes.append(outcome)
            same = "" if outcome.agreement is None else f"{outcome.agreement:.1%}"
            print(
                f"{dtype:<6}{mode:<9}{batch:>5}{outcome.realrl_tokens_per_s:>14.0f}"
                f"{outcome.transformers_tokens_per_s:>20.0f}{outcome.ratio:>6.2f}x  {same}",
                flush=True,
            )
    return outcomes


def bench_case(case: Case, decoder: Decoder, reference: Any, args: argparse.Namespace) -> Outcome:
    """Run interleaved pairs of one case, after a short warm-up of both."""
    rng = torch.Generator().manual_seed(case.batch)
    prompts = torch.randint(5, decoder.config.vocab_size, (case.batch, args.prompt_tokens), generator=rng)
    eos_id = decoder.config.eos_token_ids[0]
    temperature = 0.0 if case.mode == "greedy" else 1.0

    def run_realrl(n_new: int) -> torch.Tensor:
        config = GenerationConfig(
            max_new_tokens=n_new, min_new_tokens=n_new, temperature=temperature, max_batch_size=case.batch
        )
        ids = [str(i) for i in range(case.batch)]
        result = generate(decoder, GenerateRequest(list(prompts), ids, config, 1, 1, eos_id))
        return torch.stack(result.responses)

    def run_transformers(n_new: int) -> torch.Tensor:
        sampling = (
            {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0} if temperature else {"do_sample": False}
        )
        output = reference.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=n_new,
            min_new_tokens=n_new,
            eos_token_id=eos_id,
            pad_token_id=eos_id,
            **sampling,
        )
        return output[:, args.prompt_tokens :]

    run_realrl(4), run_transformers(4)
    ours, theirs, tokens = [], [], (torch.empty(0), torch.empty(0))
    for _ in range(args.pairs):
        our_time_s, our_tokens = timed(run_realrl, args.new_tokens)
        their_time_s, their_tokens = timed(run_transformers, args.new_tokens)
        ours.append(our_tokens.numel() / our_time_s)
        theirs.append(their_tokens.numel() / their_time_s)
        tokens = our_tokens, their_tokens
    agreement = None if temperature else float((tokens[0] == tokens[1]).float().mean())
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    return Outcome(case, statistics.median(ours), statistics.median(theirs), ratio, agreement)


def timed(run: Callable[[int], torch.Tensor], n_new: int) -> tuple[float, torch.Tensor]:
    start = time.perf_counter()
    tokens = run(n_new)
    return time.perf_counter() - start, tokens


if __name__ == "__main__":
    main()
