"""Files of fused schedules: JSON with the instance and each device's word.

    {"format": "realrl fused schedule", "version": 1,
     "n_devices": 2, "memory_caps": null, "transport": "overtaking",
     "pipelines": [{"name": "A", "n_micro_batches": 1, "stages": [[[0], 5.0, 10.0, 1.9], [[1], 5.0, 10.0, 1.9]]}],
     "words": ["F0 B0", "F1 B1"]}

A stage is [devices, forward, backward, activation]. A word's letters are the stages in the order of a count through all
pipelines, F for a forward and B for a backward: "F0 F0 B0" computes two forwards of the first stage and one backward.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from realrl.errors import UsageError
from realrl.plan.fusion.instance import Instance, Pipeline, Stage
from realrl.plan.fusion.schedule import FusedSchedule, Letter

FORMAT, VERSION = "realrl fused schedule", 1
_LETTER = re.compile(r"([FB])(0|[1-9][0-9]{0,5})")
_FIELDS = frozenset(("format", "version", "n_devices", "memory_caps", "transport", "pipelines", "words"))


def schedule_text(schedule: FusedSchedule) -> str:
    """Return the text of a schedule's file."""
    instance, number_of = schedule.instance, _numbers(schedule.instance)
    content = {
        "format": FORMAT,
        "version": VERSION,
        "n_devices": instance.n_devices,
        "memory_caps": instance.memory_caps,
        "transport": instance.transport,
        "pipelines": [
            {
                "name": p.name,
                "n_micro_batches": p.n_micro_batches,
                "stages": [[s.devices, s.forward, s.backward, s.activation] for s in p.stages],
            }
            for p in instance.pipelines
        ],
        "words": [
            " ".join(f"{'B' if x.is_backward else 'F'}{number_of[x.pipeline, x.stage]}" for x in word)
            for word in schedule.words
        ],
    }
    return json.dumps(content, indent=1) + "\n"


def read_schedule(text: str, *, where: str = "the file") -> FusedSchedule:
    """Read a schedule's file.

    Args:
        where: name of the file, for messages.

    Raises:
        UsageError: it is no such file, or its orders are not those of a schedule.
    """
    remedy = "Write it with `realrl fuse ... --out`."
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as err:
        raise UsageError(f"{where} is not JSON: {err}", remedy=remedy) from err
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise UsageError(f"{where} is not a fused schedule", remedy=remedy)
    if content.get("version") != VERSION:
        raise UsageError(f"{where} has version {content.get('version')!r}, and this reads {VERSION}", remedy=remedy)
    if set(content) != _FIELDS:
        raise UsageError(f"{where} has the fields {', '.join(sorted(map(str, content)))}", remedy=remedy)
    try:
        instance = _instance_of(content)
        letters = {number: place for place, number in _numbers(instance).items()}
        words = [[_letter_of(part, letters) for part in word.split()] for word in content["words"]]
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as err:
        raise UsageError(f"{where} has a part of the wrong kind: {err}", remedy=remedy) from err
    except UsageError as err:
        raise UsageError(f"{where}: {err.message}", remedy=err.remedy) from err
    try:
        return FusedSchedule.of_words(instance, words)
    except UsageError as err:
        raise UsageError(f"{where}: {err.message}", remedy=err.remedy or remedy) from err


def for_instance(schedule: FusedSchedule, instance: Instance, *, where: str = "the schedule") -> FusedSchedule:
    """Return the same orders for other times and activations.

    Raises:
        UsageError: the instance has another shape, or a lower memory cap than the orders need.
    """
    given, wanted = schedule.instance, instance
    if given.n_devices != wanted.n_devices:
        raise UsageError(f"{where} is for {given.n_devices} devices, and there are {wanted.n_devices}", remedy=_AGAIN)
    if len(given.pipelines) != len(wanted.pipelines):
        raise UsageError(
            f"{where} is for {len(given.pipelines)} pipelines, and there are {len(wanted.pipelines)}", remedy=_AGAIN
        )
    for ours, theirs in zip(given.pipelines, wanted.pipelines, strict=True):
        for what, a, b in (
            ("micro-batches", ours.n_micro_batches, theirs.n_micro_batches),
            ("stages", len(ours.stages), len(theirs.stages)),
        ):
            if a != b:
                raise UsageError(f"{where} has {a} {what} of {ours.name!r}, and {theirs.name!r} has {b}", remedy=_AGAIN)
        for i, (own, other) in enumerate(zip(ours.stages, theirs.stages, strict=True)):
            if own.devices != other.devices:
                raise UsageError(
                    f"{where} has stage {i} of {ours.name!r} on the devices {own.devices}, and {theirs.name!r} has it "
                    f"on {other.devices}",
                    remedy=_AGAIN,
                )
    moved = FusedSchedule(wanted, schedule.orders)
    for device, (cap, peak) in enumerate(zip(wanted.memory_caps or (), moved.peaks)):
        if peak > cap * (1 + 1e-9):
            raise UsageError(
                f"{where} holds {peak:g} of activations on device {device}, and {cap:g} fit", remedy=_AGAIN
            )
    return moved


def with_at_most(schedule: FusedSchedule, instance: Instance, *, where: str = "the schedule") -> FusedSchedule:
    """Return the same orders for other times and activations, where the instance may have more micro-batches.

    The schedule's own number of them stays.

    Raises:
        UsageError: the instance has another shape or fewer micro-batches, or a lower memory cap than the orders need.
    """
    given = schedule.instance.pipelines
    if len(given) == len(instance.pipelines):
        for ours, theirs in zip(given, instance.pipelines, strict=True):
            if ours.n_micro_batches > theirs.n_micro_batches:
                raise UsageError(
                    f"{where} has {ours.n_micro_batches} micro-batches of {ours.name!r}, and {theirs.name!r} has only "
                    f"{theirs.n_micro_batches}",
                    remedy="Give a schedule of as many micro-batches or fewer.",
                )
        instance = instance.with_micro_batches([pipeline.n_micro_batches for pipeline in given])
    return for_instance(schedule, instance, where=where)


_AGAIN = "Search for a schedule of this shape with `realrl fuse`."


def _numbers(instance: Instance) -> dict[tuple[int, int], int]:
    places = [(p, i) for p, pipeline in enumerate(instance.pipelines) for i in range(len(pipeline.stages))]
    return {place: number for number, place in enumerate(places)}


def _letter_of(text: str, places: Mapping[int, tuple[int, int]]) -> Letter:
    match = _LETTER.fullmatch(text)
    if match is None or int(match[2]) not in places:
        raise ValueError(f"{text[:20]!r} is no letter of a stage")
    return Letter(*places[int(match[2])], match[1] == "B")


def _instance_of(content: Mapping[str, object]) -> Instance:
    pipelines = tuple(
        Pipeline(str(p["name"]), _whole(p["n_micro_batches"]), tuple(_stage_of(*s) for s in p["stages"]))
        for p in _list(content["pipelines"])
    )
    caps = content["memory_caps"]
    return Instance(
        _whole(content["n_devices"]),
        pipelines,
        None if caps is None else tuple(float(cap) for cap in _list(caps)),
        content["transport"],  # type: ignore[arg-type]  # Instance checks it
    )


def _stage_of(devices: list[object], forward: float, backward: float, activation: float) -> Stage:
    return Stage(tuple(_whole(d) for d in devices), float(forward), float(backward), float(activation))


def _whole(value: object) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is not a whole number")
    return value


def _list(value: object) -> list[Any]:  # its reader finds out what is in it
    if not isinstance(value, list):
        raise TypeError(f"{str(value)[:40]!r} is not a list")
    return value
