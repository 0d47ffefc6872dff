"""An experiment: a named algorithm as users declare it, found by name or by file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from realrl.config.schema import RunConfig, Section
from realrl.data.kinds import DatasetKind
from realrl.graph.mfc import MFCDef


@dataclass(frozen=True)
class Role:
    """A named model of the algorithm.

    Args:
        trainable: whether some call trains it; decides if it has an optimizer and is saved.
        head: "lm" predicts tokens; "value" and "reward" give one number per token position; "none" has no weights and
            no engine, only a tokenizer: its calls run plain Python (a reward function).
        path_from: take the model path of this role when the user gives none.
    """

    trainable: bool
    head: Literal["lm", "value", "reward", "none"] = "lm"
    path_from: str | None = None


@dataclass(frozen=True)
class Experiment:
    """A registered algorithm.

    Args:
        name: what the user types after ``realrl run``.
        description: one line for ``realrl list``.
        roles: role name -> `Role`; a run uses `roles_for`.
        dataset: kind of dataset that feeds the graph.
        options: pydantic model of the keys under ``algorithm.``, with their defaults.
        mfcs: the resolved configuration -> the list of calls.
        defaults: configuration values that differ from the schema's own, nested like the configuration.
        role_changes: the resolved configuration -> roles that differ from `roles` in such a run; None for a role that
            such a run does without.
        eval_metrics: what `ModelInterface.evaluate` of the trained calls' interface returns, besides ``weight``; for
            experiments that do not generate: those that do are evaluated by the rewards of what they generate.
    """

    name: str
    description: str
    roles: Mapping[str, Role]
    dataset: DatasetKind
    mfcs: Callable[[RunConfig], Sequence[MFCDef]]
    options: type[Section] = Section
    defaults: Mapping[str, object] = field(default_factory=dict)
    role_changes: Callable[[RunConfig], Mapping[str, Role | None]] | None = None
    eval_metrics: tuple[str, ...] = ()

    def roles_for(self, config: RunConfig) -> Mapping[str, Role]:
        """The roles of a run with this configuration; the names are those of `roles`, or fewer."""
        changed = {**self.roles, **(self.role_changes(config) if self.role_changes else {})}
        return {name: role for name, role in changed.items() if role is not None}
