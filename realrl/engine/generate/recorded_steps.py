"""Decode steps of a batch whose operations are launched as a whole; see `replay`.

Shapes: B rows, S >= B rows with the surplus ones, H hidden, V vocabulary.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from realrl.cpu import KVCache, NewTokens, Sampler
from realrl.engine.generate.network import FusedNetwork
from realrl.engine.generate.replay import Recorder, Replays

CACHE_GROWTH = 128
"""Least growth of the cache in tokens: each time it moves, everything is recorded anew."""


class RecordedSteps:
    """The layers of decode steps and the sampling behind them.

    Surplus rows, up to a number for which there is a record, have token 0 at position 0 of slots that no response
    occupies.

    Args:
        network: this rank's layers, with no other rank beside it in its tensor-parallel group.
        cache: the cache of the batch.
        sampler: sampler of the batch; None where the head is not.
        recorder: maker of the records.
        max_rows: largest number of rows at a time.
        device: device of the network.
    """

    def __init__(
        self,
        network: FusedNetwork,
        cache: KVCache,
        sampler: Sampler | None,
        recorder: Recorder,
        *,
        max_rows: int,
        device: torch.device,
    ) -> None:
        self._network, self._cache, self._sampler = network, cache, sampler
        self._max_rows, self._capacity = max_rows, 0
        self._layers, self._sampling = Replays(recorder), Replays(recorder)
        self._host = torch.zeros(4, max_rows, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._inputs = self._host.to(device)
        config, dtype = network.config, network.dtype
        self._received = torch.zeros(max_rows, config.hidden_size, dtype=dtype, device=device)
        self._hidden = torch.zeros_like(self._received)
        self._logits = torch.zeros(max_rows if sampler else 0, config.vocab_size, dtype=dtype, device=device)
        self._drawn = torch.zeros(4, max_rows, dtype=torch.float64, device=device)
        self._n_rows = self._n_padded = 0
        self._has_early = False

    def begin(
        self,
        tokens: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        uniforms: npt.NDArray[np.float64],
        is_early: npt.NDArray[np.bool_],
    ) -> None:
        """Take the inputs [B] of a step; the one before has ended."""
        self._n_rows, self._n_padded = len(tokens), padded_rows(len(tokens), self._max_rows)
        self._has_early = bool(is_early.any())
        host = self._host.numpy()
        host[:, len(tokens) : self._n_padded] = 0
        for row, values in enumerate((tokens, positions, uniforms.view(np.int64), is_early)):
            host[row, : len(tokens)] = values
        self._inputs.copy_(self._host, non_blocking=True)
        if self._cache.capacity != self._capacity:
            self._layers.forget()
            self._capacity = self._cache.capacity

    def compute(self, x: torch.Tensor | None, chunk: int) -> torch.Tensor:
        """Compute one of this stage's chunks; see `DecodeBatch.compute`. The result is good until the next step."""
        if x is not None:
            self._received[: len(x)] = x
        has_head = self._network.has_head(chunk)
        self._layers.run((chunk, self._n_padded), partial(self._compute, chunk, x is None, has_head))
        return (self._logits if has_head else self._hidden)[: self._n_rows]

    def sample(self) -> torch.Tensor | None:
        """Draw a token for each row from the logits of the step.

        Returns:
            Float64 [3, B]: tokens, log-probabilities and those of the policy. None where a row needs `Sampler.sample`.
        """
        self._sampling.run((self._n_padded, self._has_early), self._draw)
        if self._drawn[0, : self._n_rows].count_nonzero() < self._n_rows:
            return None
        return self._drawn[1:, : self._n_rows]

    def _compute(self, chunk: int, is_first: bool, has_head: bool) -> None:
        network, n = self._network, self._n_padded
        tokens, positions = self._inputs[:2, :n]
        attention = network.attention(self._cache, NewTokens(positions))
        hidden = network.hidden(tokens if is_first else self._received[:n], attention, chunk)
        if has_head:
            self._logits[:n] = network.logits(hidden)
        else:
            self._hidden[:n] = hidden

    def _draw(self) -> None:
        assert self._sampler is not None, "the stage with the head samples"
        n = self._n_padded
        uniforms, is_early = self._inputs[2, :n].view(torch.float64), self._inputs[3, :n].bool()
        drawn, is_settled = self._sampler.draw(self._logits[:n], uniforms, is_early if self._has_early else None)
        results = (is_settled, drawn.tokens, drawn.logprobs, drawn.policy_logprobs)
        for row, values in zip(self._drawn, results, strict=True):
            row[:n] = values


def padded_rows(n_rows: int, max_rows: int) -> int:
    """Return the number of rows, at least `n_rows`, of the records for it: four in each power of two."""
    step = max(1, 1 << max(0, (n_rows - 1).bit_length() - 3))
    return min(max_rows, -(-n_rows // step) * step)
