"""Declaration of an experiment: a named algorithm with its roles, options and calls."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from realrl.config.schema import RunConfig, Section
from realrl.data.kinds import DatasetKind
from realrl.errors import ConfigError
from realrl.experiment.loading import staying
from realrl.graph.checks import check_types
from realrl.graph.mfc import N_SEQS_OF_THE_RUN, MFCDef

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")  # runs and checkpoints have folders of these names
_MOST_ROLES = 64
RoleHead = Literal["lm", "value", "reward", "none"]


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
    head: RoleHead = "lm"
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
        with staying():
            if self.check is not None:
                self.check(config, self.defaults)
            calls = self._checked(self.mfcs(config))
            for add in self.adds:
                calls = self._checked(add(config, calls))
        return [replace(mfc, n_seqs=config.n_seqs) if mfc.n_seqs == N_SEQS_OF_THE_RUN else mfc for mfc in calls]

    def _checked(self, calls: Sequence[MFCDef]) -> list[MFCDef]:
        listed = list(calls) if isinstance(calls, Sequence) else [calls]
        for call in listed:
            if not isinstance(call, MFCDef):
                raise ConfigError(f"experiment '{self.name}' gives {type(call).__name__} for a list of MFCDef")
            check_types(call)
        return listed

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
        with staying():
            changes = self.role_changes(config) if self.role_changes else {}
        if not isinstance(changes, Mapping) or not all(
            role is None or isinstance(role, Role) for role in changes.values()
        ):
            raise ConfigError(f"role_changes of experiment '{self.name}' gives no mapping of names to Role or None")
        changed = {**self.roles, **changes}
        return {name: role for name, role in changed.items() if role is not None}


def _merged(first: Mapping[str, object], second: Mapping[str, object]) -> dict[str, object]:
    """Return both, merged section by section; `second` wins."""
    merged = dict(first)
    for key, value in second.items():
        old = merged.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        merged[key] = _merged(old, value) if both else value  # type: ignore[arg-type]
    return merged


def check_declaration(experiment: Experiment, reference: str) -> None:
    """Refuse an experiment with a field of another type, or a name that cannot be that of a folder.

    Raises:
        ConfigError: names the field.
    """
    e, roles = experiment, experiment.roles if isinstance(experiment.roles, Mapping) else {}
    fields = {
        "name": (_is_name(e.name), "at most 64 letters, digits, '_', '-' and '.', a letter first"),
        "description": (isinstance(e.description, str), "text"),
        "roles": (0 < len(roles) <= _MOST_ROLES, f"a mapping of 1 to {_MOST_ROLES} names to Role(...)"),
        "dataset": (isinstance(e.dataset, DatasetKind), "a DatasetKind"),
        "mfcs": (_takes(e.mfcs, 1), "a function from the configuration to a list of MFCDef"),
        "options": (isinstance(e.options, type) and issubclass(e.options, Section), "a subclass of Section"),
        "defaults": (_is_plain(e.defaults), "a mapping of plain values"),
        "role_changes": (e.role_changes is None or _takes(e.role_changes, 1), "a function of the configuration"),
        "adds": (
            isinstance(e.adds, Sequence) and all(_takes(f, 2) for f in e.adds),
            "functions (configuration, calls)",
        ),
        "check": (e.check is None or _takes(e.check, 2), "a function (configuration, defaults)"),
        "ancestors": (_is_plain(e.ancestors), "a mapping of names to defaults"),
        "eval_metrics": (
            isinstance(e.eval_metrics, tuple) and all(isinstance(m, str) for m in e.eval_metrics),
            "names",
        ),
    }
    for name, role in roles.items():
        fields[f"roles[{name!r}]"] = (_is_name(name), "named by letters, digits, '_', '-' and '.', a letter first")
        is_role = isinstance(role, Role) and isinstance(role.trainable, bool) and role.head in get_args(RoleHead)
        fields[f"role {name!r}"] = (
            is_role and (role.path_from is None or role.path_from in roles),
            f"a Role(trainable=..., head=one of {', '.join(get_args(RoleHead))}, path_from=another role)",
        )
    for field_name, (is_right, wanted) in fields.items():
        if not is_right:
            raise ConfigError(f"EXPERIMENT in '{reference}' has an impossible {field_name}: it must be {wanted}")


def _takes(function: object, n_arguments: int) -> bool:
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(*[None] * n_arguments)
    except TypeError:
        return False
    except ValueError:  # a built-in function that does not tell
        return True
    return True


def _is_plain(defaults: object) -> bool:
    try:
        return isinstance(defaults, Mapping) and bool(json.dumps(defaults, default=dict))
    except (TypeError, ValueError, RecursionError):
        return False


def _is_name(name: object) -> bool:
    return isinstance(name, str) and _NAME.fullmatch(name) is not None
