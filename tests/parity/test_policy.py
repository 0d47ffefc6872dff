"""GRPO and its loss variants, RLOO and distillation give TRL's losses for the same weights, responses and rewards."""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.parity.trl_models import PAD_ID, Twin, assert_parity, bare_trainer, packed, texts, trl, twin  # isort: skip

from realrl.algo.policy.actor import PolicyActor
from realrl.config.policy_options import PolicyOptions
from realrl.config.schema import GenerationConfig
from realrl.data.sample import SequenceSample
from realrl.sched.messages import KeySchema, Per
from tests.helpers.fake_engine import fake_context

N_PROMPTS, N_RESPONSES, MAX_NEW_TOKENS = 3, 4, 9
GROUPS = texts(N_PROMPTS, seed=7, n_answers=N_RESPONSES, max_answer=MAX_NEW_TOKENS)
REWARDS = torch.randn(N_PROMPTS * N_RESPONSES, generator=torch.Generator().manual_seed(3))
TEMPERATURE = 1.0


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Twin]:
    """The policy that learns, the one that sampled, which is close to it, and the reference."""
    folder = tmp_path_factory.mktemp("policies")
    made = {name: twin(folder / name, seed=seed) for seed, name in enumerate(("actor", "old", "ref"))}
    actor, old = made["actor"], made["old"]
    noise = torch.Generator().manual_seed(5)
    names = dict(actor.engine.inner.decoder.named_parameters())
    with torch.no_grad():
        for name, parameter in old.engine.inner.decoder.named_parameters():
            parameter.copy_(names[name] * (1.0 + 0.3 * torch.randn(parameter.shape, generator=noise)))
    from realrl.model.files.hf import save_model

    save_model(old.engine.inner.decoder, folder / "old")
    old.hf.load_state_dict(type(old.hf).from_pretrained(folder / "old", local_files_only=True).state_dict())
    return made


def with_logprobs(batch: SequenceSample, models: Mapping[str, Twin]) -> SequenceSample:
    """Old and reference log-probabilities as the inference calls give them, rewards, and no truncation."""
    for key, name in (("old_logprobs", "old"), ("ref_logprobs", "ref")):
        ctx = fake_context("inf", [batch.ids], generation=GenerationConfig(temperature=TEMPERATURE))
        found = PolicyActor().inference(models[name].model, batch, ctx)
        batch = batch.update(found.remap({"logprobs": key}))
    per_sequence = {
        "rewards": (KeySchema("float32", Per.SEQUENCE), REWARDS),
        "truncated": (KeySchema("bool", Per.SEQUENCE), torch.zeros(len(REWARDS), dtype=torch.bool)),
    }
    return batch.update(batch.derive("input_ids", per_sequence))


def train(models: Mapping[str, Twin], options: Mapping[str, Any]) -> dict[str, float]:
    batch = with_logprobs(packed(GROUPS), models)
    ctx = fake_context(
        "actor_train",
        [batch.ids],
        algorithm=PolicyOptions.model_validate(options),
        generation=GenerationConfig(n_responses=N_RESPONSES, max_new_tokens=MAX_NEW_TOKENS, temperature=TEMPERATURE),
    )
    metrics = PolicyActor().train_step(models["actor"].model, batch, ctx)
    kl = options.get("kl_loss_coef", 0.0)
    return {**metrics, "loss": metrics["actor/pg_loss"] + (kl * metrics["actor/kl_loss"] if kl else 0.0)}


def trl_loss(cls: type, models: Mapping[str, Twin], *, args: Mapping[str, Any], **attributes: Any) -> torch.Tensor:
    """TRL's own way from responses and rewards over advantages to the loss; only sampling and scoring are given."""
    prompts, answers = zip(*[row for group in GROUPS for row in group], strict=True)
    generated = (list(prompts), list(answers), None, list(answers), None, {}, None, None)
    trainer = bare_trainer(
        cls,
        models["old"].hf,
        _tokenizer=SimpleNamespace(pad_token_id=PAD_ID),
        _logs=defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list)),
        _pending_extra_logs={},
        _pending_metrics={},
        pad_to_multiple_of=None,
        mask_truncated_completions=False,
        environment_factories=None,
        environments=None,
        tools=None,
        num_generations=N_RESPONSES,
        reward_weights=torch.ones(1),
        reward_func_names=["score"],
        temperature=TEMPERATURE,
        max_completion_length=MAX_NEW_TOKENS,
        epsilon_low=0.2,
        epsilon_high=0.2,
        ref_model=models["ref"].hf,
        beta=0.0,
        args=SimpleNamespace(
            per_device_train_batch_size=len(answers),
            gradient_checkpointing_kwargs=None,
            gradient_accumulation_steps=1,
            report_to=[],
            **args,
        ),
        state=SimpleNamespace(global_step=1),
        log_multimodal=False,
        _calculate_rewards=lambda *_: REWARDS[:, None].clone(),
        _generate=lambda _: generated if cls is trl.GRPOTrainer else (generated[0], generated[1], generated[3]),
    )
    for name, value in attributes.items():
        setattr(trainer, name, value)
    inputs = trainer._generate_and_score_completions([{"prompt": "as generated"}] * len(answers))
    trainer.model = models["actor"].hf
    loss: torch.Tensor = trainer.compute_loss(models["actor"].hf, inputs)
    return loss


