"""Keys that an experiment would ignore: to type one is an error, and they are not listed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from realrl.config.schema import RunConfig
    from realrl.experiment.declaration import Experiment
    from realrl.experiment.run_plan import RunPlan
    from realrl.graph.mfc import MFCDef

_UNUSED_IN_EVALUATION = (
    "steps",
    "epochs",
    "resume",
    "max_staleness",
    "generation.n_responses",
    "eval.every_steps",
    "eval.at_start",
    "save.every_steps",
    "save.at_end",
)


def unused_keys(experiment: Experiment, mfcs: Sequence[MFCDef]) -> Mapping[str, str]:
    """Return section or key without effect -> reason."""
    from realrl.data.kinds import DatasetKind
    from realrl.graph.mfc import InterfaceType

    unused: dict[str, str] = {}
    if not any(mfc.interface_type is InterfaceType.GENERATE for mfc in mfcs):
        unused["generation"] = f"'{experiment.name}' has no generate call"
        keys = ("save.n_generations", "save.generations_every_steps", "save.generations_path")
        for key in (*keys, "eval.n_responses", "eval.temperature", "eval.pass_threshold"):
            unused[key] = f"'{experiment.name}' has no generate call"
        unused["max_staleness"] = f"'{experiment.name}' has no generate call"
    if not any(mfc.may_drop for mfc in mfcs):
        unused["max_refill_rounds"] = f"no call of '{experiment.name}' drops samples"
    if all(mfc.is_train for mfc in mfcs):
        unused["min_n_seqs"] = f"all calls of '{experiment.name}' train"
    if experiment.dataset is DatasetKind.PROMPT:
        unused["dataset.max_answer_tokens"] = f"the dataset of '{experiment.name}' holds prompts, no answers"
    used = {mfc.role for mfc in mfcs}
    for role in (role for role in experiment.roles if role not in used):
        unused[f"models.{role}"] = f"this run of '{experiment.name}' needs no role '{role}'"
    return unused


def is_unused(path: str, unused: Iterable[str]) -> bool:
    """Return True if a key is one of `unused`, or below one."""
    return any(path == key or path.startswith(key + ".") for key in unused)


def check_used(overrides: Sequence[str], plan: RunPlan) -> None:
    """Refuse overrides without effect.

    Raises:
        ConfigError: lists them with the reason.
    """
    from realrl.config.overrides import parse_overrides
    from realrl.config.problems import Problem, raise_problems, subject_of
    from realrl.config.secrets import masked_argument

    problems = []
    unused = dict(unused_keys(plan.experiment, plan.mfcs))
    unused |= _switched_off(plan.config)
    if plan.config.eval.only:
        unused |= dict.fromkeys(_UNUSED_IN_EVALUATION, "an evaluation goes once over eval.path and trains nothing")
        unused |= _calls_of_training(plan)
    for override, edit in zip(overrides, parse_overrides(overrides)[0], strict=True):
        for path, value in _leaves(edit.path, edit.value):
            subject = masked_argument(override) if path == edit.path else subject_of(path, value)
            for key, reason in unused.items():
                if is_unused(path, (key,)):
                    problems.append(Problem(subject, f"has no effect: {reason}"))
    raise_problems(problems, plan.config.experiment)


def _leaves(path: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield the single values of an override by dotted path."""
    if not isinstance(value, Mapping) or not value:
        yield path, value
        return
    for name, inner in value.items():
        yield from _leaves(f"{path}.{name}", inner)


def _calls_of_training(plan: RunPlan) -> dict[str, str]:
    """Settings of calls that only a training run has."""
    from realrl.experiment.evaluation import judging_name

    names = {mfc.name for mfc in plan.mfcs}
    unused = {f"calls.{call}.max_staleness": "an evaluation trains nothing" for call in plan.config.calls}
    idle = [call for call in plan.config.calls if names.isdisjoint((call, judging_name(call)))]
    return {**unused, **{f"calls.{call}": f"an evaluation does without call '{call}'" for call in idle}}


def _switched_off(config: RunConfig) -> dict[str, str]:
    """Return keys that only matter to features that this run leaves off -> reason."""
    unused: dict[str, str] = {}
    if not (config.eval.is_on or config.eval.only):
        keys = ("path", "n_seqs", "n_responses", "temperature", "pass_threshold")
        unused |= {f"eval.{key}": "eval.every_steps is 0, so that nothing is evaluated" for key in keys}
    for role, model in config.models.items():
        if model.lora.rank == 0:
            reason = f"models.{role}.lora.rank is 0, so that there are no adapters"
            unused |= {f"models.{role}.lora.{key}": reason for key in ("alpha", "targets")}
    return unused
