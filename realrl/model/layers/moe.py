"""A mixture of experts in the place of a block's MLP, on packed tokens.

Shapes: T tokens, H hidden, E experts, k of them per token, I an expert's inner size (this rank's part of it in a
tensor-parallel group), S sequences. A slot is one (token, chosen expert) pair; there are T * k.

    x [T, H] ─router─► probabilities [T, E] ─top k─► weights [T, k]
       └──dispatch──► slots by expert [T * k, H] ─gate, up, weight, down─► [T * k, H] ──combine──► [T, H]

Slots are sorted by expert and each expert multiplies all of its slots at once. A token's slots are added up in the
order of its choice, forward and backward: nothing depends on which other tokens share the batch, or on atomic adds.

Numbers of slots stay where they are computed: on an accelerator one grouped product in bfloat16 multiplies the slots
of all experts (`torch.nn.functional.grouped_mm`), and the host waits for nothing. On a CPU, where reading them is free,
and for operands that the grouped product refuses, each expert has a product of its own.

Under tensor parallelism every expert is cut like the dense MLP (gate and up by rows, down by columns) and the router is
whole on every rank: all ranks see all rows and route alike. A rank computes the summand of its own inner units in the
gradient of a weight, and so of the router; see `realrl.model.decoder.Decoder.tp_partial_gradients`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from realrl.cpu import linear, matmul
from realrl.model.parallel import TensorParallel
from realrl.shape import MoEConfig

_GROUPED_ALIGN = 16  # bytes


@dataclass(frozen=True)
class Groups:
    """Consecutive rows of E groups.

    Attributes:
        ends: int32 [E]: the end of each group, on the device of the rows.
        stay_on_device: True keeps the host from reading `ends`, as far as torch has a grouped product for the operands.
    """

    ends: torch.Tensor
    stay_on_device: bool

    @cached_property
    def rows(self) -> tuple[tuple[int, slice], ...]:
        """(group, its rows) of each group that has any; waits for the device."""
        ends = self.ends.tolist()
        return tuple((e, slice(start, end)) for e, (start, end) in enumerate(zip([0, *ends], ends)) if start < end)


@dataclass(frozen=True)
class Routing:
    """Assignment of tokens to experts, with weights.

    Attributes:
        weights: [T, k], in the dtype of the hidden states, with gradient.
        order: int64 [T * k]: slots (token * k + choice) sorted by expert, then by token.
        inverse: int64 [T * k]: the index of each slot in `order`.
        groups: slots of each expert.
        experts: int64 [T * k]: the expert of each slot in `order`.
    """

    weights: torch.Tensor
    order: torch.Tensor
    inverse: torch.Tensor
    groups: Groups
    experts: torch.Tensor

    @property
    def k(self) -> int:
        """The number of experts of each token."""
        return self.weights.shape[1]

    @property
    def weights_by_slot(self) -> torch.Tensor:
        """[T * k, 1]: `weights` in `order`."""
        return self.weights.flatten().index_select(0, self.order)[:, None]


class LoadBalance:
    """The auxiliary loss of one micro-batch: it pulls routers towards using all experts of a layer equally.

    For one sequence and one layer it is the loss of Fedus et al. 2021 (Switch Transformer, eq. 4-6), with k choices per
    token as in Lepikhin et al. 2020 (GShard):

        L(sequence, layer) = E * sum_e f_e * P_e

    f_e is the number of the sequence's tokens that chose expert e, divided by its tokens, so that f sums to k and a
    perfect balance gives L = k; P_e is the mean probability of e over the sequence's tokens. Only P carries gradient.
    L is averaged over the sequences of the minibatch and over the layers that have experts, and weighted by a
    coefficient. Because no statistic spans sequences or layers, the sum over any micro-batches, data-parallel ranks and
    pipeline stages is the same number. For one sequence and one layer it equals `load_balancing_loss_func` of
    `transformers`; for more, that one multiplies f and P of the whole batch and of all layers together.

    The gradient enters the backward pass at the router itself (`inject`), wherever the layer is: no stage sends its
    auxiliary loss to another.

    Args:
        config: the experts.
        seqlens: tokens of each of the S sequences of the micro-batch; empty ones do not count.
        weight: weight of one sequence in one layer: coefficient / (sequences of the minibatch * layers with experts).
        device: device of the tokens.

    Attributes:
        losses: scalar by layer: L summed over sequences, without gradient.
        loads: [E] by layer: number of slots of each expert.
    """

    def __init__(self, config: MoEConfig, seqlens: Sequence[int], *, weight: float, device: torch.device) -> None:
        lengths = torch.tensor(seqlens, dtype=torch.int64)
        self._n_experts = config.n_experts
        self._weight = weight
        self._sequences = torch.repeat_interleave(torch.arange(len(seqlens)), lengths).to(device)
        self._lengths = lengths.clamp(min=1)[:, None].to(device)
        self.losses: dict[int, torch.Tensor] = {}
        self.loads: dict[int, torch.Tensor] = {}

    def inject(
        self, probs: torch.Tensor, chosen: torch.Tensor, *, layer_index: int, with_gradient: bool
    ) -> torch.Tensor:
        """Return `probs`, through which the auxiliary gradient joins the backward pass; record loss and loads.

        A second call for a layer, as when activations are recomputed, overwrites the record of the first.

        Args:
            probs: float32 or float64 [T, E].
            chosen: int64 [T, k].
            with_gradient: True on one rank of a tensor-parallel group only, because router gradients are added up.
        """
        with torch.no_grad():
            shape = (len(self._lengths), self._n_experts)
            used = probs.new_zeros(probs.shape).scatter_(1, chosen, 1.0)
            slots = probs.new_zeros(shape).index_add_(0, self._sequences, used)
            mean_probs = probs.new_zeros(shape).index_add_(0, self._sequences, probs) / self._lengths
            fractions = slots / self._lengths
            self.losses[layer_index] = (fractions * mean_probs).sum() * self._n_experts
            self.loads[layer_index] = slots.sum(0)
        if not with_gradient or self._weight == 0.0 or not probs.requires_grad:
            return probs
        return _AddGradient.apply(probs, fractions * (self._weight * self._n_experts) / self._lengths, self._sequences)


class MoE(nn.Module):
    """Router and gated experts of one block.

    Parameters ``router.weight`` [E, H], ``experts.gate`` and ``experts.up`` [E, I, H], ``experts.down`` [E, H, I]; and
    where there are biases ``router.bias`` [E], ``experts.gate_bias``, ``experts.up_bias`` [E, I] and
    ``experts.down_bias`` [E, H].

    Args:
        config: the experts.
        make: factory of parameters by name.
        name: name of the module in the whole model.
        layer_index: index of the block in the whole model.
        parallel: the ranks that hold the other slices.
    """

    def __init__(
        self,
        config: MoEConfig,
        make: Callable[[str], nn.Parameter],
        name: str,
        *,
        layer_index: int,
        parallel: TensorParallel,
    ) -> None:
        super().__init__()
        self.config = config
        self.layer_index = layer_index
        self.router = Router(make(f"{name}.router.weight"), make(f"{name}.router.bias") if config.biases else None)
        words = ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")[: 6 if config.biases else 3]
        self.experts = Experts(*(make(f"{name}.experts.{word}") for word in words))
        self._parallel = parallel

    def forward(self, x: torch.Tensor, n_rows: int, balance: LoadBalance | None = None) -> torch.Tensor:
        """Return this rank's rows [rows, H] of the experts' weighted sum.

        Args:
            x: [rows, H]; all `n_rows` rows unless sequence-parallel.
            balance: the auxiliary loss; None outside of training.
        """
        x = self._parallel.enter(x, n_rows)
        inject = None
        if balance is not None:
            is_first = self._parallel.tp_rank == 0

            def inject(probs: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
                return balance.inject(probs, chosen, layer_index=self.layer_index, with_gradient=is_first)

        routing = route(x, self.router.weight, self.config, inject=inject, bias=self.router.bias)
        experts, terms = self.experts, self.terms(self._parallel.tp_rank)
        return self._parallel.leave(mix_experts(x, routing, experts.gate, experts.up, experts.down, terms=terms))

    def terms(self, tp_rank: int, dtype: torch.dtype | None = None) -> ExpertTerms | None:
        """Return the experts' biases, limit and gain; None if they compute SwiGLU of their matrices alone.

        Args:
            tp_rank: the first rank alone adds what is whole on every rank.
            dtype: dtype of the biases; None for their own.
        """
        if not self.config.has_terms:
            return None
        gate, up, down = (
            None if bias is None else bias.to(bias.dtype if dtype is None else dtype)
            for bias in (self.experts.gate_bias, self.experts.up_bias, self.experts.down_bias)
        )
        return ExpertTerms(gate, up, down if tp_rank == 0 else None, self.config.limit, self.config.gain)


class Router(nn.Module):
    """Holds `weight` [E, H] and `bias` [E] or None."""

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias


class Experts(nn.Module):
    """Holds `gate` and `up` [E, I, H] and `down` [E, H, I]; biases [E, I], [E, I] and [E, H], or None."""

    def __init__(self, gate: nn.Parameter, up: nn.Parameter, down: nn.Parameter, *biases: nn.Parameter) -> None:
        super().__init__()
        self.gate, self.up, self.down = gate, up, down
        self.gate_bias, self.up_bias, self.down_bias = biases or (None, None, None)


@dataclass(frozen=True)
class ExpertTerms:
    """Terms of experts beside SwiGLU of their matrices.

    Attributes:
        gate_bias, up_bias: [E, I]; None for none.
        down_bias: [E, H]; None for none.
        limit, gain: see `MoEConfig.limit`.
    """

    gate_bias: torch.Tensor | None
    up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    limit: float | None
    gain: float

    def gated(self, gate: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """The gate's units as the activation takes them, [T * k, I]; `chosen` [T * k, E] has 1 for a slot's expert."""
        gate = gate if self.gate_bias is None else gate + chosen @ self.gate_bias
        return gate if self.limit is None else gate.clamp(max=self.limit)

    def factor(self, up: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """Return the factor of the activated gate, [T * k, I]."""
        up = up if self.up_bias is None else up + chosen @ self.up_bias
        return up if self.limit is None else up.clamp(-self.limit, self.limit) + 1


def route(
    x: torch.Tensor,
    router_weight: torch.Tensor,
    config: MoEConfig,
    *,
    inject: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
    bias: torch.Tensor | None = None,
) -> Routing:
    """Choose the k experts of largest softmax(x W^T); the softmax is over all experts, in float32 or better.

    A token's weights are those probabilities, divided by their sum if the configuration says so (Mixtral always does).

    Args:
        x: [T, H].
        router_weight: [E, H].
        inject: function of probabilities [T, E] and choices [T, k] that returns the probabilities to go on with.
        bias: [E], added to x W^T; None for none.
    """
    probs = linear(x, router_weight, bias).softmax(-1, dtype=torch.promote_types(x.dtype, torch.float32))
    chosen = probs.detach().topk(config.top_k, dim=-1).indices
    if inject is not None:
        probs = inject(probs, chosen)
    weights = probs.gather(1, chosen)
    if config.normalise_top_k:
        weights = weights / weights.sum(-1, keepdim=True)
    experts = chosen.flatten()
    order = experts.argsort(stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    groups = torch.arange(config.n_experts, device=order.device)
    experts = experts[order]
    ends = torch.searchsorted(experts, groups, right=True, out_int32=True)
    return Routing(weights.to(x.dtype), order, inverse, Groups(ends, stay_on_device=x.device.type != "cpu"), experts)


def mix_experts(
    x: torch.Tensor,
    routing: Routing,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    *,
    terms: ExpertTerms | None = None,
) -> torch.Tensor:
    """Sum weight_e * down_e(silu(gate_e(x)) * up_e(x)) over each token's experts e; returns a new [T, H].

    The weight is applied to the inner units, which `down`, being linear, allows: each rank of a tensor-parallel group
    has only a part of them, and models of many experts have fewer inner than hidden units.

    Args:
        x: [T, H].
        gate, up: [E, I, H].
        down: [E, H, I].
        terms: biases and another activation; None for neither.
    """
    groups = routing.groups
    if terms is None:
        inner = _weighted(_Dispatch.apply(x, routing), routing, gate, up)
        return _Combine.apply(grouped_linear(inner, down, groups), routing)
    # a product with ones and zeros, whose gradient, unlike that of a selection, needs no atomic adds
    chosen = F.one_hot(routing.experts, len(gate)).to(x.dtype)
    out = grouped_linear(_weighted(_Dispatch.apply(x, routing), routing, gate, up, (terms, chosen)), down, groups)
    if terms.down_bias is not None:
        out = out + (chosen * routing.weights_by_slot) @ terms.down_bias
    return _Combine.apply(out, routing)


def _weighted(
    slots: torch.Tensor,
    routing: Routing,
    gate: torch.Tensor,
    up: torch.Tensor,
    beside: tuple[ExpertTerms, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Inner units of all slots times their weights, [T * k, I]; without gradients, nothing else is left of them.

    Args:
        slots: [T * k, H].
        beside: what is computed beside SwiGLU, and [T * k, E] with 1 for the expert of a slot.
    """
    groups, weights = routing.groups, routing.weights_by_slot
    if beside is None:
        return F.silu(grouped_linear(slots, gate, groups)) * grouped_linear(slots, up, groups) * weights
    terms, chosen = beside
    gated = terms.gated(grouped_linear(slots, gate, groups), chosen)
    factor = terms.factor(grouped_linear(slots, up, groups), chosen)
    return (F.silu(gated) if terms.limit is None else gated * torch.sigmoid(terms.gain * gated)) * factor * weights


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, groups: Groups) -> torch.Tensor:
    """Multiply the rows of group e by weight[e].T, with gradients.

    Args:
        x: [N, in], rows sorted by group.
        weight: [E, out, in].
        groups: the rows of each of the E groups; they add up to N.
    """
    if groups.stay_on_device and len(x) and x.dtype == weight.dtype and has_grouped_product(weight):
        return F.grouped_mm(x, weight.transpose(1, 2), offs=groups.ends)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _GroupedLinear.apply(x, weight, groups)
    out = x.new_empty(len(x), weight.shape[1])
    for expert, rows in groups.rows:
        out[rows] = linear(x[rows], weight[expert])
    return out


