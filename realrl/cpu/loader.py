"""The compiled kernels: built with the machine's C++ compiler at their first use, kept in the cache folder.

Their threads are those of torch's own OpenMP runtime. With a second runtime in the process, the threads of either would
wait for work actively while those of the other compute.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from realrl import compiler
from realrl.compiler import Library, UnavailableError
from realrl.files import cache_dir

logger = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent / "kernels"
_MAIN = "kernels.cpp"
# a product and a sum are rounded as they are written: the compiler may not choose differently from place to place
_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-fopenmp", "-ffp-contract=off")
_AVX2 = ("avx2", "fma")  # features as Linux names them; the CPU must have all of these, or all of the next ones
_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "fma")
_BF16 = "avx512_bf16"
_AMX = ("amx_tile", "amx_bf16")
_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA = 158, 0x1023, 18
_OPENMP_RUNTIME = re.compile(r"/lib(?:gomp|iomp5)[^/]*\.so[^/]*$")

_pointer, _long, _int, _float = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
_ARGUMENTS = {
    "packed_size": (_long, _long, _int),
    "pack": (_pointer, _pointer, _long, _long, _long, _pointer, _int),
    "multiply": (_pointer, _pointer, _long, _long, _pointer, _long, _pointer, _int),
    "run_layers": (_pointer, _long, *(_pointer,) * 3, _long, *(_pointer,) * 2, _long, *(_pointer,) * 4, _int),
    "rms_norm": (_pointer, _long, _long, _pointer, _float, _pointer, _int),
    "attend": (
        _pointer, _long, *(_pointer,) * 2, _long, *(_pointer,) * 2, *(_long,) * 5, *(_pointer,) * 2, _float, _pointer,
        _int,
    ),
    "sample": (_pointer, _long, _long, _float, _int, *(_pointer,) * 3, _long, *(_pointer,) * 3, _int),
}  # fmt: skip
DTYPES = ("fp32", "bf16")


class Product(ctypes.Structure):
    """The struct of product.h."""

    _fields_ = (
        *((name, _pointer) for name in ("norm", "w", "bias")),
        *((name, _long) for name in ("n_inputs", "n_columns")),
        ("eps", _float),
        *((name, _int) for name in ("activation", "is_gated")),
    )


class Layer(ctypes.Structure):
    """The struct of layers.h."""

    _fields_ = (
        *((name, Product) for name in ("qkv", "o", "inner", "down")),
        *((name, _long) for name in ("n_heads", "n_kv_heads", "head_dim", "window")),
        ("scale", _float),
    )


def why_not() -> str | None:
    """The reason why there are no kernels here, in words; None if there are."""
    try:
        load()
    except UnavailableError as error:
        return str(error)
    return None


def describe() -> str:
    """The kernels that generation uses on this CPU, in words, with their instructions or why there are none."""
    if reason := why_not():
        return f"torch's kernels ({reason})"
    features = _features()
    return f"realrl's kernels ({'AMX' if _have_tiles(features) else 'AVX-512' if _have_avx512(features) else 'AVX2'})"


def load() -> ctypes.CDLL:
    """The kernels, each by its name and one of `DTYPES`: ``load().multiply_bf16``.

    The first call may compile, which takes some seconds.

    Raises:
        UnavailableError: a CPU without AVX2, no compiler, or ``REALRL_KERNELS=0``.
    """
    outcome = _load()
    if isinstance(outcome, str):
        raise UnavailableError(outcome)
    return outcome


@cache
def _load() -> ctypes.CDLL | str:
    try:
        if os.environ.get("REALRL_KERNELS") == "0":
            raise UnavailableError("REALRL_KERNELS=0 turns realrl's off")
        library = _open(build(cache_folder(), _features()))
    except UnavailableError as error:
        logger.debug("no kernels: %s", error)
        return str(error)
    return library


def cache_folder() -> Path:
    """The folder of the kernels; raises UnavailableError if there is no home."""
    try:
        return cache_dir() / "kernels"
    except RuntimeError as error:  # there is no home
        raise UnavailableError(f"there is no folder to compile realrl's in: {error}") from error


@cache
def _features() -> tuple[str, ...]:
    features = cpu_features(platform.system(), platform.machine(), Path("/proc/cpuinfo"))
    if _have_tiles(features) and not _may_use_tiles():
        features = [name for name in features if name not in _AMX]
    return tuple(features)


def cpu_features(system: str, machine: str, cpu_info: Path) -> list[str]:
    """The features of this CPU that the kernels use; raises UnavailableError if they cannot run on it."""
    if (system, machine) != ("Linux", "x86_64"):
        raise UnavailableError(f"realrl's are for Linux on x86_64, this is {system} on {machine}")
    try:
        found = re.search(r"^flags\s*:(.*)$", cpu_info.read_text(encoding="utf-8", errors="replace"), re.MULTILINE)
    except OSError as error:
        raise UnavailableError(f"it is not known what the CPU has: {error}") from error
    flags = found[1].split() if found else []
    if not _have_avx512(flags):
        if missing := [name for name in _AVX2 if name not in flags]:
            raise UnavailableError(f"the CPU has no {', '.join(missing)}")
        return list(_AVX2)
    features = list(_AVX512)
    if _BF16 in flags:
        features.append(_BF16)
        if _have_tiles(flags):
            features.extend(_AMX)
    return features


def _have_avx512(features: Sequence[str]) -> bool:
    return set(_AVX512) <= set(features)


def _have_tiles(features: Sequence[str]) -> bool:
    return set(_AMX) <= set(features)


def _may_use_tiles() -> bool:
    """Ask the system for the right to use the matrix unit; True if it is given."""
    ask = ctypes.CDLL(None).syscall
    ask.argtypes, ask.restype = (_long, _long, _long), _long
    return not ask(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XTILEDATA)


def build(folder: Path, features: Sequence[str]) -> Path:
    """Find the library for this source, compiler and CPU in `folder`, or compile it there.

    Raises:
        UnavailableError: no compiler, one that fails, or a folder that cannot be used.
    """
    main = _FOLDER / _MAIN
    others = sorted(path for path in _FOLDER.iterdir() if path.suffix in (".cpp", ".h") and path != main)
    flags = (*_FLAGS, *map(_option, features), *(("-DREALRL_TILES",) if _have_tiles(features) else ()))
    return compiler.build(
        folder,
        Library("kernels", (main, *others), flags, "the kernels of generation", "with one, generation is faster"),
    )


def _option(feature: str) -> str:
    """The compiler's option for a feature: avx512_bf16 is -mavx512bf16, amx_tile is -mamx-tile."""
    return "-m" + feature.replace("avx512_", "avx512").replace("_", "-")


def _open(path: Path) -> ctypes.CDLL:
    try:
        ctypes.CDLL(_openmp_runtime(), ctypes.RTLD_GLOBAL)
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise UnavailableError(f"realrl's cannot be loaded: {error}") from error
    for name, arguments in _ARGUMENTS.items():
        for dtype in DTYPES:
            function = getattr(library, f"{name}_{dtype}")
            function.argtypes, function.restype = arguments, _long if name == "packed_size" else None
    return library


def _openmp_runtime() -> str:
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        path = line.split(maxsplit=5)[-1]
        if _OPENMP_RUNTIME.search(path):
            return path
    raise UnavailableError("torch has no OpenMP runtime that realrl's could share")
