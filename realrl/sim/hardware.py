"""Hardware as data: how fast a device computes, how fast links carry, what hosts take.

A quantity in a file is a number in the base unit of its key (seconds, bytes, bytes a second, FLOPs a second), or a text
with a unit: ``2039 GB/s``, ``200 Gb/s`` (bits), ``312 TFLOP/s``, ``5 us``.

Invariants of `hardware_from`:
    - what it returns has every value inside of the limits that `LIMITS` has for its unit;
    - a mapping with a key that is unknown, missing or of the wrong kind gives an error that names the key and the file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal, get_args

from realrl.errors import ConfigError, did_you_mean
from realrl.shape import DType

DeviceKind = Literal["cuda", "cpu"]

_DECIMAL = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BYTES = {f"{prefix}B": factor for prefix, factor in _DECIMAL.items()}
_UNITS: dict[str, dict[str, float]] = {
    "s": {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9},
    "B": _BYTES | {f"{prefix}iB": 2.0 ** (10 * n) for n, prefix in enumerate("KMGT", 1)},
    "B/s": {f"{name}/s": factor for name, factor in _BYTES.items()}
    | {f"{prefix}b/s": factor / 8 for prefix, factor in _DECIMAL.items()},
    "FLOP/s": {f"{prefix}FLOP/s": factor for prefix, factor in _DECIMAL.items()},
    "tokens": {"tokens": 1.0},
    "share": {},
    "": {},
}
LIMITS = {
    "s": (0.0, 600.0),
    "B": (1e6, 1e16),
    "B/s": (1e5, 1e14),
    "FLOP/s": (1e8, 1e17),
    "tokens": (0.0, 1e6),
    "share": (0.0, 1.0),
    "": (0.01, 100.0),
}
_MOST_UNDER_WAY = 1e8  # bytes: latency times bandwidth; those of data centers are below 1e7
_MOST_SHARE = 2.0  # of a peak; some forms are fitted with more than 1
_EXAMPLES = {"s": "5 us", "B": "80 GB", "B/s": "300 GB/s", "FLOP/s": "312 TFLOP/s", "tokens": "32", "": "0.6"}
_MEASURED = "Leave the section profile as realrl profile wrote it, or leave it out."
_TEXT = re.compile(r"\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*([A-Za-zµ/]*)\s*", re.ASCII)


def _quantity(unit: str, most: float | None = None, default: Any = MISSING) -> Any:
    return field(default=default, metadata={"unit": unit, "most": most})


@dataclass(frozen=True)
class Device:
    """One accelerator, or one worker's part of a CPU.

    Products of T tokens reach ``flops_per_s * efficiency * T / (T + half_tokens)``, unless reading their weights takes
    longer.

    Attributes:
        memory_bytes: size of its memory.
        bytes_per_s: peak bandwidth of its memory.
        memory_efficiency: share of that which reading weights, caches and optimizer state reaches.
        activation_efficiency: share of that which norms, residuals and other work on activations reaches.
        efficiency: share of the peak that products of many tokens reach.
        half_tokens: tokens at which half of that is reached.
        attention_efficiency: share of the peak that attention over packed sequences reaches.
        backward_slowdown: seconds of a backward pass over those that its FLOPs would take in a forward pass.
        block_s: seconds that a block takes beside computing, such as launches of kernels; twice that backward.
        pass_s: seconds that a micro-batch takes on each stage beside its blocks; twice that backward.
        token_s: seconds that a decoding step takes beside its blocks: sampling, and deciding who goes on.
        size_s: seconds in which libraries prepare a stage's forward products for a number of tokens that is new.
        tensor_s: seconds beside its bytes in which a reallocation packs or unpacks a tensor.
        fork_s: seconds that a block takes for a prompt computed once for eight responses; twice that backward.
        alone: times as fast as the device computes while all others of its node wait, if they share caches and cores.
        scatter: standard deviation of the logarithm of a call's seconds, from device to device and time to time.
        flops_per_s: dtype -> peak of products.
        generation: attribute of `GENERATION` -> its value in generation, where that has kernels of its own, as on CPUs.
    """

    kind: DeviceKind
    memory_bytes: float = _quantity("B")
    bytes_per_s: float = _quantity("B/s")
    memory_efficiency: float = _quantity("")
    activation_efficiency: float = _quantity("")
    efficiency: float = _quantity("")
    half_tokens: float = _quantity("tokens")
    attention_efficiency: float = _quantity("")
    backward_slowdown: float = _quantity("")
    block_s: float = _quantity("s", most=1.0)
    pass_s: float = _quantity("s", most=1.0)
    token_s: float = _quantity("s", most=1.0)
    size_s: float = _quantity("s", most=1.0)
    alone: float = _quantity("")
    flops_per_s: Mapping[str, float] = _quantity("FLOP/s")
    fork_s: float = _quantity("s", most=1.0, default=0.0)
    tensor_s: float = _quantity("s", most=1.0, default=0.0)
    scatter: float = _quantity("share", default=0.0)
    generation: Mapping[str, float] = field(default_factory=dict, metadata={"unit": None})

    @cached_property
    def generating(self) -> Device:
        """The device as generation finds it."""
        changes: dict[str, Any] = dict(self.generation)
        return replace(self, generation={}, **changes) if changes else self

    @property
    def stream(self) -> float:
        """Bytes a second that are read or written."""
        return self.bytes_per_s * self.memory_efficiency

    @property
    def activation_stream(self) -> float:
        """Bytes a second of activations that are read or written."""
        return self.bytes_per_s * self.activation_efficiency

    def rate(self, dtype: str) -> float:
        """Return the FLOPs a second of products of many tokens.

        Raises:
            ConfigError: the file has no peak for the dtype.
        """
        if dtype not in self.flops_per_s:
            raise ConfigError(
                f"the hardware file has no device.flops_per_s.{dtype}, in which a model computes",
                remedy=f"It has {', '.join(self.flops_per_s)}; add the peak of {dtype}, or set precision.",
            )
        return self.flops_per_s[dtype] * self.efficiency


GENERATION = (
    "memory_efficiency",
    "activation_efficiency",
    "efficiency",
    "half_tokens",
    "attention_efficiency",
    "block_s",
    "pass_s",
)


@dataclass(frozen=True)
class Link:
    """A way from one device to others, in one direction.

    Attributes:
        latency_s: seconds of the smallest message.
        bytes_per_s: peak bandwidth between two devices.
        efficiency: share of it that large messages reach.
        sharing: number of such ways, network cards for example, that all devices of a node share; None: every device
            has its own.
    """

    latency_s: float = _quantity("s", most=1.0)
    bytes_per_s: float = _quantity("B/s")
    efficiency: float = _quantity("")
    sharing: int | None = None

    def speed(self, n_active: int = 1) -> float:
        """Return the bytes a second of each of `n_active` devices of a node that send at the same time."""
        share = 1.0 if self.sharing is None else min(1.0, self.sharing / n_active)
        return self.bytes_per_s * self.efficiency * share


@dataclass(frozen=True)
class Links:
    """Classes of links.

    Attributes:
        device: between devices of one node.
        node: between nodes.
        host: between a device and its node's memory.
    """

    device: Link
    node: Link
    host: Link


@dataclass(frozen=True)
class Host:
    """The processes beside the devices: the master, and what a worker does around its computations.

    Attributes:
        message_s: seconds of a message between master and worker, one way.
        event_s: seconds that the master takes for an event.
        call_s: seconds that a worker takes for a call beside its passes.
        sample_s: seconds to load, read or free a sample, or to give one to a call and take what it makes of it.
        reward_s: seconds to judge a response by a function.
        pool_s: seconds to hand responses to the processes of functions, and to hear of them.
        start_s: seconds until the workers are ready.
        bytes_per_s: bandwidth of host memory, for an optimizer that lives there.
        pull_s: seconds to ask another worker for rows over a socket and to hear of them; 0 is two messages.
        row_s: seconds to read a row of a sample out of a worker's store and to put it into another's.
        socket_bytes_per_s: bandwidth of rows that are pulled over a socket.
        disk_bytes_per_s: bandwidth of writing checkpoints.
    """

    message_s: float = _quantity("s", most=1.0)
    event_s: float = _quantity("s", most=1.0)
    call_s: float = _quantity("s")
    sample_s: float = _quantity("s")
    reward_s: float = _quantity("s")
    start_s: float = _quantity("s")
    bytes_per_s: float = _quantity("B/s")
    socket_bytes_per_s: float = _quantity("B/s")
    disk_bytes_per_s: float = _quantity("B/s")
    pool_s: float = _quantity("s", default=0.0)
    pull_s: float = _quantity("s", default=0.0)
    row_s: float = _quantity("s", default=0.0)

    def pull_seconds(self, n_rows: int, n_bytes: float) -> float:
        """Return the seconds of a pull of rows, which are one key's each."""
        return (self.pull_s or 2 * self.message_s) + n_rows * self.row_s + n_bytes / self.socket_bytes_per_s


