"""Text and single numbers that are read back from the workers, of samples that every call is done with.

    a sample is done ─► ReadSamples to ranks that hold its rows ─► FreeSamples
                                       │
    the step is complete ──────────────┴─► all answers are there: ReportSamples

Tensors stay where they are: a worker decodes its own rows, and only of samples that are wanted. Ranks execute in order,
so a checkpoint of a step that was asked for later is complete only when these answers have come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from realrl.config.schema import SaveConfig
from realrl.graph.build import topological_calls
from realrl.graph.mfc import InterfaceType
from realrl.sched.events import SampleContents
from realrl.sched.messages import SamplesRead
from realrl.sched.samples.buffer import SampleBuffer

if TYPE_CHECKING:
    import networkx as nx

TOKENS, MASK, ROW = "input_ids", "prompt_mask", "metadata"

Texts = dict[str, tuple[str, ...]]  # prefix of keys -> samples
Keys = dict[str, tuple[str, ...]]  # key -> samples


@dataclass(frozen=True)
class Readout:
    """Choice of samples and texts to read.

    Attributes:
        roles: prefix of keys -> role that generates `<prefix>input_ids`.
        calls: prefix of keys -> call that generates them.
        every_steps: samples are read in steps that are a multiple of this.
        n_samples: number of a step's first samples that are read; None for all.
        is_written: they go to a file, with other fields of their rows and what calls noted of them.
        apart: keys about sequences that a call has made or chosen from the generated ones.
    """

    roles: Mapping[str, str] = field(default_factory=dict)
    calls: Mapping[str, str] = field(default_factory=dict)
    every_steps: int = 1
    n_samples: int | None = None
    is_written: bool = False
    apart: frozenset[str] = frozenset()


NO_READOUT = Readout(n_samples=0)


class SampleReader:
    """Collects the contents that workers send, step by step."""

    def __init__(self, readout: Readout) -> None:
        self.readout = readout
        self._pending: dict[tuple[int, int], int] = {}  # (rank, seq) of a request -> step
        self._contents: dict[int, dict[str, _Contents]] = {}  # by step
        self._notes: dict[str, dict[str, tuple[float, ...]]] = {}  # of living samples, by name
        self._closed: list[int] = []  # complete steps that are not reported

    @property
    def is_idle(self) -> bool:
        """True if every complete step was reported."""
        return not self._closed

    def select(self, places: Mapping[str, tuple[int, int]], first_step: int) -> dict[int, dict[str, int]]:
        """Return the samples to read: step -> sample -> its index in the step.

        Args:
            places: sample -> number of steps before its own in this run, and its index in its step.
            first_step: the first step of this run.
        """
        selected: dict[int, dict[str, int]] = {}
        limit, every = self.readout.n_samples, self.readout.every_steps
        for sample_id, (n_steps, index) in places.items():
            step = first_step + n_steps
            if (limit is None or index < limit) and step % every == 0:
                selected.setdefault(step, {})[sample_id] = index
        return selected

    def expect(self, step: int, indices: Mapping[str, int], versions: Mapping[str, Mapping[str, int]]) -> None:
        """Note that these samples of a step are being read."""
        contents = self._contents.setdefault(step, {})
        contents.update(
            {i: _Contents(index, dict(versions[i]), self._notes.get(i, {})) for i, index in indices.items()}
        )

    def note(self, notes: Mapping[str, Mapping[str, tuple[float, ...]]]) -> None:
        """Take in what a call noted of living samples: name -> sample -> numbers."""
        for name, values in notes.items() if self.readout.is_written else ():
            for sample_id, row in values.items():
                self._notes.setdefault(sample_id, {})[name] = row

    def forget(self, ids: Sequence[str]) -> None:
        """Note that samples are freed."""
        for sample_id in ids if self._notes else ():
            self._notes.pop(sample_id, None)

    def asked(self, step: int, rank: int, seq: int) -> None:
        """Note a request that went out."""
        self._pending[rank, seq] = step

    def add(self, reply: SamplesRead) -> None:
        """Take in the answer to a request."""
        contents = self._contents[self._pending.pop((reply.rank, reply.seq))]
        for name, values in reply.columns.items():
            for sample_id, row in values.items():
                contents[sample_id].columns[name] = row
        for sample_id, row_fields in reply.rows.items():
            contents[sample_id].row = row_fields

    def close(self, step: int) -> None:
        """Note that the step is complete: no further sample of it will be read."""
        if step in self._contents:
            self._closed.append(step)

    def take(self) -> list[tuple[int, tuple[SampleContents, ...]]]:
        """Return the complete steps, oldest first, whose answers are all there; each is returned once."""
        ready = []
        while self._closed and self._closed[0] not in self._pending.values():
            step = self._closed.pop(0)
            found = sorted(self._contents.pop(step).items(), key=lambda item: item[1].index)
            ready.append((step, tuple([c.of_sample(i) for i, c in found])))
        return ready


@dataclass
class _Contents:
    index: int
    versions: dict[str, int]
    notes: Mapping[str, tuple[float, ...]]
    columns: dict[str, tuple[float | bool | str, ...]] = field(default_factory=dict)
    row: str = "{}"

    def of_sample(self, sample_id: str) -> SampleContents:
        return SampleContents(sample_id, self.versions, dict(sorted(self.columns.items())), self.notes, self.row)


def plan_reads(
    buffer: SampleBuffer, readout: Readout, ids: Sequence[str]
) -> dict[int, tuple[Texts, Keys, tuple[str, ...]]]:
    """Return rank -> texts and keys to ask it for, and samples whose row of the dataset it tells.

    Everything is asked for once, from the lowest rank that can answer; numbers and rows come from the rank that decodes
    the text, if it holds them.
    """
    texts: dict[int, dict[str, list[str]]] = {}
    keys: dict[int, dict[str, list[str]]] = {}
    rows: dict[int, list[str]] = {}
    number_keys = buffer.number_keys()
    for sample_id in ids:
        asked: set[int] = set()
        for prefix in readout.roles:
            ranks = buffer.holders(prefix + TOKENS, sample_id) & buffer.holders(prefix + MASK, sample_id)
            if ranks:
                asked.add(min(ranks))
                texts.setdefault(min(ranks), {}).setdefault(prefix, []).append(sample_id)
        for key in number_keys:
            ranks = buffer.holders(key, sample_id)
            if ranks:
                keys.setdefault(min(ranks & asked or ranks), {}).setdefault(key, []).append(sample_id)
        ranks = buffer.holders(ROW, sample_id) if readout.is_written else frozenset[int]()
        if ranks:
            rows.setdefault(min(ranks & asked or ranks), []).append(sample_id)
    return {
        rank: (_frozen(texts.get(rank, {})), _frozen(keys.get(rank, {})), tuple(rows.get(rank, ())))
        for rank in sorted({*texts, *keys, *rows})
    }


def plan_readout(graph: nx.DiGraph, save: SaveConfig, *, is_held_out: bool = False, is_written: bool = True) -> Readout:
    """Return the readout for ``generations.jsonl``, which is empty where no call generates or none is wanted.

    Args:
        is_held_out: an evaluation reads all samples, whatever `save` says.
        is_written: False for an evaluation that writes no file.
    """
    roles, calls = generating(graph)
    is_written &= save.n_generations != 0
    if is_held_out:
        return Readout(roles, calls, is_written=is_written, apart=about_others(graph))
    if not roles or not is_written:
        return NO_READOUT
    every_steps, n_samples = save.generations_every_steps, save.n_generations
    return Readout(roles, calls, every_steps, n_samples, is_written, about_others(graph))


def generating(graph: nx.DiGraph) -> tuple[dict[str, str], dict[str, str]]:
    """Return prefix of keys -> role, and prefix -> call, for every call that generates tokens and their mask."""
    roles, calls = {}, {}
    for mfc in topological_calls(graph):
        for key in mfc.output_keys if mfc.interface_type is InterfaceType.GENERATE else ():
            prefix = key.removesuffix(TOKENS)
            if mfc.own_name(key) == TOKENS and key.endswith(TOKENS) and prefix + MASK in mfc.output_keys:
                roles[prefix], calls[prefix] = mfc.role, mfc.name
    return roles, calls


def about_others(graph: nx.DiGraph) -> frozenset[str]:
    """Return the keys of calls that make or choose sequences, and of calls that read such keys."""
    apart: set[str] = set()
    for mfc in topological_calls(graph):
        makes = mfc.interface_type is InterfaceType.INFERENCE and TOKENS in map(mfc.own_name, mfc.output_keys)
        if makes or not apart.isdisjoint(mfc.input_keys):
            apart.update(mfc.output_keys)
    return frozenset(apart)


def _frozen(lists: Mapping[str, list[str]]) -> dict[str, tuple[str, ...]]:
    return {name: tuple(ids) for name, ids in lists.items()}
