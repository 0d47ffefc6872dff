"""Words about a plan: why a call is where it is, why it is not elsewhere, and two plans side by side."""

from dataclasses import replace

import pytest

from realrl.errors import AllocationError, UsageError
from realrl.planner.compare import compare, micro_batches
from realrl.planner.evaluate import evaluate
from realrl.planner.explain import explain, explain_call, explanations, neighbours
from realrl.planner.why import why
from realrl.planner.words import Table, change_text, seconds_text, sentence
from tests.planner.cases import everywhere, request_for, with_critic_apart


@pytest.fixture(scope="module")
def request8():
    return request_for(devices=8)


@pytest.fixture(scope="module")
def apart(request8):
    return evaluate(request8, with_critic_apart(request8), name="apart")


@pytest.fixture(scope="module")
def pipelined(request8):
    settings = everywhere(request8, "d2t2p2s@0:0-7")
    return evaluate(request8, settings, name="pipelined")


def text_of(blocks):
    """All words of paragraphs and tables."""
    found = []
    for block in blocks:
        found += (
            [block]
            if isinstance(block, str)
            else [block.title, *block.columns, *(c for row in block.rows for c in row)]
        )
    return "\n".join(found)


def test_parts_add_up(request8, apart, pipelined):
    for found in (apart, pipelined):
        for one in explanations(request8, found):
            assert sum(one.parts.values()) == pytest.approx(one.times.run)
            assert all(seconds > 0 for seconds in one.parts.values())
    parts = {one.call: one.parts for one in explanations(request8, pipelined)}
    assert "stages that wait for others" in parts["actor_train"]
    assert "tensor-parallel messages" in parts["actor_gen"]
    assert "optimizer" in parts["critic_train"]
    assert not any("optimizer" in parts[name] for name in ("actor_gen", "ref_inf"))
    assert "judging responses" in parts["rew_inf"]
    plain = {one.call: one.parts for one in explanations(request8, apart)}
    assert not any("stages" in part or "tensor" in part for own in plain.values() for part in own)


def test_every_call_is_explained(request8, apart):
    told = text_of(explain(request8, apart))
    for name in apart.settings.allocations:
        assert name in told
    assert "none; it bounds" in told
    assert "longer would cost nothing" in told


def test_a_call_is_explained_with_its_neighbours(request8, apart):
    blocks = explain_call(request8, apart, "critic_train")
    places = blocks[-2]
    assert isinstance(places, Table)
    assert {"another strategy", "fewer devices", "more devices"} <= {row[0] for row in places.rows}
    assert len({row[1] for row in places.rows}) == len(places.rows)
    assert {"ZeRO 1", "with checkpointing", "optimizer on the host"} <= {row[1] for row in places.rows}
    assert "critic_train" in blocks[0]
    assert "d4t1p1@0:4-7" in blocks[0]
    planned = {change for _, change, _ in neighbours(apart, request8, "critic_train")}
    assert planned == {row[1] for row in places.rows}
    assert "d4t1p1@0:4-7" not in planned


def test_nearest_meshes_nest_with_those_of_other_calls():
    request = request_for("n_seqs=256", devices=64)
    settings = everywhere(request, "d64@0-7")
    places = {**settings.allocations, "actor_train": "d4t2p2s@0-1", "critic_train": "d16@2-3", "ref_inf": "d8t4s@4-7"}
    found = evaluate(request, replace(settings, allocations=places))
    near = {what: change for what, change, _ in neighbours(found, request, "actor_train") if "devices" in what}
    assert near == {"fewer devices": "d2t2p2s@0:0-7", "more devices": "d8t2p2s@0-3"}
    near = {what: change for what, change, _ in neighbours(found, request, "ref_inf") if "devices" in what}
    assert near == {"fewer devices": "d6t4p1s@4-6", "more devices": "d12t4p1s@2-7"}


def test_why_costs(request8, apart):
    blocks = why(request8, apart, "critic_train=d4@0:0-3")
    told = text_of(blocks)
    assert "and everything else as it is, a step would take" in told
    assert "then by" in told
    assert any(isinstance(block, Table) for block in blocks)
    assert "has d4t1p1@0:4-7 in this plan" in text_of(why(request8, apart, "critic_train=d4"))


def test_why_breaks_a_rule(request8, apart):
    assert "d3 needs" not in text_of(why(request8, apart, "critic_train=d3@0:0-2"))
    assert "inside a node a mesh has 1, 2, 4, 8" in text_of(why(request8, apart, "critic_train=d3@0:0-2"))
    assert "breaks a rule" in text_of(why(request8, apart, "actor_gen=t8@0:0-7"))
    for nonsense in ("critic_train=x4@0:0-3", "critic_train=", "critic_train=d4@here"):
        with pytest.raises(AllocationError, match="is not a"):
            why(request8, apart, nonsense)
    with pytest.raises(UsageError, match=r"there is no call 'critic_trian'[\s\S]*critic_train"):
        why(request8, apart, "critic_trian=d4@0:0-3")


def test_why_lacks_memory(apart):
    small = request_for(devices=8, memory_bytes=30_000_000)
    best = evaluate(small, apart.settings)
    told = text_of(why(small, best, "critic_train=d1@0:4-4"))
    assert "memory is too small" in told or "breaks a rule" in told


def test_why_with_the_rest_searched_again(request8, apart):
    def search(request):
        assert request.config.allocation.calls == {"critic_train": "d4t1p1@0:0-3"}
        return evaluate(request8, everywhere(request8, "d4@0:0-3"))

    told = text_of(why(request8, apart, "critic_train=d4@0:0-3", search=search))
    assert "moving critic_inf to d4t1p1@0:0-3" in told

    def nothing(request):
        raise AllocationError("nothing fits")

    assert "no plan is found: nothing fits." in text_of(why(request8, apart, "critic_train=d4@0:0-3", search=nothing))


def test_compare(apart, pipelined):
    blocks = compare(apart, pipelined)
    told = text_of(blocks)
    assert "times as fast as" in blocks[0]
    assert "allocation.calls.critic_train\nd4t1p1@0:4-7\nd2t2p2s@0:0-7" in told
    assert "what bounds the period" in told
    same = compare(apart, apart)
    assert same[0] == "Both take the same time."
    assert "Their settings are the same." in same
    assert "apart (the first)" in text_of(same)


def test_compare_shows_the_micro_batches_that_a_strategy_has(request8, pipelined):
    fewer = evaluate(request8, replace(pipelined.settings, n_mbs={"actor_train": 2}), name="fewer")
    assert "calls.actor_train.n_mbs\n4\n2" in text_of(compare(pipelined, fewer))
    by_tokens = request_for("max_tokens_per_mb=64", devices=8)
    usual = evaluate(by_tokens, everywhere(by_tokens, "d8t1p1@0:0-7"))
    assert micro_batches(usual, "actor_train") == "as many as 64 tokens each give"


def test_figures():
    shown = {0.0: "0 s", 12.345: "12.3 s", 1234.5: "1,234 s", 0.01234: "12.3 ms", 1.5e-5: "15 us"}
    assert {seconds: seconds_text(seconds) for seconds in shown} == shown
    assert [sentence(words) for words in ("a", "a.", "a?")] == ["a.", "a.", "a?"]
    assert change_text(11.0, 10.0) == "11 s (+10.0%)"
    assert change_text(10.0, 10.0) == "10 s (same)"