@dataclass(frozen=True)
class FitError:
    """Error of a fitted form, |predicted / measured - 1|.

    Attributes:
        n_points: measurements, those held out included.
        n_held_out: measurements that the fit did not see.
        median, worst: of those held out.
        worst_fitted: of the others.
    """

    n_points: int
    n_held_out: int
    median: float
    worst: float
    worst_fitted: float

    @property
    def bound(self) -> float:
        """Largest error over all measurements."""
        return max(self.worst, self.worst_fitted)


@dataclass(frozen=True)
class Profile:
    """Origin of a file that `realrl profile` wrote.

    Attributes:
        n_workers: workers that computed at the same time; times hold for as many on a machine.
        models: models that were measured.
        errors: class of measurements -> errors of its form.
    """

    n_workers: int
    models: tuple[str, ...]
    errors: Mapping[str, FitError]


@dataclass(frozen=True)
class Hardware:
    """Properties of a cluster's machines, which are all alike.

    Attributes:
        name: the machine, in words.
        profile: what was measured; None where the file is no result of a measurement.
    """

    name: str
    device: Device
    links: Links
    host: Host
    profile: Profile | None = None


def hardware_from(mapping: object, *, source: str) -> Hardware:
    """Read hardware from a mapping, as a YAML file holds it.

    Args:
        mapping: keys are the attributes of `Hardware` and of what it holds.
        source: name of the file, for messages.

    Raises:
        ConfigError: a key is unknown or missing, or a value is not what the key takes.
    """
    top = _section(mapping, "", tuple(part.name for part in fields(Hardware)), source, optional=("profile",))
    links = _section(top["links"], "links", tuple(part.name for part in fields(Links)), source)
    if not isinstance(top["name"], str) or not top["name"].strip():
        raise _error("name", top["name"], "is no name of a machine", source, "Write one, such as 'A100 80GB'.")
    found = Hardware(
        name=top["name"].strip(),
        device=_build(Device, top["device"], "device", source),
        links=Links(**{name: _build(Link, links[name], f"links.{name}", source) for name in links}),
        host=_build(Host, top["host"], "host", source),
        profile=_profile(top["profile"], source) if "profile" in top else None,
    )
    if found.profile is None:  # what was measured is no mistake of a unit
        _check_units(found, source)
    return found


