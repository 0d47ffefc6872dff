"""The instance of a run's train calls: what fusing them on their mesh would be like, by the model of costs.

Seconds are means over the micro-batches of a minibatch, activations those of the largest micro-batch that the
configuration allows, as the memory plan counts them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from realrl.errors import AllocationError, UsageError
from realrl.experiment.models import role_configs
from realrl.experiment.run_plan import RunPlan
from realrl.experiment.states import call_states, longest_rows, role_states
from realrl.graph.mfc import MFCDef
from realrl.plan.fusion.instance import Instance, Model, on_block
from realrl.plan.memory.formulas.local import Kernels, local_shape
from realrl.plan.memory.formulas.passes import training_activations
from realrl.plan.memory.plan import CallState, RoleState
from realrl.plan.parameters.shards import shard_of
from realrl.plan.parameters.specs import DTYPE_BYTES
from realrl.planner.modelled import Draw, KernelsOf
from realrl.sim.costs.calls import CostModel
from realrl.sim.hardware import Hardware


def pair_of(plan: RunPlan, names: Sequence[str] = ()) -> tuple[MFCDef, ...]:
    """Return the train calls to fuse: those named, or all of the run.

    Raises:
        UsageError: there are fewer than two, or one is no train call.
        AllocationError: they are not on one mesh, or cannot share its devices.
    """
    trained = [mfc.name for mfc in plan.mfcs if mfc.is_train]
    for name in names:
        if name not in trained:
            raise UsageError(
                f"--calls {name}: there is no such train call", remedy=f"Choose from {', '.join(trained)}."
            )
    found = tuple(mfc for mfc in plan.mfcs if mfc.is_train and (not names or mfc.name in names))
    if len(found) < 2:
        raise UsageError(
            f"experiment '{plan.experiment.name}' has {len(found)} train calls to fuse, and fusing takes two",
            remedy="Choose an experiment that trains two roles, such as ppo.",
        )
    first = plan.allocations[found[0].name]
    for mfc in found[1:]:
        allocation = plan.allocations[mfc.name]
        if allocation.mesh != first.mesh:
            raise AllocationError(
                f"'{found[0].name}' trains on {first} and '{mfc.name}' on {allocation}, not on the same devices",
                remedy=f"Put both on one mesh, such as allocation.calls.{mfc.name}={first}.",
                call=mfc.name,
            )
    if all(plan.allocations[mfc.name].strategy.pp == 1 for mfc in found):
        raise AllocationError(
            f"'{found[0].name}' and '{found[1].name}' have one pipeline stage each, and so no bubbles to fill",
            remedy="Give one of them more, such as allocation.mode=pipeline.",
            call=found[0].name,
        )
    return found


def instance_of(
    plan: RunPlan, pair: Sequence[MFCDef], machine: Hardware, kernels_of: KernelsOf, draw: Draw
) -> Instance:
    """Return the pipelines of train calls on one block of their mesh, every other one against the first.

    A stage takes as many places as its tensor-parallel ranks, in units that all calls share.
    """
    calls = {call.name: call for call in call_states(plan, longest_rows(plan.config, plan.experiment.dataset))}
    roles = role_states(plan, role_configs(plan))
    kernels = kernels_of(roles, list(calls.values()), machine.device.kind)
    costs = CostModel(roles, machine, generation=plan.config.generation, kernels=kernels)
    unit = math.gcd(*(plan.allocations[mfc.name].strategy.tp for mfc in pair))
    models = []
    for number, mfc in enumerate(pair):
        allocation = plan.allocations[mfc.name]
        strategy = allocation.strategy
        n_samples = max(1, (mfc.n_seqs or plan.samples_per_step) // (mfc.n_minibatches * strategy.dp))
        ids = [f"sample {i}" for i in range(n_samples)]
        forwards, backwards = costs.passes(mfc, allocation, ids, {each: draw(each) for each in ids})
        models.append(
            Model(
                mfc.name,
                strategy.pp,
                forwards.shape[1],
                forwards.mean(axis=1).tolist(),
                backwards.mean(axis=1).tolist(),
                _activations(roles[mfc.role], calls[mfc.name], kernels),
                width=strategy.tp // unit,
                is_reversed=number % 2 == 1,
            )
        )
    return on_block(models)


def _activations(role: RoleState, call: CallState, kernels: Kernels) -> list[float]:
    """Return the bytes of a micro-batch between its passes, of each stage on the rank that holds the most."""
    strategy, model, found = call.allocation.strategy, role.model, []
    n_again = call.load.repeated(model.hidden_size) if kernels.computes_once(model) else 0
    for stage in range(strategy.pp):
        held = 0
        for tp_rank in range(strategy.tp):
            shard = shard_of(model, strategy, strategy.mesh_rank(pp_rank=stage, dp_rank=0, tp_rank=tp_rank))
            local = local_shape(model, shard, sp=strategy.sp, element_bytes=DTYPE_BYTES[model.dtype])
            _, _, one = training_activations(
                local,
                call.load,
                n_tokens=call.load.n_tokens - n_again,
                n_in_flight=1,
                checkpointing=role.checkpoints_activations,
                kernels=kernels,
            )
            held = max(held, one)
        found.append(float(held))
    return found
