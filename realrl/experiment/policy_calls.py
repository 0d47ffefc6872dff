"""Options of policy-gradient algorithms that change the calls of an experiment's file. Imports no torch.

Each option is a function that takes the calls and returns them, changed if the user has set it. A second policy's keys
have a prefix: with "opponent_", `input_ids` is `opponent_input_ids` in the graph, and its interface sees `input_ids`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from realrl.config.choices import yaml_layers
from realrl.config.policy_options import MovingReferenceOptions, PolicyOptions, SafeRLHFOptions
from realrl.config.reward_options import REWARD_MODEL
from realrl.config.schema import RunConfig
from realrl.errors import ConfigError
from realrl.experiment.declaration import Role
from realrl.experiment.discovery import config_dir, load_experiment
from realrl.experiment.pieces import check_options_are_read, chosen_pieces, find_piece, piece_keys, training_keys
from realrl.experiment.rewards import REWARD, SCORER, reward_calls, reward_roles
from realrl.graph.mfc import InterfaceRef, InterfaceType, MFCDef, ModelName, ParamReallocHook

GENERATE, INFERENCE, TRAIN_STEP = InterfaceType.GENERATE, InterfaceType.INFERENCE, InterfaceType.TRAIN_STEP
TOKENS = ("input_ids", "prompt_mask")
FILTER = "filter"  # the call of `algorithm.filter`, and its role, which has no weights
_ALWAYS = (*TOKENS, "old_logprobs", "behavior_logprobs", "truncated")  # training reads these with any pieces
OF_THE_ROW = ("prompt_ids", "metadata")  # keys that all policies share

Calls = list[MFCDef]


def prefixed(prefix: str, call: MFCDef) -> MFCDef:
    """Return the call on other keys: all but those of the dataset's row begin with `prefix` in the graph."""
    if not prefix:
        return call
    inputs = {key: key if key in OF_THE_ROW else prefix + key for key in call.input_keys}
    seen = {inputs[key]: call.input_key_remap.get(key, key) for key in call.input_keys}
    return replace(
        call,
        input_keys=tuple(inputs.values()),
        output_keys=tuple(prefix + key for key in call.output_keys),
        input_key_remap={key: own for key, own in seen.items() if key != own},
        output_key_remap={call.own_name(key): prefix + key for key in call.output_keys},
    )


def reading(call: MFCDef, keys: Mapping[str, str]) -> MFCDef:
    """Return the call with further input keys: key of the graph -> name under which its interface sees it."""
    renamed = {key: own for key, own in keys.items() if key != own}
    return replace(call, input_keys=(*call.input_keys, *keys), input_key_remap={**call.input_key_remap, **renamed})


# ---------------------------------------------------------------- options


def run_ahead(config: RunConfig, calls: Calls) -> Calls:
    """Apply `max_staleness`, `algorithm.importance_cap` and `algorithm.recompute_logprobs`.

    A policy whose `old_logprobs` are computed again gets a call ``<role>_inf``, which does so under the version that
    trains. Off-policy, log-probabilities of generation become `behavior_logprobs`, and training reads both.

    Raises:
        ConfigError: `algorithm.recompute_logprobs` is false, and a policy needs log-probabilities computed again.
    """
    added = []
    for call in [call for call in calls if call.interface_type is GENERATE]:
        lag = config.staleness_of(call.name, f"{call.role}_gen")
        calls = [replace(each, max_staleness=lag) if lag and each is call else each for each in calls]
        old = next((key for key in call.output_keys if key.endswith("old_logprobs")), None)
        if old is None:
            continue
        _check_recomputing(config, call.role)
        if not recomputes(config, call.role):
            continue
        prefix = old.removesuffix("old_logprobs")
        change = _with_behavior if is_off_policy(config, call.role) else _without_old
        calls = [change(each, call.role, prefix) for each in calls]
        recompute = MFCDef(
            f"{call.role}_inf", call.role, INFERENCE, call.interface, TOKENS, ("old_logprobs",),
            output_key_remap={"logprobs": "old_logprobs"}, n_seqs=config.n_seqs,
        )  # fmt: skip
        added.append(prefixed(prefix, recompute))
    if not added:
        return calls
    last = max(i for i, call in enumerate(calls) if call.interface_type is GENERATE)
    return [*calls[: last + 1], *added, *calls[last + 1 :]]


