"""Least squares of the costs' forms: the hardware whose seconds agree best with measured ones.

The sum of squares of log(predicted / measured) is minimised over the logarithms of the parameters, each class of
measurements with the same weight, by steps of Levenberg and Marquardt (Marquardt 1963, "An algorithm for least-squares
estimation of nonlinear parameters"). Large ones count about as their absolute values (the pseudo-Huber loss), since a
machine is now and then slow. A pull towards the values to begin with decides where measurements do not: these count as
if each were known up to a factor of e**1.5, and measurements up to the scatter that a first fit leaves.

Invariants of `fit`:
    - a third of each class is held out, and its errors are those of a fit that has not seen it;
    - what is returned is the hardware that the errors are of, with numbers as they stand in a file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, cast, get_args

import numpy as np

from realrl.errors import ConfigError
from realrl.shape import DType
from realrl.sim.costs.flops import Array
from realrl.sim.hardware import GENERATION, LIMITS, Device, FitError, Hardware, Host, Link, Profile, unit_of
from realrl.sim.probes import CALLS, Bench, Kind, Probe, computing_dtypes, decoding_dtypes, seconds_of

LEAST_POINTS = 4
_USUAL = 0.1  # |log(predicted / measured)| from which on it counts less than its square
_WIDTH = 1.5  # of what is known beforehand about the logarithm of a parameter
_FIRST_SCATTER = 0.01
_LEAST_SCATTER = 1e-4
_MOST_STEPS, _FEW_STEPS = 60, 12
_STEP = 1e-4  # of a derivative
_DIGITS = 5
_RATES = ("bytes_per_s", "memory_efficiency", "efficiency")
_TENSORS = 9  # of a block, about
_LEAST = 1e-7  # of seconds and tokens, which may be 0

_GROUPS: tuple[tuple[Kind, ...], ...] = (
    ("products", "inference", "train_step"),
    ("generate",),
    ("copies",),
    ("collectives",),
    ("reallocs",),
    ("rows",),
    ("calls",),
    ("rewards",),
)
"""Classes whose forms share parameters; a later group takes what an earlier one has found."""


@dataclass(frozen=True)
class Measured:
    """A probe and the seconds that it took.

    Attributes:
        seconds: of a worker, the median.
        scatter: standard deviation of the logarithm of the workers' seconds; 0 where there is no telling.
    """

    probe: Probe
    seconds: float
    scatter: float = 0.0


def fit(measured: Sequence[Measured], bench: Bench, base: Hardware) -> Hardware:
    """Return hardware fitted to measurements.

    Args:
        measured: classes that no probe is of keep the values of `base`.
        bench: what the probes computed with.
        base: values to begin with.

    Raises:
        ConfigError: a class has fewer than `LEAST_POINTS` measurements, or one that took no time.
    """
    kinds = [kind for kind in get_args(Kind) if any(one.probe.kind == kind for one in measured)]
    for kind in kinds:
        _check([one for one in measured if one.probe.kind == kind], kind)
    hardware = base
    if bench.models:
        hardware = _reaching(base, bench)
    for group in _GROUPS:
        seen = [one for kind in group if kind in kinds for one in _parts(measured, kind)[0]]
        if seen:
            hardware = _fitted(seen, hardware, bench, group)
    scatter = [one.scatter for one in measured if one.probe.kind in CALLS and one.scatter]
    if scatter:
        most = LIMITS[unit_of(Device, "scatter")][1]
        hardware = replace(hardware, device=replace(hardware.device, scatter=min(most, float(np.mean(scatter)))))
    hardware = _rounded(hardware)
    errors = {kind: _error(*_parts(measured, kind), hardware, bench) for kind in kinds}
    return replace(hardware, profile=Profile(bench.n_workers, tuple(bench.models), errors))


def _check(members: Sequence[Measured], kind: Kind) -> None:
    if any(one.seconds <= 0 for one in members):
        raise ConfigError(f"a measurement of {kind} took no time", remedy="Measure larger sizes.")
    if len(members) < LEAST_POINTS:
        raise ConfigError(
            f"{len(members)} measurement{'s' if len(members) > 1 else ''} of {kind} cannot be fitted, it takes "
            f"{LEAST_POINTS}",
            remedy="Measure more sizes.",
        )


def _parts(measured: Sequence[Measured], kind: Kind) -> tuple[list[Measured], list[Measured]]:
    """Return the measurements of a class that are fitted, and those held out: every third, by seconds."""
    members = sorted((one for one in measured if one.probe.kind == kind), key=lambda one: one.seconds)
    held_out = members[1:-1:3]  # the largest and the smallest are fitted
    return [one for one in members if one not in held_out], held_out


def _error(seen: Sequence[Measured], held_out: Sequence[Measured], hardware: Hardware, bench: Bench) -> FitError:
    of_seen, of_held_out = (_relative_errors(some, hardware, bench) for some in (seen, held_out))
    digits = 4
    return FitError(
        n_points=len(seen) + len(held_out),
        n_held_out=len(held_out),
        median=round(float(np.median(of_held_out)), digits),
        worst=_up(of_held_out, digits),
        worst_fitted=_up(of_seen, digits),
    )


def _up(errors: Array, digits: int) -> float:
    scale = 10.0**digits
    return float(np.ceil(errors.max() * scale) / scale)


def _relative_errors(measured: Sequence[Measured], hardware: Hardware, bench: Bench) -> Array:
    predicted = seconds_of([one.probe for one in measured], hardware, bench)
    return cast(Array, np.abs(predicted / np.array([one.seconds for one in measured]) - 1.0))


# ---------------------------------------------------------------- parameters

_Get = Callable[[Hardware], float]
_Set = Callable[[Hardware, float], Hardware]


@dataclass(frozen=True)
class _Parameter:
    """A positive value of hardware that is fitted."""

    get: _Get
    set: _Set
    unit: str
    is_rate: bool = False  # of computing, or of reading memory

    @property
    def bounds(self) -> tuple[float, float]:
        """Logarithms of the least and the largest value that a file may have."""
        least, most = LIMITS[self.unit]
        return math.log(max(least, _LEAST)), math.log(most)

    def log_of(self, hardware: Hardware) -> float:
        """Return the logarithm of the value that hardware has, inside of the bounds."""
        least, most = self.bounds
        return min(max(math.log(max(self.get(hardware), _LEAST)), least), most)


def _of_device(name: str) -> _Parameter:
    def put(hardware: Hardware, value: float) -> Hardware:
        changes: dict[str, Any] = {name: value}
        return replace(hardware, device=replace(hardware.device, **changes))

    return _Parameter(lambda h: getattr(h.device, name), put, unit_of(Device, name), is_rate=name in _RATES)


def _rate(dtype: DType) -> _Parameter:
    def put(hardware: Hardware, value: float) -> Hardware:
        device = hardware.device
        peaks = {**device.flops_per_s, str(dtype): value / device.efficiency}
        return replace(hardware, device=replace(device, flops_per_s=peaks))

    return _Parameter(lambda h: h.device.rate(dtype), put, "FLOP/s", is_rate=True)


def _in_generation(name: str) -> _Parameter:
    if name not in GENERATION:
        return _of_device(name)

    def put(hardware: Hardware, value: float) -> Hardware:
        device = hardware.device
        return replace(hardware, device=replace(device, generation={**device.generation, name: value}))

    return _Parameter(lambda h: getattr(h.device.generating, name), put, unit_of(Device, name), is_rate=name in _RATES)


def _of_link(which: str, name: str) -> _Parameter:
    def put(hardware: Hardware, value: float) -> Hardware:
        link = replace(getattr(hardware.links, which), **{name: value})
        return replace(hardware, links=replace(hardware.links, **{which: link}))

    return _Parameter(lambda h: getattr(getattr(h.links, which), name), put, unit_of(Link, name))


def _of_host(name: str) -> _Parameter:
    def put(hardware: Hardware, value: float) -> Hardware:
        changes: dict[str, Any] = {name: value}
        return replace(hardware, host=replace(hardware.host, **changes))

    return _Parameter(lambda h: getattr(h.host, name), put, unit_of(Host, name))


def _parameters(group: Sequence[Kind], probes: Sequence[Probe], bench: Bench) -> list[_Parameter]:
    """Return the parameters that probes of a group of classes depend on."""
    present = {probe.kind for probe in probes}
    if group == ("copies",):
        return [_of_link("host", "latency_s"), _of_link("host", "bytes_per_s")]
    if group == ("collectives",):
        return [_of_link("device", "latency_s"), _of_link("device", "bytes_per_s")]
    # a fit needs a value to depart from, where a file has none
    if group == ("reallocs",):
        return [replace(_of_device("tensor_s"), get=lambda h: h.device.tensor_s or h.device.block_s / _TENSORS)]
    if group == ("rows",):
        pull = replace(_of_host("pull_s"), get=lambda h: h.host.pull_s or 2 * h.host.message_s)
        row = replace(_of_host("row_s"), get=lambda h: h.host.row_s or h.host.sample_s)
        return [pull, row, _of_host("socket_bytes_per_s")]
    if group == ("calls",):
        return [_of_host("call_s"), _of_host("sample_s")]
    if group == ("rewards",):
        return [_of_host("reward_s"), replace(_of_host("pool_s"), get=lambda h: h.host.pool_s or h.host.call_s)]
    computing, decoding = computing_dtypes(bench), decoding_dtypes(bench)
    if group == ("generate",):
        names = [*GENERATION, "token_s"]
        if computing.isdisjoint(decoding):
            names.remove("efficiency")  # the rate of the dtype says it
            return [*map(_rate, sorted(decoding)), *map(_in_generation, names)]
        return [*map(_in_generation, names)]
    names = ["bytes_per_s", "half_tokens"]
    if present & {"inference", "train_step"}:
        names += ["activation_efficiency", "attention_efficiency", "block_s", "pass_s"]
    if "train_step" in present:
        names += ["backward_slowdown"]
    names += ["size_s"] * any(probe.is_new for probe in probes) + ["alone"] * any(probe.is_alone for probe in probes)
    fork = replace(_of_device("fork_s"), get=lambda h: h.device.fork_s or h.device.block_s)
    forks = [fork] * any(probe.n_alike > 1 for probe in probes)
    return [*map(_rate, sorted(computing)), *map(_of_device, names), *forks]


def _reaching(hardware: Hardware, bench: Bench) -> Hardware:
    """Return hardware whose peaks are what is reached, and that has one for every dtype."""
    device = hardware.device
    known = {dtype: peak * device.efficiency for dtype, peak in device.flops_per_s.items()}
    dtypes = computing_dtypes(bench) | decoding_dtypes(bench)
    rates: dict[str, float] = {dtype: known.get(dtype, max(known.values())) for dtype in sorted(dtypes)}
    reached: Device = replace(
        device,
        flops_per_s=rates,
        efficiency=1.0,
        attention_efficiency=device.attention_efficiency / device.efficiency,
        bytes_per_s=device.stream,
        memory_efficiency=1.0,
        activation_efficiency=device.activation_efficiency / device.memory_efficiency,
        generation={},
    )
    links = replace(hardware.links, device=_reached(hardware.links.device), host=_reached(hardware.links.host))
    return replace(hardware, device=reached, links=links)


def _reached(link: Link) -> Link:
    return Link(link.latency_s, link.bytes_per_s * link.efficiency, 1.0)


# ---------------------------------------------------------------- least squares


def _fitted(seen: Sequence[Measured], base: Hardware, bench: Bench, group: Sequence[Kind]) -> Hardware:
    probes, seconds = [one.probe for one in seen], np.log([one.seconds for one in seen])
    parameters = _parameters(group, probes, bench)
    counts = {kind: sum(probe.kind == kind for probe in probes) for kind in group}
    weights = np.array([counts[probe.kind] ** -0.5 for probe in probes])
    start = np.array([parameter.log_of(base) for parameter in parameters])
    least, most = np.array([parameter.bounds for parameter in parameters]).T

    def hardware_of(values: Array) -> Hardware:
        found = base
        for parameter, value in zip(parameters, np.exp(values.clip(least, most)).tolist(), strict=True):
            found = parameter.set(found, value)
        return found

    def misfit(values: Array) -> Array:
        found: Array = np.log(seconds_of(probes, hardware_of(values), bench)) - seconds
        return found

    def fit_from(starts: Sequence[Array], scatter: float, n_steps: int, *, forgives: bool = False) -> Array:
        pull = scatter / (np.sqrt(len(probes) / len(counts)) * _WIDTH)

        def residuals(values: Array) -> Array:
            found = _forgiven(misfit(values)) if forgives else misfit(values)
            return np.concatenate([weights * found, pull * (values - start)])

        ends = [least_squares(residuals, values, most_steps=n_steps) for values in starts]
        return min(ends, key=lambda values: float(residuals(values) @ residuals(values)))

    # the longer of computing and reading has a bend, and so the sum several valleys
    bends = [i for i, parameter in enumerate(parameters) if parameter.is_rate]
    ways = product(*[(-1.0, 0.0, 1.0) if i in bends else (0.0,) for i in range(len(parameters))])
    values = fit_from([start + np.array(way) for way in ways], _FIRST_SCATTER, _FEW_STEPS)
    scatter = max(_LEAST_SCATTER, float(np.sqrt(np.mean(misfit(values) ** 2))))
    values = fit_from([values], scatter, _MOST_STEPS)  # from far away, what is forgiven leads nowhere
    return hardware_of(fit_from([values], scatter, _MOST_STEPS, forgives=True))


def _forgiven(misfit: Array) -> Array:
    """Return the square root of twice the pseudo-Huber loss, with the sign of the misfit."""
    found: Array = np.sign(misfit) * _USUAL * np.sqrt(2.0 * (np.hypot(1.0, misfit / _USUAL) - 1.0))
    return found


def least_squares(residuals: Callable[[Array], Array], start: Array, *, most_steps: int = _MOST_STEPS) -> Array:
    """Return the values whose residuals have the least sum of squares, near those to begin with."""
    values: Array = start.copy()
    damping = 1e-2
    now = residuals(values)
    for _ in range(most_steps):
        steps = _STEP * np.eye(len(values))
        slopes = np.stack([(residuals(values + step) - now) / _STEP for step in steps], axis=1)
        curvature, gradient = slopes.T @ slopes, slopes.T @ now
        while damping < 1e8:
            move = np.linalg.solve(curvature + damping * np.diag(np.diag(curvature) + 1e-9), -gradient)
            then = residuals(values + move.clip(-2.0, 2.0))
            if float(then @ then) < float(now @ now):
                break
            damping *= 4.0
        else:
            return values
        gained = 1.0 - float(then @ then) / float(now @ now)
        values, now, damping = values + move.clip(-2.0, 2.0), then, damping / 4.0
        if gained < 1e-7:
            return values
    return values


def _rounded(hardware: Hardware) -> Hardware:
    """Return hardware whose numbers have few digits."""

    def of(thing: object) -> object:
        changes: dict[str, object] = {}
        for name, value in vars(thing).items():
            if isinstance(value, float):
                changes[name] = _short(value)
            elif isinstance(value, Mapping):
                changes[name] = {key: _short(number) for key, number in value.items()}
        return replace(thing, **changes)  # type: ignore[type-var]

    links = {name: of(link) for name, link in vars(hardware.links).items()}
    return replace(
        hardware,
        device=cast(Device, of(hardware.device)),
        links=replace(hardware.links, **links),  # type: ignore[arg-type]
        host=of(hardware.host),  # type: ignore[arg-type]
    )


def _short(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")