def has_grouped_product(weight: torch.Tensor) -> bool:
    """True if torch multiplies rows of the same dtype, and their gradients, group by group on the device.

    Its kernels read bfloat16 in blocks of 16 bytes, which rows and columns must begin with.

    Args:
        weight: [E, out, in].
    """
    n_elements = _GROUPED_ALIGN // weight.element_size()
    is_aligned = weight.data_ptr() % _GROUPED_ALIGN == 0 and all(n % n_elements == 0 for n in weight.shape[1:])
    return weight.dtype == torch.bfloat16 and is_aligned


class _GroupedLinear(torch.autograd.Function):
    """One node for all experts: a gradient of the whole [E, out, in] is written once, not added up per expert."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, groups: Groups) -> torch.Tensor:
        needs_x, needs_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        ctx.groups, ctx.weight_shape = groups, weight.shape
        out = x.new_empty(len(x), weight.shape[1])
        for expert, rows in groups.rows:
            out[rows] = matmul(x[rows], weight[expert].T)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, _ = ctx.needs_input_grad
        x_grad = grad.new_empty(len(grad), ctx.weight_shape[2]) if needs_x else None
        weight_grad = grad.new_empty(ctx.weight_shape) if needs_weight else None
        if weight_grad is not None:
            for expert in set(range(len(weight_grad))) - {expert for expert, _ in ctx.groups.rows}:
                weight_grad[expert].zero_()
        for expert, rows in ctx.groups.rows:
            if x_grad is not None:
                x_grad[rows] = matmul(grad[rows], weight[expert])
            if weight_grad is not None:
                weight_grad[expert] = matmul(grad[rows].T, x[rows])
        return x_grad, weight_grad, None


def _to_slots(x: torch.Tensor, order: torch.Tensor, k: int) -> torch.Tensor:
    """Copy [T, H] to slots [T * k, H] in the order of experts."""
    return x.index_select(0, order // k)


def _to_tokens(slots: torch.Tensor, inverse: torch.Tensor, k: int) -> torch.Tensor:
    """Sum slots [T * k, H] in the order of experts to [T, H]."""
    return slots.index_select(0, inverse).unflatten(0, (len(inverse) // k, k)).sum(1)


class _Dispatch(torch.autograd.Function):
    """Copies each token to its slots; `_Dispatch` and `_Combine` are each other's gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        ctx.save_for_backward(routing.inverse)
        ctx.k = routing.k
        return _to_slots(x, routing.order, routing.k)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (inverse,) = ctx.saved_tensors
        return _to_tokens(grad, inverse, ctx.k), None


class _Combine(torch.autograd.Function):
    """Sums each token's slots."""

    @staticmethod
    def forward(ctx: Any, slots: torch.Tensor, routing: Routing) -> torch.Tensor:
        ctx.save_for_backward(routing.order)
        ctx.k = routing.k
        return _to_tokens(slots, routing.inverse, routing.k)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (order,) = ctx.saved_tensors
        return _to_slots(grad, order, ctx.k), None


class _AddGradient(torch.autograd.Function):
    """The identity, whose gradient is larger by `table` [S, E], a row for each token of a sequence."""

    @staticmethod
    def forward(ctx: Any, probs: torch.Tensor, table: torch.Tensor, sequences: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(table, sequences)
        return probs.view_as(probs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        table, sequences = ctx.saved_tensors
        return grad + table.index_select(0, sequences), None, None
