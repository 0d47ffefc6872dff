"""Files of plans: settings for people to read and change, and what they hold for.

settings:   nested like the configuration: allocation.calls, calls.*.n_mbs, models.*.optimizer.zero_stage, ...
holds_for:  experiment, cluster, calls with their keys, sizes of models; a plan is refused for anything else
made:       method, seed, machine, lengths, period and bound
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from realrl.config.choices import load_yaml
from realrl.config.problems import show
from realrl.config.schema import RunConfig
from realrl.errors import AllocationError, ConfigError, did_you_mean
from realrl.experiment.declaration import Experiment, Role
from realrl.experiment.models import role_config, with_precision
from realrl.graph.mfc import MFCDef
from realrl.mesh.device_mesh import Cluster
from realrl.mesh.notation import parse_allocation
from realrl.planner.settings import PlanSettings
from realrl.shape import DecoderConfig

_REMEDY = "`realrl plan --out FILE` writes such files."
_SIZES = ("head", "n_layers", "hidden_size", "n_heads", "n_kv_heads", "head_dim", "intermediate_size", "vocab_size")

_T = TypeVar("_T")


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Optimizer(_Part):
    zero_stage: Annotated[int, Field(ge=0, le=3)] | None = None
    offload: bool | None = None


class _Model(_Part):
    activation_checkpointing: bool | None = None
    optimizer: _Optimizer = _Optimizer()


class _Call(_Part):
    n_mbs: Annotated[int, Field(ge=1)]


class _Places(_Part):
    mode: Literal["manual"]
    calls: dict[str, str]
    offload: list[str] = []
    fuse: list[str] = []


class _Settings(_Part):
    allocation: _Places
    calls: dict[str, _Call] = {}
    models: dict[str, _Model] = {}


class _Cluster(_Part):
    n_nodes: int
    n_devices_per_node: int
    device: str


class _HoldsFor(_Part):
    experiment: str
    cluster: _Cluster
    calls: dict[str, dict[str, str | list[str]]]
    models: dict[str, dict[str, int | str]]


class _File(_Part):
    settings: _Settings
    holds_for: _HoldsFor
    made: dict[str, Any] = {}


@dataclass(frozen=True)
class PlanFile:
    """A plan as a file has it.

    Attributes:
        source: the key and the file, for messages.
        holds_for: experiment, cluster, calls, models.
        made: how it was made; nothing depends on it.
    """

    source: str
    settings: PlanSettings
    holds_for: Mapping[str, Any]
    made: Mapping[str, Any]

    @property
    def layer(self) -> dict[str, Any]:
        """Values of the configuration that the file brings: the settings, and the kind of device."""
        return {**self.settings.overrides(), "cluster": {"device": self.holds_for["cluster"]["device"]}}


def sizes_of(model: DecoderConfig) -> dict[str, object]:
    """Return what of a model decides a plan."""
    found: dict[str, object] = {name: getattr(model, name) for name in _SIZES}
    if model.moe is not None:
        found |= {"n_experts": model.moe.n_experts, "expert_size": model.moe.intermediate_size}
    return found | ({"lora_rank": model.lora.rank} if model.lora is not None else {})


def holds_for(
    config: RunConfig, experiment: Experiment, mfcs: Sequence[MFCDef], models: Mapping[str, DecoderConfig]
) -> dict[str, Any]:
    """Return what a plan of a run holds for."""
    cluster = config.cluster
    calls = {
        mfc.name: {
            "role": mfc.role,
            "type": mfc.interface_type.value,
            "reads": list(mfc.input_keys),
            "writes": list(mfc.output_keys),
        }
        for mfc in mfcs
    }
    return {
        "experiment": experiment.name,
        "cluster": {
            "n_nodes": cluster.n_nodes,
            "n_devices_per_node": cluster.n_devices_per_node,
            "device": cluster.device,
        },
        "calls": calls,
        "models": {name: sizes_of(model) for name, model in models.items()},
    }


def plan_text(
    settings: PlanSettings, holds: Mapping[str, Any], made: Mapping[str, Any], notes: tuple[str, ...] = ()
) -> str:
    """Return the content of a plan's file: notes as a comment, then the sections."""
    import yaml  # type: ignore[import-untyped]

    def dumped(name: str, section: Mapping[str, Any], *, is_block: bool) -> str:
        flow = False if is_block else None  # None: what holds plain values alone takes one line
        text: str = yaml.safe_dump({name: dict(section)}, sort_keys=False, width=120, default_flow_style=flow)
        return text

    comment = "".join(f"# {note}".rstrip() + "\n" for note in notes)
    rest = dumped("holds_for", holds, is_block=False) + dumped("made", made, is_block=True)
    return comment + dumped("settings", settings.overrides(), is_block=True) + rest


def read_plan(path: str, *, source: str) -> PlanFile:
    """Read the file of a plan.

    Args:
        source: the key or option that names it, for messages, such as "plan=FILE".

    Raises:
        ConfigError: it cannot be read, is no plan, or has keys that no plan has.
    """
    try:
        found = _File.model_validate(load_yaml(Path(path), source))
    except ValidationError as error:
        raise ConfigError(f"{source}: {_first(error)}", remedy=_REMEDY) from error
    except ConfigError as error:
        raise ConfigError(error.message, remedy=_REMEDY) from error
    places, calls, models = found.settings.allocation, found.settings.calls, found.settings.models
    optimizers = {role: own.optimizer for role, own in models.items()}
    settings = PlanSettings(
        places.calls,
        {name: own.n_mbs for name, own in calls.items()},
        _given({role: own.zero_stage for role, own in optimizers.items()}),
        _given({role: own.activation_checkpointing for role, own in models.items()}),
        _given({role: own.offload for role, own in optimizers.items()}),
        tuple(places.offload),
        tuple(places.fuse),
    )
    return PlanFile(source, settings, found.holds_for.model_dump(), found.made)


