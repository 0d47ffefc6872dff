"""Plans by methods of others, to compare with those that the search finds: on the same model of costs and memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from realrl.search.methods.hybridflow import hybridflow
from realrl.search.methods.layout import Plan
from realrl.search.methods.mcmc import mcmc
from realrl.search.methods.placements import (
    colocate,
    data,
    deepspeed_chat,
    nemo_aligner,
    openrlhf,
    real_heuristic,
    split,
    standalone,
)
from realrl.search.problem import Problem


@dataclass(frozen=True)
class Method:
    """A named way to a plan.

    Attributes:
        summary: what it does, in one line.
        source: where it comes from; empty for an own one.
        place: ``place(problem, seed)`` -> plan; raises `AllocationError` with the reason if none fits.
    """

    name: str
    summary: str
    source: str
    place: Callable[[Problem, int], Plan]


_HYBRIDFLOW = 'Sheng et al. 2025, "HybridFlow"'
_REAL = 'Mei et al. 2025, "ReaL"'
_ALL = (
    Method("data", "all calls data-parallel on all devices", "", data),
    Method("colocate", "all calls on all devices, each with the quickest strategy", f"{_HYBRIDFLOW}, 8.3", colocate),
    Method("split", "policy and reference on one half, all others on the other", f"{_HYBRIDFLOW}, 8.3", split),
    Method("standalone", "a mesh for each role", f"{_HYBRIDFLOW}, 8.3", standalone),
    Method(
        "deepspeed_chat",
        "all calls on all devices; ZeRO in training, tensor parallelism in generation",
        'Yao et al. 2023, "DeepSpeed-Chat"',
        deepspeed_chat,
    ),
    Method(
        "openrlhf",
        "a mesh for each role and one for generation; ZeRO in training, tensor parallelism in generation",
        'Hu et al. 2024, "OpenRLHF"',
        openrlhf,
    ),
    Method(
        "nemo_aligner",
        "as split, with one strategy for all calls of a role",
        'Shen et al. 2024, "NeMo-Aligner"',
        nemo_aligner,
    ),
    Method(
        "real_heuristic",
        "one strategy on all devices: tensor parallelism in the node, pipelines as memory asks",
        f"{_REAL}, 8",
        real_heuristic,
    ),
    Method(
        "hybridflow",
        "the best partition of the roles and division of the devices, by stages",
        f"{_HYBRIDFLOW}, 6",
        hybridflow,
    ),
    Method("mcmc", "a random walk from the symmetric plan", f"{_REAL}, 5.2", mcmc),
)

METHODS: Mapping[str, Method] = {method.name: method for method in _ALL}
"""Methods by name."""
