"""Small checks of this machine's GPU, each in a process of its own, with one line of JSON each.

    python scripts/gpu_check.py                        # all; exit code 1 if one does not hold
    python scripts/gpu_check.py versions attention     # some

A line has the check's name, whether it holds ("yes", "no" or "not checked"), a reason for the last two, and figures. A
check that takes longer than a minute does not hold. Without a GPU the same checks run on the CPU, where they can.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from realrl.algo.api import GenerationResult, MicroBatching
from realrl.config.schema import GenerationConfig, OptimizerConfig
from realrl.data.sample import SequenceSample
from realrl.engine import device as devices
from realrl.engine.decoder_engine import DecoderEngine
from realrl.engine.groups import Groups, GroupSettings
from realrl.mesh.device_mesh import Cluster
from realrl.model.init import random_model
from realrl.model.layers.attention import PackedAttention
from realrl.plan.groups import process_groups
from realrl.runtime.transport.zmq import RunKeys, ZmqKeyValueClient, ZmqKeyValueServer
from realrl.sched.messages import KeySchema, Per
from realrl.shape import tiny_config

LIMIT_S = 60.0
Figures = dict[str, Any]
SMALL_RUN = ("preset=tiny", "n_seqs=8", "generation.max_new_tokens=6", "algorithm.n_minibatches=2")
NOISE = ("time_s/", "perf/", "memory_gb/", "bytes/")
N_TOKENS = 8192


class NotCheckedError(Exception):
    """A check that cannot be done here, and why."""


class DoesNotHoldError(Exception):
    """A check that failed, and its figures."""

    def __init__(self, reason: str, figures: Figures) -> None:
        super().__init__(reason)
        self.figures = figures


def require(condition: bool, reason: str, figures: Figures) -> None:
    """Raise unless the condition holds."""
    if not condition:
        raise DoesNotHoldError(reason, figures)


def gpu() -> torch.device:
    """Return the first GPU; raises `NotCheckedError` where there is none."""
    if not torch.cuda.is_available():
        raise NotCheckedError("there is no CUDA device")
    return devices.resolve_device("cuda")


# ---------------------------------------------------------------- device


def versions() -> Figures:
    """Versions, capability and free memory of the device."""
    figures: Figures = {"torch": torch.__version__, "python": sys.version.split()[0], "cuda": torch.version.cuda}
    device = devices.resolve_device("auto")
    if device.type == "cpu":
        return {**figures, "device": "cpu", "threads": torch.get_num_threads()}
    total, free = devices.total_memory_bytes(device), devices.free_memory_bytes(device)
    properties = torch.cuda.get_device_properties(device)
    figures |= {"device": properties.name, "capability": [properties.major, properties.minor]}
    figures |= {"nccl": list(torch.cuda.nccl.version()), "total_bytes": total, "free_bytes": free}
    require(0 < free <= total, "free memory is not part of the total", figures)
    return figures


@contextmanager
def one_rank(device: torch.device) -> Iterator[torch.distributed.ProcessGroup]:
    """Yield the group of a world of one rank on the device."""
    keys = RunKeys.new()
    planned = process_groups([], Cluster(1, 1))
    with (
        closing(ZmqKeyValueServer(keys)) as server,
        closing(ZmqKeyValueClient(server.address, keys.for_workers)) as meeting,
    ):
        groups = Groups.create(
            planned, rank=0, world_size=1, meeting=meeting, device=device, timeout_s=LIMIT_S,
            settings=GroupSettings(for_libraries=True),
        )  # fmt: skip
        handle = groups[planned[0]].library_handle
        assert handle is not None
        try:
            yield handle
        finally:
            groups.destroy()


def collectives_of_one_rank() -> Figures:
    """Every collective that realrl uses, over NCCL with one rank (gloo on the CPU): each gives its input back."""
    device = devices.resolve_device("auto")
    with one_rank(device) as group:
        mine = torch.arange(12.0, device=device)
        found = {name: torch.empty_like(mine) for name in ("all_gather", "reduce_scatter")}
        torch.distributed.all_gather_single(found["all_gather"], mine, group=group)
        torch.distributed.reduce_scatter_single(found["reduce_scatter"], mine, group=group)
        for name in ("all_reduce", "broadcast"):
            found[name] = mine.clone()
        torch.distributed.all_reduce(found["all_reduce"], group=group)
        torch.distributed.broadcast(found["broadcast"], group=group, group_src=0)
        torch.distributed.barrier(group=group)
        wrong = [name for name, tensor in found.items() if not torch.equal(tensor, mine)]
    figures = {"backend": devices.backend_name(device), "operations": [*found, "barrier"]}
    require(not wrong, f"wrong results of {', '.join(wrong)}", figures)
    return figures


# ---------------------------------------------------------------- attention


def attend_on(device: torch.device, dtype: torch.dtype, heads: tuple[int, int, int], window: int | None) -> Figures:
    """Attend once, forward and backward, to one sequence of `N_TOKENS`: kernels by name, and peak bytes."""
    n_heads, n_kv_heads, head_dim = heads
    sizes = (n_heads, n_kv_heads, n_kv_heads)
    q, k, v = (torch.randn(N_TOKENS, n, head_dim, device=device, dtype=dtype, requires_grad=True) for n in sizes)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        PackedAttention([N_TOKENS]).attend(0, q, k, v, window=window).sum().backward()
        devices.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    names = sorted({event.key for event in profiler.key_averages() if "attention" in event.key.lower()})
    return {"peak_bytes": peak, "share_of_scores": peak / (n_heads * N_TOKENS**2 * dtype.itemsize), "kernels": names}


def attention() -> Figures:
    """Attention to 8,192 tokens in each dtype, with grouped heads and windows: no kernel keeps all scores."""
    device = gpu()
    figures: Figures = {}
    for dtype in (torch.float32, torch.bfloat16):
        for n_kv_heads in (2, 8):
            for window in (None, 1024):
                for head_dim in (64, 128, 256):
                    name = f"{dtype} {8}/{n_kv_heads} heads of {head_dim}, window {window}".removeprefix("torch.")
                    figures[name] = attend_on(device, dtype, (8, n_kv_heads, head_dim), window)
    quadratic = [name for name, found in figures.items() if found["share_of_scores"] >= 1.0]
    require(not quadratic, f"as much memory as all scores: {'; '.join(quadratic)}", figures)
    return figures


# ---------------------------------------------------------------- engine


def make_engine(device: torch.device, dtype: torch.dtype) -> DecoderEngine:
    """Make an engine of the tiny model, with weights of seed 1."""
    return DecoderEngine(
        random_model(tiny_config(256), seed=1, device=device),
        role="actor",
        optimizer=OptimizerConfig(lr=1e-3),
        total_optimizer_steps=10,
        compute_dtype=dtype,
    )


def prompts(n: int) -> SequenceSample:
    """Make n prompts of 4 to 11 tokens."""
    generator = torch.Generator().manual_seed(0)
    rows = [[torch.randint(3, 256, (4 + i % 8,), generator=generator)] for i in range(n)]
    return SequenceSample.from_lists(
        [f"1/{i}" for i in range(n)], {"prompt_ids": (KeySchema("int64", Per.TOKEN), rows)}
    )


def generated(engine: DecoderEngine, asked: SequenceSample, n_new: int) -> GenerationResult:
    """Generate n_new tokens for each prompt."""
    settings = GenerationConfig(max_new_tokens=n_new, min_new_tokens=n_new)
    return engine.generate(asked, settings, seed=1, step=1, eos_id=2)


def whole_sequences(asked: SequenceSample, result: GenerationResult) -> SequenceSample:
    """Join prompts and their responses."""
    rows = [
        [torch.cat([prompt, response.cpu()])]
        for prompt, response in zip(asked.samples("prompt_ids"), result.responses, strict=True)
    ]
    return SequenceSample.from_lists(list(asked.ids), {"input_ids": (KeySchema("int64", Per.TOKEN), rows)})


def logprobs_of_generation() -> Figures:
    """Log-probabilities of generation against those that training's kernels compute for the same tokens."""
    device = devices.resolve_device("auto")
    figures: Figures = {"device": device.type}
    limits = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
    for dtype, limit in limits.items():
        engine, asked = make_engine(device, dtype), prompts(16)
        result = generated(engine, asked, 24)
        again = engine.forward(
            whole_sequences(asked, result), lambda out, _: out.logprobs(), micro_batching=MicroBatching()
        ).cpu()
        start, differences = 0, []
        for prompt, ours in zip(asked.samples("prompt_ids"), result.policy_logprobs, strict=True):
            end = start + len(prompt) + len(ours) - 1
            differences.append((again[end - len(ours) : end] - ours.cpu()).abs())
            start = end
        difference = torch.cat(differences)
        name = str(dtype).removeprefix("torch.")
        figures[name] = {"mean": difference.mean().item(), "largest": difference.max().item()}
        require(difference.mean().item() < limit, f"{name} differs by more than {limit:g} on average", figures)
    return figures


