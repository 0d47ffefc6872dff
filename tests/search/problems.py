"""Random small searches, and the enumeration of all plans."""

import itertools
import math
import random
import zlib
from dataclasses import replace

import numpy as np

from realrl.config.schema import GenerationConfig
from realrl.errors import GraphError
from realrl.graph.build import build_graph, calls
from realrl.graph.mfc import InterfaceType, MFCDef, ModelName, ParamReallocHook
from realrl.mesh.device_mesh import Allocation, Cluster, DeviceMesh, ParallelStrategy, legal_meshes
from realrl.plan.memory.load import RowLengths
from realrl.plan.memory.plan import RoleState
from realrl.search.bound import Bounds
from realrl.search.fast import Model, Moved, Price, Spread
from realrl.search.flow import flow_of
from realrl.search.local.scores import Scores
from realrl.search.local.walk import Walk
from realrl.search.memory.devices import OnDevices
from realrl.search.options import byte_weights, options_of
from realrl.search.prices import Workload
from realrl.search.problem import Problem, pose
from realrl.search.space import Choice, Pin, Placed, RoleSpace, mesh_sizes
from realrl.sim.durations import SampleSizes
from tests.sim.costs.models import hardware, small

KINDS = {"gen": InterfaceType.GENERATE, "inf": InterfaceType.INFERENCE, "train": InterfaceType.TRAIN_STEP}
CLUSTERS = [Cluster(1, 2), Cluster(1, 4), Cluster(2, 2), Cluster(4, 1), Cluster(3, 2), Cluster(1, 8), Cluster(2, 4)]


class AlikeDevices:
    """Bytes of calls on devices that are all alike, by `call` and `move`; without connections."""

    connects = any_rows = False

    def is_trained(self, call):
        return False

    def on_devices(self, call, choice):
        price = self.call(call, choice)
        return OnDevices(*(np.full(choice.n_devices, n) for n in (price.kept, price.used)))

    def parts(self, call, choice):
        return np.zeros(choice.n_devices, dtype=int)

    def arriving(self, calls, source, target, start, parts=None):
        moved = self.move(calls, source.strategy, target.strategy, "same")
        return self.on_devices(calls[1], target).used + moved.n_bytes


class RandomPrices:
    """Costs that are functions of a seed and the question; moves depend on the relation of the meshes.

    Devices of a mesh keep and use different bytes, and get different ones of those that move.
    """

    connects = any_rows = False

    def __init__(self, seed):
        self.seed = seed

    def _share(self, *key):
        return zlib.crc32(repr((self.seed, *key)).encode()) / 2**32

    def _shares(self, n_devices, *key):
        return np.array([self._share(*key, device) for device in range(n_devices)])

    def is_trained(self, call):
        return False

    def on_devices(self, call, choice):
        return OnDevices(*(
            (60 * self._share(call, str(choice), what) * (0.5 + 0.5 * self._shares(choice.n_devices, call, what)))
            .astype(int) for what in ("kept", "used")
        ))  # fmt: skip

    def call(self, call, choice):
        work = 1.0 + 9.0 * self._share(call)
        seconds = work / choice.n_devices ** (0.5 + 0.7 * self._share(call, "scaling"))
        seconds *= 0.7 + 0.6 * self._share(call, str(choice))
        there = self.on_devices(call, choice)
        pairs = [*zip(there.kept.tolist(), there.used.tolist(), strict=True)]
        least = int(there.kept.min()), int(there.used.min())
        return Price(seconds, *max(pairs, key=sum), Spread(float(there.kept.mean()), least, pairs[0]))

    def move(self, calls, source, target, relation):
        seconds = 2.0 * self._share(calls, str(source), str(target), relation)
        return Moved(seconds, self._received(calls, source, target))

    def parts(self, call, choice):
        return np.arange(choice.n_devices)

    def arriving(self, calls, source, target, start, parts=None):
        n_bytes = self._received(calls, source.strategy, target.strategy)
        received = (n_bytes * self._shares(target.n_devices, calls, start)).astype(int)
        received[int(target.n_devices * self._share(calls, start))] = n_bytes
        if parts is not None:  # in this order, some devices get more
            received += [int(30 * self._share(calls, start, part)) for part in parts]
        return self.on_devices(calls[1], target).used + received

    def _received(self, calls, source, target):
        return int(30 * self._share(calls, str(source), str(target), "bytes"))


