"""The plan of one track: its calls in the order of data, the source of its samples, and its last step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from realrl.config.schema import RunConfig
from realrl.errors import ConfigError, DataError, GraphError
from realrl.graph.build import dataset_keys
from realrl.mesh.device_mesh import Allocation, Cluster
from realrl.plan.fused_calls import fusion_of
from realrl.plan.hooks import NO_OVERLAP, CallHooks, Overlap, Realloc
from realrl.plan.samples.cursor import CursorState, DatasetCursor
from realrl.plan.samples.mixture import plan_mixture
from realrl.sched.calls import ScheduledCall, schedule_calls
from realrl.sched.outbox import Owner
from realrl.sched.samples.in_flight import InFlight
from realrl.sched.track.readout import NO_READOUT, Readout, plan_readout

if TYPE_CHECKING:
    import networkx as nx

HELD_OUT = "eval"  # prefix of ids of held-out samples, instead of an epoch
_ENDLESS = 2**31  # steps of a track that ends with its data


@dataclass(frozen=True)
class ResumePoint:
    """Point from which a checkpoint continues: after `step`, with the loader at `cursor`.

    Attributes:
        versions: role -> train_step calls that its parameters have been through.
        in_flight: work already done for later steps.
    """

    step: int
    cursor: CursorState
    versions: Mapping[str, int] = field(default_factory=dict)
    in_flight: InFlight = field(default_factory=InFlight)


@dataclass(frozen=True)
class TrackPlan:
    """The frozen input of a `Track`.

    Args:
        calls: producers before consumers.
        dataset_keys: keys that every loaded sample must have.
        config: the run's resolved configuration.
        dataset_rank: the rank that holds the dataset.
        owner: name of the track.
        readout: texts and samples to read before samples are freed.
        resume: the checkpoint to continue from.
        capacity_steps: steps whose samples may be alive at once; None: one, plus the largest staleness, plus one to
            load ahead.
        overlap: parameters that come early, or stay.

    Raises:
        ConfigError: the resumed run is already at its last step, or `capacity_steps` is too small.
        GraphError: the numbers of samples per call do not fit together.
    """

    calls: tuple[ScheduledCall, ...]
    dataset_keys: tuple[str, ...]
    config: RunConfig
    dataset_rank: int
    owner: Owner = Owner.MAIN
    readout: Readout = NO_READOUT
    resume: ResumePoint | None = None
    capacity_steps: int | None = None
    overlap: Overlap = NO_OVERLAP

    def __post_init__(self) -> None:
        if self.first_step > self.steps:
            raise ConfigError(
                f"the checkpoint is at step {self.first_step - 1} and steps={self.steps}: no step is left to do",
                remedy=f"raise steps: it counts from the very first step, so steps={self.first_step} does one more",
            )
        for call in self.calls:
            n_seqs = call.mfc.n_seqs
            if self.step_size % n_seqs:
                raise GraphError(
                    f"call '{call.name}' has n_seqs={n_seqs}, which does not divide a step of {self.step_size}",
                    remedy="let every call's n_seqs divide the largest one",
                    call=call.name,
                )
            if call.mfc.min_n_seqs is not None and not 1 <= call.mfc.min_n_seqs <= call.mfc.n_seqs:
                raise GraphError(
                    f"call '{call.name}' has min_n_seqs={call.mfc.min_n_seqs} and n_seqs={call.mfc.n_seqs}",
                    remedy="min_n_seqs must be between 1 and n_seqs",
                    call=call.name,
                )
            if call.mfc.is_train and call.mfc.min_n_seqs is not None:
                raise GraphError(
                    f"call '{call.name}' trains and has min_n_seqs={call.mfc.min_n_seqs}",
                    remedy="leave min_n_seqs out: what a train_step learns from must not depend on timing",
                    call=call.name,
                )
        least = 1 + max((wait.lead for call in self.calls for wait in call.leads), default=0)
        if self.capacity_steps is not None and self.capacity_steps < least:
            fit = "at least one step of samples" if least == 1 else f"with stale calls {least} steps of samples"
            raise ConfigError(f"capacity_steps={self.capacity_steps}: {fit} must fit")

    @cached_property
    def cluster(self) -> Cluster:
        """The devices, which are the workers by global rank."""
        return Cluster(self.config.cluster.n_nodes, self.config.cluster.n_devices_per_node)

    @property
    def n_ranks(self) -> int:
        return self.cluster.n_devices

    @property
    def is_held_out(self) -> bool:
        """True if the track goes over validation data, once."""
        return self.owner is Owner.EVALUATION or self.config.eval.only

    @property
    def steps(self) -> int:
        """The last step, unless `epochs` end before; steps are counted from 1, over resumed runs too."""
        return _ENDLESS if self.is_held_out else self.config.steps

    @property
    def epochs(self) -> int:
        """Passes over the data."""
        return 1 if self.is_held_out else self.config.epochs

    @cached_property
    def step_size(self) -> int:
        """Samples that traverse the graph in one step."""
        return max(call.mfc.n_seqs for call in self.calls)

    @property
    def first_step(self) -> int:
        """The step that this run begins with."""
        return 1 if self.resume is None else self.resume.step + 1

    @property
    def trains(self) -> bool:
        """True if some call trains."""
        return any(call.mfc.is_train for call in self.calls)

    @property
    def moves_rows(self) -> bool:
        """True if rows move by collectives, which the ranks that hold them must enter; otherwise they are pulled."""
        return self.config.cluster.data_plane == "collective"

    @property
    def keeps_rest(self) -> bool:
        """True if the last step may have fewer samples, so that none of the data is left out."""
        return not self.trains and not self.drops

    @property
    def capacity(self) -> int:
        """Steps whose samples may be alive at once."""
        if self.capacity_steps is not None:
            return self.capacity_steps
        return 1 + max((wait.lag for call in self.calls for wait in call.waits_for), default=1)

    @property
    def in_flight(self) -> InFlight:
        """Work for later steps that was done before the run was resumed."""
        return InFlight() if self.resume is None else self.resume.in_flight

    @property
    def written_roles(self) -> frozenset[str]:
        """Roles that a declared hook writes into."""
        hooks = [hook for call in self.calls for hook in (*call.hooks.before, *call.hooks.after)]
        return frozenset(hook.target for hook in hooks if isinstance(hook, Realloc) and not hook.is_implied)

    @property
    def drops(self) -> bool:
        """True if some call may drop samples."""
        return any(call.mfc.may_drop for call in self.calls)

    @property
    def max_living(self) -> int:
        """Samples that may be alive at once: those of `capacity` steps, and a round of replacements."""
        return (self.capacity + self.drops) * self.step_size

    def versions_after(self, step: int) -> dict[str, int]:
        """Return trainable role -> train_step calls that its parameters have been through when `step` is complete."""
        known: Mapping[str, int] = {} if self.resume is None else self.resume.versions
        versions = {}
        for call in self.calls:
            if call.mfc.is_train:
                per_step = self.step_size // call.mfc.n_seqs
                first = known.get(call.mfc.role, (self.first_step - 1) * per_step)
                versions[call.mfc.role] = first + (step - self.first_step + 1) * per_step
        return versions

    def last_step(self, cursor: DatasetCursor) -> int:
        """Return the step at which `steps` or `epochs` ends the run.

        An incomplete step at the end of the data is left out, unless `keeps_rest`. Where calls drop samples, their
        replacements are not counted, so the number of steps is known beforehand and the run makes a little more than
        `epochs` passes.

        Raises:
            DataError: the data that is left does not fill one step.
        """
        consumed = (self.first_step - 1) * self.step_size if self.drops else cursor.start
        left = self.epochs * cursor.n_rows - consumed
        whole = -(-left // self.step_size) if self.keeps_rest else left // self.step_size
        n_steps = min(self.steps - self.first_step + 1, whole)
        if n_steps >= 1:
            return self.first_step - 1 + n_steps
        epochs = -(-(consumed + self.step_size) // cursor.n_rows)
        if consumed:
            raise DataError(
                f"the checkpoint of step {self.first_step - 1} has consumed {consumed} samples, and "
                f"epochs={self.epochs} of {cursor.n_rows} rows leave no whole step of n_seqs={self.step_size}",
                remedy=f"raise epochs to {epochs} or more",
            )
        raise DataError(
            f"the dataset has {cursor.n_rows} usable rows, and epochs={self.epochs} of them do not fill one step of "
            f"n_seqs={self.step_size}",
            remedy=f"lower n_seqs to {self.epochs * cursor.n_rows} or less, raise epochs to {epochs} or more, or give "
            "more data",
        )

    def n_samples(self, cursor: DatasetCursor, last_step: int) -> int | None:
        """Return the samples up to `last_step`, where that may be smaller than a whole step; None: whole steps."""
        if not self.keeps_rest:
            return None
        n_steps = last_step - self.first_step + 1
        return min(n_steps * self.step_size, self.epochs * cursor.n_rows - cursor.start)

    def cursor(self, row_ids: Sequence[str], content: str = "") -> DatasetCursor:
        """Return the cursor that assigns rows to samples.

        Args:
            row_ids: ids of all usable rows.
            content: digest of the rows' data.

        Raises:
            DataError: there is no row, or the checkpoint was made with others.
            ConfigError: the checkpoint was made with another order of the data.
        """
        seed = self.config.seed
        if self.is_held_out:
            return DatasetCursor(row_ids[: self.config.eval.n_seqs], seed=seed, shuffle=False, name=HELD_OUT)
        start = None if self.resume is None else self.resume.cursor
        dataset = self.config.dataset
        weights = {name: file.weight for name, file in dataset.files.items() if file.weight is not None}
        parts = plan_mixture(row_ids, weights) if weights else ()
        return DatasetCursor(row_ids, seed=seed, shuffle=dataset.shuffle, start=start, content=content, parts=parts)


def plan_track(
    graph: nx.DiGraph,
    allocations: Mapping[str, Allocation],
    config: RunConfig,
    *,
    dataset_rank: int,
    hooks: Mapping[str, CallHooks] | None = None,
    owner: Owner = Owner.MAIN,
    resume: ResumePoint | None = None,
) -> TrackPlan:
    """Return the plan of a track for a graph and a run's resolved configuration.

    Args:
        graph: from `build_graph`.
        allocations: call name -> mesh and strategy.
        config: the resolved configuration.
        dataset_rank: the rank that holds the dataset.
        hooks: from `plan_hooks`; None: for roles that all have parameters.
        owner: name of the track.
        resume: the checkpoint to continue from.

    Raises:
        ConfigError: the resumed run is already at its last step.
        GraphError: the numbers of samples per call do not fit together.
    """
    is_training = owner is Owner.MAIN and not config.eval.only
    fusion = fusion_of(graph, config.allocation.fuse) if is_training else None
    plan = TrackPlan(
        calls=schedule_calls(graph, allocations, hooks=hooks, fusion=fusion),
        dataset_keys=dataset_keys(graph),
        config=config,
        dataset_rank=dataset_rank,
        owner=owner,
        resume=resume,
    )
    readout = plan_readout(graph, config.save, is_held_out=plan.is_held_out, is_written=owner is Owner.MAIN)
    return replace(plan, readout=readout)
