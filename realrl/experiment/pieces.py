"""Named pieces of policy-gradient algorithms, which a configuration chooses and combines. Imports no torch.

| kind | purpose | signature |
|---|---|---|
| sampler | generates responses | ``(model, prompts, ctx) -> GenerationResult`` |
| reward | the worth of one response | see `realrl.rewards.interface` |
| advantage | the gain of each action over its expectation | ``(rollout: Rollout) -> tensor [T - S]`` |
| policy_loss | the loss of each action | ``(actions: ActionBatch, options) -> PolicyLoss`` |
| filter | selects samples for training | ``(batch: SequenceSample, options) -> bool per sample`` |

A piece declares the keys of the batch and the options that it reads. The calls of the graph follow from the keys, so
that no call computes unread keys. An option that the user set and no chosen piece reads is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_args

from realrl.definitions import definition_of
from realrl.errors import ConfigError, did_you_mean
from realrl.experiment.loading import check_parameters, import_failed, load_object, place_of_user_function, staying

PieceKind = Literal["sampler", "reward", "advantage", "policy_loss", "filter"]
Function = TypeVar("Function", bound=Callable[..., Any])

SHAPING = ("reward_scaling", "reward_bias", "reward_clip", "score_truncated")
KL_PENALTY = ("kl_coef", "kl_controller", "kl_target", "kl_horizon")
_KL_READS = {"kl_coef": ("ref_logprobs",)}
_CLIP = ("clip_ratio", "clip_ratio_high")
_PARAMETERS = {
    "sampler": ("model", "prompts", "ctx"),
    "advantage": ("rollout",),
    "policy_loss": ("actions", "options"),
    "filter": ("batch", "options"),
}


@dataclass(frozen=True)
class Piece:
    """One named piece.

    Attributes:
        name: its name in a configuration.
        function: the function, or its address ``"package.module:function"``.
        reads: keys of the batch that it needs, besides tokens, masks and old log-probabilities.
        reads_if: option -> keys that it needs too, if the option is not zero, empty or null.
        options: names of the options under ``algorithm.`` that it reads.
        needs_group: True if it compares the responses of a prompt, so that there must be several.
    """

    kind: PieceKind
    name: str
    function: Callable[..., Any] | str
    reads: tuple[str, ...] = ()
    reads_if: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    needs_group: bool = False

    @property
    def is_built_in(self) -> bool:
        """True unless a user wrote it."""
        return isinstance(self.function, str)

    def load(self) -> Callable[..., Any]:
        """Return the function, imported if necessary.

        Raises:
            ConfigError: it cannot be imported.
        """
        return load_object(self.function) if isinstance(self.function, str) else self.function  # type: ignore[no-any-return]

    def called(self, name: str) -> str:
        """Return the configuration key that names it, with the line where a user's file defines it."""
        place = place_of_user_function(self.function)
        if ".py:" in name:  # which names the file
            place = place and f"line {place.rpartition(':')[2]}"
        return f"algorithm.{self.kind}={name}" + (f" ({place})" if place else "")

    def keys(self, options: Any) -> tuple[str, ...]:
        """Return the keys that it needs under these options.

        Raises:
            ConfigError: it reads an option that `options` lack.
        """
        lacking = next((name for name in (*self.options, *self.reads_if) if not hasattr(options, name)), None)
        if lacking is not None:
            raise ConfigError(
                f"{self.called(self.name)} reads the option algorithm.{lacking}, which this experiment lacks",
                remedy=f"Choose another {self.kind}, or an experiment with that option.",
            )
        extra = [key for option, keys in self.reads_if.items() if getattr(options, option) for key in keys]
        return tuple(dict.fromkeys((*self.reads, *extra)))


def _advantage(name: str, reads: tuple[str, ...], options: tuple[str, ...] = (), **more: Any) -> Piece:
    return Piece("advantage", name, f"realrl.algo.policy.advantages:{name}", reads, options=options, **more)


def _policy_loss(name: str, options: tuple[str, ...] = (), reads: tuple[str, ...] = ()) -> Piece:
    return Piece("policy_loss", name, f"realrl.algo.policy.policy_losses:{name}", reads, options=options)


