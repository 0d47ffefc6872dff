"""The keys that a user can set: their dotted paths, their allowed values, and the closest one to a wrong name.

Invariants: the leaves of `known_keys` are exactly the values of a `RunConfig` that a user may set; the optimizer and
adapters of a frozen role are not among them.
"""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from realrl.config.schema import ModelConfigSection, RunConfig, Section

NOT_FOR_USERS = frozenset({"experiment"})  # given by its position on the command line
TRAINING_KEYS = ("backend", "optimizer", "activation_checkpointing", "router_aux_loss_coef", "lora")


class DeclaredRole(Protocol):
    """A role, as far as configuration needs it."""

    @property
    def trainable(self) -> bool: ...
    @property
    def path_from(self) -> str | None: ...


class Declared(Protocol):
    """An experiment, as far as configuration needs it."""

    @property
    def name(self) -> str: ...
    @property
    def roles(self) -> Mapping[str, DeclaredRole]: ...
    @property
    def options(self) -> type[Section]: ...
    @property
    def defaults(self) -> Mapping[str, object]: ...
    @property
    def ancestors(self) -> Mapping[str, Mapping[str, object]]: ...
    def roles_for(self, config: RunConfig) -> Mapping[str, DeclaredRole]: ...


@dataclass(frozen=True)
class Key:
    """One value that a user can set.

    Attributes:
        path: dotted path.
        allowed: allowed values in words; completes the sentence "must be ...".
        description: effect of the value.
        is_advanced: few users change it.
        is_mapping: any key below `path` is valid too.
        takes_text: a value that looks like a number is still text.
        fields: for a mapping whose values are sections: field -> its key, with the field's name as path.
        text_field: the field that is meant when such a section is given as text.
    """

    path: str
    allowed: str
    description: str
    is_advanced: bool
    is_mapping: bool
    takes_text: bool
    fields: Mapping[str, Key] = field(default_factory=dict)
    text_field: str = ""


def can_have(role: DeclaredRole, name: str) -> bool:
    """Return True if a role can have the field `name`: frozen roles have no fields of training."""
    return role.trainable or name not in TRAINING_KEYS


def known_keys(experiment: Declared) -> dict[str, Key]:
    """Return every key of an experiment by dotted path, in the order of the schema."""
    keys: list[Key] = []
    for name, info in RunConfig.model_fields.items():
        if name in NOT_FOR_USERS:
            continue
        if name == "models":
            for role, declared in experiment.roles.items():
                for key in _walk(ModelConfigSection, f"models.{role}."):
                    if can_have(declared, key.path.split(".")[2]):
                        keys.append(key)
        elif name == "algorithm":
            keys.extend(_walk(experiment.options, "algorithm."))
        else:
            keys.extend(_leaves(name, info))
    return {key.path: key for key in keys}


def model_keys() -> dict[str, Key]:
    """Return every key that the model of some role can have, as ``models.*.KEY``."""
    return {key.path: key for key in _walk(ModelConfigSection, "models.*.")}


def base_values(experiment: Declared) -> dict[str, object]:
    """Return the defaults of the schema, as nested JSON-like values; an option without a default is absent."""
    fields = RunConfig.model_fields
    values = {name: _default(info) for name, info in fields.items() if name not in NOT_FOR_USERS}
    values["models"] = {role: ModelConfigSection().model_dump(mode="json") for role in experiment.roles}
    options = experiment.options.model_fields
    values["algorithm"] = {name: _default(info) for name, info in options.items() if not info.is_required()}
    return values


def sections(keys: Mapping[str, Key]) -> set[str]:
    """Return the dotted paths above the keys: "generation", "models", "models.actor", ..."""
    found: set[str] = set()
    for path in keys:
        parts = path.split(".")
        found.update(".".join(parts[:n]) for n in range(1, len(parts)))
    return found


def key_of(path: str, keys: Mapping[str, Key]) -> Key | None:
    """Return the key that `path` sets: itself, the mapping that it is an entry of, or a field of such an entry."""
    if path in keys:
        return keys[path]
    parent = path.rpartition(".")[0]
    if parent in keys and keys[parent].is_mapping:
        return keys[parent]
    fields = entry_keys(path, keys)
    parents = [path.rsplit(".", n)[0] for n in range(1, path.count("."))]
    return fields.get(path) or next((fields[p] for p in parents if p in fields and fields[p].is_mapping), None)


