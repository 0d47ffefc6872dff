"""Output of ``--dry-run``, the whole plan of a run that is not started, and of ``realrl graph``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from realrl.cli.console import print_table
from realrl.errors import counted

if TYPE_CHECKING:
    from pathlib import Path

    from realrl.config.schema import ModelConfigSection, RunConfig
    from realrl.experiment.run_plan import RunPlan
    from realrl.graph.mfc import MFCDef
    from realrl.mesh.device_mesh import Allocation
    from realrl.plan.groups import GroupKind
    from realrl.plan.hooks import Overlap
    from realrl.runtime.checkpoints.store import Resume

_SHOWN_RANKS = 16


def print_plan(plan: RunPlan, resume: Resume, *, notes: tuple[str, ...], overlap: Overlap) -> None:
    """Print the run's beginning, notes on it, calls, roles, hooks and process groups."""
    from realrl.experiment.rewards import functions_of  # loads pydantic

    config = plan.config
    cluster = config.cluster
    preset = f", preset {config.preset}" if config.preset else ""
    print(f"{plan.experiment.name}: {plan.experiment.description}")
    work = f"{counted(config.steps, 'step')} of {counted(plan.samples_per_step, 'sample')}"
    print(f"{work}, seed {config.seed}, {config.precision}{preset}")
    print(
        f"{counted(plan.n_workers, 'worker')}: {counted(cluster.n_nodes, 'node')} of "
        f"{counted(cluster.n_devices_per_node, 'device')}, {cluster.device}, launcher {config.launcher}"
    )
    run_dir = config.run_dir or f"runs/{plan.experiment.name}/<date>_<time>"
    print(f"data from {config.dataset.described}, results in {run_dir}")
    functions = list(dict.fromkeys(name for mfc in plan.mfcs for name in functions_of(mfc.interface)))
    if functions:
        print(f"rewards from {', '.join(functions)}")
    for note in (*notes, *resume.notes):
        print(note)
    if resume.folder is not None:
        print(f"continues from {resume.folder}")
    print()
    _print_calls(plan)
    _print_roles(plan)
    _print_hooks(plan)
    print_overlap(overlap)
    _print_groups(plan)
    print("Nothing was started; leave out --dry-run to run this.")


def _print_calls(plan: RunPlan) -> None:
    rows = []
    for mfc in plan.mfcs:
        allocation = plan.allocations[mfc.name]
        batches = f"{mfc.n_passes} passes of " if mfc.n_passes > 1 else ""
        batches += f"{mfc.n_minibatches} minibatches" if mfc.n_minibatches > 1 or mfc.n_passes > 1 else ""
        if mfc.max_tokens_per_mb is not None:
            batches += f" of {mfc.max_tokens_per_mb}-token micro-batches"
        elif mfc.n_mbs is not None:
            batches += f" of {mfc.n_mbs} micro-batches"
        if plan.fusion is not None and mfc.name in plan.fusion:
            batches += f", with {plan.fusion.partner_of(mfc.name)}"
        what = (mfc.name, str(mfc.model), mfc.interface_type.value, mfc.interface.name, str(mfc.n_seqs))
        rows.append((*what, _devices(allocation), str(allocation.strategy), batches.strip(" ,") or "-"))
    columns = ("call", "role", "type", "interface", "n_seqs", "devices", "strategy", "batches")
    print_table(columns, rows, title="Calls", folding=("interface", "batches"))
    _print_call_settings(plan)
    keys = [(mfc.name, ", ".join(mfc.input_keys), ", ".join(mfc.output_keys) or "-") for mfc in plan.mfcs]
    print_table(("call", "reads", "writes"), keys, title="Data", folding=("reads", "writes"))


def _print_call_settings(plan: RunPlan) -> None:
    """Print the settings of calls that differ from the run's, if there are any."""
    from realrl.config.problems import show

    own = [(mfc.name, differing(mfc, plan.config)) for mfc in plan.mfcs]
    settings = [
        (name, ", ".join(f"{key}={show(value)}" for key, value in found.items())) for name, found in own if found
    ]
    if settings:
        print_table(("call", "settings"), settings, title="Settings of single calls", folding=("settings",))


def differing(mfc: MFCDef, config: RunConfig) -> dict[str, object]:
    """Return a call's settings in `calls`, and others (its algorithm's) that are neither default nor the run's."""
    from realrl.experiment.call_settings import KEYS
    from realrl.graph.mfc import MFCDef

    own = config.calls.get(mfc.name)
    found: dict[str, object] = {}
    for key in KEYS:
        default = MFCDef.__dataclass_fields__[key].default
        value, of_the_run = getattr(mfc, key), getattr(config, key, default)
        is_given = own is not None and getattr(own, key) is not None
        if is_given or value not in (of_the_run, default):
            found[key] = value
    return found


def _print_roles(plan: RunPlan) -> None:
    rows = []
    for name, role in plan.experiment.roles_for(plan.config).items():
        model = plan.config.models[name]
        learning = _training(model) if role.trainable else "frozen"
        home = plan.home_of(name)
        size = _size(model.path) if home is not None else "no weights"
        ranks = ", ".join(map(str, plan.role_ranks(name)))
        rows.append((name, model.path, role.head, size, learning, "-" if home is None else str(home), ranks))
    columns = ("role", "path", "head", "parameters", "training", "home", "devices")
    print_table(columns, rows, title="Roles", folding=("path", "training"))