BUILT_IN = (
    Piece("sampler", "sample", "realrl.algo.policy.samplers:sample"),
    Piece("sampler", "greedy", "realrl.algo.policy.samplers:greedy"),
    _advantage("gae", ("rewards", "values"), ("gamma", "gae_lambda", *KL_PENALTY, *SHAPING), reads_if=_KL_READS),
    _advantage("grpo", ("rewards",), SHAPING, needs_group=True),
    _advantage("dr_grpo", ("rewards",), SHAPING, needs_group=True),
    _advantage("rloo", ("rewards",), (*KL_PENALTY, *SHAPING), reads_if=_KL_READS, needs_group=True),
    _advantage(
        "remax",
        ("rewards", "greedy_rewards", "greedy_truncated"),
        ("gamma", *KL_PENALTY, *SHAPING),
        reads_if=_KL_READS,
    ),
    _advantage("reinforce_pp", ("rewards",), ("gamma", *KL_PENALTY, *SHAPING), reads_if=_KL_READS),
    _advantage("reverse_kl", ("teacher_logprobs",)),
    _advantage("versus", ("rewards", "other_rewards")),
    _advantage(
        "lagrangian",
        ("rewards", "costs", "values", "cost_values"),
        ("gamma", "gae_lambda", "cost_limit", "lambda_init", "lambda_lr", "lambda_max", *KL_PENALTY, *SHAPING),
        reads_if=_KL_READS,
    ),
    _policy_loss("clip", _CLIP),
    _policy_loss("sequence_clip", _CLIP),
    _policy_loss("response_clip", _CLIP),
    _policy_loss("cispo", ("clip_ratio_high",)),
    _policy_loss("reinforce"),
    _policy_loss("teacher_kl", ("teacher_top_k",), ("teacher_top_tokens", "teacher_top_logprobs")),
    Piece("filter", "equal_rewards", "realrl.algo.policy.filters:equal_rewards", ("rewards",), needs_group=True),
)

_registered: dict[tuple[str, str], Piece] = {(piece.kind, piece.name): piece for piece in BUILT_IN}


def register_piece(
    kind: PieceKind,
    name: str,
    *,
    reads: tuple[str, ...] = (),
    reads_if: Mapping[str, tuple[str, ...]] | None = None,
    options: tuple[str, ...] = (),
    needs_group: bool = False,
) -> Callable[[Function], Function]:
    """Function decorator: make a piece known, so that ``algorithm.<kind>=<name>`` chooses it.

    Args:
        kind: sampler, reward, advantage, policy_loss or filter.
        name, reads, reads_if, options, needs_group: see `Piece`.

    Raises:
        ConfigError: there is no such kind, or the name is taken by another function.

    Examples:
        >>> @register_piece("advantage", "reward_itself", reads=("rewards",))
        ... def reward_itself(rollout):
        ...     '''Every action is worth what its response earned.'''
        ...     return rollout.per_transition(rollout.scores)
    """
    if kind not in get_args(PieceKind):
        raise ConfigError(f"there is no kind of piece {kind!r}", remedy=f"Kinds: {', '.join(get_args(PieceKind))}.")

    def register(function: Function) -> Function:
        other = _registered.get((kind, name))
        if other is not None:
            known = other.function if isinstance(other.function, str) else definition_of(other.function)
            if known != definition_of(function):
                raise ConfigError(f"the {kind} {name!r} is taken by {known}", remedy="Choose another name.")
        _registered[kind, name] = Piece(kind, name, function, reads, reads_if or {}, options, needs_group)
        return function

    return register


def piece_names(kind: PieceKind) -> tuple[str, ...]:
    """Return every name of a kind, sorted."""
    return tuple(sorted(name for other, name in _registered if other == kind))


def find_piece(kind: PieceKind, name: str) -> Piece:
    """Return the piece that a configuration names: a registered one, or ``"module:function"``.

    A registered function keeps its declaration; any other one reads no key of its own and no option.

    Raises:
        ConfigError: there is no such piece, or it takes other parameters than its kind gets; names the configuration
            key.
    """
    piece = _found(kind, name)
    if not piece.is_built_in and kind in _PARAMETERS:
        check_parameters(piece.function, _PARAMETERS[kind], f"algorithm.{kind}={name}")
    return piece