def entry_keys(path: str, keys: Mapping[str, Key]) -> dict[str, Key]:
    """Return the fields of the mapping's entry that `path` is in, by dotted path; none if it is in no such section."""
    parts = path.split(".")
    for n in range(1, len(parts) - 1):
        key = keys.get(".".join(parts[:n]))
        if key is not None and key.fields:
            return {f"{key.path}.{parts[n]}.{name}": inner for name, inner in key.fields.items()}
    return {}


def closest_keys(path: str, known: Mapping[str, Key]) -> str:
    """Return `` Did you mean 'x' or 'y'?`` for a wrong path, or an empty string.

    The last part decides first: ``max_new_tokens`` finds ``generation.max_new_tokens``.
    """
    last = path.rpartition(".")[2]

    def likeness(candidate: str) -> float:
        whole = difflib.SequenceMatcher(None, path, candidate).ratio()
        tail = difflib.SequenceMatcher(None, last, candidate.rpartition(".")[2]).ratio()
        return max(whole, 0.7 * tail + 0.3 * whole)

    ranked = sorted(((likeness(candidate), candidate) for candidate in known), key=lambda pair: -pair[0])
    if not ranked or ranked[0][0] < 0.6:
        return ""
    best = [candidate for score, candidate in ranked[:3] if score > ranked[0][0] - 0.06]
    for_all = {re.sub(r"^models\.[^.]+", "models.*", candidate) for candidate in best}
    every_role = f", or {for_all.pop()!r} for all" if len(best) > 1 and len(for_all) == 1 else ""
    return " Did you mean " + " or ".join(repr(candidate) for candidate in best) + every_role + "?"


def _default(info: FieldInfo) -> object:
    value = info.get_default(call_default_factory=True, validated_data={})
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else value


def _walk(model: type[BaseModel], prefix: str) -> Iterator[Key]:
    for name, info in model.model_fields.items():
        yield from _leaves(prefix + name, info)


def _leaves(path: str, info: FieldInfo) -> Iterator[Key]:
    annotation = info.annotation
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield from _walk(annotation, path + ".")
        return
    extra = info.json_schema_extra
    section = _section_of_entries(annotation)
    fields = {key.path: key for key in _walk(section, "")} if section else {}
    required = [name for name, inner in section.model_fields.items() if inner.is_required()] if section else []
    yield Key(
        path=path,
        allowed=_words(annotation, tuple(info.metadata)),
        description=info.description or "",
        is_advanced=isinstance(extra, dict) and bool(extra.get("advanced")),
        is_mapping=get_origin(annotation) is dict,
        takes_text=annotation in (str, str | None, dict[str, str]),
        fields=fields,
        text_field=required[0] if required else "",
    )


def _section_of_entries(annotation: Any) -> type[BaseModel] | None:
    """Return the section class of a mapping's values, or None if they are no sections."""
    args = get_args(annotation) if get_origin(annotation) is dict else ()
    return args[1] if args and isinstance(args[1], type) and issubclass(args[1], BaseModel) else None


def _words(annotation: Any, limits: tuple[Any, ...] = ()) -> str:
    """Return a type and its limits in words: ``a whole number >= 1``."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner, *fields = args
        return _words(inner, tuple(limit for field in fields for limit in getattr(field, "metadata", ())))
    if origin is Literal:
        return "one of " + ", ".join(str(choice) for choice in args) if len(args) > 1 else str(args[0])
    if origin is types.UnionType or origin is Union:
        return " or ".join("null" if arg is type(None) else _words(arg, limits) for arg in args)
    if origin in (tuple, list):
        if len(args) == 2 and args[1] is not Ellipsis:
            return f"two values [a,b], each {_words(args[0])}"
        return f"a list [a,b,...], each {_words(args[0])}"
    if section := _section_of_entries(annotation):
        return f"a mapping {{name: {{{', '.join(section.model_fields)}}}}}"
    if origin is dict:
        return f"a mapping {{name: value}}, each value {_words(args[1])}"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return names.get(annotation, str(getattr(annotation, "__name__", annotation))) + _limits(limits)


def _limits(limits: tuple[Any, ...]) -> str:
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    found = [
        f"{sign} {getattr(limit, name)}" for limit in limits for name, sign in signs.items() if hasattr(limit, name)
    ]
    if any(getattr(limit, "min_length", 0) for limit in limits):
        found.append("that is not empty")
    return " " + " and ".join(found) if found else ""