def _check_units(hardware: Hardware, source: str) -> None:
    """Refuse values that no machine has together, because the unit of one of them is wrong.

    Raises:
        ConfigError: a share of a peak is a percentage; a link is faster than the device's memory, or its latency
            too long for its speed; reading the memory takes too long or too short a time, or the device computes too
            fast for it or too slowly.
    """
    device, peak = hardware.device, max(hardware.device.flops_per_s.values())
    shares = {f"device.{key}": value for key, value in vars(device).items() if key.endswith("efficiency")}
    shares |= {f"links.{part.name}.efficiency": getattr(hardware.links, part.name).efficiency for part in fields(Links)}
    for key, share in shares.items():
        if share > _MOST_SHARE:
            raise ConfigError(
                f"{source}: {key} is {share:.3g}, and it is a share of a peak", remedy="Write 0.6 for 60 per cent."
            )
    for name in (part.name for part in fields(Links)):
        link = getattr(hardware.links, name)
        if link.bytes_per_s > device.bytes_per_s:
            raise ConfigError(
                f"{source}: links.{name}.bytes_per_s is {link.bytes_per_s:.3g} B/s, more than device.bytes_per_s, the "
                f"{device.bytes_per_s:.3g} B/s of the memory that it reads",
                remedy="Write the units that you mean: GB/s is bytes, Gb/s is bits, an eighth of that.",
            )
        under_way = link.latency_s * link.bytes_per_s
        if under_way > _MOST_UNDER_WAY:
            raise ConfigError(
                f"{source}: links.{name}.latency_s and links.{name}.bytes_per_s give {under_way:.3g} bytes under "
                f"way at a time, and machines have at most {_MOST_UNDER_WAY:.3g}",
                remedy="Write the units that you mean, like '5 us' and '300 GB/s'.",
            )
    for key, ratio, unit, (least, most) in (
        ("device.memory_bytes", device.memory_bytes / device.bytes_per_s, "s to be read once", (1e-3, 100)),
        ("device.flops_per_s", peak / device.bytes_per_s, "FLOPs for each byte that is read", (0.5, 5000)),
    ):
        if not least <= ratio <= most:
            raise ConfigError(
                f"{source}: {key} and device.bytes_per_s give {ratio:.3g} {unit}, and machines have {least:g} to "
                f"{most:g}",
                remedy="Write the units that you mean, like '80 GB', '2 TB/s' and '312 TFLOP/s'.",
            )


