"""Plans by rules: the placements and strategies of known systems, for any graph.

Roles take part by what they do: the policy is the role that generates, see `realrl.plan.modes.split_roles`. Where
a system leaves a strategy open, the calls of a mesh get those with the least seconds that fit it together.
"""

from __future__ import annotations

from realrl.errors import AllocationError
from realrl.graph.mfc import InterfaceType, MFCDef
from realrl.plan.modes import divide_cluster, split_roles, standalone_parts
from realrl.search.methods.fill import Rule
from realrl.search.methods.layout import Calls, Maker, Plan
from realrl.search.problem import Problem
from realrl.search.space import Choice, Span


def data(problem: Problem, seed: int) -> Plan:
    """All calls data-parallel on all devices."""
    rule = Rule(lambda mfc, choice: choice.strategy.tp == choice.strategy.pp == 1)
    return _colocated(Maker("data", problem, rule))


def colocate(problem: Problem, seed: int) -> Plan:
    """All calls on all devices, each with a strategy of its own."""
    return _colocated(Maker("colocate", problem))


def split(problem: Problem, seed: int) -> Plan:
    """Two halves: the policy and its reference, all other roles."""
    return _halves(Maker("split", problem))


def standalone(problem: Problem, seed: int) -> Plan:
    """A mesh for each role, of the sizes that are quickest; see `Maker.sized`."""
    maker = Maker("standalone", problem)
    return maker.sized([_alone(maker)])


def deepspeed_chat(problem: Problem, seed: int) -> Plan:
    """All roles on all devices, ZeRO in training and tensor parallelism inside the node in generation.

    Yao et al. 2023, "DeepSpeed-Chat", section 4 (hybrid engine); Sheng et al. 2025, "HybridFlow", table 1. Its ZeRO is
    stage 3, which takes the backend `deepspeed`; with another one it is the highest that the backend has. Frozen roles,
    which realrl does not divide by ZeRO, have tensor parallelism inside the node too.
    """
    return _colocated(Maker("deepspeed_chat", problem, _zero_and_tensor(problem)))


def openrlhf(problem: Problem, seed: int) -> Plan:
    """A mesh for each role and another one for generation; ZeRO in training, tensor parallelism in generation.

    Hu et al. 2024, "OpenRLHF", section 3; Sheng et al. 2025, "HybridFlow", table 1: two copies of the policy's
    weights. ZeRO as in `deepspeed_chat`; sizes are those that are quickest.
    """
    maker = Maker("openrlhf", problem, _zero_and_tensor(problem))
    sets = _alone(maker)
    generating = tuple([c for c, mfc in enumerate(maker.mfcs) if mfc.interface_type is InterfaceType.GENERATE])
    parts = [tuple([call for call in calls if call not in generating]) for calls in sets]
    own = [tuple([call for call in calls if call in generating]) for calls in sets]
    return maker.sized([[calls for calls in (*parts, *own) if calls]])


def nemo_aligner(problem: Problem, seed: int) -> Plan:
    """Two halves: the policy and its reference, all other roles; one strategy for all calls of a role.

    Shen et al. 2024, "NeMo-Aligner", section 3; Sheng et al. 2025, "HybridFlow", table 1: the same partition of the
    model in training and in generation.
    """
    return _halves(Maker("nemo_aligner", problem, Rule(is_alike=lambda mfc: True)))


def real_heuristic(problem: Problem, seed: int) -> Plan:
    """All calls on all devices; tensor parallelism inside the node, pipelines across nodes as memory asks.

    Mei et al. 2025, "ReaL", section 8 (ReaL-Heuristic): a symmetric plan, as in pretraining. The degree of tensor
    parallelism is the largest that a node and a role's heads allow, the number of stages the least that fits.
    """
    refused: AllocationError | None = None
    for pp in sorted({choice.strategy.pp for choices in problem.choices for choice in choices}):
        try:
            return _colocated(Maker("real_heuristic", problem, _symmetric(problem, pp)))
        except AllocationError as error:
            refused = error
    assert refused is not None, "every call has a choice"
    raise refused


# ---------------------------------------------------------------- meshes and rules


def _colocated(maker: Maker) -> Plan:
    return maker.on({tuple(range(len(maker.mfcs))): (0, maker.cluster.n_devices)})


def _halves(maker: Maker) -> Plan:
    """Return the plan with the two groups of `split_roles` on a half of the devices each, alone on all of them."""
    assert maker.problem.graph is not None
    parts = [part for part in split_roles(maker.problem.graph, maker.problem.heads) if part]
    try:
        meshes = divide_cluster(maker.cluster, len(parts))
    except AllocationError as error:
        raise AllocationError(f"method '{maker.name}': {error.message}", remedy=error.remedy) from None
    spans: list[Span] = [(mesh.ranks[0], mesh.ranks[-1] + 1) for mesh in meshes]
    return maker.on({maker.of_roles(part): span for part, span in zip(parts, spans, strict=True)})


def _alone(maker: Maker) -> list[Calls]:
    """Return the calls of each role; one without parameters takes no devices of its own."""
    assert maker.problem.graph is not None
    heads = maker.problem.heads
    parts = standalone_parts(maker.problem.graph, heads)
    weightless = [role for part in parts for role in part if heads[role] == "none"]
    weighty = [own for part in parts if (own := [role for role in part if role not in weightless])] or [[]]
    return [maker.of_roles([*own, *(weightless if own is weighty[0] else [])]) for own in weighty]


def _zero_and_tensor(problem: Problem) -> Rule:
    """Return the rule of data parallelism with the highest stage of ZeRO in training, tensor parallelism elsewhere."""
    stages: dict[str, int] = {}
    for name, choices in zip(problem.model.flow.names, problem.choices, strict=True):
        stages[name] = max(choice.zero_stage for choice in choices)

    def allows(mfc: MFCDef, choice: Choice) -> bool:
        if not mfc.is_train:
            return choice.strategy.pp == 1
        is_divided = choice.zero_stage == stages[mfc.name] or choice.strategy.dp == 1
        return choice.strategy.tp == choice.strategy.pp == 1 and is_divided

    return Rule(allows)


def _symmetric(problem: Problem, pp: int) -> Rule:
    """Return the rule of one strategy on all devices: the widest tensor parallelism in a node, and `pp` stages."""
    cluster, widest = problem.model.cluster, dict[str, int]()
    for name, choices in zip(problem.model.flow.names, problem.choices, strict=True):
        whole = [c.strategy.tp for c in choices if c.n_devices == cluster.n_devices and c.strategy.pp == pp]
        widest[name] = max((tp for tp in whole if tp <= cluster.n_devices_per_node), default=0)
    free = {
        name
        for call, name in enumerate(problem.model.flow.names)
        if call in problem.pins or problem.model.flow.homes[call] < 0
    }

    def allows(mfc: MFCDef, choice: Choice) -> bool:
        return mfc.name in free or (choice.strategy.pp == pp and choice.strategy.tp == widest[mfc.name])

    return Rule(allows, lambda mfc: mfc.name not in free)
