"""Composition of a `RunConfig` from names, files and command-line overrides.

Later layers win: the schema's defaults, the experiment's defaults, YAML (the preset, its part for the experiment, then
the chosen cluster, allocation and models), the command line. Keys are checked layer by layer, values once at the end.
All problems are reported together.

For every role, YAML writes ``models: {"*": {...}}``, and the command line ``models.*.key=value``: training keys reach
trainable roles only, and a role that follows another keeps following its path. In YAML ``${cache_dir}`` is the folder
of downloaded assets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from realrl.config.choices import take_choices, yaml_layers
from realrl.config.keys import (
    Declared,
    DeclaredRole,
    Key,
    base_values,
    can_have,
    closest_keys,
    entry_keys,
    key_of,
    known_keys,
    model_keys,
    sections,
)
from realrl.config.overrides import Edit, parse_overrides
from realrl.config.problems import Problem, raise_problems, subject_of
from realrl.config.schema import ModelConfigSection, RunConfig
from realrl.config.validate import validate
from realrl.errors import did_you_mean

ALL_ROLES = "*"


def compose(
    experiment: Declared,
    overrides: Sequence[str] = (),
    *,
    reference: str | None = None,
    config_dir: Path | None = None,
    cache_dir: Path | None = None,
    plan: Mapping[str, object] | None = None,
    n_machines: int = 0,
) -> RunConfig:
    """Resolve the configuration of one run.

    Args:
        experiment: the declared algorithm.
        overrides: ``key=value`` in Hydra's grammar.
        reference: name by which another process finds the experiment; its own name by default.
        config_dir: folder of the YAML groups preset, cluster, allocation and model; without it there are none.
        cache_dir: value of ``${cache_dir}`` in YAML.
        plan: settings of the file that the override ``plan=FILE`` names, nested like the configuration.
        n_machines: of the job in which this is typed, for launchers that start workers on them; 0 if there is none.

    Raises:
        ConfigError: lists every malformed override, unknown key or group option, and impossible value.
    """
    reference = reference or experiment.name
    edits, problems = parse_overrides(overrides)
    choices, edits, unknown = take_choices(edits, experiment, config_dir)
    problems += unknown
    composer = _Composer(experiment, known_keys(experiment), problems, {"preset": choices.get("preset", "")})
    composer.add_layer(experiment.defaults, f"the defaults of experiment '{experiment.name}'")
    for values, origin in yaml_layers(choices, experiment, config_dir):
        composer.add_layer(values, origin)
    if plan is not None:
        _add_plan(composer, plan, edits, choices)
    for edit in edits:
        composer.apply_to_roles(edit)
        if edit.path == "plan" and edit.value and plan is None:
            problems.append(Problem(edit.subject, "plans are read by the command line alone"))
    if plan is not None:
        _complete_places(composer, plan)
    if n_machines and composer.values.get("launcher") in ("external", "slurm"):
        composer.values.setdefault("cluster.n_nodes", n_machines)

    def check(roles: Mapping[str, DeclaredRole]) -> RunConfig:
        values = {**composer.resolve(roles, cache_dir), "experiment": reference}
        config, found = validate(values, experiment, composer.keys, composer.describe)
        raise_problems(problems + found, reference)
        assert config is not None
        return config

    config = check(experiment.roles)
    roles = experiment.roles_for(config)
    return config if roles == experiment.roles else check(roles)


@dataclass
class _Composer:
    """Explicit values by dotted path, with the origin of each; `shared` holds paths given for every role at once."""

    experiment: Declared
    keys: Mapping[str, Key]
    problems: list[Problem]
    values: dict[str, object] = field(default_factory=dict)
    subjects: dict[str, tuple[str, str]] = field(default_factory=dict)
    shared: set[str] = field(default_factory=set)

    def add_layer(self, values: Mapping[str, object], origin: str) -> None:
        """Take over a nested mapping; unknown keys become problems."""
        self._check_shared(values, origin)
        shared, own = _split_shared(values, self.experiment)
        for part, is_shared in ((shared, True), (own, False)):
            for path, value in self._leaves("", part):
                subject = subject_of(path, value)
                if path in ("preset", "plan"):
                    self.problems.append(Problem(subject, f"only the command line chooses a {path}", origin))
                elif self._check_path(path, subject, value, origin):
                    self._set(path, value, subject, origin, is_shared=is_shared)

    def _check_shared(self, values: Mapping[str, object], origin: str) -> None:
        """Refuse keys of ``models."*"`` that no role would notice: no role of this experiment can have them."""
        every = _as_mapping(values.get("models")).get(ALL_ROLES, {})
        if not isinstance(every, Mapping):
            self.problems.append(Problem(subject_of("models.*", every), "must be a mapping {key: value}", origin))
            return
        idle = {k: v for k, v in every.items() if not any(can_have(r, k) for r in self.experiment.roles.values())}
        known = model_keys()
        for path, value in self._leaves("models.*", idle):
            if path not in known:
                text = f"unknown key.{closest_keys(path, known)}"
                self.problems.append(Problem(subject_of(path, value), text, origin))

    def apply_to_roles(self, edit: Edit) -> None:
        """Apply one override of the command line, with ``models.*`` to every role that can have the key."""
        section, *below = edit.path.split(".")
        if section != "models" or below[:1] != [ALL_ROLES]:
            self._apply(edit)
            return
        below = below[1:]
        roles = [name for name, role in self.experiment.roles.items() if below and can_have(role, below[0])]
        if not roles:
            text = "no role of this experiment is trained" if below else "write models.*.KEY=VALUE"
            self.problems.append(Problem(edit.subject, text))
        paths = [".".join(["models", name, *below]) for name in roles]
        is_known = any(key_of(path, self.keys) is not None or path in sections(self.keys) for path in paths)
        for path in paths if is_known else paths[:1]:
            self._apply(replace(edit, path=path), is_shared=True)

    def _apply(self, edit: Edit, *, is_shared: bool = False) -> None:
        if edit.is_deletion:
            if edit.path in sections(self.keys) or self._check_path(edit.path, edit.subject, None, ""):
                prefix = edit.path + "."
                self.values = {p: value for p, value in self.values.items() if not f"{p}.".startswith(prefix)}
            return
        key = key_of(edit.path, self.keys)
        value = edit.text if key is not None and key.takes_text and edit.text is not None else edit.value
        for path, leaf in self._leaves(edit.path, value):
            subject = edit.subject if path == edit.path and leaf is value else subject_of(path, leaf)
            if self._check_path(path, subject, leaf, ""):
                self._set(path, leaf, subject, "", is_shared=is_shared)

    def resolve(self, roles: Mapping[str, DeclaredRole], cache_dir: Path | None) -> dict[str, object]:
        """Return all values, nested: explicit ones over the schema's defaults, paths followed, ``${...}`` filled in."""
        nested = base_values(self.experiment)
        for path, value in self.values.items():
            _put(nested, path, value)
        self._interpolate(nested, cache_dir)
        models: Any = {role: section for role, section in _as_mapping(nested["models"]).items() if role in roles}
        nested["models"] = models
        for role in roles:
            models.setdefault(role, ModelConfigSection().model_dump(mode="json"))
        paths = {role: models[self._path_owner(role, roles)]["path"] for role in roles}
        for role, path in paths.items():
            models[role]["path"] = path
        return nested

    def describe(self, path: str, value: object) -> tuple[str, str]:
        """Return the value at `path` as the user gave it, and its origin."""
        return self.subjects.get(path, (subject_of(path, value), ""))

    def _path_owner(self, role: str, roles: Mapping[str, DeclaredRole]) -> str:
        """Return the role whose model path this role takes: itself, or the end of its `path_from` chain."""
        seen = [role]
        while True:
            path = f"models.{seen[-1]}.path"
            follows = roles[seen[-1]].path_from
            is_own = path in self.values and path not in self.shared
            if is_own or follows is None or follows not in roles or follows in seen:
                return seen[-1]
            seen.append(follows)

    def _set(self, path: str, value: object, subject: str, origin: str, *, is_shared: bool = False) -> None:
        self.values[path] = value
        self.subjects[path] = (subject, origin)
        (self.shared.add if is_shared else self.shared.discard)(path)

    def _leaves(self, path: str, value: object) -> Iterator[tuple[str, object]]:
        """Yield single values by dotted path; a mapping given where a single value belongs stays whole."""
        key = self.keys.get(path)
        if isinstance(value, Mapping) and (key is None or key.is_mapping):
            for name, inner in value.items():
                yield from self._leaves(f"{path}.{name}" if path else str(name), inner)
        elif path == "allocation" and isinstance(value, str):
            yield "allocation.mode", value
        elif isinstance(value, str) and (entry := key_of(path, self.keys)) and path != entry.path and entry.text_field:
            yield f"{path}.{entry.text_field}", value
        else:
            yield path, value

    def _check_path(self, path: str, subject: str, value: object, origin: str) -> bool:
        key = key_of(path, self.keys)
        if key is not None and (path != key.path or not key.is_mapping):
            return True
        parts = path.split(".")
        role = parts[1] if parts[0] == "models" and len(parts) > 1 else None
        below = [known for known in self.keys if known.startswith(path + ".")]
        if key is not None:
            text = f"must be {key.allowed}"
        elif below:
            text = f"is a section, not a value; its keys are {', '.join(below[:4])}" + (", ..." if below[4:] else "")
        elif role is not None and role not in self.experiment.roles:
            roles = ", ".join(self.experiment.roles)
            text = f"no role '{role}'; the roles are {roles}.{did_you_mean(role, self.experiment.roles)}"
        elif role is not None and len(parts) > 2 and not can_have(self.experiment.roles[role], parts[2]):
            text = f"role '{role}' is frozen: it is not trained and has no {parts[2]}"
        else:
            text = f"unknown key.{closest_keys(path, {**self.keys, **entry_keys(path, self.keys)})}"
        self.problems.append(Problem(subject, text, origin))
        return False

    def _interpolate(self, nested: dict[str, object], cache_dir: Path | None) -> None:
        marked = [path for path, value in self.values.items() if "${" in str(value)]
        if not marked:
            return
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        context: Any = None
        for path in marked:
            subject, origin = self.subjects[path]
            try:
                if context is None:
                    own = {} if cache_dir is None else {"cache_dir": str(cache_dir)}
                    context = OmegaConf.create({**nested, **own})
                node = OmegaConf.select(context, path)
                value = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
            except (OmegaConfBaseException, RecursionError) as error:
                self.problems.append(Problem(subject, (str(error).splitlines() or ["cannot be resolved"])[0], origin))
            else:
                _put(nested, path, value)


