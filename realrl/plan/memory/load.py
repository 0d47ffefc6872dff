"""The load of a rank in a call, in the worst case.

The worst case is the longest rows of the dataset in one batch, and every response of maximal length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from realrl.config.schema import GenerationConfig
from realrl.graph.mfc import InterfaceType, MFCDef
from realrl.mesh.device_mesh import Allocation
from realrl.plan.memory.buffers import PREFILL_TOKENS
from realrl.plan.samples.partition import default_n_mbs


@dataclass(frozen=True)
class RowLengths:
    """Tokens of the dataset's rows: of each prompt, and of all sequences of the row."""

    prompts: Sequence[int]
    rows: Sequence[int]
    sequences: Sequence[int]


@dataclass(frozen=True)
class Load:
    """Samples, tokens and micro-batches of one data-parallel rank in a call, in the worst case.

    Attributes:
        n_seqs: samples of its share of one minibatch; of the call, if it does not train.
        n_tokens: tokens of the largest micro-batch.
        n_scored: tokens of it whose logits are computed.
        n_mbs: micro-batches of a minibatch.
        n_runs, n_rows, longest_row, prefill_tokens: sizes of generation, see `generation_bytes`.
    """

    n_seqs: int
    n_tokens: int = 0
    n_scored: int = 0
    n_mbs: int = 1
    n_runs: int = 0
    n_rows: int = 0
    longest_row: int = 0
    prefill_tokens: int = 0


def load_of(
    mfc: MFCDef, allocation: Allocation, rows: RowLengths, *, generation: GenerationConfig, n_responses: int
) -> Load:
    """Return the worst case of a call on one data-parallel rank.

    Args:
        rows: lengths of the dataset's rows.
        generation: the run's settings.
        n_responses: responses per prompt of the call, if it generates, or of the generate call whose tokens it reads; 0
            for sequences of the dataset.
    """
    dp, pp = allocation.strategy.dp, allocation.strategy.pp
    n_seqs = math.ceil(mfc.n_seqs / mfc.n_minibatches / dp)
    if mfc.interface_type is InterfaceType.GENERATE:
        return _generation_load(n_seqs, rows, generation, n_responses, pp)
    new = generation.max_new_tokens
    if n_responses:
        n_tokens = n_responses * (_largest(rows.prompts, n_seqs) + n_seqs * new)
        longest, n_scored = max(rows.prompts, default=0) + new, n_seqs * n_responses * new
        whole = n_responses * longest
    else:
        n_tokens = _largest(rows.rows, n_seqs)
        longest, n_scored = max(rows.sequences, default=0), n_tokens
        whole = max(rows.rows, default=0)
    n_mbs, per_mb = _micro_batches(mfc, n_seqs, n_tokens, whole, pp)
    return Load(n_seqs, per_mb, min(n_scored, math.ceil(n_scored * per_mb / max(n_tokens, 1))), n_mbs, 0, 0, longest)


def _micro_batches(mfc: MFCDef, n_seqs: int, n_tokens: int, whole: int, pp: int) -> tuple[int, int]:
    """Return their number, and the tokens of the largest; a sample, of at most `whole` tokens, is never cut."""
    if mfc.max_tokens_per_mb is not None:
        per_mb = min(n_tokens, max(mfc.max_tokens_per_mb, whole))
        return max(1, math.ceil(n_tokens / max(per_mb, 1))), per_mb
    n_mbs = max(1, min(mfc.n_mbs or default_n_mbs(pp, is_train=mfc.is_train), n_seqs))
    return n_mbs, min(n_tokens, max(math.ceil(n_tokens / n_mbs), whole))


def _generation_load(n_seqs: int, rows: RowLengths, generation: GenerationConfig, n_responses: int, pp: int) -> Load:
    """Return the load of a division of prompts like `realrl.engine.generate.generator`, and a prefill like `Run`."""
    longest = max(rows.prompts, default=0)
    n_runs = max(1, min(pp, n_seqs, generation.max_batch_size))
    n_rows = min(math.ceil(n_seqs / n_runs) * n_responses, generation.max_batch_size // n_runs)
    n_prompts = math.ceil(n_rows / n_responses)
    return Load(
        n_seqs,
        n_tokens=_largest(rows.prompts, n_seqs) + n_seqs * n_responses * generation.max_new_tokens,
        n_runs=n_runs,
        n_rows=n_rows,
        longest_row=longest + generation.max_new_tokens - 1,
        prefill_tokens=min(_largest(rows.prompts, n_prompts), max(PREFILL_TOKENS, longest)),
    )


def _largest(lengths: Sequence[int], n: int) -> int:
    """Return the tokens of the n longest rows; rows come again where there are fewer."""
    ordered = sorted(lengths, reverse=True)
    if not ordered:
        return 0
    turns, rest = divmod(n, len(ordered))
    return turns * sum(ordered) + sum(ordered[:rest])