def _training(model: ModelConfigSection) -> str:
    """Return the backend, the schedule, and settings that differ from the default."""
    optimizer = model.optimizer
    words = [f"{model.backend}, lr {optimizer.lr:g} {optimizer.schedule}"]
    words += [f"ZeRO {optimizer.zero_stage}"] if optimizer.zero_stage is not None else []
    words += ["optimizer on the host"] if optimizer.offload else []
    words += [f"LoRA of rank {model.lora.rank}"] if model.lora.rank else []
    return ", ".join(words)


def _print_hooks(plan: RunPlan) -> None:
    """Print the hooks of calls, with the bytes that go between devices each time."""
    from dataclasses import replace

    from realrl.plan.hooks import Realloc
    from realrl.plan.memory.plan import show_bytes

    planned = [
        (mfc.name, when, hook)
        for mfc in plan.mfcs
        for when in ("before", "after")
        for hook in getattr(plan.hooks[mfc.name], when)
    ]
    if not planned:
        return
    reallocs = None
    if any(isinstance(hook, Realloc) for _, _, hook in planned):
        from realrl.experiment.models import role_configs
        from realrl.runtime.worker.reallocs import Reallocs

        reallocs = Reallocs(plan, role_configs(plan))
    columns = ["when", "parameters of", "from", "to", "moved", "most to one device"]
    columns += ["between nodes"] if plan.cluster.n_nodes > 1 else []
    rows = []
    for call, when, hook in planned:
        if not isinstance(hook, Realloc):
            ends = (str(hook.allocation), *["-"] * (len(columns) - 3))
            rows.append((f"{when} {call}", f"{hook.role} to host memory", *ends))
            continue
        assert reallocs is not None
        moved = reallocs.of(hook)
        what = hook.source if hook.is_implied else f"{hook.source} into {hook.target}, eta {hook.eta:g}"
        most = max(moved.bytes_received(rank) for rank in hook.target_allocation.ranks)
        sizes = (moved.total_bytes, most, moved.bytes_between_nodes)[: len(columns) - 4]
        ends = (str(hook.source_allocation), str(hook.target_allocation), *map(show_bytes, sizes))
        rows.append((f"{when} {call}", what, *ends))
    print_table(columns, rows, title="Parameters that move", folding=("parameters of",))
    for call, _, hook in planned:
        if isinstance(hook, Realloc) and hook.target_allocation.order is not None:
            assert reallocs is not None
            plain = replace(hook, target_allocation=replace(hook.target_allocation, order=None))
            ours, others = reallocs.of(hook), reallocs.of(plain)
            less, more = (show_bytes(one.total_bytes) for one in (ours, others))
            order = _order(hook.target_allocation.order)
            between = ""
            if plan.cluster.n_nodes > 1:
                crossing = (show_bytes(one.bytes_between_nodes) for one in (ours, others))
                between = "; between nodes {} move, {} would".format(*crossing)
            print(f"{call} takes its devices in the order {order}: {less} move, in plain order {more} would{between}\n")


def print_overlap(overlap: Overlap) -> None:
    """Print when parameters come to calls, and how long they stay, where that is not for the time of the call."""
    if overlap.notes:
        print_table(
            ("call", "its parameters"), tuple(overlap.notes.items()), title="Parameters that come early or stay"
        )


def _print_groups(plan: RunPlan) -> None:
    by_kind: dict[GroupKind, list[str]] = {}
    for group in plan.process_groups:
        if group.n_ranks > 1:
            by_kind.setdefault(group.kind, []).append("[" + ", ".join(map(str, group.ranks)) + "]")
    if not by_kind:
        print("Process groups: none, a single worker has nobody to talk to\n")
        return
    rows = [(kind.value, " ".join(dict.fromkeys(ranks))) for kind, ranks in by_kind.items()]
    print_table(("group", "global ranks"), rows, title="Process groups", folding=("global ranks",))


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
            if edge.after == mfc.name:
                when = "the step before" if edge.lag == 1 else f"{edge.lag} steps before"
                print(f"    .. waits for {edge.before} of {when}")
        if plan.fusion is not None and mfc.name in plan.fusion:
            print(f"    .. trains at the same time as {plan.fusion.partner_of(mfc.name)}, on the same devices")


def _order(ranks: tuple[int, ...]) -> str:
    text = " ".join(map(str, ranks[:_SHOWN_RANKS]))
    return text if len(ranks) <= _SHOWN_RANKS else f"{text} ..."


def _devices(allocation: Allocation) -> str:
    ranks = allocation.mesh.ranks
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"


def _size(path: str) -> str:
    from pathlib import Path

    from realrl.config.schema import BUILT_IN

    if path == BUILT_IN:
        return "random, about 0.5M"
    n_parameters = count_parameters(Path(path))
    return "unknown" if n_parameters is None else f"{n_parameters / 1e6:.1f}M"


def count_parameters(folder: Path) -> int | None:
    """Count parameters in the safetensors files of a folder, by their headers alone; None if they cannot be read.

    A file starts with the header's length (8 bytes, little endian), then the header: JSON, tensor name -> shape.
    """
    import json
    import struct

    total = 0
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with file.open("rb") as stream:
                (length,) = struct.unpack("<Q", stream.read(8))
                header = json.loads(stream.read(min(length, file.stat().st_size)))
            for name, tensor in header.items():
                if name != "__metadata__":
                    size = 1
                    for dim in tensor["shape"]:
                        size *= dim
                    total += size
        except (OSError, ValueError, struct.error, KeyError, TypeError):
            return None
    return total or None
