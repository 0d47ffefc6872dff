"""The plan of a run, decided before a process starts: calls, graph, allocations, hooks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from realrl.config.schema import RunConfig
from realrl.experiment.declaration import Experiment, Role
from realrl.graph.mfc import InterfaceType, MFCDef
from realrl.mesh.device_mesh import Allocation, Cluster
from realrl.plan.fused_calls import Fusion
from realrl.plan.groups import ProcessGroup, process_groups
from realrl.plan.hooks import CallHooks, Realloc

if TYPE_CHECKING:
    import networkx as nx


@dataclass(frozen=True)
class RunPlan:
    """One run, decided but not started; the same configuration gives the same plan in every process.

    Attributes:
        allocations: call -> its allocation.
        hooks: call -> reallocs and offloads around it.
        evaluation: plan of the calls that evaluate a training run; None where it is not evaluated.
        fusion: two calls that train at the same time on the same devices; None where none do.
    """

    config: RunConfig
    experiment: Experiment
    mfcs: tuple[MFCDef, ...]
    graph: nx.DiGraph
    allocations: Mapping[str, Allocation]
    cluster: Cluster
    hooks: Mapping[str, CallHooks]
    evaluation: RunPlan | None = None
    fusion: Fusion | None = None

    @property
    def roles(self) -> Mapping[str, Role]:
        return self.experiment.roles_for(self.config)

    @property
    def n_workers(self) -> int:
        """Number of workers: one per device."""
        return self.cluster.n_devices

    @property
    def dataset_call(self) -> MFCDef:
        """The first call that reads a dataset key."""
        keys = set(self.experiment.dataset.keys)
        return next(mfc for mfc in self.mfcs if keys.intersection(mfc.input_keys))

    @property
    def dataset_role(self) -> str:
        """The role whose tokenizer makes the dataset's tokens."""
        return self.dataset_call.role

    @property
    def dataset_rank(self) -> int:
        """The rank that holds the dataset: the first of `dataset_call`."""
        return self.allocations[self.dataset_call.name].ranks[0]

    @property
    def samples_per_step(self) -> int:
        """Samples that traverse the graph in one step."""
        return max(mfc.n_seqs for mfc in self.mfcs)

    def calls_of(self, role: str) -> tuple[MFCDef, ...]:
        """Return all calls of one role, in declared order."""
        return tuple(mfc for mfc in self.mfcs if mfc.role == role)

    def eval_calls_of(self, role: str) -> tuple[MFCDef, ...]:
        """Return all calls of one role that evaluate the run."""
        return () if self.evaluation is None else self.evaluation.calls_of(role)

    def hooks_of(self, call: str) -> CallHooks:
        """Return the hooks of a call of training or of evaluation."""
        return self.hooks[call] if call in self.hooks or self.evaluation is None else self.evaluation.hooks[call]

    def allocation_of(self, call: str) -> Allocation:
        """Return the allocation of a call of training or of evaluation."""
        if call in self.allocations or self.evaluation is None:
            return self.allocations[call]
        return self.evaluation.allocations[call]

    def is_evaluating(self, call: str) -> bool:
        """Return True if a call evaluates."""
        return self.config.eval.only or (self.evaluation is not None and call in self.evaluation.hooks)

    def home_of(self, role: str) -> Allocation | None:
        """Return the allocation in which the parameters of a role live; None if it has none."""
        return self.hooks[self.calls_of(role)[0].name].home

    def allocations_of(self, role: str) -> tuple[Allocation, ...]:
        """Return the distinct allocations of a role's calls, its home first."""
        home = self.home_of(role)
        used = [self.allocations[mfc.name] for mfc in self.calls_of(role)]
        return tuple(dict.fromkeys(used if home is None else [home, *used]))

    def role_ranks(self, role: str) -> tuple[int, ...]:
        """Return the global ranks that a call of a role runs on, ascending."""
        return tuple(sorted({rank for mfc in self.calls_of(role) for rank in self.allocations[mfc.name].ranks}))

    @property
    def changed_roles(self) -> frozenset[str]:
        """Roles whose parameters some call or hook changes."""
        return frozenset().union(*(mfc.changed_roles for mfc in self.mfcs))

    @property
    def averaged_roles(self) -> frozenset[str]:
        """Frozen roles in half precision that keep float32 masters, because some hook averages into them."""
        if self.config.precision == "fp32":
            return frozenset()
        hooks = (hook for mfc in self.mfcs for hook in (*self.hooks[mfc.name].before, *self.hooks[mfc.name].after))
        targets = {hook.target for hook in hooks if isinstance(hook, Realloc) and hook.eta < 1.0}
        return frozenset(
            name for name in targets if not self.roles[name].trainable and not self.config.models[name].lora.rank
        )

    @property
    def generating_roles(self) -> frozenset[str]:
        """Roles that generate, in training or evaluation."""
        mfcs = self.mfcs if self.evaluation is None else self.mfcs + self.evaluation.mfcs
        return frozenset(mfc.role for mfc in mfcs if mfc.interface_type is InterfaceType.GENERATE)

    @property
    def may_overlap(self) -> bool:
        """True if `allocation.overlap` is on and hooks move parameters, so that some may come early or stay."""
        has_hooks = any(hooks.before or hooks.after for hooks in self.hooks.values())
        return self.config.allocation.overlap and has_hooks

    @property
    def process_groups(self) -> tuple[ProcessGroup, ...]:
        """All process groups, in the order in which every rank creates them."""
        return process_groups(self.allocations.values(), self.cluster)