def reward_functions(config: RunConfig, calls: Calls) -> Calls:
    """Apply `algorithm.reward_function` and `algorithm.rewards`: functions beside the reward model, or in its place.

    ``rew_inf`` runs the function then; where several rewards are added up, ``scorer_inf`` follows it. A call with an
    interface of its own stays as it is.

    Raises:
        ConfigError: no call of the reward model is there that a function could take the place of.
    """
    changed: Calls = []
    for call in calls:
        if call.role == REWARD and call.interface.name == REWARD_MODEL:
            changed += reward_calls(config, prefix=call.output_keys[0].removesuffix("rewards"))
        else:
            changed.append(call)
    given = "reward_function" if config.algorithm.reward_function is not None else "rewards"
    if getattr(config.algorithm, given) and not any(call.interface.name == REWARD_MODEL for call in calls):
        raise ConfigError(
            f"algorithm.{given} has no effect: experiment {config.experiment} gives rewards by an interface of its own",
            remedy="Leave it out, or set it to null ({} for rewards) where a preset has set it.",
        )
    return changed


def cost_functions(config: RunConfig, calls: Calls) -> Calls:
    """Apply `algorithm.cost_function`: a Python function in the place of the cost model; positive means harm."""
    options: SafeRLHFOptions = config.algorithm
    if options.cost_function is None:
        return calls
    as_reward = options.model_copy(update={"reward_function": options.cost_function, "rewards": {}})
    [function] = reward_calls(config.model_copy(update={"algorithm": as_reward}))
    return [
        replace(function, name=call.name, model_name="cost", output_keys=call.output_keys,
                output_key_remap=call.output_key_remap) if call.role == "cost" else call
        for call in calls
    ]  # fmt: skip


def wanted_rewards(config: RunConfig, calls: Calls) -> Calls:
    """Add the calls of `algorithm.reward_function` and `algorithm.rewards` to an experiment that needs no reward.

    Raises:
        ConfigError: a response whose reward function fails would be dropped.
    """
    rewards = reward_calls(config) if config.algorithm.has_rewards else []
    if any(call.may_drop for call in rewards):
        raise ConfigError(
            "a response whose reward function fails cannot be dropped: every prompt of the file is answered",
            remedy="Set on_failure (algorithm.reward_on_failure, or that of the part) to zero or error.",
        )
    return [*calls, *rewards]


def sample_filter(config: RunConfig, calls: Calls) -> Calls:
    """Apply `algorithm.filter`: add ``filter``, which drops samples; training reads the others' `kept_rewards`."""
    options: PolicyOptions = config.algorithm
    if options.filter is None:
        return calls
    keys = tuple(dict.fromkeys(("rewards", *find_piece("filter", options.filter).keys(options))))
    added = MFCDef(
        FILTER, FILTER, INFERENCE, InterfaceRef("filter", {"name": options.filter}), keys, ("kept_rewards",),
        output_key_remap={"rewards": "kept_rewards"}, n_seqs=config.n_seqs, may_drop=True,
    )  # fmt: skip
    last = max(i for i, call in enumerate(calls) if call.role in (REWARD, SCORER, "cost"))
    training = [_renamed(call, "rewards", "kept_rewards") if call.is_train else call for call in calls[last + 1 :]]
    return [*calls[: last + 1], added, *training]


def own_reference(config: RunConfig, calls: Calls) -> Calls:
    """Apply `models.<policy>.lora.rank`: a policy that trains adapters is its own reference, without them."""
    policies = {_prefix_of(call): call.role for call in calls if call.is_train and call.role in _policies(calls)}
    changed = []
    for call in calls:
        policy = policies.get(_prefix_of(call)) if call.role == "ref" else None
        if policy is not None and has_adapter(config, policy):
            interface = InterfaceRef(call.interface.name, {**call.interface.args, "adapter": False})
            lag = config.staleness_of(call.name, f"{policy}_gen")
            call = replace(call, model_name=policy, interface_impl=interface, max_staleness=lag)
        changed.append(call)
    return changed


