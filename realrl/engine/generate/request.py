"""A request to the generator, checked before anything is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from realrl.config.schema import GenerationConfig
from realrl.errors import CallError, ConfigError
from realrl.shape import DecoderConfig


@dataclass(frozen=True)
class GenerateRequest:
    """One generate call.

    Attributes:
        prompts: int64 tokens of each sample, on any device; none is empty.
        sample_ids: one per prompt, unique.
        generation: settings of sampling.
        seed, step: the run's seed and step; together with the sample ids they decide every random number.
        eos_id: token that ends a response, like `generation.stop_ids`.
    """

    prompts: Sequence[torch.Tensor]
    sample_ids: Sequence[str]
    generation: GenerationConfig
    seed: int
    step: int
    eos_id: int

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The tokens that end a response, each once."""
        return tuple(dict.fromkeys((self.eos_id, *self.generation.stop_ids)))

    @property
    def n_rows(self) -> int:
        """The number of responses of all samples."""
        return len(self.prompts) * self.generation.n_responses

    def check(self, config: DecoderConfig) -> None:
        """Refuse a request that does not fit the model.

        Raises:
            ConfigError: the stop tokens are impossible.
            CallError: a prompt is empty, too long or outside of the vocabulary; names the sample.
            ValueError: the sample ids are not distinct, or not one for each prompt.
        """
        self._check_generation(config)
        if len(self.prompts) != len(self.sample_ids) or len(set(self.sample_ids)) != len(self.sample_ids):
            raise ValueError(f"{len(self.prompts)} prompts need as many distinct sample ids, not {self.sample_ids}")
        for prompt, sample_id in zip(self.prompts, self.sample_ids, strict=True):
            self._check_prompt(prompt, sample_id, config)

    def _check_generation(self, config: DecoderConfig) -> None:
        generation = self.generation
        outside = [token for token in self.stop_ids if not 0 <= token < config.vocab_size]
        if outside:
            raise ConfigError(
                f"stop tokens {outside} are outside of the vocabulary of {config.vocab_size}",
                remedy="Check generation.stop_ids and the tokenizer's end-of-sequence token.",
            )
        if generation.min_new_tokens and len(self.stop_ids) == config.vocab_size:
            raise ConfigError(
                f"all {config.vocab_size} tokens stop, but generation.min_new_tokens={generation.min_new_tokens}",
                remedy="Shorten generation.stop_ids.",
            )

    def _check_prompt(self, prompt: torch.Tensor, sample_id: str, config: DecoderConfig) -> None:
        n_new = self.generation.max_new_tokens
        if not len(prompt):
            raise CallError(
                f"the prompt of sample {sample_id!r} is empty",
                remedy="Remove the sample, or let its prompt begin with a start token.",
                step=self.step,
            )
        if len(prompt) + n_new > config.max_positions:
            raise CallError(
                f"sample {sample_id!r}: a prompt of {len(prompt)} tokens and generation.max_new_tokens={n_new} "
                f"exceed the model's {config.max_positions} positions",
                remedy="Lower dataset.max_prompt_tokens or generation.max_new_tokens.",
                step=self.step,
            )
        low, high = int(prompt.min()), int(prompt.max())
        if low < 0 or high >= config.vocab_size:
            raise CallError(
                f"the prompt of sample {sample_id!r} holds token {low if low < 0 else high}, outside of the vocabulary "
                f"of {config.vocab_size}",
                remedy="Use the tokenizer that belongs to the model.",
                step=self.step,
            )