def check_experiment(plan: PlanFile, experiment: Experiment) -> None:
    """Refuse a plan for another experiment.

    Raises:
        ConfigError: names both.
    """
    name = plan.holds_for.get("experiment")
    if name != experiment.name:
        raise ConfigError(
            f"{plan.source} is a plan for '{name}', not for '{experiment.name}'",
            remedy=f"Make one: realrl plan {experiment.name} ... --out FILE.",
        )


def check_holds(plan: PlanFile, config: RunConfig, experiment: Experiment) -> None:
    """Refuse a plan that was made for another experiment, cluster, graph or model than a run's, or is damaged.

    Raises:
        ConfigError: names the first difference, or the setting that this run cannot have, and the nearest thing that
            works.
    """
    check_experiment(plan, experiment)
    config = with_precision(config)
    models = {name: role_config(config, name, role) for name, role in experiment.roles_for(config).items()}
    ours = holds_for(config, experiment, experiment.calls(config), _given(models))
    theirs = plan.holds_for
    again = f"Make a plan for it: realrl plan {experiment.name} ... --out FILE."
    cluster, wanted = ours["cluster"], theirs["cluster"]
    if cluster != wanted:
        keys = " ".join(f"cluster.{key}={value}" for key, value in wanted.items() if cluster.get(key) != value)
        raise ConfigError(
            f"{plan.source} is a plan for {_cluster_text(wanted)}, and this run has {_cluster_text(cluster)}",
            remedy=f"Set {keys}, or make a plan for this cluster: realrl plan {experiment.name} ... --out FILE.",
        )
    for section, noun in (("calls", "call"), ("models", "model of role")):
        here, there = ours[section], theirs[section]
        for name in (*there, *(name for name in here if name not in there)):
            if name not in here or name not in there:
                state = "has none" if name not in here else "has one"
                raise ConfigError(
                    f"{plan.source} was made {'with' if name in there else 'without'} a {noun} '{name}', and this run "
                    f"{state}",
                    remedy=again,
                )
            for key in {**here[name], **there[name]}:
                value, other = here[name].get(key), there[name].get(key)
                if other != value:
                    raise ConfigError(
                        f"{plan.source} is a plan for a {noun} '{name}' with {key}={show(other)}, and this run has "
                        f"{show(value)}",
                        remedy=again,
                    )
    size = Cluster(config.cluster.n_nodes, config.cluster.n_devices_per_node)
    _check_settings(plan, ours["calls"], experiment.roles_for(config), size)


def check_pins(plan: PlanFile, config: RunConfig) -> None:
    """Refuse a plan, which holds for the run, that has a call elsewhere than `allocation.calls` of the run says.

    Raises:
        ConfigError: names the call.
    """
    cluster = Cluster(config.cluster.n_nodes, config.cluster.n_devices_per_node)
    for name, text in config.allocation.calls.items():
        place = plan.settings.allocations.get(name, "")
        wanted = text if "@" in text else f"{text}@{place.partition('@')[2]}"
        if not place or parse_allocation(wanted, cluster) != parse_allocation(place, cluster):
            raise ConfigError(f"{plan.source} has {name} on {place or 'no mesh'}, not allocation.calls.{name}={text}")


def _check_settings(plan: PlanFile, calls: Collection[str], roles: Mapping[str, Role], cluster: Cluster) -> None:
    """Refuse settings of calls and roles that a run does not have, and places that its cluster does not have.

    Raises:
        ConfigError: names the first of them.
    """
    settings, places = plan.settings, "settings.allocation.calls"
    trained = [name for name, role in roles.items() if role.trainable]
    of_models = {**settings.zero_stage, **settings.checkpointing, **settings.offload_optimizer}
    for key, names, noun, known in (
        (places, settings.allocations, "call", calls),
        ("settings.calls", settings.n_mbs, "call", calls),
        ("settings.models", of_models, "role that is trained", trained),
        ("settings.allocation.offload", settings.offload, "role", roles),
        ("settings.allocation.fuse", settings.fuse, "call", calls),
    ):
        for name in names:
            if name not in known:
                raise ConfigError(
                    f"{plan.source}: {key} has '{name}', and this run has no such {noun}",
                    remedy=f"It has {', '.join(known) or 'none'}.{did_you_mean(name, known)}",
                )
    for name in calls:
        if name not in settings.allocations:
            raise ConfigError(f"{plan.source}: {places}.{name} is missing", remedy=_REMEDY)
        try:
            parse_allocation(settings.allocations[name], cluster)
        except AllocationError as error:
            raise ConfigError(f"{plan.source}: {places}.{name}: {error.message}", remedy=error.remedy) from error


def _given(values: Mapping[str, _T | None]) -> dict[str, _T]:
    return {role: value for role, value in values.items() if value is not None}


def _cluster_text(cluster: Mapping[str, Any]) -> str:
    nodes, size = cluster["n_nodes"], cluster["n_devices_per_node"]
    of_nodes = f"{nodes} node{'' if nodes == 1 else 's'} of {size} device{'' if size == 1 else 's'}"
    return f"{of_nodes} of type {cluster['device']}"


def _first(error: ValidationError) -> str:
    """Return the first problem of a file, with the key that has it."""
    detail = error.errors(include_url=False)[0]
    key = ".".join(map(str, detail["loc"]))
    if detail["type"] == "extra_forbidden":
        return f"a plan has no key '{key}'"
    if detail["type"] == "missing":
        return f"the key '{key}' is missing"
    return f"{key}={show(detail['input'])}: {detail['msg']}"
