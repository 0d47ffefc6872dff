"""The compiled inner loops of the search: `fusion.cpp`, by way of ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import accumulate, chain
from pathlib import Path

import numpy as np
import numpy.typing as npt

from realrl import compiler
from realrl.compiler import Library, UnavailableError
from realrl.files import cache_dir
from realrl.plan.fusion.listing import NO_LIMIT, Rule
from realrl.plan.fusion.problem import Problem, Words
from realrl.plan.fusion.search.annealing import Annealed, Settings
from realrl.plan.fusion.search.climb import Kernels, Listed
from realrl.plan.fusion.search.shifting import Shifted

_LIBRARY = Library(
    "fusion",
    (Path(__file__).parent / "fusion.cpp",),
    compiler.AS_PYTHON,
    "the search for fused schedules",
    "with one, the search is faster",
)
_pointer, _long = ctypes.c_void_p, ctypes.c_int64
_ARGUMENTS = {
    "fusion_list": (*(_pointer,) * 4, ctypes.c_double, ctypes.c_double, ctypes.c_uint64, *(_pointer,) * 3),
    "fusion_anneal": (
        _pointer, _pointer, _long, ctypes.c_double, _pointer, _long, _long, ctypes.c_uint64, _pointer, _pointer,
    ),
    "fusion_cross": (*(_pointer,) * 4, _long, _pointer, _long, ctypes.c_double, _pointer),
    "fusion_evaluate": (_pointer, _pointer),
    "fusion_shift": (*(_pointer,) * 3, _long, _long, ctypes.c_uint64, _pointer, _pointer),
}  # fmt: skip
Longs = npt.NDArray[np.int64]


class CompiledKernels(Kernels):
    """The loops of `Kernels`, a few hundred times faster, with equal results."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def listed(self, problem: Problem, rule: Rule) -> Listed | None:
        layout, words, peak = _layout(problem), _empty_words(problem), np.zeros(1, dtype=np.int64)
        quotas = _longs(rule.quotas or (NO_LIMIT,) * problem.n_stages)
        caps, weights = _longs(problem.caps), np.array(rule.weights, dtype=np.float64)
        paces = None if rule.paces is None else np.array(rule.paces, dtype=np.float64)
        latency = self._library.fusion_list(
            layout.ctypes.data, caps.ctypes.data, quotas.ctypes.data, weights.ctypes.data, rule.noise,
            -1.0 if rule.patience is None else rule.patience, rule.seed, None if paces is None else paces.ctypes.data,
            peak.ctypes.data, words.ctypes.data,
        )  # fmt: skip
        return None if latency < 0 else Listed(latency, int(peak[0]), lambda: _split(problem, words))

    def evaluated(self, problem: Problem, words: Words) -> int | None:
        layout, own = _layout(problem), _joined(words)
        latency = self._library.fusion_evaluate(layout.ctypes.data, own.ctypes.data)
        return None if latency < 0 else int(latency)

    def annealed(self, problem: Problem, words: Words, settings: Settings) -> Annealed:
        layout, targets, outcome = _layout(problem), _longs(settings.targets), np.zeros(2, dtype=np.int64)
        temperatures = np.array(settings.temperatures, dtype=np.float64)
        own = _joined(words)
        n_tried = self._library.fusion_anneal(
            layout.ctypes.data, targets.ctypes.data, settings.limit, settings.weight, temperatures.ctypes.data,
            len(temperatures), settings.n_moves, settings.seed, outcome.ctypes.data, own.ctypes.data,
        )  # fmt: skip
        return Annealed(_split(problem, own), int(outcome[0]), int(outcome[1]), n_tried)

    def crossed(
        self, problem: Problem, first: Words, second: Words, times: Sequence[int], settings: Settings
    ) -> Words | None:
        layout, cuts, targets, own = _layout(problem), _longs(times), _longs(settings.targets), _empty_words(problem)
        one, other = _joined(first), _joined(second)
        n_children = self._library.fusion_cross(
            layout.ctypes.data, one.ctypes.data, other.ctypes.data, cuts.ctypes.data, len(cuts), targets.ctypes.data,
            settings.limit, settings.weight, own.ctypes.data,
        )  # fmt: skip
        return _split(problem, own) if n_children else None

    def shifted(self, problem: Problem, words: Words, *, enough: int, n_steps: int, seed: int) -> Shifted:
        layout, mirrored, caps = _layout(problem), _layout(problem.reversed), _longs(problem.caps)
        own, latency = _joined(words), np.zeros(1, dtype=np.int64)
        n_listed = self._library.fusion_shift(
            layout.ctypes.data, mirrored.ctypes.data, caps.ctypes.data, enough, n_steps, seed,
            latency.ctypes.data, own.ctypes.data,
        )  # fmt: skip
        return Shifted(_split(problem, own), int(latency[0]), n_listed)


def kernels() -> tuple[Kernels, str]:
    """Return the inner loops to search with, and the reason why they are not compiled, or nothing."""
    try:
        return CompiledKernels(load()), ""
    except UnavailableError as error:
        return Kernels(), str(error)


@cache
def load() -> ctypes.CDLL:
    """Return the library; the first call on a machine compiles it.

    Raises:
        UnavailableError: there is no compiler, or ``REALRL_KERNELS=0``.
    """
    functions = {name: (_long, arguments) for name, arguments in _ARGUMENTS.items()}
    return compiler.load(_LIBRARY, functions, lambda: cache_dir() / "kernels")


@lru_cache(maxsize=16)
def _layout(problem: Problem) -> Longs:
    """Return the numbers of a problem, but for the caps, as fusion.cpp reads them."""
    begins = accumulate(map(len, problem.devices), initial=0)
    devices = (device for of_stage in problem.devices for device in of_stage)
    return _longs(
        (
            problem.n_devices, problem.n_stages, problem.work, max(problem.path), *problem.n_micro_batches,
            *problem.pipeline, *problem.position, *problem.last, *begins, *problem.duration, *problem.activation,
            *problem.path, *devices,
        )
    )  # fmt: skip


def _joined(words: Words) -> Longs:
    return np.fromiter(chain.from_iterable(words), dtype=np.int64)


def _longs(numbers: Sequence[int]) -> Longs:
    return np.array(numbers, dtype=np.int64)


def _empty_words(problem: Problem) -> Longs:
    return np.empty(sum(_lengths(problem)), dtype=np.int64)


@lru_cache(maxsize=16)
def _lengths(problem: Problem) -> tuple[int, ...]:
    return tuple(sum(problem.n_micro_batches[letter // 2] for letter in own) for own in problem.letters_on)


def _split(problem: Problem, words: Longs) -> Words:
    listed, at, split = words.tolist(), 0, []
    for length in _lengths(problem):
        split.append(tuple(listed[at : at + length]))
        at += length
    return tuple(split)
