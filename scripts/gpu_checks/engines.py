"""Checks of generation, training, saving and offload by one engine, and of the memory that they take."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import torch
from torch.profiler import profile

from realrl.algo.api import ForwardOutput, LossOutput, MicroBatching
from realrl.cpu import CacheShape, KVCache
from realrl.data.sample import SequenceSample
from realrl.doctor.memory import kernels_of
from realrl.engine import device as devices
from realrl.engine.decoder_engine import DecoderEngine
from realrl.engine.parameters.offload import Offloader
from realrl.graph.mfc import InterfaceType
from realrl.mesh.device_mesh import Allocation, Cluster, DeviceMesh, ParallelStrategy
from realrl.model import lm_logprobs as head
from realrl.model.dtypes import dtype_name
from realrl.plan.hooks import CallHooks
from realrl.plan.memory.buffers import SAVE_STAGE
from realrl.plan.memory.load import Load
from realrl.plan.memory.model import plan_memory
from realrl.plan.memory.plan import CallState, RoleState
from realrl.runtime.checkpoints.roles import HostCopies
from realrl.shape import DecoderConfig
from scripts.gpu_checks.common import (
    TINY,
    DeviceMemory,
    Figures,
    activities,
    generated,
    make_engine,
    on_cuda,
    prompts,
    require,
    seconds_of,
    sequences,
    whole_sequences,
)

BF16 = torch.bfloat16
LARGER = DecoderConfig(32000, 2048, 8, 16, 8, 128, 5632, max_positions=4096)  # half a billion parameters
SMALLER = replace(TINY, vocab_size=2048)
# dense bf16, as NVIDIA's data sheets give it
PEAK_FLOPS = {"H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12}


# ---------------------------------------------------------------- generation


def logprobs_of_generation() -> Figures:
    """Log-probabilities of generation against those that training's kernels compute for the same tokens."""
    device = devices.resolve_device("auto")
    figures: Figures = {"device": device.type}
    limits = {torch.float32: 1e-4, BF16: 2e-2}
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
        name = dtype_name(dtype)
        figures[name] = {"mean": difference.mean().item(), "largest": difference.max().item()}
        require(difference.mean().item() < limit, f"{name} differs by more than {limit:g} on average", figures)
    return figures


def decode_step() -> Figures:
    """Time, launches and host waits of a decode step, recorded and not, and its share of the memory bandwidth."""
    device = devices.resolve_device("auto")
    models = {"tiny": (TINY, 32)}
    if device.type == "cuda":
        models["half a billion parameters"] = (LARGER, 64)
    figures: Figures = {}
    for name, (model, n_rows) in models.items():
        engine, asked = make_engine(device, BF16, model), prompts(n_rows)
        figures[name] = _decode_step(device, engine, asked, cuda_graphs=True)
        figures[f"{name}, kernel by kernel"] = on_cuda(
            device,
            lambda engine=engine, asked=asked: _decode_step(device, engine, asked, cuda_graphs=False),
            "a CPU records nothing",
        )
    return figures


def _decode_step(device: torch.device, engine: DecoderEngine, asked: SequenceSample, *, cuda_graphs: bool) -> Figures:
    def generate(n_new: int) -> None:
        generated(engine, asked, n_new, cuda_graphs=cuda_graphs)

    generate(8)
    shorter, longer = 16, 80
    seconds, launches, waits = [], [], []
    for n_new in (shorter, longer):
        seconds.append(seconds_of(device, lambda n_new=n_new: generate(n_new)))
        with profile(activities=activities(device)) as profiler:
            generate(n_new)
            devices.synchronize(device)
        counts = {event.key: event.count for event in profiler.key_averages()}
        launches.append(sum(n for name, n in counts.items() if "Launch" in name))
        waits.append(sum(n for name, n in counts.items() if "Synchronize" in name))
    n_steps = longer - shorter
    size = sum(p.numel() * p.element_size() for p in engine.decoder.parameters())
    step_s = (seconds[1] - seconds[0]) / n_steps
    return {
        "step_s": step_s,
        "launches": on_cuda(device, lambda: (launches[1] - launches[0]) / n_steps, "a CPU launches no kernels"),
        "host_waits": on_cuda(device, lambda: (waits[1] - waits[0]) / n_steps, "the host is the device"),
        "parameter_bytes": size,
        "share_of_bandwidth": on_cuda(
            device, lambda: size / step_s / bandwidth(device), "the bandwidth of a CPU's memory is not known"
        ),
    }


def bandwidth(device: torch.device) -> float:
    """Bytes a second of a GPU's memory; NaN where torch does not tell its clock."""
    properties = torch.cuda.get_device_properties(device)
    clock_khz = getattr(properties, "memory_clock_rate", float("nan"))  # two transfers a cycle
    return 2e3 * clock_khz * getattr(properties, "memory_bus_width", 0) / 8


