"""The settings of single calls, merged from the configuration, the algorithm and the run.

For every key of `CallConfig` the first source that sets it decides:

    calls.<call>.<key>      the configuration, for this call
    MFCDef(<key>=...)       the algorithm
    <key>                   the run: n_mbs, max_tokens_per_mb, min_n_seqs

An algorithm gives `max_staleness` of the run to the calls that may run ahead. It asks `RunConfig.staleness_of` for the
setting of one call, since its computations depend on it.
Imports no torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from realrl.config.problems import Problem, raise_problems, show
from realrl.config.schema import CallConfig, RunConfig
from realrl.errors import ConfigError, did_you_mean
from realrl.experiment.declaration import Experiment, Role
from realrl.graph.build import lead_waits
from realrl.graph.mfc import InterfaceType, MFCDef, protocol_names
from realrl.plan.protocols import EQUAL_COUNT_PROTOCOLS

if TYPE_CHECKING:
    import networkx as nx

KEYS = tuple(CallConfig.model_fields)
MICRO_BATCHING = ("n_mbs", "max_tokens_per_mb")


def configured_calls(experiment: Experiment, config: RunConfig) -> list[MFCDef]:
    """Return the calls that an experiment declares, with the configuration's settings of single calls.

    Raises:
        ConfigError: a setting names no call, has no effect on it, or an impossible value; lists all of them.
    """
    declared = experiment.calls(config)
    raise_problems(list(_problems(experiment, config, declared)), config.experiment)
    return [replace(mfc, **_changes(config.calls[mfc.name])) if mfc.name in config.calls else mfc for mfc in declared]


def with_run_settings(mfc: MFCDef, config: RunConfig) -> MFCDef:
    """Return the call with the run's micro-batching and streaming, where it sets none itself.

    A call that trains, or whose hooks change another role, never streams: its result would depend on timing.

    Raises:
        ConfigError: an algorithm gives micro-batching twice for one call.
    """
    if mfc.n_mbs is not None and mfc.max_tokens_per_mb is not None:
        raise ConfigError(f"call '{mfc.name}' sets both n_mbs and max_tokens_per_mb", remedy="Keep one of them.")
    if mfc.min_n_seqs is None and not mfc.is_train and not mfc.reallocs:
        n_seqs = config.min_n_seqs
        mfc = replace(mfc, min_n_seqs=None if n_seqs is None else min(n_seqs, mfc.n_seqs))
    if mfc.n_mbs is not None or mfc.max_tokens_per_mb is not None:
        return mfc
    return replace(mfc, n_mbs=config.n_mbs, max_tokens_per_mb=config.max_tokens_per_mb)


def check_run_staleness(mfcs: Sequence[MFCDef], config: RunConfig, experiment: str) -> None:
    """Check that `max_staleness` of the run concerns some call, if only one with a setting of its own.

    Raises:
        ConfigError: no call runs ahead.
    """
    own = {name for name, settings in config.calls.items() if settings.max_staleness is not None}
    if config.max_staleness and not any(mfc.max_staleness or mfc.name in own for mfc in mfcs):
        raise ConfigError(
            f"max_staleness={config.max_staleness} has no effect: no call of experiment '{experiment}' runs ahead",
            remedy="Leave it out, or give it to a call: MFCDef(..., max_staleness=config.max_staleness).",
        )


def check_leads(graph: nx.DiGraph, config: RunConfig) -> None:
    """Check that calls run exactly as far ahead as `calls.<call>.max_staleness`; otherwise timing would decide.

    Raises:
        ConfigError: a call waits for others that are less stale, or changes parameters itself.
    """
    leads = {wait.reader: wait.lead for wait in lead_waits(graph)}
    problems = []
    for name, wanted in _given(config, "max_staleness"):
        lead = leads.get(name, 0)
        if wanted and lead != wanted:
            text = (
                f"what the call waits for lets it run at most {lead} train_steps ahead; say {lead}, or raise that of "
            )
            text += "the calls before it"
            problems.append(Problem(f"calls.{name}.max_staleness={wanted}", text))
    raise_problems(problems, config.experiment)


def why_not(key: str, mfc: MFCDef, changed_roles: Collection[str], roles: Mapping[str, Role]) -> str:
    """Return the reason why a key has no effect on a call; empty where it has one.

    Args:
        key: a key of `CallConfig`.
        mfc: the call.
        changed_roles: roles whose parameters some call of the graph changes.
        roles: roles of the run.
    """
    if key in MICRO_BATCHING and mfc.role in roles and roles[mfc.role].head == "none":
        return f"role '{mfc.role}' has no weights, so that there is nothing to cut into micro-batches"
    if key == "min_n_seqs" and mfc.is_train:
        return "a train_step needs its whole batch"
    if key == "min_n_seqs" and mfc.reallocs:
        return "the call has a hook that moves parameters between roles; how often it runs would depend on timing"
    if key == "max_staleness" and mfc.is_train:
        return "a train_step has the newest parameters; give it to the calls that read the role"
    if key == "max_staleness" and changed_roles.isdisjoint(mfc.read_roles):
        return f"role '{mfc.role}' is never trained, so that the call cannot run ahead of its training"
    if key == "virtual_stages" and not mfc.is_train:
        return "the call is no train_step; on the train_step's mesh, in its strategy, it has the same virtual stages"
    return ""


def _problems(experiment: Experiment, config: RunConfig, declared: Sequence[MFCDef]) -> Iterator[Problem]:
    by_name = {mfc.name: mfc for mfc in declared}
    changed_roles = frozenset[str]().union(*(mfc.changed_roles for mfc in declared))
    roles = experiment.roles_for(config) if config.calls else {}
    for name, own in config.calls.items():
        if name not in by_name:
            known = f"the calls are {', '.join(by_name)}.{did_you_mean(name, by_name)}"
            yield Problem(f"calls.{name}", f"there is no call '{name}'; {known}")
            continue
        mfc = by_name[name]
        for key in KEYS:
            value = getattr(own, key)
            if value is None:
                continue
            reason = why_not(key, mfc, changed_roles, roles)
            text = f"has no effect: {reason}" if reason else _wrong_value(key, own, mfc, experiment.name)
            if text:
                yield Problem(f"calls.{name}.{key}={show(value)}", text)


def _wrong_value(key: str, own: CallConfig, mfc: MFCDef, experiment: str) -> str:
    """Return the problem with one setting of a call that can have it; empty where there is none."""
    value = getattr(own, key)
    protocol = mfc.protocol if own.protocol is None else own.protocol
    if key == "min_n_seqs" and value > mfc.n_seqs:
        return f"is more than the n_seqs={mfc.n_seqs} of the call"
    if key == "protocol" and value not in protocol_names():
        names = protocol_names()
        return f"there is no such protocol; choose from {', '.join(names)}.{did_you_mean(value, names)}"
    if key == "balanced_dp" and value and protocol in EQUAL_COUNT_PROTOCOLS:
        return f"has no effect: protocol {protocol} does not go by tokens"
    if key == "max_staleness" and mfc.interface_type is InterfaceType.GENERATE and mfc.max_staleness != value:
        asking = f"MFCDef(..., max_staleness=config.staleness_of('{mfc.name}'))"
        return f"experiment '{experiment}' has not provided for it; let it ask for it: {asking}"
    return ""


def _changes(own: CallConfig) -> dict[str, object]:
    """Return changed fields of the call's `MFCDef`; one kind of micro-batching takes the place of the other."""
    given = {key: value for key in KEYS if (value := getattr(own, key)) is not None}
    if any(key in given for key in MICRO_BATCHING):
        return {**dict.fromkeys(MICRO_BATCHING), **given}
    return given


def _given(config: RunConfig, key: str) -> Iterator[tuple[str, int]]:
    for name, own in config.calls.items():
        value = getattr(own, key)
        if value is not None:
            yield name, value