def random_graph(rng, n_calls):
    """Calls that read keys of earlier ones; some roles are trained, and some calls run ahead."""
    while True:
        names, mfcs = [f"c{i}" for i in range(n_calls)], []
        for i, name in enumerate(names):
            role = rng.choice("abc")
            kind = rng.choice(["gen", "inf", "inf", "train"])
            reads = [f"k{j}" for j in range(i) if rng.random() < 0.5]
            reads = tuple(reads) or ("prompt_ids",)
            stale = rng.choice([0, 0, 0, 1, 2]) if kind != "train" else 0
            hooks = ()
            if kind == "train" and rng.random() < 0.3:
                hooks = (ParamReallocHook(target=ModelName(rng.choice([r for r in "abc" if r != role])), eta=0.5),)
            mfcs.append(
                MFCDef(name, role, KINDS[kind], "x", reads, () if kind == "train" else (f"k{i}",), n_seqs=8,
                       max_staleness=stale, post_hooks=hooks)
            )  # fmt: skip
        try:
            return build_graph(mfcs, ["prompt_ids"])
        except GraphError:
            continue


def few_of(rng, cluster, choices, most_plans):
    """Choices of each call, at random ones, with which there are at most so many plans, whether meshes nest or not."""
    n_meshes = {size: sum(mesh.n_devices == size for mesh in legal_meshes(cluster)) for size in mesh_sizes(cluster)}
    kept, total = [], 1
    for wanted in choices:
        wanted = rng.sample(wanted, len(wanted))
        found = wanted[:1]
        for choice in wanted[1:]:
            places = sum(n_meshes[c.n_devices] for c in (*found, choice))
            if total * places <= most_plans ** ((len(kept) + 1) / len(choices)):
                found.append(choice)
        total *= sum(n_meshes[c.n_devices] for c in found)
        kept.append(tuple(sorted(found, key=lambda c: c.order)))
    return kept


