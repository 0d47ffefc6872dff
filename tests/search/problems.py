"""Random small searches, and the enumeration of all plans."""

import itertools
import random
import zlib

from realrl.errors import GraphError
from realrl.graph.build import build_graph
from realrl.graph.mfc import InterfaceType, MFCDef, ModelName, ParamReallocHook
from realrl.mesh.device_mesh import Cluster, ParallelStrategy, legal_meshes
from realrl.search.fast import Model, Placed, Price, flow_of
from realrl.search.problem import Problem
from realrl.search.space import Choice, Pin, mesh_sizes

KINDS = {"gen": InterfaceType.GENERATE, "inf": InterfaceType.INFERENCE, "train": InterfaceType.TRAIN_STEP}
CLUSTERS = [Cluster(1, 2), Cluster(1, 4), Cluster(2, 2), Cluster(4, 1), Cluster(3, 2), Cluster(1, 8), Cluster(2, 4)]


class RandomPrices:
    """Costs that are functions of a seed and the question; moves depend on the relation of the meshes."""

    def __init__(self, seed):
        self.seed = seed

    def _share(self, *key):
        return zlib.crc32(repr((self.seed, *key)).encode()) / 2**32

    def call(self, call, choice):
        work = 1.0 + 9.0 * self._share(call)
        seconds = work / choice.n_devices ** (0.5 + 0.7 * self._share(call, "scaling"))
        seconds *= 0.7 + 0.6 * self._share(call, str(choice))
        kept, used, copies = (int(60 * self._share(call, str(choice), what)) for what in ("kept", "used", "copies"))
        return Price(seconds, kept, used, copies // 2)

    def move(self, calls, source, target, relation):
        return 2.0 * self._share(calls, str(source.strategy), str(target.strategy), relation)


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


def problem(seed, *, most_plans=600, n_calls=None, pins=False, is_pruned=False):
    """A random search with at most so many plans, whether they nest or not."""
    rng = random.Random(seed)
    cluster = rng.choice(CLUSTERS)
    graph = random_graph(rng, n_calls or rng.randint(1, 4))
    model = Model(flow_of(graph), RandomPrices(seed), cluster, capacity=rng.choice([70, 120, 200, 1000]))
    sizes = mesh_sizes(cluster)
    n_meshes = {size: sum(mesh.n_devices == size for mesh in legal_meshes(cluster)) for size in sizes}
    choices, total = [], 1
    for _ in model.flow.names:
        wanted = [
            Choice(ParallelStrategy(size // tp, tp), checkpoints=checkpoints)
            for size in sizes
            for tp in (1, 2)
            for checkpoints in (False, True)
            if size % tp == 0
        ]
        rng.shuffle(wanted)
        found = wanted[:1]
        for choice in wanted[1:]:
            places = sum(n_meshes[c.n_devices] for c in (*found, choice))
            if total * places <= most_plans ** ((len(choices) + 1) / len(model.flow.names)):
                found.append(choice)
        total *= sum(n_meshes[c.n_devices] for c in found)
        choices.append(tuple(sorted(found, key=lambda c: c.order)))
    pinned = {}
    if pins:
        for call in rng.sample(range(len(choices)), rng.randint(1, len(choices))):
            mesh = rng.choice([m for m in legal_meshes(cluster) if m.n_devices in {c.n_devices for c in choices[call]}])
            choices[call] = tuple(c for c in choices[call] if c.n_devices == mesh.n_devices)
            pinned[call] = Pin(choices[call][0].strategy, mesh)
            choices[call] = tuple(c for c in choices[call] if c.strategy == pinned[call].strategy)
    return Problem(model, choices, pinned, is_pruned, n_walks=rng.choice([0, 1, 4]))


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
