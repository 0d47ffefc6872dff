"""Samples of a page: chosen well, and cut to fit."""

import json

from realrl.report.samples import choose_samples, prompt_key, score_of, shown_samples
from tests.report.folders import NASTY, sample


def test_few_are_all_kept_in_order():
    rows = [sample(3), sample(1, index=1), sample(1), {"step": 2}, {"prompt": "x"}, sample(2)]
    assert choose_samples(rows, 10) == [rows[2], rows[1], rows[5], rows[0]], "without a step or a text there is none"


def test_of_many_the_best_the_worst_and_some_of_all_steps_are_chosen():
    rows = [
        sample(step, f"prompt {step} {i}", reward=(step * 37 + i * 11) % 1000)
        for step in range(1, 501)
        for i in range(4)
    ]
    chosen = choose_samples(rows, 60)
    rewards = sorted(row["rewards"] for row in rows)
    ours = sorted(row["rewards"] for row in chosen)
    assert len(chosen) == 60
    assert ours[:9] == rewards[:9]
    assert ours[-9:] == rewards[-9:]
    assert len({row["step"] // 50 for row in chosen}) >= 10
    assert chosen == choose_samples(rows, 60)
    assert chosen == sorted(chosen, key=lambda row: row["step"])


def test_prompts_that_come_again_are_chosen_at_several_steps():
    rows = [sample(step, f"once {step} {i}") for step in range(1, 301) for i in range(3)]
    rows += [sample(step, "again", str(step), reward=step) for step in (5, 100, 200, 290)]
    found = [row["step"] for row in choose_samples(rows, 40) if row["prompt"] == "again"]
    assert found == [5, 100, 200, 290]


def test_messages_keep_their_order():
    said = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "calc"},
            {"role": "tool", "content": "2"}, {"role": "assistant", "content": "It is 2."}]  # fmt: skip
    rows = [{"step": 1, "messages": said, "reward": {"parts": 1}, "rewards": 0.5, "parts": {"a": 0.25, "b": {"c": 1}}}]
    [shown] = shown_samples(rows, 10_000)
    assert [who for who, _ in shown["turns"]] == ["user", "assistant", "tool", "assistant"]
    assert shown["score"] == 0.5
    assert shown["fields"] == {"reward.parts": 1, "rewards": 0.5, "parts.a": 0.25}
    assert shown["row"] == {}
    other = {"step": 2, "messages": [*said[:1], {"role": "assistant", "content": "3"}]}
    assert prompt_key(rows[0]) == prompt_key(other)
    prompt_as_messages = {"step": 1, "prompt": said[:1], "response": "2"}
    [shown] = shown_samples([prompt_as_messages], 10_000)
    assert shown["turns"] == [["user", "1 + 1?"], ["response", "2"]]


def test_the_mean_of_all_responses_to_a_prompt_is_told():
    rows = [sample(1, reward=r, index=i) for i, r in enumerate((0.0, 1.0, 1.0, 1.0))] + [sample(2, reward=0.5)]
    assert [one["mean"] for one in shown_samples([rows[0], rows[4]], 10_000, rows)] == [[4, 0.75], [1, 0.5]]


def test_texts_are_cut_until_they_fit():
    rows = [sample(step, "p" * 50_000, "\u4e00" * 50_000) for step in range(1, 31)]
    shown = shown_samples(rows, 100_000)
    assert len(json.dumps(shown, ensure_ascii=False).encode()) <= 100_000
    assert "characters" in shown[0]["turns"][1][1]
    assert len({one["key"] for one in shown}) == 1


def test_odd_values():
    assert score_of({"rewards": True}) is None
    assert score_of({"rewards": float("nan"), "reward": 2}) == 2
    [shown] = shown_samples([{"step": 1, "prompt": 5, "response": NASTY, "x" * 500: 1, "truncated": True}], 10_000)
    assert shown["turns"] == [["response", NASTY]]
    assert max(map(len, shown["fields"])) < 150
    assert shown["fields"]["truncated"] is True
    many = [{"step": 1, "messages": [{"role": "user", "content": ["a", 1]}] * 99}]
    [shown] = shown_samples(many, 10_000)
    assert len(shown["turns"]) == 25
    assert shown["turns"][0] == ["user", '["a", 1]']


def test_lines_have_fields_of_their_rows():
    line = sample(1, row={"answer": "4", "tags": ["a"], "n": 2}, file="a.jsonl", row_id="7", long_fields=["essay"],
                  reward_parts={"math": 1.0, "length": -0.5}, advantage=0.25)  # fmt: skip
    [shown] = shown_samples([line], 10_000)
    assert shown["row"] == {"answer": "4", "tags": '["a"]', "n": "2"}
    assert shown["about"]["file"] == "a.jsonl"
    assert shown["fields"] == {"response_tokens": 3, "rewards": 1, "truncated": False, "reward_parts.math": 1,
                               "reward_parts.length": -0.5, "advantage": 0.25}  # fmt: skip