def _found(kind: PieceKind, name: str) -> Piece:
    if (kind, name) in _registered:
        return _registered[kind, name]
    if ":" not in name:
        names = piece_names(kind)
        raise ConfigError(
            f"algorithm.{kind}={name}: there is no {kind} {name!r}.{did_you_mean(name, names)}",
            remedy=f"Choose from {', '.join(names)}, or write 'module:function' or 'file.py:function'.",
        )
    try:
        with staying():
            function = load_object(name)
    except ConfigError as error:
        raise ConfigError(f"algorithm.{kind}={name}: {error.message}") from error
    except (Exception, SystemExit) as error:
        raise import_failed(f"algorithm.{kind}={name}", error) from error
    if not callable(function):
        raise ConfigError(f"algorithm.{kind}={name} is a {type(function).__name__}, not a function")
    declared = (p for p in _registered.values() if p.kind == kind and p.function is function)
    return next(declared, Piece(kind, name, function))


def sampler_of(options: Any) -> str:
    """Return the name of the sampler of `ppo_actor`; "sample" under options that have none."""
    name: str = getattr(options, "sampler", "sample")
    return name


def advantage_weights(options: Any) -> dict[str, float]:
    """Return advantage -> weight, from ``algorithm.advantage``: one name, or a mapping of names to weights."""
    chosen: str | Mapping[str, float] = options.advantage
    return {chosen: 1.0} if isinstance(chosen, str) else dict(chosen)


def chosen_pieces(options: Any) -> tuple[Piece, ...]:
    """Return the pieces that the options name.

    Raises:
        ConfigError: a piece does not exist.
    """
    pieces = [find_piece("sampler", options.sampler)]
    pieces += [find_piece("advantage", name) for name in advantage_weights(options)]
    pieces.append(find_piece("policy_loss", options.policy_loss))
    if options.filter is not None:
        pieces.append(find_piece("filter", options.filter))
    return tuple(pieces)


def keys_of(pieces: Iterable[Piece], options: Any) -> tuple[str, ...]:
    """Return the keys that some pieces need under these options, each once."""
    return tuple(dict.fromkeys(key for piece in pieces for key in piece.keys(options)))


def piece_keys() -> frozenset[str]:
    """Every key that some known piece or an option of the loss reads."""
    read = {key for piece in _registered.values() for key in (*piece.reads, *sum(piece.reads_if.values(), ()))}
    return frozenset(read | {"ref_logprobs", "metadata"})


def training_keys(options: Any) -> tuple[str, ...]:
    """Return the keys that training needs besides tokens, masks and old log-probabilities."""
    keys = keys_of((piece for piece in chosen_pieces(options) if piece.kind in ("advantage", "policy_loss")), options)
    reference = ("ref_logprobs",) if options.kl_loss_coef else ()
    answers = ("metadata",) if options.ptx_coef else ()
    return tuple(dict.fromkeys((*keys, *reference, *answers)))


def critic_keys(options: Any) -> tuple[str, ...]:
    """Return all keys that a critic trains on."""
    keys = ("input_ids", "prompt_mask", "old_logprobs", "rewards", "values", "truncated")
    return (*keys, "ref_logprobs") if options.kl_coef else keys


def check_options_are_read(options: Any, defaults: Any, set_by: Callable[[str], str] = lambda option: "") -> None:
    """Refuse an option that differs from its default, and that belongs to pieces which were not chosen.

    Args:
        options: options of the run.
        defaults: the experiment's defaults of the same options.
        set_by: option -> what set it, such as "preset=tiny"; empty where the user did.

    Raises:
        ConfigError: names the option, what set it, and the pieces that read it.
    """
    pieces = chosen_pieces(options)
    read = {name for piece in pieces for name in piece.options}
    for option in type(options).model_fields:
        value = getattr(options, option)
        readers = [f"{piece.kind}={piece.name}" for piece in _registered.values() if option in piece.options]
        if option in read or not readers or value == getattr(defaults, option):
            continue
        chosen = ", ".join(f"{piece.kind}={piece.name}" for piece in pieces)
        origin, default = set_by(option), getattr(defaults, option)
        source, without = (f" (from {origin})", f"Add algorithm.{option}={default}") if origin else ("", "Leave it out")
        raise ConfigError(
            f"algorithm.{option}={value}{source} has no effect: none of {chosen} reads it",
            remedy=f"{without}, or choose a piece that reads it: {', '.join(readers)}.",
        )
