"""Calls and roles that turn responses into `rewards`, from the options `algorithm.reward*`. Imports no torch.

one reward     rew_inf                                  input_ids, prompt_mask, metadata -> rewards
several        rew_inf (the reward model, if used)      input_ids -> model_rewards
               scorer_inf (functions, and the sum)      input_ids, prompt_mask, metadata, model_rewards -> rewards

Functions run in processes beside a role that has a tokenizer and no weights: `reward` itself, or `scorer` where
`reward` is a model.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from realrl.config.reward_options import BUILT_IN_REWARDS, OVERLONG, REWARD_MODEL, RewardOptions, RewardPart
from realrl.config.schema import RunConfig
from realrl.errors import ConfigError, did_you_mean
from realrl.experiment.declaration import Role
from realrl.experiment.loading import check_reward_signature, require_function
from realrl.graph.mfc import InterfaceRef, InterfaceType, MFCDef

REWARD, SCORER = "reward", "scorer"
MODEL_REWARDS = "model_rewards"
SHORT_FORM = "function"

_FUNCTIONS = {
    "math_verify": "realrl.rewards.verify_math:math_verify",
    "reasoning_gym": "realrl.rewards.verify_reasoning:reasoning_gym",
}
_PACKAGES = {"math_verify": ("math_verify", "math-verify"), "reasoning_gym": ("reasoning_gym", "reasoning-gym")}
_OPTIONS = {
    REWARD_MODEL: (),
    OVERLONG: ("max_tokens", "cache_tokens"),
    "math_verify": ("field",),
    "reasoning_gym": ("answer_in", "tag"),
}


def reward_calls(config: RunConfig, *, prefix: str = "") -> list[MFCDef]:
    """Return the calls that give each sequence its `rewards` (float32).

    Args:
        config: its `algorithm` is a `RewardOptions`.
        prefix: prefix of the calls' names, and of all keys but `metadata`: with "greedy_", `greedy_input_ids` becomes
            `greedy_rewards`.

    Raises:
        ConfigError: a reward names a missing module or package, or options that it does not take.
    """
    options: RewardOptions = config.algorithm
    parts = reward_parts(options)
    _check(config, parts)
    if _has_model_only(parts):
        return [_call(config, prefix, "rew_inf", REWARD, InterfaceRef(REWARD_MODEL), ("input_ids",))]
    interface, keys = _interface(config, parts, prefix), ("input_ids", "prompt_mask", "metadata")
    if not _has_model(parts):
        calls = [_call(config, prefix, "rew_inf", REWARD, interface, keys)]
    else:
        model = InterfaceRef(REWARD_MODEL)
        calls = [
            _call(config, prefix, "rew_inf", REWARD, model, ("input_ids",), output=MODEL_REWARDS),
            _call(config, prefix, "scorer_inf", SCORER, interface, (*keys, MODEL_REWARDS)),
        ]
    return [*calls[:-1], replace(calls[-1], may_drop=_may_drop(options, parts))]


def reward_roles(config: RunConfig, *, path_from: str = "actor") -> dict[str, Role]:
    """Return the roles of `reward_calls`.

    Args:
        config: its `algorithm` is a `RewardOptions`.
        path_from: the role whose tokenizer a role without weights takes.
    """
    parts = reward_parts(config.algorithm)
    functions = Role(trainable=False, head="none", path_from=path_from)
    if not _has_model(parts):
        return {REWARD: functions}
    model = Role(trainable=False, head="reward")
    return {REWARD: model} if _has_model_only(parts) else {REWARD: model, SCORER: functions}


def reward_parts(options: RewardOptions) -> dict[str, RewardPart]:
    """Return all rewards by name: `rewards`, `reward_function` as ``function``, or else the model as ``model``."""
    parts = dict(options.rewards)
    if options.reward_function is not None:
        parts = {SHORT_FORM: RewardPart(function=options.reward_function), **parts}
    if all(part.function == OVERLONG for part in parts.values()):
        parts = {"model": RewardPart(function=REWARD_MODEL), **parts}
    return parts


def functions_of(interface: InterfaceRef) -> list[str]:
    """Return the names of the functions that an interface of `reward_calls` runs; none for other interfaces."""
    if interface.name not in ("function_reward", "weighted_rewards"):
        return []
    parts = interface.args.get("parts", {SHORT_FORM: interface.args})
    named = [part.get("function", "") for part in parts.values()]
    return [function for function in named if function not in (REWARD_MODEL, OVERLONG)]


def _has_model(parts: Mapping[str, RewardPart]) -> bool:
    return any(part.function == REWARD_MODEL for part in parts.values())


def _has_model_only(parts: Mapping[str, RewardPart]) -> bool:
    return [(part.function, part.weight) for part in parts.values()] == [(REWARD_MODEL, 1.0)]


def _may_drop(options: RewardOptions, parts: Mapping[str, RewardPart]) -> bool:
    functions = [part for part in parts.values() if part.function not in (REWARD_MODEL, OVERLONG)]
    return any((part.on_failure or options.reward_on_failure) == "drop" for part in functions)


def _call(
    config: RunConfig,
    prefix: str,
    name: str,
    role: str,
    interface: InterfaceRef,
    keys: tuple[str, ...],
    *,
    output: str = "rewards",
) -> MFCDef:
    own = {prefix + key: key for key in keys if key != "metadata" and prefix}
    return MFCDef(
        prefix + name,
        role,
        InterfaceType.INFERENCE,
        interface,
        tuple(key if key == "metadata" else prefix + key for key in keys),
        (prefix + output,),
        input_key_remap=own,
        output_key_remap={"rewards": prefix + output} if prefix + output != "rewards" else {},
        n_seqs=config.n_seqs,
    )


def _interface(config: RunConfig, parts: Mapping[str, RewardPart], prefix: str) -> InterfaceRef:
    """Return the interface that runs the functions, under launcher=inline in the same process for debuggers."""
    options: RewardOptions = config.algorithm
    shared = {
        "concurrency": options.reward_concurrency,
        "async_concurrency": options.reward_async_concurrency,
        "in_process": config.launcher == "inline",
    }
    settings = {name: _settings(part, options) for name, part in parts.items()}
    if tuple(parts) == (SHORT_FORM,) and not options.rewards:
        [only] = settings.values()
        own = {key: only[key] for key in ("function", "reads", "timeout_s", "on_failure")}
        return InterfaceRef("function_reward", {**own, **shared})
    return InterfaceRef("weighted_rewards", {"parts": settings, **shared, "metrics": f"{prefix}reward"})


def _settings(part: RewardPart, options: RewardOptions) -> dict[str, Any]:
    return {
        "function": _FUNCTIONS.get(part.function, part.function),
        "weight": part.weight,
        "reads": part.reads or ("text" if part.function in _FUNCTIONS else options.reward_reads),
        "timeout_s": part.timeout_s or options.reward_timeout_s,
        "on_failure": part.on_failure or options.reward_on_failure,
        "options": dict(part.options),
    }


# ---------------------------------------------------------------- checks


def _check(config: RunConfig, parts: Mapping[str, RewardPart]) -> None:
    options: RewardOptions = config.algorithm
    if options.reward_function is not None and SHORT_FORM in options.rewards:
        raise ConfigError(
            f"algorithm.rewards.{SHORT_FORM} has the name of what algorithm.reward_function gives",
            remedy="Give it another name, or set algorithm.reward_function=null.",
        )
    models = [name for name, part in parts.items() if part.function == REWARD_MODEL]
    if len(models) > 1:
        raise ConfigError(
            f"algorithm.rewards.{models[1]} is the reward model a second time, after {models[0]!r}",
            remedy="There is one role 'reward': keep one of the two.",
        )
    for name, part in parts.items():
        is_short = name == SHORT_FORM and name not in options.rewards
        key = "algorithm.reward_function" if is_short else f"algorithm.rewards.{name}.function"
        if part.function not in BUILT_IN_REWARDS:
            signature = require_function(part.function, key)
            try:
                if signature is not None and not part.options:
                    check_reward_signature(signature, part.function)
            except TypeError as error:
                raise ConfigError(f"{key}: {error}") from None
            continue
        _check_built_in(name, part, key)
        if part.function == OVERLONG:
            _check_overlong(name, part, config.generation.max_new_tokens)


def _check_built_in(name: str, part: RewardPart, key: str) -> None:
    takes = _OPTIONS[part.function]
    for option in part.options:
        if option not in takes:
            raise ConfigError(
                f"algorithm.rewards.{name}.options.{option}: {part.function} has no such option."
                + did_you_mean(option, takes),
                remedy=f"Its options: {', '.join(takes) or 'none'}.",
            )
    ignored = [setting for setting in ("reads", "timeout_s", "on_failure") if getattr(part, setting) is not None]
    if ignored and part.function not in _FUNCTIONS:
        raise ConfigError(
            f"algorithm.rewards.{name}.{ignored[0]} has no effect: {part.function} is not a function",
            remedy="Leave it out.",
        )
    module, package = _PACKAGES.get(part.function, ("", ""))
    if module and importlib.util.find_spec(module) is None:
        raise ConfigError(
            f"{key}={part.function} needs the package {package}, which is not installed",
            remedy="pip install 'realrl[rewards]'",
        )


def _check_overlong(name: str, part: RewardPart, max_new_tokens: int) -> None:
    max_tokens = part.options.get("max_tokens", max_new_tokens)
    cache_tokens = part.options.get("cache_tokens", 1)
    for option, value, limit in (
        ("max_tokens", max_tokens, max_new_tokens),
        ("cache_tokens", cache_tokens, max_tokens),
    ):
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= limit:
            source = "generation.max_new_tokens" if option == "max_tokens" else "max_tokens"
            raise ConfigError(
                f"algorithm.rewards.{name}.options.{option}={value}: must be a whole number from 1 to {limit}, "
                f"which is {source}"
            )
