"""Checks of what judges responses: reward functions, tried on sample rows, and reward models."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from realrl.config.schema import BUILT_IN
from realrl.doctor.data_checks import some_prompts
from realrl.doctor.findings import Finding, Status
from realrl.doctor.run_under_check import RunUnderCheck
from realrl.errors import CallError
from realrl.experiment.rewards import REWARD, functions_of
from realrl.graph.mfc import InterfaceType, MFCDef, ModelName
from realrl.sched.messages import KeySchema, Per

if TYPE_CHECKING:
    from realrl.data.sample import SequenceSample
    from realrl.rewards.interface import WeightedRewards

PLACEHOLDER = "This is a placeholder response."
N_ROWS = 3
TOKENS = KeySchema("int64", Per.TOKEN)
_FLAGS = KeySchema("bool", Per.TOKEN)
_REWARDS = KeySchema("float32", Per.SEQUENCE)


def check_judges(run: RunUnderCheck) -> list[Finding]:
    """Check that responses of a user's model, or to a user's prompts, are not judged by a model of random numbers."""
    config, roles = run.config, run.plan.roles
    generating = run.plan.generating_roles
    paths = {config.models[name].path for name in generating} | {path for _, path, _ in run.sources}
    if not generating or paths == {BUILT_IN}:
        return [Finding(Status.OK, "the toy task" if generating else "nothing is generated")]
    judges = [name for name, role in roles.items() if role.head == "reward" and not role.trainable]
    for name in judges:
        if config.models[name].path == BUILT_IN:
            return [_random_judge(run, name)]
    shown = ", ".join(f"{name}: {config.models[name].path}" for name in judges)
    return [Finding(Status.OK, shown or "no reward model")]


def _random_judge(run: RunUnderCheck, name: str) -> Finding:
    """Return the problem that a role judges by a model of random numbers; its remedy names the keys there are."""
    key, folder = f"algorithm.{name}_function", f"models.{name}.path"
    message = f"{folder}={BUILT_IN} is a model of random numbers, for the toy task alone"
    remedy = f"Give {folder}=FOLDER of a trained reward model."
    if getattr(run.config.algorithm, f"{name}_function", "") is None and not _has_functions(run, name):
        message = f"experiment '{run.plan.experiment.name}' has no {name}: {key} is not set, and {message}"
        built_in = ", a built-in one (math_verify, reasoning_gym)" if name == REWARD else ""
        remedy = f"Give {key}=FILE.py:FUNCTION{built_in}, or {folder}=FOLDER of a trained reward model."
    return Finding(Status.PROBLEM, message, remedy)


def _has_functions(run: RunUnderCheck, name: str) -> bool:
    return name == REWARD and any(functions_of(mfc.interface) for mfc in run.plan.mfcs)


def check_rewards(run: RunUnderCheck) -> list[Finding]:
    """Check that functions score placeholder responses to some rows, in the processes that a run would use.

    A failure that would end the run is a problem; one that `on_failure` provides for is a warning.
    """
    from realrl.algo.policy.filters import Filter
    from realrl.algo.resolve import resolve_interface
    from realrl.rewards.interface import WeightedRewards

    findings = []
    for mfc in run.plan.mfcs:
        if mfc.role in run.models or mfc.interface_type is not InterfaceType.INFERENCE:
            continue
        interface = resolve_interface(mfc.interface)
        if isinstance(interface, WeightedRewards):
            findings.append(_score(run, mfc, interface))
        elif not isinstance(interface, Filter):
            message = f"{mfc.name}: {mfc.interface.name} is no reward function, and was not called"
            findings.append(Finding(Status.SKIPPED, message))
    if not findings:
        findings.append(Finding(Status.OK, "no call of this run is a reward function"))
    return findings


def _score(run: RunUnderCheck, mfc: MFCDef, interface: WeightedRewards) -> Finding:
    import torch

    from realrl.algo.api import CallContext, MicroBatching, Model
    from realrl.engine.weightless import WeightlessEngine

    batch = _placeholders(run, mfc)
    engine = WeightlessEngine(mfc.role, torch.device("cpu"))
    model = Model(ModelName(mfc.role), engine, run.tokenizer(run.config.models[mfc.role].path))
    context = CallContext(
        call=mfc.name,
        step=1,
        seed=run.config.seed,
        micro_batching=MicroBatching(),
        minibatches=(batch.ids,),
        generation=run.config.generation,
        algorithm=run.config.algorithm,
    )
    start_s, n_responses = time.monotonic(), sum(map(len, batch.seqlens["input_ids"]))
    try:
        rewards = interface.inference(model, batch, context)["rewards"].tolist()
    except CallError as error:
        return Finding(Status.PROBLEM, f"with placeholder responses, {error.message}", error.remedy or "")
    finally:
        interface.close()
    took_s = time.monotonic() - start_s
    failed = sum(total for name, (total, _) in context.metrics.sums.items() if name.endswith("/failed"))
    if failed:
        message = (
            f"{mfc.name}: failed for {failed:.0f} of {n_responses} placeholder responses, which count as "
            "algorithm.reward_on_failure says"
        )
        remedy = (
            "Call the function yourself with such a response: the run's log will only have a line for each failure."
        )
        return Finding(Status.WARNING, message, remedy)
    values = ", ".join(f"{value:.4g}" for value in rewards)
    took = f"in {took_s:.1f} s, the start of processes included"
    return Finding(Status.OK, f"{mfc.name}: {values} for {n_responses} placeholder responses, {took}")


def _placeholders(run: RunUnderCheck, mfc: MFCDef) -> SequenceSample:
    """Return the call's inputs under the names that its interface sees.

    A sample has as many responses as in the run, which a function of all of them may count on.
    """
    import torch

    n_responses = run.config.generation.n_responses if run.plan.generating_roles else 1
    n_rows = min(max(1, N_ROWS // n_responses), len(run.dataset))
    ids = tuple(f"row {row}" for row in range(n_rows))
    prompts = [prompt.tolist() for prompt in some_prompts(run, n_rows)]
    tokenizer, n_new = run.reading_tokenizer, run.config.generation.max_new_tokens
    texts = [PLACEHOLDER, *(f"{PLACEHOLDER} It is number {number}." for number in range(2, n_responses + 1))]
    encoded = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    made = sequences(ids, prompts, [[e[: n_new - 1] + [tokenizer.eos_token_id] for e in encoded]] * n_rows)
    wanted = [mfc.input_key_remap.get(key, key) for key in mfc.input_keys]
    if "metadata" in wanted:
        rows = [row * len(run.dataset) // n_rows for row in range(n_rows)]
        made = made.update(run.dataset.samples(ids, rows).select(ids, ("metadata",)))
    if "model_rewards" in wanted:
        rewards = torch.zeros(n_rows * n_responses)
        made = made.update(made.derive("input_ids", {"model_rewards": (_REWARDS, rewards)}))
    return made.select(ids, tuple(wanted))


def sequences(
    ids: Sequence[str], prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[Sequence[int]]]
) -> SequenceSample:
    """Return a batch of prompts, each with its responses."""
    import torch

    from realrl.data.sample import SequenceSample

    pairs = list(zip(prompts, responses, strict=True))
    tokens = [[torch.tensor([*prompt, *one], dtype=torch.int64) for one in given] for prompt, given in pairs]
    masks = [[torch.tensor([True] * len(prompt) + [False] * len(one)) for one in given] for prompt, given in pairs]
    return SequenceSample.from_lists(tuple(ids), {"input_ids": (TOKENS, tokens), "prompt_mask": (_FLAGS, masks)})
