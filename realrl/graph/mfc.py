"""The vocabulary of a declared algorithm: calls, their roles, interfaces and hooks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from realrl.errors import GraphError

DEFAULT_PROTOCOL = "3D_PROTO"
N_SEQS_OF_THE_RUN = -1
_PROTOCOL_NAMES = [DEFAULT_PROTOCOL, "DP_PROTO", "ONE_TO_ALL", "ALL_TO_ALL", "3D_ALL_MICRO_DP", "3D_PP_ONLY"]


class InterfaceType(Enum):
    """A call's use of its role."""

    GENERATE = "generate"
    INFERENCE = "inference"
    TRAIN_STEP = "train_step"


@dataclass(frozen=True, order=True)
class ModelName:
    """One replica of a role: its parameters in one layout. Replica 0 is the one that is trained or loaded."""

    role: str
    replica_id: int = 0

    def __str__(self) -> str:
        return self.role if self.replica_id == 0 else f"{self.role}#{self.replica_id}"


@dataclass(frozen=True)
class InterfaceRef:
    """A `ModelInterface` by registered name or ``"package.module:Class"``, with its constructor arguments."""

    name: str
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class OffloadHook:
    """After the call, move the role's parameters to host memory; their next use brings them back."""


@dataclass(frozen=True)
class ParamReallocHook:
    """Move parameters between roles: ``target = eta * source + (1 - eta) * target``.

    Exactly one of `source` and `target` is given; the other end is the call's own role. Replicas of one role need no
    hook: a call that runs in another layout than its role's home gets the parameters of the home.
    """

    source: ModelName | None = None
    target: ModelName | None = None
    eta: float = 1.0

    def __post_init__(self) -> None:
        if (self.source is None) == (self.target is None):
            raise GraphError("a ParamReallocHook needs exactly one of source and target")
        if not 0.0 < self.eta <= 1.0:
            raise GraphError(f"a ParamReallocHook needs 0 < eta <= 1, not {self.eta}")


Hook = OffloadHook | ParamReallocHook


@dataclass(frozen=True)
class MFCDef:
    """One model function call of the algorithm's dataflow graph.

    Args:
        name: unique name of the call.
        model_name: role, or `ModelName(role, replica_id)`.
        interface_type: generate, inference or train_step.
        interface_impl: registered interface name, or an `InterfaceRef`.
        input_keys: keys that the call reads; edges to their producers are inferred.
        output_keys: keys that the call produces.
        input_key_remap: graph key -> name under which the interface sees it.
        output_key_remap: name that the interface returns -> graph key.
        n_seqs: samples per call; by default those of the run, which `Experiment.calls` fills in.
        min_n_seqs: the call may start on this many samples as they become available (streaming).
        n_mbs: number of micro-batches per minibatch and rank.
        max_tokens_per_mb: token budget of a micro-batch; takes the place of `n_mbs`.
        n_minibatches: optimizer steps per train_step call and pass over the batch.
        n_passes: passes over the batch of a train_step; each draws its minibatches anew, and so does every batch.
        balanced_dp: give every data-parallel rank the same number of samples, not of tokens.
        log_return_value: write the call's returned metrics to the log.
        max_staleness: number of versions by which a non-training call may lag when it reads its role.
        may_drop: the call may return fewer samples than it got, in the same order. The others are dropped from the
            step, which is filled up with further samples of the dataset: they go through the same calls, and every
            other call gets its `n_seqs` survivors. Calls that feed it may therefore run on any number of samples, also
            on fewer than their mesh has data-parallel ranks, so their interfaces must not use `Engine.all_reduce`.
        pre_hooks, post_hooks: hooks before and after the call, on the homes of the roles that they name.
        virtual_stages: chunks of blocks on each pipeline stage of a train_step; None for as many as its strategy says.
        protocol: name of a protocol of `realrl.plan.protocols`, which divides samples over the ranks of the mesh and
            chooses the keepers of the output.

    Values are checked by `build_graph`, which can name the calls and keys around a mistake.
    """

    name: str
    model_name: str | ModelName
    interface_type: InterfaceType
    interface_impl: str | InterfaceRef
    input_keys: tuple[str, ...] = ()
    output_keys: tuple[str, ...] = ()
    input_key_remap: Mapping[str, str] = field(default_factory=dict)
    output_key_remap: Mapping[str, str] = field(default_factory=dict)
    n_seqs: int = N_SEQS_OF_THE_RUN
    min_n_seqs: int | None = None
    n_mbs: int | None = None
    max_tokens_per_mb: int | None = None
    n_minibatches: int = 1
    n_passes: int = 1
    balanced_dp: bool = False
    log_return_value: bool = False
    max_staleness: int = 0
    pre_hooks: tuple[Hook, ...] = ()
    post_hooks: tuple[Hook, ...] = ()
    protocol: str = DEFAULT_PROTOCOL
    may_drop: bool = False
    virtual_stages: int | None = None

    @property
    def model(self) -> ModelName:
        """The replica that the call runs on."""
        return self.model_name if isinstance(self.model_name, ModelName) else ModelName(self.model_name)

    @property
    def role(self) -> str:
        """The role of `model`."""
        return self.model.role

    @property
    def interface(self) -> InterfaceRef:
        """The interface as a reference, also if it was given by name."""
        return (
            self.interface_impl if isinstance(self.interface_impl, InterfaceRef) else InterfaceRef(self.interface_impl)
        )

    def own_name(self, key: str) -> str:
        """Return the name under which the interface gives one of the output keys."""
        return next((own for own, renamed in self.output_key_remap.items() if renamed == key), key)

    @property
    def is_train(self) -> bool:
        """True if the call updates its role."""
        return self.interface_type is InterfaceType.TRAIN_STEP

    @property
    def reallocs(self) -> tuple[tuple[str, str], ...]:
        """``(source role, target role)`` of every hook that moves parameters from one role to another."""
        hooks = [hook for hook in (*self.pre_hooks, *self.post_hooks) if isinstance(hook, ParamReallocHook)]
        ends = [
            (
                self.role if hook.source is None else hook.source.role,
                self.role if hook.target is None else hook.target.role,
            )
            for hook in hooks
        ]
        return tuple((source, target) for source, target in ends if source != target)

    @property
    def read_roles(self) -> frozenset[str]:
        """Roles whose parameters the call or its hooks read."""
        return frozenset([self.role, *(source for source, _ in self.reallocs)])

    @property
    def changed_roles(self) -> frozenset[str]:
        """Roles whose parameters the call or its hooks change."""
        own = [self.role] if self.is_train else []
        return frozenset([*own, *(target for _, target in self.reallocs)])


def protocol_names() -> tuple[str, ...]:
    """Return every name that `MFCDef.protocol` may have: the built-in ones, then those that were registered."""
    return tuple(_PROTOCOL_NAMES)


def add_protocol_name(name: str) -> None:
    """Make the name of a protocol of `realrl.plan.protocols` known; a known one stays as it is."""
    if name not in _PROTOCOL_NAMES:
        _PROTOCOL_NAMES.append(name)
