"""A reward that is a Python function of prompt and response: an inference call that needs no engine."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal

import torch

from realrl.algo.api import CallContext, Model, ModelInterface
from realrl.algo.reward_pool import InProcessPool, Outcome, ProcessPool, Reads, Response, RewardPool
from realrl.data.sample import SequenceSample
from realrl.errors import CallError, RunError
from realrl.sched.messages import KeySchema, Per

log = logging.getLogger(__name__)


class FunctionReward(ModelInterface):
    """inference: `input_ids`, `prompt_mask` -> `rewards`. Of the model, only the tokenizer is used, and only for text.

    Args:
        function: "module:function" or "file.py:function", called as ``function(prompt, response) -> float``. A response
            includes its stop token; as text, special tokens are left out.
        reads: "ids" (lists of int), "text", or "auto": ids if the first two parameters are named ``*_ids``.
        timeout_s: time limit for one response.
        concurrency: processes; the function itself need not be thread-safe.
        on_failure: "error" ends the run, "zero" scores the response 0 and logs a warning.
        in_process: call the function in this thread, where a debugger can stop; then nothing can interrupt it.
    """

    def __init__(
        self,
        function: str,
        *,
        reads: Literal["auto", "ids", "text"] = "auto",
        timeout_s: float = 10.0,
        concurrency: int = 2,
        on_failure: Literal["error", "zero"] = "error",
        in_process: bool = False,
    ) -> None:
        self._function = function
        self._on_failure = on_failure
        self._pool: RewardPool = (
            InProcessPool(function, reads, timeout_s)
            if in_process
            else ProcessPool(function, reads, timeout_s, concurrency)
        )

    def inference(self, model: Model, batch: SequenceSample, ctx: CallContext) -> SequenceSample:
        """`rewards`, float32 per sequence, on the device of `input_ids`.

        Raises:
            CallError: the function failed for a response and `on_failure` is "error"; names the sample.
            ConfigError: the function cannot be found.
        """
        tokens = [t.tolist() for sample in batch.sequences("input_ids") for t in sample]
        masks = [m.tolist() for sample in batch.sequences("prompt_mask") for m in sample]
        owners = [(i, n) for i, sample in zip(batch.ids, batch.seqlens["input_ids"]) for n in range(len(sample))]

        def encode(reads: Reads) -> Sequence[Response]:
            return [_response(model, t, m, reads) for t, m in zip(tokens, masks, strict=True)]

        rewards = torch.zeros(len(tokens), dtype=torch.float32)
        try:
            for outcome in self._pool.score(encode) if tokens else ():
                if outcome.failure is not None:
                    self._handle(outcome, owners[outcome.index], ctx, model)
                rewards[outcome.index] = outcome.reward
        except RunError:
            self._pool.close()
            raise
        schema = KeySchema("float32", Per.SEQUENCE)
        return batch.derive("input_ids", {"rewards": (schema, rewards.to(batch["input_ids"].device))})

    def close(self) -> None:
        """End the processes now; otherwise they end with this one. `inference` starts new ones."""
        self._pool.close()

    def _handle(self, outcome: Outcome, owner: tuple[str, int], ctx: CallContext, model: Model) -> None:
        sample_id, response = owner
        where = f"sample {sample_id!r} (response {response})"
        what = f"the reward function {self._function!r} {outcome.failure}"
        if self._on_failure == "zero":
            log.warning("%s at step %d scores %s 0: %s", ctx.call, ctx.step, where, what)
            return
        error = CallError(
            f"{ctx.call} of role {model.name.role!r} at step {ctx.step}, {where}: {what}",
            remedy="Make the function handle it, raise algorithm.reward_timeout_s if it is slow, "
            "or set algorithm.reward_on_failure=zero to score such responses 0.",
            call=ctx.call,
            step=ctx.step,
        )
        error.sample_ids = (sample_id,)
        raise error


def _response(model: Model, tokens: list[int], prompt_mask: list[bool], reads: Reads) -> Response:
    prompt = [t for t, is_prompt in zip(tokens, prompt_mask, strict=True) if is_prompt]
    response = [t for t, is_prompt in zip(tokens, prompt_mask, strict=True) if not is_prompt]
    if reads == "ids":
        return prompt, response
    decode = model.tokenizer.decode
    return decode(prompt, skip_special_tokens=True), decode(response, skip_special_tokens=True)
