"""Memory of every device: the invariants of the planner, and formulas against the numbers of their sources."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realrl.config.schema import GenerationConfig
from realrl.graph.mfc import InterfaceType
from realrl.plan.hooks import CallHooks, Offload, Realloc
from realrl.plan.memory.buffers import GRADIENT_BUCKET, SAVE_STAGE
from realrl.plan.memory.formulas.blocks import kept_by_block
from realrl.plan.memory.formulas.generation import generation_bytes
from realrl.plan.memory.formulas.local import Kernels
from realrl.plan.memory.formulas.passes import inference_activations, training_activations
from realrl.plan.memory.load import Load, RowLengths, load_of
from realrl.plan.memory.model import plan_memory
from realrl.plan.memory.optimizer import OptimizerSharing, optimizer_bytes, reduction_bytes
from realrl.plan.memory.overlap import plan_overlap
from realrl.plan.memory.plan import SAVE, Usage, checkpoint_bytes, show_bytes
from realrl.plan.memory.saving import Saves
from realrl.plan.parameters.decoder_specs import parameter_specs
from realrl.shape import LoRA
from tests.plan.memory.examples import (
    GENERATE,
    INFERENCE,
    MODEL,
    N_BYTES,
    ROW,
    ROWS,
    TABLE,
    TRAIN,
    call,
    local,
    mfc,
    place,
    role,
)

STRATEGIES = st.sampled_from(["d8", "t8", "d2t2p2", "d2t4", "t2p4", "t4p2s", "d4p2", "d1", "d2", "t2s"])


# ---------------------------------------------------------------- optimizer


@pytest.mark.parametrize(("stage", "gigabytes"), [(1, 31.4), (2, 16.6), (3, 1.9)])
def test_zero_stages_are_those_of_the_paper(stage, gigabytes):
    """Rajbhandari et al. 2020, figure 1: 7.5B parameters in half precision on 64 ranks, and gradients too."""
    n = 7_500_000_000
    state = optimizer_bytes([n], element_bytes=2, sharing=OptimizerSharing("deepspeed", stage, dp=64))
    total = 2 * n * state.parameters + state.masters + state.moments + state.gradients
    total -= 2 * n // 64 if stage > 1 else 0  # divided gradients are float32 here
    assert round(total / 1e9, 1) == gigabytes


@pytest.mark.parametrize(("element_bytes", "fixed", "divided"), [(2, 6, 12), (4, 8, 8)])
def test_megatron_takes_what_its_documents_say(element_bytes, fixed, divided):
    state = optimizer_bytes([1000], element_bytes=element_bytes, sharing=OptimizerSharing("megatron", 1, dp=4))
    total = element_bytes * 1000 + state.masters + state.moments + state.gradients
    assert total == 1000 * (fixed + divided / 4)
    assert state.holds_gradients


def test_native_optimizer():
    fp32 = optimizer_bytes([10], element_bytes=4)
    assert (fp32.masters, fp32.moments, fp32.gradients) == (0, 80, 40)
    bf16 = optimizer_bytes([10], element_bytes=2)
    assert (bf16.masters, bf16.moments, bf16.gradients) == (40, 80, 40)
    shared = optimizer_bytes([1000, 10], element_bytes=2, sharing=OptimizerSharing(zero_stage=1, dp=4))
    n = 256 + 10  # slices begin at multiples of 64 elements, so that the first rank has more than its share
    assert (shared.masters, shared.moments, shared.gradients) == (4 * n, 8 * n, 4040)
    with pytest.raises(ValueError, match="unknown training backend 'fsdp'"):
        optimizer_bytes([10], element_bytes=2, sharing=OptimizerSharing("fsdp"))


def test_gradients_of_one_rank_are_reduced_in_place():
    assert reduction_bytes(1000, 10, dp=1) == 0
    assert reduction_bytes(1000, 10, dp=2) == 1000
    assert reduction_bytes(1 << 40, 10, dp=2) == GRADIENT_BUCKET + 10


# ---------------------------------------------------------------- activations


def test_what_a_block_keeps():
    h, q, k, inner = 32, 32, 16, 48
    floats = 2 * h + 2 * h + 3 * q + 2 * k + 4 * inner  # attention's results once by groups, and joined
    assert kept_by_block(local(), 0, Kernels()) == 4 * (floats + 2 + 8)  # scale of each norm, a normaliser per head
    assert kept_by_block(local(), 0, Kernels(fused_norms=False)) == 4 * (floats + 2 * h + 2 + 8)
    plain = replace(MODEL, gated_mlp=False)
    assert kept_by_block(local(plain), 0, Kernels()) == 4 * (floats - 2 * inner + 2 + 8)


def test_checkpointing_keeps_the_input_of_each_block_and_one_block():
    load, sizes = Load(1, 1000, 1), {"n_tokens": 1000, "n_in_flight": 1, "kernels": Kernels()}
    deep = replace(MODEL, n_layers=40)
    whole, again = (max(training_activations(local(deep), load, checkpointing=c, **sizes)) for c in (False, True))
    assert again < whole / 8
    one_more = max(training_activations(local(replace(MODEL, n_layers=41)), load, checkpointing=True, **sizes))
    assert one_more - again == 1000 * 32 * 4


def test_an_earlier_stage_holds_more_micro_batches():
    def held(n):
        sizes = {"n_tokens": 100, "n_in_flight": n, "checkpointing": False}
        return max(training_activations(local(), Load(1, 100, 50, n_mbs=2), **sizes, kernels=Kernels()))

    assert held(3) - held(2) == held(2) - held(1) > 100 * 4 * kept_by_block(local(), 0, Kernels()) - 1


@given(st.integers(0, 500), st.integers(1, 500), st.booleans(), st.booleans())
def test_more_tokens_never_take_less(n, more, checkpointing, fused):
    kernels = Kernels(fused_norms=fused, whole_logits=fused)
    few, many = (
        (
            *training_activations(
                local(), Load(1, t, t), n_tokens=t, n_in_flight=1, checkpointing=checkpointing, kernels=kernels
            ),
            inference_activations(local(), Load(1, t, t), n_again=0, kernels=kernels),
            generation_bytes(
                local(), Load(1, n_runs=1, n_rows=t, longest_row=t, prefill_tokens=t), kernels=kernels
            ).cache,
        )
        for t in (n, n + more)
    )  # fmt: skip
    assert all(a <= b for a, b in zip(few, many, strict=True))


def test_cache_and_packed_weights():
    load = Load(1, n_runs=1, n_rows=3, longest_row=7, prefill_tokens=7)
    made = generation_bytes(local(), load, kernels=Kernels())
    layer = 3 * 16 * 7 * 4
    assert made.cache == 2 * 4 * layer + layer
    joined = 4 * (32 + 2 * 16) * 32 + 4 * 2 * 48 * 32
    assert made.weights == 4 * joined
    packed = generation_bytes(local(), load, kernels=Kernels(packs_weights=True))
    fused, other = (
        generation_bytes(local(), load, kernels=Kernels(fused_heads=multiple))
        for multiple in (MODEL.head_dim, MODEL.head_dim + 1)
    )
    assert fused.cache == 2 * 4 * layer  # it does not grow
    assert fused.activations < made.activations
    assert other == made
    products = generation_bytes(local(), load, kernels=Kernels(fused_products=True))
    assert made.activations - products.activations == 7 * 3 * 48 * 4
    matrices = [spec for spec in parameter_specs(MODEL) if len(spec.shape) == 2 and spec.name != "embedding.weight"]
    assert packed.weights == sum(spec.num_bytes for spec in matrices)
    floats = generation_bytes(local(), load, kernels=Kernels(generation_bytes=8))
    assert (floats.weights, floats.cache) == (2 * packed.weights, 2 * made.cache)


# ---------------------------------------------------------------- loads


def test_the_longest_rows_come_together():
    generation = GenerationConfig(max_new_tokens=4)
    actor = mfc(TRAIN, n_seqs=2, interface_impl="ppo_actor")
    two = load_of(actor, place("d1"), ROWS, generation=generation, n_responses=3)
    assert two.n_tokens == 3 * (9 + 5 + 2 * 4)
    assert two.n_scored == 2 * 3 * 4
    plain = load_of(mfc(TRAIN, n_seqs=4), place("d2"), ROWS, generation=generation, n_responses=0)
    assert (plain.n_seqs, plain.n_tokens, plain.n_scored) == (2, 31, 31)
    again = load_of(mfc(TRAIN, n_seqs=5), place("d1"), ROWS, generation=generation, n_responses=0)
    assert again.n_tokens == 37 + 20 + 11


@pytest.mark.parametrize(("name", "n_responses", "n_scored"), [("sft", 0, 20), ("mine", 0, 37), ("mine", 1, 29)])
def test_interfaces_of_users_may_score_every_token(name, n_responses, n_scored):
    made = mfc(TRAIN, n_seqs=3, interface_impl=name, input_keys=("input_ids", "prompt_mask"))
    found = load_of(made, place("d1"), ROWS, generation=GenerationConfig(max_new_tokens=4), n_responses=n_responses)
    assert found.n_scored == n_scored <= found.n_tokens


def test_the_answers_of_kto_are_computed_one_after_the_other():
    rows = RowLengths([5, 3], [20, 14], [11, 8], n_sequences=2)
    kto, other = (
        load_of(
            mfc(TRAIN, n_seqs=2, interface_impl=name), place("d1"), rows, generation=GenerationConfig(), n_responses=0
        )
        for name in ("kto", "dpo")
    )
    assert (kto.n_tokens, kto.n_scored, kto.n_sequences, kto.n_held) == (19, 11, 1, 34)
    assert (other.n_tokens, other.n_scored, other.n_sequences, other.n_held) == (34, 18, 2, 34)


def test_micro_batches():
    generation = GenerationConfig(max_new_tokens=4)

    def tokens(text="d1", **changes):
        made = load_of(mfc(TRAIN, n_seqs=3, **changes), place(text), ROWS, generation=generation, n_responses=0)
        return made.n_mbs, made.n_tokens

    assert tokens() == (1, 37)
    assert tokens(n_mbs=2) == (2, 31)  # the longest rows may come together, and none is cut
    assert tokens(n_mbs=9) == (3, 20)  # no more than there are samples
    assert tokens(max_tokens_per_mb=25) == (2, 25)
    assert tokens(max_tokens_per_mb=5) == (2, 20)
    assert tokens(n_minibatches=3) == (1, 20)
    assert tokens("p2") == (3, 20)  # a pipeline is kept busy: 4, as far as there are samples
    for kind, expected in ((TRAIN, 4), (INFERENCE, 2)):
        made = load_of(mfc(kind, n_seqs=9), place("p2"), ROWS, generation=generation, n_responses=0)
        assert made.n_mbs == expected


def test_generation_is_divided_over_stages_and_bounded():
    generation = GenerationConfig(max_new_tokens=4, max_batch_size=6)
    alone = load_of(mfc(GENERATE, n_seqs=3), place("d1"), ROWS, generation=generation, n_responses=4)
    assert (alone.n_runs, alone.n_rows, alone.longest_row, alone.prefill_tokens) == (1, 6, 12, 14)
    staged = load_of(mfc(GENERATE, n_seqs=3), place("p2"), ROWS, generation=generation, n_responses=1)
    assert (staged.n_runs, staged.n_rows) == (2, 2)


# ---------------------------------------------------------------- the plan


@given(STRATEGIES, STRATEGIES, st.booleans(), st.sampled_from([GENERATE, INFERENCE]))
def test_invariants(home, elsewhere, trained, kind):
    roles = {"actor": role(home, is_trained=trained)}
    hooks = CallHooks((Realloc("actor", place(home), "actor", place(elsewhere)),) if home != elsewhere else ())
    load = Load(4, 64, 16, n_runs=1, n_rows=4, longest_row=9, prefill_tokens=16)
    calls = [call(kind, elsewhere, name="use", hooks=hooks, load=load)]
    if trained:
        calls.append(call(TRAIN, home, name="train", load=load))
    plan = plan_memory(roles, calls, rows_bytes=77, runtime_bytes={0: 5})
    assert plan == plan_memory(roles, calls, rows_bytes=77, runtime_bytes={0: 5})
    for one in calls:
        assert set(plan.calls[one.name]) == set(one.allocation.ranks)
        for rank, usage in plan.calls[one.name].items():
            parts = (usage.parameters, usage.optimizer, usage.gradients, usage.copies, usage.cache, usage.activations)
            assert min(parts) >= 0
            assert usage.rows == 77
            assert usage.total == sum(parts) + 77 + (5 if rank == 0 else 0)
            kept = plan.roles["actor"].get(rank, Usage())
            assert (usage.parameters, usage.optimizer) == (kept.parameters, kept.optimizer)
            assert plan.peak(rank)[1].total >= usage.total
    layout = place(home)
    replica = [plan.roles["actor"][rank] for rank in layout.dp_group_members(0)]
    assert sum(usage.parameters for usage in replica) >= N_BYTES
    if layout.strategy.tp <= MODEL.n_kv_heads:
        replicated = sum(s.num_bytes for s in parameter_specs(MODEL) if s.sharded_dim is None)
        assert sum(u.parameters for u in replica) <= N_BYTES + (layout.strategy.tp - 1) * replicated


def test_only_trained_roles_have_an_optimizer():
    roles = {"actor": role(), "ref": role(is_trained=False)}
    plan = plan_memory(roles, [call(TRAIN), call(INFERENCE, name="inf", of="ref")])
    during = plan.calls["call"][0]
    assert (during.parameters, during.optimizer, during.gradients > 0) == (2 * N_BYTES, 2 * N_BYTES, True)
    assert plan.calls["inf"][0].gradients == 0
    assert plan.roles["ref"][0] == Usage(parameters=N_BYTES)


def test_adapters_alone_are_trained():
    model = replace(MODEL, lora=LoRA(2, 1.0, ("q",)))
    n_adapters = 4 * 2 * (32 + 32)
    kept = plan_memory({"actor": role(model=model)}, [call(TRAIN)]).roles["actor"][0]
    assert kept == Usage(parameters=N_BYTES + 4 * n_adapters, optimizer=8 * n_adapters, gradients=4 * n_adapters)


def test_zero_and_offload_of_the_optimizer():
    [plain] = {*plan_memory({"actor": role("d2")}, [call(TRAIN, "d2")]).roles["actor"].values()}
    [shared] = {*plan_memory({"actor": role("d2", zero_stage=1)}, [call(TRAIN, "d2")]).roles["actor"].values()}
    n_vectors = sum(len(spec.shape) == 1 for spec in parameter_specs(MODEL))  # 32 elements, all on the first rank
    assert shared.optimizer == plain.optimizer / 2 + 8 * 16 * n_vectors
    [away] = {*plan_memory({"actor": role("d2", offloads_optimizer=True)}, [call(TRAIN, "d2")]).roles["actor"].values()}
    assert (away.optimizer, away.host) == (0, plain.optimizer + N_BYTES)  # with masters of their own
    gathered = plan_memory({"actor": role("d2", backend="deepspeed", zero_stage=3)}, [call(TRAIN, "d2")])
    usage = gathered.calls["call"][0]
    assert (usage.parameters, usage.copies) == (N_BYTES // 2, N_BYTES // 2)


def test_a_role_is_away_from_its_last_call_to_its_next():
    roles = {"actor": role(), "ref": role(is_trained=False)}
    offload = CallHooks(after=(Offload("ref", place("d1")),))
    calls = [
        call(GENERATE, name="gen", load=Load(1, n_runs=1, n_rows=1, longest_row=2, prefill_tokens=1)),
        call(INFERENCE, name="inf", of="ref", hooks=offload),
        call(TRAIN, name="train"),
    ]
    plan = plan_memory(roles, calls)
    found = {
        name: (by_rank[0].parameters // N_BYTES, by_rank[0].host // N_BYTES) for name, by_rank in plan.calls.items()
    }
    # the copy in host memory of what never changes stays there
    # the first generation has both on the device, where all parameters begin, and no copy yet
    assert found == {"gen": (2, 0), "inf": (2, 1), "train": (1, 1)}


@pytest.mark.parametrize("backend", ["native", "deepspeed"])
def test_a_call_elsewhere_holds_what_it_lacks_and_a_copy_only_of_what_cannot_move(backend):
    roles = {"actor": replace(role("t2"), backend=backend)}
    hooks = CallHooks((Realloc("actor", place("t2"), "actor", place("d2")),))
    usage = plan_memory(roles, [call(INFERENCE, "d2", hooks=hooks)]).calls["call"][0]
    replicated = sum(spec.num_bytes for spec in parameter_specs(MODEL) if spec.sharded_dim is None)
    lacking = (N_BYTES - replicated) // 2
    new = lacking if backend == "native" else 2 * lacking
    assert usage.copies == new + max(0, 2 * lacking - usage.activations)  # messages are gone when it computes
    nested = CallHooks((Realloc("actor", place("d2"), "actor", place("t2")),))
    alias = plan_memory({"actor": role("d2")}, [call(INFERENCE, "t2", hooks=nested)]).calls["call"][0]
    assert alias.copies == 0


def test_gradients_and_activations_of_one_micro_batch_are_not_there_together():
    few = plan_memory({"actor": role()}, [call(TRAIN, load=Load(1, 1, 1))]).calls["call"][0]
    assert (few.gradients, few.activations) == (N_BYTES, ROW)
    many = plan_memory({"actor": role()}, [call(TRAIN, load=Load(1, 10_000, 1))]).calls["call"][0]
    assert many.activations > 10_000 * 4 * kept_by_block(local(), 0, Kernels()) > many.gradients
    two = plan_memory({"actor": role()}, [call(TRAIN, load=Load(2, 10_000, 1, n_mbs=2))]).calls["call"][0]
    assert two.gradients == N_BYTES
    assert two.activations >= many.activations


def test_calls_without_a_model_take_nothing():
    plan = plan_memory({"actor": role()}, [call(INFERENCE, of="reward", name="rew")])
    assert plan.calls["rew"][0] == Usage(parameters=N_BYTES, optimizer=2 * N_BYTES)
    with pytest.raises(KeyError):
        plan.peak(1)


@given(STRATEGIES, st.booleans(), st.booleans(), st.sampled_from([("native", 0), ("native", 1), ("megatron", 1)]))
def test_saves(home, is_repeated, is_staged, way):
    actor = replace(role(home), is_changed=True, backend=way[0], zero_stage=way[1])
    calls = [call(TRAIN, home)]
    plan = plan_memory({"actor": actor}, calls, rows_bytes=5, saves=Saves(is_staged, is_repeated))
    without = plan_memory({"actor": actor}, calls, rows_bytes=5)
    during, train, layout = plan.calls[SAVE], plan.calls["call"], place(home)
    stage = 2 * SAVE_STAGE if is_staged else 0
    is_shared = way[0] == "megatron" or (way[1] and layout.strategy.dp > 1)
    for rank in layout.ranks:
        kept = plan.roles["actor"][rank]
        assert (during[rank].parameters, during[rank].optimizer) == (kept.parameters, kept.optimizer)
        assert (during[rank].copies > 0) == bool(is_shared or (layout.strategy.tp > 1 and rank in tp_firsts(layout)))
        copies = during[rank].host - stage
        assert copies == 0 or rank in layout.dp_group_members(0)
        assert train[rank].host == (copies if is_repeated else 0)
        assert replace(train[rank], host=0) == without.calls["call"][rank]
    if (is_repeated or is_staged) and layout.strategy.tp <= MODEL.n_kv_heads:
        replicated = sum(s.num_bytes for s in parameter_specs(MODEL) if s.sharded_dim is None)
        copies = sum(usage.host - stage for usage in during.values())
        assert 0 <= copies - checkpoint_bytes(actor) <= 2 * (layout.strategy.tp - 1) * replicated


def tp_firsts(layout):
    """Ranks of the first replica that gather what their tensor-parallel group shares."""
    places = {rank: layout.strategy.coordinates(layout.ranks.index(rank)) for rank in layout.ranks}
    return {rank for rank, (_, dp_rank, tp_rank) in places.items() if not dp_rank and not tp_rank}


def test_the_last_save_of_a_cpu_needs_no_copies():
    saves = Saves(is_staged=False, is_repeated=False)
    plan = plan_memory({"actor": replace(role(), is_changed=True)}, [call(TRAIN)], saves=saves)
    assert plan.calls[SAVE][0] == Usage(parameters=N_BYTES, optimizer=2 * N_BYTES)
    assert SAVE not in plan_memory({"actor": role()}, [call(TRAIN)]).calls


def test_the_last_save_of_a_cpu_copies_roles_in_turn():
    kernels, saves = Kernels(on_host=True), Saves(is_staged=False, is_repeated=False)
    changed = {"is_changed": True, "backend": "megatron", "zero_stage": 1}
    roles = {name: replace(role("d2"), **changed) for name in ("actor", "critic")}
    first, both = (
        plan_memory(dict(some), [call(TRAIN, "d2")], kernels=kernels, saves=saves)
        for some in (list(roles.items())[:1], roles.items())
    )
    own, all_roles = (sum(plan.roles[name][0].total for name in plan.roles) for plan in (first, both))
    usage, other = first.calls[SAVE][0], both.calls[SAVE][0]
    # what is gathered of an optimizer's state is gone when the model is copied, which takes more
    assert (usage.copies, usage.host) == (0, 3 * N_BYTES)
    assert (other.copies, other.host) == (0, 2 * 3 * N_BYTES)
    assert other.total - usage.total == all_roles - own
    # the rank of the other replica copies nothing
    assert (first.calls[SAVE][1].copies, first.calls[SAVE][1].host) == (2 * TABLE, 0)
    repeated = plan_memory(roles, [call(TRAIN, "d2")], kernels=kernels, saves=Saves(is_staged=False)).calls[SAVE][0]
    assert (repeated.copies, repeated.host) == (2 * TABLE, other.host)


def test_a_save_brings_one_role_back_at_a_time():
    roles = {name: replace(role(is_trained=False), is_changed=True) for name in ("a", "b")}
    away = CallHooks(after=(Offload("a", place("d1")), Offload("b", place("d1"))))
    plan = plan_memory(roles, [call(INFERENCE, of="a", hooks=away)], saves=Saves(is_staged=False))
    usage = plan.calls[SAVE][0]
    assert (usage.parameters, usage.host) == (N_BYTES, N_BYTES + 2 * N_BYTES + TABLE)  # which leaves as the last
    frozen = {name: replace(one, is_changed=False) for name, one in roles.items()}
    assert plan_memory(frozen, [call(INFERENCE, of="a", hooks=away)], saves=Saves()).calls[SAVE][0].parameters == 0


def test_averages_in_half_precision_have_masters():
    half = {"model": replace(MODEL, dtype="bfloat16"), "is_trained": False, "is_changed": True}
    roles = {"ref": role(**half), "ema": role(**half, is_averaged=True)}
    plan = plan_memory(roles, [call(InterfaceType.INFERENCE, of="ema")])
    n_bytes = plan.roles["ref"][0].parameters
    assert plan.roles["ema"][0] == Usage(parameters=3 * n_bytes)
    assert plan.calls["call"][0].parameters == 4 * n_bytes
    assert checkpoint_bytes(roles["ema"]) == 3 * checkpoint_bytes(roles["ref"])


def test_checkpoints():
    assert checkpoint_bytes(role()) == 3 * N_BYTES
    assert checkpoint_bytes(role(is_trained=False)) == N_BYTES


def test_sizes_are_readable():
    assert [show_bytes(n) for n in (0, 999, 1500, 2_500_000, 80_000_000_000)] == [
        "0 B", "999 B", "1.5 kB", "2.5 MB", "80.0 GB",
    ]  # fmt: skip


# ---------------------------------------------------------------- overlap


@pytest.mark.parametrize(("other", "kept"), [("d4", 1 / 2), ("t4", 0.0)])
def test_parameters_that_stay_hold_what_the_home_leaves_for_another_call(other, kept):
    """The home has halves, the call that stays a quarter: new on two ranks, a part of the home's half on the others.

    The home moves into the memory of whole parameters, and that call keeps all of the half.
    """
    roles = {"ref": role("d2t2", is_trained=False)}
    calls = []
    for name, layout in (("first", "t4"), ("second", other)):
        hooks = CallHooks((Realloc("ref", place("d2t2"), "ref", place(layout)),))
        calls.append(call(INFERENCE, layout, name=name, of="ref", hooks=hooks))
    memory = plan_memory(roles, calls)
    split = sum(spec.num_bytes for spec in parameter_specs(MODEL) if spec.sharded_dim is not None)
    capacity = max(memory.calls["second"][rank].total + n * split for rank, n in ((0, kept), (1, 1 / 4)))
    for room, is_enough in ((capacity, True), (capacity - 1, False)):
        overlap = plan_overlap(roles, calls, memory, capacity=room, is_host_memory=False, batches={})
        assert ("first" in overlap.resident) == is_enough
