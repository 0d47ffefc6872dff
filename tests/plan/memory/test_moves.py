"""Memory of reallocations: messages that need a copy, and tensors that move to make room."""

from __future__ import annotations

from dataclasses import replace

from realrl.mesh.notation import parse_allocation
from realrl.plan.hooks import CallHooks, Realloc
from realrl.plan.memory.cuts import CutModel
from realrl.plan.memory.load import Load
from realrl.plan.memory.model import plan_memory
from realrl.plan.memory.moves import Moves, lacking
from tests.plan.memory.examples import INFERENCE, MODEL, NODE, call, place, role


def test_large_slices_of_a_move_arrive_in_their_place():
    large = CutModel(replace(MODEL, vocab_size=1 << 15))  # embedding and head have 4 MB each
    found = lacking(large, place("d1"), parse_allocation("d1@0:1", NODE))
    assert found.received - found.buffered == 2 * (1 << 15) * 32 * 4
    cut = lacking(large, place("d1"), parse_allocation("t2@0:2-3", NODE))
    assert (cut.received - cut.buffered == (1 << 15) * 32 * 4).all()
    deep = CutModel(replace(MODEL, intermediate_size=1 << 15))  # the last matrix of an MLP is cut along the other dim
    (joined,) = lacking(deep, place("t2"), parse_allocation("d1@0:2", NODE)).buffered
    assert joined == sum(spec.num_bytes for spec in deep.specs if spec.num_bytes < 1 << 20 or "down" in spec.name)


def test_large_slices_of_a_move_leave_from_their_place():
    large, moves = CutModel(replace(MODEL, vocab_size=1 << 15)), Moves()  # embedding and head have 4 MB each
    all_bytes = sum(spec.num_bytes for spec in large.specs)
    whole = moves.sent(large, place("d1"), parse_allocation("d2@0:2-3", NODE))
    assert whole.messages(slice(0, 4), is_average=False).tolist() == [2 * (all_bytes - 2 * (1 << 15) * 32 * 4), 0, 0, 0]
    deep = CutModel(replace(MODEL, intermediate_size=1 << 15))
    cut = moves.sent(deep, place("d1"), parse_allocation("t2@0:2-3", NODE))
    twice = sum(spec.num_bytes for spec in deep.specs if spec.sharded_dim is None)
    once = sum(spec.num_bytes for spec in deep.specs if spec.sharded_dim is not None)
    in_place = sum(spec.num_bytes for spec in deep.specs if spec.num_bytes >= 1 << 21 and spec.sharded_dim == 0)
    assert cut.messages(slice(0, 1), is_average=False)[0] == 2 * twice + once - in_place
    many = CutModel(replace(MODEL, vocab_size=1 << 18))  # in several rounds, which cut slices anywhere
    assert (
        moves.sent(many, place("d1"), parse_allocation("d1@0:1", NODE)).messages(slice(0, 1), is_average=False) > 64e6
    )


def test_a_tensor_that_makes_room_for_the_slices_of_a_call_is_there_twice():
    model = replace(MODEL, vocab_size=1 << 15)
    large, ends = CutModel(model), 2 * (1 << 15) * 32 * 4
    home, there = place("t2"), place("d1")
    hook = Realloc("actor", home, "actor", there)
    small = call(INFERENCE, hooks=CallHooks(before=(hook,)), load=Load(1, 1))
    found = plan_memory({"actor": role("t2", model=model)}, [small]).calls["call"][0]
    new = lacking(large, home, there).received[0]
    computed = plan_memory({"actor": role(model=model)}, [replace(small, hooks=CallHooks())]).calls["call"][0]
    assert found.copies + found.activations == new + ends // 4  # the half of the embedding, and later computations
    assert computed.activations < ends // 4
