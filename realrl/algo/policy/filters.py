"""Filters of training samples, chosen by ``algorithm.filter``, and the interface that applies them.

Other samples of the dataset replace the dropped ones within the step, so that training always gets a full batch.
"""

from __future__ import annotations

from collections.abc import Sequence

from realrl.algo.api import CallContext, Model, ModelInterface
from realrl.algo.policy.piece_calls import decisions_of
from realrl.config.policy_options import PolicyOptions
from realrl.data.sample import SequenceSample
from realrl.experiment.pieces import find_piece


def equal_rewards(batch: SequenceSample, options: PolicyOptions) -> Sequence[bool]:
    """Keep samples whose responses earned different rewards; the others have no advantage over each other.

    Yu et al. 2025, "DAPO: an open-source LLM reinforcement learning system at scale", section 3.2, dynamic sampling.
    """
    return [bool((rewards != rewards[:1]).any()) for rewards in batch.samples("rewards")]


class Filter(ModelInterface):
    """inference: the keys that the filter reads, with `rewards` -> `rewards` of the samples that stay."""

    def __init__(self, name: str) -> None:
        self._name, self._filter = name, find_piece("filter", name)

    def inference(self, model: Model, batch: SequenceSample, ctx: CallContext) -> SequenceSample:
        """`rewards` of the samples that stay, in the order of `batch`.

        Raises:
            CallError: the filter did not say yes or no to each sample, or reads a key that it does not declare.
        """
        keep = decisions_of(self._filter, self._name, batch, ctx.algorithm)
        kept = [sample_id for sample_id, stays in zip(batch.ids, keep, strict=True) if stays]
        return batch.select(kept, ("rewards",))
