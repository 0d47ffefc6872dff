from __future__ import annotations

import os
import subprocess
import sys

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


_BESIDE = """
import os, sys, threading, torch
from realrl.engine import device as devices

def add():
    torch.zeros(10_000_000).add_(1.0)
    return torch.get_num_threads(), len(os.listdir("/proc/self/task"))

def beside():
    if "alone" in sys.argv:
        devices.use_one_thread()
    found.append(add())

found = []
devices.use_one_thread()  # nothing, in the main thread
n, n_before = add()
thread = threading.Thread(target=beside)
thread.start()
thread.join()
print(n, found[0][0], found[0][1] - n_before - 1, add()[0])
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="it counts threads in /proc")
@pytest.mark.parametrize(("arguments", "told"), [([], "2 2 1 2"), (["alone"], "2 1 0 2")])
def test_a_thread_beside_the_main_one_gets_no_helpers(arguments: list[str], told: str) -> None:
    """Threads that torch uses in the main thread, in the other one, that the other one adds, and in the main one."""
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", _BESIDE, *arguments]
    assert subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip() == told
