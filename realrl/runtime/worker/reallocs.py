"""Plans for moving the parameters of a run's roles between layouts."""

from __future__ import annotations

from collections.abc import Mapping

from realrl.experiment.backends import trained_roles
from realrl.experiment.run_plan import RunPlan
from realrl.mesh.device_mesh import Allocation
from realrl.plan.hooks import Realloc
from realrl.plan.parameters.decoder_specs import parameter_specs
from realrl.plan.parameters.layout import ParameterLayout, parameter_layout
from realrl.plan.parameters.realloc import ReallocPlan, plan_realloc
from realrl.shape import DecoderConfig


class Reallocs:
    """Plans every reallocation of a run once, however many calls need it.

    Args:
        plan: the run.
        configs: configurations from `role_configs`.
    """

    def __init__(self, plan: RunPlan, configs: Mapping[str, DecoderConfig]) -> None:
        self._node_of = plan.cluster.node_of
        self._configs = configs
        self._known: dict[tuple[str, Allocation, Allocation], ReallocPlan] = {}
        trained = list(trained_roles(plan))
        self._has_masters = plan.averaged_roles | {role.name for role in trained}
        self._shares_parameters = {role.name for role in trained if role.shares_parameters}
        self._has_own_buffers = {role.name for role in trained if role.has_own_buffers}

    def of(self, hook: Realloc) -> ReallocPlan:
        """Plan the whole reallocation of a hook."""
        key = (hook.source, hook.source_allocation, hook.target_allocation)
        if key not in self._known:
            self._known[key] = plan_realloc(*self._layouts(hook), node_of=self._node_of)
        return self._known[key]

    def parts_of(self, hook: Realloc) -> tuple[ReallocPlan, ...]:
        """Plan the reallocation of a hook in parts that run one after the other.

        There is one part for each layer, to hold only one layer beside the living parameters, if the ranks of the
        source share out its parameters or masters of the target must follow. Else there is a single part.
        """
        is_followed = not hook.is_implied and hook.target in self._has_masters
        if hook.source not in self._shares_parameters and not is_followed:
            return (self.of(hook),)
        source, target = self._layouts(hook)
        layers = zip(source.by_layer(), target.by_layer(), strict=True)
        return tuple(plan_realloc(a, b, node_of=self._node_of) for a, b in layers)

    def moves_source(self, hook: Realloc) -> bool:
        """Return True if the parameters of the role's home may become views of those of the call while these live."""
        return hook.is_implied and hook.source not in self._has_own_buffers

    def _layouts(self, hook: Realloc) -> tuple[ParameterLayout, ParameterLayout]:
        specs = parameter_specs(self._configs[hook.source])
        source, target = hook.source_allocation, hook.target_allocation
        return (
            parameter_layout(specs, source.strategy, source.ranks),
            parameter_layout(specs, target.strategy, target.ranks),
        )
