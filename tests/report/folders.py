"""Run folders as runs leave them, without a run."""

import functools
import json
from pathlib import Path

from realrl.config.compose import compose
from realrl.config.serialize import dump_config
from realrl.experiment.discovery import config_dir, load_experiment

NASTY = '</script><img src=x onerror="alert(1)"><!--DATA-->&\u2028'


def write_run(folder, rows=(), samples=(), spans=(), name="ppo", overrides=("preset=tiny",), **settings):
    """Write a folder; metrics, samples and spans (track, name, kind, begin, end, args) are given as they are."""
    (folder / "logs").mkdir(parents=True)
    config = json.loads(_composed(name, overrides))
    (folder / "config.json").write_text(json.dumps({**config, **settings}))
    write_lines(folder / "metrics.jsonl", rows)
    if samples:
        write_lines(folder / "generations.jsonl", samples)
    if spans:
        (folder / "trace.json").write_text(trace_text(spans))
    return folder


@functools.lru_cache
def _composed(name, overrides):
    return dump_config(compose(load_experiment(name), list(overrides), config_dir=config_dir()))


def write_lines(path: Path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def trace_text(spans, end="\n]\n"):
    events = [{"name": "thread_name", "ph": "M", "pid": 0, "tid": t, "args": {"name": f"worker {t}"}}
              for t in sorted({span[0] for span in spans})]  # fmt: skip
    events += [{"name": name, "cat": kind, "ph": "X", "pid": 0, "tid": track, "ts": begin * 1e6,
                "dur": (end - begin) * 1e6, "args": args} for track, name, kind, begin, end, args in spans]  # fmt: skip
    return "[\n" + ",\n".join(json.dumps(event, separators=(",", ":")) for event in events) + end


def steps(n, **metrics):
    """Return rows of n steps; a metric is a number or a function of the step."""
    return [
        {"step": step, "epoch": 1, **{name.replace("__", "/"): of(step) if callable(of) else of
                                      for name, of in metrics.items()}}
        for step in range(1, n + 1)
    ]  # fmt: skip


def sample(step, prompt="2 + 2 =", response="4", reward=1.0, index=0, **more):
    return {"step": step, "epoch": 1, "sample": "1/7", "response_index": index, "role": "actor", "version": step - 1,
            "prompt": prompt, "response": response, "response_tokens": 3, "rewards": reward, "truncated": False,
            **more}  # fmt: skip
