"""Experts on packed tokens: against a plain loop, `transformers`' auxiliary loss, and under every cut of a batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from realrl.errors import ConfigError
from realrl.model.decoder import Decoder
from realrl.model.init import random_model
from realrl.model.layers.attention import PackedAttention
from realrl.model.layers.moe import Groups, LoadBalance, MoE, grouped_linear, mix_experts, route
from realrl.model.lora import add_adapters
from realrl.plan.parameters.adapters import is_adapter, resolve_targets
from realrl.plan.parameters.decoder_specs import parameter_specs
from realrl.shape import DecoderConfig, LoRA, MoEConfig

HIDDEN, INNER = 16, 8  # grouped products want multiples of 8
MOE = MoEConfig(n_experts=5, top_k=2, intermediate_size=INNER, aux_loss_coef=0.1)
CONFIG = DecoderConfig(61, 16, 3, 4, 2, 4, 20, moe=replace(MOE, dense_layers=(1,)))


def weights(seed: int = 0, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Router, gate, up and down, none of them small."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(5, HIDDEN), (5, INNER, HIDDEN), (5, INNER, HIDDEN), (5, HIDDEN, INNER)]
    return [(torch.randn(shape, generator=generator) * 0.5).to(dtype).requires_grad_() for shape in shapes]


def tokens(n: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(n, HIDDEN, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


def compute(x: torch.Tensor, params: list[torch.Tensor], config: MoEConfig) -> torch.Tensor:
    return mix_experts(x, route(x, params[0], config), *params[1:])


def by_token(x: torch.Tensor, params: list[torch.Tensor], config: MoEConfig) -> torch.Tensor:
    """The definition, in a loop."""
    router, gate, up, down = params
    rows = []
    for token in x:
        probs = (router @ token).softmax(0)
        top, chosen = probs.topk(config.top_k)
        top = top / top.sum() if config.normalise_top_k else top
        parts = [w * (down[e] @ (F.silu(gate[e] @ token) * (up[e] @ token))) for w, e in zip(top, chosen, strict=True)]
        rows.append(torch.stack(parts).sum(0))
    return torch.stack(rows)


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize(("n_tokens", "top_k"), [(17, 2), (1, 2), (6, 1), (9, 5)])
def test_experts_equal_a_loop_over_tokens_forward_and_backward(n_tokens: int, top_k: int, normalise: bool) -> None:
    config = replace(MOE, top_k=top_k, normalise_top_k=normalise)
    direction = torch.randn(n_tokens, HIDDEN, generator=torch.Generator().manual_seed(2))
    results = []
    for function in (compute, by_token):
        x, params = tokens(n_tokens), weights()
        y = function(x, params, config)
        (y * direction).sum().backward()
        results.append([y.detach(), x.grad, *(p.grad for p in params)])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


def test_an_expert_without_tokens_has_a_gradient_of_zeros_and_no_tokens_are_no_error() -> None:
    x, params = tokens(1), weights()
    compute(x, params, replace(MOE, top_k=1)).sum().backward()
    is_used = torch.stack([params[1].grad[e].any() for e in range(5)])
    assert is_used.sum() == 1
    empty = tokens(0)
    y = compute(empty, params, MOE)
    y.sum().backward()
    assert y.shape == empty.grad.shape == (0, HIDDEN)


def test_without_gradient_the_numbers_are_the_same() -> None:
    x, params = tokens(40), weights()
    with torch.no_grad():
        y = compute(x, params, MOE)
    torch.testing.assert_close(y, compute(x, params, MOE).detach(), atol=1e-6, rtol=1e-6)


def test_bfloat16_stays_bfloat16_and_close_to_float32() -> None:
    x, params = tokens(30, dtype=torch.bfloat16), weights(dtype=torch.bfloat16)
    y = compute(x, params, MOE)
    y.sum().backward()
    assert y.dtype == x.grad.dtype == params[0].grad.dtype == params[1].grad.dtype == torch.bfloat16
    # routed by the bfloat16 logits, which may choose otherwise than float32 ones do
    routing = route(x, params[0], MOE)
    exact = mix_experts(x.float(), replace(routing, weights=routing.weights.float()), *(p.float() for p in params[1:]))
    torch.testing.assert_close(y.float(), exact, atol=0.1, rtol=0.05)


def test_grouped_linear_mixes_no_groups() -> None:
    x, weight = tokens(6), torch.randn(3, 4, HIDDEN)
    expected = torch.cat([x[:2] @ weight[0].T, x[2:] @ weight[2].T])
    groups = Groups(torch.tensor([2, 2, 6], dtype=torch.int32), stay_on_device=False)
    assert groups.rows == ((0, slice(0, 2)), (2, slice(2, 6)))
    torch.testing.assert_close(grouped_linear(x, weight, groups), expected)


# ---------------------------------------------------------------- one product for all experts


@pytest.mark.parametrize(("n_tokens", "top_k"), [(30, 2), (3, 1), (1, 3)])
def test_one_product_for_all_experts_equals_one_for_each(n_tokens: int, top_k: int) -> None:
    config = replace(MOE, top_k=top_k)
    direction = torch.randn(n_tokens, HIDDEN, generator=torch.Generator().manual_seed(2)).bfloat16()
    results = []
    for stay_on_device in (False, True):
        x, params = tokens(n_tokens, dtype=torch.bfloat16), weights(dtype=torch.bfloat16)
        routing = route(x, params[0], config)
        groups = replace(routing.groups, stay_on_device=stay_on_device)
        y = mix_experts(x, replace(routing, groups=groups), *params[1:])
        (y * direction).sum().backward()
        assert ("rows" in vars(groups)) != stay_on_device, "the host has read the groups, or has not"
        results.append([y.detach(), x.grad, *(p.grad for p in params)])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("frozen", [False, True])
def test_nothing_of_the_experts_is_read_by_the_host(frozen: bool) -> None:
    """On torch's meta device, which has no numbers, whoever asks for one gets an error."""
    x = torch.empty(30, HIDDEN, dtype=torch.bfloat16, device="meta", requires_grad=not frozen)
    params = [p.detach().to("meta").requires_grad_(not frozen) for p in weights(dtype=torch.bfloat16)]
    y = compute(x, params, MOE)
    assert (y.shape, y.dtype, y.device) == (x.shape, x.dtype, x.device)
    if not frozen:
        y.sum().backward()
        assert [p.grad.shape for p in params] == [p.shape for p in params]


