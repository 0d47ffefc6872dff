"""Checks that compute: model files, rewards on sample rows, and generation against training."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from realrl.algo.api import CallContext, MicroBatching, Model
from realrl.algo.packed import response_mask
from realrl.algo.policy.filters import Filter
from realrl.algo.resolve import resolve_interface
from realrl.config.schema import BUILT_IN
from realrl.data.sample import SequenceSample
from realrl.doctor.data_checks import some_prompts
from realrl.doctor.findings import Finding, Status
from realrl.doctor.memory import free_memory
from realrl.doctor.run_under_check import RunUnderCheck
from realrl.engine import device as devices
from realrl.engine.decoder_engine import DecoderEngine
from realrl.engine.weightless import WeightlessEngine
from realrl.errors import ConfigError
from realrl.experiment.planning import check_models_fit
from realrl.graph.mfc import InterfaceType, MFCDef, ModelName
from realrl.model.decoder import Decoder
from realrl.model.files.hf import check_model, load_model
from realrl.model.init import random_model
from realrl.plan.memory.plan import show_bytes
from realrl.plan.parameters.decoder_specs import parameter_specs
from realrl.rewards.interface import WeightedRewards
from realrl.sched.messages import KeySchema, Per

PLACEHOLDER = "This is a placeholder response."
N_ROWS, N_PROMPTS, N_NEW_TOKENS = 3, 4, 16
# Nats. In float32 the rest comes from other orders of summation; in half precision from the rounding of logits around
# 20 to 8 or 11 bits, at every layer.
TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.3}
_WORKING_SPACE = 2.5  # times the parameters: weights packed for generation, and a little more

_TOKENS = KeySchema("int64", Per.TOKEN)
_FLAGS = KeySchema("bool", Per.TOKEN)
_REWARDS = KeySchema("float32", Per.SEQUENCE)


def check_models(run: RunUnderCheck) -> list[Finding]:
    """Check that every role's model can be built, and that the strategies can cut it."""
    check_models_fit(run.plan)
    shown = ", ".join(f"{name} {_count(run, name) / 1e6:.1f}M" for name in run.models) or "none"
    return [Finding(Status.OK, f"parameters: {shown}; they fit the strategies")]


def check_weights(run: RunUnderCheck) -> list[Finding]:
    """Check that the files of every model are whole, as far as their headers tell."""
    folders = []
    for name in run.models:
        role, path = run.plan.roles[name], run.config.models[name].path
        if path != BUILT_IN:
            check_model(path, head=run.models[name].head, makes_head=role.trainable)
            folders.append(path)
    shown = ", ".join(dict.fromkeys(folders))
    return [Finding(Status.OK, f"whole: {shown}" if shown else "made on the spot")]


def _count(run: RunUnderCheck, name: str) -> int:
    return sum(spec.n_elements for spec in parameter_specs(run.models[name]))


# ---------------------------------------------------------------- rewards


def check_rewards(run: RunUnderCheck) -> list[Finding]:
    """Let functions score placeholder responses to some rows, in the processes that a run would use."""
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
    start_s = time.monotonic()
    try:
        rewards = interface.inference(model, batch, context)
    finally:
        interface.close()
    took_s = time.monotonic() - start_s
    failed = sum(total for name, (total, _) in context.metrics.sums.items() if name.endswith("/failed"))
    if failed:
        message = (
            f"{mfc.name}: failed for {failed:.0f} of {len(batch)} placeholder responses, which count as "
            "algorithm.reward_on_failure says"
        )
        remedy = (
            "Call the function yourself with such a response: the run's log will only have a line for each failure."
        )
        return Finding(Status.WARNING, message, remedy)
    values = ", ".join(f"{value:.4g}" for value in rewards["rewards"].tolist())
    took = f"in {took_s:.1f} s, the start of processes included"
    message = f"{mfc.name}: {values} for {len(batch)} placeholder responses, {took}"
    return Finding(Status.OK, message)


