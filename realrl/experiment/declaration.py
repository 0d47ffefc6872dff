"""Declaration of an experiment: a named algorithm with its roles, options and calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from realrl.config.schema import RunConfig, Section
from realrl.data.kinds import DatasetKind
from realrl.graph.mfc import N_SEQS_OF_THE_RUN, MFCDef


@dataclass(frozen=True)
class Role:
    """A named model of the algorithm.

    Args:
        trainable: True if some call trains it; it then has an optimizer and is saved.
        head: "lm" predicts tokens; "value" and "reward" give one number per token position; "none" has no weights and
            no engine, only a tokenizer: its calls run plain Python (a reward function).
        path_from: role whose model path is the default.
    """

    trainable: bool
    head: Literal["lm", "value", "reward", "none"] = "lm"
    path_from: str | None = None


@dataclass(frozen=True)
class Experiment:
    """A registered algorithm.

    Args:
        name: the word after ``realrl run``.
        description: one line for ``realrl list``.
        roles: role name -> `Role`; a run uses `roles_for`.
        dataset: kind of dataset that feeds the graph.
        options: pydantic model of the keys under ``algorithm.``, with their defaults.
        mfcs: the resolved configuration -> the list of calls, before `adds`.
        defaults: configuration values that differ from the schema's own, nested like the configuration.
        role_changes: the resolved configuration -> roles that differ from `roles` in such a run; None for a role that
            such a run does without.
        adds: functions of options, applied in this order: (configuration, calls) -> changed calls.
        check: refuses configurations whose values are possible one by one but not together; its arguments are the
            resolved configuration and `defaults`.
        ancestors: the experiments that a variant comes from, the nearest first -> the defaults that it states beyond
            theirs.
        eval_metrics: metrics that `ModelInterface.evaluate` of the trained calls' interface returns, besides
            ``weight``. They are for experiments that do not generate; others are evaluated by rewards of responses.
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
    ancestors: Mapping[str, Mapping[str, object]] = field(default_factory=dict)

    def calls(self, config: RunConfig) -> list[MFCDef]:
        """Return the calls of a run with this configuration: `mfcs`, changed by `adds`; `n_seqs` where it is left out.

        Raises:
            ConfigError: `check` or an option refuses the configuration.
        """
        if self.check is not None:
            self.check(config, self.defaults)
        calls = list(self.mfcs(config))
        for add in self.adds:
            calls = add(config, calls)
        return [replace(mfc, n_seqs=config.n_seqs) if mfc.n_seqs == N_SEQS_OF_THE_RUN else mfc for mfc in calls]

    def variant(
        self, name: str, description: str, *, defaults: Mapping[str, object] | None = None, **changes: Any
    ) -> Experiment:
        """Return an experiment that differs from this one.

        Args:
            name, description: fields of the variant.
            defaults: configuration values that differ from this one's, nested like the configuration.
            changes: other fields that differ.
        """
        own = defaults or {}
        ancestors = {self.name: own, **{older: _merged(stated, own) for older, stated in self.ancestors.items()}}
        merged = _merged(self.defaults, own)
        return replace(self, name=name, description=description, defaults=merged, ancestors=ancestors, **changes)

    def roles_for(self, config: RunConfig) -> Mapping[str, Role]:
        """Return the roles of a run with this configuration; the names are those of `roles`, or fewer."""
        changed = {**self.roles, **(self.role_changes(config) if self.role_changes else {})}
        return {name: role for name, role in changed.items() if role is not None}


def _merged(first: Mapping[str, object], second: Mapping[str, object]) -> dict[str, object]:
    """Return both, merged section by section; `second` wins."""
    merged = dict(first)
    for key, value in second.items():
        old = merged.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        merged[key] = _merged(old, value) if both else value  # type: ignore[arg-type]
    return merged
