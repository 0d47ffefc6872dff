"""Parameters between layouts on gloo ranks: every rank ends with its slice of the whole model."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from realrl.engine.device import memory_gb, reuse_host_memory
from realrl.engine.groups import ALONE, Communicator
from realrl.engine.parameters.realloc import Reallocator
from realrl.errors import AllocationError, RunError
from realrl.mesh.device_mesh import ParallelStrategy
from realrl.plan.parameters.decoder_specs import parameter_specs
from realrl.plan.parameters.layout import ParameterLayout, parameter_layout
from realrl.plan.parameters.realloc import ReallocPlan, plan_realloc
from realrl.plan.parameters.specs import ParameterSpec
from realrl.shape import DecoderConfig, LoRA, MoEConfig
from tests.helpers.live_memory import bytes_alive
from tests.helpers.ranks import run_ranks

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]

# tp divides no vocabulary and no MLP; biases, fewer KV heads than tensor ranks, tied and scalar heads all occur
MODELS = (
    DecoderConfig(37, 24, 5, 6, 6, 4, 31, tied_embeddings=True, attention_bias=True),
    DecoderConfig(29, 12, 4, 6, 1, 2, 17, mlp_bias=True, o_bias=True, qk_norm="head", gated_mlp=False),
    DecoderConfig(
        *(23, 16, 4, 4, 2, 4, 19),
        head="value",
        dtype="bfloat16",
        norm="layer",
        learned_positions=True,
        max_positions=13,
        lora=LoRA(3, 6.0, ("q", "v", "o", "up")),
    ),
    DecoderConfig(31, 12, 4, 4, 2, 4, 17, qk_norm="head", moe=MoEConfig(3, 1, 13, dense_layers=(2,))),
)


def whole_model(specs: tuple[ParameterSpec, ...], seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {s.name: torch.randn(s.shape, generator=generator).to(getattr(torch, s.dtype)) for s in specs}


def shard(whole: Tensors, layout: ParameterLayout, rank: int) -> Tensors | None:
    """The rank's slices of the whole model, each in memory of its own."""
    if rank not in layout:
        return None
    return {n: whole[n][tuple(slice(*at) for at in where)].clone() for n, where in layout.slices_of(rank).items()}


