"""Refusal of reductions over ranks of which some got no sample of a call.

A batch of fewer samples than data-parallel ranks comes about where others replace dropped ones, or data end. Ranks
without samples do not enter the interface: a reduction by the others would wait for them for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NoReturn

from realrl.algo.api import Model
from realrl.errors import CallError


def without(idle_ranks: Sequence[int], model: Model, call: str) -> Model:
    """Return the model as it is, or with an engine that refuses to reduce if there are such ranks."""
    return replace(model, engine=_EngineOfSome(model.engine, idle_ranks, call)) if idle_ranks else model


class _EngineOfSome:
    """An engine on a rank with samples, while others have none."""

    def __init__(self, engine: Any, idle_ranks: Sequence[int], call: str) -> None:
        self._engine, self._call = engine, call
        self._idle_ranks = idle_ranks

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def all_reduce(self, tensor: object, op: str = "sum") -> NoReturn:
        others = ", ".join(map(str, self._idle_ranks))
        raise CallError(
            f"it reduces over all workers, but this batch has too few samples for that: workers without any: {others}",
            remedy="Reduce in a call behind the last one that may drop samples, as its batches are whole, or in the "
            f"train_step; or give this call a single data-parallel rank: allocation.calls.{self._call}=d1@0:0.",
        )