def _placeholders(run: RunUnderCheck, mfc: MFCDef) -> SequenceSample:
    """Return the call's inputs under the names that its interface sees."""
    n_rows = min(N_ROWS, len(run.dataset))
    ids = tuple(f"row {row}" for row in range(n_rows))
    prompts = [prompt.tolist() for prompt in some_prompts(run, n_rows)]
    tokenizer = run.reading_tokenizer
    text = tokenizer(PLACEHOLDER, add_special_tokens=False)["input_ids"]
    response = text[: run.config.generation.max_new_tokens - 1] + [tokenizer.eos_token_id]
    made = _sequences(ids, prompts, [response] * n_rows)
    wanted = [mfc.input_key_remap.get(key, key) for key in mfc.input_keys]
    if "metadata" in wanted:
        rows = [row * len(run.dataset) // n_rows for row in range(n_rows)]
        made = made.update(run.dataset.samples(ids, rows).select(ids, ("metadata",)))
    if "model_rewards" in wanted:
        made = made.update(made.derive("input_ids", {"model_rewards": (_REWARDS, torch.zeros(n_rows))}))
    return made.select(ids, tuple(wanted))


def _sequences(
    ids: Sequence[str], prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]
) -> SequenceSample:
    """Return a batch of prompts, each with one response."""
    pairs = list(zip(prompts, responses, strict=True))
    tokens = [[torch.tensor([*prompt, *response], dtype=torch.int64)] for prompt, response in pairs]
    masks = [[torch.tensor([True] * len(prompt) + [False] * len(response))] for prompt, response in pairs]
    return SequenceSample.from_lists(tuple(ids), {"input_ids": (_TOKENS, tokens), "prompt_mask": (_FLAGS, masks)})


# ---------------------------------------------------------------- generation against training


def check_logprobs(run: RunUnderCheck) -> list[Finding]:
    """Check that generation and training give tokens the same log-probabilities, up to rounding.

    Training divides by the probabilities of generation: where the two disagree, ratios are wrong from the first step.
    """
    generates = [mfc for mfc in run.plan.mfcs if mfc.interface_type is InterfaceType.GENERATE]
    roles = list(dict.fromkeys(mfc.role for mfc in generates if mfc.role in run.models))
    if not roles:
        return [Finding(Status.OK, "nothing is generated")]
    if not run.loads_models:
        return [Finding(Status.SKIPPED, "no model is to be loaded")]
    try:
        _ = run.device
    except ConfigError as error:
        return [Finding(Status.SKIPPED, error.message)]
    return [_agreement(run, name) for name in roles]


def _agreement(run: RunUnderCheck, name: str) -> Finding:
    model = run.models[name]
    needed = int(_WORKING_SPACE * sum(spec.num_bytes for spec in parameter_specs(replace(model, lora=None))))
    free = free_memory(run.device)
    if needed > free:
        message = f"{name}: the whole model on one device takes about {show_bytes(needed)}, {show_bytes(free)} are free"
        return Finding(Status.SKIPPED, message)
    engine = DecoderEngine(_load(run, name), role=name)
    prompts = some_prompts(run, N_PROMPTS)
    ids = tuple(f"prompt {i}" for i in range(len(prompts)))
    largest, mean, n_tokens = compare(run, engine, ids, prompts)
    del engine
    devices.release_cached_memory(run.device)
    tolerance = TOLERANCES[run.dtype]
    message = (
        f"{name}: over {n_tokens} generated tokens, generation and training differ by at most {largest:.2g} nats, "
        f"{mean:.2g} on average; up to {tolerance:g} is rounding in {run.config.precision}"
    )
    if largest <= tolerance:  # False for NaN as well
        return Finding(Status.OK, message)
    remedy = (
        "Try precision=fp32: if they agree there, rounding is the cause; otherwise report it with the model's name."
    )
    return Finding(Status.WARNING, message, remedy)


def compare(
    run: RunUnderCheck, engine: DecoderEngine, ids: Sequence[str], prompts: Sequence[torch.Tensor]
) -> tuple[float, float, int]:
    """Return the largest and the mean absolute difference in nats, and the number of compared tokens."""
    config = run.config
    n_tokens = min(N_NEW_TOKENS, config.generation.max_new_tokens)
    generation = config.generation.model_copy(
        update={"n_responses": 1, "max_new_tokens": n_tokens, "min_new_tokens": 0}
    )
    tokenizer = run.reading_tokenizer
    batch = SequenceSample.from_lists(tuple(ids), {"prompt_ids": (_TOKENS, [[prompt] for prompt in prompts])})
    made = engine.generate(batch, generation, seed=config.seed, step=1, eos_id=tokenizer.eos_token_id)
    whole = _sequences(ids, [p.tolist() for p in prompts], [r.tolist() for r in made.responses]).to(engine.device)
    temperature = generation.temperature or 1.0
    recomputed = engine.forward(
        whole, lambda out, part: out.logprobs(temperature, mask=response_mask(part)), micro_batching=MicroBatching()
    )
    ours = recomputed[response_mask(whole)].cpu().double()
    difference = (ours - torch.cat(made.policy_logprobs).double()).abs()
    return float(difference.max()), float(difference.mean()), len(ours)


def _load(run: RunUnderCheck, name: str) -> Decoder:
    """Load the role's whole model on one device, in the precision of computation, without adapters."""
    path, config = run.config.models[name].path, replace(run.models[name], lora=None)
    if path == BUILT_IN:
        return random_model(config, run.config.seed, device=run.device)
    return load_model(path, head=config.head, dtype=run.dtype, device=run.device, seed=run.config.seed)
