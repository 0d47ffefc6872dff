from __future__ import annotations

import pytest
import torch

from realrl.engine import device as devices
from realrl.errors import ConfigError

CPU = torch.device("cpu")


def test_cpu() -> None:
    assert devices.resolve_device("cpu", 5) == CPU
    assert devices.backend_name(CPU) == "gloo"
    devices.synchronize(CPU)
    devices.release_cached_memory(CPU)
    assert devices.device_name(CPU).strip()


def test_auto_takes_what_is_there() -> None:
    assert devices.resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_resident_memory_follows_allocations() -> None:
    before = devices.memory_gb(CPU)
    block = torch.ones(50_000_000, dtype=torch.float32)
    assert 0.15 < devices.memory_gb(CPU) - before < 0.3
    assert devices.peak_memory_gb(CPU) >= before + 0.15
    del block


def test_unknown_device() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.device='tpu' is not a device"):
        devices.resolve_device("tpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="worker 0 of this node needs a CUDA device of its own, the node has 0"):
        devices.resolve_device("cuda", 0)
