"""The dataflow graph as text."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from realrl.experiment.run_plan import RunPlan


def print_graph(plan: RunPlan) -> None:
    """Print the calls in the order in which data reaches them, each with its inputs, outputs and waits."""
    from realrl.graph.build import dataset_keys, producers, readers, topological_calls, version_edges

    graph = plan.graph
    producer = producers(graph)
    print(f"{plan.experiment.name}: {plan.experiment.description}\n")
    print("dataset")
    for key in dataset_keys(graph):
        print(f"    -> {key}: {', '.join(readers(graph, key))}")
    waits = version_edges(graph)
    for mfc in topological_calls(graph):
        print(f"\n{mfc.name}  [{mfc.model} {mfc.interface_type.value}, {mfc.n_seqs} samples]")
        sources: dict[str, list[str]] = {}
        for key in mfc.input_keys:
            sources.setdefault(producer.get(key, "dataset"), []).append(key)
        for source, keys in sources.items():
            print(f"    <- {source}: {', '.join(keys)}")
        for key in mfc.output_keys:
            print(f"    -> {key}: {', '.join(readers(graph, key)) or 'read by no call'}")
        for edge in waits:
            if edge.reader == mfc.name:
                when = "the step before" if edge.lag == 1 else f"{edge.lag} steps before"
                print(f"    .. waits for {edge.trainer} of {when}")
