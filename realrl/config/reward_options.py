"""Options of rewards, for every algorithm that learns from them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator

from realrl.config.schema import Section, key, rare
from realrl.errors import did_you_mean

REWARD_MODEL = "reward_model"
OVERLONG = "overlong"
BUILT_IN_REWARDS = (REWARD_MODEL, "math_verify", "reasoning_gym", OVERLONG)

Reads = Literal["auto", "text", "ids"]
OnFailure = Literal["error", "zero", "drop"]


def check_function_name(value: str) -> str:
    """Return `value` if it may name a reward: a built-in one, ``module:function`` or ``file.py:function``.

    Raises:
        ValueError: it has none of these forms.
    """
    separator = ":" if ":" in value else "."
    if value not in BUILT_IN_REWARDS and not all(value.rpartition(separator)):
        hint = did_you_mean(value, BUILT_IN_REWARDS) or f" Built in are {', '.join(BUILT_IN_REWARDS)}."
        raise ValueError(f"{value!r} is not 'module:function' or 'file.py:function'.{hint}")
    return value


class RewardPart(Section):
    """One of several rewards that add up. A null key takes the value of the algorithm's ``reward_*`` key."""

    function: Annotated[str, AfterValidator(check_function_name)] = Field(
        description="'module:function', 'file.py:function', reward_model, math_verify, reasoning_gym or overlong"
    )
    weight: float = key(1.0, "factor in the sum; 0 only logs it")
    reads: Reads | None = key(None, "as algorithm.reward_reads")
    timeout_s: float | None = key(None, "as algorithm.reward_timeout_s", gt=0)
    on_failure: OnFailure | None = key(None, "as algorithm.reward_on_failure")
    options: dict[str, Any] = key({}, "keyword arguments of the function")


class RewardOptions(Section):
    """The reward model, or functions that take its place or are added to it.

    Parts with function ``overlong`` only correct a reward: where no other part is named, the reward model gives it.
    """

    reward_function: str | None = key(
        None, "'module:function', 'file.py:function' or a built-in one; takes the place of the reward model"
    )
    rewards: dict[str, RewardPart] = key(
        {},
        "weighted rewards by name, added to that of reward_function: "
        "rewards.<name>.{function,weight,...} or rewards.<name>=function",
    )
    reward_reads: Reads = rare(
        "auto", "what the function gets; auto: token ids if its parameters are named *_ids, else text"
    )
    reward_timeout_s: float = key(10.0, "time limit of the reward function for one response", gt=0)
    reward_concurrency: int = rare(2, "reward processes per data-parallel rank", ge=1)
    reward_async_concurrency: int = rare(
        32, "responses that an async function works on at a time in each reward process", ge=1
    )
    reward_on_failure: OnFailure = key(
        "error",
        "a response whose reward fails or takes too long ends the run, is scored 0, or its sample is "
        "dropped and replaced",
    )

    @field_validator("reward_function")
    @classmethod
    def _reward_function_names_one(cls, value: str | None) -> str | None:
        return None if value is None else check_function_name(value)

    @field_validator("rewards", mode="before")
    @classmethod
    def _read_short_form(cls, value: object) -> object:
        """``{name: "module:function"}`` is short for ``{name: {function: "module:function"}}``."""
        if not isinstance(value, Mapping):
            return value
        for name in value:
            if not re.fullmatch(r"[A-Za-z]\w*", str(name)):
                raise ValueError(f"{name!r} cannot name a reward: use letters, digits and _")
        return {name: {"function": part} if isinstance(part, str) else part for name, part in value.items()}
