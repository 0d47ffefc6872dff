"""Calls of one reward function: its traits, and checks of its answer.

``function(prompt, response)`` returns a number. Further parameters say what else it gets: one called ``row`` or
``metadata``, the other fields of the dataset's row; one called ``messages``, the conversation: the messages of the
prompt, then the response as ``{"role": "assistant", "content": ...}``, with what was put in between as a tool's.

A function whose second parameter is called ``responses`` or ``responses_ids`` gets all responses to a prompt, and their
conversations, and returns a list of as many numbers. Either kind may be ``async``. Imports no torch.
"""

from __future__ import annotations

import functools
import inspect
import math
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from realrl.config.secrets import without_secrets
from realrl.experiment.loading import (
    check_reward_signature,
    line_that_raised,
    load_object,
    place_of_user_function,
)

MAX_ERROR_CHARS = 2000
SLICE_S = 0.2  # of a time limit
MAX_REWARD = 3.4028234663852886e38  # the largest float32, the dtype of rewards
NO_NUMBER, NO_NUMBERS = "no number", "no list of numbers"  # what a function of one response, of a group returned
_GROUP_NAMES = ("responses", "responses_ids")
_ROW_NAMES = ("row", "metadata")
_MESSAGES = "messages"


@dataclass(frozen=True)
class Traits:
    """Kinds of a function's arguments and result.

    Attributes:
        reads: token ids or text.
        takes_row: True if it gets the other fields of the dataset's row.
        takes_messages: True if it gets the conversation.
        is_group: True if it scores all responses to a prompt at once.
        is_async: True if it returns an awaitable.
    """

    reads: Literal["ids", "text"]
    takes_row: bool
    is_group: bool
    is_async: bool
    takes_messages: bool = False


class RewardFunction:
    """A loaded function.

    Args:
        function: its name, in the form of `load_object`.
        reads: "ids", "text", or "auto": ids if its first two parameters are named ``*_ids``.
        options: keyword arguments.

    Raises:
        ConfigError: there is no such function.
        TypeError: the object is no function, or cannot be called with a prompt and a response.
    """

    def __init__(self, function: str, reads: str = "auto", options: Mapping[str, Any] | None = None) -> None:
        self._function = load_object(function)
        self._place = place_of_user_function(self._function)
        if not callable(self._function):
            raise TypeError(f"{function!r} is not a function")
        self._options = options or {}
        if options:
            self._function = functools.partial(self._function, **options)
        self.traits = _traits(self._function, function, reads)
        self._extras = _extras(self._function)

    def evaluate(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return ``{"rewards": [...]}`` for the request's response or responses, or ``{"error": text}``.

        An error has ``"fault"`` too where the function returned something of a wrong type (``NO_NUMBER``,
        ``NO_NUMBERS``).
        """
        try:
            return self._checked(self._call(request), request)
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - user code may raise anything
            return self._raised(error)

    async def evaluate_async(self, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Like `evaluate`, for async functions; returns ``{"timeout": True}`` if the time is over.

        The time is counted in slices, so that a pause of the whole process costs no more than one.
        """
        import asyncio

        async def answer() -> dict[str, Any]:
            try:
                return self._checked(await self._call(request), request)
            except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - as above
                return self._raised(error)

        task = asyncio.ensure_future(answer())
        while timeout_s > 0 and not task.done():
            await asyncio.wait({task}, timeout=min(timeout_s, SLICE_S))
            timeout_s -= SLICE_S
        if task.done():
            return {"error": "was cancelled"} if task.cancelled() else task.result()
        task.cancel()
        await asyncio.wait({task})
        return {"timeout": True}

    def _call(self, request: Mapping[str, Any]) -> Any:
        given = {"row": request.get("row") or {}, _MESSAGES: request.get(_MESSAGES) or []}
        positional = [given[what] for name, what in self._extras.items() if name is None]
        named = {name: given[what] for name, what in self._extras.items() if name is not None}
        return self._function(request["prompt"], request["response"], *positional, **named)

    def _raised(self, error: BaseException) -> dict[str, Any]:
        return {"error": without_secrets(_describe(error), self._options)[:MAX_ERROR_CHARS]}

    def _checked(self, value: Any, request: Mapping[str, Any]) -> dict[str, Any]:
        answer = self._rewards(value, request)
        if "error" in answer and self._place:
            answer["error"] += f" ({self._place})"
        return answer

    def _rewards(self, value: Any, request: Mapping[str, Any]) -> dict[str, Any]:
        if not self.traits.is_group:
            return _as_rewards([value], "returned {}")
        n_responses = len(request["response"])
        if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__iter__"):
            return {
                "error": f"returned {value!r:.100}, which is not a list of {n_responses} numbers",
                "fault": NO_NUMBERS,
            }
        values = list(value)
        if len(values) != n_responses:
            return {"error": f"returned {len(values)} values for {n_responses} responses", "fault": NO_NUMBERS}
        return _as_rewards(values, "returned a list with {}", NO_NUMBERS)


def _as_rewards(values: list[Any], what: str, fault: str = NO_NUMBER) -> dict[str, Any]:
    rewards = []
    for value in values:
        try:
            if isinstance(value, str | bytes):
                raise TypeError
            reward = float(value)
        except OverflowError:  # of an int
            reward = math.inf
        except (TypeError, ValueError, RuntimeError):
            return {"error": what.format(f"{value!r:.100}, which is not a number"), "fault": fault}
        if not math.isfinite(reward):
            return {"error": what.format(reward)}
        if abs(reward) > MAX_REWARD:
            return {"error": what.format(f"{reward:g}, which is more than float32 can hold")}
        rewards.append(reward)
    return {"rewards": rewards}


def _describe(error: BaseException) -> str:
    lines = traceback.format_exception(error)
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - an exception of the user's that cannot even be printed
        text = "(its text cannot be shown)"
    line = line_that_raised(error)
    return f"raised {type(error).__name__}: {text}{f', in {line}' if line else ''}\n{''.join(lines[-3:])}"


def _traits(function: Callable[..., Any], name: str, reads: str) -> Traits:
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    signature = inspect.signature(function)
    check_reward_signature(signature, name)
    parameters = list(signature.parameters.values())
    named = [p for p in parameters if p.kind in positional]
    names = [p.name for p in named]
    are_ids = len(names) >= 2 and all(n.endswith("_ids") for n in names[:2])
    return Traits(
        reads="ids" if reads == "ids" or (reads == "auto" and are_ids) else "text",
        takes_row="row" in _extras(function).values(),
        is_group=len(names) >= 2 and names[1] in _GROUP_NAMES,
        is_async=inspect.iscoroutinefunction(function)
        or inspect.iscoroutinefunction(getattr(function, "__call__", None)),  # noqa: B004 - an object with async __call__
        takes_messages=_MESSAGES in _extras(function).values(),
    )


def _extras(function: Callable[..., Any]) -> dict[str | None, str]:
    """Return what a function gets besides prompt and response: parameter -> "row" or "messages".

    The parameter is None where it has to be given by its place, the third.
    """
    found: dict[str | None, str] = {}
    options = function.keywords if isinstance(function, functools.partial) else {}
    for number, parameter in enumerate(inspect.signature(function).parameters.values()):
        is_variable = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if number < 2 or is_variable or parameter.name in options:
            continue
        name = None if parameter.kind is parameter.POSITIONAL_ONLY else parameter.name
        if parameter.name == _MESSAGES:
            found[name] = _MESSAGES
        elif parameter.name in _ROW_NAMES:
            found[name] = "row"
    return found
