"""Compilation of a list of calls into its dataflow graph.

The graph is a `networkx.DiGraph`. Its nodes are call names, in declared order, with attribute ``mfc``. Between two
calls there is at most one edge, which holds the reasons for which the second waits for the first:

- ``keys``, a sorted tuple: the first produces these keys and the second reads them, for the same samples;
- ``lag``, a whole number: the first changes parameters that the second reads (by training them, or through a hook), and
  the second, at step i, waits for the first at step ``i - lag``, where ``lag = 1 + max_staleness`` of the second.

``kind`` is ``"data"`` when there are keys, ``"drop"`` when the first drops samples that the second must not see, though
it reads no key of the first (``keys`` is then empty), and ``"version"`` otherwise. A data edge with a lag joins both
relations in one pair of calls. All statements about data edges hold for drop edges too. Data edges are acyclic; version
edges close the cycles from one step to the next. Use `data_graph`, `version_edges` and the other functions below
instead of attributes.

Version edges go to the earliest calls of a role: a call that already waits, through data, for another call of the role
that is at least as strict gets none. Keys that the dataset provides have no edge: see `dataset_keys`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from realrl.errors import GraphError, did_you_mean
from realrl.graph.checks import check_calls
from realrl.graph.mfc import MFCDef, ParamReallocHook

if TYPE_CHECKING:
    import networkx as nx


@dataclass(frozen=True)
class StepWait:
    """`after`, at step i, waits until `before` has finished step ``i - lag``.

    One of the two changes parameters that the other reads. It does so before, and gives new parameters, or after, and
    leaves time to read the old ones.
    """

    before: str
    after: str
    lag: int


Progress = Literal["sent", "read", "finished"]


@dataclass(frozen=True)
class LeadWait:
    """`writer`, at step i, must not change parameters before `reader` runs with them, or is sent, at step ``i + lead``.

    Attributes:
        until: the reader was sent, or, hooks included, is done with that step: "read" without replacements of dropped
            samples, since they come after calls that wait for the writer, "finished" with them.
    """

    writer: str
    reader: str
    lead: int
    until: Progress = "sent"


def build_graph(mfcs: Sequence[MFCDef], dataset_keys: Iterable[str]) -> nx.DiGraph:
    """Compile calls into a graph of data and version edges.

    Args:
        mfcs: the calls, in any order; the order breaks ties wherever one is needed.
        dataset_keys: keys that the dataset offers; those that no call reads are ignored.

    Returns:
        The graph described above; ``graph.graph["dataset_keys"]`` holds the dataset keys in use, sorted.

    Raises:
        GraphError: a call is invalid by itself (see `checks.check_calls`), two calls produce one key, a key has no
            source, the calls wait for each other in a cycle, or a call that changes parameters feeds one that drops
            samples.
    """
    import networkx as nx

    mfcs = tuple(mfcs)
    check_calls(mfcs)
    offered = frozenset(dataset_keys)
    producer = _producer_of_each_key(mfcs, offered)
    _check_provided(mfcs, producer, offered)

    graph = nx.DiGraph(dataset_keys=tuple(sorted(offered & _read_keys(mfcs))))
    for mfc in mfcs:
        graph.add_node(mfc.name, mfc=mfc)
    for mfc in mfcs:
        for name in dict.fromkeys(producer[key] for key in mfc.input_keys if key in producer):
            keys = tuple(sorted(key for key in mfc.input_keys if producer.get(key) == name))
            graph.add_edge(name, mfc.name, kind="data", keys=keys)
    _check_acyclic(graph)
    _add_drop_edges(graph)
    _check_writers(graph)
    for edge in _version_edges(mfcs, graph):
        if graph.has_edge(edge.before, edge.after):
            graph.edges[edge.before, edge.after]["lag"] = edge.lag
        else:
            graph.add_edge(edge.before, edge.after, kind="version", lag=edge.lag)
    return graph


def replace_calls(graph: nx.DiGraph, mfcs: Iterable[MFCDef]) -> None:
    """Give calls of a graph other definitions, in place; they read, produce and change the same as before."""
    for mfc in mfcs:
        graph.nodes[mfc.name]["mfc"] = mfc


# ---------------------------------------------------------------- queries


def call(graph: nx.DiGraph, name: str) -> MFCDef:
    """Return the definition of one call.

    Raises:
        GraphError: the graph has no such call.
    """
    if name not in graph:
        raise GraphError(f"there is no call '{name}'", remedy=f"Calls: {', '.join(graph)}.{did_you_mean(name, graph)}")
    mfc: MFCDef = graph.nodes[name]["mfc"]
    return mfc


def calls(graph: nx.DiGraph) -> tuple[MFCDef, ...]:
    """Return all calls, in declared order."""
    return tuple(graph.nodes[name]["mfc"] for name in graph)


def topological_calls(graph: nx.DiGraph) -> tuple[MFCDef, ...]:
    """Return all calls, producers before consumers; the declared order decides between unordered calls."""
    import networkx as nx

    position = {name: i for i, name in enumerate(graph)}
    names = nx.lexicographical_topological_sort(data_graph(graph), key=position.__getitem__)
    return tuple(graph.nodes[name]["mfc"] for name in names)


def data_graph(graph: nx.DiGraph) -> nx.DiGraph:
    """Return a new, acyclic graph of all calls and the data edges alone, each with its ``keys``."""
    import networkx as nx

    result = nx.DiGraph(**graph.graph)
    result.add_nodes_from(graph.nodes(data=True))
    for first, second, attributes in graph.edges(data=True):
        if "keys" in attributes:
            result.add_edge(first, second, kind="data", keys=attributes["keys"])
    return result


def drop_gates(graph: nx.DiGraph) -> dict[str, tuple[str, ...]]:
    """Return call -> dropping calls, other than its producers, that must keep a sample before the call gets it."""
    gates: dict[str, tuple[str, ...]] = dict.fromkeys(graph, ())
    for first, second, attributes in graph.edges(data=True):
        if attributes["kind"] == "drop":
            gates[second] = (*gates[second], first)
    return gates


def drop_feeders(graph: nx.DiGraph) -> frozenset[str]:
    """Return the dropping calls and all calls before the last of them, which see samples that are dropped later."""
    import networkx as nx

    dropping = [mfc.name for mfc in topological_calls(graph) if mfc.may_drop]
    return frozenset({dropping[-1], *nx.ancestors(data_graph(graph), dropping[-1])}) if dropping else frozenset()


def version_edges(graph: nx.DiGraph) -> tuple[StepWait, ...]:
    """Return the waits of readers for new parameters, in declared order of trainer, then reader."""
    position = {name: i for i, name in enumerate(graph)}
    found = [StepWait(a, b, data["lag"]) for a, b, data in graph.edges(data=True) if "lag" in data]
    return tuple(sorted(found, key=lambda edge: (position[edge.before], position[edge.after])))


def writer_waits(graph: nx.DiGraph) -> tuple[StepWait, ...]:
    """Return waits of calls that change parameters for readers, so that the versions read do not depend on timing.

    A reader that no data orders against the writer goes first within a step (lag 0); one that comes after it within a
    step is done before the writer's next step (lag 1); one that comes before it needs no wait.
    """
    import networkx as nx

    data = data_graph(graph)
    waits = []
    for writer in (mfc for mfc in calls(graph) if mfc.changed_roles):
        before, after = nx.ancestors(data, writer.name), nx.descendants(data, writer.name)
        for mfc in calls(graph):
            if mfc is not writer and mfc.name not in before and mfc.read_roles & writer.changed_roles:
                waits.append(StepWait(mfc.name, writer.name, 1 if mfc.name in after else 0))
    return tuple(waits)


def lead_waits(graph: nx.DiGraph) -> tuple[LeadWait, ...]:
    """Return waits of calls that change parameters for stale readers, so that these run ahead by a fixed number.

    A reader with ``max_staleness=k`` that nothing holds back reads, at step i, the parameters after step ``i - 1 - k``.
    It is held back when it waits for a call that is less stale: its lead over every writer is then shorter. Readers
    that change parameters themselves have no fixed lead, for a checkpoint holds them back.
    """
    import networkx as nx

    data, waits = data_graph(graph), wait_graph(graph)
    writers = [mfc for mfc in calls(graph) if mfc.changed_roles]
    last = [mfc.name for mfc in topological_calls(graph) if mfc.may_drop][-1:]
    lags = [nx.single_source_dijkstra_path_length(waits, writer.name, weight="lag") for writer in writers]
    found = []
    for reader in (mfc for mfc in calls(graph) if mfc.max_staleness > 0 and not mfc.changed_roles):
        lead = min((lag[reader.name] for lag in lags if reader.name in lag), default=0) - 1
        # The step that is read ahead gets replacements after the last dropping call, which may wait for a writer.
        is_late = any(lag[name] <= lead for lag in lags for name in last if name in lag)
        for writer in writers if lead > 0 else ():
            roles_read = reader.read_roles & writer.changed_roles
            if roles_read and reader.name not in nx.descendants(data, writer.name):
                until: Progress = (
                    ("read" if is_late else "finished") if _reads_afterwards(reader, roles_read) else "sent"
                )
                found.append(LeadWait(writer.name, reader.name, lead, until))
    return tuple(found)


def wait_graph(graph: nx.DiGraph) -> nx.DiGraph:
    """Return edges u -> v with ``lag``: v at step i waits for u at step ``i - lag``; the strictest of several."""
    import networkx as nx

    waits = nx.DiGraph()
    waits.add_nodes_from(graph)
    feeders = drop_feeders(graph)
    last = [mfc.name for mfc in topological_calls(graph) if mfc.may_drop][-1:]
    edges = [(first, second, 0) for first, second in data_graph(graph).edges]
    edges += [(wait.before, wait.after, wait.lag) for wait in (*version_edges(graph), *writer_waits(graph))]
    edges += [(name, feeder, 1) for name in last for feeder in feeders]  # no step is loaded before the last is settled
    for first, second, lag in edges:
        if first != second and lag < waits.get_edge_data(first, second, {"lag": lag + 1})["lag"]:
            waits.add_edge(first, second, lag=lag)
    return waits


def _reads_afterwards(mfc: MFCDef, read: frozenset[str]) -> bool:
    """Return True if a hook after the call reads one of these roles."""
    sources = [
        mfc.role if hook.source is None else hook.source.role
        for hook in mfc.post_hooks
        if isinstance(hook, ParamReallocHook)
    ]
    return not read.isdisjoint(sources)


def home_calls(graph: nx.DiGraph) -> dict[str, str]:
    """Return role -> the call in whose layout its parameters live.

    That is its train_step, or else the first call, in the order of data, that runs on its replica 0, or else its first.
    """
    ordered = sorted(topological_calls(graph), key=lambda mfc: (not mfc.is_train, mfc.model.replica_id != 0))
    homes: dict[str, str] = {}
    for mfc in ordered:
        homes.setdefault(mfc.role, mfc.name)
    return {role: homes[role] for role in roles(graph)}


def producers(graph: nx.DiGraph) -> Mapping[str, str]:
    """Return key -> the call that produces it; dataset keys are not in it."""
    return {key: mfc.name for mfc in calls(graph) for key in mfc.output_keys}


def readers(graph: nx.DiGraph, key: str) -> tuple[str, ...]:
    """Return the names of the calls that read `key`, in declared order."""
    return tuple(mfc.name for mfc in calls(graph) if key in mfc.input_keys)


def dataset_keys(graph: nx.DiGraph) -> tuple[str, ...]:
    """Return the keys that the dataset must provide, sorted."""
    keys: tuple[str, ...] = graph.graph["dataset_keys"]
    return keys


def roles(graph: nx.DiGraph) -> tuple[str, ...]:
    """Return the names of all roles, in declared order of their first call."""
    return tuple(dict.fromkeys(mfc.role for mfc in calls(graph)))


# ---------------------------------------------------------------- edges


def _read_keys(mfcs: Sequence[MFCDef]) -> frozenset[str]:
    return frozenset(key for mfc in mfcs for key in mfc.input_keys)


def _producer_of_each_key(mfcs: Sequence[MFCDef], offered: frozenset[str]) -> dict[str, str]:
    producer: dict[str, str] = {}
    for mfc in mfcs:
        for key in mfc.output_keys:
            if key in producer:
                raise GraphError(
                    f"calls '{producer[key]}' and '{mfc.name}' both produce key '{key}'",
                    remedy="Rename one of the two, for example with output_key_remap.",
                    call=mfc.name,
                )
            if key in offered:
                raise GraphError(
                    f"the dataset and call '{mfc.name}' both provide key '{key}'",
                    remedy="Rename the call's key, for example with output_key_remap.",
                    call=mfc.name,
                )
            producer[key] = mfc.name
    return producer


def _check_provided(mfcs: Sequence[MFCDef], producer: Mapping[str, str], offered: frozenset[str]) -> None:
    provided = {**dict.fromkeys(sorted(offered), "the dataset"), **producer}
    for mfc in mfcs:
        for key in mfc.input_keys:
            if key not in provided:
                known = ", ".join(sorted(offered)) or "no keys"
                raise GraphError(
                    f"call '{mfc.name}' reads key '{key}', which no call produces; the dataset offers {known}",
                    remedy=f"Produce it, or correct the name.{did_you_mean(key, provided)}",
                    call=mfc.name,
                )


def _check_acyclic(graph: nx.DiGraph) -> None:
    import networkx as nx

    try:
        cycle = nx.find_cycle(graph)
    except nx.NetworkXNoCycle:
        return
    story = ", ".join(f"'{b}' reads {' and '.join(graph.edges[a, b]['keys'])} from '{a}'" for a, b in cycle)
    raise GraphError(
        f"the calls wait for each other in a cycle: {story}",
        remedy="One of these keys must come from somewhere else.",
        call=cycle[0][0],
    )


def _add_drop_edges(graph: nx.DiGraph) -> None:
    """Order every call against every dropping one: before it if data edges lead to it, else after it.

    Otherwise timing would decide whether a call works on a sample that another one drops.
    """
    import networkx as nx

    def order(first: str, second: str) -> None:
        if not nx.has_path(graph, first, second):
            graph.add_edge(first, second, kind="drop", keys=())

    names = [mfc.name for mfc in topological_calls(graph)]
    all_dropping = [name for name in names if graph.nodes[name]["mfc"].may_drop]
    for first, second in pairwise(all_dropping):
        order(first, second)
    for dropping in reversed(all_dropping):
        feeders = nx.ancestors(graph, dropping) | {dropping}
        for name in sorted(feeders, key=names.index):
            if graph.nodes[name]["mfc"].changed_roles:
                raise GraphError(
                    f"call '{name}' changes parameters and feeds call '{dropping}', which may drop samples: how often "
                    "it runs would depend on what is dropped",
                    remedy=f"Let '{dropping}' read nothing that '{name}' produces, or move the hook to a call behind "
                    f"'{dropping}'.",
                    call=name,
                )
        for name in names:
            if name not in feeders:
                order(dropping, name)


def _check_writers(graph: nx.DiGraph) -> None:
    """Check that data edges form no cycle with the waits of calls that change parameters for unordered readers."""
    import networkx as nx

    order = data_graph(graph)
    waits = [wait for wait in writer_waits(graph) if wait.lag == 0]
    order.add_edges_from((wait.before, wait.after) for wait in waits)
    for wait in waits:
        if nx.has_path(order, wait.after, wait.before):
            raise GraphError(
                f"call '{wait.after}' changes parameters that call '{wait.before}' reads in the same step, but other "
                "calls that do the same the other way round leave no order for the two",
                remedy=f"Let '{wait.after}' read a key of '{wait.before}', or move its hook to another call.",
                call=wait.after,
            )


def _version_edges(mfcs: Sequence[MFCDef], data: nx.DiGraph) -> Iterator[StepWait]:
    """Yield edges from each call that changes parameters to the earliest calls of each role that read them."""
    import networkx as nx

    ancestors = {mfc.name: nx.ancestors(data, mfc.name) for mfc in mfcs}
    for writer in (mfc for mfc in mfcs if mfc.changed_roles):
        readers = [mfc for mfc in mfcs if mfc is not writer and mfc.read_roles & writer.changed_roles]
        for reader in readers:
            earlier = [mfc for mfc in readers if mfc.role == reader.role and mfc.name in ancestors[reader.name]]
            if all(mfc.max_staleness > reader.max_staleness for mfc in earlier):
                yield StepWait(writer.name, reader.name, 1 + reader.max_staleness)
