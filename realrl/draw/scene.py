"""Contents of a picture, without places: cards for calls, pills for keys, loops for versions.

Edges with the same producer and the same keys share one pill, from which a branch leads to each consumer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from realrl.draw.text import text_width
from realrl.errors import counted
from realrl.graph.build import (
    StepWait,
    calls,
    data_graph,
    dataset_keys,
    home_calls,
    roles,
    topological_calls,
    version_edges,
)
from realrl.graph.mfc import DEFAULT_PROTOCOL, Hook, InterfaceType, MFCDef, OffloadHook

if TYPE_CHECKING:
    import networkx as nx

DATASET = ""  # not a possible name of a call
SURVIVORS = "kept samples"  # label of an edge from a dropping call to a call that reads none of its keys

NAME_SIZE, ROLE_SIZE, NOTE_SIZE, PLATE_SIZE, KEY_SIZE = 14.5, 12.0, 11.0, 10.5, 11.0
NAME_LINE, ROLE_LINE, NOTE_LINE, KEY_LINE = 20.0, 17.0, 15.0, 15.0
PLATE_HEIGHT = 20.0

TYPE_WORDS = {
    InterfaceType.GENERATE: "generate",
    InterfaceType.INFERENCE: "inference",
    InterfaceType.TRAIN_STEP: "train step",
}


class Placement(Protocol):
    """An allocation in a picture, which shows both parts by their text."""

    @property
    def mesh(self) -> object: ...

    @property
    def strategy(self) -> object: ...


@dataclass(frozen=True)
class Card:
    """One call, or the dataset when `mfc` is None.

    Attributes:
        name: name of the call, or `DATASET`.
        role_index: position of the role in the graph; decides the colour.
        label: first line.
        notes: small lines below role and type.
        plate: the allocation, or "".
        n_lines: number of data lines at its busier side.
    """

    name: str
    mfc: MFCDef | None
    role_index: int
    label: str
    notes: tuple[str, ...] = ()
    plate: str = ""
    n_lines: int = 0

    @property
    def subtitle(self) -> str:
        """Role and type, or nothing for the dataset."""
        return "" if self.mfc is None else f"{self.mfc.model} · {TYPE_WORDS[self.mfc.interface_type]}"

    @property
    def width(self) -> float:
        """Width that the text needs inside the shape."""
        if self.mfc is None:
            return text_width(self.label, 13.0, bold=True) + 36
        room = {InterfaceType.GENERATE: 52, InterfaceType.INFERENCE: 36, InterfaceType.TRAIN_STEP: 44}
        lines = [
            text_width(self.label, NAME_SIZE, bold=True),
            text_width(self.subtitle, ROLE_SIZE),
            *(text_width(note, NOTE_SIZE) for note in self.notes),
        ]
        plate = text_width(self.plate, PLATE_SIZE, mono=True) + 40 if self.plate else 0
        return max(max(lines) + room[self.mfc.interface_type], plate, 128)

    @property
    def height(self) -> float:
        """Height of the shape, without the plate below it."""
        least = 38.0 + 7 * self.n_lines
        return max(58.0 if self.mfc is None else 22 + self.text_height, least)

    @property
    def text_height(self) -> float:
        return NAME_LINE + ROLE_LINE + NOTE_LINE * len(self.notes)


@dataclass(frozen=True)
class Pill:
    """Keys on their way from one call (or the dataset) to some others."""

    producer: str
    keys: tuple[str, ...]
    consumers: tuple[str, ...]

    @property
    def width(self) -> float:
        return max(text_width(key, KEY_SIZE, mono=True) for key in self.keys) + 20

    @property
    def height(self) -> float:
        return KEY_LINE * len(self.keys) + 8


@dataclass(frozen=True)
class Scene:
    """Contents of a picture. `cards` holds the dataset first, if a call reads it."""

    title: str
    subtitle: str
    cards: Mapping[str, Card]
    pills: tuple[Pill, ...]
    loops: tuple[StepWait, ...]
    layers: Mapping[str, int]
    roles: tuple[str, ...]
    trained_roles: frozenset[str]


def make_scene(
    graph: nx.DiGraph,
    title: str,
    allocations: Mapping[str, Placement] | None,
    remarks: Mapping[str, str] | None = None,
) -> Scene:
    """Return the scene of a graph, with a remark below some calls."""
    role_names = roles(graph)
    mfcs = calls(graph)
    pills = _pills(graph)
    largest = max(mfc.n_seqs for mfc in mfcs)
    cards = {}
    if dataset_keys(graph):
        cards[DATASET] = Card(DATASET, None, -1, "dataset", n_lines=_n_lines(pills, DATASET))
    places, homes = allocations or {}, home_calls(graph)
    for mfc in mfcs:
        place = places.get(mfc.name)
        remark = (remarks[mfc.name],) if remarks and mfc.name in remarks else ()
        cards[mfc.name] = Card(
            mfc.name,
            mfc,
            role_names.index(mfc.role),
            mfc.name,
            (*_notes(mfc, largest), *_moved(place, places.get(homes[mfc.role])), *remark),
            "" if place is None else f"{place.strategy} @ {place.mesh}",
            _n_lines(pills, mfc.name),
        )
    trained = frozenset(mfc.role for mfc in mfcs if mfc.is_train)
    return Scene(
        title=title,
        subtitle=_subtitle(len(mfcs), len(role_names), len(trained), largest),
        cards=cards,
        pills=pills,
        loops=version_edges(graph),
        layers=_layers(graph),
        roles=role_names,
        trained_roles=trained,
    )


def hook_text(hook: Hook) -> str:
    """Return a hook in a few words."""
    if isinstance(hook, OffloadHook):
        return "offload"
    if hook.source is not None:
        return f"{hook.source} → here{_eta(hook.eta)}"
    return f"→ {hook.target}{_eta(hook.eta)}"


def _eta(eta: float) -> str:
    return "" if eta == 1.0 else f", eta {eta:g}"


def _notes(mfc: MFCDef, largest: int) -> tuple[str, ...]:
    """Return notes of special batch settings, protocol and hooks."""
    batch = []
    if mfc.n_seqs != largest:
        batch.append(f"{mfc.n_seqs} samples")
    if mfc.min_n_seqs is not None:
        batch.append(f"streams from {mfc.min_n_seqs}")
    if mfc.n_minibatches > 1:
        batch.append(f"{mfc.n_minibatches} minibatches")
    if mfc.n_passes > 1:
        batch.append(f"{mfc.n_passes} passes")
    if mfc.n_mbs is not None and mfc.n_mbs > 1:
        batch.append(f"{mfc.n_mbs} micro-batches")
    if mfc.max_tokens_per_mb is not None:
        batch.append(f"micro-batches of {mfc.max_tokens_per_mb} tokens")
    if mfc.balanced_dp:
        batch.append("equal counts")
    if mfc.may_drop:
        batch.append("may drop samples")
    if mfc.virtual_stages is not None and mfc.virtual_stages > 1:
        batch.append(f"{mfc.virtual_stages} virtual stages")
    return (
        *((" · ".join(batch),) if batch else ()),
        *((mfc.protocol,) if mfc.protocol != DEFAULT_PROTOCOL else ()),
        *(f"before: {hook_text(hook)}" for hook in mfc.pre_hooks),
        *(f"after: {hook_text(hook)}" for hook in mfc.post_hooks),
    )


def _moved(place: Placement | None, home: Placement | None) -> tuple[str, ...]:
    """Return a note of the parameters' home, for a call that does not run there."""
    if place is None or home is None or (str(place.mesh), str(place.strategy)) == (str(home.mesh), str(home.strategy)):
        return ()
    return (f"parameters ← {home.strategy if str(place.mesh) == str(home.mesh) else home.mesh}",)


