"""Facts that a worker tells the master of a profile. Imports no torch."""

from __future__ import annotations

from typing import Any

import msgspec

SECONDS = "seconds"
"""Metric of a `CallDone`: the median over the repetitions of a probe."""
REPETITION = "repetition"
"""The same: the seconds of one with all that it takes beside, such as other collectives in a row, on average."""


class Machine(msgspec.Struct, frozen=True):
    """One worker's device.

    Attributes:
        name: the processor or the accelerator, in words.
        kind: "cpu" or "cuda".
        memory_bytes: memory of the device, or the worker's share of it.
        kernels: see `realrl.plan.memory.formulas.local.Kernels`.
    """

    name: str
    kind: str
    memory_bytes: int
    kernels: dict[str, Any]
