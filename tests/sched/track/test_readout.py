"""Reading of finished samples: which keys, and from whom."""

from __future__ import annotations

from realrl.config.schema import SaveConfig
from realrl.graph.build import build_graph
from realrl.graph.mfc import InterfaceType, MFCDef
from realrl.sched.events import SampleContents
from realrl.sched.messages import SamplesRead
from realrl.sched.track.readout import (
    NO_READOUT,
    Readout,
    SampleReader,
    about_others,
    generating,
    plan_readout,
    plan_reads,
)

GENERATE, INFERENCE = InterfaceType.GENERATE, InterfaceType.INFERENCE
TOKENS = ("input_ids", "prompt_mask")


class Held:
    """Rows of samples on ranks."""

    def __init__(self, **held: dict[str, set[int]]) -> None:
        self._held = held

    def number_keys(self) -> list[str]:
        return sorted(key for key in self._held if key not in (*TOKENS, "metadata"))

    def holders(self, key: str, sample_id: str) -> frozenset[int]:
        return frozenset(self._held.get(key, {}).get(sample_id, ()))


def test_every_row_is_asked_of_one_rank_that_has_it() -> None:
    held = Held(
        input_ids={"a": {1, 2}, "b": {3}},
        prompt_mask={"a": {2, 5}, "b": {3}},
        rewards={"a": {0, 2}, "b": {4, 5}},
        truncated={"a": {1}, "b": {3}},
    )
    assert plan_reads(held, Readout({"": "actor"}, {"": "gen"}), ["a", "b"]) == {
        1: ({}, {"truncated": ("a",)}, ()),
        2: ({"": ("a",)}, {"rewards": ("a",)}, ()),
        3: ({"": ("b",)}, {"truncated": ("b",)}, ()),
        4: ({}, {"rewards": ("b",)}, ()),
    }


def test_rows_are_read_where_responses_are_written() -> None:
    tokens = {"a": {1}, "b": {2}}
    held = Held(input_ids=tokens, prompt_mask=tokens, metadata={"a": {0, 1}, "b": {0}})
    readout = Readout({"": "actor"}, {"": "gen"}, is_written=True)
    assert plan_reads(held, readout, ["a", "b"]) == {
        0: ({}, {}, ("b",)), 1: ({"": ("a",)}, {}, ("a",)), 2: ({"": ("b",)}, {}, ()),
    }  # fmt: skip


def test_notes_stay_with_their_sample_until_it_is_read_or_freed() -> None:
    reader = SampleReader(Readout(is_written=True))
    reader.note({"advantage": {"a": (1.0, 2.0), "b": (3.0,), "c": (4.0,)}})
    reader.note({"reward_parts/x": {"a": (0.5, 0.25)}})
    reader.forget(["b"])
    reader.expect(1, {"a": 0, "b": 1}, {"a": {}, "b": {}})
    reader.forget(["a"])
    reader.asked(1, 0, seq=1)
    reader.add(SamplesRead(0, 1, 1, {}, rows={"b": '{"n":1}'}))
    reader.close(1)
    assert reader.take() == [
        (1, (SampleContents("a", {}, {}, {"advantage": (1.0, 2.0), "reward_parts/x": (0.5, 0.25)}),
             SampleContents("b", {}, {}, {}, '{"n":1}'))),
    ]  # fmt: skip
    silent = SampleReader(Readout())
    silent.note({"advantage": {"a": (1.0,)}})
    silent.expect(1, {"a": 0}, {"a": {}})
    silent.close(1)
    assert silent.take() == [(1, (SampleContents("a", {}, {}),))]


def test_the_first_samples_of_every_second_step_are_wanted() -> None:
    reader = SampleReader(Readout({"": "actor"}, {"": "gen"}, every_steps=2, n_samples=2))
    places = {"a": (0, 0), "b": (1, 1), "c": (1, 2), "d": (1, 0), "e": (2, 0)}
    assert reader.select(places, first_step=3) == {4: {"b": 1, "d": 0}}
    every = SampleReader(Readout({"": "actor"}, {"": "gen"}))
    assert every.select(places, first_step=1) == {1: {"a": 0}, 2: {"b": 1, "c": 2, "d": 0}, 3: {"e": 0}}


def test_a_step_is_reported_once_when_it_is_complete_and_read() -> None:
    reader = SampleReader(Readout())
    for step, rank in ((1, 0), (1, 1), (2, 0)):
        reader.expect(step, {f"{step}{rank}": 1 - rank}, {f"{step}{rank}": {"gen": step}})
        reader.asked(step, rank, seq=step)
    reader.add(SamplesRead(0, 2, 2, {"rewards": {"20": (1.0,)}}))
    reader.close(1)
    reader.close(2)
    assert reader.take() == []
    reader.add(SamplesRead(1, 1, 1, {"rewards": {"11": (2.0,)}}))
    assert (reader.take(), reader.is_idle) == ([], False)
    last = SamplesRead(0, 1, 1, {"truncated": {"10": (True,)}, "rewards": {"10": (0.5,)}})
    reader.add(last)
    assert reader.take() == [
        (1, (SampleContents("11", {"gen": 1}, {"rewards": (2.0,)}),
             SampleContents("10", {"gen": 1}, {"rewards": (0.5,), "truncated": (True,)}))),
        (2, (SampleContents("20", {"gen": 2}, {"rewards": (1.0,)}),)),
    ]  # fmt: skip
    assert reader.is_idle
    reader.close(3)  # nothing of it was wanted
    assert reader.is_idle


def test_numbers_of_chosen_sequences_are_known() -> None:
    calls = [
        MFCDef("gen", "actor", GENERATE, "x", ("prompt_ids",), TOKENS, n_seqs=4),
        MFCDef("judge", "judge", INFERENCE, "x", TOKENS, ("rewards",), n_seqs=4),
        MFCDef("choose", "judge", INFERENCE, "x", (*TOKENS, "rewards"), ("best_ids", "weights"), n_seqs=4,
               output_key_remap={"input_ids": "best_ids"}),
        MFCDef("again", "judge", INFERENCE, "x", ("best_ids",), ("scores",), n_seqs=4),
    ]  # fmt: skip
    assert about_others(build_graph(calls, ["prompt_ids"])) == {"best_ids", "weights", "scores"}


def test_generate_calls_are_found_with_their_prefix() -> None:
    other = {key: f"other_{key}" for key in TOKENS}
    calls = [
        MFCDef("gen", "actor", GENERATE, "x", ("prompt_ids",), TOKENS, n_seqs=4),
        MFCDef("gen2", "other", GENERATE, "x", ("prompt_ids",), tuple(other.values()), n_seqs=4,
               output_key_remap=other),
        MFCDef("ids", "actor", GENERATE, "x", ("prompt_ids",), ("third_input_ids",), n_seqs=4),
    ]  # fmt: skip
    graph = build_graph(calls, ["prompt_ids"])
    assert generating(graph) == ({"": "actor", "other_": "other"}, {"": "gen", "other_": "gen2"})
    readout = plan_readout(graph, SaveConfig(n_generations=3, generations_every_steps=2))
    assert (readout.every_steps, readout.n_samples) == (2, 3)
    assert plan_readout(graph, SaveConfig(n_generations=0)) == NO_READOUT
    nothing = build_graph([MFCDef("inf", "a", INFERENCE, "x", ("x",), ("y",), n_seqs=1)], ["x"])
    assert plan_readout(nothing, SaveConfig()) == NO_READOUT