def chosen_keys(config: RunConfig, calls: Calls) -> Calls:
    """Apply `algorithm.advantage`, `policy_loss`, `kl_coef`, ...: training reads the keys that they need.

    Other keys of pieces leave the inputs of training; keys that no piece knows stay. A reference is left out if no call
    reads its log-probabilities.

    Raises:
        ConfigError: a piece compares with another player and there is none, a critic's values are not read, or no
            call makes the passes of `algorithm.ppo_epochs`.
    """
    options: PolicyOptions = config.algorithm
    _check_pieces_fit(config, calls)
    policies = _policies(calls)
    changed = [_reading(call, options, call.role in policies) if call.is_train else call for call in calls]
    read = {key for call in changed for key in call.input_keys}
    unread = {call.name for call in changed if call.output_keys and not read.intersection(call.output_keys)}
    return [call for call in changed if call.name not in unread or not call.output_keys[0].endswith("ref_logprobs")]


def teacher_keys(config: RunConfig, calls: Calls) -> Calls:
    """Give ``teacher_inf`` the outputs that training reads; for `policy_loss=teacher_kl` its likeliest tokens.

    Raises:
        ConfigError: neither advantage nor loss reads the teacher's outputs.
    """
    keys = [key for key in training_keys(config.algorithm) if key.startswith("teacher_")]
    if not keys:
        raise ConfigError(
            f"experiment {config.experiment} has a teacher, and neither algorithm.advantage nor algorithm.policy_loss "
            "reads what it says",
            remedy="Choose algorithm.advantage=reverse_kl or algorithm.policy_loss=teacher_kl.",
        )
    top_k = {"top_k": config.algorithm.teacher_top_k} if "teacher_top_tokens" in keys else {}
    given = {"output_keys": tuple(keys), "output_key_remap": {key.removeprefix("teacher_"): key for key in keys}}
    interface = InterfaceRef("ppo_actor", top_k)
    return [replace(c, interface_impl=interface, **given) if c.name == "teacher_inf" else c for c in calls]


def moving_reference(config: RunConfig, calls: Calls) -> Calls:
    """Apply `algorithm.ref_ema_eta`: after ``actor_train``, ref = eta * actor + (1 - eta) * ref.

    Raises:
        ConfigError: nothing reads the reference, or the actor trains adapters and is its own reference.
    """
    options: MovingReferenceOptions = config.algorithm
    if "ref_logprobs" not in training_keys(options):
        raise ConfigError(
            f"experiment {config.experiment} moves the reference, and nothing reads it",
            remedy="Set algorithm.kl_coef or algorithm.kl_loss_coef above 0.",
        )
    if has_adapter(config, "actor"):
        raise ConfigError(
            "models.actor.lora.rank above 0 makes the actor without its adapter the reference, which cannot follow it",
            remedy=f"Set models.actor.lora.rank=0, or take an experiment other than {config.experiment}.",
        )
    hook = ParamReallocHook(target=ModelName("ref"), eta=options.ref_ema_eta)
    return [replace(call, post_hooks=(hook,)) if call.name == "actor_train" else call for call in calls]


# ---------------------------------------------------------------- roles, and checks before anything starts


def policy_roles(
    config: RunConfig, *, policies: Sequence[str] = ("actor",), rewards: bool = True
) -> dict[str, Role | None]:
    """Return the roles of a run that differ from the experiment's; None for those that the run does without.

    Args:
        config: its `algorithm` is a `PolicyOptions`.
        policies: roles that are trained against the reference.
        rewards: True if the graph has `reward_calls`.
    """
    changes: dict[str, Role | None] = {}
    if rewards:
        needed = reward_roles(config)
        is_function = needed[REWARD].head == "none"
        changes = {SCORER: needed.get(SCORER), **({REWARD: needed[REWARD]} if is_function else {})}
    if "ref_logprobs" not in training_keys(config.algorithm) or all(has_adapter(config, role) for role in policies):
        changes["ref"] = None
    if config.algorithm.filter is None:
        changes[FILTER] = None
    return changes


def cost_roles(config: RunConfig) -> dict[str, Role | None]:
    """Return `policy_roles`, and the role `cost` without weights where a function takes the place of its model."""
    function = Role(trainable=False, head="none", path_from="actor")
    costs: dict[str, Role | None] = {} if config.algorithm.cost_function is None else {"cost": function}
    return {**policy_roles(config), **costs}


def wanted_reward_roles(config: RunConfig) -> dict[str, Role | None]:
    """Return the roles of `wanted_rewards`; None for those that the run does without."""
    needed = reward_roles(config) if config.algorithm.has_rewards else {}
    return {REWARD: None, SCORER: None, **needed}


