"""Responses generated so far, in host memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from realrl.algo.api import GenerationResult
from realrl.cpu import SampledTokens


class Responses:
    """Token and log-probability buffers of all rows of a call.

    Attributes:
        n_tokens: int64 [n_rows], length of each response so far.

    Args:
        n_rows: number of responses.
        max_new_tokens: largest length of a response.
        stop_ids: tokens that end a response.
    """

    def __init__(self, n_rows: int, max_new_tokens: int, stop_ids: Sequence[int]) -> None:
        self.n_tokens = np.zeros(n_rows, dtype=np.int64)
        self._tokens = np.zeros((n_rows, max_new_tokens), dtype=np.int64)
        self._logprobs = np.zeros((n_rows, max_new_tokens), dtype=np.float32)
        self._policy_logprobs = np.zeros((n_rows, max_new_tokens), dtype=np.float32)
        self._stopped = np.zeros(n_rows, dtype=np.bool_)
        self._stop_ids = np.array(stop_ids, dtype=np.int64)

    def newest(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The last token of each row; every row must have one."""
        return self._tokens[rows, self.n_tokens[rows] - 1]

    def append(self, rows: npt.NDArray[np.int64], sampled: SampledTokens) -> npt.NDArray[np.bool_]:
        """Add one token to each row; returns True for rows that are finished, by a stop token or by length."""
        tokens = sampled.tokens.cpu().numpy()
        positions = self.n_tokens[rows]
        self._tokens[rows, positions] = tokens
        self._logprobs[rows, positions] = sampled.logprobs.cpu().numpy()
        self._policy_logprobs[rows, positions] = sampled.policy_logprobs.cpu().numpy()
        self.n_tokens[rows] += 1
        self._stopped[rows] = (tokens[:, None] == self._stop_ids).any(axis=1)
        return self._stopped[rows] | (self.n_tokens[rows] == self._tokens.shape[1])

    def collect(self) -> GenerationResult:
        """All rows in order, as CPU tensors of their own."""
        lengths = self.n_tokens.tolist()
        return GenerationResult(
            responses=_rows(self._tokens, lengths),
            logprobs=_rows(self._logprobs, lengths),
            policy_logprobs=_rows(self._policy_logprobs, lengths),
            truncated=(~self._stopped).tolist(),
        )


def _rows(values: npt.NDArray[np.int64] | npt.NDArray[np.float32], lengths: Sequence[int]) -> list[torch.Tensor]:
    return [torch.tensor(row[:length]) for row, length in zip(values, lengths, strict=True)]