@pytest.mark.parametrize(("dtype", "inner"), [(torch.float32, 8), (torch.bfloat16, 7)])
def test_what_the_grouped_product_refuses_is_multiplied_expert_by_expert(dtype: torch.dtype, inner: int) -> None:
    x, weight = tokens(6, dtype=dtype).detach(), torch.randn(3, inner, HIDDEN).to(dtype)
    groups = Groups(torch.tensor([2, 2, 6], dtype=torch.int32), stay_on_device=True)
    expected = torch.cat([x[:2] @ weight[0].T, x[2:] @ weight[2].T])
    torch.testing.assert_close(grouped_linear(x, weight, groups), expected)


# ---------------------------------------------------------------- auxiliary loss


def injected(logits: torch.Tensor, seqlens: list[int], config: MoEConfig, weight: float) -> tuple[float, torch.Tensor]:
    """The loss and its gradient with respect to router logits, nothing else having a gradient."""
    logits = logits.detach().requires_grad_()
    balance = LoadBalance(config, seqlens, weight=weight, device=torch.device("cpu"))
    probs = logits.softmax(-1)
    probs = balance.inject(probs, probs.topk(config.top_k).indices, layer_index=0, with_gradient=True)
    (probs * 0.0).sum().backward()
    assert logits.grad is not None
    return float(balance.losses[0]), logits.grad


