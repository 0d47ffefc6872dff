"""Single calls that the graphs of policy-gradient algorithms are made of, and what is checked first. Imports no torch.

Keys follow from the chosen pieces: a call exists only where somebody reads what it produces. With a `prefix`, a second
policy's keys stand beside the first one's: with "opponent_", `input_ids` is `opponent_input_ids` in the graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from realrl.config.policy_options import MovingReferenceOptions, PolicyOptions, PPOOptions, SafeRLHFOptions
from realrl.config.schema import RunConfig
from realrl.errors import ConfigError
from realrl.experiment.declaration import Role
from realrl.experiment.pieces import check_options_are_read, chosen_pieces, critic_keys, find_piece, training_keys
from realrl.experiment.rewards import reward_calls, reward_roles
from realrl.graph.mfc import Hook, InterfaceRef, InterfaceType, MFCDef, ModelName, ParamReallocHook

GENERATE, INFERENCE, TRAIN_STEP = InterfaceType.GENERATE, InterfaceType.INFERENCE, InterfaceType.TRAIN_STEP
TOKENS = ("input_ids", "prompt_mask")
KEPT_REWARDS = "kept_rewards"

ACTOR = Role(trainable=True)
CRITIC = Role(trainable=True, head="value", path_from="actor")
REFERENCE = Role(trainable=False, path_from="actor")
REWARD_ROLES = {
    "reward": Role(trainable=False, head="reward"),
    "scorer": Role(trainable=False, head="none", path_from="actor"),
}


# ---------------------------------------------------------------- before anything starts


def check_policy(config: RunConfig, defaults: Mapping[str, Any] | None = None) -> None:
    """Refuse values that are possible one by one but not together.

    Args:
        config: of the run; its `algorithm` is a `PolicyOptions`.
        defaults: of the experiment.

    Raises:
        ConfigError: an unknown piece, an option that no chosen piece reads, fewer samples than minibatches, greedy
            sampling, or one response per prompt where responses are compared.
    """
    options: PolicyOptions = config.algorithm
    check_options_are_read(options, type(options).model_validate((defaults or {}).get("algorithm", {})))
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


def policy_roles(
    config: RunConfig, *, policies: Sequence[str] = ("actor",), rewards: bool = True
) -> dict[str, Role | None]:
    """How the roles of a run differ from those that its experiment declares: None for those it does without.

    Args:
        config: of the run; its `algorithm` is a `PolicyOptions`.
        policies: roles that are trained against the reference.
        rewards: whether the graph has `reward_calls`.
    """
    changes: dict[str, Role | None] = {}
    if rewards:
        changes = {**dict.fromkeys(REWARD_ROLES), **reward_roles(config)}
    if "ref_logprobs" not in training_keys(config.algorithm) or all(has_adapter(config, role) for role in policies):
        changes["ref"] = None
    return changes


def cost_roles(config: RunConfig) -> dict[str, Role | None]:
    """`policy_roles`, and the role `cost` without weights where a function takes the place of its model."""
    function = Role(trainable=False, head="none", path_from="actor")
    costs: dict[str, Role | None] = {} if config.algorithm.cost_function is None else {"cost": function}
    return {**policy_roles(config), **costs}


def has_adapter(config: RunConfig, role: str) -> bool:
    """Whether a role trains low-rank adapters only, so that without them it is its own reference."""
    section = config.models.get(role)
    return section is not None and section.lora.rank > 0


def is_off_policy(config: RunConfig, role: str = "actor") -> bool:
    """Whether old log-probabilities are computed again before training, and tokens weighed by how they changed."""
    return config.staleness_of(f"{role}_gen") > 0 or config.algorithm.importance_cap is not None


# ---------------------------------------------------------------- calls that do not train


def generate_call(config: RunConfig, role: str = "actor", *, prefix: str = "") -> MFCDef:
    """`prompt_ids` -> tokens, the log-probabilities that the step needs, and which responses were cut off."""
    logprobs = "behavior_logprobs" if is_off_policy(config, role) else "old_logprobs"
    return MFCDef(
        f"{role}_gen",
        role,
        GENERATE,
        _policy(prefix),
        ("prompt_ids",),
        **_outputs((*TOKENS, logprobs, "truncated"), prefix),
        n_seqs=config.n_seqs,
        max_staleness=config.staleness_of(f"{role}_gen"),
    )


def greedy_call(config: RunConfig) -> MFCDef:
    """`prompt_ids` -> `greedy_input_ids`, `greedy_prompt_mask`, `greedy_truncated` of the likeliest response."""
    call = generate_call(config)
    return replace(
        call,
        name="actor_gen_greedy",
        max_staleness=config.staleness_of("actor_gen_greedy", "actor_gen"),
        interface_impl=InterfaceRef("ppo_actor", {"greedy": True}),
        **_outputs((*TOKENS, "truncated"), "greedy_"),
    )


def recompute_calls(config: RunConfig, role: str = "actor", *, prefix: str = "") -> list[MFCDef]:
    """Where generation may lag behind: `old_logprobs` under the version that trains."""
    if not is_off_policy(config, role):
        return []
    return [_logprobs_call(config, f"{role}_inf", role, _policy(prefix), f"{prefix}old_logprobs", prefix)]


def reference_calls(config: RunConfig, policy: str = "actor", *, prefix: str = "") -> list[MFCDef]:
    """`reference_call`, if some piece or the loss reads `ref_logprobs`."""
    needed = "ref_logprobs" in training_keys(config.algorithm)
    return [reference_call(config, policy, prefix=prefix)] if needed else []


def reference_call(config: RunConfig, policy: str = "actor", *, prefix: str = "") -> MFCDef:
    """Tokens -> `ref_logprobs`, by the role `ref`, or by the policy itself without its adapter where it has one.

    Args:
        config: of any run whose roles may include `ref`.
        policy: the role that the reference belongs to.
        prefix: of the keys.
    """
    name, output = f"{prefix}ref_inf", f"{prefix}ref_logprobs"
    if not has_adapter(config, policy):
        return _logprobs_call(config, name, "ref", InterfaceRef("ppo_actor"), output, prefix)
    call = _logprobs_call(config, name, policy, InterfaceRef("ppo_actor", {"adapter": False}), output, prefix)
    return replace(call, max_staleness=config.staleness_of(name, f"{policy}_gen"))


def teacher_call(config: RunConfig) -> MFCDef:
    """Tokens -> `teacher_logprobs` by the role `teacher`, and its likeliest tokens where the loss reads them.

    Raises:
        ConfigError: neither advantage nor loss reads it.
    """
    keys = [key for key in training_keys(config.algorithm) if key.startswith("teacher_")]
    if not keys:
        raise ConfigError(
            f"experiment {config.experiment} has a teacher, and neither algorithm.advantage nor algorithm.policy_loss "
            "reads what it says",
            remedy="Choose algorithm.advantage=reverse_kl or algorithm.policy_loss=teacher_kl.",
        )
    top_k = {"top_k": config.algorithm.teacher_top_k} if "teacher_top_tokens" in keys else {}
    call = _logprobs_call(config, "teacher_inf", "teacher", InterfaceRef("ppo_actor", top_k), "teacher_logprobs", "")
    remap = {key.removeprefix("teacher_"): key for key in keys}
    return replace(call, output_keys=tuple(keys), output_key_remap=remap)


def critic_call(config: RunConfig, role: str = "critic", *, prefix: str = "", **critic: Any) -> MFCDef:
    """`input_ids` -> `values`; `critic` holds arguments of the interface.

    Raises:
        ConfigError: no advantage reads values.
    """
    options: PPOOptions = config.algorithm
    if "values" not in training_keys(options):
        raise ConfigError(
            f"algorithm.advantage={options.advantage} reads no values, and experiment {config.experiment} has a critic",
            remedy="Choose gae, or mix it in; or take an experiment without critic, such as grpo.",
        )
    interface = InterfaceRef("ppo_critic", critic)
    outputs = _outputs(("values",), prefix)
    return MFCDef(f"{role}_inf", role, INFERENCE, interface, ("input_ids",), **outputs, n_seqs=config.n_seqs)


def cost_calls(config: RunConfig) -> list[MFCDef]:
    """Tokens -> `costs`, by the model `cost`, or by `algorithm.cost_function`; positive means harm."""
    options: SafeRLHFOptions = config.algorithm
    as_reward = options.model_copy(update={"reward_function": options.cost_function, "rewards": {}})
    [call] = reward_calls(config.model_copy(update={"algorithm": as_reward}))
    costs: dict[str, Any] = {"output_keys": ("costs",), "output_key_remap": {"rewards": "costs"}}
    return [replace(call, name="cost_inf", model_name="cost", **costs)]


def filter_calls(config: RunConfig) -> list[MFCDef]:
    """Where `algorithm.filter` is set: `rewards` -> `kept_rewards` of the samples that it keeps."""
    options: PolicyOptions = config.algorithm
    if options.filter is None:
        return []
    keys = tuple(dict.fromkeys(("rewards", *find_piece("filter", options.filter).keys(options))))
    return [
        MFCDef(
            "filter",
            "actor",
            INFERENCE,
            InterfaceRef("filter", {"name": options.filter}),
            keys,
            (KEPT_REWARDS,),
            output_key_remap={"rewards": KEPT_REWARDS},
            n_seqs=config.n_seqs,
            max_staleness=config.staleness_of("filter", "actor_gen"),
            may_drop=True,
        )
    ]


# ---------------------------------------------------------------- calls that train


def train_call(
    config: RunConfig,
    role: str = "actor",
    *,
    prefix: str = "",
    other_prefix: str = "",
    post_hooks: tuple[Hook, ...] = (),
) -> MFCDef:
    """The policy's train_step, with the keys that the chosen pieces read.

    Args:
        config: of the run.
        role: that learns.
        prefix: of its keys.
        other_prefix: of the other player's keys, whose `rewards` the policy sees as `other_rewards`.
        post_hooks: of the call.

    Raises:
        ConfigError: a piece compares with another player, and there is none.
    """
    options: PolicyOptions = config.algorithm
    versus = next((p for p in chosen_pieces(options) if "other_rewards" in p.keys(options)), None)
    if versus is not None and prefix == other_prefix:
        raise ConfigError(
            f"algorithm.{versus.kind}={versus.name} compares with another player's rewards, and experiment "
            f"{config.experiment} has no other player",
            remedy=f"Choose another {versus.kind}, or an experiment of two players, such as self_play.",
        )
    behavior = ("behavior_logprobs",) if is_off_policy(config, role) else ()
    own = dict.fromkeys((*TOKENS, "old_logprobs", "truncated", *behavior, *training_keys(options)))
    names = {key: key if key == "metadata" else prefix + key for key in own}
    names |= {key: _rewards(options, prefix) for key in own if key == "rewards"}
    names |= {key: _rewards(options, other_prefix) for key in own if key == "other_rewards"}
    return _train_call(config, role, _policy(prefix), names, post_hooks)


def follow_hook(config: RunConfig) -> ParamReallocHook:
    """After training, ref = eta * actor + (1 - eta) * ref with eta = `algorithm.ref_ema_eta`.

    Raises:
        ConfigError: there is no such role in this run.
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
    return ParamReallocHook(target=ModelName("ref"), eta=options.ref_ema_eta)


