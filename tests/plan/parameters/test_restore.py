"""A state that was saved in one layout is read in any other: every element once, from a file that has it."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from realrl.mesh.device_mesh import ParallelStrategy
from realrl.plan.parameters.decoder_specs import parameter_specs
from realrl.plan.parameters.layout import parameter_layout
from realrl.plan.parameters.restore import coordinates, model_digest, plan_restore
from realrl.shape import DecoderConfig, LoRA, MoEConfig

# rows of the vocabulary and of the MLP that nothing divides
SHAPE = DecoderConfig(
    vocab_size=11,
    hidden_size=8,
    n_layers=5,
    n_heads=4,
    n_kv_heads=2,
    head_dim=2,
    intermediate_size=9,
    attention_bias=True,
    o_bias=True,
    qk_norm="head",
    max_positions=16,
)
MODELS = {
    "plain": SHAPE,
    "tied": replace(SHAPE, tied_embeddings=True),
    "one KV head": replace(SHAPE, n_kv_heads=1),
    "experts": replace(SHAPE, moe=MoEConfig(4, 2, 6, dense_layers=(0,))),
    "adapters": replace(SHAPE, lora=LoRA(2, 4.0, ("q", "v", "o", "down"))),
    "value head": replace(SHAPE, head="value", learned_positions=True, norm="layer", qk_norm=None),
}
STRATEGIES = [
    ParallelStrategy(dp, tp, pp) for dp, tp, pp in [(1, 1, 1), (2, 2, 1), (1, 4, 1), (1, 1, 2), (1, 2, 3), (1, 1, 5)]
]


def whole(spec):
    """Every element of the model has a number of its own."""
    seed = sum(spec.name.encode())
    return np.arange(spec.n_elements).reshape(spec.shape) + 1_000_000 * seed


def cut(spec, part):
    return whole(spec)[tuple(slice(start, stop) for start, stop in part)]


@pytest.mark.parametrize("model", MODELS)
def test_every_layout_is_read_in_every_other(model):
    specs = {spec.name: spec for spec in parameter_specs(MODELS[model])}
    for saved, target in itertools.product(STRATEGIES, STRATEGIES):
        written = parameter_layout(tuple(specs.values()), saved, range(saved.n_devices))
        files = {
            (pp, tp): {
                name: cut(specs[name], part)
                for name, part in written.slices_of(written.rank_at(pp_rank=pp, dp_rank=0, tp_rank=tp)).items()
            }
            for pp, tp in coordinates(saved)
        }
        wanted = parameter_layout(tuple(specs.values()), target, range(target.n_devices))
        for pp, tp in coordinates(target):
            plan = plan_restore(tuple(specs.values()), saved, target, (pp, tp))
            expected = wanted.slices_of(wanted.rank_at(pp_rank=pp, dp_rank=target.dp - 1, tp_rank=tp))
            assert list(plan.pieces) == list(plan.shapes) == list(expected)
            for name, pieces in plan.pieces.items():
                assert_filled(plan.shapes[name], pieces, files, name, cut(specs[name], expected[name]))


def assert_filled(shape, pieces, files, name, expected):
    found, n_writes = np.full(shape, -1), np.zeros(shape, int)
    for piece in pieces:
        source = files[piece.source][name]
        assert all(0 <= start < stop <= size for (start, stop), size in zip(piece.read, source.shape, strict=True))
        box = tuple(slice(start, stop) for start, stop in piece.write)
        found[box] = source[tuple(slice(start, stop) for start, stop in piece.read)]
        n_writes[box] += 1
    assert (n_writes == 1).all()
    assert (found == expected).all()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_the_same_layout_reads_its_own_file_alone(model, strategy):
    for at in coordinates(strategy):
        plan = plan_restore(parameter_specs(MODELS[model]), strategy, strategy, at)
        assert plan.sources == (at,)
        for name, (piece,) in plan.pieces.items():
            assert piece.read == piece.write == tuple((0, size) for size in plan.shapes[name])


def test_fewer_files_are_read_than_there_are():
    plan = plan_restore(parameter_specs(SHAPE), ParallelStrategy(1, 1, 5), ParallelStrategy(1, 1, 5), (2, 0))
    assert plan.sources == ((2, 0),)
    halves = plan_restore(
        parameter_specs(replace(SHAPE, head="value")), ParallelStrategy(1, 4, 1), ParallelStrategy(1, 2, 1), (0, 1)
    )
    assert halves.sources == ((0, 1), (0, 2), (0, 3))  # what is replicated comes from the reader's own coordinate


def test_a_digest_tells_models_apart():
    digests = {model_digest(parameter_specs(shape)) for shape in MODELS.values()}
    assert len(digests) == len(MODELS)
    assert model_digest(parameter_specs(SHAPE)) == model_digest(parameter_specs(replace(SHAPE, dtype="bfloat16")))
