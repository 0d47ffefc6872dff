"""The memory of a plan counted rank by rank and parameter by parameter, with nothing kept: slow, and easy to check."""

from __future__ import annotations

import math

from realrl.graph.mfc import InterfaceType
from realrl.plan.backends import BACKENDS
from realrl.plan.hooks import Offload, Realloc
from realrl.plan.memory.buffers import (
    FLOAT32,
    REALLOC_BUCKET,
    REALLOC_LARGE,
    RESPONSE_ROW_BYTES,
    ROW_BYTES,
    SAVE_STAGE,
)
from realrl.plan.memory.formulas.blocks import converted_bytes
from realrl.plan.memory.formulas.generation import generation_bytes
from realrl.plan.memory.formulas.local import Kernels, local_shape
from realrl.plan.memory.formulas.passes import forward_bytes, training_bytes
from realrl.plan.memory.optimizer import OptimizerSharing, optimizer_bytes, reduction_bytes
from realrl.plan.memory.plan import SAVE, Usage, layout_of
from realrl.plan.memory.saving import gathered_model, gathered_state, made_copies, model_copies, state_copies
from realrl.plan.parameters.adapters import is_trained
from realrl.plan.parameters.decoder_specs import parameter_specs
from realrl.plan.parameters.realloc import plan_realloc
from realrl.plan.parameters.specs import DTYPE_BYTES


def counted(roles, calls, *, rows_bytes=0, runtime_bytes=None, saves=None):
    """Call or `SAVE` -> rank -> usage, as `MemoryModel.plan(...).calls`."""
    away, copies = _away(roles, calls), {} if saves is None else _copies(roles, saves)
    stays, runtime = copies if saves is not None and saves.is_repeated else {}, runtime_bytes or {}
    found = {}
    for call in calls:
        found[call.name] = {}
        for rank in call.allocation.ranks:
            own = _call(call, roles, rank)
            own += Usage(rows=rows_bytes, runtime=runtime.get(rank, 0), host=stays.get(rank, 0))
            usages = [_resident(roles, rank, *where) + own for where in away[call.name]]
            found[call.name][rank] = max(usages, key=lambda usage: (usage.total, usage.host))
    if saves is not None:
        found[SAVE] = {rank: _save(roles, rank, away[SAVE], saves) for rank in copies}
        for name in set().union(*(absent for absent, _ in away[SAVE])) & roles.keys():
            role = roles[name]
            for rank in role.home.ranks:
                is_gathered = _merging(role, rank, saves) > 0
                is_first = not layout_of(role.model, role.home).coordinates_of(rank)[1]
                is_held = is_first and (not is_gathered or role.is_averaged) and _has_own_memory(role)
                if role.is_changed and is_held and not (saves.is_staged or saves.is_repeated):
                    _, n_bytes, kept = _state(role, rank)
                    here = kept if role.is_trained else n_bytes + _masters(role, n_bytes)
                    found[SAVE][rank] += Usage(host=here - _block(role, rank))
        for rank, n_bytes in copies.items():
            staged = 2 * SAVE_STAGE if saves.is_staged else 0
            found[SAVE][rank] += Usage(rows=rows_bytes, runtime=runtime.get(rank, 0), host=n_bytes + staged)
    return found


def _away(roles, calls):
    away, copied, steps = set(), set(), []
    for _ in range(2):
        step = {}
        for call in calls:
            hooks = [hook for hook in (*call.hooks.before, *call.hooks.after) if isinstance(hook, Realloc)]
            away -= {role for hook in hooks for role in (hook.source, hook.target)}
            if call.role in roles and roles[call.role].home == call.allocation:
                away.discard(call.role)
            step[call.name] = frozenset(away), frozenset(copied)
            away |= {hook.role for hook in call.hooks.after if isinstance(hook, Offload)}
            copied |= away
        steps.append({**step, SAVE: (frozenset(away), frozenset(copied))})
    return {name: (first, steps[1][name]) for name, first in steps[0].items()}


