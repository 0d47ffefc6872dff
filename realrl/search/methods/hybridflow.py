"""The device mapping of HybridFlow: Sheng et al. 2025, "HybridFlow", section 6, algorithms 1 and 2.

Every partition of the models into sets, and every division of the devices among the sets, each with at least the
devices that its memory needs: for every set the quickest strategies; the cost is the sum over generation, preparation
and training of the seconds of the slowest set, in which the models of a set add up. The least cost wins.

The pseudocode leaves open, or has wrong, what is decided here:
    - a placement is not changed while its divisions are tried: each division has strategies of its own;
    - degrees that do not divide the devices, a node or a model's heads are left out, and stages go up to what the
      search allows: the listing's loop over them is empty where a model has fewer devices than a node;
    - strategies of a set are chosen together, as those of the least seconds that fit: the listing takes each model by
      itself, from the least degrees with which the set would fit;
    - the policy has a strategy for generation and one for the rest, other roles have one;
    - parameters that move from training to generation are not in the cost, nor is what overlaps across stages;
    - devices may be left over; of equal costs the first counts, with fewer sets and larger ones first;
    - sets get meshes that realrl has: whole nodes, or parts of a node where there are fewer nodes than sets, and on
      more than 16 nodes 1, 2, 3, 4, 6, 8, 12, ... of them;
    - roles without parameters are in the set of the policy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from realrl.graph.mfc import InterfaceType
from realrl.plan.modes import split_roles
from realrl.search.methods.fill import Rule
from realrl.search.methods.layout import Maker, Plan
from realrl.search.problem import Problem


def hybridflow(problem: Problem, seed: int) -> Plan:
    """Return the mapping of the least cost; see the module."""
    assert problem.graph is not None
    rule = Rule(is_alike=lambda mfc: mfc.interface_type is not InterfaceType.GENERATE)
    maker = Maker("hybridflow", problem, rule, moves_count=False)
    groups = split_roles(problem.graph, problem.heads)
    roles = sorted((role for group in groups for role in group), key=lambda role: problem.heads[role] == "none")
    weighty = [role for role in roles if problem.heads[role] != "none"] or roles[:1]
    others = [role for role in roles if role not in weighty]
    return maker.sized(
        [
            [maker.of_roles([*part, *(others if weighty[0] in part else [])]) for part in partition]
            for partition in partitions(weighty)
        ]
    )


def partitions(names: Sequence[str]) -> Iterator[list[list[str]]]:
    """Yield every division of names into sets, each once; the first name is in the first set."""
    if not names:
        yield []
        return
    *rest, last = names
    for found in partitions(rest):
        yield [*found, [last]]
        for number in range(len(found)):
            yield [[*part, last] if i == number else part for i, part in enumerate(found)]
