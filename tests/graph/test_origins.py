"""Generate calls behind the sequences of others."""

from realrl.graph.mfc import InterfaceRef, InterfaceType, MFCDef
from realrl.graph.origins import origins

GENERATE, INFERENCE, TRAIN = InterfaceType.GENERATE, InterfaceType.INFERENCE, InterfaceType.TRAIN_STEP


def best_of(prefix: str) -> list[MFCDef]:
    """Generation, a call that keeps the best, one that keeps the best of these, training, and a number of it."""
    tokens, best, last = prefix + "input_ids", prefix + "best_ids", prefix + "last_ids"
    return [
        MFCDef("gen", "actor", GENERATE, "x", ("prompt_ids",), (tokens, prefix + "truncated"),
               output_key_remap={"input_ids": tokens, "truncated": prefix + "truncated"}),
        MFCDef("best", "judge", INFERENCE, "x", (tokens,), (best,), input_key_remap={tokens: "input_ids"},
               output_key_remap={"input_ids": best}),
        MFCDef("last", "judge", INFERENCE, "x", (best,), (last, prefix + "gap"),
               output_key_remap={"input_ids": last, "gap": prefix + "gap"}),
        MFCDef("train", "actor", TRAIN, "x", (last, "other"), input_key_remap={last: "input_ids"}),
        MFCDef("gap", "judge", INFERENCE, "x", (prefix + "gap",), ("g",)),
    ]  # fmt: skip


def test_all_calls_that_come_from_a_generation() -> None:
    for prefix in ("", "greedy_"):
        calls = best_of(prefix)
        for mfc in calls:
            assert origins(mfc, calls) == [(calls[0], prefix + "input_ids")], mfc.name
        given = [("best_ids", "input_ids"), ("last_ids", "input_ids"), ("gap", "gap")]
        given = [("input_ids", "input_ids"), ("truncated", "truncated"), *given]
        renamed = {key: mfc.own_name(key) for mfc in calls for key in mfc.output_key_remap.values()}
        assert renamed == {prefix + key: own for key, own in given}


def test_tokens_decide_where_there_are_some() -> None:
    greedy = MFCDef("greedy", "actor", GENERATE, InterfaceRef("x", {"greedy": True}), ("prompt_ids",), ("g_ids", "g"),
                    output_key_remap={"input_ids": "g_ids"})  # fmt: skip
    train = MFCDef("both", "actor", TRAIN, "x", ("g", "last_ids"), input_key_remap={"last_ids": "input_ids"})
    calls = [greedy, *best_of(""), train]
    assert [origin.call.name for origin in origins(train, calls)] == ["gen"]
    either = MFCDef("either", "judge", INFERENCE, "x", ("g", "gap"), ("e",))
    assert [origin.call.name for origin in origins(either, calls)] == ["greedy", "gen"]


def test_sequences_of_the_dataset_come_from_no_call() -> None:
    train = MFCDef("train", "actor", TRAIN, "x", ("input_ids", "prompt_mask"))
    assert origins(train, [train]) == []
