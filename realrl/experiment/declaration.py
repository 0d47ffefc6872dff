"""An experiment: a named algorithm as users declare it, found by name or by file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

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
        mfcs: the resolved configuration -> the list of calls, before `adds`.
        defaults: configuration values that differ from the schema's own, nested like the configuration.
        role_changes: the resolved configuration -> roles that differ from `roles` in such a run; None for a role that
            such a run does without.
        adds: what options add to the calls or change in them, in this order: (configuration, calls) -> calls.
        check: refuses configurations whose values are possible one by one but not together; its arguments are the
            resolved configuration and `defaults`.
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
    adds: tuple[Callable[[RunConfig, list[MFCDef]], list[MFCDef]], ...] = ()
    check: Callable[[RunConfig, Mapping[str, object]], None] | None = None

    def calls(self, config: RunConfig) -> list[MFCDef]:
        """The calls of a run with this configuration: `mfcs`, and what its options add.

        Raises:
            ConfigError: `check` or an option refuses it.
        """
        if self.check is not None:
            self.check(config, self.defaults)
        calls = list(self.mfcs(config))
        for add in self.adds:
            calls = add(config, calls)
        return calls

    def variant(
        self, name: str, description: str, *, defaults: Mapping[str, object] | None = None, **changes: Any
    ) -> Experiment:
        """An experiment that differs from this one.

        Args:
            name, description: of the variant.
            defaults: configuration values that differ from this one's, nested like the configuration.
            changes: other fields.
        """
        merged = _merged(self.defaults, defaults or {})
        return replace(self, name=name, description=description, defaults=merged, **changes)

    def roles_for(self, config: RunConfig) -> Mapping[str, Role]:
        """The roles of a run with this configuration; the names are those of `roles`, or fewer."""
        changed = {**self.roles, **(self.role_changes(config) if self.role_changes else {})}
        return {name: role for name, role in changed.items() if role is not None}


def _merged(first: Mapping[str, object], second: Mapping[str, object]) -> dict[str, object]:
    """Both, section by section; `second` wins."""
    merged = dict(first)
    for key, value in second.items():
        old = merged.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        merged[key] = _merged(old, value) if both else value  # type: ignore[arg-type]
    return merged
