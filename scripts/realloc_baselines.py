"""Cost of reallocation in other systems, as baselines for a plan.

Formulas of HybridFlow (Sheng et al. 2024, table 2), with M the bytes of the model, training p-t-d and generation
p_g-t_g. They take all parameters as split evenly; replicated ones (norms) and unequal stages are ignored.

| system | bytes received by a rank | peak | kept twice |
|---|---|---|---|
| DeepSpeed-Chat: gather over all ranks | (t p d - 1) / (t p d) M | M | M / (t p d) |
| HybridFlow-V: gather over a replica, plain grouping | (t p - 1) / (t p) M | M | M / (t p) |
| HybridFlow: 3D-HybridEngine | (t p - t_g p_g) / (t_g p_g t p) M | M / (t_g p_g) | 0 |

With d_g = t p / (t_g p_g), the last is (d_g - 1) / (t p) M.
"""

from __future__ import annotations

from dataclasses import dataclass

from realrl.mesh.device_mesh import ParallelStrategy


@dataclass(frozen=True)
class Baseline:
    """Cost of one rank in bytes, rounded up.

    Attributes:
        bytes_received: from other ranks.
        peak_bytes: largest number of parameter bytes held.
        redundant_bytes: parameter bytes that are held twice during generation.
    """

    name: str
    bytes_received: int
    peak_bytes: int
    redundant_bytes: int


def deepspeed_chat(model_bytes: int, training: ParallelStrategy) -> Baseline:
    """Every rank gathers the whole model from all ranks, over which it is spread evenly (ZeRO-3)."""
    n = training.n_devices
    return Baseline("DeepSpeed-Chat", _share(model_bytes, n - 1, n), model_bytes, _share(model_bytes, 1, n))


def hybridflow_v(model_bytes: int, training: ParallelStrategy) -> Baseline:
    """Every rank gathers the whole model inside its training replica and takes its slice by the plain grouping."""
    n = training.tp * training.pp
    return Baseline("HybridFlow-V", _share(model_bytes, n - 1, n), model_bytes, _share(model_bytes, 1, n))


def hybrid_engine(model_bytes: int, training: ParallelStrategy, generation: ParallelStrategy) -> Baseline:
    """Every rank gathers the missing parts of its generation slice inside its micro data-parallel group.

    Meant for nested strategies: p_g divides p and t_g divides t.
    """
    n, n_generation = training.tp * training.pp, generation.tp * generation.pp
    received = _share(model_bytes, max(n - n_generation, 0), n * n_generation)
    return Baseline("3D-HybridEngine", received, _share(model_bytes, 1, n_generation), 0)


def _share(num_bytes: int, numerator: int, denominator: int) -> int:
    return -(-num_bytes * numerator // denominator)
