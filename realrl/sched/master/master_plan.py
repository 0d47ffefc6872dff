"""What the master must know before a run starts: its calls in the order of data, where they run, and how far to go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from realrl.config.schema import RunConfig
from realrl.errors import ConfigError, DataError, GraphError
from realrl.graph.build import (
    LeadWait,
    dataset_keys,
    drop_feeders,
    drop_gates,
    lead_waits,
    topological_calls,
    version_edges,
    writer_waits,
)
from realrl.graph.mfc import DEFAULT_PROTOCOL, InterfaceType
from realrl.mesh.device_mesh import Allocation, Cluster
from realrl.plan.hooks import NO_HOOKS, CallHooks, Realloc, plan_hooks
from realrl.plan.protocols import CallLayout
from realrl.plan.samples.cursor import CursorState, DatasetCursor
from realrl.sched.samples.in_flight import InFlight
from realrl.sched.track.readout import Readout, plan_readout

if TYPE_CHECKING:
    import networkx as nx

STEP_PLACEHOLDER = "{step}"
_ENDLESS = 2**31  # steps of a run that ends with its data


@dataclass(frozen=True)
class VersionWait:
    """A call at step i waits until the call `trainer` has finished step ``i - lag``.

    With lag 0 the call itself trains, and `trainer` is one that still has to read the parameters before that.
    """

    trainer: str
    lag: int


@dataclass(frozen=True)
class ScheduledCall:
    """What scheduling needs of a call; the fields that `MFCDef` has too mean the same.

    Attributes:
        allocation: where it runs.
        hooks: what happens around every dispatch.
        changes_parameters: whether it trains, or a hook of it writes into a role.
        leads: readers that must run ahead before it changes what they read.
        feeds_drop: it is a call that drops samples, or comes before one: it sees samples that are dropped later.
        gates: dropping calls that must have kept a sample before this call, which feeds another one, may have it.
        is_generate: whether it generates.
    """

    name: str
    role: str
    is_train: bool
    input_keys: tuple[str, ...]
    output_keys: tuple[str, ...]
    n_seqs: int
    min_n_seqs: int | None
    n_minibatches: int
    balanced_dp: bool
    log_return_value: bool
    waits_for: tuple[VersionWait, ...]
    allocation: Allocation
    hooks: CallHooks = NO_HOOKS
    changes_parameters: bool = False
    protocol: str = DEFAULT_PROTOCOL
    leads: tuple[LeadWait, ...] = ()
    may_drop: bool = False
    feeds_drop: bool = False
    gates: tuple[str, ...] = ()
    is_generate: bool = False
    max_staleness: int = 0

    @property
    def layout(self) -> CallLayout:
        """What transfer protocols need to know."""
        return CallLayout(self.allocation, self.hooks.home, self.balanced_dp)

    @property
    def extent(self) -> tuple[int, ...]:
        """Global ranks that the call needs to start: its mesh, and whoever takes part in the hooks before it."""
        return tuple(sorted({*self.ranks, *self.hooks.before_ranks}))

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks of the mesh."""
        return self.allocation.ranks

    @property
    def reports_metrics(self) -> bool:
        """Whether what the call returns goes to the log."""
        return self.is_train or self.log_return_value


@dataclass(frozen=True)
class ResumePoint:
    """Where a checkpoint lets the run continue: after `step`, with the loader at `cursor`.

    Attributes:
        versions: role -> train_step calls that its parameters have been through.
        in_flight: what was done for later steps.
    """

    step: int
    cursor: CursorState
    versions: Mapping[str, int] = field(default_factory=dict)
    in_flight: InFlight = field(default_factory=InFlight)


