"""Outcomes of checks, memory of a device, and the small model that several checks use."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Self

import torch
from torch.profiler import ProfilerActivity

from realrl.algo.api import GenerationResult
from realrl.config.schema import GenerationConfig, OptimizerConfig
from realrl.data.sample import SequenceSample
from realrl.engine import device as devices
from realrl.engine.decoder_engine import DecoderEngine
from realrl.model.dtypes import dtype_name
from realrl.model.init import random_model
from realrl.sched.messages import KeySchema, Per
from realrl.shape import DecoderConfig, tiny_config
from tests.helpers.live_memory import LiveMemory

Figures = dict[str, Any]
TINY = tiny_config(256)


class DoesNotHoldError(Exception):
    """A check that failed, and its figures."""

    def __init__(self, reason: str, figures: Mapping[str, Any]) -> None:
        super().__init__(reason)
        self.figures = dict(figures)


def require(condition: bool, reason: str, figures: Mapping[str, Any]) -> None:
    """Raise unless the condition holds."""
    if not condition:
        raise DoesNotHoldError(reason, figures)


def on_cuda(device: torch.device, figure: Callable[[], Any], reason: str) -> Any:
    """Return a figure that only CUDA has; on the CPU, the reason why it is left out."""
    return figure() if device.type == "cuda" else f"skipped: {reason}"


def seconds_of(device: torch.device, work: Callable[[], object]) -> float:
    """Time of some work, everything that it queued on the device included."""
    devices.synchronize(device)
    start_s = time.perf_counter()
    work()
    devices.synchronize(device)
    return time.perf_counter() - start_s


def activities(device: torch.device) -> list[ProfilerActivity]:
    """Return what the profiler records of a device."""
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]


class DeviceMemory:
    """Bytes of tensors that are made inside of the context: those of torch's allocator on CUDA, storages on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0
        self._live = LiveMemory() if device.type == "cpu" else None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.__enter__()
        else:
            self._before = torch.cuda.memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.__exit__(*error)

    @property
    def now(self) -> int:
        return self._live.now if self._live else torch.cuda.memory_allocated(self._device) - self._before

    @property
    def peak(self) -> int:
        """The most since the beginning, or the last `restart`."""
        return self._live.peak if self._live else torch.cuda.max_memory_allocated(self._device) - self._before

    def restart(self) -> None:
        """Forget the peak."""
        if self._live is not None:
            self._live.restart()
        else:
            torch.cuda.reset_peak_memory_stats(self._device)


# ---------------------------------------------------------------- engines


def make_engine(device: torch.device, dtype: torch.dtype, model: DecoderConfig = TINY) -> DecoderEngine:
    """Make an engine that trains a random model, with weights of seed 1."""
    return DecoderEngine(
        random_model(replace(model, dtype=dtype_name(torch.float32)), seed=1, device=device),
        role="actor",
        optimizer=OptimizerConfig(lr=1e-3),
        total_optimizer_steps=10,
        compute_dtype=dtype,
    )


def prompts(n: int) -> SequenceSample:
    """Make n prompts of 4 to 11 tokens."""
    return sequences("prompt_ids", [4 + i % 8 for i in range(n)], 256)


def sequences(key: str, lengths: list[int], vocab_size: int) -> SequenceSample:
    """Make random sequences of these lengths."""
    generator = torch.Generator().manual_seed(0)
    rows = [[torch.randint(3, vocab_size, (length,), generator=generator)] for length in lengths]
    return SequenceSample.from_lists([f"1/{i}" for i in range(len(rows))], {key: (KeySchema("int64", Per.TOKEN), rows)})


def generated(
    engine: DecoderEngine, asked: SequenceSample, n_new: int, *, cuda_graphs: bool = True
) -> GenerationResult:
    """Generate n_new tokens for each prompt."""
    settings = GenerationConfig(max_new_tokens=n_new, min_new_tokens=n_new, cuda_graphs=cuda_graphs)
    return engine.generate(asked, settings, seed=1, step=1, eos_id=2)


def whole_sequences(asked: SequenceSample, result: GenerationResult) -> SequenceSample:
    """Join prompts and their responses."""
    rows = [
        [torch.cat([prompt, response.cpu()])]
        for prompt, response in zip(asked.samples("prompt_ids"), result.responses, strict=True)
    ]
    return SequenceSample.from_lists(list(asked.ids), {"input_ids": (KeySchema("int64", Per.TOKEN), rows)})