def _subtitle(n_calls: int, n_roles: int, n_trained: int, n_seqs: int) -> str:
    trained = "" if n_roles == n_trained == 1 else f" ({n_trained} trained)"
    return f"{counted(n_calls, 'call')} · {counted(n_roles, 'role')}{trained} · {counted(n_seqs, 'sample')} a step"


def _pills(graph: nx.DiGraph) -> tuple[Pill, ...]:
    consumers: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    offered = dataset_keys(graph)
    for mfc in calls(graph):
        keys = tuple(key for key in offered if key in mfc.input_keys)
        if keys:
            consumers.setdefault((DATASET, keys), []).append(mfc.name)
    data = data_graph(graph)
    for name in data:
        for consumer in data.successors(name):
            consumers.setdefault((name, data.edges[name, consumer]["keys"] or (SURVIVORS,)), []).append(consumer)
    return tuple(Pill(producer, keys, tuple(names)) for (producer, keys), names in consumers.items())


def _n_lines(pills: tuple[Pill, ...], name: str) -> int:
    return max(sum(pill.producer == name for pill in pills), sum(name in pill.consumers for pill in pills))


def _layers(graph: nx.DiGraph) -> dict[str, int]:
    """Return, for each call, the longest path from the dataset or from a call without inputs."""
    data = data_graph(graph)
    first = 1 if dataset_keys(graph) else 0
    layers = {DATASET: 0} if first else {}
    for mfc in topological_calls(graph):
        layers[mfc.name] = max((layers[name] + 1 for name in data.predecessors(mfc.name)), default=first)
    return layers
