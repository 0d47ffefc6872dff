"""CPU time of the memory of one more plan: PPO of 7B and 70B on 16 to 1,024 ranks, 8 of a node.

Every plan has random meshes and strategies for six calls of four roles, and every strategy was seen before. Prints
milliseconds of CPU time a plan:

    once        all bytes of the first plan, by a model that has seen nothing
    fullest     the fullest rank, and whether all ranks have room: the median, 9 of 10 take less than this, and the mean
    planned     share of plans for which transfers of some call's parameters had to be planned to know that
    all         then the bytes that every rank needs, in the call that needs the most there, at the mean
    repeated    that of plans that were seen before

    python scripts/bench_plan_memory.py --plans 300
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

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
CAPACITY = 72 * 10**9


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


def random_plans(places: Sequence[Allocation], n_plans: int) -> list[dict[str, Allocation]]:
    """Draw a mesh's size, then a mesh and a strategy, for every call; no mesh is smaller than a quarter of a node."""
    draw = random.Random(0)
    by_size: dict[int, list[Allocation]] = {}
    for place in places:
        by_size.setdefault(place.mesh.n_devices, []).append(place)
    sizes = [*by_size]
    return [{mfc.name: draw.choice(by_size[draw.choice(sizes)]) for mfc in ppo(1)} for _ in range(n_plans)]


def measure(model: DecoderConfig, n_ranks: int, n_plans: int) -> list[str]:
    """Return a row of the table."""
    cluster = Cluster(n_ranks // N_DEVICES_PER_NODE, N_DEVICES_PER_NODE)
    places = candidates(model, cluster)
    first, *plans = random_plans(places, n_plans + 1)
    memory = memory_of(model, cluster, n_seqs=4 * n_ranks)

    def ask(plan: dict[str, Allocation], *, every_rank: bool) -> None:
        peaks = memory.peaks(plan)
        if every_rank:
            assert len(peaks.by_rank[1]) <= n_ranks
        else:
            assert peaks.fits(CAPACITY) == (peaks.fullest[2] <= CAPACITY)

    once = cpu_ms(lambda: memory.model.plan(*memory.states(first)))
    unique = {(place.strategy, place.mesh.n_devices): place for place in places}
    for place in unique.values():  # every strategy once, at home and for every call
        memory.peaks(dict.fromkeys(first, place))
    times, n_planned = [], 0
    for plan in plans:
        before = len(memory.model.moves)
        times.append(cpu_ms(partial(ask, plan, every_rank=False)))
        n_planned += len(memory.model.moves) > before
    every, again = (sum(cpu_ms(partial(ask, plan, every_rank=True)) for plan in plans) / n_plans for _ in range(2))
    mean = sum(times) / n_plans
    times.sort()
    figures = [once, times[n_plans // 2], times[9 * n_plans // 10], mean]
    return [str(n_ranks), str(len(unique)), *(f"{ms:.2f}" for ms in figures), f"{n_planned / n_plans:.0%}",
            f"{every:.2f}", f"{again:.2f}"]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=200, help="plans that are timed")
    parser.add_argument("--ranks", type=int, nargs="*", default=[16, 128, 1024])
    options = parser.parse_args()
    table = Table(title="milliseconds of CPU time a plan", box=box.SIMPLE)
    titles = ("model", "ranks", "strategies", "once", "fullest", "9 of 10", "mean", "planned", "all", "repeated")
    for title in titles:
        table.add_column(title, justify="right")
    for name in ("7B", "70B"):
        for n_ranks in options.ranks:
            table.add_row(name, *measure(SHAPES[name], n_ranks, options.plans))
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
