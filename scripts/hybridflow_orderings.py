"""HybridFlow's published orderings of placements, and its best sizes of generation, by the fast model.

    python scripts/hybridflow_orderings.py [--only pinned|free|generation]

Twelve points of PPO (Sheng et al. 2025, "HybridFlow", section 8.3, figures 12 and 13): the placement that
was the fastest there against the others, with strategies as published and with free ones. All points share one
hardware file, configs/hardware/a100_80gb.yaml, and one number for the network of a node. The paper says: "The
inter-machine bandwidth is 200Gbps"; so a node has one card of 200 Gb/s, not one for each GPU as a DGX has. Both are
counted, and the window of other speeds in which an ordering holds.

Seconds are those of a step by itself, as the paper's system runs one after the other; "steady" has those of a run whose
steps may overlap. Every placement has meshes of whole nodes, of the sizes that make it quickest; generation has no
pipelines, and decodes as many rows together as memory allows.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from bench_search import MODELS, shape

from realrl.config.schema import GenerationConfig
from realrl.errors import AllocationError
from realrl.graph.build import build_graph, call, topological_calls
from realrl.graph.mfc import InterfaceType, MFCDef
from realrl.mesh.device_mesh import Allocation, Cluster, ParallelStrategy
from realrl.plan.memory.load import RowLengths
from realrl.plan.memory.plan import RoleState
from realrl.plan.parameters.realloc_portions import Matrix
from realrl.plan.samples.partition import default_n_mbs
from realrl.search.fast import Model, Moved, Price, finish_times
from realrl.search.flow import flow_of
from realrl.search.memory.devices import OnDevices
from realrl.search.methods.layout import Maker, Plan
from realrl.search.prices import CostPrices, Workload
from realrl.search.problem import Problem
from realrl.search.space import Choice, Relation, mesh_at
from realrl.shape import DecoderConfig
from realrl.sim.durations import SampleSizes
from realrl.sim.hardware import Hardware, hardware_from

ROOT = Path(__file__).parents[1]
TRAINED = {"7B": (1, 8), "13B": (1, 8), "34B": (4, 8), "70B": (8, 8)}  # stages and tensor parallelism, figure 14
GENERATED = {"7B": 2, "13B": 4, "34B": 8, "70B": 8}  # tensor parallelism of generation, figure 14
N_SEQS = PROMPT = RESPONSE = 1024
MARGIN = 0.9  # usable share of a device's memory
ROWS = (
    8,
    16,
    32,
    64,
    128,
    256,
)  # that a replica decodes together; as many as its memory has room for, 256 in vLLM 0.3.1
LARGEST = Cluster(16, 8)
MOST_STAGES = 8
FREE_SIZES = (8, 16, 24, 32, 40, 48, 64, 80, 96, 112, 128)  # of meshes, where strategies are free
CARD = 200e9 / 8  # bytes a second
SPEEDS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)  # of a node's network, in cards

ALL, ACTOR, CRITIC = ("actor", "ref", "critic", "reward"), ("actor", "ref"), ("critic", "reward")
PLACEMENTS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "colocate": (ALL,),
    "split": (ACTOR, CRITIC),
    "standalone": tuple([(role,) for role in ALL]),
    "critic alone": (("actor", "ref", "reward"), ("critic",)),
}

NAMED = ("colocate", "split", "standalone")  # that both figures compare


@dataclass(frozen=True)
class Point:
    """A point of figure 12 or 13: sizes of actor and reference, and of critic and reward model."""

    actor: str
    critic: str
    n_devices: int
    fastest: str

    @property
    def sizes(self) -> tuple[str, str]:
        return self.actor, self.critic

    def __str__(self) -> str:
        models = self.actor if self.actor == self.critic else f"{self.actor} and {self.critic}"
        return f"{models}, {self.n_devices} GPUs"


POINTS = (
    *[Point("13B", "13B", n, "colocate") for n in (16, 32, 64)],
    Point("13B", "13B", 96, "split"),
    Point("13B", "13B", 128, "standalone"),
    *[Point("34B", "34B", n, "colocate") for n in (32, 64)],  # 16 GPUs lack memory
    *[Point("34B", "34B", n, "split") for n in (96, 128)],
    Point("13B", "70B", 64, "colocate"),
    Point("13B", "70B", 96, "split"),
    Point("13B", "70B", 128, "critic alone"),
)


# ---------------------------------------------------------------- the model


def ppo() -> list[MFCDef]:
    """The six calls of PPO with the keys that order them."""
    generate, inference, train = InterfaceType.GENERATE, InterfaceType.INFERENCE, InterfaceType.TRAIN_STEP
    read, n = ("ids", "rewards", "values", "ref"), N_SEQS
    return [
        MFCDef("actor_gen", "actor", generate, "ppo_actor", ("prompt_ids",), ("ids",), n_seqs=n),
        MFCDef("rew_inf", "reward", inference, "reward_model", ("ids",), ("rewards",), n_seqs=n),
        MFCDef("ref_inf", "ref", inference, "ppo_actor", ("ids",), ("ref",), n_seqs=n),
        MFCDef("critic_inf", "critic", inference, "ppo_critic", ("ids",), ("values",), n_seqs=n),
        MFCDef("actor_train", "actor", train, "ppo_actor", read, n_seqs=n, n_minibatches=8),
        MFCDef("critic_train", "critic", train, "ppo_critic", read, n_seqs=n, n_minibatches=8),
    ]


GRAPH = build_graph(ppo(), ["prompt_ids"])
HEADS = {"actor": "lm", "ref": "lm", "critic": "value", "reward": "reward"}


def hardware(cards: float | None = None) -> Hardware:
    """Return the file's machines; with one card to a node, of so many times 200 Gb/s, if `cards` is given."""
    text = (ROOT / "configs" / "hardware" / "a100_80gb.yaml").read_text(encoding="utf-8")
    found = hardware_from(yaml.safe_load(text), source="a100_80gb.yaml")
    if cards is None:
        return found
    node = replace(found.links.node, bytes_per_s=cards * CARD, sharing=1)
    return replace(found, links=replace(found.links, node=node))