def hardware_mapping(hardware: Hardware) -> dict[str, Any]:
    """Return hardware as `hardware_from` reads it, in base units."""
    mapping = asdict(hardware)
    if not hardware.device.generation:
        del mapping["device"]["generation"]
    for link in mapping["links"].values():
        if link["sharing"] is None:
            del link["sharing"]
    if hardware.profile is None:
        del mapping["profile"]
    else:
        mapping["profile"]["models"] = [*hardware.profile.models]
    return mapping


def unit_of(kind: type, name: str) -> str:
    """Return the base unit of an attribute of `Device`, `Link` or `Host`; "" for a number without one."""
    unit: str = next(part.metadata["unit"] for part in fields(kind) if part.name == name)
    return unit


def parse_quantity(value: object, unit: str) -> float | None:
    """Return a number or a text with a unit in the base unit; None if it is none of this unit."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        number = float(value) if abs(value) < 1e300 else math.inf
    else:
        match = _TEXT.fullmatch(value) if isinstance(value, str) else None
        factor = _UNITS[unit].get(match[2], None if match[2] else 1.0) if match else None
        if match is None or factor is None:
            return None
        number = float(match[1]) * factor
    return number if math.isfinite(number) else None


def _build(kind: type, mapping: object, path: str, source: str) -> Any:
    found = _section(mapping, path, tuple(part.name for part in fields(kind)), source, optional=_optional(kind))
    values: dict[str, Any] = {}
    for part in fields(kind):
        key, value = f"{path}.{part.name}", found.get(part.name)
        unit = part.metadata.get("unit")
        if part.name == "flops_per_s":
            peaks = _section(value, key, get_args(DType), source, optional=get_args(DType))
            if not peaks:
                raise _error(key, value, "has no dtype", source, "Write one, such as {bfloat16: 312 TFLOP/s}.")
            values[part.name] = {
                dtype: _number(peak, f"{key}.{dtype}", "FLOP/s", source) for dtype, peak in peaks.items()
            }
        elif part.name == "generation":
            values[part.name] = _generation(found.get("generation", {}), key, source)
        elif unit is not None and part.name in found:
            values[part.name] = _number(value, key, unit, source, most=part.metadata["most"])
        elif part.name == "kind":
            if value not in get_args(DeviceKind):
                raise _error(key, value, "is no kind of device", source, f"Use {' or '.join(get_args(DeviceKind))}.")
            values[part.name] = value
        elif unit is None:
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise _error(key, value, "is no number of network cards", source, "Use 1 or more, or leave it out.")
            values[part.name] = value
    return kind(**values)


def _generation(mapping: object, path: str, source: str) -> dict[str, float]:
    found = _section(mapping, path, GENERATION, source, optional=GENERATION)
    return {name: _number(value, f"{path}.{name}", unit_of(Device, name), source) for name, value in found.items()}


def _profile(mapping: object, source: str) -> Profile:
    found = _section(mapping, "profile", tuple(part.name for part in fields(Profile)), source)
    models, errors = found["models"], found["errors"]
    if not isinstance(models, list) or not all(isinstance(name, str) for name in models):
        raise _error("profile.models", models, "is no list of models", source, _MEASURED)
    if not isinstance(errors, Mapping):
        raise _error("profile.errors", errors, "is no mapping", source, _MEASURED)
    return Profile(
        n_workers=_count(found["n_workers"], "profile.n_workers", source),
        models=tuple(models),
        errors={str(kind): _fit_error(value, f"profile.errors.{kind}", source) for kind, value in errors.items()},
    )


def _fit_error(mapping: object, path: str, source: str) -> FitError:
    found = _section(mapping, path, tuple(part.name for part in fields(FitError)), source)
    values: dict[str, Any] = {}
    for name, value in found.items():
        if name.startswith("n_"):
            values[name] = _count(value, f"{path}.{name}", source)
            continue
        number = parse_quantity(value, "")
        if number is None or number < 0:
            raise _error(f"{path}.{name}", value, "is no relative error", source, _MEASURED)
        values[name] = number
    return FitError(**values)


def _count(value: object, key: str, source: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _error(key, value, "is no number of 1 or more", source, _MEASURED)
    return value


def _optional(kind: type) -> tuple[str, ...]:
    return tuple(p.name for p in fields(kind) if p.default is not MISSING or p.default_factory is not MISSING)


def _section(
    value: object, path: str, known: tuple[str, ...], source: str, *, optional: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Return a mapping that has known keys only, and all but the optional ones."""
    where = path or "the file"
    if not isinstance(value, Mapping):
        raise _error(where, value, "is no mapping", source, f"It has the keys {', '.join(known)}.")
    for key in value:
        if key not in known:
            name = f"{path}.{key}" if path else str(key)
            raise ConfigError(
                f"{source}: there is no key {name}." + did_you_mean(str(key), known),
                remedy=f"{where} has the keys {', '.join(known)}.",
            )
    missing = [key for key in known if key not in value and key not in optional]
    if missing:
        names = ", ".join(f"{path}.{key}" if path else key for key in missing)
        raise ConfigError(
            f"{source}: {names} {'is' if len(missing) == 1 else 'are'} missing",
            remedy="Copy the key from a file of configs/hardware, and set your machine's value.",
        )
    return dict(value)


