"""No key is ignored: whatever can be typed arrives, and every key says what it is."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

import pytest

from realrl.cli.config_view import listed_keys
from realrl.config.compose import compose
from realrl.config.keys import closest_keys, known_keys
from realrl.config.schema import RunConfig
from realrl.errors import ConfigError
from realrl.experiment.declaration import Experiment
from realrl.experiment.discovery import experiment_names, load_experiment
from tests.config.declared import experiment

CANDIDATES = (
    *("8", "3", "0.25", "0.5", "2e-4", "true", "false", "text", "module:function", "[0.5,0.25]", "[1,2]"),
    *("[wandb]", "{name: d1}", "{name: 0.5}", "{name: {function: overlong}}", "{name: {n_mbs: 3}}"),
    *("rloo", "gae", "grpo", "clip", "reinforce", "equal_rewards", "greedy", "null"),
)


def flat(value: object, path: str = "") -> dict[str, object]:
    if not isinstance(value, Mapping) or not value:
        return {path: value}
    return {k: v for name, inner in value.items() for k, v in flat(inner, f"{path}.{name}".lstrip(".")).items()}


def dumped(config: RunConfig) -> dict[str, object]:
    return flat(json.loads(config.model_dump_json()))


def is_of_role(path: str, roles: Iterable[str]) -> bool:
    return path.startswith("models.") and path.split(".")[1] in roles


def changed_by(declared: Experiment, default: RunConfig, path: str, allowed: str) -> set[str]:
    """Return what changes from the default when `path` gets another valid value, besides which roles the run has."""
    roles, before = set(default.models), dumped(default)
    choices = allowed.removeprefix("one of ").split(", ") if allowed.startswith("one of ") else []
    for candidate in (*choices, *CANDIDATES):
        try:
            config = compose(declared, [f"{path}={candidate}", "preset="])
        except ConfigError:
            continue
        after = dumped(config)
        changed = {key for key in {*before, *after} if before.get(key, "absent") != after.get(key, "absent")}
        changed = {key for key in changed if not is_of_role(key, roles ^ set(config.models))}
        if changed:
            return changed
    return set()


@pytest.mark.parametrize("name", ["demo", *experiment_names()])
def test_every_key_of_the_schema_arrives(name: str) -> None:
    declared = experiment() if name == "demo" else load_experiment(name)
    keys = known_keys(declared)
    followers = {f"models.{role}.path" for role, declared_role in declared.roles.items() if declared_role.path_from}
    default = compose(declared)
    absent = set(declared.roles) - set(default.models)
    tried = {} if name in ("demo", "ppo") else known_keys(load_experiment("ppo"))
    for path, key in keys.items():
        if is_of_role(path, absent):  # `realrl run` refuses them
            continue
        if tried.get(path) == key:  # a key of all experiments arrives by the same way
            continue
        changed = changed_by(declared, default, path, key.allowed)
        if path == "preset" or (" " not in key.allowed and key.allowed != "text"):  # the only value there is
            continue
        if key.is_mapping:
            assert changed == {path, *(f"{path}.name.{field}" for field in key.fields or ())} or (
                changed == {path, f"{path}.name"}
            ), path
        else:
            assert path in changed, path
            assert changed - {path} <= (followers if path.startswith("models.") else set()), path


@pytest.mark.parametrize("name", ["demo", *experiment_names()])
def test_keys_are_exactly_the_leaves_of_the_configuration(name: str) -> None:
    declared = experiment() if name == "demo" else load_experiment(name)
    frozen = [f"models.{role}." for role, declared_role in declared.roles.items() if not declared_role.trainable]
    leaves = set(dumped(compose(declared))) - {"experiment"}
    leaves = {p for p in leaves if not (p.startswith(tuple(frozen)) and p.split(".")[2] != "path")}
    absent = set(declared.roles) - set(compose(declared).models)
    assert {key for key in known_keys(declared) if not is_of_role(key, absent)} == leaves


@pytest.mark.parametrize("name", experiment_names())
def test_under_sixty_keys_matter(name: str) -> None:
    declared = load_experiment(name)
    listed = [key for key, _ in listed_keys(declared, compose(declared))]
    assert len([key for key in listed if not key.is_advanced]) < 60


@pytest.mark.parametrize("name", experiment_names())
def test_every_key_says_what_it_does_and_what_it_accepts(name: str) -> None:
    for path, key in known_keys(load_experiment(name)).items():
        assert len(key.description) > 8, path
        assert key.allowed, path


def test_the_closest_key_is_found_by_its_end_too() -> None:
    keys = known_keys(experiment())
    assert closest_keys("max_new_token", keys) == " Did you mean 'generation.max_new_tokens'?"
    assert closest_keys("genaration.top_k", keys) == " Did you mean 'generation.top_k'?"
    assert closest_keys("backend", known_keys(load_experiment("ppo"))) == (
        " Did you mean 'models.actor.backend' or 'models.critic.backend', or 'models.*.backend' for all?"
    )
    assert closest_keys("qqqqqq", keys) == ""
    assert closest_keys("steps", {}) == ""