def has_adapter(config: RunConfig, role: str) -> bool:
    """Return True if a role trains only low-rank adapters, so that without them it is its own reference."""
    section = config.models.get(role)
    return section is not None and section.lora.rank > 0


def is_off_policy(config: RunConfig, role: str = "actor") -> bool:
    """Return True if old log-probabilities are computed again before training, and weigh the tokens by their change."""
    return config.staleness_of(f"{role}_gen") > 0 or config.algorithm.importance_cap is not None


def recomputes(config: RunConfig, role: str = "actor") -> bool:
    """Return True if old log-probabilities are computed again before training.

    Kernels of generation and training agree to rounding in float32 on the CPU. In half precision their difference would
    pass for a change of the policy, and on CUDA they differ in float32 too.
    """
    wanted = config.algorithm.recompute_logprobs
    differs = config.precision in ("bf16", "fp16") or config.cluster.device == "cuda"
    return is_off_policy(config, role) or (differs if wanted is None else wanted)


def _check_recomputing(config: RunConfig, role: str) -> None:
    """Refuse to take log-probabilities of generation for a policy that is trained off-policy."""
    if config.algorithm.recompute_logprobs is not False or not is_off_policy(config, role):
        return
    reason, call = "algorithm.importance_cap", f"{role}_gen"
    if config.staleness_of(call):
        own = config.calls.get(call)
        reason = "max_staleness" if own is None or own.max_staleness is None else f"calls.{call}.max_staleness"
    raise ConfigError(
        f"algorithm.recompute_logprobs=false, but {reason} weighs tokens by old log-probabilities computed again",
        remedy=f"Leave one of them out: {reason} or algorithm.recompute_logprobs.",
    )


def check_policy(config: RunConfig, defaults: Mapping[str, Any]) -> None:
    """Refuse values that are possible one by one but not together.

    Args:
        config: its `algorithm` is a `PolicyOptions`.
        defaults: defaults of the experiment.

    Raises:
        ConfigError: an unknown piece, an option that no chosen piece reads, fewer samples than minibatches, greedy
            sampling, or one response per prompt where responses are compared.
    """
    options: PolicyOptions = config.algorithm
    own_defaults = type(options).model_validate(defaults.get("algorithm", {}))
    try:
        check_options_are_read(options, own_defaults, lambda option: _setting_preset(config, option))
    except ConfigError as error:
        if "critic" in config.models and "values" not in training_keys(options):
            raise _unread_values(config) from error  # whose options are then unread, too
        raise
    if options.n_minibatches > config.n_seqs:
        raise ConfigError(
            f"algorithm.n_minibatches={options.n_minibatches} is more than n_seqs={config.n_seqs}: "
            "a minibatch would have no sample",
            remedy="Lower algorithm.n_minibatches or raise n_seqs.",
        )
    if config.generation.temperature == 0.0 or options.sampler == "greedy":
        key = "algorithm.sampler=greedy" if options.sampler == "greedy" else "generation.temperature=0"
        raise ConfigError(
            f"{key} samples greedily, and a policy cannot learn from responses that never vary",
            remedy="Set generation.temperature above 0, and algorithm.sampler=sample.",
        )
    comparing = next((piece for piece in chosen_pieces(options) if piece.needs_group), None)
    if comparing is not None and config.generation.n_responses == 1:
        raise ConfigError(
            f"generation.n_responses=1 gives algorithm.{comparing.kind}={comparing.name} nothing to compare: it needs "
            "several responses to each prompt",
            remedy="Set generation.n_responses to 2 or more.",
        )


# ---------------------------------------------------------------- helpers


def _unread_values(config: RunConfig) -> ConfigError:
    return ConfigError(
        f"algorithm.advantage={config.algorithm.advantage} reads no values, and experiment {config.experiment} has a "
        "critic",
        remedy="Choose gae, or mix it in; or take an experiment without critic, such as grpo.",
    )


def _setting_preset(config: RunConfig, option: str) -> str:
    """Return ``preset=NAME`` if the run's preset gives an option of the algorithm the value that it has."""
    if not config.preset:
        return ""
    layers = yaml_layers({"preset": config.preset}, load_experiment(config.experiment), config_dir())
    given = [values["algorithm"].get(option) for values, _ in layers if isinstance(values.get("algorithm"), Mapping)]
    return f"preset={config.preset}" if getattr(config.algorithm, option) in given[-1:] else ""