@dataclass(frozen=True)
class MasterPlan:
    """The frozen input of `MasterState`.

    Args:
        calls: producers before consumers.
        dataset_keys: keys that loading a sample must give.
        cluster: its devices are the workers, by global rank.
        dataset_rank: the rank that holds the dataset.
        steps: last step, counted from 1 over resumed runs too.
        epochs: passes over the dataset; the run ends at `steps` or here, whichever comes first.
        seed, shuffle: order of the samples.
        resume: the checkpoint to continue from.
        save_every_steps: 0 means no checkpoint on the way.
        save_every_epochs: save the steps in which so many epochs end; 0 means none.
        save_at_end: write one after the last step.
        checkpoint_directory: folder that ranks write a checkpoint into; ``{step}`` in it stands for the step.
        capacity_steps: steps whose samples may be alive at once; None: one, plus the largest staleness, plus one to
            load ahead.
        moves_rows: rows move by collectives, which the ranks that hold them must enter; otherwise they are pulled.
        max_refill_rounds: how often a step may load samples in the place of dropped ones.
        readout: what is read of samples before they are freed; None: nothing.
        keeps_rest: the last step may have fewer samples, so that none of the data is left out; for graphs that neither
            train nor drop samples.
        evaluation: the graph that evaluates a training run, over `held_out` data.
        eval_every_steps: evaluate after every so many steps; 0 means never.
        eval_at_start: evaluate before the first step, unless the run is resumed.
        held_out: how many rows of the validation data this plan goes over (0: all); None: it goes over the dataset.
        pass_threshold: a response passes if its reward is more than this.
        only_evaluates: the run is one evaluation.

    Raises:
        ConfigError: the resumed run is already at its last step, or `capacity_steps` is too small.
        GraphError: the numbers of samples per call do not fit together.
    """

    calls: tuple[ScheduledCall, ...]
    dataset_keys: tuple[str, ...]
    cluster: Cluster
    dataset_rank: int
    steps: int
    epochs: int
    seed: int
    shuffle: bool = True
    resume: ResumePoint | None = None
    save_every_steps: int = 0
    save_every_epochs: int = 0
    save_at_end: bool = False
    checkpoint_directory: str = ""
    capacity_steps: int | None = None
    moves_rows: bool = False
    max_refill_rounds: int = 0
    readout: Readout | None = None
    keeps_rest: bool = False
    evaluation: MasterPlan | None = None
    eval_every_steps: int = 0
    eval_at_start: bool = False
    held_out: int | None = None
    pass_threshold: float = 0.0
    only_evaluates: bool = False

    def __post_init__(self) -> None:
        if self.first_step > self.steps:
            raise ConfigError(
                f"the checkpoint is at step {self.first_step - 1} and steps={self.steps}: no step is left to do",
                remedy=f"raise steps: it counts from the very first step, so steps={self.first_step} does one more",
            )
        for call in self.calls:
            if self.step_size % call.n_seqs:
                raise GraphError(
                    f"call '{call.name}' has n_seqs={call.n_seqs}, which does not divide a step of {self.step_size}",
                    remedy="let every call's n_seqs divide the largest one",
                    call=call.name,
                )
            if call.min_n_seqs is not None and not 1 <= call.min_n_seqs <= call.n_seqs:
                raise GraphError(
                    f"call '{call.name}' has min_n_seqs={call.min_n_seqs} and n_seqs={call.n_seqs}",
                    remedy="min_n_seqs must be between 1 and n_seqs",
                    call=call.name,
                )
            if call.is_train and call.min_n_seqs is not None:
                raise GraphError(
                    f"call '{call.name}' trains and has min_n_seqs={call.min_n_seqs}",
                    remedy="leave min_n_seqs out: what a train_step learns from must not depend on timing",
                    call=call.name,
                )
        least = 1 + max((wait.lead for call in self.calls for wait in call.leads), default=0)
        if self.capacity_steps is not None and self.capacity_steps < least:
            fit = "at least one step of samples" if least == 1 else f"with stale calls {least} steps of samples"
            raise ConfigError(f"capacity_steps={self.capacity_steps}: {fit} must fit")

    @property
    def n_ranks(self) -> int:
        """Number of workers."""
        return self.cluster.n_devices

    @property
    def step_size(self) -> int:
        """Samples that traverse the graph in one step."""
        return max(call.n_seqs for call in self.calls)

    @property
    def first_step(self) -> int:
        """The step that this run begins with."""
        return 1 if self.resume is None else self.resume.step + 1

    @property
    def capacity(self) -> int:
        """Steps whose samples may be alive at once."""
        if self.capacity_steps is not None:
            return self.capacity_steps
        return 1 + max((wait.lag for call in self.calls for wait in call.waits_for), default=1)

    @property
    def in_flight(self) -> InFlight:
        """What was done for later steps before the run was resumed."""
        return InFlight() if self.resume is None else self.resume.in_flight

    @property
    def written_roles(self) -> frozenset[str]:
        """Roles that some hook writes into."""
        hooks = [hook for call in self.calls for hook in (*call.hooks.before, *call.hooks.after)]
        return frozenset(hook.target for hook in hooks if isinstance(hook, Realloc) and not hook.is_implied)

    @property
    def drops(self) -> bool:
        """Whether some call may drop samples."""
        return any(call.may_drop for call in self.calls)

    @property
    def max_living(self) -> int:
        """Samples that may be alive at once: those of `capacity` steps, and a round of replacements."""
        return (self.capacity + self.drops) * self.step_size

    def versions_after(self, step: int) -> dict[str, int]:
        """Trainable role -> train_step calls that its parameters have been through when `step` is complete."""
        known: Mapping[str, int] = {} if self.resume is None else self.resume.versions
        versions = {}
        for call in self.calls:
            if call.is_train:
                per_step = self.step_size // call.n_seqs
                first = known.get(call.role, (self.first_step - 1) * per_step)
                versions[call.role] = first + (step - self.first_step + 1) * per_step
        return versions

    def last_step(self, cursor: DatasetCursor) -> int:
        """The step at which `steps` or `epochs` ends the run; an incomplete step at the end of the data is dropped.

        Where calls drop samples, their replacements are not counted: the number of steps is known beforehand, and the
        data is gone through a little more often than `epochs` says.

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
        """Samples up to `last_step`, where that may be smaller than a whole step; None: whole steps of them."""
        if not self.keeps_rest:
            return None
        n_steps = last_step - self.first_step + 1
        return min(n_steps * self.step_size, self.epochs * cursor.n_rows - cursor.start)

    def checkpoint_directory_of(self, step: int) -> str:
        """The folder that ranks write the checkpoint of `step` into."""
        return self.checkpoint_directory.replace(STEP_PLACEHOLDER, str(step))


def schedule_calls(
    graph: nx.DiGraph,
    allocations: Mapping[str, Allocation],
    *,
    hooks: Mapping[str, CallHooks] | None = None,
) -> tuple[ScheduledCall, ...]:
    """Reduce a graph from `build_graph` to what scheduling needs, producers before consumers.

    Args:
        graph: from `build_graph`.
        allocations: call name -> mesh and strategy.
        hooks: from `plan_hooks`; None: for roles that all have parameters.
    """
    waits: dict[str, list[VersionWait]] = {}
    for edge in version_edges(graph):
        waits.setdefault(edge.reader, []).append(VersionWait(edge.trainer, edge.lag))
    for wait in writer_waits(graph):
        waits.setdefault(wait.writer, []).append(VersionWait(wait.reader, wait.lag))
    leads, gates, feeders = lead_waits(graph), drop_gates(graph), drop_feeders(graph)
    hooks = plan_hooks(graph, allocations) if hooks is None else hooks
    return tuple(
        ScheduledCall(
            name=mfc.name,
            role=mfc.role,
            is_train=mfc.is_train,
            input_keys=mfc.input_keys,
            output_keys=mfc.output_keys,
            n_seqs=mfc.n_seqs,
            min_n_seqs=mfc.min_n_seqs,
            n_minibatches=mfc.n_minibatches,
            balanced_dp=mfc.balanced_dp,
            log_return_value=mfc.log_return_value,
            waits_for=tuple(waits.get(mfc.name, ())),
            allocation=allocations[mfc.name],
            hooks=hooks[mfc.name],
            changes_parameters=bool(mfc.changed_roles),
            protocol=mfc.protocol,
            leads=tuple(wait for wait in leads if wait.writer == mfc.name),
            may_drop=mfc.may_drop,
            feeds_drop=mfc.name in feeders,
            gates=gates[mfc.name],
            is_generate=mfc.interface_type is InterfaceType.GENERATE,
            max_staleness=mfc.max_staleness,
        )
        for mfc in topological_calls(graph)
    )


def plan_master(
    graph: nx.DiGraph,
    allocations: Mapping[str, Allocation],
    config: RunConfig,
    *,
    dataset_rank: int,
    checkpoint_directory: str,
    resume: ResumePoint | None = None,
    hooks: Mapping[str, CallHooks] | None = None,
    evaluation: MasterPlan | None = None,
) -> MasterPlan:
    """Collect what a run's resolved configuration says for the master.

    Args:
        graph: from `build_graph`.
        allocations: call name -> mesh and strategy.
        config: the resolved configuration.
        dataset_rank: the rank that holds the dataset.
        checkpoint_directory: folder that ranks write a checkpoint into, with ``{step}`` where the step goes.
        resume: the checkpoint to continue from.
        hooks: from `plan_hooks`; None: for roles that all have parameters.
        evaluation: from `plan_evaluation_of`, where the run is evaluated.

    Raises:
        ConfigError: the resumed run is already at its last step.
        GraphError: the numbers of samples per call do not fit together.
    """
    calls = schedule_calls(graph, allocations, hooks=hooks)
    trains, only = any(call.is_train for call in calls), config.eval.only
    return MasterPlan(
        calls=calls,
        dataset_keys=dataset_keys(graph),
        cluster=Cluster(config.cluster.n_nodes, config.cluster.n_devices_per_node),
        dataset_rank=dataset_rank,
        steps=_ENDLESS if only else config.steps,
        epochs=1 if only else config.epochs,
        seed=config.seed,
        shuffle=config.dataset.shuffle,
        resume=resume,
        save_every_steps=config.save.every_steps if trains else 0,
        save_every_epochs=config.save.every_epochs if trains else 0,
        save_at_end=config.save.at_end and trains,
        checkpoint_directory=checkpoint_directory,
        moves_rows=config.cluster.data_plane == "collective",
        max_refill_rounds=config.max_refill_rounds,
        readout=plan_readout(graph, None if only else config.save),
        keeps_rest=not trains and not any(call.may_drop for call in calls),
        evaluation=evaluation,
        eval_every_steps=config.eval.every_steps if evaluation is not None else 0,
        eval_at_start=config.eval.at_start and evaluation is not None,
        held_out=(config.eval.n_seqs or 0) if only else None,
        pass_threshold=config.eval.pass_threshold,
        only_evaluates=only,
    )


def plan_evaluation_of(
    graph: nx.DiGraph,
    allocations: Mapping[str, Allocation],
    config: RunConfig,
    *,
    dataset_rank: int,
    hooks: Mapping[str, CallHooks],
) -> MasterPlan:
    """What the master needs to evaluate a training run; the arguments are those of `plan_master`, of the evaluation."""
    return MasterPlan(
        calls=schedule_calls(graph, allocations, hooks=hooks),
        dataset_keys=dataset_keys(graph),
        cluster=Cluster(config.cluster.n_nodes, config.cluster.n_devices_per_node),
        dataset_rank=dataset_rank,
        steps=_ENDLESS,
        epochs=1,
        seed=config.seed,
        shuffle=False,
        moves_rows=config.cluster.data_plane == "collective",
        readout=plan_readout(graph, None),
        keeps_rest=True,
        held_out=config.eval.n_seqs or 0,
        pass_threshold=config.eval.pass_threshold,
    )
