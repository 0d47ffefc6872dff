"""Results of one forward pass, for losses and inference calls: implements `realrl.algo.api.ForwardOutput`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from realrl.errors import CallError
from realrl.model.decoder import Decoder
from realrl.model.layers.heads import LMHead, ScalarHead
from realrl.model.lm_logprobs import lm_logprobs, top_logprobs


class DecoderOutput:
    """Hidden states of a packed micro-batch; the head is applied on demand, to the selected rows.

    Methods raise CallError if the role has another kind of head.

    Args:
        decoder: its head is used. All ranks of its tensor-parallel group must call the same methods in the same order.
        hidden: [T, H], output of the decoder or of its last stage.
        input_ids: int64 [T].
        seqlens: tokens of each of the S sequences.
        role: for messages.
    """

    def __init__(
        self, decoder: Decoder, hidden: torch.Tensor, input_ids: torch.Tensor, seqlens: Sequence[int], *, role: str
    ) -> None:
        self._head = decoder.head
        self._parallel = decoder.parallel
        self._vocab_size = decoder.config.vocab_size
        self._hidden = hidden
        self._input_ids = input_ids
        self._role = role
        self._has_next = torch.ones(len(input_ids), dtype=torch.bool, device=input_ids.device)
        ends = torch.tensor([n for n in seqlens if n > 0], device=input_ids.device, dtype=torch.int64).cumsum(0) - 1
        self._has_next[ends] = False

    def logprobs(self, temperature: float = 1.0, mask: torch.Tensor | None = None) -> torch.Tensor:
        return self._next_token(temperature, mask, with_entropy=False)[0]

    def logprobs_and_entropy(
        self, temperature: float = 1.0, mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs, entropy = self._next_token(temperature, mask, with_entropy=True)
        assert entropy is not None
        return logprobs, entropy

    def logprobs_of(self, tokens: torch.Tensor, temperature: float, mask: torch.Tensor) -> torch.Tensor:
        head, rows = self._language_head(), self._rows(mask)
        return lm_logprobs(
            self._hidden.index_select(0, rows),
            head,
            tokens,
            temperature=temperature,
            parallel=self._parallel,
        )[0]

    def top_logprobs(self, k: int, temperature: float, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        head, hidden = self._language_head(), self._hidden.index_select(0, self._rows(mask))
        return top_logprobs(
            hidden,
            head,
            min(k, self._vocab_size),
            temperature=temperature,
            vocab_size=self._vocab_size,
            parallel=self._parallel,
        )

    def scores(self) -> torch.Tensor:
        if not isinstance(self._head, ScalarHead):
            raise CallError(
                f"role {self._role!r} predicts tokens and has no scores",
                remedy='Declare it with head="value" or "reward".',
            )
        return self._head(self._hidden)

    def _next_token(
        self, temperature: float, mask: torch.Tensor | None, *, with_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        head, rows = self._language_head(), self._rows(mask)
        logprobs, entropy = lm_logprobs(
            self._hidden.index_select(0, rows),
            head,
            self._input_ids[rows + 1],
            temperature=temperature,
            with_entropy=with_entropy,
            parallel=self._parallel,
        )
        if mask is None:
            return logprobs, entropy
        spread = None if entropy is None else _spread(entropy, mask)
        return _spread(logprobs, mask), spread

    def _language_head(self) -> LMHead:
        if not isinstance(self._head, LMHead):
            raise CallError(
                f"role {self._role!r} gives scores and has no log-probabilities", remedy='Declare it with head="lm".'
            )
        return self._head

    def _rows(self, mask: torch.Tensor | None) -> torch.Tensor:
        """Indices of the tokens that the selected transitions start from."""
        rows = self._has_next.nonzero()[:, 0]
        if mask is None:
            return rows
        if mask.shape != rows.shape:
            raise CallError(f"a mask for role {self._role!r} has {len(mask)} rows, not {len(rows)} transitions")
        return rows[mask]


def _spread(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Put the values where the mask is True, 0 elsewhere."""
    return values.new_zeros(mask.shape).masked_scatter(mask, values)
