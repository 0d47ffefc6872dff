"""Time, gap and size of plan searches for PPO: python scripts/bench_search.py [--model 70B] [--devices 128] ...

All times are of the processor.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import yaml

from realrl.config.schema import GenerationConfig
from realrl.graph.build import build_graph, calls, topological_calls
from realrl.graph.mfc import InterfaceType, MFCDef
from realrl.mesh.device_mesh import Allocation, Cluster, ParallelStrategy
from realrl.plan.memory.load import RowLengths
from realrl.plan.memory.plan import RoleState
from realrl.search.bound import undominated
from realrl.search.branch import Found, search
from realrl.search.fast import Model, flow_of
from realrl.search.prices import CostPrices, Workload
from realrl.search.problem import Problem
from realrl.search.space import RoleSpace, choices_of, mesh_at
from realrl.shape import DecoderConfig
from realrl.sim.durations import SampleSizes
from realrl.sim.hardware import hardware_from

ROOT = Path(__file__).parents[1]
MODELS = {  # hidden, layers, heads, KV heads, inner
    "7B": (4096, 32, 32, 32, 11008),
    "13B": (5120, 40, 40, 40, 13824),
    "34B": (8192, 48, 64, 8, 22016),
    "70B": (8192, 80, 64, 8, 28672),
}
PROMPT = RESPONSE = 1024
MARGIN = 0.9  # usable share of a device's memory


def ppo(n: int) -> list[MFCDef]:
    """The six calls of PPO with the keys that order them."""
    generate, inference, train = InterfaceType.GENERATE, InterfaceType.INFERENCE, InterfaceType.TRAIN_STEP
    read = ("ids", "rewards", "values", "ref")
    return [
        MFCDef("actor_gen", "actor", generate, "ppo_actor", ("prompt_ids",), ("ids",), n_seqs=n),
        MFCDef("rew_inf", "reward", inference, "rw", ("ids",), ("rewards",), n_seqs=n),
        MFCDef("ref_inf", "ref", inference, "ppo_actor", ("ids",), ("ref",), n_seqs=n),
        MFCDef("critic_inf", "critic", inference, "ppo_critic", ("ids",), ("values",), n_seqs=n),
        MFCDef("actor_train", "actor", train, "ppo_actor", read, n_seqs=n, n_minibatches=8),
        MFCDef("critic_train", "critic", train, "ppo_critic", read, n_seqs=n, n_minibatches=8),
    ]


def shape(size: str, head: str) -> DecoderConfig:
    hidden, layers, heads, kv_heads, inner = MODELS[size]
    return DecoderConfig(
        vocab_size=32000, hidden_size=hidden, n_layers=layers, n_heads=heads, n_kv_heads=kv_heads, head=head,
        head_dim=hidden // heads, intermediate_size=inner, max_positions=4096, dtype="bfloat16",
    )  # fmt: skip


def problem_of(options: argparse.Namespace) -> Problem:
    """Price all choices and leave out those that cannot be best; print how many there are."""
    cluster = Cluster(-(-options.devices // 8), min(8, options.devices))
    graph = build_graph(ppo(options.n_seqs), ["prompt_ids"])
    heads = {"actor": "lm", "ref": "lm", "critic": "value", "reward": "reward"}
    models = {role: shape(options.model, head) for role, head in heads.items()}
    home = Allocation(mesh_at(cluster, 0, 1), ParallelStrategy())
    trained = {mfc.role for mfc in calls(graph) if mfc.is_train}
    states = {role: RoleState(model, home, role in trained) for role, model in models.items()}
    workload = Workload(
        graph,
        states,
        cluster,
        GenerationConfig(max_new_tokens=RESPONSE, max_batch_size=options.batch),
        {f"0/{i}": SampleSizes((PROMPT,), (RESPONSE,)) for i in range(options.n_seqs)},
        RowLengths([PROMPT], [PROMPT + RESPONSE], [PROMPT + RESPONSE]),
        dict.fromkeys(graph, 1),
    )
    text = (ROOT / "configs" / "hardware" / f"{options.hardware}.yaml").read_text()
    hardware = hardware_from(yaml.safe_load(text), source=options.hardware)
    capacity = MARGIN * hardware.device.memory_bytes
    model = Model(flow_of(graph), CostPrices(workload, hardware, capacity=capacity), cluster, capacity)
    stages = (0, 1) if options.wide else (1,)
    roles = {
        role: RoleSpace(one, zero_stages=stages, offloads=(False, True) if options.wide else (False,))
        for role, one in models.items()
    }
    choices = []
    for call, mfc in enumerate(topological_calls(graph)):
        found = choices_of(graph, mfc.name, roles, cluster)
        fitting = [c for c in found if own_bytes(model, call, c) <= capacity]
        is_moved = any(call in (move.owner, move.source, move.target) for move in model.flow.moves)
        kept = undominated(model, call, fitting, most_move=options.most_move if is_moved else 0.0)
        print(f"{mfc.name}: {len(found)} choices, {len(fitting)} fit, {len(kept)} left  {spent()}", flush=True)
        choices.append(kept)
    return Problem(model, choices, {}, is_pruned=True, n_walks=options.walks)


def own_bytes(model: Model, call: int, choice: object) -> int:
    price = model.price(call, choice)  # type: ignore[arg-type]
    return price.used + (price.kept if model.flow.homes[call] == call else 0)


def spent() -> str:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return f"{used.ru_utime + used.ru_stime:.1f} s, {used.ru_maxrss / 1e6:.2f} GB"


def until(states: Iterator[Found], seconds: float) -> Iterator[Found]:
    """Yield states until the processor has spent so many seconds."""
    begin = time.process_time()
    for state in states:
        yield state
        if time.process_time() - begin > seconds:
            return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="70B", choices=list(MODELS))
    parser.add_argument("--devices", type=int, default=128)
    parser.add_argument("--n-seqs", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=256, help="generation.max_batch_size")
    parser.add_argument("--hardware", default="a100_80gb")
    parser.add_argument("--most-move", type=float, default=2.0, help="seconds that moves may differ by")
    parser.add_argument("--wide", action="store_true", help="stage 0 of ZeRO, and offload, are choices too")
    parser.add_argument("--walks", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=60.0, help="of the processor, for the search")
    options = parser.parse_args()
    problem = problem_of(options)
    last, period = None, float("inf")
    for last in until(search(problem), options.seconds):
        if last.period < period:
            period = last.period
            print(f"{last.period:10.3f} s  gap {last.gap:7.2%}  {last.n_expanded} expanded  {spent()}", flush=True)
    assert last is not None
    assert last.plan is not None
    ending = "ended" if last.is_done else "stopped"
    print(f"{ending}: {last.period:.3f} s, at least {last.bound:.3f} s, gap {last.gap:.2%}")
    print(f"{last.n_expanded} partial plans expanded, {last.n_evaluated} plans evaluated, {spent()}")
    moves = problem.model.moves_seen
    print(f"{len(moves)} moves were priced, the longest takes {max(moves, default=0.0):.2f} s")
    for name, placed in zip(problem.model.flow.names, last.plan, strict=True):
        print(f"  {name:14} ranks {placed.span[0]}-{placed.span[1] - 1}  {placed.choice}")


if __name__ == "__main__":
    main()
