"""The micro data-parallel groups of HybridFlow's 3D-HybridEngine."""

from realrl.plan.parameters.layout import ParameterLayout


def micro_dp_groups(source: ParameterLayout, target: ParameterLayout) -> tuple[tuple[int, ...], ...]:
    """Return groups of ranks with the same slices in the target layout and in one replica of the source layout.

    For training 1-4-2 (p-t-d) and generation 1-2-2-2 (p_g-t_g-d_g-d) these are the micro data-parallel groups, of d_g
    ranks each. Ranks in the order of the target's dp_rank; ranks that the source layout lacks are in no group.
    """
    groups: dict[tuple[int, int, int], list[int]] = {}
    for rank in sorted((r for r in target.ranks if r in source), key=lambda r: target.coordinates_of(r)[1]):
        pp_rank, _, tp_rank = target.coordinates_of(rank)
        groups.setdefault((source.coordinates_of(rank)[1], pp_rank, tp_rank), []).append(rank)
    return tuple(tuple(groups[key]) for key in sorted(groups))
