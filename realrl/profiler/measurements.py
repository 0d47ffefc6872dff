"""Raw measurements of a profile as a file, and the hardware that is fitted to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import get_args

import msgspec

from realrl.errors import ConfigError
from realrl.files import read_input
from realrl.plan.memory.formulas.local import Kernels
from realrl.plan.parameters.specs import DTYPE_BYTES
from realrl.profiler.hardware_files import hardware_text, named_hardware
from realrl.profiler.machine import Machine
from realrl.shape import DecoderConfig
from realrl.sim.fit import Measured, fit
from realrl.sim.hardware import Hardware
from realrl.sim.probes import Bench, Kind

_MOST_BYTES = 100_000_000


class Measurements(msgspec.Struct, frozen=True):
    """Measurements of a profile.

    Attributes:
        experiment: its name.
        machine: one worker's device.
        n_workers: workers that computed at the same time.
        models: name -> model, in the dtype of its computations.
        message_s, event_s, start_s: see `realrl.sim.hardware.Host`.
        measured: probes and their seconds.
    """

    experiment: str
    machine: Machine
    n_workers: int
    models: dict[str, DecoderConfig]
    message_s: float
    event_s: float
    start_s: float
    measured: list[Measured]

    def encoded(self) -> bytes:
        """Return the content of a file."""
        return msgspec.json.encode(self)


def read_measurements(paths: Sequence[str]) -> Measurements:
    """Read files of measurements of one machine, and put them together.

    Probes without a model, and the seconds of messages, events and the start, are those of the first file.

    Raises:
        ConfigError: a file cannot be read, or holds something else; or they are of different machines, of different
            numbers of workers, or of kernels that generate in different ways.
    """
    found = [_read(path) for path in paths]
    first = found[0]
    for path, other in zip(paths[1:], found[1:], strict=True):
        if _origin(other) != _origin(first):
            raise ConfigError(
                f"--from {path} is of {other.n_workers} x {other.machine.name}, and {paths[0]} of {first.n_workers} x "
                f"{first.machine.name}",
                remedy="Fit measurements of one machine with one number of workers; make a file for each.",
            )
    models: dict[str, DecoderConfig] = {}
    measured = [one for one in first.measured if not one.probe.model]
    for place, part in enumerate(found):
        names = {name: name if name not in models else f"{name}_{place + 1}" for name in part.models}
        models |= {names[name]: model for name, model in part.models.items()}
        measured += [
            Measured(replace(one.probe, model=names[one.probe.model]), one.seconds)
            for one in part.measured
            if one.probe.model
        ]
    experiments = ", ".join(dict.fromkeys(part.experiment for part in found))
    return msgspec.structs.replace(first, experiment=experiments, models=models, measured=measured)


def _origin(found: Measurements) -> tuple[object, ...]:
    """Return what measurements that are fitted together have in common."""
    kernels = found.machine.kernels
    return (
        found.machine.name,
        found.machine.kind,
        found.n_workers,
        kernels["generation_bytes"],
        kernels["packs_weights"],
    )


def _read(path: str) -> Measurements:
    remedy = "Give a file that realrl profile --measurements wrote."
    try:
        found = msgspec.json.decode(read_input(Path(path), most_bytes=_MOST_BYTES), type=Measurements)
        kernels = asdict(Kernels(**found.machine.kernels))
    except OSError as error:
        raise ConfigError(f"--from {path} cannot be read: {error.strerror or error}", remedy=remedy) from error
    except (ValueError, TypeError) as error:
        raise ConfigError(f"--from {path} holds no measurements: {error}", remedy=remedy) from error
    if {DTYPE_BYTES[model.dtype] for model in found.models.values()} == {kernels["generation_bytes"]}:
        kernels["generation_bytes"] = None  # each model's own
    return msgspec.structs.replace(found, machine=msgspec.structs.replace(found.machine, kernels=kernels))


def fitted_hardware(found: Measurements, base: str) -> Hardware:
    """Return hardware fitted to measurements.

    Args:
        base: name or file of hardware that has what is not measured; "" for one with this kind of device.

    Raises:
        ConfigError: too little was measured.
    """
    machine, n = found.machine, found.n_workers
    like = _like(machine, base)
    host = replace(like.host, message_s=found.message_s, event_s=found.event_s, start_s=found.start_s)
    kind = "cuda" if machine.kind == "cuda" else "cpu"
    device = replace(like.device, kind=kind, memory_bytes=float(machine.memory_bytes))
    name = f"{machine.name}, {n} worker{'s' if n > 1 else ''}"
    bench = Bench(found.models, n, Kernels(**machine.kernels))
    return fit(found.measured, bench, replace(like, name=name, device=device, host=host))


def fitted_text(found: Measurements, hardware: Hardware, base: str) -> str:
    """Return the content of a hardware file."""
    n, classes = found.n_workers, hardware.profile.errors if hardware.profile is not None else {}
    missing = [kind for kind in get_args(Kind) if kind not in classes]
    lines = [
        f"Measured by realrl profile {found.experiment}, with {n} worker{'s' if n > 1 else ''} at work at the same",
        f"time; holds for as many. Models: {', '.join(_described(found.models))}.",
        "Rates, bandwidths and overheads are what the engine reached, so that efficiencies are 1. Errors are those of",
        "the costs' forms, as |predicted / measured - 1|; median and worst are of sizes that the fit has not seen.",
        f"Not measured, and taken from '{_like(found.machine, base).name}': links.node, host.bytes_per_s,",
        "disk_bytes_per_s.",
    ]
    if missing:
        lines.append(f"Not measured here either: {', '.join(missing)}.")
    return hardware_text(hardware, lines)


def _like(machine: Machine, base: str) -> Hardware:
    return named_hardware(base or ("h200" if machine.kind == "cuda" else "two_cores"))


def _described(models: Mapping[str, DecoderConfig]) -> Iterable[str]:
    return (f"{name} ({m.n_layers} blocks of {m.hidden_size}, {m.dtype})" for name, m in models.items())
