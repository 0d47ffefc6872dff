"""The calls that evaluate an experiment, and their data. Imports no torch.

    an experiment that generates    its generate call and all calls that lead to its rewards and costs
    any other                       its trained calls, whose interface judges instead of training, and their sources

During a training run these calls are another graph on the same roles, in the layouts of the calls that they come from;
alone (``realrl eval``) they are the graph of a run that trains nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from realrl.config.schema import BUILT_IN, DatasetConfig, GenerationConfig, RunConfig
from realrl.errors import ConfigError
from realrl.experiment.call_settings import configured_calls
from realrl.experiment.declaration import Experiment, Role
from realrl.experiment.run_plan import RunPlan
from realrl.graph.build import build_graph
from realrl.graph.mfc import InterfaceType, MFCDef
from realrl.plan.hooks import CallHooks, Offload
from realrl.sched.track.scores import JUDGED, WEIGHT

PREFIX = "eval_"  # prefix of the calls' names beside a training graph
TARGETS = ("input_ids", "rewards", "costs")
PARTS = ("input_ids", "prompt_mask", "truncated")  # generated keys that are kept even if no call reads them


def plan_evaluation(plan: RunPlan, finish: Callable[[MFCDef], MFCDef]) -> RunPlan:
    """Return the evaluation of a training run: its calls, on the allocations of those that they come from.

    Args:
        plan: the training run.
        finish: completes a call with the run's settings for all calls.

    Raises:
        ConfigError: the experiment trains nothing or has nothing to evaluate, or there is no validation data.
    """
    experiment, config = plan.experiment, plan.config
    held_out_data(config)
    if not any(mfc.is_train for mfc in plan.mfcs):
        raise ConfigError(
            f"experiment '{experiment.name}' trains nothing, so that there is nothing to evaluate on the way",
            remedy=f"Evaluate its models alone: realrl eval {experiment.name} eval.path=FILE",
        )
    calls = {base: finish(replace(mfc, name=PREFIX + mfc.name)) for base, mfc in _calls(experiment, config).items()}
    mfcs = tuple(calls.values())
    return replace(
        plan,
        mfcs=mfcs,
        graph=build_graph(mfcs, experiment.dataset.keys),
        allocations={mfc.name: plan.allocations[base] for base, mfc in calls.items()},
        hooks={mfc.name: _hooks(plan.hooks[base]) for base, mfc in calls.items()},
    )


def evaluation_experiment(experiment: Experiment, config: RunConfig) -> Experiment:
    """Return the experiment without training: its roles are frozen, and those that evaluation does not need are gone.

    Raises:
        ConfigError: the experiment has nothing to evaluate, or there is no validation data.
    """
    held_out_data(config)
    used = {mfc.role for mfc in _calls(experiment, config).values()}

    def mfcs(config: RunConfig) -> Sequence[MFCDef]:
        return list(_calls(experiment, config).values())

    def role_changes(config: RunConfig) -> dict[str, Role | None]:
        roles = experiment.roles_for(config)
        frozen = {name: replace(role, trainable=False) for name, role in roles.items() if name in used}
        return {**dict.fromkeys(experiment.roles), **frozen}

    return replace(experiment, mfcs=mfcs, adds=(), check=None, role_changes=role_changes)


def held_out_data(config: RunConfig) -> DatasetConfig:
    """Return the settings of the validation data.

    Raises:
        ConfigError: no file is given, and the dataset is not the toy task.
    """
    path = config.eval.path
    if not path and (config.dataset.files or config.dataset.path != BUILT_IN):
        raise ConfigError(
            f"there is nothing to evaluate on: eval.path is empty, and dataset.path={config.dataset.described} is what "
            "is trained on",
            remedy="Give eval.path=FILE with rows of the same kind that are not trained on.",
        )
    return config.dataset.model_copy(update={"path": path or BUILT_IN, "files": {}, "shuffle": False})


def eval_generation(config: RunConfig) -> GenerationConfig:
    """Return the settings of generation in an evaluation."""
    temperature = config.generation.temperature if config.eval.temperature is None else config.eval.temperature
    return config.generation.model_copy(update={"n_responses": config.eval.n_responses, "temperature": temperature})


def _calls(experiment: Experiment, config: RunConfig) -> dict[str, MFCDef]:
    """Return call of the training graph -> its call in the evaluation."""
    calls = configured_calls(experiment, _without_dropping(config))
    producers = {key: mfc for mfc in calls for key in mfc.output_keys}
    generating = producers.get("input_ids")
    if generating is not None and generating.interface_type is InterfaceType.GENERATE:
        _check_sampling(config)
        targets = [producers[key] for key in TARGETS if key in producers]
        wanted = _with_ancestors(targets, producers)
        read = {key for mfc in calls if mfc.name in wanted for key in mfc.input_keys}
        return {mfc.name: _repeated(mfc, read) for mfc in calls if mfc.name in wanted}
    judged = [mfc for mfc in calls if mfc.is_train]
    if not experiment.eval_metrics or not judged:
        raise ConfigError(
            f"experiment '{experiment.name}' has nothing to evaluate: it generates nothing, and its interface judges "
            "nothing",
            remedy="Leave eval.* out; an experiment of your own declares eval_metrics and implements "
            "ModelInterface.evaluate.",
        )
    wanted = _with_ancestors(judged, producers)
    return {
        mfc.name: _judging(mfc, experiment.eval_metrics) if mfc.is_train else _repeated(mfc, set(mfc.output_keys))
        for mfc in calls
        if mfc.name in wanted
    }


def _repeated(mfc: MFCDef, read: set[str]) -> MFCDef:
    """Return a call without the outputs, hooks and settings that only matter to training."""
    outputs = mfc.output_keys
    if mfc.interface_type is InterfaceType.GENERATE:
        outputs = tuple(key for key in outputs if key in read or key in PARTS)
    remap = {own: key for own, key in mfc.output_key_remap.items() if key in outputs}
    return replace(mfc, output_keys=outputs, output_key_remap=remap, **_UNHOOKED)


def judging_name(call: str) -> str:
    """Return the name of the call that judges in the place of one that trains."""
    return call.removesuffix("_train") + "_judge"


def _judging(mfc: MFCDef, metrics: Sequence[str]) -> MFCDef:
    names = {"weight": WEIGHT, **{metric: JUDGED + metric for metric in metrics}}
    return replace(
        mfc,
        name=judging_name(mfc.name),
        interface_type=InterfaceType.INFERENCE,
        output_keys=tuple(names.values()),
        output_key_remap=names,
        n_minibatches=1,
        log_return_value=False,
        **_UNHOOKED,
    )


_UNHOOKED: dict[str, Any] = {
    "pre_hooks": (),
    "post_hooks": (),
    "max_staleness": 0,
    "may_drop": False,
}


def _hooks(training: CallHooks) -> CallHooks:
    """Return the hooks of an evaluating call: implied reallocs and offloads, as in training."""
    before = tuple(hook for hook in training.before if not isinstance(hook, Offload) and hook.is_implied)
    return CallHooks(before, tuple(hook for hook in training.after if isinstance(hook, Offload)), training.home)


def _with_ancestors(targets: Sequence[MFCDef], producers: Mapping[str, MFCDef]) -> set[str]:
    found: dict[str, MFCDef] = {}
    left = list(targets)
    while left:
        mfc = left.pop()
        if mfc.name not in found:
            found[mfc.name] = mfc
            left += [producers[key] for key in mfc.input_keys if key in producers]
    return set(found)


def _without_dropping(config: RunConfig) -> RunConfig:
    """Let failed reward functions give 0 instead of dropping: an evaluation must not leave samples out."""
    options = config.algorithm
    changes: dict[str, Any] = {}
    if getattr(options, "reward_on_failure", None) == "drop":
        changes["reward_on_failure"] = "zero"
    if any(part.on_failure == "drop" for part in getattr(options, "rewards", {}).values()):
        changes["rewards"] = {
            name: part.model_copy(update={"on_failure": "zero"}) if part.on_failure == "drop" else part
            for name, part in options.rewards.items()
        }
    return config.model_copy(update={"algorithm": options.model_copy(update=changes)}) if changes else config


def _check_sampling(config: RunConfig) -> None:
    if config.eval.n_responses > 1 and eval_generation(config).temperature == 0.0:
        raise ConfigError(
            f"eval.n_responses={config.eval.n_responses} at temperature 0 are the same response so many times",
            remedy="Set eval.temperature above 0, or eval.n_responses=1.",
        )