def random_layout(specs: tuple[ParameterSpec, ...], world_size: int, rng: random.Random) -> ParameterLayout:
    """Any strategy that fits, on any ranks in any order."""
    while True:
        n_ranks = rng.randint(1, world_size)
        tp = rng.choice([n for n in range(1, n_ranks + 1) if n_ranks % n == 0])
        pp = rng.choice([n for n in range(1, n_ranks // tp + 1) if n_ranks // tp % n == 0])
        ranks = rng.sample(range(world_size), n_ranks)
        vpp = 1 + ranks[0] % 2 if pp == 2 else 1  # drawn from what is drawn anyway, so that seeds keep their meaning
        try:
            return parameter_layout(specs, ParallelStrategy(n_ranks // tp // pp, tp, pp, vpp=vpp), ranks)
        except AllocationError:
            continue


def layout(specs: tuple[ParameterSpec, ...], text: tuple[int, int, int], ranks: tuple[int, ...]) -> ParameterLayout:
    """From (pp, dp, tp) and the ranks in mesh order."""
    pp, dp, tp = text
    return parameter_layout(specs, ParallelStrategy(dp, tp, pp), ranks)


def assert_equal(tensors: Tensors, expected: Tensors | None) -> None:
    assert list(tensors) == list(expected or {})
    for name, tensor in tensors.items():
        assert torch.equal(tensor, expected[name]), name  # type: ignore[index]


def shares_memory(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _cases(world_size: int, seed: int, n_cases: int) -> Iterator[tuple[ParameterLayout, ParameterLayout, int, bool]]:
    rng = random.Random(seed)
    for _ in range(n_cases):
        specs = parameter_specs(rng.choice(MODELS))
        bucket_bytes = rng.choice([8000, 50_000, 64 << 20])
        yield (
            random_layout(specs, world_size, rng),
            random_layout(specs, world_size, rng),
            bucket_bytes,
            rng.random() < 0.7,
        )


def _node_of(number: int) -> Callable[[int], int]:
    """All ranks on one node, or two or three on each."""
    return lambda rank: rank // (1 + number % 3) if number % 3 else 0


def _random_pairs(rank: int, world_size: int, seed: int, n_cases: int) -> int:
    world = Communicator(dist.group.WORLD, world_size, rank)
    n_received = 0
    for number, (source, target, bucket_bytes, alias) in enumerate(_cases(world_size, seed, n_cases)):
        whole = whole_model(source.specs, number)
        held, wanted = shard(whole, source, rank), shard(whole, target, rank)
        plan = plan_realloc(source, target, node_of=_node_of(number))
        there = Reallocator(plan, world, rank, CPU, bucket_bytes=bucket_bytes).run(held, alias=alias)
        assert_equal(there.parameters, wanted)
        assert (there.bytes_received, there.bytes_sent) == (plan.bytes_received(rank), plan.bytes_sent(rank))
        _check_memory(there.parameters, held or {}, source, target, rank, alias)
        _check_union(plan, world, rank, held, wanted)
        plan = plan_realloc(target, source, node_of=_node_of(number))
        back = Reallocator(plan, world, rank, CPU, bucket_bytes=bucket_bytes).run(there.parameters, alias=alias)
        assert_equal(back.parameters, held)
        assert (back.bytes_received, back.bytes_sent) == (plan.bytes_received(rank), plan.bytes_sent(rank))
        n_received += there.bytes_received + back.bytes_received
    return n_received


def _check_memory(
    parameters: Tensors, held: Tensors, source: ParameterLayout, target: ParameterLayout, rank: int, alias: bool
) -> None:
    """A target shard is a view of the source shard exactly if it is a part of it."""
    had = source.slices_of(rank) if rank in source else {}
    for name, tensor in parameters.items():
        inner, outer = target.slices_of(rank)[name], had.get(name)
        is_nested = outer is not None and all(o[0] <= i[0] and i[1] <= o[1] for i, o in zip(inner, outer, strict=True))
        assert (name in held and shares_memory(tensor, held[name])) == (alias and is_nested), name


def _check_union(
    plan: ReallocPlan, world: Communicator, rank: int, held: Tensors | None, wanted: Tensors | None
) -> None:
    """A source that may move shares all common bytes with the target."""
    movable = None if held is None else {name: torch.nn.Parameter(t.clone(), False) for name, t in held.items()}
    result = Reallocator(plan, world, rank, CPU).run(movable, moves_source=True)
    assert_equal(result.parameters, wanted)
    assert_equal({name: p.detach() for name, p in (movable or {}).items()}, held)
    assert bytes_alive((*(movable or {}).values(), *result.parameters.values())) == plan.peak_bytes(rank)


@pytest.mark.parametrize(("world_size", "n_cases"), [(2, 8), (3, 15), (4, 20)])
def test_any_layout_to_any_other_and_back(world_size: int, n_cases: int) -> None:
    received = run_ranks(world_size, _random_pairs, world_size, n_cases)
    assert all(n > 0 for n in received)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_more_layouts(seed: int) -> None:
    run_ranks(6, _random_pairs, 100 + seed, 150, timeout_s=110.0)


NAMED = (
    (((4, 1, 1), (0, 1, 2, 3)), ((1, 4, 1), (0, 1, 2, 3))),
    (((1, 1, 4), (0, 1, 2, 3)), ((1, 2, 2), (0, 2, 1, 3))),  # tp > KV heads; the grouping of the 3D-HybridEngine
    (((1, 2, 2), (0, 1, 2, 3)), ((1, 1, 4), (0, 2, 1, 3))),  # nested: nothing moves
    (((1, 1, 2), (0, 1)), ((1, 1, 2), (2, 3))),  # disjoint
    (((2, 2, 1), (3, 2, 1, 0)), ((2, 1, 2), (0, 1, 2, 3))),
    (((1, 1, 1), (3,)), ((4, 1, 1), (0, 1, 2, 3))),
)


def _named_pairs(rank: int, world_size: int, model: int, bucket_bytes: int) -> list[tuple[int, int, int]]:
    """Per pair: bytes received, the peak measured, and the bytes of the two layouts that exist at the same time."""
    world = Communicator(dist.group.WORLD, world_size, rank)
    specs = parameter_specs(MODELS[model])
    whole = whole_model(specs, 0)
    measured = []
    for source, target in ((layout(specs, *a), layout(specs, *b)) for a, b in NAMED):
        held = shard(whole, source, rank) or {}
        result = Reallocator(plan_realloc(source, target), world, rank, CPU, bucket_bytes=bucket_bytes).run(held)
        assert_equal(result.parameters, shard(whole, target, rank))
        fresh = [t for n, t in result.parameters.items() if n not in held or not shares_memory(t, held[n])]
        measured.append((result.bytes_received, result.peak_bytes, sum(t.nbytes for t in (*held.values(), *fresh))))
    return measured


def test_memory_stays_within_the_two_layouts_and_the_buckets() -> None:
    bucket_bytes = 1000
    for of_rank in run_ranks(4, _named_pairs, 2, bucket_bytes):
        for _, peak, held in of_rank:
            assert held <= peak <= held + 2 * 2 * (bucket_bytes + 3 * 80)  # up to 3 peers, rows of at most 80 bytes
        received, peak, held = of_rank[2]
        assert (received, peak) == (0, held)


def _between_nodes(rank: int, world_size: int, bucket_bytes: int) -> list[tuple[int, int, int]]:
    """Per pair, of two nodes of two: bytes between nodes, the peak measured, and the bytes of both layouts."""
    world = Communicator(dist.group.WORLD, world_size, rank)
    specs = parameter_specs(MODELS[0])
    whole, measured = whole_model(specs, 0), []
    for a, b in (
        (((1, 1, 2), (0, 1)), ((1, 2, 1), (2, 3))),
        (((2, 1, 2), (0, 1, 2, 3)), ((1, 2, 2), (0, 1, 2, 3))),
        (((4, 1, 1), (0, 1, 2, 3)), ((1, 4, 1), (0, 1, 2, 3))),
    ):
        source, target = layout(specs, *a), layout(specs, *b)
        plan = plan_realloc(source, target, node_of=lambda rank: rank // 2)
        held = shard(whole, source, rank) or {}
        result = Reallocator(plan, world, rank, CPU, bucket_bytes=bucket_bytes).run(held)
        assert_equal(result.parameters, shard(whole, target, rank))
        fresh = [t for n, t in result.parameters.items() if n not in held or not shares_memory(t, held[n])]
        both = sum(t.nbytes for t in (*held.values(), *fresh))
        measured.append((plan.bytes_between_nodes, result.peak_bytes, both))
    return measured


def test_what_a_node_lacks_crosses_once_and_relays_keep_nothing() -> None:
    bucket_bytes = 4000
    sizes = {spec.name: spec.num_bytes for spec in parameter_specs(MODELS[0])}
    model_bytes = sum(sizes.values())
    for of_rank in run_ranks(4, _between_nodes, bucket_bytes):
        lacked = model_bytes - sizes["embedding.weight"]  # which is tied: both ends of the pipeline hold it
        assert [n_bytes for n_bytes, _, _ in of_rank] == [model_bytes, lacked, lacked]
        for _, peak, held in of_rank:
            assert held <= peak <= held + 2 * 2 * (bucket_bytes + 4 * 100)  # up to 4 pairs, rows of at most 100 bytes


def _moving_average(rank: int, world_size: int) -> int:
    world, n_relayed = Communicator(dist.group.WORLD, world_size, rank), 0
    for number, (source, target, bucket_bytes, _) in enumerate(_cases(world_size, 7, 12)):
        eta = [0.25, 0.25, 0.0, 1.0][number % 4]
        ours, theirs = whole_model(source.specs, number), whole_model(source.specs, 100 + number)
        held, into = shard(ours, source, rank), shard(theirs, target, rank)
        plan = plan_realloc(source, target, node_of=lambda rank: rank // 2)
        n_relayed += sum(transfer.origin is not None for transfer in plan.transfers) if eta == 0.25 else 0
        result = Reallocator(plan, world, rank, CPU, bucket_bytes=bucket_bytes).run(held, target=into, eta=eta)
        for name, tensor in result.parameters.items():
            assert shares_memory(tensor, into[name])  # type: ignore[index]
        mixed = {n: (eta * ours[n].double() + (1 - eta) * theirs[n].double()).to(ours[n].dtype) for n in ours}
        expected = shard(mixed, target, rank)
        assert list(result.parameters) == list(expected or {})
        for name, tensor in (into or {}).items():
            torch.testing.assert_close(tensor, expected[name])  # type: ignore[index]
        if held is not None:
            assert_equal(held, shard(ours, source, rank))
    return n_relayed


def test_moving_average_in_place() -> None:
    """Also through relays, which pass on what they got and not their averages."""
    assert all(n_relayed > 0 for n_relayed in run_ranks(4, _moving_average))


def _beside_other_work(rank: int, world_size: int) -> None:
    world = Communicator(dist.group.WORLD, world_size, rank)
    specs = parameter_specs(MODELS[0])
    source, target = layout(specs, (1, 1, 3), (0, 1, 2)), layout(specs, (3, 1, 1), (2, 0, 1))
    whole = whole_model(specs, 0)
    realloc = Reallocator(plan_realloc(source, target), world, rank, CPU, bucket_bytes=2000)
    held = shard(whole, source, rank)
    if rank == 0:
        held = {name: torch.nn.Parameter(tensor) for name, tensor in held.items()}  # type: ignore[union-attr]
    under_way = realloc.start(held)
    world.barrier()  # another collective of the same group in between
    first, second = under_way.wait(), under_way.wait()
    assert first.parameters is second.parameters
    assert not any(tensor.requires_grad for tensor in first.parameters.values())
    assert_equal(first.parameters, shard(whole, target, rank))


def test_a_reallocation_under_way_leaves_the_rank_free() -> None:
    run_ranks(3, _beside_other_work)


def _many(rank: int, world_size: int) -> tuple[int, int]:
    """Resident memory after 20 and after 200 reallocations, there and back, of 6 MB of parameters."""
    reuse_host_memory()
    world = Communicator(dist.group.WORLD, world_size, rank)
    specs = parameter_specs(DecoderConfig(1000, 192, 3, 6, 6, 32, 512, tied_embeddings=True))
    source, target = layout(specs, (1, 1, 3), (0, 1, 2)), layout(specs, (3, 1, 1), (2, 1, 0))
    there, back = (
        Reallocator(plan_realloc(a, b), world, rank, CPU, bucket_bytes=1 << 20)
        for a, b in ((source, target), (target, source))
    )
    parameters = expected = shard(whole_model(specs, 0), source, rank) or {}
    after_warm_up = 0.0
    for number in range(100):
        parameters = back.run(there.run(parameters).parameters).parameters
        if number == 9:
            after_warm_up = memory_gb(CPU)
    assert_equal(parameters, expected)
    return int(after_warm_up * 1e9), int(memory_gb(CPU) * 1e9)


def test_200_reallocations_leave_no_memory_behind() -> None:
    for early, late in run_ranks(3, _many):
        assert late - early < 8 << 20  # the heap settles; one shard kept each time would be 400 MB


def _alone(source: tuple[int, int, int] = (1, 1, 1)) -> tuple[Reallocator, Tensors]:
    specs = parameter_specs(MODELS[0])
    only = layout(specs, source, (0,))
    return Reallocator(plan_realloc(only, only), ALONE, 0, CPU), whole_model(specs, 0)


def test_one_rank_aliases_all_or_copies_all() -> None:
    realloc, whole = _alone()
    aliased, copied = realloc.run(whole), realloc.run(whole, alias=False)
    for name, tensor in whole.items():
        assert shares_memory(aliased.parameters[name], tensor)
        assert not shares_memory(copied.parameters[name], tensor)
        assert torch.equal(copied.parameters[name], tensor)
    n_bytes = sum(tensor.nbytes for tensor in whole.values())
    assert (aliased.peak_bytes, copied.peak_bytes) == (n_bytes, 2 * n_bytes)
    assert (aliased.bytes_received, aliased.bytes_sent) == (0, 0)


def _shorter(tensors: Tensors) -> None:
    tensors["norm.weight"] = tensors["norm.weight"][:-1]


def _other_dtype(tensors: Tensors) -> None:
    tensors["norm.weight"] = tensors["norm.weight"].half()


def _absent(tensors: Tensors) -> None:
    del tensors["norm.weight"]


@pytest.mark.parametrize("side", ["source", "target"])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_absent, "worker 0 has no {} tensor 'norm.weight' to reallocate"),
        (
            _shorter,
            "{} tensor 'norm.weight' of worker 0 is float32 [23] on cpu, "
            "but the reallocation was planned for float32 [24] on cpu",
        ),
        (
            _other_dtype,
            "{} tensor 'norm.weight' of worker 0 is float16 [24] on cpu, "
            "but the reallocation was planned for float32 [24] on cpu",
        ),
    ],
)
def test_tensors_that_contradict_the_plan_are_refused(
    spoil: Callable[[Tensors], None], message: str, side: str
) -> None:
    realloc, whole = _alone()
    given = {"source": whole, "target": {name: tensor.clone() for name, tensor in whole.items()}}
    spoil(given[side])
    with pytest.raises(RunError) as caught:
        realloc.run(given["source"], target=given["target"])
    assert caught.value.message == message.format(side)
    with pytest.raises(RunError, match=r"worker 0 has no source tensor 'embedding.weight' to reallocate"):
        realloc.run(None)
