"""The load-balancing loss of a minibatch: one normaliser for all micro-batches, ranks and stages, and its statistics.

The normaliser counts the sequences of the whole minibatch, so each router's auxiliary gradient has its final weight
where it is computed (`realrl.model.layers.moe.LoadBalance`), and only statistics are reduced.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from realrl.data.sample import SequenceSample
from realrl.engine.parallel import Parallel
from realrl.engine.train.microbatch import TOKENS
from realrl.model.decoder import Decoder
from realrl.model.layers.moe import LoadBalance


class MinibatchBalance:
    """The auxiliary losses of all micro-batches of one minibatch.

    Args:
        decoder: must have experts.
        parallel: all ranks of the layout construct this together.
        minibatch: this rank's share.
        factor: scale of the gradient, equal to that of the loss before the backward pass; statistics are not scaled.
    """

    def __init__(self, decoder: Decoder, parallel: Parallel, minibatch: SequenceSample, *, factor: float = 1.0) -> None:
        moe = decoder.config.moe
        assert moe is not None
        self._moe = moe
        self._factor = factor
        self._parallel = parallel
        self._device = decoder.device
        self._layers = [i for i in range(decoder.config.n_layers) if decoder.config.experts_of(i) is not None]
        lengths = [n for n in minibatch.flat_seqlens(TOKENS) if n]
        counts = torch.tensor([len(lengths), sum(lengths)], dtype=torch.float64, device=self._device)
        self._n_sequences, self._n_tokens = (max(n, 1.0) for n in parallel.dp.all_reduce_(counts).tolist())
        self._parts: list[LoadBalance] = []

    def of(self, seqlens: Sequence[int]) -> LoadBalance:
        """Auxiliary loss of one micro-batch, for its forward pass."""
        weight = self._factor * self._moe.aux_loss_coef / (self._n_sequences * len(self._layers))
        self._parts.append(LoadBalance(self._moe, seqlens, weight=weight, device=self._device))
        return self._parts[-1]

    def stats(self) -> dict[str, float]:
        """Statistics of the whole minibatch, equal on all ranks; all of them call this after the last forward pass.

        `aux_loss` is the loss before its coefficient, k where all experts are used equally. `expert_load_max` is the
        load of the busiest expert of all layers, relative to that of equal use: 1 at best, n_experts / k at worst.
        """
        loads = torch.zeros(len(self._layers), self._moe.n_experts, dtype=torch.float64, device=self._device)
        loss = torch.zeros(1, dtype=torch.float64, device=self._device)
        for row, layer in enumerate(self._layers):
            for part in self._parts:
                if layer in part.losses:
                    loss += part.losses[layer]
                    loads[row] += part.loads[layer]
        parallel = self._parallel
        sums = parallel.pp.all_reduce_(parallel.dp.all_reduce_(torch.cat((loss, loads.flatten()))))
        equal = self._n_tokens * self._moe.top_k / self._moe.n_experts
        return {
            "aux_loss": sums[0].item() / (self._n_sequences * len(self._layers)),
            "expert_load_max": sums[1:].max().item() / equal,
        }