def fragmentation() -> Figures:
    """Ten KV caches that grow ten times each, one after the other: what the allocator keeps, against their peak."""
    device = devices.resolve_device("auto")
    shape = CacheShape(8, 64, 4, 64, 1024) if device.type == "cuda" else CacheShape(4, 16, 4, 64, 1024)
    most, n_growths, before = 0, 0, held_bytes(device)
    for n_rows in range(shape.max_rows // 2, shape.max_rows // 2 + 10):
        cache = KVCache(replace(shape, max_rows=n_rows), dtype=torch.float32, device=device, grows=True)
        for n_tokens in range(1, 11):
            earlier = cache.capacity
            cache.reserve(min(shape.max_tokens, earlier + 33))
            n_growths += cache.capacity > earlier
            most = max(most, cache.size_bytes + cache.size_bytes // (2 * shape.n_layers) * (n_tokens > 1))
        del cache
    kept = held_bytes(device) - before
    figures = {"n_growths": n_growths, "peak_bytes": most, "kept_bytes": kept, "ratio": kept / most}
    require(n_growths == 100, "the caches did not grow", figures)
    require(kept <= 2 * most + (64 << 20), "the allocator keeps more than twice the largest cache", figures)
    return figures


def held_bytes(device: torch.device) -> int:
    """Bytes that the process holds on the device, used or not."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else int(devices.memory_gb(device) * 1e9)


# ---------------------------------------------------------------- training


def nll(out: ForwardOutput, _: SequenceSample) -> LossOutput:
    """Negative log-likelihood of all tokens."""
    return LossOutput(-out.logprobs().sum())


def train_step() -> Figures:
    """A step in bf16 with two micro-batches: its share of the device's FLOPs, and its memory against the plan."""
    device = devices.resolve_device("auto")
    model, n_seqs, length = (LARGER, 8, 2048) if device.type == "cuda" else (SMALLER, 8, 128)
    batch = sequences("input_ids", [length] * n_seqs, model.vocab_size)
    with DeviceMemory(device) as memory:
        engine = make_engine(device, BF16, model)

        def step() -> None:
            engine.train_batch(batch, nll, normaliser=float(n_seqs * length), micro_batching=MicroBatching(n_mbs=2))

        step()  # makes moments, and chooses kernels
        memory.restart()
        seconds = seconds_of(device, step)
    flops = train_flops(model, n_seqs, length)
    planned = planned_bytes(model, device, Load(n_seqs, n_seqs * length // 2, n_seqs * (length - 1) // 2, n_mbs=2))
    name = devices_name(device)
    peak = next((flops_per_s for part, flops_per_s in PEAK_FLOPS.items() if part in name), None)
    utilisation = None if peak is None else flops / seconds / peak
    figures: Figures = {
        "step_s": seconds,
        "flops_per_s": flops / seconds,
        "mfu": f"skipped: the peak of {name} is not known" if utilisation is None else utilisation,
        "peak_bytes": memory.peak,
        "planned_bytes": planned,
        "planned_to_peak": planned / memory.peak,
    }
    require(0.8 <= planned / memory.peak <= 1.3, "the plan of its memory is wrong by more than a quarter", figures)
    return figures


def devices_name(device: torch.device) -> str:
    """Name of the device as its maker gives it; of any CPU, "a CPU"."""
    return torch.cuda.get_device_properties(device).name if device.type == "cuda" else "a CPU"


def train_flops(model: DecoderConfig, n_seqs: int, length: int) -> float:
    """Model FLOPs of a train step: three forward passes of all matrix products, of causal attention half the scores."""
    heads, kv_heads = model.n_heads * model.head_dim, model.n_kv_heads * model.head_dim
    block = model.hidden_size * (2 * heads + 2 * kv_heads + 3 * model.intermediate_size)
    per_token = 2 * (model.n_layers * block + model.hidden_size * model.vocab_size)
    scores = 2 * model.n_layers * heads * length  # two products of 2 FLOPs, over half the length
    return 3.0 * n_seqs * length * (per_token + scores)


def planned_bytes(model: DecoderConfig, device: torch.device, load: Load) -> int:
    """Memory of a train step by one rank, as planned."""
    place = Allocation(DeviceMesh.whole(Cluster(1, 1)), ParallelStrategy())
    role = RoleState(replace(model, dtype=dtype_name(BF16)), place, is_trained=True)
    call = CallState("train", "actor", InterfaceType.TRAIN_STEP, place, CallHooks(), load)
    kernels = kernels_of(device, BF16, n_rows=1)
    return plan_memory({"actor": role}, [call], kernels=kernels).calls["train"][0].total


def head_chunks() -> Figures:
    """Log-probabilities, forward and backward, with more and more logits at a time: time, memory, same numbers."""
    device = devices.resolve_device("auto")
    n, width, vocab, largest = (16384, 2048, 65536, 28) if device.type == "cuda" else (1024, 128, 4096, 22)
    generator = torch.Generator().manual_seed(0)
    rows, weights = (torch.randn(size, width, generator=generator).to(device) * 0.1 for size in (n, vocab))
    targets = torch.randint(0, vocab, (n,), generator=generator).to(device)
    figures: Figures = {"default": f"2^{head.LOGITS_CHUNK.bit_length() - 1}"}
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    given = head.LOGITS_CHUNK
    for bits in range(largest - 4, largest + 1, 2):
        hidden = rows.detach().requires_grad_()

        def compute(hidden: torch.Tensor = hidden) -> None:
            hidden.grad = None
            logprobs, _ = head.lm_logprobs(hidden, weights, targets)
            logprobs.sum().backward()
            found.append((logprobs.detach(), hidden.grad))

        head.LOGITS_CHUNK = 1 << bits
        try:
            compute()
            with DeviceMemory(device) as memory:
                seconds = seconds_of(device, compute)
        finally:
            head.LOGITS_CHUNK = given
        figures[f"2^{bits}"] = {"seconds": seconds, "peak_bytes": memory.peak}
    differences = [(a - b).abs().max().item() for one in found[1:] for a, b in zip(one, found[0], strict=True)]
    figures["largest_difference"] = max(differences)
    require(max(differences) <= 1e-3, "numbers depend on the size of chunks", figures)
    return figures


# ---------------------------------------------------------------- host memory


def saving() -> Figures:
    """Ten saves of an engine: device memory above the run's, and host memory that stays page-locked."""
    device = devices.resolve_device("auto")
    model = replace(LARGER, n_layers=2) if device.type == "cuda" else SMALLER
    engine, copies = make_engine(device, BF16, model), HostCopies()
    batch = sequences("input_ids", [64] * 4, model.vocab_size)
    engine.train_batch(batch, nll, normaliser=256.0, micro_batching=MicroBatching())

    def save() -> None:
        copies.begin(nothing_changes=False)
        engine.state_dict(copies.copy)
        engine.copy_hf(copies.copy)
        copies.end()

    with DeviceMemory(device) as memory:
        save()  # makes the copies, which on the CPU count too
        save()
        there = memory.now
        memory.restart()
        seconds = seconds_of(device, lambda: [save() for _ in range(8)])
    largest = max(4 * p.numel() for p in engine.decoder.parameters())
    frozen = on_cuda(device, pinned_bytes, "no memory is page-locked for a CPU")
    figures: Figures = {
        "save_s": seconds / 8,
        "copied_bytes": copies.copied_bytes,
        "above_the_run_bytes": memory.peak - there,
        "left_bytes": memory.now - there,
        "frozen_bytes": frozen,
    }
    require(memory.peak - there <= 2 * largest, "a save takes more than two tensors of device memory", figures)
    require(memory.now - there <= 1 << 20, "a save leaves device memory behind", figures)
    is_free = not isinstance(frozen, int) or frozen <= 2 * SAVE_STAGE
    require(is_free, "a save leaves page-locked memory behind", figures)
    return figures


def pinned_bytes() -> int:
    """Bytes of host memory that torch keeps page-locked."""
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))


def offload_overlap() -> Figures:
    """Parameters that come back from host memory while products are computed: same bits, and the time that it saves."""
    device = devices.resolve_device("auto")
    n, n_products = (4096, 200) if device.type == "cuda" else (512, 20)
    generator = torch.Generator().manual_seed(0)
    parameters = {f"p{i}": torch.randn(n, n, generator=generator).to(device) for i in range(16)}
    before = {name: tensor.cpu().clone() for name, tensor in parameters.items()}
    offloader = Offloader(parameters, device)
    a = torch.randn(n, n, generator=generator).to(device)

    def compute() -> None:
        for _ in range(n_products):
            torch.mm(a, a)

    def both() -> None:
        offloader.prefetch()
        compute()
        offloader.wait()

    seconds: dict[str, float] = {}
    ways: dict[str, Callable[[], None]] = {"compute": compute, "return": offloader.wait, "both": both}
    for _, (name, way) in itertools.product(range(2), ways.items()):  # the first round warms up
        if name != "compute":
            offloader.offload()
        seconds[name] = seconds_of(device, way)
    hidden = (seconds["compute"] + seconds["return"] - seconds["both"]) / min(seconds["compute"], seconds["return"])
    figures: Figures = {f"{name}_s": value for name, value in seconds.items()}
    figures["hidden_share"] = on_cuda(device, lambda: hidden, "the CPU copies at once, and computes afterwards")
    same = all(torch.equal(parameters[name].cpu(), tensor) for name, tensor in before.items())
    require(same, "parameters came back with other bits", figures)
    return figures
