"""Checks that compute: kernels of generation, and generation against training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from realrl.algo.api import MicroBatching
from realrl.algo.packed import response_mask
from realrl.config.schema import BUILT_IN
from realrl.cpu import describe
from realrl.data.sample import SequenceSample
from realrl.doctor.data_checks import some_prompts
from realrl.doctor.findings import Finding, Status
from realrl.doctor.memory import free_memory
from realrl.doctor.reward_checks import TOKENS, sequences
from realrl.doctor.run_under_check import RunUnderCheck
from realrl.engine import device as devices
from realrl.engine.decoder_engine import DecoderEngine
from realrl.errors import ConfigError
from realrl.graph.mfc import InterfaceType
from realrl.model.decoder import Decoder
from realrl.model.files.hf import load_model
from realrl.model.init import random_model
from realrl.plan.memory.plan import show_bytes
from realrl.plan.parameters.decoder_specs import parameter_specs

N_PROMPTS, N_NEW_TOKENS = 4, 16
# Nats. In float32 the rest comes from other orders of summation; in half precision from the rounding of logits around
# 20 to 8 or 11 bits, at every layer.
TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.3}
_WORKING_SPACE = 2.5  # times the parameters: weights packed for generation, and a little more


def check_kernels(run: RunUnderCheck) -> list[Finding]:
    """Say what computes generation."""
    is_cpu = run.config.cluster.device == "cpu"
    return [Finding(Status.OK, f"generation with {describe()}" if is_cpu else "those of torch")]


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
    batch = SequenceSample.from_lists(tuple(ids), {"prompt_ids": (TOKENS, [[prompt] for prompt in prompts])})
    made = engine.generate(batch, generation, seed=config.seed, step=1, eos_id=tokenizer.eos_token_id)
    whole = sequences(ids, [p.tolist() for p in prompts], [[r.tolist()] for r in made.responses]).to(engine.device)
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