@dataclass
class RowsAsChoice:
    """`Prices` in which generation's `n_mbs` is the number of rows that a replica decodes together."""

    workload: Workload
    hardware: Hardware
    _of: dict[int, CostPrices] = field(default_factory=dict)
    _prices: dict[tuple[str, Choice], Price] = field(default_factory=dict)

    connects = any_rows = False  # the runtime's memory is in the margin

    def call(self, name: str, choice: Choice) -> Price:
        if (name, choice) not in self._prices:
            prices, plain = self._decoding(name, choice)
            self._prices[name, choice] = prices.call(name, plain)
        return self._prices[name, choice]

    def is_trained(self, name: str) -> bool:
        return self.of(ROWS[-1]).is_trained(name)

    def on_devices(self, name: str, choice: Choice) -> OnDevices:
        prices, plain = self._decoding(name, choice)
        return prices.on_devices(name, plain)

    def parts(self, name: str, choice: Choice) -> Matrix:
        return self.of(ROWS[-1]).parts(name, choice)

    def arriving(self, calls: tuple[str, str], source: Choice, target: Choice, *where: Any) -> Matrix:
        prices, plain = self._decoding(calls[1], target)
        return prices.arriving(calls, source, plain, *where)

    def move(
        self, calls: tuple[str, str], source: ParallelStrategy, target: ParallelStrategy, relation: Relation
    ) -> Moved:
        return self.of(ROWS[-1]).move(calls, source, target, relation)

    def _decoding(self, name: str, choice: Choice) -> tuple[CostPrices, Choice]:
        """Return prices with a choice's number of rows, and the choice without it."""
        is_generation = call(self.workload.graph, name).interface_type is InterfaceType.GENERATE
        rows, plain = (choice.n_mbs, replace(choice, n_mbs=None)) if is_generation else (ROWS[-1], choice)
        return self.of(rows or ROWS[-1]), plain

    def of(self, rows: int) -> CostPrices:
        if rows not in self._of:
            generation = GenerationConfig(max_new_tokens=RESPONSE, max_batch_size=rows)
            workload = replace(self.workload, generation=generation)
            self._of[rows] = CostPrices(workload, self.hardware, capacity=MARGIN * self.hardware.device.memory_bytes)
        return self._of[rows]


