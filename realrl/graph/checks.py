"""Checks of single calls, and of the names and counts of a list of calls.

Each function raises `GraphError` with a sentence that names the call and the value, and a remedy with the nearest
value that would be accepted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from realrl.errors import GraphError, did_you_mean
from realrl.graph.mfc import (
    N_SEQS_OF_THE_RUN,
    InterfaceType,
    MFCDef,
    ModelName,
    OffloadHook,
    ParamReallocHook,
    protocol_names,
)

_NAME = re.compile(r"\w[\w.#:-]{0,99}")
_ARTICLE = {
    InterfaceType.GENERATE: "a generate",
    InterfaceType.INFERENCE: "an inference",
    InterfaceType.TRAIN_STEP: "a train_step",
}


def check_calls(mfcs: Sequence[MFCDef]) -> None:
    """Check a list of calls, before any edge is inferred.

    Raises:
        GraphError: the list is empty; a name is empty or given twice; a count, key, remap, hook or protocol of one call
            is invalid, or it may not drop samples; two calls train one role, or hooks contradict each other; an
            `n_seqs` does not divide the largest one.
    """
    if not mfcs:
        raise GraphError("the list of calls is empty", remedy="An algorithm needs at least one MFCDef.")
    _check_names(mfcs)
    for mfc in mfcs:
        _check_counts(mfc)
        _check_keys(mfc)
        _check_hooks(mfc)
        _check_protocol(mfc)
        _check_train(mfc)
        _check_dropping(mfc)
    _check_one_train_step_per_role(mfcs)
    _check_reallocs(mfcs)
    _check_n_seqs_divide(mfcs)


def check_types(mfc: MFCDef) -> None:
    """Check the types of a call's names and keys, on which all else relies.

    Raises:
        GraphError: names the field.
    """
    fields = {
        "name": (mfc.name, isinstance(mfc.name, str)),
        "model_name": (mfc.model_name, isinstance(mfc.role, str)),
        "interface_impl": (mfc.interface_impl, isinstance(mfc.interface.name, str)),
        "input_keys": (mfc.input_keys, _are_names(mfc.input_keys)),
        "output_keys": (mfc.output_keys, _are_names(mfc.output_keys)),
        "input_key_remap": (mfc.input_key_remap, isinstance(mfc.input_key_remap, Mapping)),
        "output_key_remap": (mfc.output_key_remap, isinstance(mfc.output_key_remap, Mapping)),
    }
    for field, (value, is_right) in fields.items():
        if not is_right:
            raise GraphError(f"call {mfc.name!r} has {field}={value!r}, which is of another type than MFCDef says")


def _are_names(keys: object) -> bool:
    return isinstance(keys, (str, tuple, list)) and all(isinstance(key, str) for key in keys)


def nearest_divisor(value: int, of: int) -> int:
    """Return the divisor of `of` that is closest to `value`; the larger of two equally close ones."""
    return min((d for d in range(1, of + 1) if of % d == 0), key=lambda d: (abs(d - value), -d))


def _check_names(mfcs: Sequence[MFCDef]) -> None:
    seen: set[str] = set()
    for position, mfc in enumerate(mfcs):
        if _NAME.fullmatch(mfc.name) is None:
            raise GraphError(
                f"call number {position + 1} has the name {mfc.name!r}",
                remedy="Give it a short name of letters, digits, '_', '-' and '.'.",
            )
        if mfc.name in seen:
            raise GraphError(
                f"two calls have the name '{mfc.name}'",
                remedy="Rename one of them: names must be unique.",
                call=mfc.name,
            )
        seen.add(mfc.name)
        if not mfc.role or mfc.model.replica_id < 0:
            raise GraphError(
                f"call '{mfc.name}' runs on role {mfc.role!r}, replica {mfc.model.replica_id}",
                remedy="A role needs a name, and replicas are numbered from 0.",
                call=mfc.name,
            )
        if not isinstance(mfc.interface_type, InterfaceType):
            raise GraphError(
                f"call '{mfc.name}' has interface_type={mfc.interface_type!r}",
                remedy="Use InterfaceType.GENERATE, InterfaceType.INFERENCE or InterfaceType.TRAIN_STEP.",
                call=mfc.name,
            )


def _check_counts(mfc: MFCDef) -> None:
    if mfc.n_seqs == N_SEQS_OF_THE_RUN:
        raise GraphError(
            f"call '{mfc.name}' has no n_seqs",
            remedy="Only the calls of a run have a default: write MFCDef(..., n_seqs=SAMPLES).",
            call=mfc.name,
        )
    counts: Mapping[str, tuple[int | None, int]] = {
        "n_seqs": (mfc.n_seqs, 1),
        "min_n_seqs": (mfc.min_n_seqs, 1),
        "n_mbs": (mfc.n_mbs, 1),
        "max_tokens_per_mb": (mfc.max_tokens_per_mb, 1),
        "n_minibatches": (mfc.n_minibatches, 1),
        "n_passes": (mfc.n_passes, 1),
        "max_staleness": (mfc.max_staleness, 0),
    }
    for field, (value, least) in counts.items():
        if value is None and field in ("min_n_seqs", "n_mbs", "max_tokens_per_mb"):
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise GraphError(
                f"call '{mfc.name}' has {field}={value!r}",
                remedy=f"{field} is a whole number, at least {least}.",
                call=mfc.name,
            )
    if mfc.min_n_seqs is not None and mfc.min_n_seqs > mfc.n_seqs:
        raise GraphError(
            f"call '{mfc.name}' has min_n_seqs={mfc.min_n_seqs}, more than its n_seqs={mfc.n_seqs}",
            remedy=f"Use min_n_seqs={mfc.n_seqs} or less, or leave it out.",
            call=mfc.name,
        )


def _check_train(mfc: MFCDef) -> None:
    """Check counts that only a train_step, or only another call, may set."""
    if not mfc.is_train:
        if mfc.n_minibatches != 1:
            raise GraphError(
                f"call '{mfc.name}' is {_ARTICLE[mfc.interface_type]} and has n_minibatches={mfc.n_minibatches}",
                remedy="Only a train_step has minibatches; use n_mbs to split the work of other calls.",
                call=mfc.name,
            )
        if mfc.n_passes != 1:
            raise GraphError(
                f"call '{mfc.name}' is {_ARTICLE[mfc.interface_type]} and has n_passes={mfc.n_passes}",
                remedy="Only a train_step passes over its batch several times; leave n_passes out.",
                call=mfc.name,
            )
        if mfc.virtual_stages is not None:
            raise GraphError(
                f"call '{mfc.name}' is {_ARTICLE[mfc.interface_type]} and has virtual_stages={mfc.virtual_stages}",
                remedy="Give them to the train_step of its role; other calls follow.",
                call=mfc.name,
            )
        return
    if mfc.virtual_stages is not None and mfc.virtual_stages < 1:
        raise GraphError(
            f"call '{mfc.name}' has virtual_stages={mfc.virtual_stages}",
            remedy="Use virtual_stages=1 or more.",
            call=mfc.name,
        )
    if mfc.model.replica_id != 0:
        raise GraphError(
            f"call '{mfc.name}' trains replica '{mfc.model}'",
            remedy=f"Replica 0 is where a role is trained: use model_name='{mfc.role}'.",
            call=mfc.name,
        )
    if mfc.min_n_seqs is not None:
        raise GraphError(
            f"call '{mfc.name}' is a train_step and has min_n_seqs={mfc.min_n_seqs}",
            remedy="A train_step needs its whole batch; leave min_n_seqs out.",
            call=mfc.name,
        )
    if mfc.max_staleness != 0:
        raise GraphError(
            f"call '{mfc.name}' is a train_step and has max_staleness={mfc.max_staleness}",
            remedy="Give max_staleness to the calls that read the role.",
            call=mfc.name,
        )
    if mfc.n_minibatches > mfc.n_seqs:
        raise GraphError(
            f"call '{mfc.name}' has n_minibatches={mfc.n_minibatches}, more than its n_seqs={mfc.n_seqs}",
            remedy=f"Use n_minibatches={mfc.n_seqs} or less.",
            call=mfc.name,
        )


def _check_dropping(mfc: MFCDef) -> None:
    if not mfc.may_drop:
        return
    if mfc.interface_type is not InterfaceType.INFERENCE:
        raise GraphError(
            f"call '{mfc.name}' is {_ARTICLE[mfc.interface_type]} and has may_drop=True",
            remedy="Only an inference call can drop samples: put one behind it.",
            call=mfc.name,
        )
    if not mfc.output_keys:
        raise GraphError(
            f"call '{mfc.name}' has may_drop=True, but no output_keys: nothing would tell which samples it keeps",
            remedy="Let it return a key for the samples that stay, such as a copy of what it decides by.",
            call=mfc.name,
        )


def _check_keys(mfc: MFCDef) -> None:
    for field, keys in (("input_keys", mfc.input_keys), ("output_keys", mfc.output_keys)):
        if isinstance(keys, str):
            raise GraphError(
                f"{field} of call '{mfc.name}' is the string {keys!r}",
                remedy=f"Write a tuple: {field}=({keys!r},).",
                call=mfc.name,
            )
        twice = sorted({key for key in keys if list(keys).count(key) > 1})
        if twice:
            raise GraphError(
                f"{field} of call '{mfc.name}' has '{twice[0]}' twice", remedy="Name it once.", call=mfc.name
            )
    _check_remap(mfc, "input_key_remap", tuple(mfc.input_key_remap), mfc.input_keys)
    _check_remap(mfc, "output_key_remap", tuple(mfc.output_key_remap.values()), mfc.output_keys)


def _check_remap(mfc: MFCDef, field: str, named: Sequence[str], keys: Sequence[str]) -> None:
    """Check the graph keys that a remap names, and that it does not fold two keys into one."""
    side = field.split("_", 1)[0]
    for key in named:
        if key not in keys:
            known = ", ".join(keys) or "none"
            raise GraphError(
                f"{field} of call '{mfc.name}' names '{key}', which is not one of its {side} keys ({known})",
                remedy=f"Add '{key}' to {side}_keys, or correct the name.{did_you_mean(key, keys)}",
                call=mfc.name,
            )
    remap = mfc.input_key_remap if side == "input" else mfc.output_key_remap
    values = [remap.get(key, key) for key in keys] if side == "input" else list(remap.values())
    folded = sorted({value for value in values if values.count(value) > 1})
    if folded:
        raise GraphError(
            f"{field} of call '{mfc.name}' maps two keys to '{folded[0]}'", remedy="Map each to its own.", call=mfc.name
        )


def _check_hooks(mfc: MFCDef) -> None:
    _check_hook_types(mfc)
    if any(isinstance(hook, OffloadHook) for hook in mfc.pre_hooks):
        raise GraphError(
            f"call '{mfc.name}' has an OffloadHook before it, but needs its parameters to run",
            remedy="Move the hook to post_hooks.",
            call=mfc.name,
        )
    offloads = [i for i, hook in enumerate(mfc.post_hooks) if isinstance(hook, OffloadHook)]
    if len(offloads) > 1:
        raise GraphError(f"call '{mfc.name}' has two OffloadHooks", remedy="Keep one.", call=mfc.name)
    if offloads and offloads[0] != len(mfc.post_hooks) - 1:
        raise GraphError(
            f"call '{mfc.name}' offloads role '{mfc.role}' and then moves its parameters",
            remedy="Put the OffloadHook last in post_hooks.",
            call=mfc.name,
        )
    for hook in (*mfc.pre_hooks, *mfc.post_hooks):
        if isinstance(hook, ParamReallocHook) and mfc.role in _ends(hook) and hook.eta != 1.0:
            raise GraphError(
                f"call '{mfc.name}' averages role '{mfc.role}' into itself (eta={hook.eta:g}): its replicas hold the "
                "same parameters",
                remedy="Give the average a role of its own, or leave the hook out: replicas follow by themselves.",
                call=mfc.name,
            )


def _check_hook_types(mfc: MFCDef) -> None:
    kinds = (OffloadHook, ParamReallocHook)
    for field, hooks in (("pre_hooks", mfc.pre_hooks), ("post_hooks", mfc.post_hooks)):
        if not isinstance(hooks, (tuple, list)) or not all(isinstance(hook, kinds) for hook in hooks):
            raise GraphError(
                f"call '{mfc.name}' has {field}={hooks!r}",
                remedy=f"Write a tuple of hooks: {field}=(OffloadHook(),).",
                call=mfc.name,
            )
        for hook in hooks:
            for end in (hook.source, hook.target) if isinstance(hook, ParamReallocHook) else ():
                if end is not None and not isinstance(end, ModelName):
                    raise GraphError(
                        f"a hook of call '{mfc.name}' names the role {end!r} without a ModelName",
                        remedy=f"Write ModelName({end!r}).",
                        call=mfc.name,
                    )


def _check_reallocs(mfcs: Sequence[MFCDef]) -> None:
    """Check the roles that hooks name besides their call's own."""
    roles = tuple(dict.fromkeys(mfc.role for mfc in mfcs))
    trainer = {mfc.role: mfc.name for mfc in mfcs if mfc.is_train}
    writer: dict[str, str] = {}
    for mfc in mfcs:
        for hook in (*mfc.pre_hooks, *mfc.post_hooks):
            for role in _ends(hook) if isinstance(hook, ParamReallocHook) else ():
                if role not in roles:
                    raise GraphError(
                        f"a hook of call '{mfc.name}' names role '{role}', which no call runs on",
                        remedy=f"Roles: {', '.join(roles)}.{did_you_mean(role, roles)}",
                        call=mfc.name,
                    )
        if mfc.reallocs and mfc.min_n_seqs is not None:
            raise GraphError(
                f"call '{mfc.name}' streams (min_n_seqs={mfc.min_n_seqs}) and has a hook that moves parameters between "
                "roles; how often it runs would depend on timing",
                remedy="Leave min_n_seqs out, or move the hook to another call.",
                call=mfc.name,
            )
        for _, target in mfc.reallocs:
            if trainer.get(target, mfc.name) != mfc.name:
                raise GraphError(
                    f"a hook of call '{mfc.name}' writes into role '{target}', which call '{trainer[target]}' trains",
                    remedy=f"Only a frozen role can be its target, or give the hook to '{trainer[target]}' itself.",
                    call=mfc.name,
                )
            if target in writer:
                other = "the same call" if writer[target] == mfc.name else f"call '{writer[target]}'"
                raise GraphError(
                    f"a hook of call '{mfc.name}' writes into role '{target}', and so does a hook of {other}",
                    remedy="A role can be the target of one hook.",
                    call=mfc.name,
                )
            writer[target] = mfc.name