def _trained_sizes(role, layout, rank):
    sizes = []
    for spec in layout.specs:
        n_elements = layout.shard_of(rank).n_elements_of(spec)
        if role.is_trained and n_elements and is_trained(role.model, spec.name):
            sizes.append((spec.num_bytes // spec.n_elements, n_elements))
    return sizes


def _sharing(role):
    s = role.home.strategy
    split = s.tp > 1 or s.pp > 1
    return OptimizerSharing(role.backend, role.zero_stage, s.dp, role.offloads_optimizer, split)


def _state(role, rank):
    """Optimizer bytes for each width of elements; the bytes of parameters in all, and of those that the rank keeps."""
    layout = layout_of(role.model, role.home)
    sizes = _trained_sizes(role, layout, rank)
    largest = max((n for _, n in sizes), default=0)
    parts = []
    for width in sorted({width for width, _ in sizes}):
        own = [n for other, n in sizes if other == width]
        parts.append(optimizer_bytes(own, element_bytes=width, sharing=_sharing(role), largest=largest))
    n_bytes = layout.num_bytes_of(rank)
    return parts, n_bytes, math.ceil(n_bytes * min((part.parameters for part in parts), default=1.0))


def _masters(role, n_bytes):
    return FLOAT32 * (n_bytes // DTYPE_BYTES[role.model.dtype]) if role.is_averaged else 0


def _resident(roles, rank, absent, copied):
    total = Usage()
    for name, role in roles.items():
        if rank not in role.home.ranks:
            continue
        parts, n_bytes, kept = _state(role, rank)
        state = sum(part.masters + part.moments for part in parts)
        held = 0
        if any(part.holds_gradients for part in parts):
            held = sum(part.gradients for part in parts) + max(part.buffers for part in parts)
        host = state + sum(part.host for part in parts) if role.offloads_optimizer else 0
        parameters = kept if role.is_trained else n_bytes + _masters(role, n_bytes)
        optimizer = 0 if role.offloads_optimizer else state
        if name in absent:
            total += Usage(optimizer=optimizer, gradients=held, host=host + parameters)
        else:
            has_copy = name in copied and not role.is_changed
            total += Usage(parameters, optimizer, held, host=host + (parameters if has_copy else 0))
    return total


def _merging(role, rank, saves):
    if not role.is_changed:
        return 0
    layout, is_copied = layout_of(role.model, role.home), saves.is_staged or saves.is_repeated
    return gathered_model(layout.specs, layout.shard_of(rank), zero_stage=role.zero_stage, is_copied=is_copied)


def _saving(role, rank, saves):
    layout = layout_of(role.model, role.home)
    is_first = not layout.coordinates_of(rank)[1]
    found = _merging(role, rank, saves) if is_first or role.zero_stage == 3 else 0
    if role.is_trained:
        found = max(found, gathered_state([n for _, n in _trained_sizes(role, layout, rank)], _sharing(role)))
    return found


def _has_own_memory(role):
    return not (role.is_trained and BACKENDS[role.backend].has_own_buffers)


def _block(role, rank):
    layout = layout_of(role.model, role.home)
    largest = max(layout.shard_of(rank).n_units_of(spec) * spec.unit_bytes for spec in layout.specs)
    return _masters(role, largest) or largest


def _copies(roles, saves):
    found = {rank: 0 for role in roles.values() for rank in role.home.ranks}
    for role in roles.values():
        layout = layout_of(role.model, role.home)
        own_memory = _has_own_memory(role)
        for rank in role.home.ranks:
            if layout.coordinates_of(rank)[1]:
                continue
            copies_all = saves.is_staged or saves.is_repeated or not own_memory
            sizes = [n for _, n in _trained_sizes(role, layout, rank)]
            if copies_all or (role.is_trained and gathered_state(sizes, _sharing(role))):
                found[rank] += state_copies(role.model, sizes)
            if copies_all:
                found[rank] += _masters(role, layout.num_bytes_of(rank))
            shard = layout.shard_of(rank)
            if role.is_changed and copies_all:
                found[rank] += model_copies(role.model, layout.specs, shard)
            elif role.is_changed:
                found[rank] += made_copies(role.model, layout.specs, shard, zero_stage=role.zero_stage)
    return found


def _save(roles, rank, away, saves):
    moments = []
    for absent, copied in away:
        for name, role in roles.items():
            if rank in role.home.ranks:
                there = absent - {name} if role.is_changed else absent
                block = _block(role, rank) if role.is_changed and name in absent else 0
                moments.append(
                    _resident(roles, rank, there, copied) + Usage(copies=_saving(role, rank, saves), host=block)
                )
    return max(moments, key=lambda usage: (usage.total, usage.host))


def _call(call, roles, rank):
    found = _computed(call, roles[call.role], rank) if call.role in roles else Usage()
    new = messages = moving = 0
    for hook in (*call.hooks.before, *call.hooks.after):
        if isinstance(hook, Realloc):
            more = _moved(hook, roles[hook.source], roles[hook.target], rank)
            new, messages, moving = new + more[0], messages + more[1], max(moving, more[2])
    offloaded = {hook.role for hook in call.hooks.after if isinstance(hook, Offload)} & roles.keys()
    leaving = [_block(roles[r], rank) for r in offloaded if roles[r].is_changed and rank in roles[r].home.ranks]
    host = max(0, max(leaving, default=0) - found.total)
    return found + Usage(copies=new + max(0, messages - found.total, moving - found.total), host=host)


def _moved(hook, role, changed, rank):
    source, target = (layout_of(role.model, one) for one in (hook.source_allocation, hook.target_allocation))
    plan = plan_realloc(source, target, node_of=hook.source_allocation.mesh.cluster.node_of)
    coming, going = plan.transfers_to(rank), plan.transfers_from(rank)
    received, sent = ([t.num_bytes for t in found] for found in (coming, going))
    arriving, n_bytes = min(sum(received), 2 * REALLOC_BUCKET), 0
    ends, size = (
        (hook.source_allocation, hook.target_allocation),
        hook.source_allocation.mesh.cluster.n_devices_per_node,
    )
    is_one_round = sum(plan.bytes_received(one) for one in hook.target_allocation.ranks) <= REALLOC_BUCKET
    is_one_node = len({one // size for end in ends for one in end.ranks}) == 1
    if is_one_round and is_one_node:
        unions = {keep.parameter: [(0, size) for size in keep.shape] for keep in plan.keeps(rank)}
        sent = [t.num_bytes for t in going if _is_packed(t, t.source_slice, source.slices_of(rank) | unions)]
        if hook.is_implied and received:
            arriving = sum(t.num_bytes for t in coming if _is_packed(t, t.target_slice, target.slices_of(rank)))
    messages = arriving + min(sum(sent), 2 * REALLOC_BUCKET)
    moves = hook.is_implied and _has_own_memory(role) and received and plan.keeps(rank)
    moving = max(math.prod(b - a for a, b in where) for where in source.slices_of(rank).values()) if moves else 0
    moving *= DTYPE_BYTES[role.model.dtype]
    if hook.eta != 1.0:
        messages += min(plan.bytes_from_other_nodes(rank), REALLOC_BUCKET)
    if hook.is_implied and rank in target:
        n_bytes += target.num_bytes_of(rank)
        if not (role.is_trained and role.zero_stage == 3):
            may_move = not (role.is_trained and BACKENDS[role.backend].has_own_buffers)
            n_bytes -= sum(keep.num_bytes for keep in plan.keeps(rank) if may_move or keep.is_whole_target)
    if not hook.is_implied and rank in target and (changed.is_trained or changed.is_averaged):
        n_bytes += _followed(target, rank, sum(keep.num_bytes for keep in plan.keeps(rank) if keep.is_whole_target))
    return n_bytes, messages, moving


def _is_packed(transfer, piece, tensors):
    """True of a slice that shares its message, or has gaps in its tensor."""
    others = zip(piece[1:], tensors[transfer.parameter][1:], strict=True)
    return transfer.num_bytes < REALLOC_LARGE or any(b - a < d - c for (a, b), (c, d) in others)


def _followed(layout, rank, held):
    """Bytes of the largest layer, but for what the rank has, and of the largest parameter's copy in float32."""
    shard, layers, copies = layout.shard_of(rank), {}, [0]
    for spec in layout.specs:
        n_bytes = shard.n_units_of(spec) * spec.unit_bytes
        layers[spec.layer] = layers.get(spec.layer, 0) + n_bytes
        if spec.dtype != "float32":
            copies.append(n_bytes * FLOAT32 // DTYPE_BYTES[spec.dtype])
    return min(layout.num_bytes_of(rank) - held, max(layers.values())) + max(copies)


def _computed(call, role, rank):
    load, strategy, kernels = call.load, call.allocation.strategy, Kernels()
    layout = layout_of(role.model, call.allocation)
    width = DTYPE_BYTES[role.model.dtype]
    local = local_shape(role.model, layout.shard_of(rank), sp=strategy.sp, element_bytes=width)
    if call.kind is InterfaceType.GENERATE:
        made = generation_bytes(local, load, kernels=kernels)
        rows = ROW_BYTES * load.n_given + RESPONSE_ROW_BYTES * (load.n_held - load.n_given)
        activations = max(made.activations + rows, ROW_BYTES * load.n_held) + converted_bytes(local)
        return Usage(copies=made.weights, cache=made.cache, activations=activations)
    if call.kind is InterfaceType.INFERENCE:
        return Usage(activations=forward_bytes(local, load, kernels=kernels))
    parts, n_bytes, kept = _state(role, rank)
    taken = training_bytes(
        local,
        load,
        n_in_flight=min(strategy.pp - layout.coordinates_of(rank)[0], load.n_mbs),
        checkpointing=role.checkpoints_activations,
        kernels=kernels,
    )
    gradients, buffers = sum(part.gradients for part in parts), max(part.buffers for part in parts)
    largest = FLOAT32 * max(n for _, n in _trained_sizes(role, layout, rank))
    new = 0 if any(part.holds_gradients for part in parts) else gradients + buffers
    early, first = (min(new, n + buffers) if load.n_mbs == 1 else new for n in (largest, taken.gradients))
    flat = reduction_bytes(gradients, largest, dp=strategy.dp, partial=FLOAT32 * _partial(role, layout, rank))
    without = largest if local.has_embedding and not role.model.tied_embeddings else 0
    moments = (
        Usage(gradients=early, copies=n_bytes - kept, activations=taken.head),
        Usage(gradients=first, copies=n_bytes - kept, activations=taken.block),
        Usage(gradients=max(early, new - without), copies=n_bytes - kept, activations=taken.last),
        Usage(gradients=new, copies=n_bytes - kept, activations=taken.embedding),
        Usage(gradients=new + flat, copies=n_bytes - kept, activations=taken.rows),
        Usage(gradients=new, copies=n_bytes - kept + sum(part.published for part in parts), activations=taken.rows),
    )
    on_host = Usage(host=sum(part.host_gradients for part in parts))
    return max(moments, key=lambda usage: usage.total) + on_host


def _partial(role, layout, rank):
    """Elements of trained parameters whose gradients the ranks of a tensor-parallel group add up."""
    shard, sp = layout.shard_of(rank), role.home.strategy.sp
    found = 0
    for spec in parameter_specs(role.model):
        if not shard.holds(spec) or not is_trained(role.model, spec.name) or shard.tp_size == 1:
            continue
        is_shared = spec.unit == "kv_head" and spec.n_units < shard.tp_size
        is_seen_in_part = sp and spec.sharded_dim is None and spec.name != "head.weight"
        found += spec.n_elements * (is_shared or spec.is_tp_partial or is_seen_in_part)
    return found
