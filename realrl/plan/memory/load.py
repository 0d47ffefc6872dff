"""The load of a rank in a call, in the worst case.

The worst case is the longest rows of the dataset in one batch, and every response of maximal length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from operator import sub
from typing import Any

import numpy as np

from realrl.config.schema import GenerationConfig
from realrl.graph.mfc import InterfaceType, MFCDef
from realrl.mesh.device_mesh import Allocation
from realrl.plan.memory.buffers import PREFILL_TOKENS
from realrl.plan.parameters.realloc_portions import Matrix
from realrl.plan.samples.partition import default_n_mbs
from realrl.plan.samples.prefixes import is_worth_sharing

_WITH_END = ("reward_model",)  # interfaces that put an end-of-sequence token behind every sequence
_OF_ANSWERS = ("sft", "dpo", "kto", "ppo_actor")  # those that score answers alone; any other may score all tokens
_WITHOUT_ENTROPY = ("sft", "dpo", "kto")
_POLICY = "ppo_actor"  # whose options say what its loss depends on
_ANSWERS = "metadata"  # the key that brings the answers of prompts
_MOST_STEPS = 8  # lengths of prompts at which it is asked whether they are computed once
_SINGLY = ("kto",)  # those that train on the sequences of a sample one after the other


@dataclass(frozen=True)
class RowLengths:
    """Tokens of the dataset's rows: of each prompt, and of all sequences of the row; the longest sequence of each.

    A row has `n_sequences`, which begin with its prompt. `answers` are those of prompts, with an end-of-sequence token,
    that a policy may learn beside its own responses.
    """

    prompts: Sequence[int]
    rows: Sequence[int]
    sequences: Sequence[int]
    n_sequences: int = 1
    answers: Sequence[int] = ()


@dataclass(frozen=True)
class Load:
    """Samples, tokens and micro-batches of one data-parallel rank in a call, in the worst case.

    Attributes:
        n_seqs: samples of its share of one minibatch; of the call, if it does not train.
        n_tokens: tokens of the largest micro-batch.
        n_scored: tokens of it whose logits are computed.
        n_scorings: products with the head in which that happens: answers that a policy learns have one of their own.
        n_scored_apart: tokens of the larger one of two such products, at most; 0 if there is one.
        n_mbs: micro-batches of a minibatch.
        n_largest: how many of the largest micro-batch have as many tokens as a whole minibatch; None: `n_mbs`.
        n_runs, n_rows, longest_row, prefill_tokens: sizes of generation, see `generation_bytes`.
        n_held: tokens of all its samples of the call, whose rows it has at once; of a call that generates, in the end.
        n_given: tokens of all prompts of a call that generates.
        n_sequences, n_prompt, n_again: sequences of a sample; tokens with which all sequences of a sample begin; and
            tokens of the largest micro-batch, at least, that repeat the prompt of another sequence of their sample. In
            generation `n_prompt` are the tokens of the longest prompt.
        longer: pairs like `n_prompt` and `n_again`, ascending, of samples whose prompt is at least as long as that.
        n_tail: most tokens of a sequence behind its prompt.
        n_samples: samples of the largest micro-batch, at most.
        n_padded: tokens of the largest micro-batch with all its sequences padded to the longest; 0 if all sequences are
            equally long.
        n_waiting: tokens of a prompt whose keys and values are kept apart for responses that have no row yet.
        n_later: responses of a run that begin in a row that another one has left.
        is_filtered: generation draws among some of the tokens only.
        with_entropy: entropies are computed, and `trains_entropy` if the loss may depend on them.
    """

    n_seqs: int
    n_tokens: int = 0
    n_scored: int = 0
    n_mbs: int = 1
    n_largest: float | None = None
    n_runs: int = 0
    n_rows: int = 0
    longest_row: int = 0
    prefill_tokens: int = 0
    n_held: int = 0
    n_given: int = 0
    n_scorings: int = 1
    n_scored_apart: int = 0
    n_sequences: int = 1
    n_prompt: int = 0
    n_again: int = 0
    longer: tuple[tuple[int, int], ...] = ()
    n_tail: int = 0
    n_samples: int = 1
    n_padded: int = 0
    n_waiting: int = 0
    n_later: int = 0
    is_filtered: bool = False
    with_entropy: bool = True
    trains_entropy: bool = True

    @property
    def n_scored_once(self) -> int:
        """Tokens whose logits one product with the head computes, at most."""
        return self.n_scored_apart or self.n_scored

    def at_once(self, n_mbs: int) -> float:
        """Return how many of the largest micro-batch have as many tokens as `n_mbs` different ones, at most.

        Two micro-batches of eight equal samples may have seven and one: together they are 8/7 of the largest.
        """
        return n_mbs if self.n_largest is None else min(n_mbs, self.n_largest)

    def repeated(self, hidden_size: int) -> int:
        """Return the tokens of the largest micro-batch that are not computed where a common prompt is computed once."""
        lengths = (self.longest_row,) * self.n_sequences
        for n_prompt, n_again in ((self.n_prompt, self.n_again), *self.longer):
            if n_prompt and n_again and is_worth_sharing(n_prompt, lengths, hidden_size):
                return n_again
        return 0


def load_of(
    mfc: MFCDef,
    allocation: Allocation,
    rows: RowLengths,
    *,
    generation: GenerationConfig,
    n_responses: int,
    algorithm: Any = None,
) -> Load:
    """Return the worst case of a call on one data-parallel rank.

    Args:
        rows: lengths of the dataset's rows.
        generation: the run's settings.
        n_responses: responses per prompt of the call, if it generates, or of the generate call whose tokens it reads; 0
            for sequences of the dataset.
        algorithm: options of the algorithm; without them the loss may depend on entropies, and not on answers.
    """
    dp, pp = allocation.strategy.dp, allocation.strategy.pp
    n_seqs = math.ceil(mfc.n_seqs / mfc.n_minibatches / dp)
    n_all = math.ceil(mfc.n_seqs / dp)
    n, new = (n_responses, generation.max_new_tokens) if n_responses else (rows.n_sequences, 0)
    end = n if mfc.interface.name in _WITH_END else 0
    prompts = np.array(rows.prompts, dtype=np.int64)
    wholes = n * (prompts + new) + end if n_responses else np.array(rows.rows, dtype=np.int64) + end
    behind, n_apart = [new], 0  # tokens of a sequence behind what `rows` says of it
    if rows.answers and mfc.is_train and getattr(algorithm, "ptx_coef", 0) > 0 and _ANSWERS in mfc.input_keys:
        n, behind = n + 1, [new, *rows.answers]  # an answer is one more sequence of its sample
        n_apart = _largest(wholes, n_all)  # rows without their answers stay beside those with them
        wholes = wholes + prompts + np.array(rows.answers)
    n_held = n_apart + _largest(wholes, n_all)
    if mfc.interface_type is InterfaceType.GENERATE:
        return _generation_load(n_seqs, rows, generation, n_responses, pp, n_held)
    if mfc.interface.name in _SINGLY and mfc.is_train:
        n, wholes = 1, np.array(rows.sequences, dtype=np.int64)
    n_mbs, per_mb, most = _micro_batches(mfc, n_seqs, wholes, pp, end)
    at_most = partial(_at_most, wholes=wholes, n_tokens=per_mb, n_samples=most)
    own = rows.prompts if n_responses else rows.sequences
    longest, shortest = (find(own, default=0) + find(behind) + bool(end) for find in (max, min))
    is_even = shortest == longest and (not n_responses or generation.min_new_tokens == new)
    is_even = is_even and (n_responses > 0 or n * longest == _least(wholes, 0))  # of a row, the longest is known
    steps = _steps(prompts) if n > 1 else []

    n_scored, n_scored_apart, answers = per_mb, 0, wholes
    if mfc.interface.name in _OF_ANSWERS:
        answers = wholes - n * prompts
        n_scored = at_most(answers)
    if n_apart:
        n_scored_apart = max(map(at_most, (np.full_like(wholes, (n - 1) * new), np.array(rows.answers))))
    once, *less = (wholes - (n - 1) * prompts * (prompts >= least) for least in (0, *steps))
    n_once = at_most(once)
    counts = ((wholes, per_mb), (answers, n_scored), (once, n_once))
    return Load(
        n_seqs,
        per_mb,
        min(n_scored, per_mb),
        n_mbs,
        max(1.0, *(_largest(parts, n_seqs) / max(1, n_parts) for parts, n_parts in counts)),
        longest_row=longest,
        n_held=n_held,
        n_scorings=2 if n_apart else 1,
        n_scored_apart=n_scored_apart,
        n_sequences=n,
        n_prompt=_least(prompts, 0),
        n_again=max(0, per_mb - n_once),
        longer=tuple((least, max(0, per_mb - at_most(parts))) for least, parts in zip(steps, less, strict=True)),
        n_tail=max(behind) or max(map(sub, rows.sequences, rows.prompts), default=0),
        n_samples=most,
        n_padded=0 if is_even else min(most * n * longest, math.ceil(per_mb * longest / max(1, shortest))),
        with_entropy=mfc.interface.name not in _WITHOUT_ENTROPY,
        trains_entropy=mfc.interface.name != _POLICY or getattr(algorithm, "entropy_coef", 1) > 0,
    )


def _at_most(parts: Matrix, *, wholes: Matrix, n_tokens: int, n_samples: int) -> int:
    """Return the largest sum of parts of the rows of a micro-batch, by their number and by their tokens."""
    is_there = wholes > 0
    share = float((parts[is_there] / wholes[is_there]).max()) if is_there.any() else 1.0
    return min(_largest(parts, n_samples), math.ceil(n_tokens * share))


def _micro_batches(mfc: MFCDef, n_seqs: int, wholes: Matrix, pp: int, end: int) -> tuple[int, int, int]:
    """Return their number, and the tokens and the most samples of the largest; a sample is never cut.

    `end` tokens of a row are there unless the dataset's sequences end already, and more rows fit without them.
    A part of a balanced partition has the longest samples of an equal share at most, nor more than the mean and the
    longest sample.
    """
    n_tokens, longest, shortest = _largest(wholes, n_seqs), int(wholes.max(initial=0)), max(1, _least(wholes, 1))
    if mfc.max_tokens_per_mb is not None:
        most = min(n_seqs, max(1, mfc.max_tokens_per_mb // max(1, shortest - end)))
        per_mb = min(n_tokens, _largest(wholes, most), max(mfc.max_tokens_per_mb, longest))
        return max(1, math.ceil(n_tokens / max(per_mb, 1))), per_mb, most
    n_mbs = max(1, min(mfc.n_mbs or default_n_mbs(pp, is_train=mfc.is_train), n_seqs))
    most = math.ceil(n_seqs / n_mbs)
    per_mb = min(_largest(wholes, most), math.ceil(n_tokens / n_mbs) + longest)
    return n_mbs, per_mb, min(n_seqs, most + (n_mbs > 1 and shortest < longest))


def _generation_load(
    n_seqs: int, rows: RowLengths, generation: GenerationConfig, n_responses: int, pp: int, n_held: int
) -> Load:
    """Return the load of a division of prompts like `realrl.engine.generate.generator`, and a prefill like `Run`."""
    prompts = np.array(rows.prompts, dtype=np.int64)
    longest = int(prompts.max(initial=0))
    n_runs = max(1, min(pp, n_seqs, generation.max_batch_size))
    n_per_run = math.ceil(n_seqs / n_runs) * n_responses
    n_rows = min(n_per_run, generation.max_batch_size // n_runs)
    n_given = _largest(prompts, n_seqs)
    n_prompts, n_later = math.ceil(n_rows / n_responses), n_per_run - n_rows
    return Load(
        n_seqs,
        n_tokens=n_given + n_seqs * n_responses * generation.max_new_tokens,
        n_runs=n_runs,
        n_rows=n_rows,
        longest_row=longest + generation.max_new_tokens - 1,
        prefill_tokens=min(_largest(prompts, n_prompts), max(PREFILL_TOKENS, longest)),
        n_held=n_held,
        n_given=n_given,
        n_prompt=longest,
        n_waiting=longest if n_responses > 1 and n_later else 0,
        n_later=n_later,
        is_filtered=generation.top_p < 1 or generation.top_k > 0,
    )


def _steps(prompts: Matrix) -> list[int]:
    """Return some lengths of prompts above the shortest, ascending; all of them if they are few."""
    distinct = np.unique(prompts).tolist()
    n = min(_MOST_STEPS, len(distinct) - 1)
    return [distinct[(place + 1) * (len(distinct) - 1) // n] for place in range(n)]


def _least(lengths: Matrix, default: int) -> int:
    return int(lengths.min()) if len(lengths) else default


def _largest(lengths: Matrix, n: int) -> int:
    """Return the tokens of the n longest rows; rows come again where there are fewer."""
    if not len(lengths):
        return 0
    turns, rest = divmod(n, len(lengths))
    return turns * int(lengths.sum()) + int(np.sort(lengths)[len(lengths) - rest :].sum())