def decode_step() -> Figures:
    """Time, launches and host waits of a decode step of the tiny model, and its share of the memory bandwidth."""
    device = gpu()
    engine, asked = make_engine(device, torch.bfloat16), prompts(32)
    generated(engine, asked, 8)
    seconds, launches, waits = [], [], []
    for n_new in (16, 80):
        start_s = time.perf_counter()
        generated(engine, asked, n_new)
        devices.synchronize(device)
        seconds.append(time.perf_counter() - start_s)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            generated(engine, asked, n_new)
            devices.synchronize(device)
        counts = {event.key: event.count for event in profiler.key_averages()}
        launches.append(sum(n for name, n in counts.items() if "LaunchKernel" in name))
        waits.append(sum(n for name, n in counts.items() if "Synchronize" in name))
    size = sum(p.numel() * p.element_size() for p in engine.decoder.parameters())
    step_s = (seconds[1] - seconds[0]) / 64
    properties = torch.cuda.get_device_properties(device)
    figures: Figures = {
        "step_s": step_s,
        "launches": (launches[1] - launches[0]) / 64,
        "host_waits": (waits[1] - waits[0]) / 64,
        "parameter_bytes": size,
        "bytes_per_s": size / step_s,
    }
    if getattr(properties, "memory_clock_rate", 0):  # kHz, two transfers a cycle
        bandwidth = 2e3 * properties.memory_clock_rate * properties.memory_bus_width / 8
        figures["share_of_bandwidth"] = size / step_s / bandwidth
    return figures