def critic_train_call(
    config: RunConfig, role: str = "critic", *, prefix: str = "", rewards: str = "rewards", **critic: Any
) -> MFCDef:
    """A critic's train_step.

    Args:
        config: of the run.
        role: that learns.
        prefix: of its values' key.
        rewards: key of what it predicts.
        critic: arguments of the interface, as in `critic_call`.
    """
    options: PPOOptions = config.algorithm
    names = {key: key for key in critic_keys(options)}
    names |= {"values": f"{prefix}values", "rewards": _rewards(options, "") if rewards == "rewards" else rewards}
    return _train_call(config, role, InterfaceRef("ppo_critic", critic), names, ())


# ---------------------------------------------------------------- parts


def _policy(prefix: str) -> InterfaceRef:
    return InterfaceRef("ppo_actor", {"prefix": prefix} if prefix else {})


def _rewards(options: PolicyOptions, prefix: str) -> str:
    return KEPT_REWARDS if options.filter is not None and not prefix else f"{prefix}rewards"


def _outputs(keys: tuple[str, ...], prefix: str) -> dict[str, Any]:
    """`output_keys` and `output_key_remap` of keys that the graph knows with a prefix."""
    remap = {key: prefix + key for key in keys} if prefix else {}
    return {"output_keys": tuple(prefix + key for key in keys), "output_key_remap": remap}


def _logprobs_call(
    config: RunConfig, name: str, role: str, interface: InterfaceRef, output: str, prefix: str
) -> MFCDef:
    return MFCDef(
        name,
        role,
        INFERENCE,
        interface,
        tuple(prefix + key for key in TOKENS),
        (output,),
        input_key_remap={prefix + key: key for key in TOKENS} if prefix else {},
        output_key_remap={"logprobs": output},
        n_seqs=config.n_seqs,
    )


def _train_call(
    config: RunConfig, role: str, interface: InterfaceRef, names: Mapping[str, str], post_hooks: tuple[Hook, ...]
) -> MFCDef:
    """`names`: key as the interface sees it -> key of the graph."""
    return MFCDef(
        f"{role}_train",
        role,
        TRAIN_STEP,
        interface,
        tuple(names.values()),
        input_key_remap={graph: own for own, graph in names.items() if graph != own},
        n_seqs=config.n_seqs,
        n_minibatches=config.algorithm.n_minibatches,
        log_return_value=True,
        post_hooks=post_hooks,
    )