def prices_of(sizes: tuple[str, str], machines: Hardware) -> RowsAsChoice:
    """Return the prices of PPO with models of these sizes."""
    home = Allocation(mesh_at(LARGEST, 0, 1), ParallelStrategy())
    models = models_of(sizes)
    states = {role: RoleState(model, home, role in ("actor", "critic")) for role, model in models.items()}
    lengths = {f"0/{i}": SampleSizes((PROMPT,), (RESPONSE,)) for i in range(N_SEQS)}
    rows = RowLengths([PROMPT], [PROMPT + RESPONSE], [PROMPT + RESPONSE])
    workload = Workload(GRAPH, states, LARGEST, GenerationConfig(), {1: lengths}, rows, dict.fromkeys(GRAPH, 1))
    return RowsAsChoice(workload, machines)


def models_of(sizes: tuple[str, str]) -> dict[str, DecoderConfig]:
    actor, critic = sizes
    of_role = {"actor": actor, "ref": actor, "critic": critic, "reward": critic}
    return {role: shape(size, HEADS[role]) for role, size in of_role.items()}


def strategies(
    mfc: MFCDef, n_devices: int, size: str, *, is_pinned: bool, t_g: int | None
) -> Iterator[ParallelStrategy]:
    """Yield strategies; the published one has the most stages, not above those published, that divide the devices."""
    is_generation = mfc.interface_type is InterfaceType.GENERATE
    for tp in (1, 2, 4, 8):
        stages = [pp for pp in range(1, MOST_STAGES + 1) if n_devices % (tp * pp) == 0]
        if is_generation:
            stages = [1] if not is_pinned or tp == (t_g or GENERATED[size]) else []
        elif is_pinned:
            most, wanted = TRAINED[size]
            stages = [max(pp for pp in stages if pp <= most)] if tp == wanted else []
        for pp in stages:
            yield ParallelStrategy(n_devices // (tp * pp), tp, pp, sp=tp > 1)


def choices(mfc: MFCDef, n_devices: int, size: str, *, is_pinned: bool, t_g: int | None = None) -> Iterator[Choice]:
    """Yield choices of a call on so many devices."""
    for strategy in strategies(mfc, n_devices, size, is_pinned=is_pinned, t_g=t_g):
        usual = default_n_mbs(strategy.pp, is_train=mfc.is_train)
        most = mfc.n_seqs // mfc.n_minibatches // strategy.dp
        numbers: list[int | None] = [None, *(n for n in (4 * usual, 16 * usual) if n <= most)]
        if mfc.interface_type is InterfaceType.GENERATE:
            numbers = [*ROWS]
        for n_mbs in numbers:
            for checkpoints in (False, True) if mfc.is_train else (False,):
                yield Choice(strategy, n_mbs, int(mfc.is_train), checkpoints)


def problem_of(
    sizes: tuple[str, str], prices: RowsAsChoice, n_devices: int, *, is_pinned: bool, t_g: int | None = None
) -> Problem:
    """Return the problem of a point, with choices on whole nodes."""
    cluster = Cluster(n_devices // 8, 8)
    capacity = MARGIN * prices.hardware.device.memory_bytes
    found = [
        tuple(
            choice
            for n in range(8, n_devices + 1, 8)
            if is_pinned or n in FREE_SIZES
            for choice in choices(mfc, n, sizes[mfc.role in CRITIC], is_pinned=is_pinned, t_g=t_g)
        )
        for mfc in topological_calls(GRAPH)
    ]
    return Problem(Model(flow_of(GRAPH), prices, cluster, capacity), found, graph=GRAPH, heads=HEADS)


# ---------------------------------------------------------------- orderings


@dataclass(frozen=True)
class Outcome:
    """Seconds of a placement: of a step by itself, and of a step of a run that goes on."""

    alone: float
    steady: float
    sizes: tuple[int, ...]


def outcomes(point: Point, prices: RowsAsChoice, *, is_pinned: bool) -> dict[str, Outcome]:
    """Return what each placement takes, with meshes of the best sizes; without those that do not fit."""
    problem = problem_of(point.sizes, prices, point.n_devices, is_pinned=is_pinned)
    found = {}
    for name, sets in PLACEMENTS.items():
        maker = Maker(name, problem)
        try:
            plan = maker.sized([[maker.of_roles(roles) for roles in sets]])
        except AllocationError:
            continue
        sizes = tuple(widest(plan, maker.of_roles(roles)) for roles in sets)
        found[name] = Outcome(seconds_alone(problem.model, plan), problem.model.period(plan), sizes)
    return found


def widest(plan: Plan, calls: Sequence[int]) -> int:
    return max(plan[number].choice.n_devices for number in calls)


def seconds_alone(model: Model, plan: Plan) -> float:
    return finish_times(model.flow, model.parts(plan), 1)[1]


def margin(point: Point, found: Mapping[str, Outcome], attribute: str) -> float:
    """Return the seconds of the fastest other placement of the figure over those of the published one, less 1."""
    if point.fastest not in found:
        return float("nan")
    others = [getattr(found[name], attribute) for name in NAMED if name in found and name != point.fastest]
    return min(others) / getattr(found[point.fastest], attribute) - 1.0


Job = tuple[tuple[str, str], float | None, bool]
Found = dict[Point, dict[str, Outcome]]


def run(job: Job) -> Found:
    """Return the outcomes of all points with models of the same sizes."""
    sizes, cards, is_pinned = job
    prices = prices_of(sizes, hardware(cards))
    return {point: outcomes(point, prices, is_pinned=is_pinned) for point in POINTS if point.sizes == sizes}


def orderings(pool: ProcessPoolExecutor, *, is_pinned: bool) -> Iterator[str]:
    """Yield the lines of the report on placements."""
    all_sizes = sorted({point.sizes for point in POINTS})
    networks: tuple[float | None, ...] = (None, *(SPEEDS if is_pinned else (1.0,)))
    jobs: list[Job] = [(sizes, cards, is_pinned) for sizes in all_sizes for cards in networks]
    found: dict[float | None, Found] = {}
    for (_, cards, _), part in zip(jobs, pool.map(run, jobs), strict=True):
        found.setdefault(cards, {}).update(part)
    yield f"\nStrategies {'as published' if is_pinned else 'free'}, one card of 200 Gb/s to a node\n"
    window = " window |" if is_pinned else ""
    yield "| point | fastest there | " + " | ".join(PLACEMENTS) + f" | margin | steady |{window}"
    yield "|---" * (len(PLACEMENTS) + 4 + is_pinned) + "|"
    for point in POINTS:
        here = found[1.0][point]
        seconds = " | ".join(f"{here[name].alone:.0f}" if name in here else "" for name in PLACEMENTS)
        alone, steady = (margin(point, here, attribute) for attribute in ("alone", "steady"))
        if is_pinned:
            window = f" {spelled([c for c in SPEEDS if margin(point, found[c][point], 'alone') > 0])} |"
        yield f"| {point} | {point.fastest} | {seconds} | {alone:+.1%} | {steady:+.1%} |{window}"
    yield "\n| network of a node | orderings that hold | of steps of a run |\n|---|---|---|"
    for cards, by_point in found.items():
        counts = [
            sum(margin(point, here, attribute) > 0 for point, here in by_point.items())
            for attribute in ("alone", "steady")
        ]
        network = "8 cards of 200 Gb/s" if cards is None else f"{200 * cards:g} Gb/s"
        yield f"| {network} | {counts[0]} of {len(POINTS)} | {counts[1]} of {len(POINTS)} |"
    yield ""
    for point, here in found[1.0].items():
        spelled_sizes = [f"{name} {'-'.join(map(str, one.sizes))}" for name, one in here.items() if name != "colocate"]
        yield f"{point}: {', '.join(spelled_sizes)}"


def spelled(held: Sequence[float]) -> str:
    """Return stretches of `SPEEDS` in Gb/s."""
    runs: list[list[float]] = []
    for speed in held:
        if runs and SPEEDS.index(speed) == SPEEDS.index(runs[-1][-1]) + 1:
            runs[-1].append(speed)
        else:
            runs.append([speed])
    return ", ".join(f"{200 * one[0]:g} to {200 * one[-1]:g} Gb/s" for one in runs) or "none"


# ---------------------------------------------------------------- generation


def without(machines: Hardware, what: str) -> Hardware:
    """Return machines on which one thing takes no time."""
    device, links = machines.device, machines.links
    if what == "latency":
        return replace(machines, links=replace(links, device=replace(links.device, latency_s=0.0)))
    if what == "messages":
        return replace(machines, links=replace(links, device=replace(links.device, bytes_per_s=1e18)))
    assert what == "launches"
    return replace(machines, device=replace(device, block_s=0.0, token_s=0.0, pass_s=0.0))


def generation(size: str, machines: Hardware) -> dict[int, tuple[float, float, int]]:
    """Return t_g -> seconds of generation, of the move before it, and rows that a replica decodes together.

    16 GPUs with all models colocated, trained 1-8-2; as many rows as fit.
    """
    prices, found = prices_of((size, size), machines), {}
    for t_g in (1, 2, 4, 8):
        problem = problem_of((size, size), prices, 16, is_pinned=True, t_g=t_g)
        maker = Maker("colocate", problem)
        try:
            plan = maker.on({tuple(range(len(maker.mfcs))): (0, 16)})
        except AllocationError:
            continue
        name = problem.model.flow.names.index("actor_gen")
        parts = problem.model.parts(plan)[name]
        found[t_g] = parts.run, parts.before, plan[name].choice.n_mbs or 0
    return found


def curves(size: str) -> list[str]:
    """Return the lines of one model's table."""
    machines = hardware(1.0)
    whole = generation(size, machines)
    savings = {what: generation(size, without(machines, what)) for what in ("latency", "messages", "launches")}
    lines = [
        f"\n{size}, 16 GPUs, trained 1-8-2\n",
        "| t_g | generation | move before it | rows together | weights | all-reduce latency | its bytes | launches |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    n_bytes = weight_bytes(size)
    for t_g, (seconds, move, rows) in whole.items():
        n_waves = -(-N_SEQS * t_g // 16 // rows)
        reading = n_waves * (RESPONSE - 1) * n_bytes / t_g / machines.device.stream
        saved = [f"{seconds - found[t_g][0]:.1f}" for found in savings.values()]
        lines.append(f"| {t_g} | {seconds:.1f} s | {move:.2f} s | {rows} | {reading:.1f} | {' | '.join(saved)} |")
    lines.append("")
    for latency in (0.0, 2e-6, 4e-6, 8e-6, 16e-6, 32e-6, 64e-6):
        link = replace(machines.links.device, latency_s=latency)
        found = generation(size, replace(machines, links=replace(machines.links, device=link)))
        best = min(found, key=lambda t_g: sum(found[t_g][:2]))
        slowest = found[8][0] / found[best][0] if 8 in found else float("nan")
        lines.append(
            f"latency of a round {1e6 * latency:g} us: t_g = {best} is the fastest, "
            f"t_g = 8 takes {slowest:.2f} times as long"
        )
    return lines


def weight_bytes(size: str) -> float:
    hidden, layers, heads, kv_heads, inner = MODELS[size]
    attention = hidden * hidden * (2 + 2 * kv_heads / heads)
    return 2.0 * (layers * (attention + 3 * hidden * inner) + 32000 * hidden)


def main(arguments: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["pinned", "free", "generation"])
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args(None if arguments is None else list(arguments))
    with ProcessPoolExecutor(options.processes) as pool:
        for is_pinned in (True, False):
            if options.only in (None, "pinned" if is_pinned else "free"):
                for line in orderings(pool, is_pinned=is_pinned):
                    print(line, flush=True)
        if options.only in (None, "generation"):
            for lines in pool.map(curves, ("7B", "13B")):
                print("\n".join(lines), flush=True)


if __name__ == "__main__":
    main()
