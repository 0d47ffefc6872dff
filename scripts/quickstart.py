"""A real language model, human ratings, PPO, and what it changed: what `make quickstart` runs.

    fetch      SmolLM2-135M-Instruct and 10,604 movie-review snippets with about 20 human ratings each
    rw         train a reward model on pairs of snippets that people rated clearly apart
    ppo        train SmolLM2 to continue the first words of other snippets towards what people rated positively
    evaluate   held-out pairs and prompts, before and after; judged by VADER, which nothing was trained on

A stage that is complete is not run again, one that was interrupted continues; --fresh starts over.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

N_SAMPLES_SHOWN = 6


def main() -> int:
    """Run all stages; returns the exit code of the first that fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/quickstart"), help="run folder (default: %(default)s)")
    parser.add_argument(
        "--prompts", type=int, default=448, help="held-out prompts to evaluate on (default: %(default)s)"
    )
    parser.add_argument("--pairs", type=int, default=400, help="held-out pairs to evaluate on (default: %(default)s)")
    parser.add_argument("--fresh", action="store_true", help="set an earlier quickstart aside and start over")
    options = parser.parse_args()
    if options.fresh and options.out.exists():
        aside = options.out.with_name(f"{options.out.name}_{time.strftime('%Y-%m-%d_%H-%M-%S')}")
        options.out.rename(aside)
        print(f"the earlier quickstart is now {aside}")
    started_s = time.monotonic()
    stages = [
        ("1/4  model and human ratings", [str(Path(__file__).with_name("fetch_assets.py"))]),
        ("2/4  reward model from human ratings", _run_stage(options.out / "rw", "rw", [])),
        (
            "3/4  PPO",
            _run_stage(
                options.out / "ppo", "ppo", [f"models.reward.path={options.out / 'rw'}/checkpoints/latest/reward"]
            ),
        ),
    ]
    for title, command in stages:
        print(f"\n{title}", flush=True)
        if not command:
            print("done before; --fresh starts over")
            continue
        exit_code = subprocess.run([sys.executable, *command], check=False).returncode
        if exit_code:
            print(f"\nthe quickstart stopped at: {title}", file=sys.stderr)
            return exit_code
    print("\n4/4  evaluation on held-out pairs and prompts", flush=True)
    _evaluate(options.out, options.prompts, options.pairs)
    print(f"\ntotal time {(time.monotonic() - started_s) / 60:.1f} min")
    return 0


def _run_stage(run_dir: Path, experiment: str, overrides: list[str]) -> list[str]:
    """The command of a training stage; empty if its last step is saved already."""
    manifest, config = run_dir / "checkpoints/latest/state/manifest.json", run_dir / "config.json"
    if manifest.exists() and json.loads(manifest.read_text())["step"] == json.loads(config.read_text())["steps"]:
        return []
    return ["-m", "realrl", "run", experiment, "preset=quickstart", f"run_dir={run_dir}", "resume=auto", *overrides]


def _evaluate(out: Path, n_prompts: int, n_pairs: int) -> None:
    import torch
    from quickstart_eval import evaluate, print_report

    torch.set_num_threads(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    report = evaluate(out, n_prompts=n_prompts, n_pairs=n_pairs)
    print_report(report, n_shown=N_SAMPLES_SHOWN)
    (out / "report.json").write_text(json.dumps(report.as_dict(), indent=1))
    print(f"report       {out / 'report.json'}")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
