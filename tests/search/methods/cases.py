"""Problems with prices by a few formulas, for tests of methods."""

from realrl.graph.build import build_graph, topological_calls
from realrl.graph.mfc import InterfaceType, MFCDef
from realrl.mesh.device_mesh import Cluster
from realrl.search.fast import Model, Moved, Price
from realrl.search.flow import flow_of
from realrl.search.problem import Problem, fitting
from realrl.search.space import RoleSpace, choices_of, pin_from
from tests.search.problems import AlikeDevices
from tests.sim.costs.models import small

GENERATE, INFERENCE, TRAIN = InterfaceType.GENERATE, InterfaceType.INFERENCE, InterfaceType.TRAIN_STEP
SIZE = 1000  # bytes of a model's parameters


def call(name, kind, reads, gives="", n=64, **more):
    role = name.rpartition("_")[0]
    gives = (gives,) if gives else ()
    minibatches = {"n_minibatches": 2} if kind is TRAIN else {}
    return MFCDef(name, role, kind, "x", tuple(reads.split()), gives, n_seqs=n, **minibatches, **more)


def ppo(n=64):
    return [
        call("actor_gen", GENERATE, "prompt_ids", "ids", n),
        call("reward_inf", INFERENCE, "ids", "rewards", n),
        call("ref_inf", INFERENCE, "ids", "logprobs", n),
        call("critic_inf", INFERENCE, "ids", "values", n),
        call("actor_train", TRAIN, "ids rewards logprobs values", n=n),
        call("critic_train", TRAIN, "ids rewards logprobs values", n=n),
    ]


def safe_rlhf():
    return [
        *ppo()[:4],
        call("cost_inf", INFERENCE, "ids", "costs"),
        call("cost_critic_inf", INFERENCE, "ids", "cost_values"),
        call("actor_train", TRAIN, "ids rewards logprobs values costs cost_values"),
        call("critic_train", TRAIN, "ids rewards logprobs values"),
        call("cost_critic_train", TRAIN, "ids costs logprobs cost_values"),
    ]


def self_play():
    return [
        call("actor_gen", GENERATE, "prompt_ids", "ids"),
        call("opponent_gen", GENERATE, "prompt_ids", "other_ids"),
        call("reward_inf", INFERENCE, "ids other_ids", "rewards"),
        call("actor_train", TRAIN, "ids rewards"),
        call("opponent_train", TRAIN, "other_ids rewards"),
    ]


def sft():
    return [call("model_train", TRAIN, "prompt_ids")]


def grpo_with_function():
    """The reward has no parameters."""
    return [
        call("actor_gen", GENERATE, "prompt_ids", "ids"),
        call("scorer_inf", INFERENCE, "ids", "rewards"),
        call("ref_inf", INFERENCE, "ids", "logprobs"),
        call("actor_train", TRAIN, "ids rewards logprobs"),
    ]


GRAPHS = {function.__name__: function for function in (ppo, safe_rlhf, self_play, sft, grpo_with_function)}
WORK = {GENERATE: 40.0, INFERENCE: 8.0, TRAIN: 24.0}


class Formulas(AlikeDevices):
    """Work over devices, and more for tensor parallelism and pipelines; bytes as of parameters that are divided."""

    def __init__(self, kinds, weightless=()):
        self.kinds, self.weightless = kinds, weightless

    def call(self, name, choice):
        if name.rpartition("_")[0] in self.weightless:
            return Price(0.1)
        s, kind = choice.strategy, self.kinds[name]
        overhead = 1 + 0.04 * (s.tp - 1) + 0.1 * (s.pp - 1) + 0.2 * choice.checkpoints + 0.5 * choice.offloads
        seconds = WORK[kind] * overhead / s.n_devices + 0.02 * s.dp + (0.1 if choice.n_mbs else 0.0)
        own = SIZE // (s.tp * s.pp)
        if kind is TRAIN:
            states = 0 if choice.offloads else 6 * own // (s.dp if choice.zero_stage else 1)
            part = s.dp if choice.zero_stage == 3 else 1
            return Price(seconds, own // part + states, own * (1 if choice.checkpoints else 3))
        if choice.offloads:
            return Price(seconds, 0, own + own // 4)
        return Price(seconds, own, own // 4)

    def move(self, calls, source, target, relation):
        return Moved(0.3 if relation == "apart" else 0.1, SIZE // (target.tp * target.pp))


def posed(mfcs=None, cluster=None, *, capacity=1e9, pins=None, backend="native", heads=None, model=None):
    """A problem of calls whose roles all have a small model, but for one called scorer."""
    graph, cluster = build_graph(mfcs or ppo(), ["prompt_ids"]), cluster or Cluster(2, 4)
    names = list(dict.fromkeys(mfc.role for mfc in topological_calls(graph)))
    model = model or small()
    roles = {name: RoleSpace(None if name == "scorer" else model, backend=backend) for name in names}
    weightless = [name for name in names if name == "scorer"]
    flow = flow_of(graph, weightless=weightless)
    prices = Formulas({mfc.name: mfc.interface_type for mfc in topological_calls(graph)}, weightless)
    found = Model(flow, prices, cluster, capacity)
    pinned = {name: pin_from(text, cluster) for name, text in (pins or {}).items()}
    choices = [
        fitting(found, number, choices_of(graph, name, roles, cluster, pin=pinned.get(name)))
        for number, name in enumerate(flow.names)
    ]
    known = {name: "none" if name in weightless else "lm" for name in names}
    known |= {name: "value" for name in names if "critic" in name} | dict.fromkeys(("reward", "cost"), "reward")
    known = {name: head for name, head in known.items() if name in names}
    return Problem(
        found, choices, {flow.names.index(n): pin for n, pin in pinned.items()}, graph=graph, heads=heads or known
    )


def placed(problem, plan):
    """Call -> its mesh and choice."""
    return dict(zip(problem.model.flow.names, plan, strict=True))
