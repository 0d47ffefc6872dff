"""Choice of the tokens of a micro-batch that are computed: all of them, or shared prefixes only once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from realrl.data.sample import SequenceSample
from realrl.engine.train.microbatch import TOKENS
from realrl.model.decoder import AttentionOp
from realrl.model.layers.attention import PackedAttention
from realrl.model.shared_prefix import SharedPrefixes
from realrl.shape import DecoderConfig


class Packing:
    """Tokens of one micro-batch as the decoder gets them.

    A prefix that sequences of one sample share is computed once, see `realrl.model.shared_prefix`. Exceptions are
    experts, whose load is counted per token, and half precision on a GPU, whose kernel takes whole sequences.

    Args:
        micro_batch: holds `input_ids`, T tokens.

    Attributes:
        input_ids: int64 [rows], the tokens that are computed.
        positions: int64 [rows], position of each in its sequence.
    """

    def __init__(self, micro_batch: SequenceSample, config: DecoderConfig) -> None:
        input_ids = micro_batch[TOKENS]
        self._seqlens = micro_batch.flat_seqlens(TOKENS)
        self._shared: SharedPrefixes | None = None
        if config.moe is None and (input_ids.device.type == "cpu" or config.dtype == "float32"):
            shared = SharedPrefixes(input_ids, micro_batch.seqlens[TOKENS], config.hidden_size)
            self._shared = None if shared.is_trivial else shared
        if self._shared is None:
            self.input_ids, self.positions = input_ids, packed_positions(self._seqlens, input_ids.device)
        else:
            self.input_ids, self.positions = input_ids[self._shared.tokens], self._shared.positions

    @property
    def n_rows(self) -> int:
        """Number of tokens that are computed."""
        return len(self.input_ids)

    def attention(self) -> AttentionOp:
        """Attention of one forward pass and its backward pass."""
        return PackedAttention(self._seqlens) if self._shared is None else self._shared.attention()

    def expand(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, H] -> [T, H], the hidden states of all tokens."""
        return hidden if self._shared is None else hidden.index_select(0, self._shared.expand)


def packed_positions(seqlens: Sequence[int], device: torch.device) -> torch.Tensor:
    """int64 [T]: each token's position in its own sequence."""
    lengths = torch.tensor(seqlens, dtype=torch.int64)
    starts = lengths.cumsum(0) - lengths
    positions = torch.arange(int(lengths.sum())) - torch.repeat_interleave(starts, lengths)
    return positions.to(device, non_blocking=True)