def _number(value: object, key: str, unit: str, source: str, *, most: float | None = None) -> float:
    number = parse_quantity(value, unit)
    kinds = {"s": "time", "B": "size in bytes", "B/s": "bandwidth", "FLOP/s": "rate of computing"}
    what = kinds.get(unit, "number")
    if number is None:
        names = ", ".join(_UNITS[unit])
        units = f" Its units are {names}." if unit in kinds else ""
        raise _error(key, value, f"is no {what}", source, f"Write it like '{_EXAMPLES[unit]}'.{units}")
    if number < 0:
        raise _error(key, value, "is negative", source, f"Write it like '{_EXAMPLES[unit]}'.")
    least, greatest = LIMITS[unit]
    most = greatest if most is None else most
    if not least <= number <= most:
        text = f"is {number:.3g} {unit}".rstrip()
        raise _error(
            key,
            value,
            f"{text}, and a {what} is {least:.3g} to {most:.3g}",
            source,
            f"Write the unit that you mean, like '{_EXAMPLES[unit]}'." if unit in kinds else "Correct it.",
        )
    return number


def _error(key: str, value: object, problem: str, source: str, remedy: str) -> ConfigError:
    text = repr(value)
    shown = text if len(text) <= 60 else f"{text[:57]}..."
    return ConfigError(f"{source}: {key}={shown} {problem}", remedy=remedy)