def registered(name: str) -> dict[str, Any]:
    """The options of a registered experiment as it declares them."""
    defaults: dict[str, Any] = importlib.import_module(f"experiments.{name}").EXPERIMENT.defaults["algorithm"]
    return defaults


GRPO = {"policy_loss": "clip", "advantage": "grpo"}
GRPO_CASES: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": (registered("grpo"), {"loss_type": "grpo", "beta": 0.04}),
    "grpo_without_kl": ({**GRPO, "loss_normaliser": "sequences"}, {"loss_type": "grpo"}),
    "bnpo": ({**GRPO, "loss_normaliser": "tokens"}, {"loss_type": "bnpo"}),
    "dr_grpo": (registered("dr_grpo"), {"loss_type": "dr_grpo", "scale_rewards": "none"}),
    "dapo": (registered("dapo"), {"loss_type": "dapo", "epsilon_high": 0.28}),
    "gspo": (
        registered("gspo"),
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4},
    ),
    "gspo_wide": (
        {**registered("gspo"), "clip_ratio": 0.2, "clip_ratio_high": 0.3},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_high": 0.3},
    ),
    "cispo": (
        {**GRPO, "policy_loss": "cispo", "loss_normaliser": "tokens", "clip_ratio_high": 0.3},
        {"loss_type": "cispo", "epsilon_high": 1.3},  # TRL bounds the ratio itself
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", GRPO_CASES)
def test_grpo(models: Mapping[str, Twin], case: str) -> None:
    options, attributes = GRPO_CASES[case]
    ours = train(models, {**options, "early_stop_ratio": None})
    attributes = {
        "multi_objective_aggregation": "sum_then_normalize",
        "scale_rewards": "group",
        "use_vllm": False,
        "vllm_importance_sampling_correction": False,
        "num_iterations": 2,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "importance_sampling_level": "token",
        "_entropy_bonus_enabled": False,
        **attributes,
    }
    args = {"steps_per_generation": 1, "delta": None, "use_bias_correction_kl": False}
    theirs = trl_loss(trl.GRPOTrainer, models, args=args, **attributes)
    assert_parity("loss", ours, models["actor"].engine, theirs, models["actor"].hf)
    assert ours["actor/clip_fraction"] > 0.0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kl_coef", [0.0, 0.05])
def test_rloo(models: Mapping[str, Twin], kl_coef: float) -> None:
    options = {**registered("rloo"), "kl_coef": kl_coef}
    ours = train(models, {**options, "early_stop_ratio": None})
    attributes = {"beta": kl_coef, "reward_clip_range": None, "normalize_advantages": False}
    theirs = trl_loss(trl.RLOOTrainer, models, args={}, **attributes)
    assert_parity("loss", ours, models["actor"].engine, theirs, models["actor"].hf)


@pytest.mark.filterwarnings("ignore")
def test_distillation(models: Mapping[str, Twin], tmp_path: Path) -> None:
    """Every token of the vocabulary as the only token of a response, weighed by its probability: what sampling would
    estimate becomes a sum, and is TRL's reverse KL of the whole distribution."""
    student, teacher = models["actor"], models["ref"]
    n_tokens = student.engine.inner.decoder.config.vocab_size
    prompts = [group[0][0] for group in GROUPS]
    batch = packed([[(prompt, [token]) for token in range(n_tokens)] for prompt in prompts])
    ctx = fake_context("inf", [batch.ids])
    for key, name in (("old_logprobs", student), ("teacher_logprobs", teacher)):
        batch = batch.update(PolicyActor().inference(name.model, batch, ctx).remap({"logprobs": key}))
    uniform = torch.full_like(batch["old_logprobs"], -torch.tensor(float(n_tokens)).log())
    n_sequences = len(prompts) * n_tokens
    columns = {
        "behavior_logprobs": (batch.schemas["old_logprobs"], uniform),
        "truncated": (KeySchema("bool", Per.SEQUENCE), torch.zeros(n_sequences, dtype=torch.bool)),
        "rewards": (KeySchema("float32", Per.SEQUENCE), torch.zeros(n_sequences)),
    }
    batch = batch.update(batch.derive("input_ids", columns))
    weighed = {"importance_cap": float(n_tokens), "early_stop_ratio": None}
    options = PolicyOptions.model_validate({**registered("distill"), **weighed})
    ctx = fake_context("actor_train", [batch.ids], algorithm=options)
    ours = PolicyActor().train_step(student.model, batch, ctx)
    trainer = bare_trainer(
        trl.DistillationTrainer,
        student.hf,
        teacher_model=teacher.hf,
        beta=1.0,
        temperature=1.0,
        model_kwarg_keys=set(),
        _is_vlm=False,
        _forward_redirection=lambda _, __, function, *args, **kwargs: function(*args, **kwargs),
    )
    length = max(map(len, prompts))
    inputs = {
        "prompt_ids": torch.tensor([[PAD_ID] * (length - len(p)) + p for p in prompts]),
        "prompt_mask": torch.tensor([[0] * (length - len(p)) + [1] * len(p) for p in prompts]),
        "completion_ids": torch.zeros(len(prompts), 1, dtype=torch.int64),
        "completion_mask": torch.ones(len(prompts), 1, dtype=torch.int64),
    }
    theirs = trainer.compute_loss(student.hf, inputs)
    assert_parity("actor/pg_loss", ours, student.engine, theirs, student.hf)
