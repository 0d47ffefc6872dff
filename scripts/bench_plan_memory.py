"""CPU time of the memory of one more plan: PPO of 7B and 70B on 16 to 1,024 ranks, 8 of a node.

Every plan has random meshes and strategies for six calls of four roles, and every strategy was seen before. Prints
milliseconds of CPU time a plan:

    once        all bytes of the first plan, by a model that has seen nothing
    peaks       what each rank needs in the call that needs the most
    share       plans for which the transfers of some call's parameters had to be planned, since that call needs the most
    repeated    peaks of plans that were seen before

    python scripts/bench_plan_memory.py --plans 300
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from bench_realloc import SHAPES
from rich import box
from rich.console import Console
from rich.table import Table

from realrl.config.schema import GenerationConfig
from realrl.graph.build import build_graph
from realrl.graph.mfc import InterfaceType, MFCDef
from realrl.mesh.device_mesh import Allocation, Cluster, DeviceMesh, ParallelStrategy
from realrl.plan.memory.assignment import AssignedMemory
from realrl.plan.memory.load import Load, RowLengths, load_of
from realrl.plan.memory.model import MemoryModel
from realrl.plan.memory.plan import RoleState
from realrl.plan.memory.saving import Saves
from realrl.shape import DecoderConfig

GENERATE, INFERENCE, TRAIN = InterfaceType.GENERATE, InterfaceType.INFERENCE, InterfaceType.TRAIN_STEP
LENGTH = 1024  # tokens of a prompt, and of a response
N_DEVICES_PER_NODE = 8


def ppo(n_seqs: int) -> list[MFCDef]:
    """The calls of one step."""
    tokens = ("input_ids",)
    train = {"n_seqs": n_seqs, "n_minibatches": 4}
    return [
        MFCDef("gen", "actor", GENERATE, "ppo_actor", ("prompt_ids",), ("input_ids", "logprobs"), n_seqs=n_seqs),
        MFCDef("rew_inf", "reward", INFERENCE, "reward_model", tokens, ("rewards",), n_seqs=n_seqs),
        MFCDef("ref_inf", "ref", INFERENCE, "ppo_actor", tokens, ("ref_logprobs",), n_seqs=n_seqs),
        MFCDef("critic_inf", "critic", INFERENCE, "ppo_critic", tokens, ("values",), n_seqs=n_seqs),
        MFCDef("actor_train", "actor", TRAIN, "ppo_actor", (*tokens, "logprobs", "rewards", "values"), **train),
        MFCDef("critic_train", "critic", TRAIN, "ppo_critic", (*tokens, "rewards", "values", "ref_logprobs"), **train),
    ]


def loads(mfc: MFCDef, allocation: Allocation) -> Load:
    rows = RowLengths([LENGTH], [LENGTH], [LENGTH])
    return load_of(mfc, allocation, rows, generation=GenerationConfig(max_new_tokens=LENGTH), n_responses=1)


def memory_of(model: DecoderConfig, cluster: Cluster, *, n_seqs: int) -> AssignedMemory:
    """The memory of PPO whose four roles have models of one size."""
    home, value = (
        Allocation(DeviceMesh.whole(cluster), ParallelStrategy(cluster.n_devices)),
        replace(model, head="value"),
    )
    roles = {
        "actor": RoleState(model, home, is_trained=True, is_changed=True, zero_stage=1),
        "critic": RoleState(value, home, is_trained=True, is_changed=True, zero_stage=1),
        "ref": RoleState(model, home, is_trained=False),
        "reward": RoleState(replace(model, head="reward"), home, is_trained=False),
    }
    graph = build_graph(ppo(n_seqs), ["prompt_ids"])
    return AssignedMemory(MemoryModel(rows_bytes=1 << 30, saves=Saves()), graph, roles, load_of=loads)


def candidates(model: DecoderConfig, cluster: Cluster) -> list[Allocation]:
    """Meshes of half a node to all nodes, each with all powers of two for tp, inside of nodes, and pp."""
    meshes = [
        DeviceMesh.of_devices(cluster, node, first, first + 3) for node in range(cluster.n_nodes) for first in (0, 4)
    ]
    n_nodes = 1
    while n_nodes <= cluster.n_nodes:
        meshes += [
            DeviceMesh.of_nodes(cluster, i, i + n_nodes - 1) for i in range(0, cluster.n_nodes - n_nodes + 1, n_nodes)
        ]
        n_nodes *= 2
    found = []
    for mesh in meshes:
        for tp in (1, 2, 4, 8):
            for pp in (1, 2, 4, 8, 16):
                if mesh.n_devices % (tp * pp) == 0 and pp <= model.n_layers:
                    found.append(Allocation(mesh, ParallelStrategy(mesh.n_devices // (tp * pp), tp, pp)))
    return found


def cpu_ms(action: Callable[[], object]) -> float:
    start = time.process_time()
    action()
    return 1e3 * (time.process_time() - start)


def measure(model: DecoderConfig, n_ranks: int, n_plans: int) -> Sequence[float]:
    """Return milliseconds of a first plan, of the peaks of others at the median, the mean and 9 of 10; and the rest."""
    cluster, draw = Cluster(n_ranks // N_DEVICES_PER_NODE, N_DEVICES_PER_NODE), random.Random(0)
    places, names = candidates(model, cluster), [mfc.name for mfc in ppo(1)]
    by_size: dict[int, list[Allocation]] = {}
    for place in places:
        by_size.setdefault(place.mesh.n_devices, []).append(place)

    def plan() -> dict[str, Allocation]:
        sizes = [draw.choice([size for size in by_size if size >= min(n_ranks, 16) // 4]) for _ in names]
        return {name: draw.choice(by_size[size]) for name, size in zip(names, sizes, strict=True)}

    memory = memory_of(model, cluster, n_seqs=4 * n_ranks)
    first = plan()
    once = cpu_ms(lambda: memory.model.plan(*memory.states(first)))
    unique = {(place.strategy, place.mesh.n_devices): place for place in places}
    for place in unique.values():  # every strategy once, at home and for every call
        memory.peaks(dict.fromkeys(names, place))
    plans = [plan() for _ in range(n_plans)]
    before = len(memory.model.moves)
    times, n_planned = [], 0
    for one in plans:
        times.append(cpu_ms(lambda one=one: memory.peaks(one)))
        n_planned += len(memory.model.moves) > before
        before = len(memory.model.moves)
    again = [cpu_ms(lambda one=one: memory.peaks(one)) for one in plans]
    times.sort()
    middle, most = times[len(times) // 2], times[9 * len(times) // 10]
    return len(unique), once, middle, most, sum(times) / len(times), n_planned / n_plans, sum(again) / len(again)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=200, help="plans that are timed")
    parser.add_argument("--ranks", type=int, nargs="*", default=[16, 128, 1024])
    options = parser.parse_args()
    table = Table(box=box.SIMPLE)
    for title in ("model", "ranks", "strategies", "once", "median", "9 of 10", "mean", "share", "repeated"):
        table.add_column(title, justify="right")
    for name in ("7B", "70B"):
        for n_ranks in options.ranks:
            n_places, *times, share, again = measure(SHAPES[name], n_ranks, options.plans)
            cells = (f"{ms:.2f}" for ms in times)
            table.add_row(name, str(n_ranks), str(n_places), *cells, f"{share:.0%}", f"{again:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
