"""The decoder's interface to tensor parallelism: collectives are injected here.

Shapes: T tokens, H hidden, N heads, I the inner size of the MLP, n the ranks of the tensor-parallel group. A block cuts
its matrices twice: q, k, v, gate and up by rows (each rank computes some heads and inner units), o and down by columns
(each rank computes a summand of the output):

    [T, H] ─enter─► [T, H] ──q, k, v or gate, up──► [T, N*D/n] or [T, I/n] ──o or down──► summand [T, H] ─leave─► [T, H]

With sequence parallelism (Korthikanti et al. 2022) everything between `leave` and `enter`, which is norms and
residuals, holds only this rank's rows: ceil(T / n) of them, the last ranks' padded with zeros.
"""

from __future__ import annotations

import torch


class TensorParallel:
    """One rank's part in a tensor-parallel group; this class is a group of one, where every operation is the identity.

    "Rows" are all T where the group is not sequence-parallel.

    Attributes:
        tp_rank: this rank's place in the group.
        tp_size: ranks of the group; 1 where nothing is sharded.
        is_sequence_parallel: True if norms and residuals hold only this rank's rows.
    """

    tp_rank: int = 0
    tp_size: int = 1
    is_sequence_parallel: bool = False

    def n_local_rows(self, n_rows: int) -> int:
        """The rows, padding included, that each rank holds of `n_rows`; pipeline stages hand on as many."""
        return n_rows

    def enter(self, x: torch.Tensor, n_rows: int) -> torch.Tensor:
        """Return all `n_rows` rows from this rank's [rows, H], before layers cut by rows; backward sums over ranks.

        All-reduce of the gradient; sequence-parallel: all-gather, and reduce-scatter of the gradient.
        """
        return x

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """Sum x [T, H] over the group after a layer cut by columns, and return this rank's rows; overwrites `x`.

        All-reduce; sequence-parallel: reduce-scatter, and all-gather of the gradient.
        """
        return x

    def gather_rows(self, x: torch.Tensor, n_rows: int) -> torch.Tensor:
        """Return all `n_rows` rows, before a computation that all ranks do alike; backward keeps this rank's rows."""
        return x

    def reduce_max(self, x: torch.Tensor) -> torch.Tensor:
        """The elementwise maximum over the group, without gradient; may overwrite `x`."""
        return x

    def reduce_sum(self, x: torch.Tensor) -> torch.Tensor:
        """The elementwise sum over the group, without gradient; may overwrite `x`."""
        return x

    def gather_logits(self, logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """Gather logits [T, V] of the whole vocabulary from each rank's part of V, without gradient."""
        return logits


UNSHARDED = TensorParallel()