# ---------------------------------------------------------------- runs


def run(folder: Path, experiment: str, *overrides: str) -> subprocess.Popen[str]:
    """Start a small run in a process of its own; what it prints goes to a file beside its folder."""
    command = [sys.executable, "-m", "realrl", "run", experiment, *SMALL_RUN, f"run_dir={folder}", *overrides]
    with folder.with_suffix(".txt").open("a") as output:
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, text=True)


def finish(folder: Path, experiment: str, *overrides: str) -> list[Mapping[str, Any]]:
    """Do a small run to its end; returns its metrics, one entry a step."""
    if run(folder, experiment, *overrides).wait():
        raise DoesNotHoldError("the run failed", {"output": folder.with_suffix(".txt").read_text()[-600:]})
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def largest_difference(ours: list[Mapping[str, Any]], theirs: list[Mapping[str, Any]]) -> float:
    """Return the largest difference of a metric, relative to values above 1; infinite if steps or names differ."""
    if len(ours) != len(theirs):
        return float("inf")
    largest = 0.0
    for a, b in zip(ours, theirs, strict=True):
        names = {name for name in a if not name.startswith(NOISE)}
        if names != {name for name in b if not name.startswith(NOISE)}:
            return float("inf")
        largest = max(largest, *(abs(a[name] - b[name]) / max(1.0, abs(a[name])) for name in names))
    return largest


def staged(n_workers: int, *layout: str) -> Figures:
    """Do one step of PPO on one worker, and on several that share a device: equal numbers."""
    with tempfile.TemporaryDirectory() as folder:
        settings = ("steps=1", "precision=fp32", "algorithm.recompute_logprobs=false")
        alone = finish(Path(folder) / "one", "ppo", *settings)
        workers = (f"cluster.n_devices_per_node={n_workers}", "cluster.shares_devices=true")
        several = finish(Path(folder) / "several", "ppo", *settings, *workers, *layout)
    figures = {"workers": n_workers, "layout": list(layout), "largest_difference": largest_difference(alone, several)}
    limit = 1e-2 if torch.cuda.is_available() else 1e-4
    require(figures["largest_difference"] <= limit, f"metrics differ by more than {limit:g}", figures)
    return figures


