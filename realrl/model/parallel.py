"""The decoder's interface to tensor parallelism: collectives are injected here.

Shapes: T tokens, H hidden, N heads, I the inner size of the MLP, n the ranks of the tensor-parallel group. A block cuts
its matrices twice: q, k, v, gate and up by rows (each rank computes some heads and inner units), o and down by columns
(each rank computes a summand of the output):

    [T, H] ─enter─► [T, H] ──q, k, v or gate, up──► [T, N*D/n] or [T, I/n] ──o or down──► summand [T, H] ─leave─► [T, H]

With sequence parallelism (Korthikanti et al. 2022) everything between `leave` and `enter`, which is norms and
residuals, holds only this rank's rows: ceil(T / n) of them, the last ranks' padded with zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


class TensorParallel(Protocol):
    """One rank's part in a tensor-parallel group; "rows" are all T where it is not sequence-parallel."""

    @property
    def tp_rank(self) -> int:
        """This rank's place in the group."""

    @property
    def tp_size(self) -> int:
        """Ranks of the group; 1 where nothing is sharded."""

    @property
    def is_sequence_parallel(self) -> bool:
        """True if norms and residuals hold only this rank's rows."""

    def n_local_rows(self, n_rows: int) -> int:
        """The rows, padding included, that each rank holds of `n_rows`; pipeline stages hand on as many."""

    def enter(self, x: torch.Tensor, n_rows: int) -> torch.Tensor:
        """Return all `n_rows` rows from this rank's [rows, H], before layers cut by rows; backward sums over ranks.

        All-reduce of the gradient; sequence-parallel: all-gather, and reduce-scatter of the gradient.
        """

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """Sum x [T, H] over the group after a layer cut by columns, and return this rank's rows; overwrites `x`.

        All-reduce; sequence-parallel: reduce-scatter, and all-gather of the gradient.
        """

    def gather_rows(self, x: torch.Tensor, n_rows: int) -> torch.Tensor:
        """Return all `n_rows` rows, before a computation that all ranks do alike; backward keeps this rank's rows."""

    def reduce_max(self, x: torch.Tensor) -> torch.Tensor:
        """The elementwise maximum over the group, without gradient; may overwrite `x`."""

    def reduce_sum(self, x: torch.Tensor) -> torch.Tensor:
        """The elementwise sum over the group, without gradient; may overwrite `x`."""

    def gather_logits(self, logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """Gather logits [T, V] of the whole vocabulary from each rank's part of V, without gradient."""


@dataclass(frozen=True)
class Unsharded:
    """A group of one rank: every operation is the identity."""

    tp_rank: int = 0
    tp_size: int = 1
    is_sequence_parallel: bool = False

    def n_local_rows(self, n_rows: int) -> int:
        return n_rows

    def enter(self, x: torch.Tensor, n_rows: int) -> torch.Tensor:
        return x

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def gather_rows(self, x: torch.Tensor, n_rows: int) -> torch.Tensor:
        return x

    def reduce_max(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def reduce_sum(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def gather_logits(self, logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
        return logits


UNSHARDED = Unsharded()