def loss_of_transformers(logits: torch.Tensor, n_experts: int, top_k: int) -> torch.Tensor:
    """Imported when called: every process that collects tests would load the modelling code otherwise."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    return load_balancing_loss_func((logits,), n_experts, top_k)


@given(n_tokens=st.integers(1, 40), top_k=st.integers(1, 5), seed=st.integers(0, 99))
def test_one_sequence_has_the_loss_and_gradient_of_transformers(n_tokens: int, top_k: int, seed: int) -> None:
    logits = torch.randn(n_tokens, 5, generator=torch.Generator().manual_seed(seed), requires_grad=True)
    expected = loss_of_transformers(logits, 5, top_k)
    (0.3 * expected).backward()
    loss, gradient = injected(logits, [n_tokens], replace(MOE, top_k=top_k), 0.3)
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(gradient, logits.grad, atol=1e-6, rtol=1e-4)


@given(lengths=st.lists(st.integers(0, 9), min_size=2, max_size=6), data=st.data())
def test_loss_and_gradient_do_not_depend_on_how_sequences_are_cut(lengths: list[int], data: st.DataObject) -> None:
    logits = torch.randn(sum(lengths), 5, generator=torch.Generator().manual_seed(0))
    loss, gradient = injected(logits, lengths, MOE, 0.3)
    cut = data.draw(st.integers(1, len(lengths) - 1))
    parts = zip(logits.split([sum(lengths[:cut]), sum(lengths[cut:])]), (lengths[:cut], lengths[cut:]), strict=True)
    losses, gradients = zip(*(injected(part, lens, MOE, 0.3) for part, lens in parts), strict=True)
    assert sum(losses) == pytest.approx(loss, rel=1e-5, abs=1e-6)
    torch.testing.assert_close(torch.cat(gradients), gradient, atol=1e-7, rtol=1e-5)


def test_equal_use_is_the_least_and_one_expert_for_all_the_greatest() -> None:
    config = replace(MOE, n_experts=4, top_k=1)
    balanced, _ = injected(torch.eye(4) * 50, [4], config, 1.0)
    collapsed, _ = injected(torch.eye(4)[[0] * 4] * 50, [4], config, 1.0)
    assert balanced == pytest.approx(1.0, rel=1e-4)
    assert collapsed == pytest.approx(4.0, rel=1e-4)


def test_a_decoder_adds_the_auxiliary_gradient_of_each_layer_with_experts() -> None:
    """The gradient that is injected on the way is that of the loss written out, whatever is recomputed."""
    seqlens = [5, 0, 9, 1]
    ids = torch.randint(0, 61, (15,), generator=torch.Generator().manual_seed(3))
    decoder = random_model(CONFIG, seed=1)
    with torch.no_grad():
        for p in decoder.parameters():
            p.mul_(4.0)

    def hidden(balance: LoadBalance | None) -> torch.Tensor:
        positions = torch.cat([torch.arange(n) for n in seqlens])
        return decoder.forward_stage(ids, positions, PackedAttention(seqlens), balance=balance)

    def gradients() -> dict[str, torch.Tensor]:
        found = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in decoder.named_parameters()}
        decoder.zero_grad()
        return found

    written_out(decoder, hidden, seqlens).backward()
    expected = gradients()
    assert expected["blocks.0.mlp.router.weight"].any()
    assert expected["blocks.2.mlp.router.weight"].any()
    for decoder.activation_checkpointing in (False, True):
        balance = LoadBalance(MOE, seqlens, weight=0.7, device=torch.device("cpu"))
        (hidden(balance) * 0.0).sum().backward()
        for name, gradient in gradients().items():
            torch.testing.assert_close(gradient, expected[name], atol=1e-5, rtol=1e-4, msg=name)
        assert sorted(balance.losses) == [0, 2]
        assert all(int(load.sum()) == 15 * MOE.top_k for load in balance.loads.values())


def written_out(decoder: Decoder, hidden: object, seqlens: list[int]) -> torch.Tensor:
    """0.7 times the losses of all sequences and layers, from the router logits of a plain forward pass."""
    inputs: dict[int, torch.Tensor] = {}
    experts = [block.mlp for block in decoder.blocks if isinstance(block.mlp, MoE)]
    hooks = [
        mlp.register_forward_pre_hook(lambda module, args: inputs.__setitem__(module.layer_index, args[0]))
        for mlp in experts
    ]
    hidden(None)  # type: ignore[operator]
    for hook in hooks:
        hook.remove()
    total = torch.zeros(())
    for mlp in experts:
        for part in (inputs[mlp.layer_index] @ mlp.router.weight.T).split(seqlens):
            if len(part):
                total = total + 0.7 * loss_of_transformers(part, MOE.n_experts, MOE.top_k)
    return total


# ---------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": 6}, "cannot use 6 of 5 experts"),
        ({"n_experts": 0}, "at least 1"),
        ({"aux_loss_coef": -0.1}, "must be 0 or more"),
        ({"aux_loss_coef": float("nan")}, "must be 0 or more"),
    ],
)
def test_impossible_experts_are_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(MOE, **changes)


def test_dense_layers_are_some_of_the_layers() -> None:
    for dense in ((0, 1, 2), (3,)):
        with pytest.raises(ValueError, match="dense_layers"):
            replace(CONFIG, moe=replace(MOE, dense_layers=dense))
    decoder = Decoder(CONFIG, device=torch.device("meta"))
    assert [isinstance(block.mlp, MoE) for block in decoder.blocks] == [True, False, True]
    assert [name for name, _ in decoder.named_parameters()] == list(decoder.specs)
    for name, p in decoder.named_parameters():
        assert p.shape == decoder.specs[name].shape


def test_adapters_stand_beside_attention_and_plain_mlps_only() -> None:
    decoder = random_model(CONFIG, seed=1)
    ids, positions = torch.arange(7), torch.arange(7)
    before = decoder(ids, positions, PackedAttention([7]))
    targets = resolve_targets(["all-linear"], parameter_specs(CONFIG), role="actor")
    add_adapters(decoder, LoRA(2, 4.0, targets), seed=1)
    adapted = {name.rsplit(".", 1)[0] for name in decoder.specs if is_adapter(name)}
    attention = {f"blocks.{i}.attention.{letter}" for i in range(3) for letter in "qkvo"}
    assert adapted == attention | {f"blocks.1.mlp.{word}" for word in ("gate", "up", "down")}
    torch.testing.assert_close(decoder(ids, positions, PackedAttention([7])), before)


def test_a_model_of_experts_only_has_no_mlp_to_adapt() -> None:
    specs = parameter_specs(replace(CONFIG, moe=MOE))
    with pytest.raises(ConfigError, match="'up' matches no layer of the model of role 'actor'"):
        resolve_targets(["up"], specs, role="actor")