def two_equal_runs() -> Figures:
    """Two runs with one seed. On CUDA equal bits are not promised: the difference is a figure."""
    with tempfile.TemporaryDirectory() as folder:
        first, second = (finish(Path(folder) / name, "ppo", "steps=2") for name in ("first", "second"))
    figures = {"largest_difference": largest_difference(first, second)}
    limit = 1e-2 if torch.cuda.is_available() else 0.0
    require(figures["largest_difference"] <= limit, f"metrics differ by more than {limit:g}", figures)
    return figures


def killed_and_resumed(experiment: str) -> Figures:
    """Three steps, killed after the first checkpoint and resumed, against the same steps without."""
    with tempfile.TemporaryDirectory() as name:
        folder, settings = Path(name), ("steps=3", "save.every_steps=1", "resume=auto")
        quiet = finish(folder / "quiet", experiment, *settings)
        killed = run(folder / "killed", experiment, *settings)
        while killed.poll() is None and not (folder / "killed" / "checkpoints" / "step_1").exists():
            time.sleep(0.01)
        was_running = killed.poll() is None
        killed.kill()
        killed.wait()
        time.sleep(2.0)  # its workers notice, and leave the folder
        resumed = finish(folder / "killed", experiment, *settings)
    figures = {"was_running": was_running, "largest_difference": largest_difference(quiet, resumed)}
    limit = 1e-2 if torch.cuda.is_available() else 0.0
    require(figures["largest_difference"] <= limit, f"metrics differ by more than {limit:g}", figures)
    return figures


CHECKS: Mapping[str, Callable[[], Figures]] = {
    "versions": versions,
    "collectives_of_one_rank": collectives_of_one_rank,
    "host_staged_2": lambda: staged(2, "allocation.mode=tensor"),
    "host_staged_4": lambda: staged(4, "allocation.mode=d1t2p2", "allocation.calls.actor_gen=d2t2@0:0-3"),
    "attention": attention,
    "logprobs_of_generation": logprobs_of_generation,
    "decode_step": decode_step,
    "two_equal_runs": two_equal_runs,
    "ppo_killed_and_resumed": lambda: killed_and_resumed("ppo"),
    "grpo_killed_and_resumed": lambda: killed_and_resumed("grpo"),
}


# ---------------------------------------------------------------- all


def outcome(name: str, check: Callable[[], Figures]) -> dict[str, Any]:
    """Do one check here; any error means that it does not hold."""
    try:
        return {"name": name, "holds": "yes", "figures": check()}
    except NotCheckedError as reason:
        return {"name": name, "holds": "not checked", "reason": str(reason), "figures": {}}
    except DoesNotHoldError as reason:
        return {"name": name, "holds": "no", "reason": str(reason), "figures": reason.figures}
    except Exception as error:  # noqa: BLE001 - the line says what happened
        return {"name": name, "holds": "no", "reason": f"{type(error).__name__}: {error}"[:600], "figures": {}}


def outcome_apart(name: str, limit_s: float = LIMIT_S) -> dict[str, Any]:
    """Do one check in a process of its own, which ends with all that it started."""
    command = [sys.executable, "-m", "scripts.gpu_check", "--here", name]
    root = Path(__file__).resolve().parent.parent
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True, cwd=root) as process:
        try:
            lines = process.communicate(timeout=limit_s)[0].splitlines()
            reason = f"its process ended with {process.returncode}"
        except subprocess.TimeoutExpired:
            lines, reason = [], f"it took longer than {limit_s:g} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    found: dict[str, Any] = {"name": name, "holds": "no", "reason": reason, "figures": {}}
    return json.loads(lines[-1]) if lines else found


def main(arguments: list[str] | None = None) -> int:
    """Do the named checks, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="CHECK", help=f"of {', '.join(CHECKS)}")
    parser.add_argument("--here", action="store_true", help="do the checks in this process, without a limit")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in CHECKS]
    if unknown:
        parser.error(f"no such check: {', '.join(unknown)}")
    is_fine = True
    for name in options.names or CHECKS:
        found = outcome(name, CHECKS[name]) if options.here else outcome_apart(name)
        print(json.dumps(found), flush=True)
        is_fine &= found["holds"] != "no"
    return 0 if is_fine else 1


if __name__ == "__main__":
    sys.exit(main())