def _add_plan(
    composer: _Composer, plan: Mapping[str, object], edits: Sequence[Edit], choices: Mapping[str, str]
) -> None:
    """Take over the settings of a plan, as far as the command line leaves them open."""
    file = next((edit.subject for edit in edits if edit.path == "plan"), "plan")
    mode = next((edit.subject for edit in edits if edit.path in ("allocation", "allocation.mode")), "")
    mode = mode or (f"allocation={choices['allocation']}" if "allocation" in choices else "")
    if mode:
        text = f"{file} says already where each call runs; leave one of them out, or move single calls with "
        composer.problems.append(Problem(mode, text + "allocation.calls.CALL=d8@0:0-7"))
    given = {edit.path for edit in edits}
    calls = {} if given & {"n_mbs", "max_tokens_per_mb"} else _as_mapping(plan.get("calls"))
    calls = {name: own for name, own in calls.items() if f"calls.{name}.max_tokens_per_mb" not in given}
    composer.add_layer({**plan, "calls": calls}, file)


def _complete_places(composer: _Composer, plan: Mapping[str, object]) -> None:
    """Put strategies that the command line gives to single calls on the meshes that these have in a plan."""
    for name, place in _as_mapping(_as_mapping(plan.get("allocation")).get("calls")).items():
        path, mesh = f"allocation.calls.{name}", str(place).partition("@")[2]
        given = composer.values.get(path)
        if mesh and isinstance(given, str) and "@" not in given:
            composer.values[path] = f"{given}@{mesh}"


def _split_shared(
    values: Mapping[str, object], experiment: Declared
) -> tuple[Mapping[str, object], Mapping[str, object]]:
    """Return the values of ``models."*"`` for each role, and all others."""
    models = _as_mapping(values.get("models"))
    if ALL_ROLES not in models:
        return {}, values
    shared = _as_mapping(models[ALL_ROLES])
    by_role = {
        name: {key: value for key, value in shared.items() if can_have(role, key)}
        for name, role in experiment.roles.items()
    }
    own = {name: value for name, value in models.items() if name != ALL_ROLES}
    return {"models": by_role}, {**values, "models": own}


def _as_mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def _put(nested: dict[str, object], path: str, value: object) -> None:
    *parents, last = path.split(".")
    place: Any = nested
    for name in parents:
        place = place.setdefault(name, {})
    place[last] = value