def _prefix_of(call: MFCDef) -> str:
    return next((key.removesuffix("input_ids") for key in call.input_keys if key.endswith("input_ids")), "")


def _renamed(call: MFCDef, key: str, new: str) -> MFCDef:
    """Return the call with input `new` in the place of `key`; its interface sees the same name."""
    if key not in call.input_keys:
        return call
    remap = {**call.input_key_remap, new: call.input_key_remap.get(key, key)}
    remap.pop(key, None)
    return replace(call, input_keys=tuple(new if k == key else k for k in call.input_keys), input_key_remap=remap)


def _with_behavior(call: MFCDef, policy: str, prefix: str) -> MFCDef:
    """Return a call with `behavior_logprobs`, if it generates by or trains a policy whose generation lags behind."""
    old, behavior = f"{prefix}old_logprobs", f"{prefix}behavior_logprobs"
    if call.interface_type is GENERATE and old in call.output_keys:
        outputs = tuple(behavior if key == old else key for key in call.output_keys)
        given = {own: key for own, key in call.output_key_remap.items() if key != old}
        return replace(
            call, output_keys=outputs, output_key_remap={**given, "behavior_logprobs": behavior} if prefix else given
        )
    if call.is_train and call.role == policy and old in call.input_keys:
        remap = {**call.input_key_remap, behavior: "behavior_logprobs"} if prefix else call.input_key_remap
        return replace(call, input_keys=(*call.input_keys, behavior), input_key_remap=remap)
    return call


def _without_old(call: MFCDef, policy: str, prefix: str) -> MFCDef:
    """Return a call without output `old_logprobs`, if it generates by a policy whose own are computed again."""
    old = f"{prefix}old_logprobs"
    if call.interface_type is not GENERATE or old not in call.output_keys:
        return call
    given = {own: key for own, key in call.output_key_remap.items() if key != old}
    return replace(call, output_keys=tuple(key for key in call.output_keys if key != old), output_key_remap=given)


def _policies(calls: Calls) -> set[str]:
    """Return the roles that generate; where none does, those that are trained."""
    generating = {call.role for call in calls if call.interface_type is GENERATE}
    return generating or {call.role for call in calls if call.is_train}


def _reading(call: MFCDef, options: PolicyOptions, is_policy: bool) -> MFCDef:
    """Return a train_step with the keys of the chosen pieces; a critic reads the reference only for a KL penalty."""
    seen = {call.input_key_remap.get(key, key): key for key in call.input_keys}
    if not is_policy:
        wanted = [own for own in seen if own != "ref_logprobs" or options.kl_coef]
    else:
        behavior = ("behavior_logprobs",) if "behavior_logprobs" in seen else ()
        own = [key for key in seen if key not in piece_keys() and key not in _ALWAYS]
        wanted = [*TOKENS, "old_logprobs", "truncated", *behavior, *training_keys(options), *own]
    prefix = _prefix_of(call)
    keys = {own: seen.get(own, own if own in OF_THE_ROW else prefix + own) for own in dict.fromkeys(wanted)}
    remap = {key: own for own, key in keys.items() if key != own}
    return replace(call, input_keys=tuple(keys.values()), input_key_remap=remap)


def _check_pieces_fit(config: RunConfig, calls: Calls) -> None:
    options: PolicyOptions = config.algorithm
    passes = [call.n_passes for call in calls if call.is_train]
    if options.ppo_epochs > 1 and passes and max(passes) == 1:
        raise ConfigError(
            f"algorithm.ppo_epochs={options.ppo_epochs}, and every train_step of experiment {config.experiment} makes "
            "one pass over its batch",
            remedy="Leave it out, or give the calls n_passes=config.algorithm.ppo_epochs.",
        )
    has_critic = any(call.is_train and call.role not in _policies(calls) for call in calls)
    if has_critic and "values" not in training_keys(options):
        raise _unread_values(config)
    versus = next((piece for piece in chosen_pieces(options) if "other_rewards" in piece.keys(options)), None)
    if versus is not None and not any("other_rewards" in call.input_key_remap.values() for call in calls):
        raise ConfigError(
            f"algorithm.{versus.kind}={versus.name} compares with another player's rewards, and experiment "
            f"{config.experiment} has no other player",
            remedy=f"Choose another {versus.kind}, or an experiment of two players, such as self_play.",
        )