def _ends(hook: ParamReallocHook) -> tuple[str, ...]:
    return tuple(end.role for end in (hook.source, hook.target) if end is not None)


def _check_protocol(mfc: MFCDef) -> None:
    names = protocol_names()
    if mfc.protocol not in names:
        raise GraphError(
            f"call '{mfc.name}' has protocol={mfc.protocol!r}, which is not registered",
            remedy=f"Protocols: {', '.join(names)}.{did_you_mean(str(mfc.protocol), names)}",
            call=mfc.name,
        )


def _check_one_train_step_per_role(mfcs: Sequence[MFCDef]) -> None:
    trainer: dict[str, str] = {}
    for mfc in mfcs:
        if not mfc.is_train:
            continue
        if mfc.role in trainer:
            raise GraphError(
                f"calls '{trainer[mfc.role]}' and '{mfc.name}' both train role '{mfc.role}'",
                remedy="Put both losses into one interface: a role has at most one train_step.",
                call=mfc.name,
            )
        trainer[mfc.role] = mfc.name


def _check_n_seqs_divide(mfcs: Sequence[MFCDef]) -> None:
    largest = max(mfcs, key=lambda mfc: mfc.n_seqs)
    for mfc in mfcs:
        if largest.n_seqs % mfc.n_seqs:
            nearest = nearest_divisor(mfc.n_seqs, largest.n_seqs)
            raise GraphError(
                f"n_seqs={mfc.n_seqs} of call '{mfc.name}' does not divide n_seqs={largest.n_seqs} of call "
                f"'{largest.name}', the largest of the graph",
                remedy=f"The nearest value that does is {nearest}.",
                call=mfc.name,
            )
