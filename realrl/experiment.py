"""An experiment: a named algorithm as users declare it, found by name or by file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from realrl.config.schema import RunConfig, Section
from realrl.graph.mfc import MFCDef


class DatasetKind(Enum):
    """What one dataset row holds, and which keys it becomes."""

    PROMPT = "prompt"  # prompt_ids
    PROMPT_ANSWER = "prompt_answer"  # input_ids, prompt_mask
    PREFERENCE_PAIR = "preference_pair"  # input_ids with two sequences per sample: chosen, rejected; prompt_mask

    @property
    def keys(self) -> tuple[str, ...]:
        """The dataset keys that a graph can read."""
        return ("prompt_ids",) if self is DatasetKind.PROMPT else ("input_ids", "prompt_mask")


@dataclass(frozen=True)
class Role:
    """A named model of the algorithm.

    Args:
        trainable: whether some call trains it; decides if it has an optimizer and is saved.
        head: "lm" predicts tokens; "value" and "reward" give one number per token position; "none" has no weights and
            no engine, only a tokenizer: its calls run plain Python (a reward function).
        path_from: take the model path of this role when the user gives none.
    """

    trainable: bool
    head: Literal["lm", "value", "reward", "none"] = "lm"
    path_from: str | None = None


@dataclass(frozen=True)
class Experiment:
    """A registered algorithm.

    Args:
        name: what the user types after ``realrl run``.
        description: one line for ``realrl list``.
        roles: role name -> `Role`; a run uses `roles_for`.
        dataset: kind of dataset that feeds the graph.
        options: pydantic model of the keys under ``algorithm.``, with their defaults.
        mfcs: the resolved configuration -> the list of calls.
        defaults: configuration values that differ from the schema's own, nested like the configuration.
        role_changes: the resolved configuration -> roles that differ from `roles` in such a run.
    """

    name: str
    description: str
    roles: Mapping[str, Role]
    dataset: DatasetKind
    mfcs: Callable[[RunConfig], Sequence[MFCDef]]
    options: type[Section] = Section
    defaults: Mapping[str, object] = field(default_factory=dict)
    role_changes: Callable[[RunConfig], Mapping[str, Role]] | None = None

    def roles_for(self, config: RunConfig) -> Mapping[str, Role]:
        """The roles of a run with this configuration; the names are those of `roles`."""
        return {**self.roles, **(self.role_changes(config) if self.role_changes else {})}