def problem(seed, *, most_plans=600, n_calls=None, pins=False, alone=1.0):
    """A random search with at most so many plans, whether they nest or not."""
    rng = random.Random(seed)
    cluster = rng.choice(CLUSTERS)
    graph = random_graph(rng, n_calls or rng.randint(1, 4))
    model = Model(flow_of(graph), RandomPrices(seed), cluster, rng.choice([70, 120, 200, 1000]), alone=alone)
    wanted = [
        Choice(ParallelStrategy(size // tp, tp), checkpoints=checkpoints)
        for size in mesh_sizes(cluster)
        for tp in (1, 2)
        for checkpoints in (False, True)
        if size % tp == 0
    ]
    choices = few_of(rng, cluster, [wanted] * len(model.flow.names), most_plans)
    pinned = {}
    if pins:
        for call in rng.sample(range(len(choices)), rng.randint(1, len(choices))):
            mesh = rng.choice([m for m in legal_meshes(cluster) if m.n_devices in {c.n_devices for c in choices[call]}])
            choices[call] = tuple(c for c in choices[call] if c.n_devices == mesh.n_devices)
            pinned[call] = Pin(choices[call][0].strategy, mesh)
            choices[call] = tuple(c for c in choices[call] if c.strategy == pinned[call].strategy)
    return Problem(model, choices, pinned, n_walks=rng.choice([0, 1, 4]))


def posed(seed, *, most_plans=600, alone=1.0):
    """A random graph of calls on a random machine, of whose choices a few are left."""
    rng = random.Random(seed)
    cluster, graph = rng.choice(CLUSTERS), random_graph(rng, rng.randint(1, 4))
    shape = small(n_layers=rng.choice([2, 4, 8]), hidden_size=rng.choice([64, 128, 256]))
    roles = {mfc.role: rng.choice([shape, shape, None]) for mfc in calls(graph)}
    roles |= {mfc.role: shape for mfc in calls(graph) if mfc.is_train or mfc.pre_hooks or mfc.post_hooks}
    hooked = {hook.target.role for mfc in calls(graph) for hook in mfc.post_hooks}
    roles |= dict.fromkeys(hooked & roles.keys(), shape)
    home = Allocation(DeviceMesh(cluster, (0,)), ParallelStrategy())
    trained = {mfc.role for mfc in calls(graph) if mfc.is_train}
    prompt, new = rng.randint(1, 200), rng.randint(1, 200)
    workload = Workload(
        graph,
        {role: RoleState(model, home, role in trained) for role, model in roles.items() if model is not None},
        cluster,
        GenerationConfig(max_batch_size=rng.choice([2, 8]), max_new_tokens=new),
        {1: {f"0/{i}": SampleSizes((rng.randint(1, prompt),), (rng.randint(1, new),)) for i in range(8)}},
        RowLengths([prompt], [2 * (prompt + new)], [prompt + new]),
        dict.fromkeys(graph, 1),
    )
    spaces = {role: RoleSpace(model) for role, model in roles.items()}
    found = pose(workload, random_machine(rng), roles=spaces, capacity=math.inf)
    needs = sorted(price.kept + price.used for price in found.model._prices.values())
    capacity = needs[-1] * rng.choice([0.8, 1.5, 3.0, 10.0]) + 1
    model = replace(found.model, capacity=capacity, alone=alone)
    fits = [
        [one for one in some if model.price(call, one).kept + model.price(call, one).used <= capacity]
        for call, some in enumerate(found.choices)
    ]
    return replace(found, model=model, choices=few_of(rng, cluster, fits, most_plans), n_walks=rng.choice([0, 1, 4]))


def random_machine(rng):
    """An A100 whose speeds are anything from a hundredth to a hundred times as high."""

    def times(part, *names):
        return replace(part, **{name: getattr(part, name) * 10 ** rng.uniform(-2, 2) for name in names})

    found = hardware()
    device = times(found.device, "bytes_per_s", "block_s", "pass_s", "token_s")
    links = {name: times(getattr(found.links, name), "bytes_per_s", "latency_s") for name in ("device", "node", "host")}
    node = replace(links["node"], sharing=rng.choice([None, 1, 2]))
    return replace(found, device=device, links=replace(found.links, **links | {"node": node}))


def walk_of(found: Problem, scores: Scores | None = None):
    """Local searches of a problem."""
    weights = byte_weights(found.model, found.choices)
    options = [options_of(found.model, call, some, weights) for call, some in enumerate(found.choices)]
    bounds = Bounds(found.model, options, range(len(options)), weights)
    return Walk(found, bounds, scores or Scores(found), seed=1)


def all_plans(found: Problem):
    """Every plan on legal meshes of which any two nest or are disjoint, and that fits."""
    meshes = list(legal_meshes(found.model.cluster))
    spans = {mesh: (mesh.ranks[0], mesh.ranks[-1] + 1) for mesh in meshes}
    options = []
    for call, choices in enumerate(found.choices):
        pin = found.pins.get(call)
        allowed = meshes if pin is None or pin.mesh is None else [pin.mesh]
        options.append([(m, Placed(spans[m], c)) for m in allowed for c in choices if c.n_devices == m.n_devices])
    for combination in itertools.product(*options):
        pairs = itertools.combinations([mesh for mesh, _ in combination], 2)
        if all(not a.overlaps(b) or a.contains(b) or b.contains(a) for a, b in pairs):
            plan = tuple(placed for _, placed in combination)
            if not found.model.overflow(plan):
                yield plan
