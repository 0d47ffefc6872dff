"""Adapters as parameters: where they stand, how they are split, and which layers a user means."""

from __future__ import annotations

from dataclasses import replace

import pytest

from realrl.errors import ConfigError
from realrl.plan.parameters.adapters import is_adapter, resolve_targets, with_adapters
from realrl.plan.parameters.decoder_specs import parameter_specs
from realrl.plan.parameters.shards import check_tp
from realrl.plan.parameters.specs import slice_of
from realrl.plan.parameters.stages import stages_of
from realrl.shape import LoRA
from tests.helpers.layouts import legal_tps, make_shape

ALL = ("q", "k", "v", "o", "gate", "up", "down")
SHAPE = make_shape(n_layers=3, n_heads=4, n_kv_heads=2, hidden_size=8, dtype="bfloat16", attention_bias=True)
ADAPTED = replace(SHAPE, lora=LoRA(3, 6.0, ALL))
SPECS = {spec.name: spec for spec in parameter_specs(ADAPTED)}


def test_adapters_follow_their_layers_and_change_nothing_else() -> None:
    assert tuple(spec for spec in SPECS.values() if not is_adapter(spec.name)) == parameter_specs(SHAPE)
    names = [name.removeprefix("blocks.1.attention.") for name in SPECS if name.startswith("blocks.1.attention.q.")]
    assert names == ["q.weight", "q.bias", "q.lora_a", "q.lora_b"]
    assert [is_adapter(name) for name in SPECS].count(True) == 3 * 7 * 2
    assert {spec.dtype for spec in SPECS.values() if is_adapter(spec.name)} == {"float32"}
    assert with_adapters(parameter_specs(SHAPE), None) == parameter_specs(SHAPE)


@pytest.mark.parametrize("layer", ["attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up"])
def test_a_layer_cut_by_rows_has_a_cut_b(layer: str) -> None:
    weight, a, b = (SPECS[f"blocks.2.{layer}.{part}"] for part in ("weight", "lora_a", "lora_b"))
    assert (a.shape, b.shape) == ((3, 8), (weight.shape[0], 3))
    assert (a.sharded_dim, a.is_tp_partial) == (None, True)
    for tp_size in (1, 2, 4):
        for tp_rank in range(tp_size):
            assert slice_of(b, tp_rank, tp_size)[0] == slice_of(weight, tp_rank, tp_size)[0]
            assert slice_of(a, tp_rank, tp_size) == ((0, 3), (0, 8))


@pytest.mark.parametrize("layer", ["attention.o", "mlp.down"])
def test_a_layer_cut_by_columns_has_a_cut_a(layer: str) -> None:
    weight, a, b = (SPECS[f"blocks.0.{layer}.{part}"] for part in ("weight", "lora_a", "lora_b"))
    assert (a.shape, b.shape) == ((3, weight.shape[1]), (8, 3))
    assert (b.sharded_dim, b.is_tp_partial) == (None, True)
    for tp_size in (1, 2, 4):
        for tp_rank in range(tp_size):
            assert slice_of(a, tp_rank, tp_size)[1] == slice_of(weight, tp_rank, tp_size)[1]
            assert slice_of(b, tp_rank, tp_size) == ((0, 8), (0, 3))


def test_stages_and_tensor_parallel_sizes_are_those_of_the_model() -> None:
    """A saved model is cut into files by its stages, with adapters or without."""
    for lora in (LoRA(1, 1.0, ("q",)), LoRA(500, 1.0, ALL)):
        adapted = parameter_specs(replace(SHAPE, lora=lora))
        assert legal_tps(adapted, 8) == legal_tps(parameter_specs(SHAPE), 8) == [1, 2, 4]
        check_tp(adapted, 2)
        for pp in (1, 2, 3):
            assert stages_of(adapted, pp) == stages_of(parameter_specs(SHAPE), pp)


@pytest.mark.parametrize(
    ("wanted", "meant"),
    [
        (["all-linear"], ALL),
        (["v", "q"], ("q", "v")),
        (["v_proj", "q_proj", "q"], ("q", "v")),
        (["down_proj", "gate_proj", "up_proj", "o_proj", "k_proj"], ("k", "o", "gate", "up", "down")),
        (["c_attn", "c_proj", "c_fc"], ("q", "k", "v", "o", "up", "down")),
    ],
)
def test_targets_by_our_names_and_by_others(wanted: list[str], meant: tuple[str, ...]) -> None:
    assert resolve_targets(wanted, parameter_specs(SHAPE), role="actor") == meant


def test_a_target_that_matches_nothing() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_targets(["q", "qproj"], parameter_specs(SHAPE), role="actor")
    message = str(caught.value)
    assert "models.actor.lora.targets: 'qproj' matches no layer of the model of role 'actor'" in message
    assert "Did you mean 'q_proj'" in message
    assert "It has q, k, v, o, gate, up, down; all-linear means all of them." in message
    without_gate = [spec for spec in parameter_specs(SHAPE) if ".gate." not in spec.name]
    assert resolve_targets(["all-linear"], without_gate, role="actor") == ("q", "k", "v", "o", "up", "down")
    with pytest.raises(ConfigError, match=r"'gate' matches no layer"):
        resolve_targets(["gate"], without_gate, role="actor")
    with pytest.raises(ConfigError, match=r"'norm' matches no layer"):
        resolve_targets(["norm"], parameter_specs(SHAPE), role="actor")
